"""The protocol to ask a restarted peer which requests it still has.

Rule: a requester may ask about its own requests alone: for each id the answer tells if the peer has
the request and will answer it. A peer of an earlier release does not speak the protocol; its
requester then waits as long as before.

    request   2 bytes big-endian count, then 8 bytes big-endian for each id
    answer    1 byte for each id, in the same order: 1, it has the request; 0, it has not
"""

from __future__ import annotations

import struct
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Final

import trio

from bbnode.ir.caps import MAX_PENDING_ASKED, PENDING_ANSWER_S
from bbnode.ir.errors import PeerError
from bbnode.ir.peer import PeerId
from bbnode.transport.base import ProtocolStream, Transport, read_exactly

PENDING_PROTOCOL: Final = "/bbnode/pending/1.0.0"

_COUNT: Final = struct.Struct(">H")
_ID_BYTES: Final = 8

# Returns those of a peer's request ids that this node still has.
Has = Callable[[PeerId, Sequence[int]], Collection[int]]


class PendingUnknown(PeerError):
    """A peer did not answer which requests it has."""


def serve(transport: Transport, has: Has) -> None:
    """Answer on all connections. Call it before the transport runs."""
    transport.register_protocol(PENDING_PROTOCOL, _server(has))


def _server(has: Has) -> Callable[[ProtocolStream], Awaitable[None]]:
    async def handle(stream: ProtocolStream) -> None:
        with trio.fail_after(PENDING_ANSWER_S):
            (count,) = _COUNT.unpack(await read_exactly(stream, _COUNT.size))
            if count > MAX_PENDING_ASKED:
                raise PendingUnknown(f"{stream.peer} asks for {count} requests at once")
            ids = _ids(await read_exactly(stream, count * _ID_BYTES))
            pending = has(stream.peer, ids)
            await stream.write(bytes(each in pending for each in ids))

    return handle


async def lost(transport: Transport, peer: PeerId, ids: Sequence[int]) -> frozenset[int]:
    """Return the ids of our requests that a connected peer no longer has.

    Raises PendingUnknown, and NotConnectedError and StreamBrokenError as `open_stream`.
    """
    gone: set[int] = set()
    for at in range(0, len(ids), MAX_PENDING_ASKED):
        part = ids[at : at + MAX_PENDING_ASKED]
        with trio.move_on_after(PENDING_ANSWER_S) as scope:
            async with transport.open_stream(peer, PENDING_PROTOCOL) as stream:
                raw = b"".join(each.to_bytes(_ID_BYTES, "big") for each in part)
                await stream.write(_COUNT.pack(len(part)) + raw)
                answer = await read_exactly(stream, len(part))
        if scope.cancelled_caught or not set(answer) <= {0, 1}:
            raise PendingUnknown(f"{peer} does not say which requests it has")
        gone.update(each for each, has in zip(part, answer, strict=True) if not has)
    return frozenset(gone)


def _ids(raw: bytes) -> tuple[int, ...]:
    return tuple(
        int.from_bytes(raw[at : at + _ID_BYTES], "big") for at in range(0, len(raw), _ID_BYTES)
    )
