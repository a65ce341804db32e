"""Open requests to a restarted peer, and which of them it has lost.

Rule: the `session_id` of a hello names a start of a peer. If it differs from the last one, or this
node was restarted itself, the peer is asked which of the open requests it has; callers that wait
for a lost one are notified at once. Requests that are still queued are not asked for: they go to
the new process. Those in transit at that moment are: nobody else knows if they arrived. A peer that
resumed from its snapshot has its requests, and is waited for; if it has answered one before it is
asked, its answer has been received already, and is processed first.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from typing import Final

import trio

from bbnode.engine import Node
from bbnode.ir.caps import MAX_RECOGNISED
from bbnode.ir.errors import BbnodeError
from bbnode.ir.peer import PeerId
from bbnode.transport import pending_exchange
from bbnode.transport.base import (
    Capability,
    ConnectionOpened,
    DeliveryFailed,
    Transport,
    TransportEvent,
)

logger = logging.getLogger(__name__)

# Peers that wait for their turn to be asked; beyond that, the requests wait for their deadlines.
_MOST_WAITING: Final = 1024


class Restarts:
    """Asks restarted peers for the requests of this node, and answers theirs."""

    def __init__(
        self,
        node: Node,
        transport: Transport,
        *,
        kept: Callable[[PeerId], Collection[int]],
        take_received: Callable[[], object],
    ) -> None:
        """Create it for one node.

        `kept` returns the tags of a peer's envelopes that are still to be sent again;
        `take_received` passes the node everything that its transport has received so far.
        """
        self._node = node
        self._transport = transport
        self._kept = kept
        self._take_received = take_received
        # The last known start of each peer, the latest last.
        self._sessions: OrderedDict[PeerId, str] = OrderedDict()
        # Envelopes that may have arrived, and peers to ask.
        self._doubtful: dict[PeerId, list[DeliveryFailed]] = {}
        self._waiting: set[PeerId] = set()
        self._ask, self._asked = trio.open_memory_channel[PeerId](_MOST_WAITING)
        self._serves = Capability.STREAMS in transport.capabilities
        if self._serves:
            pending_exchange.serve(transport, self._has)

    def heard(self, event: TransportEvent) -> None:
        """Handle an event of the transport."""
        if not self._serves or not isinstance(event, ConnectionOpened):
            return
        peer, session = event.peer, event.hello.session_id
        same = self._sessions.get(peer) == session
        self._sessions[peer] = session
        self._sessions.move_to_end(peer)
        if len(self._sessions) > MAX_RECOGNISED:
            self._sessions.popitem(last=False)
        if not same and self._node.awaited(peer):
            self._ask_soon(peer)

    def doubt(self, event: DeliveryFailed) -> bool:
        """Find out if a peer has a request that may have arrived; return False if impossible."""
        peer, tag = event.peer, event.tag
        if not self._serves or tag not in self._node.awaited(peer).values():
            return False
        if not self._ask_soon(peer):
            return False
        self._doubtful.setdefault(peer, []).append(event)
        return True

    def _ask_soon(self, peer: PeerId) -> bool:
        if peer in self._waiting:
            return True
        try:
            self._ask.send_nowait(peer)
        except trio.WouldBlock:
            return False
        self._waiting.add(peer)
        return True

    async def run(self) -> None:
        """Ask the restarted peers."""
        async with trio.open_nursery() as nursery:
            async for peer in self._asked:
                self._waiting.discard(peer)
                nursery.start_soon(self._find_lost, peer, self._doubtful.pop(peer, ()))

    async def _find_lost(self, peer: PeerId, doubtful: Sequence[DeliveryFailed]) -> None:
        on_their_way = self._unacknowledged(peer)
        tags = {
            wire_req_id: tag
            for wire_req_id, tag in self._node.awaited(peer).items()
            if tag not in on_their_way
        }
        try:
            gone = await pending_exchange.lost(self._transport, peer, tuple(tags))
        except BbnodeError as error:
            # Most likely a peer of an earlier release: its requests wait for their deadlines.
            logger.debug("%s does not say which requests it has: %s", peer, error)
            for each in doubtful:
                blames = each.blames_peer
                self._node.send_failed(peer, each.reason, tag=each.tag, blames_peer=blames)
            return
        if gone:
            self._take_received()
        for wire_req_id in sorted(gone):
            self._node.request_lost(peer, tags[wire_req_id])

    def _has(self, peer: PeerId, ids: Sequence[int]) -> Collection[int]:
        return self._node.has_requests(peer, ids, self._unacknowledged(peer))

    def _unacknowledged(self, peer: PeerId) -> set[int]:
        tags = {each.tag for each in self._transport.unsent() if each.peer == peer}
        return tags | set(self._kept(peer))
