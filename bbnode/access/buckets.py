"""A rate: how much may come per second, and how much at once.

Rule: the generic cell rate algorithm (ITU-T I.371), a token bucket in one integer: the time up
to which what came so far has been paid for. Something may come when that time, with its own
cost, is no more than the burst ahead of now; or when nothing is left to pay for. So one thing
that is larger than the whole burst comes in when the bucket is full, and is paid for by the
silence after it: a large tensor is slowed down and not refused for ever.
"""

from __future__ import annotations

from dataclasses import dataclass

from bbnode.access.errors import PolicyError

_NS = 1_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """`per_second` units in the long run, `burst` units at once. Both over 0."""

    per_second: float
    burst: float

    def __post_init__(self) -> None:
        """Raise PolicyError for what is not a rate."""
        # NaN fails every comparison.
        if not (0 < self.per_second < float("inf") and 0 < self.burst < float("inf")):
            raise PolicyError(
                f"a rate of {self.per_second} per second with a burst of {self.burst} is none; "
                "both have to be over 0 (leave the limit out for none)"
            )

    @property
    def ns_per_unit(self) -> float:
        """What one unit costs."""
        return _NS / self.per_second

    @property
    def burst_ns(self) -> float:
        """How far ahead of now the paid time may be."""
        # A nanosecond more, for what is lost in rounding.
        return self.burst * _NS / self.per_second + 1
