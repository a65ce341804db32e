"""What the policy says, and the limits it is given.

Rule: plain values. A reason is a short word that users and metrics match on; the detail is for
people, and says what to do.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from bbnode.access.buckets import Rate


class Reason(enum.StrEnum):
    """What a decision says; the value is the label that users and metrics match on."""

    ALLOWED = "allowed"
    BLOCKLISTED = "blocklisted"
    NOT_ALLOWLISTED = "not_allowlisted"
    NOT_A_MEMBER = "not_a_member"  # the detail begins with the value of a `Refusal`
    CLASS_NOT_GRANTED = "class_not_granted"
    MESSAGE_RATE = "message_rate"
    MISCONDUCT = "misconduct"
    BYTE_BUDGET = "byte_budget"


class Standing(enum.StrEnum):
    """What a peer that may connect is to this node: who gets room when there is little."""

    # A member of the private network, or on the allow list.
    MEMBER = "member"
    # There to redeem a ticket, and for nothing else.
    GUEST = "guest"
    # Anybody: an open node knows no other.
    STRANGER = "stranger"


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Whether a peer may, why, and which rule said so."""

    allowed: bool
    reason: Reason
    rule: str
    detail: str
    # Of an envelope that may come in, and not yet: in how many seconds. 0 for all others.
    wait_s: float = 0.0
    standing: Standing = Standing.STRANGER


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Rates of one peer; None is no limit. Units: messages, and bytes of whole envelopes."""

    messages: Rate | None = None
    bytes: Rate | None = None
