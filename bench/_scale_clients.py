"""Many clients in one process: engine, driver and libp2p transport each, and no daemon around them.

Rule: it speaks by lines. It prints "ready" when all nodes are installed, connects them when it
reads "connect", prints "connected" when each has had the server's hello, and lives until its
standard input ends.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import _daemon_program  # noqa: F401 - the program's component
import onnx
import trio
from multiaddr import Multiaddr

from bbnode.daemon.lifecycle.process import COLLECT_AFTER, raise_file_limit
from bbnode.engine import install
from bbnode.ir.address import peer_of_address
from bbnode.ir.crossing import encode_crossings
from bbnode.transport import TransportEvent
from bbnode.transport.base import ConnectionClosed, ConnectionOpened, Hello
from bbnode.transport.driver import Driver
from bbnode.transport.identity import Identity
from bbnode.transport.libp2p.transport import Libp2pTransport


class Clients:
    """The clients of one process."""

    def __init__(self, artifact: Path, server: Multiaddr, count: int) -> None:
        """Install `count` clients of a program."""
        self._server = server
        self._count = count
        self._connected = 0
        self._all_connected = trio.Event()
        model = onnx.load(artifact)
        self._made = [self._make(model) for _ in range(count)]

    def _make(self, model: onnx.ModelProto) -> tuple[Libp2pTransport, Driver]:
        identity = Identity.generate()
        node = install(model, ["client"], peer_id=identity.peer_id)
        transport = Libp2pTransport(
            identity,
            listen=(),
            hello=Hello(
                classes=node.classes,
                targets=node.targets,
                crossings=encode_crossings(node.crossings),
            ),
        )
        return transport, Driver(node, transport, heard=self._heard, worker_threads=1)

    def _heard(self, event: TransportEvent) -> None:
        if isinstance(event, ConnectionOpened | ConnectionClosed):
            self._connected += 1 if isinstance(event, ConnectionOpened) else -1
            if self._connected == self._count:
                self._all_connected.set()

    async def run(self) -> None:
        """Run until standard input ends."""
        async with trio.open_nursery() as nursery:
            for transport, driver in self._made:
                await nursery.start(transport.run)
                await nursery.start(driver.run)
            # As a daemon does.
            gc.freeze()
            gc.set_threshold(*COLLECT_AFTER)
            print("ready", flush=True)
            await trio.to_thread.run_sync(sys.stdin.readline)
            server = peer_of_address(self._server)
            for transport, _ in self._made:
                transport.keep_connected(server, [self._server])
            await self._all_connected.wait()
            print("connected", flush=True)
            await trio.to_thread.run_sync(sys.stdin.read)
            # Nobody needs their goodbyes.
            sys.stdout.flush()
            os._exit(0)


def main(argv: Sequence[str]) -> None:
    """Run the clients: artifact, address of the server, how many."""
    logging.basicConfig(level=logging.ERROR)
    raise_file_limit()
    artifact, server, count = argv
    trio.run(Clients(Path(artifact), Multiaddr(server), int(count)).run)


if __name__ == "__main__":
    main(sys.argv[1:])
