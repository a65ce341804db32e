"""A random program on simulated nodes and by the oracle, and how the two are compared.

Rule: what is compared is all that the program hands out: events by peer and topic. Executions
of different sends may interleave, so the values of one topic are compared as a multiset.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import numpy as np
from onnx import ModelProto

from bbnode.compiler import Compiler
from bbnode.components.contracts import Component
from bbnode.engine import steps
from bbnode.ir import keys
from bbnode.ir.peer import PeerId
from bbnode.ir.values import PeerIdVec, ResponseBatch, SearchResults
from bbnode.sim import Network
from bbnode.sim.node import SimNode
from tests.compiler.fuzz.components import (
    Everybody,
    FirstAdded,
    FusedBackend,
    PlusOne,
    Sum,
    VectorModel,
)
from tests.compiler.fuzz.oracle import Batch, Composite, Oracle
from tests.compiler.fuzz.random_programs import VECTOR, RandomProgram

Events = dict[str, dict[str, list[Any]]]

COMPONENTS: dict[str, type[Component]] = {
    "Backend": FusedBackend,
    "Model": VectorModel,
    "PeerSelector": Everybody,
    "Aggregator": Sum,
    "Codec": PlusOne,
    "Index": FirstAdded,
}


def slot_roles(model: ModelProto) -> dict[str, str]:
    """Slots of a recorded model, with their roles."""
    return {
        entry.key.removeprefix(keys.SLOT_ROLE_PREFIX): entry.value.split("|")[0]
        for function in model.functions
        for entry in function.metadata_props
        if entry.key.startswith(keys.SLOT_ROLE_PREFIX)
    }


def compiler_for(model: ModelProto) -> Compiler:
    made = Compiler()
    for slot, role in slot_roles(model).items():
        made = made.bind(role, slot, COMPONENTS[role])
    return made


def peer_names(program: RandomProgram) -> dict[str, list[str]]:
    """Names of the peers of each class, in PeerId order."""
    return {
        cls: sorted((f"{cls}{n}" for n in range(count)), key=PeerId.from_seed)
        for cls, count in program.peers.items()
    }


def start_value() -> np.ndarray[Any, Any]:
    return np.arange(VECTOR, dtype=np.float32) - 1


def meant(program: RandomProgram, model: ModelProto) -> tuple[Events, Oracle]:
    """What the recorded program says that its peers hand out."""
    peers = peer_names(program)
    oracle = Oracle(model, peers)
    inputs: dict[str, Any] = {"x": start_value()}
    inputs.update((cls, peers[cls]) for cls in program.peer_inputs)
    oracle.invoke(peers[program.home][0], inputs)
    return {peer: dict(topics) for peer, topics in oracle.events.items()}, oracle


@dataclass(frozen=True)
class Run:
    """Simulated nodes that run a compiled program, invoked once on the first peer of its home."""

    network: Network
    home: SimNode
    execution: int
    invoked_ns: int
    names: dict[PeerId, str]


def invoked(program: RandomProgram, compiled: ModelProto, *others: ModelProto) -> Run:
    """Bring the nodes up and invoke, without running yet.

    `others` are further versions of the program: each class's peers take all of them in turn,
    and the first peer of each has `compiled`.
    """
    network = Network()
    peers = peer_names(program)
    compiled_classes = {f.name.split("#")[0] for f in compiled.functions if "#" in f.name}
    versions = (compiled, *others)
    for cls, group in peers.items():
        for at, name in enumerate(group if cls in compiled_classes else ()):
            network.add(name, versions[at % len(versions)], [cls])
    network.run_until_idle()
    home = network[peers[program.home][0]]
    known = next(iter(home.node._program.targets)).inputs
    inputs: dict[str, Any] = {"x": start_value()}
    for cls in program.peer_inputs:
        inputs[cls] = PeerIdVec(PeerId.from_seed(name) for name in peers[cls])
    given = {name: value for name, value in inputs.items() if name in known}
    names = {PeerId.from_seed(name): name for group in peers.values() for name in group}
    return Run(network, home, home.invoke(program.home, given), network.now_ns, names)


def run(program: RandomProgram, compiled: ModelProto) -> tuple[Events, Network]:
    """What the compiled program's nodes hand out; nothing fails."""
    started = invoked(program, compiled)
    started.network.run_until_idle()
    check_nothing_failed(started.network)
    return handed_out(started), started.network


def check_nothing_failed(network: Network) -> None:
    for node in network.nodes:
        assert node.failures() == [], node.failures()
        refused = node.seen(steps.WireReceiveFailed) + node.seen(steps.PeerResolveFailed)
        assert refused == [], refused


def handed_out(run: Run) -> Events:
    """The app events of all nodes."""
    found: Events = defaultdict(lambda: defaultdict(list))
    for node in run.network.nodes:
        for event in node.seen(steps.AppEvent):
            found[node.name][event.topic].append(_plain(event.value, run.names))
    return {peer: dict(topics) for peer, topics in found.items()}


def _plain(value: Any, names: dict[PeerId, str]) -> Any:
    if isinstance(value, ResponseBatch):
        return Batch(tuple((names[peer], _plain(v, names)) for peer, v in value.responses))
    if isinstance(value, PeerId):
        return names[value]
    if isinstance(value, PeerIdVec):
        return [names[peer] for peer in value]
    return value


def comparable(value: Any) -> Any:
    """Something sortable and exact, for a value of either side."""
    if isinstance(value, Batch):
        return ("batch", tuple((peer, comparable(v)) for peer, v in value.answers))
    if isinstance(value, list):
        return ("peers", *value)
    if isinstance(value, SearchResults):
        value = tuple((hit.id, hit.distance) for hit in value.hits())
    if isinstance(value, Composite | tuple):
        parts = value.parts if isinstance(value, Composite) else value
        return ("composite", tuple(comparable(part) for part in parts))
    if isinstance(value, np.ndarray):
        zeroed = value + np.zeros(1, value.dtype) if value.dtype.kind == "f" else value
        return (str(value.dtype), value.shape, tuple(map(str, np.ravel(zeroed).tolist())))
    return value


def multisets(events: Events) -> dict[tuple[str, str], list[Any]]:
    return {
        (peer, topic): sorted((comparable(value) for value in values), key=repr)
        for peer, topics in events.items()
        for topic, values in topics.items()
    }
