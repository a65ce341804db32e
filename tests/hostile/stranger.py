"""Peers to attack with: one that writes whatever it likes, and one that only lies.

Rule: they have what any stranger has, the address of the node and this package. An attack is an
async function of the node's address; `python -m tests.hostile.stranger MODULE:ATTACK ADDRESS` runs
one in a process of its own (`Attack`), for a bounded time, and exits with 0: that the victim closes
connections on it is expected.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import trio
from multiaddr import Multiaddr

from bbnode.ir.address import peer_of_address, site_suffix
from bbnode.ir.envelope import SlotFill, WireCorrelation, WireEnvelope
from bbnode.ir.envelope import encode_envelope as encode
from bbnode.transport.base import ConnectionOpened, Hello, TransportEvent
from bbnode.transport.identity import Identity
from bbnode.transport.libp2p.connection import LANE_PROTOCOLS
from bbnode.transport.libp2p.transport import Libp2pTransport
from bbnode.transport.links.framing import FrameType, Lane, encode_header
from bbnode.transport.links.hello import encode_hello
from tests.chaos.cluster import ROOT
from tests.transport.plain import plain_dial, plain_host, plain_running

Heard = Callable[[TransportEvent], None]


def identity_of(seed: int) -> Identity:
    """The identity of the stranger with this number."""
    return Identity.from_seed(seed.to_bytes(32, "big"))


def frame(kind: FrameType, body: bytes = b"", number: int = 0) -> bytes:
    """A whole frame of our protocol."""
    return encode_header(kind, len(body), number) + body


def hello_frame(**fields: Any) -> bytes:
    """A HELLO with these fields of `Hello`; acceptable without any."""
    return frame(FrameType.HELLO, encode_hello(Hello(**{"session_id": "f" * 16, **fields})))


def envelope(
    sender: Identity, site: int, payload: bytes, type_hash: int, **correlation: Any
) -> bytes:
    """An envelope with one fill, as the engine makes it; `correlation` as of WireCorrelation."""
    made = WireEnvelope(
        fills=(SlotFill(dest_suffix=site_suffix(site), payload=payload, type_hash=type_hash),),
        correlation=WireCorrelation(**correlation),
        src_peer_bytes=sender.peer_id.to_bytes(),
    )
    return b"".join(encode(made))


@dataclass(slots=True)
class Stranger:
    """A connection with a handshake of its own, on which anything may be written."""

    identity: Identity
    host: Any
    connection: Any
    # What the node wrote on the streams that it opened, in pieces as they came.
    heard: list[tuple[Lane, bytes]] = field(default_factory=list)

    async def stream(self, lane: Lane | str) -> Any:
        """A stream of our own on a lane, or of any protocol: `write`, `read`, `close`, `reset`."""
        protocol = LANE_PROTOCOLS[lane] if isinstance(lane, Lane) else lane
        return await self.host.new_stream(self.connection.muxed_conn.peer_id, [protocol])

    async def enter(self, **fields: Any) -> tuple[Any, Any]:
        """Say hello as an honest peer would, and begin both lanes: the control and bulk stream."""
        control, bulk = await self.stream(Lane.CONTROL), await self.stream(Lane.BULK)
        await control.write(hello_frame(**fields) + frame(FrameType.START, number=1))
        await bulk.write(frame(FrameType.START, number=1))
        return control, bulk

    @property
    def is_cut(self) -> bool:
        """Whether the connection has ended."""
        return bool(self.connection.event_closed.is_set())


@asynccontextmanager
async def stranger(address: Multiaddr, seed: int = 1) -> AsyncIterator[Stranger]:
    """A connection with the node at `address`, up to and with Noise and Yamux; no hello yet."""
    identity = identity_of(seed)
    host = plain_host(identity.seed)
    heard: list[tuple[Lane, bytes]] = []

    def listens(lane: Lane) -> Any:
        async def listen(stream: Any) -> None:
            while data := await stream.read(65_536):
                heard.append((lane, data))

        return listen

    for lane, protocol in LANE_PROTOCOLS.items():
        host.set_stream_handler(protocol, listens(lane))
    async with plain_running(host, []):
        connection = await plain_dial(host, address, peer_of_address(address))
        yield Stranger(identity, host, connection, heard)


@asynccontextmanager
async def liar(
    address: Multiaddr, seed: int = 1, *, heard: Heard | None = None, **settings: Any
) -> AsyncIterator[tuple[Libp2pTransport, Identity]]:
    """A peer that keeps our protocol to the letter, connected; what it sends is up to the test.

    `settings` are of `Libp2pTransport`; what comes from the node goes to `heard`, or is dropped.
    """
    identity = identity_of(seed)
    backend = Libp2pTransport(identity, listen=[], **{"hello": Hello(), **settings})
    async with trio.open_nursery() as nursery:
        await nursery.start(backend.run)
        backend.keep_connected(peer_of_address(address), [address])
        while not isinstance(await backend.events.receive(), ConnectionOpened):
            pass
        nursery.start_soon(_drain, backend, heard)
        yield backend, identity
        nursery.cancel_scope.cancel()


async def _drain(backend: Libp2pTransport, heard: Heard | None) -> None:
    while True:
        event = await backend.events.receive()
        if heard is not None:
            heard(event)


@contextmanager
def attack(name: str, address: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run `MODULE:ATTACK` of tests.hostile in a process; it has ended well, or the test fails."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.hostile.stranger", name, address], cwd=ROOT, env=os.environ
    )
    try:
        yield process
    finally:
        process.kill()
        code = process.wait()
    assert code == 0, f"the attack {name} ended with {code}"


if __name__ == "__main__":
    module, function = sys.argv[1].split(":")
    trio.run(
        getattr(importlib.import_module(f"tests.hostile.{module}"), function),
        Multiaddr(sys.argv[2]),
    )
