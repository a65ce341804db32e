"""Small programs that simulator tests run, and their components.

Rule: compiled once per test run; what a component does is decided by its input alone.
"""

from __future__ import annotations

from functools import cache
from typing import Any, ClassVar

import msgpack
import numpy as np
from onnx import ModelProto

from bbnode.compiler import Compiler
from bbnode.components import ConnectedView, OrtBackend, offload
from bbnode.components.contracts import Index
from bbnode.components.registry import component_class, register_component
from bbnode.dsl import (
    BackendSlot,
    Graph,
    IndexSlot,
    Module,
    PeerSelectorSlot,
    syscalls,
    types,
    values,
)
from bbnode.ir.errors import BbnodeError
from bbnode.sim import LinkModel

MS = 1_000_000
S = 1_000_000_000
LOST = LinkModel(loss=1.0)


class Ask(Module):
    """One request to everybody of class "worker"; "answers" is the ResponseBatch."""

    home = "asker"

    def __init__(self, quorum: int = 0) -> None:
        self.quorum = quorum

    def body(self, g: Graph) -> None:
        x = g.input("x", types.TENSOR_FLOAT)
        workers = PeerSelectorSlot("workers", peer_class="worker").current_view(g, after=x)
        r = g.request("ask", workers, x, quorum=self.quorum, deadline=2.0)
        r.respond(BackendSlot("compute").add(g, r.received, r.received))
        g.output("answers", r.responses)


class Notes(Module):
    """One-way sends: each "note" is stored by every keeper, in a slow index of its own."""

    home = "writer"

    def body(self, g: Graph) -> None:
        note = g.input("note", types.TENSOR_FLOAT)
        keepers = PeerSelectorSlot("keepers", peer_class="keeper").current_view(g, after=note)
        received = g.net_out("note", keepers, note)
        g.output("kept", IndexSlot("notes").add(g, received))


class Round(Module):
    """A server asks all clients on "tick", and is content with `quorum` of them (0: all)."""

    home = "server"

    def __init__(self, quorum: int = 2) -> None:
        self.quorum = quorum

    def body(self, g: Graph) -> None:
        tick = g.input("tick", types.TRIGGER)
        clients = PeerSelectorSlot("clients", peer_class="client").current_view(g, after=tick)
        r = g.request("round", clients, tick, quorum=self.quorum, deadline=1.0)
        r.respond(r.received)
        g.output("answers", r.responses)


class Named(Module):
    """A request to those that it is told, connected or not; "answers" is the ResponseBatch."""

    home = "asker"

    def __init__(self, quorum: int) -> None:
        self.quorum = quorum

    def body(self, g: Graph) -> None:
        x = g.input("x", types.TENSOR_FLOAT)
        workers = g.input("worker", types.PEER_ID_VEC)
        r = g.request("ask", workers, x, quorum=self.quorum, deadline=2.0)
        r.respond(r.received)
        g.output("answers", r.responses)


class Ticker(Module):
    """Never rests: "tick" every 10 ms."""

    home = "clock"

    def body(self, g: Graph) -> None:
        g.output("tick", syscalls.interval(g, period_ns=10 * MS))


class _SlowNotes(Index):
    """Keeps what it was given; `add` is offloaded and returns the count as id."""

    TYPE_NAME: ClassVar[str] = "test.SlowNotes"
    storage: ClassVar[dict[str, types.TypeNode]] = {"*": types.TENSOR_FLOAT}

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.seen: list[float] = []

    @offload
    def add(self, ctx, vector, metadata=None, id=None):  # noqa: A002
        value = float(np.asarray(vector)[0])
        if value < 0:
            raise ValueError("no room")
        self.seen.append(value)
        return np.array(len(self.seen))

    def search(self, ctx, query, where=None, *, k):
        return values.SearchResults.of_pairs([])

    def remove(self, ctx, item):
        return None

    def train(self, ctx, training):
        return None

    def serialize(self) -> bytes:
        return bytes(msgpack.packb(self.seen))

    def restore(self, data: bytes) -> None:
        self.seen = msgpack.unpackb(data)


def _once(cls):
    """Register a test component, also when this module is imported a second time."""
    try:
        return component_class(cls.TYPE_NAME)
    except BbnodeError:
        return register_component(cls)


SlowNotes = _once(_SlowNotes)


@cache
def ask(quorum: int = 0) -> ModelProto:
    return (
        Compiler()
        .bind_peer_selector("workers", ConnectedView)
        .bind_backend("compute", OrtBackend)
        .compile(Ask(quorum).build())
    )


@cache
def notes() -> ModelProto:
    return (
        Compiler()
        .bind_peer_selector("keepers", ConnectedView)
        .bind_index("notes", SlowNotes)
        .compile(Notes().build())
    )


@cache
def rounds(quorum: int = 2) -> ModelProto:
    program = Round(quorum).build()
    return Compiler().bind_peer_selector("clients", ConnectedView).compile(program)


@cache
def named(quorum: int) -> ModelProto:
    return Compiler().compile(Named(quorum).build())


@cache
def ticker() -> ModelProto:
    return Compiler().compile(Ticker().build())


def number(value: float) -> np.ndarray:
    return np.array([value], np.float32)


def component(node, slot: str):
    """The component of a slot: tests look at what it was given."""
    return node.component(slot)
