"""`bbnode data`: what data mean here and in the federation, and how it gets into a program."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from bbnode.cli.main import main
from bbnode.components.data.shared_schema import SchemaRefused, SharedSchema
from bbnode.daemon.artifacts.build import compile_module, record
from bbnode.daemon.network.agreeing import FILE_NAME
from bbnode.engine.peers.references import schemas_to_json
from bbnode.ir import keys
from bbnode.programs import FederatedTraining

PROGRAM = """from bbnode.programs import FederatedTraining


class Line(FederatedTraining):
    model = (2, 1)
    data = "bbnode.TableDataSource"
    loss = "mse"
    clients = 2
    evaluate = "clients"
"""
CONFIG = """[node]
name = "one"

[artifact]
module = "line.py:Line"
targets = ["client"]

[slots.data]
path = "own.csv"
label = "y"

[slots.held_out]
path = "own.csv"
label = "y"
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "line.py").write_text(PROGRAM)
    (tmp_path / "node.toml").write_text(CONFIG)
    rows = "\n".join(f"{at},{at / 2},{at / 4}" for at in range(20))
    (tmp_path / "own.csv").write_text(f"b,a,y\n{rows}\n")
    return tmp_path


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    code = main(["data", *arguments])
    found = capsys.readouterr()
    return code, found.out, found.err


def test_a_node_says_what_its_data_mean(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = said(capsys, "schema", "--json")
    found = json.loads(out)["slots"]
    assert code == 0
    assert [*found] == ["data", "held_out"]
    assert found["data"]["meaning"]["columns"] == ["b", "a"]
    assert found["data"]["digest"] == found["held_out"]["digest"]
    _, out, _ = said(capsys, "schema")
    assert "  column b: numbers\n  column a: numbers\n" in out
    code, _, err = said(capsys, "schema", "--set", "slots.data.path=none.csv")
    assert code
    assert "none.csv" in err


def test_what_was_agreed_goes_into_the_project_and_the_program(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = said(capsys, "agreed")
    assert code
    assert "no peer has said what its data mean" in err
    agreed = SharedSchema.declared({"columns": ["a", "b"], "label": "y"})
    state = json.loads(_paths(capsys))["state_dir"]
    Path(state).mkdir(parents=True, exist_ok=True)
    (Path(state) / FILE_NAME).write_text(
        json.dumps({"references": schemas_to_json({"client/data": agreed})})
    )
    said(capsys, "agreed", "--write", "pyproject.toml")
    tables = tomllib.loads((project / "pyproject.toml").read_text())["tool"]["bbnode"]["schema"]
    assert {slot: SharedSchema.declared(each) for slot, each in tables.items()} == {
        "data": agreed,
        "held_out": agreed,
    }
    before = compile_module("bbnode.programs:FederatedTraining", {"model": [2, 1], "loss": "mse"})
    model = compile_module("line.py:Line", {})
    stamped = {entry.key for entry in model.metadata_props}
    assert keys.SCHEMA_PREFIX + "held_out" in stamped
    # Of a program that comes with bbnode, the project is the current directory.
    assert keys.SCHEMA_PREFIX + "data" in {entry.key for entry in before.metadata_props}
    rows = (project / "own.csv").read_text().replace("b,a,y", "b,c,y")
    (project / "own.csv").write_text(rows)
    code, out, _ = said(capsys, "schema")
    assert code == 1
    assert "refused by the program: columns b, c; the federation has a, b" in out
    said(capsys, "forget")
    assert not (Path(state) / FILE_NAME).exists()


def _paths(capsys: pytest.CaptureFixture[str]) -> str:
    main(["paths", "--json"])
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[tool.bbnode.schema.data]\ncolums = []\n", "has no colums"),
        ("[tool.bbnode.schema]\ndata = 3\n", "a table for each slot"),
        ("[tool.bbnode\n", "pyproject.toml"),
    ],
)
def test_a_schema_that_is_none_is_refused_where_it_is_compiled(
    project: Path, text: str, why: str
) -> None:
    (project / "pyproject.toml").write_text(text)
    with pytest.raises(SchemaRefused, match=why):
        compile_module("line.py:Line", {})


def test_what_a_class_says_comes_before_its_project(project: Path) -> None:
    class Own(FederatedTraining):
        model = (2, 1)
        loss = "mse"
        schema = {"data": {"columns": ["x", "y"]}}  # noqa: RUF012

    found = {e.key: json.loads(e.value) for e in record(Own()).metadata_props
             if e.key.startswith(keys.SCHEMA_PREFIX)}  # fmt: skip
    assert found == {keys.SCHEMA_PREFIX + "data": {"columns": ["x", "y"]}}
