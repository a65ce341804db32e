"""The conduct of peers: points for offences, and what they lead to.

Rule: OFFENCES and the constants below are all there is to it. An offence adds points, which halve
every `HALF_LIFE_S`. A peer with `THROTTLED_AT` points is throttled; at `CUT_AT` it is cut off and
refused for a while, twice as long each time, until it has behaved for `FORGIVEN_AFTER_S`. The clock
is an argument: the same offences at the same times have the same result. Offences that an honest
peer of another version or on a bad line may commit have a ceiling below `CUT_AT`.

An offence counts against the authenticated peer, never against a peer that a message names.
"""

from __future__ import annotations

import enum
import math
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Final

from bbnode.access.decision import Decision, Rate, Reason
from bbnode.ir.caps import (
    BACKOFF_S,
    CUT_AT,
    FORGIVEN_AFTER_S,
    HALF_LIFE_S,
    MAX_BACKOFF_S,
    MAX_OF_USE,
    MAX_OFFENDERS,
    THROTTLED_AT,
)
from bbnode.ir.peer import PeerId

_NS: Final = 1_000_000_000

# The rate of envelopes of a throttled peer, enough for a program of rounds; above it they wait.
THROTTLED: Final = Rate(per_second=100, burst=100)


class Offence(enum.StrEnum):
    """An offence of a peer; the value is what users see."""

    # An envelope, a payload or a record that can't be decoded.
    UNDECODABLE = "undecodable"
    # An envelope or a record that claims to be somebody else's.
    FORGED = "forged_sender"
    # A site or a type that this node's program does not have.
    UNKNOWN_SITE = "unknown_site"
    TYPE_MISMATCH = "type_mismatch"
    # To a site that only other classes may send to.
    NOT_ITS_CLASS = "not_its_class"
    # An envelope larger than this node takes, or too many queries or records at once.
    TOO_LARGE = "too_large"
    # A missing or malformed hello; not one that a rule of access refuses.
    HELLO = "bad_hello"
    # The address of a peer at which another one answers.
    MISLED = "misleading_address"
    # Invalid frames; more than the window or the peer's share; messages that come too slowly.
    PROTOCOL = "protocol_violation"
    FLOOD = "flood"
    SLOW = "slow"


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """The cost of an offence: its points, and the most points in all that it can lead to."""

    points: float
    ceiling: float = math.inf


# Each row's points follow from how often a well-behaved peer may commit the offence.
OFFENCES: Final[dict[Offence, Weight]] = {
    # No peer that speaks our protocol sends these: 20 of them within a minute are a cut.
    Offence.UNDECODABLE: Weight(points=5),
    Offence.FORGED: Weight(points=10),
    # After an upgrade, peers that are not upgraded yet send any number of these: they are slowed
    # down, and no more.
    Offence.UNKNOWN_SITE: Weight(points=0.1, ceiling=THROTTLED_AT),
    Offence.TYPE_MISMATCH: Weight(points=0.5, ceiling=THROTTLED_AT),
    # A peer that has changed its classes may have sent before it announced the change.
    Offence.NOT_ITS_CLASS: Weight(points=2, ceiling=THROTTLED_AT),
    # Caps differ between nodes.
    Offence.TOO_LARGE: Weight(points=2, ceiling=THROTTLED_AT),
    # On a busy machine a hello may come late, or the peer may not want us; it dials again, at most
    # every 30 s in the end.
    Offence.HELLO: Weight(points=2, ceiling=THROTTLED_AT),
    # The peer may have moved since, so that another one has its address.
    Offence.MISLED: Weight(points=2, ceiling=THROTTLED_AT),
    # Each ends a connection; four within a minute are no accident.
    Offence.PROTOCOL: Weight(points=25),
    Offence.FLOOD: Weight(points=50),
    # A bad line is slow without anybody's fault; each of these takes 40 s or more.
    Offence.SLOW: Weight(points=15, ceiling=THROTTLED_AT),
}


@dataclass(slots=True)
class Record:
    """The record of one peer's offences. All times are monotonic nanoseconds."""

    points: float = 0.0
    at_ns: int = 0
    # The number of times it was cut off, and when the refusal ends.
    cuts: int = 0
    refused_until_ns: int = 0
    # For a throttled peer: the time up to which its envelopes are paid for.
    paid_ns: float = 0.0
    # Its offences since it was last forgiven.
    offences: dict[Offence, int] = field(default_factory=dict)

    def points_at(self, now_ns: int) -> float:
        """Return its points now."""
        age_s = max(0, now_ns - self.at_ns) / _NS
        return self.points * math.exp2(-age_s / HALF_LIFE_S)

    def refused_s(self, now_ns: int) -> float:
        """Return the seconds for which it is still refused; 0 when it is not."""
        return max(0, self.refused_until_ns - now_ns) / _NS


