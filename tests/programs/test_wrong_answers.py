"""One wrong answer costs that answer and not the round, where the quorum is the default."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bbnode.components import ComponentError, offload, values
from bbnode.dsl import BackendSlot, Graph, Output, Request
from bbnode.programs import (
    DPFedAvg,
    FedAdam,
    FederatedHistograms,
    FederatedKMeans,
    FederatedQuantiles,
    FederatedSGD,
    FederatedStatistics,
    FederatedTraining,
    FederatedTrees,
    Scaffold,
)
from bbnode.programs.arguments import enough
from bbnode.sim import Network
from tests.programs.files import compiled, examples
from tests.programs.strategies.federation import SOFTMAX, Federation


def test_the_default_quorum_is_three_of_four_and_never_all_of_several() -> None:
    assert [enough(n) for n in (1, 2, 3, 4, 5, 8, 100)] == [1, 1, 2, 3, 4, 6, 75]


class Says(FederatedTraining):
    """A client that runs a program of its own, which answers what a test makes of its answer."""

    saying: str = ""

    def client_update(self, g: Graph, asked: Request) -> tuple[Output, Output]:
        compute = BackendSlot("compute")
        tensor, told = super().client_update(g, asked)
        if self.saying == "NaN":
            tensor = compute.div(g, tensor, compute.sub(g, tensor, tensor))
        elif self.saying == "another size":
            tensor = compute.concat(g, tensor, tensor, axis=0)
        elif self.saying == "another shape":
            tensor = compute.unsqueeze(g, tensor, g.constant([0]))
        elif self.saying == "huge":
            tensor = compute.mul(g, tensor, g.constant(1e38))
        elif self.saying == "no examples":
            told = g.constant(values.Metadata(num_samples=-5), after=tensor)
        elif self.saying == "no number":
            told = g.constant(values.Metadata(num_samples="many"), after=tensor)
        return tensor, told


ANSWERS = ("NaN", "another size", "another shape", "another type", "huge", "no examples",
           "no number")  # fmt: skip


@pytest.mark.parametrize("saying", ANSWERS)
def test_a_wrong_answer_costs_that_answer(tmp_path: Path, saying: str) -> None:
    program = FederatedTraining(**SOFTMAX)
    federation = Federation(tmp_path, program, others=[Says(saying=saying, **SOFTMAX)])
    if saying == "another type":
        federation.net.run_until_idle()
        federation.nodes[0].component("local").params = lambda _ctx: np.zeros(15, np.float64)
    execution = federation.server.invoke("server", {"tick": values.TRIGGER})
    federation.net.run_until_idle()
    found = federation.server.outputs(execution)
    assert np.isfinite(found["model"]).all()
    assert found["stats"]["contributors"] == 2
    name = str(federation.nodes[0].peer_id)
    assert name in str(dict(found["stats"]))  # who is missing, or was refused


@pytest.mark.parametrize("clients", [2, 3])
@pytest.mark.parametrize("base", [FederatedTraining, FedAdam, Scaffold, DPFedAvg])
def test_a_client_that_refuses_costs_its_answer(
    tmp_path: Path, base: type[FederatedTraining], clients: int
) -> None:
    more = {"noise": 1e-3, "epsilon": 1e30} if base is DPFedAvg else {}
    federation = Federation(tmp_path, base(**{**SOFTMAX, "clients": clients, **more}))
    for node in federation.nodes[clients:]:
        federation.net.cut("server", node.name)
    federation.net.run_until_idle()

    def fails(*_: Any) -> Any:
        raise ComponentError("no answer")

    broken = federation.nodes[0].component("local")
    broken.train = broken.train_adjusted = offload(fails)
    execution = federation.server.invoke("server", {"tick": values.TRIGGER})
    federation.net.run_until_idle()
    found = federation.server.outputs(execution)
    assert found["stats"]["contributors"] == clients - 1


MEASURED: list[tuple[type, dict[str, Any]]] = [
    (FederatedStatistics, {}),
    (FederatedHistograms, {"bins": 4}),
    (FederatedQuantiles, {"bins": 8, "tolerance": 0.1}),
    (FederatedKMeans, {"clusters": 2, "features": 4}),
    (FederatedTrees, {"features": 4, "classes": 3, "min_leaf": 2, "evaluate": "none"}),
    (FederatedSGD, {"model": (4, 3), "evaluate": False}),
]


@pytest.mark.parametrize(("base", "given"), MEASURED, ids=[each.__name__ for each, _ in MEASURED])
def test_other_programs_lose_no_round_to_a_client_without_data(
    tmp_path: Path, base: Any, given: dict[str, Any]
) -> None:
    program = base(clients=3, **given)

    artifact, net = compiled(program), Network(1)
    server = net.add("server", artifact, ["server"])
    for i in range(3):
        few = {"min_examples": 1000} if i == 0 else {}
        path = examples(tmp_path, f"c{i}", 20 + i, seed=i)
        net.add(f"c{i}", artifact, ["client"], config={"data": {"path": path, **few}})
    execution = server.invoke("server", {"tick": values.TRIGGER})
    net.run_until_idle()
    stats = server.outputs(execution)["stats"]
    assert stats["contributors"] == 2
    if base not in (
        FederatedHistograms,
        FederatedQuantiles,
    ):  # their last request is for the others
        assert str(net.peer_id("c0")) in stats["missing_why"]
