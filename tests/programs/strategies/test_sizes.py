"""The sizes of what crosses: what programs state, and peers whose models do not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import ModelProto

from bbnode.compiler import Compiler
from bbnode.compiler.errors import ShapeContradiction
from bbnode.components import ConnectedView, OrtBackend, StateVector, values
from bbnode.dsl import Graph, ModelSlot, Module, PeerSelectorSlot, types
from bbnode.engine import install, plan_program, steps
from bbnode.engine.bootstrap.targets import Slots
from bbnode.engine.errors import ComponentConstructionFailed
from bbnode.ir.address import site_suffix
from bbnode.ir.crossing import Crossing, ModelSize, decode_crossings, encode_crossings
from bbnode.ir.peer import PeerId
from bbnode.programs import (
    AsynchronousTraining,
    CyclicTraining,
    DecentralizedSGD,
    DiLoCo,
    Ditto,
    DPFedAvg,
    DPSGDTraining,
    FedAdam,
    FedAsync,
    FedBN,
    FedBuff,
    FederatedSGD,
    FederatedTraining,
    FedNova,
    FedPer,
    FedProx,
    FedRep,
    FLTrustTraining,
    GossipTraining,
    HierarchicalTraining,
    MoshpitTraining,
    QFedAvg,
    Scaffold,
    SecureTraining,
    SplitLearning,
    SwarmTraining,
)
from bbnode.sim import Network, SimNode
from tests.programs.files import CLASSES, FEATURES, compiled, examples
from tests.programs.strategies.federation import SOFTMAX, Federation, normalised

SMALL, LARGE = (FEATURES, 5, CLASSES), (FEATURES, 6, CLASSES)
P = FEATURES * 5 + 5 + 5 * CLASSES + CLASSES
Q = FEATURES * 6 + 6 + 6 * CLASSES + CLASSES
SHARED = FEATURES * 5 + 5
LOCAL = {"local": ("layer1.*",)}

ROUND, MANY, UPDATE = ("round", f"[{P}]"), ("turn0", f"[{P}]"), ("update", f"[{P}], ?, ?")
STATED: list[tuple[type, dict[str, Any], tuple[str, str]]] = [
    *[
        (each, {}, ROUND)
        for each in (
            *(
                FederatedTraining,
                FedProx,
                FedAdam,
                FedNova,
                QFedAvg,
                Ditto,
                DPFedAvg,
                DPSGDTraining,
            ),
            *(FLTrustTraining, SecureTraining, DiLoCo, HierarchicalTraining),
        )
    ],
    (FederatedTraining, {"deltas": True, "codec": "bbnode.RandomKCodec"}, ROUND),
    (FederatedTraining, {"codec_down": "bbnode.BFloat16Codec"}, ROUND),
    (FederatedSGD, {}, ("step", f"[{P}]")),
    (Scaffold, {}, ("round", f"[{P}], [{P}]")),
    (FedPer, LOCAL, ("round", f"[{SHARED}]")),
    (FedRep, LOCAL, ("round", f"[{SHARED}]")),
    (FedBN, {"model": normalised(), "mode": "train"}, ("round", "[35]")),
    (CyclicTraining, {}, MANY),
    (AsynchronousTraining, {}, UPDATE),
    (FedAsync, {}, UPDATE),
    (FedBuff, {}, UPDATE),
    (GossipTraining, {}, ("update", f"[{P}], ?")),
    (DecentralizedSGD, {}, ("vector", f"[{P}], ?")),
    (MoshpitTraining, {}, ("vector", f"[{P}], ?")),
    (SplitLearning, {"cut": "layer0.out"}, ("step", "[?, 5], ?")),
    (SplitLearning, {"cut": "layer0.out", "codec": "bbnode.Int8Codec"}, ("step", "[?, 5], ?")),
    (SplitLearning, {"cut": "layer0.out", "shared": True}, ("gradients", f"[{SHARED}]")),
]


def crossings(program: Any) -> dict[tuple[str, str, str], Crossing]:
    """Return what the targets of a program send and take, by class, kind and port."""
    return crossings_of_artifact(compiled(program))


def crossings_of_artifact(artifact: ModelProto) -> dict[tuple[str, str, str], Crossing]:
    mains = [f.name for f in artifact.functions if "#" in f.name and f.domain.endswith("module")]
    return {
        (name.split("#")[0], each.kind, each.port): each
        for name in mains
        for each in plan_program(artifact, [name]).crossings
    }


@pytest.mark.parametrize(
    ("program", "arguments", "stated"), STATED, ids=lambda each: getattr(each, "__name__", "")
)
def test_each_strategy_states_its_sizes(
    program: type, arguments: dict[str, Any], stated: tuple[str, str]
) -> None:
    found = crossings(program(**{"model": SMALL, **arguments}))
    port, shape = stated
    ends = [e for (_, kind, name), e in found.items() if name == port and kind != "response"]
    assert ends
    assert {each.shape for each in ends} == {shape}
    assert {each.sends for each in ends} | {each.takes for each in ends} >= {True}


def test_a_code_is_compared_by_what_it_stands_for() -> None:
    for codec in ("bbnode.RandomKCodec", "bbnode.Int8Codec", "bbnode.PowerSGDCodec"):
        found = crossings(FederatedTraining(model=SMALL, deltas=True, codec=codec))
        assert found["client", "response", "round"].shape == f"[{P}], ?"
        assert found["server", "response", "round"].shape == f"[{P}], ?"


def test_nothing_of_a_programs_types_changes() -> None:
    """A node may have a model of its own: the size is compared, and not declared."""
    artifact = compiled(FederatedTraining(model=SMALL))
    shapes = [
        info
        for function in artifact.functions
        for info in function.value_info
        if f"dim_value: {P}" in str(info)
    ]
    assert shapes == []


def lines(node: SimNode) -> list[str]:
    return [each.reason for each in node.node.peers_not_ready().values()]


def refused(node: SimNode) -> list[Any]:
    return node.seen(steps.WireReceiveFailed)


def models(program: type, **arguments: Any) -> tuple[Any, Any]:
    shared = {**SOFTMAX, **arguments}
    return tuple(program(**{**shared, "model": layers}) for layers in (SMALL, LARGE))


@pytest.mark.parametrize(
    ("program", "arguments"),
    [
        *((each, {}) for each in (FederatedTraining, FedNova, QFedAvg, Scaffold, SecureTraining)),
        (DiLoCo, {"epochs": 1}),
        (FederatedTraining, {"deltas": True, "codec": "bbnode.RandomKCodec"}),
        (FederatedTraining, {"codec_down": "bbnode.BFloat16Codec"}),
        (FederatedTraining, {"evaluate": "clients"}),
    ],
)
def test_a_client_with_another_layer_is_left_out_before_the_first_round(
    tmp_path: Path, program: type, arguments: dict[str, Any]
) -> None:
    ours, other = models(program, **arguments)
    slots = ("data", "held_out") if arguments.get("evaluate") else ("data",)
    secret = program is SecureTraining
    federation = Federation(tmp_path, ours, [None, None, other], slots=slots, keys=secret)
    federation.net.run_until_idle()
    server, odd = federation.server, federation.nodes[2]
    remedy = "let both run the same program and model"
    assert lines(server) == [f"its model has {Q} parameters, ours has {P}; {remedy}"]
    assert lines(odd)[0].startswith(f"its model has {P} parameters, ours has {Q}; ")
    assert [list(n.node.peers_not_ready()) for n in federation.nodes[:2]] == [[], []]
    assert odd.peer_id not in server.node.connected_peers("client")
    if not secret:
        execution = server.invoke("server", {"tick": values.TRIGGER})
        federation.net.run_until_idle()
        assert not refused(odd)
        assert "model" in server.outputs(execution) or server.failures()  # FedAvg: two of three


@pytest.mark.parametrize(
    ("program", "arguments"),
    [(program, each) for program, each, _ in STATED if "model" not in each],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_both_sides_of_every_strategy_name_the_other(
    program: type, arguments: dict[str, Any]
) -> None:
    small, large = (compiled(program(**{**arguments, "model": each})) for each in (SMALL, LARGE))
    net = Network(0)
    home, *others = dict.fromkeys(name for name, _, _ in crossings_of_artifact(small))
    for peer_class, artifact in ((home, small), *((name, large) for name in others or [home])):
        slots = plan_program(artifact, [peer_class]).slots
        data = [slot.name for slot in slots if slot.binding.role == "DataSource"]
        config = {name: {"path": "none.npz"} for name in data}
        net.add(f"{peer_class}{len(net.nodes)}", artifact, [peer_class], config=config)
    net.run_until_idle()
    first, *rest = net.nodes
    apart = [node for node in rest if node.peer_id in first.node.peers_not_ready()]
    assert apart
    for node in apart:
        assert not first.node.connected_peers(node.classes[0])
        assert not node.node.connected_peers(first.classes[0])
        (theirs,), ours = lines(node), first.node.peers_not_ready()[node.peer_id].reason
        assert theirs.endswith("; let both run the same program and model")
        assert ours.endswith("; let both run the same program and model")


def test_an_upgraded_client_fits_again(tmp_path: Path) -> None:
    ours, other = models(FederatedTraining)
    federation = Federation(tmp_path, ours, [None, None, other])
    federation.net.run_until_idle()
    server, odd = federation.server, federation.nodes[2]
    server.node.peer_disconnected(odd.peer_id, "upgraded")
    server.node.peer_connected(
        odd.peer_id, ("client",), (odd.address,), federation.nodes[0].crossings
    )
    federation.net.run_until_idle()
    assert lines(server) == []
    assert odd.peer_id in server.node.connected_peers("client")


def test_equal_sizes_change_nothing(tmp_path: Path) -> None:
    federation = Federation(tmp_path, FederatedTraining(**SOFTMAX))
    (made,) = federation.rounds(1)
    assert made["stats"]["contributors"] == 3
    assert all(lines(node) == [] for node in (federation.server, *federation.nodes))


def own_model(program: Any, folder: Path) -> str:
    """Write the model of a program to a file, which a node may name as its own."""
    file = folder / "own.onnx"
    file.write_bytes(program.forward.SerializeToString())
    return str(file)


def test_a_model_of_the_clients_own_is_left_out_too(tmp_path: Path) -> None:
    ours, other = models(FederatedTraining)
    own = {"local": {"model": own_model(other, tmp_path)}}
    federation = Federation(tmp_path, ours, settings={"c2": own})
    federation.net.run_until_idle()
    server, odd = federation.server, federation.nodes[2]
    assert lines(server)[0].startswith(f"its model has {Q} parameters, ours has {P}; ")
    assert lines(odd)[0].startswith(f"its model has {P} parameters, ours has {Q}; ")
    (made,) = federation.rounds(1)
    assert made["stats"]["contributors"] == 2
    assert not refused(odd)


def test_a_model_that_a_program_can_not_do_with_is_refused_where_it_is(tmp_path: Path) -> None:
    ours, other = (FedPer(**{**SOFTMAX, "model": layers, **LOCAL}) for layers in (SMALL, LARGE))
    own = {"local": {"model": own_model(other, tmp_path)}}
    federation = Federation(tmp_path, ours, settings={"c2": own})
    federation.net.run_until_idle()
    server, odd = federation.server, federation.nodes[2]
    (why,) = odd.node.not_ready().values()
    assert why.startswith(f"its model has {Q} parameters, and the program is compiled for {P}; ")
    assert lines(server) == [f"slot local: {why}"]
    (made,) = federation.rounds(1)
    assert made["stats"]["contributors"] == 2
    odd.node.run_bootstrap(Slots(("local",)))  # which mends nothing
    federation.net.run_until_idle()
    assert odd.node.not_ready() == {"local": why}
    odd.checkpoint()
    federation.net.crash(odd)
    federation.net.restart(odd)
    assert odd.node.not_ready() == {"local": why}


def test_one_model_of_their_own_on_all_nodes_works(tmp_path: Path) -> None:
    """The program was compiled for another, and nothing in it counts on its size."""
    ours, other = (Pushes(layers) for layers in (SMALL, LARGE))
    own = {"model": own_model(other.program, tmp_path)}
    artifact, net = compiled(ours), Network(0)
    server = net.add("server", artifact, ["server"], config={"global": own})
    same = net.add("same", artifact, ["client"], config={"local": own})
    odd = net.add("odd", artifact, ["client"])
    net.run_until_idle()
    assert list(server.node.peers_not_ready()) == [odd.peer_id]
    assert lines(same) == []
    assert lines(odd)[0].startswith(f"its model has {Q} parameters, ours has {P}; ")
    server.invoke("server", {"tick": values.TRIGGER})
    net.run_until_idle()
    assert server.failures() == same.failures() == []
    assert np.shape(same.values("loaded")[0]) == (Q,)
    assert not odd.values("loaded")


class Pushes(Module):
    """The server sends its parameters to all clients, who load them."""

    home = "server"

    def __init__(self, layers: tuple[int, ...]) -> None:
        self.program = FederatedTraining(model=layers)

    def bindings(self) -> dict[str, Any]:
        return {"clients": ConnectedView, "compute": OrtBackend}

    def body(self, g: Graph) -> None:
        tick = g.input("tick", types.TRIGGER)
        clients = PeerSelectorSlot("clients", peer_class="client").current_view(g, after=tick)
        weights = self.program.held_model("global").params(g, after=clients)
        received = g.net_out("weights", clients, weights)
        local = self.program.held_model("local")
        local.load_parameters(g, received)
        g.output("loaded", local.params(g))


@pytest.mark.parametrize("program", [GossipTraining, DecentralizedSGD, SwarmTraining])
def test_a_peer_of_a_gossip_whose_model_has_another_size_is_not_chosen(
    tmp_path: Path, program: type
) -> None:
    net = Network(2)
    data = {"data": {"path": examples(tmp_path, "all", 20, seed=1)}}
    small, large = (compiled(program(model=layers)) for layers in (SMALL, LARGE))
    config = dict.fromkeys(("data", "test", "held_out"), data["data"])
    slots = {slot.name for slot in plan_program(small, ["peer"]).slots}
    config = {name: each for name, each in config.items() if name in slots}
    nodes = [net.add(name, small, ["peer"], config=config) for name in ("a", "b")]
    odd = net.add("odd", large, ["peer"], config=config)
    net.run_until_idle()
    for node in nodes:
        assert list(node.node.peers_not_ready()) == [odd.peer_id]
        assert lines(node)[0].startswith(f"its model has {Q} parameters, ours has {P}; ")
        assert odd.peer_id not in node.node.connected_peers("peer")
    assert len(lines(odd)) == 2


def test_a_peer_that_states_nothing_or_a_lie_is_found_by_its_answer(tmp_path: Path) -> None:
    """Sizes keep rounds from being lost; what arrives is checked as it ever was."""
    ours, other = models(FederatedTraining)
    federation = Federation(tmp_path, ours, [None, None, other])
    federation.net.run_until_idle()
    server, odd = federation.server, federation.nodes[2]
    for stated in (None, federation.nodes[0].crossings):
        server.node.peer_disconnected(odd.peer_id, "again")
        server.node.peer_connected(odd.peer_id, ("client",), (odd.address,), stated)
        federation.net.run_until_idle()
        assert lines(server) == []
        (made,) = federation.rounds(1)
        assert made["stats"]["contributors"] == 2


def test_an_earlier_release_reads_what_is_stated() -> None:
    """Its form is that of before: the shape stands behind the type."""
    found = plan_program(compiled(FederatedTraining(model=SMALL)), ["client"]).crossings
    raw = encode_crossings(found)
    assert decode_crossings(raw) == found
    assert f" of [{P}]".encode() in raw


def test_sends_to_who_does_not_fit_say_why(tmp_path: Path) -> None:
    """Whoever it is that chose the peer: not its selector, which leaves it out."""
    ours, other = models(FederatedTraining)
    net = Network(0)
    server = net.add("server", compiled(ours), ["server"])
    odd = net.add("odd", compiled(other), ["client"], config={"data": {"path": "none.npz"}})
    net.run_until_idle()
    sites = [e for e in server.node.crossings if e.kind == "request" and e.sends]
    (why,) = {
        server.node.runtime.neighbours.unreachable(odd.peer_id, site_suffix(each.site))
        for each in sites
    }
    assert why == f"size: {lines(server)[0]}"
    again = install(compiled(ours), ["server"], peer_id=server.peer_id)
    again.restore(server.node.snapshot(net.now_ns), net.now_ns, same_life=True)
    assert again.peers_not_ready() == server.node.peers_not_ready()
    server.node.peer_disconnected(odd.peer_id, "gone")
    net.run_until_idle()
    assert lines(server) == []


def test_what_a_program_counts_on_is_fixed() -> None:
    """Constants that a strategy computed of the size: parts of vectors, for one."""
    for program, arguments, fixed in (
        (FederatedTraining, {"deltas": True}, False),
        (Scaffold, {}, False),
        (FedPer, LOCAL, True),
        (QFedAvg, {}, True),
        (FederatedSGD, {}, True),
    ):
        artifact = compiled(program(model=SMALL, **arguments))
        sizes = plan_program(artifact, ["client"]).model_sizes
        assert sizes["local"] == ModelSize(P, fixed=fixed)


def test_another_models_size_is_its_own_affair() -> None:
    """The server scores what comes by a model that is in no crossing."""

    class Scored(Pushes):
        def body(self, g: Graph) -> None:
            super().body(g)
            teacher = FederatedTraining(model=LARGE).held_model("teacher")
            g.output("scored", teacher.params(g, after=g.input("late", types.TRIGGER)))

    artifact, net = compiled(Scored(SMALL)), Network(0)
    own = FederatedTraining(model=(FEATURES, 9, CLASSES)).forward.SerializeToString()
    config = {"teacher": {"model": own}}
    server = net.add("server", artifact, ["server"], config=config)
    client = net.add("client", artifact, ["client"])
    net.run_until_idle()
    assert server.node.not_ready() == client.node.not_ready() == {}
    assert lines(server) == lines(client) == []


def test_two_models_of_one_program_that_do_not_fit_are_refused_when_it_is_compiled() -> None:
    class Wrong(Pushes):
        def body(self, g: Graph) -> None:
            tick = g.input("tick", types.TRIGGER)
            clients = PeerSelectorSlot("clients", peer_class="client").current_view(g, after=tick)
            weights = self.program.held_model("global").params(g, after=clients)
            received = g.net_out("weights", clients, weights)
            FederatedTraining(model=LARGE).held_model("local").load_parameters(g, received)

    with pytest.raises(ShapeContradiction, match=rf"is \[{P}\].*\[{Q}\] at LoadParameters"):
        compiled(Wrong(SMALL))


def test_models_that_only_nodes_know_are_compared_too() -> None:
    """Bound without settings: the program states no size, and each node that of its own."""
    built = Bound().build()
    artifact = (
        Compiler()
        .bind_model("global", StateVector).bind_model("local", StateVector)
        .bind_peer_selector("clients", ConnectedView)
        .compile(built)
    )  # fmt: skip
    assert not any(each.shape for each in plan_program(artifact, ["server"]).crossings)
    net = Network(0)
    server = net.add("server", artifact, ["server"], config={"global": {"size": 1250}})
    same = net.add("same", artifact, ["client"], config={"local": {"size": 1250}})
    odd = net.add("odd", artifact, ["client"], config={"local": {"size": 1234}})
    net.run_until_idle()
    assert list(server.node.peers_not_ready()) == [odd.peer_id]
    assert lines(server)[0].startswith("its model has 1,234 parameters, ours has 1,250; ")
    assert lines(odd)[0].startswith("its model has 1,250 parameters, ours has 1,234; ")
    assert lines(same) == []


class Bound(Module):
    """As `Pushes`, with models that are bound where it is compiled."""

    home = "server"

    def body(self, g: Graph) -> None:
        tick = g.input("tick", types.TRIGGER)
        clients = PeerSelectorSlot("clients", peer_class="client").current_view(g, after=tick)
        weights = ModelSlot("global").params(g, after=clients)
        ModelSlot("local").load_parameters(g, g.net_out("weights", clients, weights))


@pytest.mark.parametrize("size", ["many", -1, True])
def test_a_model_that_tells_no_number_is_refused_by_name(
    size: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StateVector, "vector_size", lambda _self: size)
    artifact = compiled(Scaffold(model=SMALL, evaluate="none"))
    with pytest.raises(ComponentConstructionFailed, match=r"StateVector.vector_size\(\) returned"):
        install(artifact, ["server"], peer_id=PeerId.from_seed("me"))


def test_a_compiled_program_that_is_compiled_again_states_the_same() -> None:
    program = Scaffold(model=SMALL)
    artifact = compiled(program)
    again = Compiler().bind_all(program.bindings()).compile(artifact)
    assert again.SerializeToString(deterministic=True) == artifact.SerializeToString(
        deterministic=True
    )
