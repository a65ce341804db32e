"""Refusals that a node tells: to whom it owes an answer, and to whom it took nothing from.

Rule: each request gets one answer, yes or no. An execution that a request started owes it until it
answers; if it ends before, or fails so that it can't answer any more, the requester is told why. A
request or one-way message that is refused on arrival is told as well, and so is a one-way message
whose execution fails: its sender hands that on to whoever sent it what it had sent that for, back
to where the chain began. Of those at most MAX_REFUSALS_PER_S are told a second and peer. A refusal
is one small fill; nothing is said to peers that are denied, to answers, and to refusals.

What is told: the kind always; of errors of bbnode the text too, of others the class and the text.
Only the first line of a text, without the folders of paths, and cut.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from bbnode.engine.clock import NodeClock
from bbnode.engine.empty import EMPTY
from bbnode.engine.frame import Frame
from bbnode.engine.reports import Reports
from bbnode.engine.snapshot.codec import (
    PEER,
    PLAIN,
    SnapshotReader,
    SnapshotWriter,
    mapping,
)
from bbnode.engine.wire.outbound import EnvelopeOutbox
from bbnode.ir import keys
from bbnode.ir.address import REFUSED_SUFFIX
from bbnode.ir.caps import MAX_REFUSALS_PER_S, MAX_REFUSED_PEERS
from bbnode.ir.envelope import CorrelationKind, SlotFill
from bbnode.ir.peer import PeerId
from bbnode.ir.refusal import WireRefusal, encode_refusal
from bbnode.ir.texts import without_folders

NOT_ANSWERED = WireRefusal("NotAnswered", "its execution ended without an answer")

# The kind of an answer that a transport has given up.
UNDELIVERED: Final = "AnswerNotSent"
# In the place of a failure that was told by one peer to the next: who it was that failed.
FURTHER_ON: Final = "on"
LEAVING = WireRefusal("ShuttingDown", "this node is being stopped")

_S = 1_000_000_000
_COUNTS = mapping(PEER, PLAIN)


class PerSecond:
    """Counts things of peers, to allow each peer so many a second."""

    __slots__ = (
        "_counts",
        "_most",
        "_second",
    )

    def __init__(self, most: int) -> None:
        self._most = most
        self._second = 0
        self._counts: dict[PeerId, int] = EMPTY

    def take(self, peer: PeerId, now_ns: int) -> bool:
        """Count one; return False if the peer has had its share of this second."""
        second = now_ns // _S
        if second != self._second or self._counts is EMPTY:
            self._second = second
            self._counts = {}
        count = self._counts.get(peer, 0)
        if count >= self._most or (not count and len(self._counts) >= MAX_REFUSED_PEERS):
            return False
        self._counts[peer] = count + 1
        return True

    def state(self, writer: SnapshotWriter) -> Any:
        """Return what a snapshot saves: the counts of the last second."""
        return [self._second, _COUNTS.save(self._counts, writer)]

    def load(self, plain: Any, reader: SnapshotReader) -> None:
        """Load what `state` returned."""
        self._second, counts = plain
        self._counts = _COUNTS.load(counts, reader)


@dataclass(eq=False, repr=False)
class Refusals:
    """Tells peers what this node refuses them."""

    __slots__ = (
        "_rate",
        "clock",
        "leaving",
        "outbound",
        "reports",
    )

    clock: NodeClock
    reports: Reports
    outbound: EnvelopeOutbox

    def __post_init__(self) -> None:
        self._rate = PerSecond(MAX_REFUSALS_PER_S)
        self.leaving = False  # the host stops for good: a restored node begins anew

    def unanswered(self, frame: Frame) -> None:
        """Tell the requester of an execution that it will not answer, and why."""
        debt, peer = frame.debt, frame.source_peer
        frame.debt = None
        if debt is None or peer is None:
            return
        debt = public(debt) if debt.kind else _without_failure(frame)
        self._tell(peer, CorrelationKind.RESPONSE, frame.wire_req_id, debt)

    def undelivered(self, tag: int, peer: PeerId, reason: str) -> None:
        """Tell a requester that its answer was made and could not be sent, while it is connected.

        One that is not could not be told either: for it, the connection is lost.
        """
        wire_req_id = self.outbound.take_answered(tag)
        if wire_req_id and peer in self.outbound.neighbours.peers:
            why = WireRefusal(UNDELIVERED, f"the answer could not be sent: {reason}")
            self._tell(peer, CorrelationKind.RESPONSE, wire_req_id, why)

    def at_arrival(
        self,
        peer: PeerId,
        kind: CorrelationKind,
        wire_req_id: int,
        refusal: WireRefusal,
        *,
        has_come: Callable[[], bool] = lambda: False,
    ) -> None:
        """Tell a peer that its request or message was not taken.

        `has_come` may look at many things: it is asked, last, if the same was taken before.
        """
        if kind is CorrelationKind.RESPONSE or not wire_req_id:
            return
        is_request = kind is CorrelationKind.REQUEST
        if not is_request and peer == self.outbound.neighbours.self_peer:
            return  # nobody but this node needs to know, and it does
        if not self._rate.take(peer, self.clock.now_ns):
            self.reports.counts["refusals.withheld"] += 1
            return
        if has_come():
            return
        self._tell(peer, CorrelationKind.RESPONSE if is_request else kind, wire_req_id, refusal)

    def _tell(
        self, peer: PeerId, kind: CorrelationKind, wire_req_id: int, refusal: WireRefusal
    ) -> None:
        fill = SlotFill(dest_suffix=REFUSED_SUFFIX, payload=encode_refusal(refusal))
        if self.outbound.refuse(peer, fill, kind, wire_req_id):
            self.reports.counts["refusals.sent"] += 1
        else:
            self.reports.counts["refusals.withheld"] += 1

    def state(self, writer: SnapshotWriter) -> Any:
        """Return what a snapshot saves: the rates."""
        return self._rate.state(writer)

    def load(self, plain: Any, reader: SnapshotReader) -> None:
        """Load what `state` returned."""
        self._rate.load(plain, reader)


def _without_failure(frame: Frame) -> WireRefusal:
    """Return why an execution in which nothing failed has not answered."""
    skipped = frame.skipped or {}
    for op in frame.plan.ops:
        if op.op_type == keys.OP_SEND_RESP and op.index in skipped:
            return WireRefusal("Skipped", skipped[op.index], op.name)
    return WireRefusal(NOT_ANSWERED.kind, NOT_ANSWERED.detail, frame.plan.name)


def public(refusal: WireRefusal) -> WireRefusal:
    """Return a refusal with what others may read of the text of a failure."""
    return WireRefusal(refusal.kind, public_text(refusal.detail), refusal.where)


def public_text(detail: str) -> str:
    """Return what others may read of a failure's text: its first line, without folders."""
    return without_folders(detail.partition("\n")[0])
