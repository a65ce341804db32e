"""`bbnode config` and `bbnode paths`: what a node would run with, and where its files are."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from bbnode.cli.main import main
from bbnode.ir import caps
from bbnode.transport.limits import TransportLimits


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BBNODE_NODE__LOG_LEVEL", "debug")
    file = tmp_path / "node.toml"
    file.write_text(
        '[node]\nname = "peer"\nstate_dir = "state"\n'
        '[artifact]\npath = "a.onnx"\ntargets = ["client"]\n'
    )
    return file


def test_show_says_what_was_given_and_where(node: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "show", "-c", str(node), "--origin", "--set", "limits.frames=3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        f'node.name = "peer"  # file {node}',
        f'node.state_dir = "state"  # file {node}',
        'node.log_level = "debug"  # environment',
        f'artifact.path = "a.onnx"  # file {node}',
        f'artifact.targets = ["client"]  # file {node}',
        "limits.frames = 3  # flags",
    ]


def test_show_as_json_with_all_keys(node: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "show", "-c", str(node), "--all", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["schema"], told["file"]) == ("bbnode/config/1", str(node))
    keys = {row["key"]: row for row in told["keys"]}
    assert keys["node.stop_grace_s"] == {
        "key": "node.stop_grace_s", "value": 5.0, "origin": "default",
    }  # fmt: skip
    assert keys["node.log_level"]["origin"] == "environment"


def test_show_of_a_file_that_is_wrong(node: Path, capsys: pytest.CaptureFixture[str]) -> None:
    node.write_text("[nod]\n")
    assert main(["config", "show", "-c", str(node)]) == 2
    assert "did you mean 'node'" in capsys.readouterr().err


def test_reference_is_what_init_prints(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "reference"]) == 0
    reference = capsys.readouterr().out
    assert main(["init", "--reference"]) == 0
    assert capsys.readouterr().out == reference
    assert "stop_grace_s = 5.0  (s)" in reference


@pytest.mark.parametrize(
    ("options", "page"),
    [
        (["--markdown"], "config.md"),
        (["--components", "--markdown"], "components-reference.md"),
        (["--api", "--markdown"], "python-reference.md"),
        (["--limits", "--markdown"], "limits.md"),
    ],
)
def test_the_pages_in_docs_are_printed(
    capsys: pytest.CaptureFixture[str], options: list[str], page: str
) -> None:
    assert main(["config", "reference", *options]) == 0
    docs = Path(__file__).parents[2] / "docs"
    assert capsys.readouterr().out == (docs / page).read_text("utf-8")


def test_a_reference_is_of_one_thing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "reference", "--api", "--components"]) == 2
    assert "give one of" in " ".join(capsys.readouterr().err.split())


def test_limits_are_one_page_or_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "reference", "--limits", "--markdown", "--json"]) == 2
    assert "give one of --json and --markdown" in " ".join(capsys.readouterr().err.split())


def test_limits_are_all_printed_with_unit_and_reason(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "reference", "--limits"]) == 0
    text = capsys.readouterr().out
    assert main(["config", "reference", "--limits", "--json"]) == 0
    limits = json.loads(capsys.readouterr().out)["limits"]
    assert all(each["unit"] and each["reason"] for each in limits)
    names = [(each["section"], each["name"]) for each in limits]
    assert len(set(names)) == len(names)
    for each in limits:
        assert f"  {each['name']} = " in text
    # From each of the places where bounds stand.
    assert {"max_depth", "authenticate_s", "frames_per_peer", "circuits"} <= {
        name.replace("max_composite_depth", "max_depth") for _, name in names
    }
    assert {cap.name for cap in caps.TABLE} == {
        name.lower()
        for name, value in vars(caps).items()
        if name.isupper() and isinstance(value, int | float)
    }
    bounds = {each.name for each in dataclasses.fields(TransportLimits) if each.type != "bool"}
    assert bounds <= {n for _, n in names}


def test_paths(node: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["paths", "-c", str(node), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    state_dir = node.parent / "state"
    assert told["state_dir"] == str(state_dir)
    assert told["identity"] == str(state_dir / "identity.key")
    assert main(["paths", "-c", str(node)]) == 0
    assert f"control_socket  {told['control_socket']}\n" in capsys.readouterr().out
