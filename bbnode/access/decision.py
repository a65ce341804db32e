"""Decisions of the policy, and the rates that it enforces.

Rule: plain values. A reason is a short word that users and metrics match on; the detail is for
people, and says what to do.

A rate is the generic cell rate algorithm (ITU-T I.371), a token bucket in one integer: the time up
to which everything that has arrived is paid for. Something may come in if that time, plus its own
cost, is at most the burst ahead of now, or if nothing is left to pay for. So a message that is
larger than the whole burst comes in when the bucket is full, and is paid for by the silence after
it: a large tensor is slowed down and not refused for ever.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from bbnode.access.errors import PolicyError

_NS = 1_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """A rate: `per_second` units in the long run, `burst` units at once. Both are above 0."""

    per_second: float
    burst: float

    def __post_init__(self) -> None:
        """Raise PolicyError unless both numbers are over 0."""
        # NaN fails every comparison.
        if not (0 < self.per_second < float("inf") and 0 < self.burst < float("inf")):
            raise PolicyError(
                f"invalid rate: {self.per_second} per second with a burst of {self.burst}; both "
                "have to be over 0 (leave the limit out for no limit)"
            )

    @property
    def ns_per_unit(self) -> float:
        """The nanoseconds that one unit costs."""
        return _NS / self.per_second

    @property
    def burst_ns(self) -> float:
        """The nanoseconds that the paid time may be ahead of now."""
        # One nanosecond more makes up for rounding.
        return self.burst * _NS / self.per_second + 1


class Reason(enum.StrEnum):
    """The reason of a decision; the value is the label that users and metrics match on."""

    ALLOWED = "allowed"
    BLOCKLISTED = "blocklisted"
    NOT_ALLOWLISTED = "not_allowlisted"
    NOT_A_MEMBER = "not_a_member"  # the detail begins with the value of a `Refusal`
    CLASS_NOT_GRANTED = "class_not_granted"
    MESSAGE_RATE = "message_rate"
    MISCONDUCT = "misconduct"
    BYTE_BUDGET = "byte_budget"


class Standing(enum.StrEnum):
    """The standing of a peer that may connect, which decides who gets scarce room."""

    # A member of the private network, or a peer on the allow list.
    MEMBER = "member"
    # A peer that may redeem its ticket, and nothing else.
    GUEST = "guest"
    # Any other peer; on an open node, every peer.
    STRANGER = "stranger"


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """A decision of the policy: allowed or not, the reason, and the rule that decided."""

    allowed: bool
    reason: Reason
    rule: str
    detail: str
    # Seconds until an envelope that is too early now may come in; 0 for any other decision.
    wait_s: float = 0.0
    standing: Standing = Standing.STRANGER


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerRates:
    """The rates of each peer, in messages and in bytes of whole envelopes; None is no limit."""

    messages: Rate | None = None
    bytes: Rate | None = None