class Conduct:
    """The records of all peers with an offence. Only one task uses it, so it has no lock."""

    def __init__(self) -> None:
        # Read by the policy for each envelope; the peer with the newest offence is the last.
        self.records: OrderedDict[PeerId, Record] = OrderedDict()
        # Peers that have been useful (`make_known`), the most recent last.
        self.known: OrderedDict[PeerId, None] = OrderedDict()

    def make_known(self, peer: PeerId) -> None:
        """Note that a peer has answered a request, or that the configuration names it."""
        self.known[peer] = None
        self.known.move_to_end(peer)
        if len(self.known) > MAX_OF_USE:
            self.known.popitem(last=False)

    def note(self, peer: PeerId, offence: Offence, now_ns: int) -> bool:
        """Record an offence; return True when the peer is to be cut off for it."""
        record = self.records.get(peer)
        if record is None or self._is_forgiven(record, now_ns):
            record = self.records[peer] = Record()
        self.records.move_to_end(peer)
        if len(self.records) > MAX_OFFENDERS:
            self.records.popitem(last=False)
        record.offences[offence] = record.offences.get(offence, 0) + 1
        if record.refused_s(now_ns):
            return False  # committed before the cut, which has already punished it
        weight = OFFENCES[offence]
        points = record.points_at(now_ns)
        record.points = max(points, min(points + weight.points, weight.ceiling))
        record.at_ns = now_ns
        if record.points < CUT_AT:
            return False
        backoff_s = min(BACKOFF_S * 2.0 ** min(record.cuts, 32), MAX_BACKOFF_S)
        record.refused_until_ns = now_ns + int(backoff_s * _NS)
        record.cuts += 1
        record.points = 0.0
        return True

    def pardon(self, peer: PeerId) -> None:
        """Delete the record of a peer."""
        self.records.pop(peer, None)

    def forget_forgiven(self, now_ns: int) -> int:
        """Delete the records that no longer count; return their number."""
        before = len(self.records)
        kept = (
            (p, each) for p, each in self.records.items() if not self._is_forgiven(each, now_ns)
        )
        self.records = OrderedDict(kept)
        return before - len(self.records)

    def in_good_standing(self, peer: PeerId, now_ns: int) -> bool:
        """Return True if a peer is neither refused nor throttled."""
        record = self.records.get(peer)
        return record is None or (
            record.points_at(now_ns) < THROTTLED_AT and not record.refused_s(now_ns)
        )

    def wait_s(self, peer: PeerId, now_ns: int) -> float:
        """Return the seconds until a peer that is not refused may send its next envelope."""
        record = self.records.get(peer)
        if record is None or record.points_at(now_ns) < THROTTLED_AT:
            return 0.0
        paid_ns = max(record.paid_ns, now_ns) + THROTTLED.ns_per_unit
        over_ns = paid_ns - now_ns - THROTTLED.burst_ns
        return max(0.0, over_ns) / _NS

    def pay(self, peer: PeerId, now_ns: int) -> None:
        """Charge a peer for an envelope that came in."""
        record = self.records.get(peer)
        if record is not None:
            record.paid_ns = max(record.paid_ns, now_ns) + THROTTLED.ns_per_unit

    def decide(self, peer: PeerId, now_ns: int) -> Decision:
        """Decide by its conduct alone if a peer may talk."""
        record = self.records.get(peer)
        if record is None:
            return _decision("it has done nothing wrong")
        did = ", ".join(f"{each.value} {count}" for each, count in record.offences.items())
        refused_s = record.refused_s(now_ns)
        if refused_s:
            return _decision(
                f"it was cut off ({did}) and is refused for another {refused_s:.0f} s; lift it "
                f"with: bbnode peers allow {peer}",
                refused=True,
            )
        points = record.points_at(now_ns)
        detail = f"{points:.1f} points of {CUT_AT:g} ({did})"
        if points >= THROTTLED_AT:
            detail += f"; it is throttled to {THROTTLED.per_second:g} envelopes a second"
        wait_s = self.wait_s(peer, now_ns)
        return _decision(detail, refused=wait_s > 0, wait_s=wait_s)

    def _is_forgiven(self, record: Record, now_ns: int) -> bool:
        last_ns = max(record.at_ns, record.refused_until_ns)
        return now_ns - last_ns >= FORGIVEN_AFTER_S * _NS


def _decision(detail: str, *, refused: bool = False, wait_s: float = 0.0) -> Decision:
    reason = Reason.MISCONDUCT if refused else Reason.ALLOWED
    return Decision(
        allowed=not refused, reason=reason, rule="conduct", detail=detail, wait_s=wait_s
    )
