"""Asking the authorizer, and counting what it refuses.

Rule: the one place where the transport asks who may talk. Without an authorizer everybody may.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable

from bbnode.access.decision import Standing
from bbnode.ir.caps import MAX_REASONS
from bbnode.ir.peer import PeerId
from bbnode.transport.base import Authorizer, Decision, Direction, Hello
from bbnode.transport.counters import Counters


class Gate:
    """What may come and go. Each question is answered with a reason against it, or with ""."""

    def __init__(self, authorizer: Authorizer | None, counters: Counters) -> None:
        self._authorizer = authorizer
        self._counters = counters
        # Refusals by reason.
        self.denied: Counter[str] = Counter()

    def connection(self, peer: PeerId, direction: Direction, hello: Hello | None) -> str:
        """A connection, whose hello has come or not."""
        if self._authorizer is None:
            return ""
        if hello is not None:
            return self.hello(peer, direction, hello)[0]
        return self._reason(self._authorizer.connection(peer, direction))

    def hello(self, peer: PeerId, direction: Direction, hello: Hello) -> tuple[str, Standing]:
        """A first message: the reason against it, and what the peer is to this node."""
        if self._authorizer is None:
            return "", Standing.STRANGER
        decision = self._authorizer.hello(peer, direction, hello)
        return self._reason(decision), decision.standing

    def envelope(self, peer: PeerId, direction: Direction, size: int) -> str:
        """One envelope from a peer or to it."""
        if self._authorizer is None:
            return ""
        return self._reason(self._authorizer.envelope(peer, direction, size))

    def admits_from(self, peer: PeerId) -> Callable[[int], float]:
        """In how many seconds an envelope of a size may come in from `peer`; inf: it may not."""
        authorizer = self._authorizer
        if authorizer is None:
            return lambda _size: 0.0

        def admit(size: int) -> float:
            decision = authorizer.envelope(peer, Direction.INBOUND, size)
            if decision.allowed:
                return 0.0
            if decision.wait_s > 0:
                return decision.wait_s  # late, and not refused
            self._reason(decision)
            return math.inf

        return admit

    def is_known(self, peer: PeerId) -> bool:
        """Whether a peer is known for good."""
        return self._authorizer is None or self._authorizer.is_known(peer)

    def _reason(self, decision: Decision) -> str:
        if decision.allowed:
            return ""
        reason = decision.reason or "not allowed"
        known = reason in self.denied or len(self.denied) < MAX_REASONS
        self.denied[reason if known else "other"] += 1
        self._counters.add("access.denied")
        return reason
