"""A ping on demand: one round trip to a peer over an open connection.

Rule: the protocol `/bbnode/ping/1` sends back the bytes that it receives, 32 at a time, until the
other side ends the stream, and at most `MAX_ECHOES` times.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable

import trio

from bbnode.ir.caps import MAX_ECHOES
from bbnode.ir.errors import PeerError
from bbnode.ir.peer import PeerId
from bbnode.transport.base import ProtocolStream, Transport

PING_PROTOCOL = "/bbnode/ping/1"
# The size of libp2p's own ping: enough that no answer can be guessed.
PING_BYTES = 32

Ping = Callable[[PeerId], Awaitable[float]]


class WrongEcho(PeerError):
    """A peer sent back other bytes than it was sent."""


def register(backend: Transport) -> Ping:
    """Serve pings, and return the function that sends ours; call it before `run`."""
    backend.register_protocol(PING_PROTOCOL, echo)
    return to(backend)


def to(backend: Transport) -> Ping:
    """Return the function that pings a connected peer."""

    async def ping(peer: PeerId) -> float:
        """Return the seconds of one round trip.

        Raises NotConnectedError, TooManyStreamsError, StreamBrokenError or WrongEcho.
        """
        sent = os.urandom(PING_BYTES)
        async with backend.open_stream(peer, PING_PROTOCOL) as stream:
            began = trio.current_time()
            await stream.write(sent)
            received = await _read_exactly(stream)
            took = trio.current_time() - began
            await stream.end()
        if received != sent:
            raise WrongEcho(f"{peer} sent back {len(received)} bytes that are not the ping's")
        return took

    return ping


async def echo(stream: ProtocolStream) -> None:
    """Serve one stream of the protocol."""
    for _ in range(MAX_ECHOES):
        data = await _read_exactly(stream)
        if len(data) < PING_BYTES:
            return
        await stream.write(data)


async def _read_exactly(stream: ProtocolStream) -> bytes:
    """Return PING_BYTES bytes, or fewer at the end of the stream."""
    data = b""
    while len(data) < PING_BYTES and (part := await stream.read(PING_BYTES - len(data))):
        data += part
    return data
