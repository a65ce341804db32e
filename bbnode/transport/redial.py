"""When to dial again: exponential from `redial_min_s` to `redial_max_s`, with jitter.

Rule: the first failure waits the minimum, each further one twice as long; every wait is spread
by 20 % so that many peers of one restarted server do not come back in step.
"""

from __future__ import annotations

import random

from bbnode.transport.base import TransportLimits

_JITTER = 0.2


class Redial:
    """The waits of one dialer task."""

    __slots__ = ("_limits", "_random", "failures")

    def __init__(self, limits: TransportLimits, rng: random.Random) -> None:
        self._limits = limits
        self._random = rng
        self.failures = 0

    def reset(self) -> None:
        """A connection came about: the next failure waits the minimum again."""
        self.failures = 0

    def next_delay_s(self, *, denied: bool = False) -> float:
        """Count a failure and say how many seconds to wait after it.

        `denied`: our own authorizer was in the way, which may think otherwise soon.
        """
        limits = self._limits
        # 2 ** 32 times any minimum is over every maximum; a bound keeps the float finite.
        base = limits.redial_min_s * 2.0 ** min(self.failures, 32)
        self.failures += 1
        spread = min(base, limits.redial_max_s) * self._random.uniform(1 - _JITTER, 1 + _JITTER)
        most_s = min(limits.redial_max_s, limits.redial_denied_s) if denied else limits.redial_max_s
        return min(max(spread, limits.redial_min_s), most_s)
