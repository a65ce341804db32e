"""The models of links and clocks in a simulation.

Rule: integers only, so that a run gives the same numbers on every machine.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from bbnode.sim.errors import InvalidClock, InvalidLink

_MILLION = 1_000_000

# 10 %. Quartz drifts by some 100 ppm; a larger drift is a mistake in the unit.
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
        """Return the time on this clock at a time of the network."""
        if not self.drift_ppm:
            return self.offset_ns + true_ns
        return self.offset_ns + true_ns * (_MILLION + self.drift_ppm) // _MILLION

    def true_ns(self, local_ns: int) -> int:
        """Return the first time of the network at which this clock shows `local_ns` or more."""
        elapsed = max(0, local_ns - self.offset_ns)
        return -(-elapsed * _MILLION // (_MILLION + self.drift_ppm))


MS: Final = 1_000_000  # nanoseconds
S: Final = 1_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkModel:
    """One direction of a link. Times in nanoseconds, probabilities per envelope.

    Attributes:
        latency_ns: minimum delay of every envelope.
        jitter_ns: maximum of the additional delay, which is drawn uniformly.
        loss: probability that an envelope is silently lost.
        duplication: probability that an envelope arrives twice.
        reorder: probability that an envelope is held back, so that later ones overtake it.
        reorder_ns: maximum time for which it is held back.

    Raises:
        InvalidLink: a time is negative or a probability is not within 0 .. 1.
    """

    latency_ns: int = MS
    jitter_ns: int = 0
    loss: float = 0.0
    duplication: float = 0.0
    reorder: float = 0.0
    reorder_ns: int = 10 * MS
    # True for a link with a latency only, for which nothing is drawn.
    is_plain: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("latency_ns", "jitter_ns", "reorder_ns"):
            value = getattr(self, name)
            if type(value) is not int or value < 0:
                raise InvalidLink(f"{name} is {value!r}; give nanoseconds, an integer of 0 or more")
        for name in ("loss", "duplication", "reorder"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not 0 <= value <= 1:
                raise InvalidLink(f"{name} is {value!r}; give a probability between 0 and 1")
        faults = (self.jitter_ns, self.loss, self.duplication, self.reorder)
        object.__setattr__(self, "is_plain", not any(faults))
