"""Resending envelopes that were not acknowledged before this node's last stop.

Rule: an envelope is sent when its peer connects, under its old ids, so that a peer that has it
already drops the duplicate. If the peer does not come back in time, the send fails like any other;
the peer is not blamed, since it was this node that stopped.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Final

import trio

from bbnode.daemon.state.checkpoint import UnsentEnvelope
from bbnode.engine import steps
from bbnode.ir.peer import PeerId
from bbnode.transport.base import ConnectionOpened, TransportEvent

logger = logging.getLogger(__name__)

# A peer that has dialled in vain for long dials every 30 s (TransportLimits.redial_max_s), and one
# that was restarted as well has to start first. What waits is at most MAX_KEPT_UNSENT_BYTES.
WAIT_S: Final = 120.0

Failed = Callable[[PeerId, int, str], None]


class Resend:
    """Envelopes that wait for their peers after a start."""

    def __init__(
        self,
        kept: Sequence[UnsentEnvelope],
        *,
        send: Callable[[steps.SendEnvelope], None],
        failed: Failed,
    ) -> None:
        """`failed` is called with the peer, the tag, and why."""
        self._send = send
        self._failed = failed
        # None: there was no room to keep its bytes.
        self._lost = [each for each in kept if each.data is None]
        self._waiting: dict[PeerId, list[UnsentEnvelope]] = {}
        for each in kept:
            if each.data is not None:
                self._waiting.setdefault(each.peer, []).append(each)

    @property
    def peers(self) -> tuple[PeerId, ...]:
        """The peers that something waits for."""
        return tuple(self._waiting)

    def tags(self, peer: PeerId) -> frozenset[int]:
        """Return the tags of the envelopes that wait for a peer."""
        return frozenset(each.tag for each in self._waiting.get(peer, ()))

    def heard(self, event: TransportEvent) -> None:
        """Handle an event of the transport; a peer that connects gets what waits for it."""
        if not self._waiting or not isinstance(event, ConnectionOpened):
            return
        found = self._waiting.pop(event.peer, ())
        for each in found:
            self._send(steps.make_send(each.peer, (), (each.data or b"",), each.tag))
        if found:
            logger.info("sent again", extra={"peer": str(event.peer), "envelopes": len(found)})

    async def run(self) -> None:
        """Fail the envelopes whose peer did not come back in time."""
        for each in self._lost:
            self._failed(each.peer, each.tag, "there was no room to keep it over a stop")
        self._lost = []
        await trio.sleep(WAIT_S)
        for peer, waiting in self._waiting.items():
            for each in waiting:
                self._failed(peer, each.tag, "the peer did not come back after this node's stop")
        self._waiting = {}
