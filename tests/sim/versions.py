"""Versions of one program, whose nodes meet in one network.

Rule: each argument is one edit that an author makes between two versions.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import cache

from onnx import ModelProto

from bbnode.compiler import Compiler
from bbnode.components import ConnectedView, OrtBackend
from bbnode.dsl import BackendSlot, Graph, Module, Output, PeerSelectorSlot, types
from bbnode.engine import plan_program
from bbnode.ir.crossing import Crossing

COMPUTE = BackendSlot("compute")


class Scale(Module):
    """A part that sends: it asks the clients to scale a value."""

    home = "server"

    def body(self, g: Graph) -> None:
        x = g.input("x", types.TENSOR_FLOAT)
        clients = PeerSelectorSlot("clients", peer_class="client").current_view(g, after=x)
        r = g.request("scale", clients, x, deadline=2.0)
        r.respond(COMPUTE.mul(g, r.received, g.tensor(3.0)))
        g.output("scaled", r.responses)


class Versioned(Module):
    """The server asks and tells clients, who tell it back; both bodies can be edited."""

    home = "server"

    def __init__(self, edits: Collection[str] = ()) -> None:
        self.edits = frozenset(edits)

    def body(self, g: Graph) -> None:
        x = g.input("x", types.TENSOR_FLOAT)
        if "server_body" in self.edits:
            x = COMPUTE.mul(g, COMPUTE.add(g, x, g.tensor(0.0)), g.tensor(1.0))
        clients = PeerSelectorSlot("clients", peer_class="client").current_view(g, after=x)
        if "added" in self.edits:
            g.output("pong", g.net_out("ping", clients, x))
        # Declared sizes are no part of a port, and are compared where two versions meet.
        shape = [5 if "resized" in self.edits else 4] if self.edits & {"sized", "resized"} else None
        r = g.request("ask", clients, x, deadline=2.0)
        answer = self._work(g, r.received)
        if shape is not None:
            answer = g.expect(answer, shape=shape)
        r.respond(answer)
        g.output("answers", r.responses)
        told = g.net_out("renamed" if "renamed_port" in self.edits else "tell", clients, x)
        back = COMPUTE.add(g, told, told)
        if "bundled" in self.edits:
            back = g.bundle([back, told])
        if "changed_type" in self.edits:
            back = COMPUTE.cast(g, back, to=types.TENSOR_DOUBLE.elem_type)
        update = g.net_out("update", told.sender, back, shape=shape)
        g.output("back", update)
        if "call_before" in self.edits:
            with g.with_module("added"):
                Scale().call().input("x", x).build(g)
        if "other_call" in self.edits:
            Other().call().input("x", x).build(g)
        g.output("scaled", Scale().call().input("x", x).build(g).output("scaled"))

    def _work(self, g: Graph, value: Output) -> Output:
        if "other_answer" in self.edits:
            return COMPUTE.cast(g, value, to=types.TENSOR_DOUBLE.elem_type)
        if "client_body" in self.edits:
            value = COMPUTE.relu(g, COMPUTE.add(g, value, value))
            return COMPUTE.add(g, value, g.tensor(0.0))
        return COMPUTE.add(g, value, value)


class Other(Scale):
    """Another part with a port of the same name."""


@cache
def version(*edits: str) -> ModelProto:
    """Return the program with these edits, compiled."""
    compiler = Compiler().bind_backend("compute", OrtBackend)
    return compiler.bind_peer_selector("clients", ConnectedView).compile(Versioned(edits).build())


def version_crossings(peer_class: str, *edits: str) -> tuple[Crossing, ...]:
    """Return what a class of a version sends and takes."""
    return plan_program(version(*edits), [peer_class]).crossings
