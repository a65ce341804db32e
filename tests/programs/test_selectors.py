"""Who chooses the clients of a round: any selector, which hears of the answers if it learns."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from bbnode.components import (
    ByDataSize,
    Oort,
    PowerOfTwoChoices,
    RoundRobin,
    concrete,
    values,
)
from bbnode.dsl import BadArgument
from bbnode.engine.snapshot.codec import SnapshotReader, SnapshotWriter
from bbnode.ir.peer import PeerId
from bbnode.ir.values import ResponseBatch
from bbnode.programs import (
    DPFedAvg,
    FedBuff,
    FederatedSGD,
    FederatedTraining,
    HierarchicalTraining,
    SecureTraining,
)
from bbnode.sim import MS, LinkModel, Network
from tests.programs.files import compiled, examples
from tests.programs.strategies.federation import SIZES, SOFTMAX, Federation


@pytest.mark.parametrize(
    "selector", [ByDataSize, "bbnode.Oort", PowerOfTwoChoices, concrete(RoundRobin, seed=4)]
)
def test_a_selector_takes_the_place_of_the_uniform_one(tmp_path: Path, selector: Any) -> None:
    program = FederatedTraining(**{**SOFTMAX, "clients": 2}, selector=selector)
    federation = Federation(tmp_path, program)
    for made in federation.rounds(3):
        assert made["stats"]["contributors"] == 2
    assert federation.server.component("cohort")._draws == 3


def test_oort_hears_losses_and_measures_times_itself(tmp_path: Path) -> None:
    program = FederatedTraining(**SOFTMAX, selector=Oort)
    federation = Federation(tmp_path, program)
    for i in range(len(SIZES)):
        slow = LinkModel(latency_ns=(10 + 50 * i) * MS)
        federation.net.set_link("server", f"c{i}", slow)
        federation.net.set_link(f"c{i}", "server", slow)
    *_, _made = federation.rounds(2)
    oort: Oort = federation.server.component("cohort")
    for i, node in enumerate(federation.nodes):
        arm = oort._arms[node.peer_id]
        assert arm.turns == 2
        assert 2 * (10 + 50 * i) * MS <= arm.took_ns < 2 * (20 + 50 * i) * MS
        assert 0 < arm.utility < 5 * SIZES[i]


def test_a_step_of_sgd_tells_who_answered(tmp_path: Path) -> None:
    program = FederatedSGD(
        model=SOFTMAX["model"], clients=2, batch=8, evaluate=False, selector=PowerOfTwoChoices
    )
    artifact, net = compiled(program), Network(1)
    server = net.add("server", artifact, ["server"])
    for i in range(3):
        data = {"path": examples(tmp_path, f"c{i}", 20, seed=i)}
        net.add(f"c{i}", artifact, ["client"], config={"data": data})
    for _ in range(3):
        server.invoke("server", {"tick": values.TRIGGER})
        net.run_until_idle()
    loads = server.component("cohort")._loads.values()
    assert sum(load.given for load in loads) == 6
    assert not any(load.outstanding for load in loads)
    assert server.failures() == []


@pytest.mark.parametrize(
    ("kind", "arguments", "problem"),
    [
        (FederatedTraining, {"selector": "bbnode.FedAvg"}, "selector=.* has to be a PeerSelector"),
        (FederatedTraining, {"selector": "bbnode.Ort"}, "bbnode.Ort"),
        (FederatedTraining, {"selector": Oort, "weighted": False}, "learns from what clients tell"),
        (SecureTraining, {"selector": Oort}, "learns from what clients tell"),
        (DPFedAvg, {"selector": ByDataSize}, "learns from what clients tell"),
        (FederatedSGD, {"selector": "bbnode.Oort"}, "learns from what clients tell"),
        (FedBuff, {"selector": Oort}, "clients ask by themselves"),
        (HierarchicalTraining, {"selector": 3}, "selector=3 has to be a PeerSelector"),
    ],
)
def test_a_selector_that_can_not_work_is_refused(kind, arguments, problem) -> None:
    with pytest.raises(BadArgument, match=problem):
        compiled(kind(model=SOFTMAX["model"], **arguments))


def test_times_of_answers_outlive_a_snapshot() -> None:
    peer = PeerId.from_seed(1)
    batch = ResponseBatch(responses=((peer, b"x"),), took_ns=((peer, 12),))
    writer = SnapshotWriter.__new__(SnapshotWriter)
    row = writer._row(batch)
    assert SnapshotReader._value_of(SnapshotReader.__new__(SnapshotReader), row) == batch
    assert writer._row(dataclasses.replace(batch, took_ns=())) == row[:3]
