"""What a link does to envelopes, and one direction of a connection.

Rule: every direction draws from its own stream, a function of the network's seed and the two
names; so what happens between two nodes does not depend on who else is there. A link keeps
the order of what it carries, as the streams of a real connection do, but for those envelopes
that it is told to reorder.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from bbnode.engine.rng import SplitMix64, mix64
from bbnode.ir.ids import fnv1a_64
from bbnode.sim.errors import InvalidClock, InvalidLink

if TYPE_CHECKING:
    from bbnode.sim.node import SimNode


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


MS: Final = 1_000_000  # nanoseconds
S: Final = 1_000_000_000

_TWO_64 = 1 << 64


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkModel:
    """One direction of a link. Times in nanoseconds, probabilities per envelope.

    Attributes:
        latency_ns: every envelope takes as long.
        jitter_ns: and up to as much longer, drawn uniformly.
        loss: probability that an envelope vanishes without a word.
        duplication: probability that it arrives twice.
        reorder: probability that it is held back, so that later ones overtake it.
        reorder_ns: for how long at most.

    Raises:
        InvalidLink: a time is negative or a probability is not within 0 .. 1.
    """

    latency_ns: int = MS
    jitter_ns: int = 0
    loss: float = 0.0
    duplication: float = 0.0
    reorder: float = 0.0
    reorder_ns: int = 10 * MS

    def __post_init__(self) -> None:
        for name in ("latency_ns", "jitter_ns", "reorder_ns"):
            value = getattr(self, name)
            if type(value) is not int or value < 0:
                raise InvalidLink(f"{name} is {value!r}; give nanoseconds, an integer of 0 or more")
        for name in ("loss", "duplication", "reorder"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not 0 <= value <= 1:
                raise InvalidLink(f"{name} is {value!r}; give a probability between 0 and 1")


class Wire:
    """One direction between two nodes.

    `wanted`: somebody connected them; `cut`: the network keeps them apart; `up`: connected now.
    What was sent in an earlier `session` never arrives: it went down with its connection.
    """

    __slots__ = ("_last_ns", "_rng", "cut", "link", "session", "source", "target", "up", "wanted")

    def __init__(self, source: SimNode, target: SimNode, link: LinkModel, seed: int) -> None:
        self.source = source
        self.target = target
        self.link = link
        self.session = 0
        self.up = False
        self.wanted = False
        self.cut = False
        self._last_ns = 0
        stream = fnv1a_64(f"{source.name}\0{target.name}".encode())
        self._rng = SplitMix64(mix64(mix64(seed % _TWO_64) ^ stream))

    def arrivals(self, now_ns: int) -> list[int]:
        """When an envelope that is sent now arrives: never, once, or twice."""
        # A fault that a link does not have costs no draw: links without faults are the rule.
        link = self.link
        if link.loss and self._happens(link.loss):
            return []
        if link.duplication and self._happens(link.duplication):
            return [self._arrival(now_ns), self._arrival(now_ns)]
        return [self._arrival(now_ns)]

    def _arrival(self, now_ns: int) -> int:
        link = self.link
        at_ns = now_ns + link.latency_ns
        if link.jitter_ns:
            at_ns += self._up_to(link.jitter_ns)
        if link.reorder and self._happens(link.reorder):
            return at_ns + 1 + self._up_to(link.reorder_ns)
        if at_ns > self._last_ns:
            self._last_ns = at_ns
        return self._last_ns

    def _happens(self, probability: float) -> bool:
        return self._rng.next_u64() < int(probability * _TWO_64)

    def _up_to(self, most: int) -> int:
        return self._rng.next_u64() * (most + 1) >> 64
