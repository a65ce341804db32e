"""Rounds from client to client, and in two levels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bbnode.components import OnnxModel, concrete, register_component, values
from bbnode.dsl import BadArgument, ModelSlot
from bbnode.programs import (
    CyclicTraining,
    FedAdam,
    FedBN,
    FederatedTraining,
    FedNova,
    FedProx,
    HierarchicalTraining,
    Scaffold,
)
from bbnode.sim import LinkModel, Network
from tests.programs.files import compiled, examples
from tests.programs.strategies.federation import SIZES, SOFTMAX, Client, Federation, close


def made(base: type[FederatedTraining], **given: Any) -> Any:
    return base(**{**SOFTMAX, **given})


# --- cyclic -----------------------------------------------------------------------------------


def in_turn(federation: Federation) -> list[int]:
    """The clients in the order of their turns."""
    return sorted(range(len(SIZES)), key=lambda i: federation.nodes[i].peer_id)


@pytest.mark.parametrize("deltas", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_weights_go_from_client_to_client(tmp_path: Path, deltas: bool) -> None:
    federation = Federation(tmp_path, made(CyclicTraining, deltas=deltas))
    w = federation.start
    for found in federation.rounds(2):
        for at in in_turn(federation):
            w = federation.clients[at].trained(w)
        close(found["model"], w)
        assert found["stats"]["num_samples"] == SIZES[in_turn(federation)[-1]]


def test_a_turn_that_nobody_is_left_for_fails_by_its_name(tmp_path: Path) -> None:
    federation = Federation(tmp_path, made(CyclicTraining, clients=len(SIZES) + 1))
    federation.server.invoke("server", {"tick": values.TRIGGER})
    federation.net.run_until_idle()
    (failure,) = federation.server.failures()
    assert failure.kind == "QuorumNotReached"
    assert f"turn{len(SIZES)}: 0 of 0 peers" in failure.detail


def test_a_client_that_is_late_ends_the_round_with_the_weights_before_it(tmp_path: Path) -> None:
    federation = Federation(tmp_path, made(CyclicTraining, deadline_s=5.0))
    w = federation.start
    first, second, _ = in_turn(federation)
    late = LinkModel(latency_ns=9_000_000_000)
    federation.net.set_link(f"c{second}", "server", late)
    federation.server.invoke("server", {"tick": values.TRIGGER})
    federation.net.run_until_idle()
    assert "QuorumNotReached" in {failure.kind for failure in federation.server.failures()}
    w = federation.clients[first].trained(w)
    close(federation.server.component("global").params(None), w)


@register_component
class LastLiar(OnnxModel):
    """A model whose parameters are NaN once they are trained."""

    TYPE_NAME = "tests.LastLiar"

    def params(self, ctx: Any) -> Any:
        return np.full(self.size, np.nan, np.float32)


def test_what_a_liar_answers_is_not_passed_on(tmp_path: Path) -> None:
    class Liar(CyclicTraining):
        name = "CyclicTraining"

        @property
        def client_model(self) -> ModelSlot:
            return ModelSlot("local", concrete=concrete(LastLiar, self._config))

    plain = Federation(tmp_path, made(CyclicTraining))
    order = in_turn(plain)
    others = [made(Liar) if i == order[1] else None for i in range(len(SIZES))]
    federation = Federation(tmp_path, made(CyclicTraining), others)
    w = federation.start
    federation.server.invoke("server", {"tick": values.TRIGGER})
    federation.net.run_until_idle()
    kinds = {failure.kind for failure in federation.server.failures()}
    assert "ContributionRefused" in kinds
    now = federation.server.component("global").params(None)
    close(now, federation.clients[order[0]].trained(w))


# --- two levels -------------------------------------------------------------------------------


def levels(folder: Path, program: HierarchicalTraining) -> tuple[Network, Any, list[Client]]:
    """A server, two edges, and clients that each belong to one of these."""
    artifact, net, clients = compiled(program), Network(1), []
    ids = []
    for i, count in enumerate(SIZES):
        data = {"path": examples(folder, f"c{i}", count, seed=i)}
        ids.append(str(net.add(f"c{i}", artifact, ["client"], config={"data": data}).peer_id))
        held = np.load(data["path"])
        clients.append(Client(held["x"].astype(np.float64), held["y"]))
    for name, peers in (("edge-0", ids[:2]), ("edge-1", ids[2:])):
        net.add(name, artifact, ["edge"], config={"cohort": {"peers": peers}})
    return net, net.add("server", artifact, ["server"]), clients


MEMBERS = {"selector": "bbnode.ConstantView", "clients": 2, "quorum": 1}


def test_two_levels_are_the_mean_of_all_clients(tmp_path: Path) -> None:
    net, server, clients = levels(tmp_path, made(HierarchicalTraining, **MEMBERS))
    net.run_until_idle()
    w = server.component("global").params(None).astype(np.float64)
    for _ in range(2):
        execution = server.invoke("server", {"tick": values.TRIGGER})
        net.run_until_idle()
        assert server.failures() == []
        w = sum(c.count * c.trained(w) for c in clients) / sum(SIZES)
        found = server.outputs(execution)
        close(found["model"], w)
        assert found["stats"]["num_samples"] == sum(SIZES)
        assert found["stats"]["contributors"] == 2


def test_an_edge_goes_on_without_a_client_and_the_server_without_an_edge(tmp_path: Path) -> None:
    given = {**MEMBERS, "edge_quorum": 1, "deadline_s": 10.0, "edge_deadline_s": 4.0}
    net, server, clients = levels(tmp_path, made(HierarchicalTraining, **given))
    net.run_until_idle()
    w = server.component("global").params(None).astype(np.float64)
    net.crash("c0")
    net.crash("edge-1")
    execution = server.invoke("server", {"tick": values.TRIGGER})
    net.run_until_idle()
    assert server.failures() == []
    close(server.outputs(execution)["model"], clients[1].trained(w))


def test_other_strategies_go_with_two_levels(tmp_path: Path) -> None:
    class Both(HierarchicalTraining, FedProx, FedAdam):
        proximal = 0.5
        tau = 1e-2

    net, server, clients = levels(tmp_path, made(Both, **MEMBERS))
    net.run_until_idle()
    w = server.component("global").params(None).astype(np.float64)
    execution = server.invoke("server", {"tick": values.TRIGGER})
    net.run_until_idle()
    d = sum(c.count * (c.trained(w, proximal=0.5) - w) for c in clients) / sum(SIZES)
    expected = w + 0.01 * d / (np.sqrt(0.99 * 1e-4 + 0.01 * d**2) + 1e-2)
    close(server.outputs(execution)["model"], expected)


@pytest.mark.parametrize(
    ("base", "given", "said"),
    [
        (CyclicTraining, {"quorum": 2}, "no argument 'quorum': each client is waited for"),
        (HierarchicalTraining, {"edges": 0}, "edges=0 has to be"),
        (HierarchicalTraining, {"edge_quorum": 3}, "edge_quorum=3 has to be .* edges=2"),
        (HierarchicalTraining, {"edge_deadline_s": 60.0}, "edge_deadline_s=60.0 has to be below"),
        (HierarchicalTraining, {"evaluate": "clients"}, "evaluate='clients' has to be"),
        (
            HierarchicalTraining,
            {"selector": "bbnode.FedAvg"},
            "selector=.* has to be a PeerSelector",
        ),
    ],
)
def test_wrong_arguments_are_refused(
    base: type[FederatedTraining], given: dict[str, Any], said: str
) -> None:
    with pytest.raises(BadArgument, match=said):
        made(base, **given).build()


@pytest.mark.parametrize("base", [CyclicTraining, HierarchicalTraining])
def test_control_variates_do_not_go_with_them(base: type[FederatedTraining]) -> None:
    class Both(base, Scaffold):  # type: ignore[misc, valid-type]
        pass

    with pytest.raises(BadArgument, match="control variates"):
        made(Both).build()


def test_arguments_of_several_bases_are_those_of_the_first_that_sets_them() -> None:
    class Both(CyclicTraining, FedNova, FedAdam):
        weighted = False

    class Local(FedProx, FedBN):
        local = ("layer0.*",)

    class More(Local):
        proximal = 0.5

    both, local, more = Both(), Local(), More()
    assert (both.deltas, both.weighted, both.server_learning_rate) == (True, False, 0.1)
    assert (local.evaluate, local.mode, local.local, local.proximal) == (
        "clients", "train", ("layer0.*",), 0.01,
    )  # fmt: skip
    assert (more.evaluate, more.local, more.proximal) == ("clients", ("layer0.*",), 0.5)
    assert Both(deltas=False).deltas is False
