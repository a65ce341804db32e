"""A compiler pass of your own: a tracing id on every send.

Run it with `python -m bbnode.examples.custom_pass`.

A pass derives from `Pass` and changes the program in place; its arguments are those of its
class. `with_pass` says where it runs: here, once the program is cut into partitions. It writes a
key of its own into the metadata of each send; the engine ignores it, and the ids can be read from
the compiled model.
"""

from __future__ import annotations

from bbnode.compiler import CompilationUnit, CompileOptions, Compiler, Counters, Pass
from bbnode.components import ConnectedView, OrtBackend
from bbnode.dsl import BackendSlot, Graph, Module, PeerSelectorSlot, types

TRACING_ID_KEY = "example.tracing_id"


class StampTracingIds(Pass):
    """Numbers the sends of all partitions.

    1. Every one-way send has metadata `example.tracing_id`, `<prefix>-<number>`.
    """

    def __init__(self, prefix: str = "trace") -> None:
        self.prefix = prefix

    def run(self, unit: CompilationUnit, options: CompileOptions) -> Counters:
        stamped = 0
        for partition in unit.partitions.values():
            for node in partition.nodes:
                if node.op_type == "Send":
                    node.metadata[TRACING_ID_KEY] = f"{self.prefix}-{stamped}"
                    stamped += 1
        return {"sends_stamped": stamped}


class PingPong(Module):
    """From class "left" to class "right" and back; each side sends once."""

    home = "left"

    def body(self, g: Graph) -> None:
        ball = g.input("ball", types.TENSOR_FLOAT)
        peers = PeerSelectorSlot("opponents", peer_class="right").sample(g, n=1, after=ball)
        ping = g.net_out("ping", peers, ball)
        pong = g.net_out("pong", ping.sender, BackendSlot("compute").neg(g, ping))
        g.output("ball_back", pong)


def compiler() -> Compiler:
    """A compiler with our pass at its place."""
    return (
        Compiler()
        .bind_peer_selector("opponents", ConnectedView)
        .bind_backend("compute", OrtBackend)
        .with_pass(StampTracingIds("ball"), after="partition_by_wire_ops")
    )


def main() -> None:
    """Print the tracing ids of each partition."""
    model, report = compiler().compile_with_report(PingPong().build())
    print(f"{report.counters()['compiler.sends_stamped']} sends have a tracing id:")
    for function in model.functions:
        for node in function.node:
            for entry in node.metadata_props:
                if entry.key == TRACING_ID_KEY:
                    print(f"  {function.name}: {node.name} {entry.value}")


if __name__ == "__main__":
    main()
