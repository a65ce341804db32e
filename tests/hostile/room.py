"""Attacks on room: large messages that never come, and envelopes that mean nothing."""

from __future__ import annotations

import random

import trio
from libp2p.exceptions import BaseLibp2pError
from multiaddr import Multiaddr

from bbnode.ir.address import peer_of_address
from bbnode.transport.errors import NotConnectedError, QueueFullError
from bbnode.transport.links.framing import FrameType, Lane, encode_header, encode_open
from tests.hostile.stranger import frame, hello_frame, liar, stranger
from tests.patience import PATIENCE_S

MIB = 2**20
# The largest message of a peer's share, four of which were all of the inbox.
ANNOUNCED = 64 * MIB
HOLDERS = 4
LASTS_S = 6.0
BETWEEN_S = 0.5
FLOOD = 120_000
RANDOM = random.Random(11)


async def trickle(address: Multiaddr) -> None:
    """Four strangers that begin a large message each, and send a byte of it now and then."""

    async def one(number: int) -> None:
        try:
            async with stranger(address, 200 + number) as peer:
                control = await peer.stream(Lane.CONTROL)
                await control.write(hello_frame() + frame(FrameType.START, number=1))
                bulk = await peer.stream(Lane.BULK)
                await bulk.write(
                    frame(FrameType.START, number=1)
                    + encode_open(1, ANNOUNCED, 0)
                    + encode_header(FrameType.CHUNK, MIB, 1)
                )
                while True:
                    await bulk.write(b"x")
                    with trio.move_on_after(BETWEEN_S):
                        await peer.connection.event_closed.wait()
                        return
        except (BaseLibp2pError, OSError):
            return

    with trio.move_on_after(LASTS_S):
        async with trio.open_nursery() as nursery:
            for number in range(HOLDERS):
                nursery.start_soon(one, number)


async def undecodable(address: Multiaddr) -> None:
    """A flood of envelopes that are none, until the node cuts it off; then it dials again."""
    peer, sent = peer_of_address(address), 0
    async with liar(address, 103) as (backend, _):
        with trio.fail_after(PATIENCE_S):
            while sent < FLOOD and backend.peers():
                try:
                    backend.send(peer, RANDOM.randbytes(200), tag=0)
                    sent += 1
                except (QueueFullError, NotConnectedError):
                    pass
                await trio.lowlevel.checkpoint()
            assert sent < FLOOD, "it was never cut off"
            closed = backend.counters()["links.closed"]
            while backend.counters()["links.closed"] < closed + 3:
                assert not backend.peers(), "it is let in again"
                await trio.sleep(0.01)
