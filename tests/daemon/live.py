"""A node with its control plane in this process: real HTTP on a real unix socket, no libp2p.

Two nodes of one small program stand on the in-memory network: the server asks, the client
echoes. What a test asks of a blocking client runs in a thread.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import trio

from bbnode.compiler import Compiler
from bbnode.components.selectors.views import ConnectedView
from bbnode.daemon.access.control import AccessControl
from bbnode.daemon.config import sources
from bbnode.daemon.config.reload import Changes
from bbnode.daemon.control.plane import ControlPlane
from bbnode.daemon.control.server import ControlLimits
from bbnode.daemon.network.dial_back import DialBack, DialBackRefused
from bbnode.daemon.observing.events import step_to_event
from bbnode.dsl import Graph, Module, PeerSelectorSlot, types
from bbnode.engine import Node, install, steps
from bbnode.ir.crossing import encode_crossings
from bbnode.ir.peer import PeerId
from bbnode.transport.base import Hello
from bbnode.transport.driver import Driver
from bbnode.transport.errors import NotConnectedError
from bbnode.transport.memory import MemoryNetwork, MemoryTransport
from tests.patience import PATIENCE_S

SERVER, CLIENT, STRANGER = (PeerId.from_seed(name) for name in ("server", "client", "stranger"))
RTT_S = 0.0015
SHA256 = "0" * 64  # of both nodes' artifact

T = TypeVar("T")


class Ask(Module):
    """The server asks one client, which sends back what it was asked."""

    home = "server"

    def body(self, g: Graph) -> None:
        question = g.input("question", types.TENSOR_FLOAT)
        peers = PeerSelectorSlot("who", peer_class="client").sample(g, n=1, after=question)
        r = g.request("ask", peers, question, deadline=60.0)
        r.respond(r.received)
        g.output("answers", r.responses)
        g.output("asked", question)


@cache
def compiled() -> Any:
    return Compiler().bind_peer_selector("who", ConnectedView).compile(Ask().build())


@dataclass
class Live:
    """One node, everything of it."""

    node: Node
    backend: MemoryTransport
    driver: Driver
    plane: ControlPlane
    state_dir: Path
    saves: int = 0
    stopped: bool = False
    seen: list[steps.Step] = field(default_factory=list)
    news: trio.Event = field(default_factory=trio.Event)
    # Raised by the next save, if set.
    save_fails: Exception | None = None
    # What a reload finds, or raises.
    reloads: Changes | Exception = field(
        default_factory=lambda: Changes(applied=(), needs_restart=())
    )

    @property
    def socket(self) -> Path:
        return self.plane.server.path

    async def until(self, wanted: type[steps.Step]) -> Any:
        """The first step of a kind, seen or to come."""
        with trio.fail_after(PATIENCE_S):
            while True:
                for step in self.seen:
                    if isinstance(step, wanted):
                        return step
                self.news = trio.Event()
                await self.news.wait()

    def observe(self, step: steps.Step) -> None:
        self.plane.observe(step, step_to_event(step))
        self.seen.append(step)
        self.news.set()

    async def ping(self, peer: PeerId) -> float:
        await trio.lowlevel.checkpoint()
        if peer not in {p.peer for p in self.backend.peers()}:
            raise NotConnectedError(f"{peer} is not connected")
        return RTT_S

    def reload(self) -> Changes:
        if isinstance(self.reloads, Exception):
            raise self.reloads
        return self.reloads

    async def save(self) -> int:
        await trio.lowlevel.checkpoint()
        if self.save_fails is not None:
            raise self.save_fails
        self.saves += 1
        return 1234

    def stop(self) -> None:
        self.stopped = True


def make(
    network: MemoryNetwork,
    peer: PeerId,
    role: str,
    state_dir: Path,
    *,
    limits: ControlLimits | None = None,
    node: Node | None = None,
    **flags: Any,
) -> Live:
    """A node that does not run yet; of the program above, unless one is given."""
    if node is None:
        node = install(compiled(), [role], peer_id=peer, seed=1)
    hello = Hello(
        artifact_sha256=SHA256,
        classes=node.classes,
        targets=node.targets,
        crossings=encode_crossings(node.crossings),
    )
    backend = network.transport(peer, hello=hello)
    live: Live
    driver = Driver(node, backend, observe=lambda step: live.observe(step))
    resolved = sources.resolve(
        None,
        environ={},
        flags={
            "node.name": role,
            "node.state_dir": str(state_dir),
            "artifact.module": "tests.daemon.live:Ask",
            "artifact.targets": [role],
            **flags,
        },
    )
    state_dir.mkdir(mode=0o700, exist_ok=True)
    access = AccessControl(state_dir, peer, resolved.config.access)

    async def save() -> int:
        return await live.save()

    async def ping(to: PeerId) -> float:
        return await live.ping(to)

    async def dial_back(to: PeerId | None) -> DialBack:
        await trio.lowlevel.checkpoint()
        if to is None:
            raise DialBackRefused("this network has no addresses to dial")
        return DialBack(peer=to, seen_at="/memory/1", tried=())

    plane = ControlPlane(
        resolved,
        artifact_sha256=SHA256,
        artifact_targets=node.targets,
        node=node,
        backend=backend,
        driver=driver,
        ping=ping,
        dial_back=dial_back,
        save=save,
        stop=lambda: live.stop(),
        reload=lambda: live.reload(),
        access=access,
        limits=limits,
    )
    live = Live(node, backend, driver, plane, state_dir)
    return live


@asynccontextmanager
async def running(
    tmp_path: Path,
    *,
    client: bool = True,
    limits: ControlLimits | None = None,
    node: Node | None = None,
    others: Node | None = None,
    **flags: Any,
) -> AsyncIterator[Live]:
    """The server, ready, and by default connected with its client; both of a program of ours.

    `node` and `others` are the server's and the client's of another one.
    """
    network = MemoryNetwork()
    folder = tmp_path / "server"
    server = make(network, SERVER, "server", folder, limits=limits, node=node, **flags)
    level = logging.getLogger().level
    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:
            await nursery.start(server.backend.run)
            await nursery.start(server.driver.run)
            await nursery.start(server.plane.run)
            server.plane.host.phase = "ready"
            if client:
                other = make(network, CLIENT, "client", tmp_path / "client", node=others)
                await nursery.start(other.backend.run)
                await nursery.start(other.driver.run)
                other.backend.keep_connected(SERVER, server.backend.listen_addresses())
                await server.until(steps.PeerUp)
            try:
                yield server
            finally:
                logging.getLogger().setLevel(level)
            await server.plane.finish()
            nursery.cancel_scope.cancel()


async def in_thread(function: Callable[..., T], *args: Any) -> T:
    """Run what blocks beside the node."""
    return await trio.to_thread.run_sync(function, *args, abandon_on_cancel=True)
