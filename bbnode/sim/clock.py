"""A node's own clock.

Rule: integers only, so that a run gives the same numbers on every machine. `true_ns` is the
inverse of `local_ns`, rounded up: a timer never matures before its time.
"""

from __future__ import annotations

from dataclasses import dataclass

from bbnode.sim.errors import InvalidClock

_MILLION = 1_000_000

# 10 %. Quartz drifts by some 100 ppm; beyond this it is no clock but a mistake in the unit.
MAX_DRIFT_PPM = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    """A clock that starts at `offset_ns` and runs `drift_ppm` parts per million too fast.

    Raises:
        InvalidClock: the drift is beyond MAX_DRIFT_PPM, or the offset is negative.
    """

    offset_ns: int = 0
    drift_ppm: int = 0

    def __post_init__(self) -> None:
        if abs(self.drift_ppm) > MAX_DRIFT_PPM or self.offset_ns < 0:
            raise InvalidClock(
                f"a clock of {self.drift_ppm} ppm from {self.offset_ns} ns; give a drift within "
                f"±{MAX_DRIFT_PPM} ppm and an offset of 0 or more"
            )

    def local_ns(self, true_ns: int) -> int:
        """What this clock shows at a time of the network."""
        return self.offset_ns + true_ns * (_MILLION + self.drift_ppm) // _MILLION

    def true_ns(self, local_ns: int) -> int:
        """The first time of the network at which this clock shows `local_ns` or more."""
        elapsed = max(0, local_ns - self.offset_ns)
        return -(-elapsed * _MILLION // (_MILLION + self.drift_ppm))
