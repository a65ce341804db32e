"""Quickstart: one program, two peers, one answer.

Run it with `python -m bbnode.examples.quickstart`.

The program below says what happens in the whole network: an asker sends numbers to a worker,
the worker squares them, and sends them back to their sender. `net_out` is the only
thing that moves a value to another peer, and that is where the compiler cuts: one part for
the class "asker", one for the class "worker". Both peers get the same compiled model, and each
installs the part that it plays.

Here both run in one process, on virtual time (`bbnode.sim`); `bbnode run` runs the same parts
over libp2p.
"""

from __future__ import annotations

import numpy as np

from bbnode.compiler import Compiler, target_names
from bbnode.components import ConnectedView, OrtBackend
from bbnode.dsl import BackendSlot, Graph, Module, PeerSelectorSlot, types
from bbnode.sim import MS, Network


class Squares(Module):
    """Input "numbers" ([N] float32) and output "squares" ([N] float32), both on the asker."""

    home = "asker"  # inputs, and what nothing else places, live here

    def body(self, g: Graph) -> None:
        numbers = g.input("numbers", types.TENSOR_FLOAT)
        workers = PeerSelectorSlot("workers", peer_class="worker").sample(g, n=1, after=numbers)
        received = g.net_out("question", workers, numbers)

        # From here on we are on the worker: that is where `received` lives.
        compute = BackendSlot("compute")
        squared = compute.mul(g, received, received)
        answer = g.net_out("answer", received.sender, squared)

        # And here back on the asker.
        g.output("squares", answer)


def main() -> None:
    """Compile, install on two peers, ask once, and print the answer."""
    compiled = (
        Compiler()
        .bind_peer_selector("workers", ConnectedView)
        .bind_backend("compute", OrtBackend)
        .compile(Squares().build())
    )
    print("one program, cut into:", ", ".join(target_names(compiled)))

    network = Network(seed=0)
    asker = network.add("asker", compiled, ["asker"])
    network.add("worker", compiled, ["worker"])
    asker.invoke("asker", {"numbers": np.array([1, 2, 3], np.float32)})
    network.run_until_idle()

    (squares,) = asker.values("squares")
    print("the squares of 1, 2, 3:", squares.tolist())
    print(f"there and back took {network.now_ns / MS:g} ms of virtual time")


if __name__ == "__main__":
    main()
