"""Strangers that take every place: each says hello, stays, and is dialled again when it goes."""

from __future__ import annotations

import secrets

import trio
from multiaddr import Multiaddr

from bbnode.ir.address import peer_of_address
from bbnode.ir.errors import BbnodeError
from bbnode.transport.base import Counters
from bbnode.transport.identity import Identity
from bbnode.transport.libp2p.connection import LANE_PROTOCOLS
from bbnode.transport.libp2p.handshake import NoiseKeys
from bbnode.transport.libp2p.muxer import MuxedStream, Muxer, UnreadBytes
from bbnode.transport.libp2p.negotiation import Proposal
from bbnode.transport.libp2p.securing import secure_dialled
from bbnode.transport.libp2p.tcp import connect
from bbnode.transport.libp2p.wire import BROKEN, SocketWire
from bbnode.transport.limits import TransportLimits
from bbnode.transport.links.framing import FrameType, Lane
from bbnode.transport.links.shares import CoreShare, CoreShares
from tests.hostile.stranger import frame, hello_frame

# More than a node has for strangers.
STRANGERS = 2_000
LASTS_S = 600.0
AT_ONCE = 16
_PING_S = 4.0
SHARES = CoreShares(TransportLimits(), Counters(), lambda _peer: True)


async def _stay(address: Multiaddr, dialling: trio.CapacityLimiter) -> None:
    """One connection of a new identity, until the node ends it."""
    async with dialling:
        wire = SocketWire(await connect(address))
        keys = NoiseKeys(Identity.from_seed(secrets.token_bytes(32)))
        secured = await secure_dialled(wire, keys, peer_of_address(address))
    share = CoreShare(SHARES)
    share.admit()
    muxer = Muxer(
        wire,
        secured.channel,
        is_initiator=True,
        ahead=secured.ahead,
        unread_bytes=2**20,
        max_streams=16,
        share=share,
        all_unread=UnreadBytes(2**40, lambda: False),
        on_stream=lambda _stream: None,
        on_refused=lambda _reason: None,
        on_end=lambda _reason: None,
    )
    async with trio.open_nursery() as nursery:
        nursery.start_soon(muxer.run)
        control: MuxedStream = muxer.open_stream()
        opening = Proposal(LANE_PROTOCOLS[Lane.CONTROL]).opening
        # Of no class, so that no round waits for it.
        hello = hello_frame(session_id=secrets.token_hex(8))
        await control.write(opening + hello + frame(FrameType.START, number=1))
        while not muxer.ended:
            await control.write(frame(FrameType.PING, number=1))
            await trio.sleep(_PING_S)
        nursery.cancel_scope.cancel()


async def all_places(address: Multiaddr) -> None:
    """Two thousand of them at a time, until the process is ended."""
    dialling = trio.CapacityLimiter(AT_ONCE)

    async def one() -> None:
        while True:
            try:
                await _stay(address, dialling)
            except* (BbnodeError, *BROKEN):
                await trio.sleep(0.1)

    with trio.move_on_after(LASTS_S):
        async with trio.open_nursery() as nursery:
            for _ in range(STRANGERS):
                nursery.start_soon(one)
