"""Jobs at the size of their users': days, thousands of rounds and columns, a million rows."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bbnode.components import (
    FedAvg,
    MetricsMean,
    TableDataSource,
    TableDataSourceConfig,
    values,
)
from bbnode.engine.limits import Limits
from bbnode.programs import (
    FederatedHistograms,
    FederatedKMeans,
    FederatedSGD,
    FederatedStatistics,
    FederatedTraining,
    FederatedTrees,
)
from bbnode.sim import Network, SimNode
from tests.components.fakes import CTX
from tests.programs.files import CLASSES, FEATURES, compiled, examples

HOUR_NS = 3600 * 10**9


def federation(
    program: FederatedTraining, data: dict[str, Any], task_ns: int = 0
) -> tuple[Network, SimNode]:
    net = Network(seed=0)
    artifact = compiled(program)
    server = net.add("server", artifact, ["server"])
    for number in range(program.clients):
        slots = {"data": data, "held_out": data} if program.holds_out else {"data": data}
        net.add(f"c{number}", artifact, ["client"], config=slots, task_ns=task_ns)
    return net, server


def round_of(net: Network, server: SimNode, limit_s: float = 3600.0) -> dict[str, Any]:
    execution = server.invoke("server", {"tick": values.TRIGGER})
    net.run_until_idle(limit_ns=int(limit_s * 1e9))
    assert not server.failures(), server.failures()[0]
    return server.outputs(execution)


@pytest.mark.parametrize("hours", [1, 23, 100])
def test_a_round_takes_as_long_as_its_author_lets_it(tmp_path: Path, hours: int) -> None:
    """Also beyond `limits.wait_s`, the day of what nobody bounds."""
    assert Limits().wait_s == 24 * 3600
    program = FederatedTraining(
        model=(FEATURES, CLASSES), clients=2, evaluate="none", deadline_s=hours * 3600.0 * 3
    )
    data = {"path": examples(tmp_path, "d", 40, seed=1)}
    net, server = federation(program, data, task_ns=hours * HOUR_NS)
    before = net.now_ns
    assert round_of(net, server, hours * 3600 * 4)["stats"]["contributors"] == 2
    assert net.now_ns - before >= hours * HOUR_NS


def test_a_round_beyond_its_deadline_is_told_as_that(tmp_path: Path) -> None:
    program = FederatedTraining(
        model=(FEATURES, CLASSES), clients=1, quorum=1, evaluate="none", deadline_s=3600.0
    )
    data = {"path": examples(tmp_path, "d", 40, seed=1)}
    net, server = federation(program, data, task_ns=2 * HOUR_NS)
    server.invoke("server", {"tick": values.TRIGGER})
    net.run_until_idle(limit_ns=5 * HOUR_NS)
    assert server.failures()[0].kind == "QuorumNotReached"


@pytest.mark.parametrize(
    "rounds", [60, pytest.param(2000, marks=pytest.mark.slow)], ids=["60", "2000"]
)
def test_a_node_is_no_larger_after_many_rounds(tmp_path: Path, rounds: int) -> None:
    program = FederatedTraining(
        model=(FEATURES, CLASSES), clients=2, evaluate="clients", learning_rate=0.01
    )
    net, server = federation(program, {"path": examples(tmp_path, "d", 40, seed=1)})
    sizes = []
    for number in range(rounds):
        found = round_of(net, server)
        assert np.isfinite(found["loss"])
        if number in (rounds // 2, rounds - 1):
            sizes.append(len(server.node.snapshot()))
    # What has ended is remembered by its id, up to MAX_CLOSED_REMEMBERED and DEDUP_WINDOW.
    assert sizes[1] - sizes[0] <= 32 * (rounds // 2)
    assert not server.waiting()
    assert not server.executions()


@pytest.mark.parametrize(
    ("columns", "rows"),
    [(1_000, 20), pytest.param(10_000, 200, marks=pytest.mark.slow)],
    ids=["1000", "10000"],
)
def test_a_table_of_many_columns_is_trained_on(tmp_path: Path, columns: int, rows: int) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(rows, columns)).astype(np.float32).round(3)
    head = ",".join([*(f"measured_value_{n}" for n in range(columns)), "label"])
    lines = [",".join([*map(str, row), str(n % 3)]) for n, row in enumerate(x)]
    path = tmp_path / "wide.csv"
    path.write_text("\n".join([head, *lines]) + "\n")
    source = TableDataSource(TableDataSourceConfig(path=str(path), missing="mean"))
    source.bootstrap(CTX)
    assert source.schema().features.shape == (columns,)
    assert len(source.schema().names) == columns
    program = FederatedTraining(
        model=(columns, 3), clients=2, evaluate="clients", data="bbnode.TableDataSource"
    )
    net, server = federation(program, {"path": str(path)})
    found = round_of(net, server)
    assert found["stats"]["contributors"] == 2
    assert len(found["model"]) == columns * 3 + 3


@pytest.mark.parametrize(
    ("kind", "rows"),
    [
        ("csv", 10_000),
        ("npz", 10_000),
        pytest.param("csv", 1_000_000, marks=pytest.mark.slow),
        pytest.param("npz", 1_000_000, marks=pytest.mark.slow),
    ],
)
def test_every_row_of_a_client_is_trained_on(tmp_path: Path, kind: str, rows: int) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(rows, FEATURES)).astype(np.float32)
    y = (x @ rng.normal(size=(FEATURES, CLASSES))).argmax(1)
    path = tmp_path / f"d.{kind}"
    if kind == "npz":
        np.savez(path, x=x, y=y)
    else:
        head = ",".join([*(f"f{n}" for n in range(FEATURES)), "label"])
        table = np.column_stack([x, y])
        np.savetxt(path, table, delimiter=",", header=head, comments="",
                   fmt=["%.4f"] * FEATURES + ["%d"])  # fmt: skip
    data = "bbnode.ArrayDataSource" if kind == "npz" else "bbnode.TableDataSource"
    program = FederatedTraining(
        model=(FEATURES, CLASSES), clients=1, quorum=1, evaluate="clients", batch=1024, data=data,
        learning_rate=0.5,
    )  # fmt: skip
    net, server = federation(program, {"path": str(path)})
    found = round_of(net, server)
    assert found["stats"]["num_samples"] == pytest.approx(rows * 0.8, abs=CLASSES)
    assert float(found["accuracy"]) > 0.7


@pytest.mark.parametrize("clients", [30, pytest.param(1100, marks=pytest.mark.slow)])
def test_every_client_of_a_large_cohort_counts(
    tmp_path: Path, clients: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More than `max_contributors` of an aggregator's default, which is cut to 20 here."""
    if clients < 1024:
        for cls in (FedAvg, MetricsMean):
            small = dataclasses.make_dataclass(
                cls.Config.__name__, [("max_contributors", int, 20)], bases=(cls.Config,),
                frozen=True, kw_only=True,
            )  # fmt: skip
            monkeypatch.setattr(cls, "Config", small)
    program = FederatedTraining(
        model=(FEATURES, CLASSES), clients=clients, quorum=clients, evaluate="clients"
    )
    net, server = federation(program, {"path": examples(tmp_path, "d", 20, seed=1)})
    found = round_of(net, server)
    assert found["stats"]["contributors"] == clients
    assert found["stats"]["refused"] == 0


@pytest.mark.parametrize(
    "program",
    [
        FederatedStatistics(clients=2000), FederatedHistograms(clients=2000, bins=4),
        FederatedKMeans(clients=2000, clusters=2, features=3),
        FederatedTrees(clients=2000, features=3, evaluate="clients"),
        FederatedSGD(model=(4, 2), clients=2000),
    ],
    ids=lambda program: type(program).__name__,
)  # fmt: skip
def test_every_program_has_room_for_its_cohort(program: Any) -> None:
    artifact = compiled(program)
    text = artifact.SerializeToString()
    assert text.count(b"max_contributors\xcd\x07\xd0") >= 1  # 2000, as msgpack has it
    assert b"max_contributors\xcd\x04\x00" not in text
