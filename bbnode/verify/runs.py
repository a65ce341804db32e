"""Programs on real nodes in the simulator: a server and clients, or peers among themselves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bbnode.compiler import Compiler
from bbnode.components import values
from bbnode.programs.parts import TwoLevels
from bbnode.sim import Network, SimNode
from bbnode.verify.check import RoundFailed
from bbnode.verify.reference import CLASSES, FEATURES, RATE, SIZES, STEPS, Client, Vector

# A training that is a formula: softmax regression on all examples at once, an epoch a step.
SOFTMAX: Mapping[str, Any] = {
    "model": (FEATURES, CLASSES), "clients": len(SIZES), "batch": max(SIZES), "epochs": STEPS,
    "learning_rate": RATE, "evaluate": "none",
}  # fmt: skip
Slots = Mapping[str, Mapping[str, Any]]


def written(folder: Path, name: str, client: Client) -> dict[str, str]:
    """Write examples into a file; return the settings of a data slot."""
    path = folder / f"{name}.npz"
    np.savez(path, x=client.x.astype(np.float32), y=client.y)
    return {"path": str(path)}


class Star:
    """A server and its clients, of which client i has the name `c<i>`."""

    def __init__(
        self, folder: Path, program: Any, clients: Sequence[Client], *,
        settings: Mapping[int, Slots] | None = None, server: Slots | None = None,
        slot: str = "data",
    ) -> None:  # fmt: skip
        """Install a program; `settings` are those of clients by number, beside their data.

        Raises BbnodeError for what can't be installed.
        """
        artifact = Compiler().bind_all(program.bindings()).compile(program.build())
        self.net, self.program, self.peers = Network(1, keys=True), program, [*clients]
        self.nodes: list[SimNode] = []
        for at, client in enumerate(clients):
            config = {slot: written(folder, f"c{at}", client), **(settings or {}).get(at, {})}
            self.nodes.append(self.net.add(f"c{at}", artifact, ["client"], config=config))
        if isinstance(getattr(program, "course", None), TwoLevels):
            ids = [str(node.peer_id) for node in self.nodes]
            for name, members in (("edge-0", ids[:2]), ("edge-1", ids[2:])):
                self.net.add(name, artifact, ["edge"], config={"cohort": {"peers": members}})
        self.server = self.net.add("server", artifact, ["server"], config=server or {})
        self.net.run_until_idle()

    @property
    def start(self) -> Vector:
        """The server's weights as they are now, float64."""
        return np.asarray(self.server.component("global").params(None)).astype(np.float64)

    @property
    def in_turn(self) -> list[Client]:
        """The clients in the order of their PeerIds."""
        pairs = zip(self.nodes, self.peers, strict=True)
        return [each for _, each in sorted(pairs, key=lambda pair: pair[0].peer_id)]

    def begin(self, node: SimNode) -> dict[str, Any]:
        """Begin a node's round, and run until nothing is left to do; return its outputs.

        Raises RoundFailed where an op failed.
        """
        (target,) = node.classes
        execution = node.invoke(target, {"tick": values.TRIGGER})
        self.net.run_until_idle()
        failed = [str(each) for one in self.net.nodes for each in one.failures()]
        if failed:
            raise RoundFailed("; ".join(failed))
        return node.outputs(execution)

    def rounds(self, count: int) -> Iterator[dict[str, Any]]:
        """Make rounds of the server, each when it is asked for."""
        for _ in range(count):
            yield self.begin(self.server)


class Line:
    """Peers without a server, in the order of their PeerIds."""

    def __init__(
        self, program: Any, count: int, *, folder: Path | None = None,
        clients: Sequence[Client] = (), config: Slots | None = None,
    ) -> None:  # fmt: skip
        """Install a program on peers, that have examples where there are `clients`."""
        artifact = Compiler().bind_all(program.bindings()).compile(program.build())
        self.net = Network(1)
        names = sorted((f"p{at}" for at in range(count)), key=Network.peer_id)
        self.nodes = []
        for at, name in enumerate(names):
            data = {"data": written(folder, name, clients[at])} if folder and clients else {}
            self.nodes.append(
                self.net.add(name, artifact, ["peer"], config={**data, **(config or {})})
            )
        self.net.run_until_idle()

    def step(self, inputs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Begin a round on each peer; return their outputs. Raises RoundFailed."""
        begun = [
            node.invoke("peer", dict(given)) for node, given in zip(self.nodes, inputs, strict=True)
        ]
        self.net.run_until_idle()
        failed = [str(each) for node in self.nodes for each in node.failures()]
        if failed:
            raise RoundFailed("; ".join(failed))
        return [node.outputs(each) for node, each in zip(self.nodes, begun, strict=True)]
