"""What becomes of messages that the transport gives up.

Rule: while the node runs, each is told to the engine as a SendFailed; once it stops nobody listens
any more, and what no peer has acknowledged is kept for whoever saves the node's state.
"""

from __future__ import annotations

from collections.abc import Iterable

from bbnode.transport.base import SendFailed, Unsent
from bbnode.transport.counters import Counters
from bbnode.transport.inbox import Inbox
from bbnode.transport.outbound import Outbound
from bbnode.transport.session import PeerSession


def unsent_of(session: PeerSession, items: Iterable[Outbound]) -> list[Unsent]:
    """Messages to a peer, as they are kept."""
    return [Unsent(peer=session.peer, tag=item.tag, parts=item.parts) for item in items]


class GivenUp:
    """Tells of them, or keeps them."""

    def __init__(self, inbox: Inbox, counters: Counters) -> None:
        self._inbox = inbox
        self._counters = counters
        # Set when the node stops: from then on nothing is told.
        self.keeping = False
        self.kept: list[Unsent] = []

    def fail(
        self,
        session: PeerSession,
        items: Iterable[Outbound],
        reason: str,
        *,
        blames_peer: bool = True,
    ) -> None:
        """Give up messages to a peer; it is never blamed while we do not allow it ourselves."""
        if self.keeping:
            self.kept += unsent_of(session, items)
            return
        blames = blames_peer and not session.denied
        for item in items:
            self._counters.add("outbound.failed")
            self._inbox.notify(
                SendFailed(peer=session.peer, tag=item.tag, reason=reason, blames_peer=blames)
            )
