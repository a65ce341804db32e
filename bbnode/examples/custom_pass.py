"""A compiler pass of your own: a tracing id on every send.

Run it with `python -m bbnode.examples.custom_pass`.

A stage is any object with a `name` and a method `run(model)`. The compiler runs it after its own
passes, once per partition; `model.functions[0]` is the partition's main, and the stage changes
it in place. Here it writes a key of its own into the metadata of each `wire.Send`; the engine
carries on as before, and whoever reads the compiled model finds the ids.
"""

from __future__ import annotations

from onnx import ModelProto, NodeProto

from bbnode.compiler import Compiler
from bbnode.components import ConnectedView, OrtBackend
from bbnode.dsl import BackendSlot, Graph, Module, PeerSelectorSlot, types

WIRE_DOMAIN = "ai.bytesandbrains.wire"
TRACING_ID_KEY = "example.tracing_id"


class StampTracingIds:
    """Counts the sends of all partitions and gives each its number."""

    name = "stamp_tracing_ids"

    def __init__(self) -> None:
        self._next = 0

    def run(self, model: ModelProto) -> None:
        """Stamp the sends of one partition."""
        for function in model.functions:
            for node in function.node:
                if is_send(node):
                    node.metadata_props.add(key=TRACING_ID_KEY, value=f"trace-{self._next}")
                    self._next += 1


def is_send(node: NodeProto) -> bool:
    """Whether a node is a one-way send."""
    return bool(node.domain == WIRE_DOMAIN and node.op_type == "Send")


def tracing_ids(model: ModelProto) -> dict[str, list[str]]:
    """Function name to the tracing ids of its sends."""
    return {
        function.name: [
            entry.value
            for node in function.node
            if is_send(node)
            for entry in node.metadata_props
            if entry.key == TRACING_ID_KEY
        ]
        for function in model.functions
    }


class PingPong(Module):
    """From class "left" to class "right" and back; each side sends once."""

    home = "left"

    def body(self, g: Graph) -> None:
        ball = g.input("ball", types.TENSOR_FLOAT)
        peers = PeerSelectorSlot("opponents", peer_class="right").sample(g, n=1, after=ball)
        ping = g.net_out("ping", peers, ball)
        pong = g.net_out("pong", ping.sender, BackendSlot("compute").neg(g, ping))
        g.output("ball_back", pong)


def compile_with_stage() -> ModelProto:
    """The program, compiled with our stage behind the compiler's own passes."""
    return (
        Compiler()
        .bind_peer_selector("opponents", ConnectedView)
        .bind_backend("compute", OrtBackend)
        .push_back_stage(StampTracingIds())
        .compile(PingPong().build())
    )


def main() -> None:
    """Print the tracing ids of each partition."""
    for partition, ids in tracing_ids(compile_with_stage()).items():
        if ids:
            print(f"{partition}: {len(ids)} send(s) with a tracing id: {', '.join(ids)}")


if __name__ == "__main__":
    main()
