"""A hostile peer, as a process of its own: `python -m tests.chaos.hostile ATTACK ADDRESS`.

Rule: it does its worst for a bounded time and exits with 0; that the victim closes connections on
it is expected. It has what any stranger has: the address of the node, and this package.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Awaitable, Callable

import trio
from libp2p.exceptions import BaseLibp2pError
from libp2p.peer.id import ID
from multiaddr import Multiaddr

from bbnode.ir.address import peer_of_address, site_suffix
from bbnode.ir.envelope import CorrelationKind, SlotFill, WireCorrelation, WireEnvelope
from bbnode.ir.envelope import encode_envelope as encode
from bbnode.transport.backend import Hello, PeerConnected
from bbnode.transport.errors import NotConnectedError, QueueFullError
from bbnode.transport.framing import FrameType, Lane, encode_header
from bbnode.transport.hello import encode_hello
from bbnode.transport.identity import Identity
from bbnode.transport.libp2p.backend import Libp2pBackend
from bbnode.transport.libp2p.carrier import LANE_PROTOCOLS
from bbnode.transport.libp2p.tcp import BoundedTcp
from bbnode.transport.libp2p.workarounds import build_host, running

CONNECTIONS = 20
LASTS_S = 4.0
# All that a half-open attack may wait: the node closes who says no hello after ten seconds.
HELD_S = 12.0
RANDOM = random.Random(7)

_HELLO = encode_hello(Hello(session_id="f" * 16))
HELLO = encode_header(FrameType.HELLO, len(_HELLO)) + _HELLO


async def garbage(address: Multiaddr) -> None:
    """Bytes that are nothing, on many bare TCP connections."""
    host = address.value_for_protocol("ip4")
    port = int(address.value_for_protocol("tcp") or 0)

    async def one() -> None:
        stream = await trio.open_tcp_stream(str(host), port)
        async with stream:
            with trio.move_on_after(HELD_S):
                try:
                    await stream.send_all(RANDOM.randbytes(70_000))
                    while await stream.receive_some(4096):
                        pass
                except trio.BrokenResourceError:
                    return

    async with trio.open_nursery() as nursery:
        for _ in range(CONNECTIONS):
            nursery.start_soon(one)


async def _on_streams(address: Multiaddr, *writes: bytes) -> None:
    """Many authenticated peers, each of which writes this on a control stream and waits."""

    async def one(number: int) -> None:
        identity = Identity.from_seed(bytes([number]) * 32)
        host = build_host(identity, BoundedTcp(), max_connections=9, max_per_peer=4)
        peer = ID(peer_of_address(address).to_bytes())
        async with running(host, []):
            try:
                connection = await host.get_network().dial_addr(
                    address.decapsulate_code(0x01A5), peer
                )
                stream = await host.new_stream(peer, [LANE_PROTOCOLS[Lane.CONTROL]])
                for data in writes:
                    await stream.write(data)
            except (BaseLibp2pError, OSError):
                return
            with trio.move_on_after(HELD_S):
                await connection.event_closed.wait()

    async with trio.open_nursery() as nursery:
        for number in range(CONNECTIONS):
            nursery.start_soon(one, number)


async def frames(address: Multiaddr) -> None:
    """A good hello, then garbage."""
    await _on_streams(address, HELLO, RANDOM.randbytes(50_000))


async def half(address: Multiaddr) -> None:
    """Half a hello, and no more; nothing closes the stream."""
    await _on_streams(address, HELLO[: len(HELLO) // 2])


async def huge(address: Multiaddr) -> None:
    """A good hello, then the header of a message of 4 GiB."""
    await _on_streams(address, HELLO, encode_header(FrameType.ENVELOPE, 2**32 - 1))


async def flood(address: Multiaddr) -> None:
    """Envelopes that are valid, as many as go: answers to nothing, and values for nobody."""
    identity = Identity.from_seed(b"f" * 32)
    backend = Libp2pBackend(identity, listen=[], hello=Hello())
    peer = peer_of_address(address)
    async with trio.open_nursery() as nursery:
        await nursery.start(backend.run)
        backend.keep_connected(peer, [address])
        while not isinstance(await backend.events.receive(), PeerConnected):
            pass
        nursery.start_soon(_drain, backend)
        with trio.move_on_after(LASTS_S):
            while True:
                envelope = WireEnvelope(
                    fills=(
                        SlotFill(
                            dest_suffix=site_suffix(RANDOM.getrandbits(64)),
                            payload=RANDOM.randbytes(200),
                            type_hash=RANDOM.getrandbits(64),
                        ),
                    ),
                    correlation=WireCorrelation(
                        kind=RANDOM.choice([CorrelationKind.REQUEST, CorrelationKind.RESPONSE]),
                        wire_req_id=RANDOM.getrandbits(64),
                    ),
                    src_peer_bytes=identity.peer_id.to_bytes(),
                )
                # The node takes no more than it can, or has cut us off.
                with contextlib.suppress(NotConnectedError, QueueFullError):
                    backend.send(peer, b"".join(encode(envelope)), tag=0)
                await trio.lowlevel.checkpoint()
        nursery.cancel_scope.cancel()


async def _drain(backend: Libp2pBackend) -> None:
    while True:
        await backend.events.receive()


ATTACKS: dict[str, Callable[[Multiaddr], Awaitable[None]]] = {
    attack.__name__: attack for attack in (garbage, frames, half, huge, flood)
}

if __name__ == "__main__":
    trio.run(ATTACKS[sys.argv[1]], Multiaddr(sys.argv[2]))
