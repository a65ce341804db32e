"""A secured connection as a carrier, and its streams by protocol.

Rule: each stream begins with the negotiation of its protocol (`negotiation`), in its own task; a
stream whose negotiation does not finish in time is reset, which affects no other stream.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Final

import trio
from multiaddr import Multiaddr

from bbnode.ir.peer import PeerId
from bbnode.transport.base import Direction
from bbnode.transport.errors import NegotiationError, StreamBrokenError
from bbnode.transport.libp2p.muxer import MuxedStream, Muxer, UnreadBytes
from bbnode.transport.libp2p.negotiation import Choice, Proposal
from bbnode.transport.libp2p.securing import Secured
from bbnode.transport.libp2p.wire import ByteWire
from bbnode.transport.links.admission import Place, Stage
from bbnode.transport.links.framing import Lane
from bbnode.transport.links.link import Carrier, Link

# The code of /p2p in multiaddr's protocol table.
_P2P: Final = b"\xa5\x03"

LANE_PROTOCOLS: Final[dict[Lane, str]] = {lane: f"/bbnode/{lane.label}/1" for lane in Lane}


class Connection(Carrier):
    """One secured connection with a proved peer."""

    __slots__ = (
        "_address",
        "_direction",
        "_on_closed",
        "_peer",
        "ended",
        "for_other",
        "lanes",
        "link",
        "local_port",
        "muxer",
        "place",
        "way",
    )

    def __init__(
        self,
        wire: ByteWire,
        secured: Secured,
        *,
        direction: Direction,
        way: Multiaddr,
        place: Place,
        unread_bytes: int,
        max_streams: int,
        all_unread: UnreadBytes,
        on_stream: Callable[[Connection, MuxedStream], None],
        on_refused: Callable[[Connection, str], None],
        on_closed: Callable[[Connection], None],
    ) -> None:
        """Take over a secured wire; `way` is the address of the remote end, without its PeerId.

        The callbacks get this connection: `on_stream` with each stream that the peer opens,
        `on_refused` with the reason if the peer broke the rules, and `on_closed` once it has ended.
        """
        self._peer = secured.peer
        self._direction = direction
        self.way = way
        self._address: Multiaddr | None = None
        self._on_closed = on_closed
        # Its place among the connections of this node.
        self.place = place
        # The link that runs on it, and the peer's newest stream of each lane.
        self.link: Link | None = None
        # True if py-libp2p's host has dialled it, and not the task that keeps a peer connected.
        self.for_other = False
        # Our port of a TCP connection that we dialled, else 0.
        self.local_port = 0
        self.lanes: dict[Lane, MuxedStream] = {}
        self.ended = trio.Event()
        self.muxer = Muxer(
            wire,
            secured.channel,
            is_initiator=direction is Direction.OUTBOUND,
            ahead=secured.ahead,
            unread_bytes=unread_bytes,
            max_streams=max_streams,
            share=place.share,
            all_unread=all_unread,
            on_stream=lambda stream: on_stream(self, stream),
            on_refused=lambda reason: on_refused(self, reason),
            on_end=self._has_ended,
        )

    @property
    def peer(self) -> PeerId:
        return self._peer

    @property
    def direction(self) -> Direction:
        return self._direction

    @property
    def address(self) -> Multiaddr:
        if self._address is None:
            self._address = with_peer(self.way, self._peer)
        return self._address

    @property
    def wants_lanes(self) -> bool:
        return self.place.stage is not Stage.FOREIGN

    async def open(self, lane: Lane) -> MuxedStream:
        return await self.open_protocol(LANE_PROTOCOLS[lane])

    async def open_protocol(self, protocol: str) -> MuxedStream:
        """Open a stream of any protocol; raises StreamBrokenError, and may be cancelled.

        It has no time-out of its own: the connection's heartbeat bounds it.
        """
        stream = self.muxer.open_stream()
        proposal = Proposal(protocol)
        try:
            await stream.write(proposal.opening)
            while not proposal.agreed:
                proposal.take(await _some(stream))
        except BaseException as error:
            stream.abort("its protocol was not agreed on")
            if isinstance(error, NegotiationError):
                raise StreamBrokenError(f"no stream of {protocol}: {error}") from error
            raise
        if rest := proposal.rest():
            stream.put_back(rest)
        return stream

    def has_lane(self, stream: MuxedStream) -> bool:
        """Return True for the newest stream of a lane."""
        return any(stream is each for each in self.lanes.values())

    def stream_count(self) -> int:
        return len(self.muxer.streams)

    def unread_bytes(self) -> int:
        return self.muxer.held_bytes

    def allow_unread(self, most_bytes: int) -> None:
        self.muxer.unread_bytes = most_bytes

    async def hard_close(self) -> None:
        self.close()

    def close(self) -> None:
        """End the connection at once; a second call does nothing."""
        self.muxer.close()

    def _has_ended(self, reason: str) -> None:
        if self.link is not None:
            self.link.abort(reason)
        self.ended.set()
        self._on_closed(self)


def with_peer(way: Multiaddr, peer: PeerId) -> Multiaddr:
    """Return an address with the PeerId appended."""
    raw = peer.to_bytes()
    return Multiaddr(way.to_bytes() + _P2P + bytes((len(raw),)) + raw)


async def choose(stream: MuxedStream, protocols: Collection[str]) -> str:
    """Return the protocol that the peer asks for on a stream that it has opened.

    Raises NegotiationError and StreamBrokenError.
    """
    choice = Choice(protocols)
    while not choice.chosen:
        answer = choice.take(await _some(stream))
        if answer:
            await stream.write(answer)
    if rest := choice.rest():
        stream.put_back(rest)
    return choice.chosen


async def _some(stream: MuxedStream) -> bytes:
    data = await stream.read()
    if not data:
        raise StreamBrokenError("the peer has ended the stream before its protocol was agreed on")
    return data
