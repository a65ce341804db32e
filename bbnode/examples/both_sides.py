"""One node that hosts both sides of a program and talks with itself.

Run it with `python -m bbnode.examples.both_sides`.

A node can install several targets of one compiled model. What it sends to itself travels as
anything else does, as an envelope into an execution of its own. So a program can be tried on one
machine and spread out later without changing a line; only the view differs. Here the view is a
`ConstantView` that lists the node's own PeerId, set in the node's configuration.

Slots are shared: both sides use the slot "scale", and on this node it is one component.
"""

from __future__ import annotations

import numpy as np
from onnx import ModelProto

from bbnode.compiler import Compiler
from bbnode.components import ConstantView, OrtBackend
from bbnode.dsl import BackendSlot, Graph, Module, PeerSelectorSlot, types
from bbnode.sim import Network, SimNode


class Average(Module):
    """The front sends "readings" ([N] float32) to the back, which answers with their mean."""

    home = "front"

    def body(self, g: Graph) -> None:
        compute = BackendSlot("compute")
        readings = g.input("readings", types.TENSOR_FLOAT)
        backs = PeerSelectorSlot("backs", peer_class="back").current_view(g, after=readings)
        doubled = compute.add(g, readings, readings)
        received = g.net_out("readings", backs, doubled)
        mean = compute.reduce_mean(g, received, keepdims=False)
        halves = g.net_out("mean", received.sender, mean)
        g.output("mean", compute.div(g, halves, g.constant(2.0)))


def compile_program() -> ModelProto:
    """Compile the program; which peers the backs are is left to each node's configuration."""
    return (
        Compiler()
        .bind_peer_selector("backs", ConstantView)
        .bind_backend("compute", OrtBackend)
        .compile(Average().build())
    )


def add_peer(network: Network, name: str, model: ModelProto, *targets: str, back: str) -> SimNode:
    """Add a node that plays `targets`; the node called `back` is the one that it sends to."""
    view = {"backs": {"peers": [str(network.peer_id(back))]}} if "front" in targets else {}
    return network.add(name, model, targets, config=view)


def main() -> None:
    """Run the same compiled model on one node, and on two."""
    compiled = compile_program()
    readings = np.array([1, 2, 6], np.float32)

    alone = Network(seed=0)
    node = add_peer(alone, "everything", compiled, "front", "back", back="everything")
    node.invoke("front", {"readings": readings})
    alone.run_until_idle()
    print(f"{node.name} plays {' and '.join(node.classes)}: mean {node.values('mean')[0]}")
    print(f"  envelopes on the network: {alone.counters().get('envelopes.sent', 0)}")
    print(f"  envelopes that it gave itself: {node.node.counters()['envelopes.in']}")

    spread = Network(seed=0)
    front = add_peer(spread, "one", compiled, "front", back="other")
    add_peer(spread, "other", compiled, "back", back="other")
    front.invoke("front", {"readings": readings})
    spread.run_until_idle()
    print(f"spread over two nodes: mean {front.values('mean')[0]}")
    print(f"  envelopes on the network: {spread.counters()['envelopes.sent']}")


if __name__ == "__main__":
    main()
