"""Envelopes that wait for their peers after a start of this node.

Rule: envelopes that were not acknowledged before the last stop are sent when their peer connects,
under their old ids, so that a peer that has them already drops the duplicates. So are envelopes
that a resumed node sends to a peer whose connection is not back yet: a program knows nothing of the
restart. If the peer does not come back in time, the send fails like any other; the peer is not
blamed, since it was this node that stopped.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Final

import trio

from bbnode.daemon.state.checkpoint import UnsentEnvelope
from bbnode.engine import steps
from bbnode.ir.caps import MAX_KEPT_UNSENT_BYTES
from bbnode.ir.peer import PeerId
from bbnode.transport.base import ConnectionOpened, TransportEvent, Unsent

logger = logging.getLogger(__name__)

# A peer that could not reach us for long dials every 30 s (TransportLimits.redial_max_s), and one
# that was restarted as well has to start first. At most MAX_KEPT_UNSENT_BYTES wait.
WAIT_S: Final = 120.0

Failed = Callable[[PeerId, int, str], None]


class Resend:
    """Envelopes that wait for their peers after a start."""

    def __init__(
        self,
        kept: Sequence[UnsentEnvelope],
        *,
        expected: Iterable[PeerId] = (),
        send: Callable[[steps.SendEnvelope], None],
        failed: Failed,
    ) -> None:
        """Create it with the envelopes that were kept over the stop.

        `expected` are the peers that should come back; `failed` is called with the peer, the tag,
        and the reason.
        """
        self._send = send
        self._failed = failed
        # None if there was no room to keep its bytes.
        self._lost = [each for each in kept if each.data is None]
        self._waiting: dict[PeerId, list[Unsent]] = {}
        for each in kept:
            if each.data is not None:
                self._add(Unsent(peer=each.peer, tag=each.tag, parts=(memoryview(each.data),)))
        self._expected = {*expected, *self._waiting}

    @property
    def peers(self) -> tuple[PeerId, ...]:
        """The peers for which envelopes wait."""
        return tuple(self._waiting)

    def tags(self, peer: PeerId) -> frozenset[int]:
        """Return the tags of the envelopes that wait for a peer."""
        return frozenset(each.tag for each in self._waiting.get(peer, ()))

    def unsent(self) -> list[Unsent]:
        """Return the waiting envelopes, to be kept over another stop."""
        return [each for waiting in self._waiting.values() for each in waiting]

    def keep(self, step: steps.SendEnvelope) -> bool:
        """Keep an envelope until its peer is back; return False if the peer is not awaited."""
        if step.peer not in self._expected:
            return False
        if step.size + sum(each.size for each in self.unsent()) > MAX_KEPT_UNSENT_BYTES:
            return False
        parts = tuple(memoryview(part) for part in step.parts)
        self._add(Unsent(peer=step.peer, tag=step.tag, parts=parts))
        return True

    def heard(self, event: TransportEvent) -> None:
        """Handle an event of the transport; a peer that connects gets its waiting envelopes."""
        if not self._expected or not isinstance(event, ConnectionOpened):
            return
        self._expected.discard(event.peer)
        waiting = self._waiting.pop(event.peer, ())
        for each in waiting:
            self._send(steps.make_send(each.peer, (), each.parts, each.tag))
        if waiting:
            logger.info("sent again", extra={"peer": str(event.peer), "envelopes": len(waiting)})

    async def run(self) -> None:
        """Fail the envelopes whose peer did not come back in time."""
        for each in self._lost:
            self._failed(each.peer, each.tag, "there was no room to keep it over a stop")
        self._lost = []
        await trio.sleep(WAIT_S)
        # A peer that is not back by now is like any other that is not connected.
        self._expected = set()
        for peer, waiting in self._waiting.items():
            for unsent in waiting:
                self._failed(peer, unsent.tag, "the peer did not come back after this node's stop")
        self._waiting = {}

    def _add(self, envelope: Unsent) -> None:
        self._waiting.setdefault(envelope.peer, []).append(envelope)
