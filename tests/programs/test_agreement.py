"""Agreeing on a schema before the training: in the clear, and by secure sums."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bbnode.compiler import Compiler
from bbnode.components.data.shared_schema import SchemaRefused, SharedSchema
from bbnode.daemon.artifacts.schemas import with_statistics, write_project
from bbnode.dsl import BadArgument
from bbnode.ir.values import TRIGGER
from bbnode.programs import AgreeOnSchema
from bbnode.sim import Network

COLUMNS = ("age", "dose")


def run(folder: Path, program: AgreeOnSchema, *, orders: tuple[str, ...]) -> tuple[Any, Any, Any]:
    """Make a round; return its outputs, the network, and all values of the columns."""
    model = Compiler().bind_all(program.bindings()).compile(program.build())
    network = Network(keys=True)
    server = network.add("server", model, ["server"])
    rng, values = np.random.default_rng(3), []
    for at, order in enumerate(orders):
        rows = np.stack([rng.uniform(0, 80, 40 + at), rng.normal(2, 0.5, 40 + at)], 1)
        rows = np.round(rows, 3)
        values.append(rows)
        by_name = {"age": rows[:, 0], "dose": rows[:, 1]}
        label = [("bee", "cat", "ant")[(each + at) % (2 + (at == 1))] for each in range(40 + at)]
        names = order.split(",")
        lines = [",".join([*names, "label"])]
        lines += [
            ",".join([*(f"{by_name[name][row]}" for name in names), label[row]])
            for row in range(40 + at)
        ]
        path = folder / f"{at}.csv"
        path.write_text("\n".join(lines) + "\n")
        of = {"path": str(path), "standardize": "federated",
              "statistics": str(folder / f"{at}.json")}  # fmt: skip
        network.add(f"client-{at}", model, ["client"], config={"data": of})
    execution = server.invoke("server", {"tick": TRIGGER})
    network.run_until_idle()
    assert not [failure for node in network.nodes for failure in node.failures()]
    return server.outputs(execution), network, np.concatenate(values)


def test_names_are_united_and_statistics_are_those_of_all(tmp_path: Path) -> None:
    program = AgreeOnSchema(clients=3, quorum=3, data="bbnode.TableDataSource")
    orders = ("age,dose", "dose,age", "age,dose")
    found, network, values = run(tmp_path, program, orders=orders)
    assert found["mean"] == pytest.approx(values.mean(axis=0))
    assert found["std"] == pytest.approx(values.std(axis=0))
    kept = network["server"].agreement.references.kept["client/data"]
    assert kept.places == COLUMNS
    assert kept.classes == ("bee", "cat", "ant")
    written = json.loads((tmp_path / "1.json").read_text())
    assert written["columns"] == [*COLUMNS]
    # What was agreed becomes a part of the project, and of a program that is compiled there.
    project = tmp_path / "pyproject.toml"
    project.write_text('[project]\nname = "x"  # mine\n\n[tool.bbnode.schema.data]\ncolumns = []\n'
                       '\n[tool.other]\nx = 1\n')  # fmt: skip
    scaled = with_statistics(kept, tmp_path / "1.json")
    write_project(project, {"data": scaled})
    text = project.read_text()
    assert 'name = "x"  # mine' in text
    tables = tomllib.loads(text)
    assert tables["tool"]["other"] == {"x": 1}
    assert SharedSchema.declared(tables["tool"]["bbnode"]["schema"]["data"]) == scaled
    write_project(project, {"data": scaled})
    assert project.read_text() == text
    assert scaled.scaling is not None
    assert scaled.scaling.mean == pytest.approx(values.mean(axis=0))
    # A source that takes the federation's scaling needs no statistics of its own any more.
    source = network["client-2"].component("data")
    source.forget()
    source.adopt(scaled)
    batch, _ = source.epoch_batches(50)[0]
    rows = values[-42:]
    assert sorted(batch[:, 0]) == pytest.approx(
        sorted((rows[:, 0] - values[:, 0].mean()) / values[:, 0].std()), abs=1e-5
    )


def test_secure_sums_give_the_same_statistics(tmp_path: Path) -> None:
    program = AgreeOnSchema(
        clients=4, data="bbnode.TableDataSource", secure=True, columns=COLUMNS,
        classes=("ant", "bee", "cat"), low=(0, -2), high=(80, 6), most_examples=1000,
    )  # fmt: skip
    orders = ("age,dose", "dose,age", "age,dose", "dose,age")
    found, network, values = run(tmp_path, program, orders=orders)
    assert found["mean"] == pytest.approx(values.mean(axis=0), rel=1e-3)
    assert found["std"] == pytest.approx(values.std(axis=0), rel=1e-3)
    assert np.asarray(found["told"]) == 4
    assert found["minimum"].tolist() == [0, -2]
    for at in range(4):
        assert (tmp_path / f"{at}.json").exists()
        assert network[f"client-{at}"].component("data").schema().classes == ("ant", "bee", "cat")


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"secure": True}, "columns"),
        ({"secure": True, "columns": COLUMNS}, "low"),
        ({"secure": True, "columns": COLUMNS, "low": 1.0, "high": 0.0}, "high"),
        ({"low": 1.0, "high": 2.0}, "low"),
        ({"columns": "ab"}, "columns"),
    ],
)
def test_what_can_not_be_found_in_secret_has_to_be_listed(wrong: Any, why: str) -> None:
    with pytest.raises(BadArgument, match=why):
        AgreeOnSchema(data="bbnode.TableDataSource", **wrong).build()


def test_statistics_of_other_columns_and_broken_projects_are_refused(tmp_path: Path) -> None:
    schema = SharedSchema.declared({"columns": ["a", 'b "é" \x7f']})
    (tmp_path / "s.json").write_text('{"columns": ["a", "c"], "mean": [1, 2], "std": [1, 1]}')
    with pytest.raises(SchemaRefused):
        with_statistics(schema, tmp_path / "s.json")
    project = tmp_path / "pyproject.toml"
    project.write_text("[project\n")
    with pytest.raises(SchemaRefused):
        write_project(project, {"data": schema})
    assert project.read_text() == "[project\n"
    project.unlink()
    write_project(project, {"data": schema})
    assert (
        SharedSchema.declared(
            tomllib.loads(project.read_text())["tool"]["bbnode"]["schema"]["data"]
        )
        == schema
    )
