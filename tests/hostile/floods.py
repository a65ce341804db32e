"""Floods: garbage, half frames, huge lengths, and valid envelopes for nobody."""

from __future__ import annotations

import contextlib
import random
import secrets
import struct

import trio
from libp2p.exceptions import BaseLibp2pError
from multiaddr import Multiaddr

from bbnode.ir.address import peer_of_address
from bbnode.ir.envelope import CorrelationKind
from bbnode.ir.errors import BbnodeError
from bbnode.transport.errors import NotConnectedError, QueueFullError
from bbnode.transport.identity import Identity
from bbnode.transport.libp2p.handshake import NoiseKeys
from bbnode.transport.libp2p.noise_channel import OVERHEAD_BYTES
from bbnode.transport.libp2p.securing import secure_dialled
from bbnode.transport.libp2p.tcp import connect
from bbnode.transport.libp2p.wire import BROKEN, SocketWire
from bbnode.transport.links.framing import FrameType, Lane, encode_header
from tests.hostile.stranger import envelope, hello_frame, liar, stranger

CONNECTIONS = 20
LASTS_S = 4.0
# All that a half-open attack may wait: the node closes who says no hello after five seconds.
HELD_S = 12.0
RANDOM = random.Random(7)

HELLO = hello_frame()


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
        try:
            async with stranger(address, number) as peer:
                stream = await peer.stream(Lane.CONTROL)
                for data in writes:
                    await stream.write(data)
                with trio.move_on_after(HELD_S):
                    await peer.connection.event_closed.wait()
        except (BaseLibp2pError, OSError):
            return

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


async def senseless(address: Multiaddr) -> None:
    """Frames that mean nothing to the muxer, as fast as they go, from new identities each time."""
    kinds = [(1, 0, 9), (0, 0, 9), (2, 1, 0), (2, 2, 0), (1, 8, 9), (3, 0, 0)]

    async def one(number: int) -> None:
        kind, flags, stream = kinds[number % len(kinds)]
        frames = struct.pack(">BBHII", 0, kind, flags, stream, 0) * 5_000
        sealed = memoryview(bytearray(len(frames) + OVERHEAD_BYTES))
        while True:
            keys = NoiseKeys(Identity.from_seed(secrets.token_bytes(32)))
            try:
                wire = SocketWire(await connect(address))
            except BbnodeError:
                continue
            try:
                secured = await secure_dialled(wire, keys, peer_of_address(address))
                while True:
                    left = sealed[: secured.channel.seal(frames, sealed, 0)]
                    while left:
                        left = left[wire.send(left) :]
                        if wire.blocked:
                            await wire.drain()
                        else:
                            await trio.lowlevel.checkpoint()
            except (BbnodeError, *BROKEN):
                wire.close()

    with trio.move_on_after(LASTS_S):
        async with trio.open_nursery() as nursery:
            for number in range(3 * CONNECTIONS):
                nursery.start_soon(one, number)


async def flood(address: Multiaddr) -> None:
    """Envelopes that are valid, as many as go: answers to nothing, and values for nobody."""
    peer = peer_of_address(address)
    async with liar(address, 102) as (backend, identity):
        with trio.move_on_after(LASTS_S):
            while True:
                made = envelope(
                    identity,
                    RANDOM.getrandbits(64),
                    RANDOM.randbytes(200),
                    RANDOM.getrandbits(64),
                    kind=RANDOM.choice([CorrelationKind.REQUEST, CorrelationKind.RESPONSE]),
                    wire_req_id=RANDOM.getrandbits(64),
                )
                # The node takes no more than it can, or has cut us off.
                with contextlib.suppress(NotConnectedError, QueueFullError):
                    backend.send(peer, made, tag=0)
                await trio.lowlevel.checkpoint()
