"""Cohorts: requests to many peers that are answered once.

Rule: a cohort closes once: ALL_ANSWERED when all asked peers have answered; at its deadline, QUORUM
when enough have and BELOW_QUORUM otherwise. A peer that refuses, to which the request could not be
sent, or whose connection stays lost, has failed: it is missing from then on, with the reason, of
which the first counts. The cohort closes early, with the outcome of its deadline, once all other
peers have answered, or too few can. While it is open, an answer of a failed peer still counts, once
(a restarted peer may have got the request). Answers and refusals that are late, duplicate, from
strangers or to unknown requests are distinguished and dropped. Answers are handed out in PeerId
order.

A request suspends its execution at its RecvRespBatched, which fires once. What a cohort holds is
released with its execution.
"""

from __future__ import annotations

import enum
import itertools
import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from bbnode.engine.clock import NodeClock
from bbnode.engine.deadlines import bound_by, seconds
from bbnode.engine.empty import EMPTY
from bbnode.engine.errors import InvalidOperand, QuorumNotReached
from bbnode.engine.frame import Frame, Op
from bbnode.engine.reports import Reports
from bbnode.engine.rng import SplitMix64
from bbnode.engine.scheduler import Scheduler, Timer, TimerKind
from bbnode.engine.snapshot.codec import (
    FRAME,
    PEER,
    PLAIN,
    TIMER,
    VALUE,
    RowForm,
    SnapshotReader,
    SnapshotWriter,
    many,
    mapping,
    member,
)
from bbnode.engine.suspensions import Suspensions, WaitReason
from bbnode.engine.wire.outbound import EnvelopeOutbox
from bbnode.ir.address import parse_site_suffix
from bbnode.ir.caps import MAX_BATCH_REASONS, MAX_CLOSED_REMEMBERED
from bbnode.ir.envelope import CorrelationKind, SlotFill
from bbnode.ir.peer import PeerId
from bbnode.ir.refusal import WireRefusal
from bbnode.ir.texts import listed
from bbnode.ir.values import Composite, Metadata, ResponseBatch, Value

_NAMED = 16  # peers that a message names
# Numbers of an answer that are reported, and the length of their names.
_MAX_SAID: Final = 16
_MAX_SAID_CHARS: Final = 128

# The kinds of reasons that this node finds out by itself.
NOT_SENT: Final = "NotSent"
CONNECTION_LOST: Final = "ConnectionLost"
PEER_RESTARTED: Final = "PeerRestarted"


class CohortState(enum.Enum):
    """The states of a cohort; all but OPEN are final."""

    OPEN = "open"
    ALL_ANSWERED = "all_answered"
    QUORUM = "quorum"
    BELOW_QUORUM = "below_quorum"
    ABANDONED = "abandoned"  # its execution ended before it did


class CohortEvent(enum.Enum):
    """The events that close an open cohort."""

    LAST_ANSWER = "last_answer"
    REST_CANNOT_ANSWER = "rest_cannot_answer"  # enough have, the others failed
    QUORUM_OUT_OF_REACH = "quorum_out_of_reach"  # too many failed
    DEADLINE_WITH_QUORUM = "deadline_with_quorum"
    DEADLINE_BELOW_QUORUM = "deadline_below_quorum"
    EXECUTION_ENDED = "execution_ended"


# Other pairs can't happen: a closed cohort does not move.
TRANSITIONS: dict[tuple[CohortState, CohortEvent], CohortState] = {
    (CohortState.OPEN, CohortEvent.LAST_ANSWER): CohortState.ALL_ANSWERED,
    (CohortState.OPEN, CohortEvent.REST_CANNOT_ANSWER): CohortState.QUORUM,
    (CohortState.OPEN, CohortEvent.QUORUM_OUT_OF_REACH): CohortState.BELOW_QUORUM,
    (CohortState.OPEN, CohortEvent.DEADLINE_WITH_QUORUM): CohortState.QUORUM,
    (CohortState.OPEN, CohortEvent.DEADLINE_BELOW_QUORUM): CohortState.BELOW_QUORUM,
    (CohortState.OPEN, CohortEvent.EXECUTION_ENDED): CohortState.ABANDONED,
}


class ResponseStatus(enum.Enum):
    """The outcome of one answer or refusal; the value is the counter's suffix."""

    ACCEPTED = "accepted"
    COMPLETE = "complete"  # accepted, and the cohort closed with it
    DUPLICATE = "duplicate"
    STRANGER = "stranger"  # from a peer that was not asked
    LATE = "late"  # its cohort closed before
    UNKNOWN = "unknown"  # no such request


@dataclass(slots=True, kw_only=True)
class Cohort:
    """One request: `asked` in PeerId order, `needed` answers at the deadline.

    `envelopes`: the tags of the envelopes to peers that have not answered, one each; `failed`: the
    peers that are not waited for, and why; `took_ns`: how long each answer took.
    """

    wire_req_id: int
    request_id: int
    execution: int
    name: str
    asked: tuple[PeerId, ...]
    needed: int
    site: int  # where answers have to come to
    edge: int = 0  # the site that was asked, whose round trips are measured; 0: no site
    opened_ns: int
    deadline_ns: int
    state: CohortState = CohortState.OPEN
    answers: dict[PeerId, Value] = field(default_factory=dict)
    envelopes: dict[PeerId, int] = field(default_factory=dict)
    failed: dict[PeerId, WireRefusal] = field(default_factory=dict)
    took_ns: dict[PeerId, int] = field(default_factory=dict)
    members: frozenset[PeerId] = field(init=False)

    def __post_init__(self) -> None:
        self.members = frozenset(self.asked)

    @property
    def responded(self) -> tuple[PeerId, ...]:
        """Peers that have answered, in PeerId order."""
        return tuple(peer for peer in self.asked if peer in self.answers)

    @property
    def missing(self) -> tuple[PeerId, ...]:
        """Peers that have not answered, in PeerId order."""
        return tuple(peer for peer in self.asked if peer not in self.answers)

    @property
    def out_of_reach(self) -> bool:
        """True when fewer than `needed` have answered or still can."""
        return len(self.asked) - len(self.failed) < self.needed

    def awaits(self, peer: PeerId) -> bool:
        """Return True if the peer was asked, and has neither answered nor failed."""
        return peer in self.members and peer not in self.answers and peer not in self.failed

    def batch(self) -> ResponseBatch:
        """Return the answers, in PeerId order."""
        why = ((peer, self.failed[peer]) for peer in self.missing if peer in self.failed)
        return ResponseBatch(
            responses=tuple((peer, self.answers[peer]) for peer in self.responded),
            missing=self.missing,
            reasons=tuple(itertools.islice(why, MAX_BATCH_REASONS)),
            took_ns=tuple((peer, self.took_ns[peer]) for peer in self.responded),
        )


_REFUSAL = RowForm(WireRefusal, kind=PLAIN, detail=PLAIN, where=PLAIN)
_COHORTS = many(
    RowForm(
        Cohort,
        wire_req_id=PLAIN,
        request_id=PLAIN,
        execution=PLAIN,
        name=PLAIN,
        asked=many(PEER),
        needed=PLAIN,
        site=PLAIN,
        edge=PLAIN,
        opened_ns=PLAIN,
        deadline_ns=PLAIN,
        state=member(CohortState),
        answers=mapping(PEER, VALUE),
        envelopes=mapping(PEER, PLAIN),
        failed=mapping(PEER, _REFUSAL),
        took_ns=mapping(PEER, PLAIN),
    )
)
_FRAMES = mapping(PLAIN, FRAME)
_TIMERS = mapping(PLAIN, TIMER)


class CohortTable:
    """All cohorts of a node that are open, and the ids of those that were."""

    __slots__ = (
        "_closed",
        "_of_tag",
        "_open",
    )

    def __init__(self) -> None:
        self._open: dict[int, Cohort] = {}
        self._closed: OrderedDict[int, None] = EMPTY
        # Envelope -> the request in it and its peer, while there is no answer.
        self._of_tag: dict[int, tuple[Cohort, PeerId]] = {}

    def __len__(self) -> int:
        return len(self._open)

    def open_cohorts(self) -> Sequence[Cohort]:
        """Return all open cohorts, oldest first."""
        return tuple(self._open.values())

    def open(self, cohort: Cohort) -> Cohort:
        """Add a cohort; one that asks nobody is closed at once."""
        self._open[cohort.wire_req_id] = cohort
        if not cohort.asked:
            self._move(cohort, CohortEvent.LAST_ANSWER)
        return cohort

    def classify(self, wire_req_id: int, peer: PeerId) -> ResponseStatus:
        """Return the status that an answer of `peer` would get; changes nothing.

        It is asked before a payload is decoded, so that unwanted answers cost nothing.
        """
        cohort = self._open.get(wire_req_id)
        if cohort is None:
            return ResponseStatus.LATE if wire_req_id in self._closed else ResponseStatus.UNKNOWN
        if peer not in cohort.members:
            return ResponseStatus.STRANGER
        return ResponseStatus.DUPLICATE if peer in cohort.answers else ResponseStatus.ACCEPTED

    def get(self, wire_req_id: int) -> Cohort | None:
        """Return the open cohort with this id, or None."""
        return self._open.get(wire_req_id)

    def answer(self, wire_req_id: int, peer: PeerId, value: Value, came_ns: int) -> ResponseStatus:
        """Add an answer that came at `came_ns`, and return its status."""
        status = self.classify(wire_req_id, peer)
        if status is not ResponseStatus.ACCEPTED:
            return status
        cohort = self._open[wire_req_id]
        cohort.answers[peer] = value
        cohort.took_ns[peer] = came_ns - cohort.opened_ns
        cohort.failed.pop(peer, None)
        tag = cohort.envelopes.pop(peer, None)
        if tag is not None:
            del self._of_tag[tag]
        self._close_if_done(cohort)
        return (
            ResponseStatus.ACCEPTED if cohort.state is CohortState.OPEN else ResponseStatus.COMPLETE
        )

    def sent(self, wire_req_id: int, peer: PeerId, tag: int) -> bool:
        """Record the envelope of a request to a peer; return False if no answer is awaited."""
        cohort = self._open.get(wire_req_id)
        if cohort is None:
            return False
        cohort.envelopes[peer] = tag
        self._of_tag[tag] = (cohort, peer)
        return True

    def awaited(self, peer: PeerId) -> dict[int, int]:
        """Return the ids of the requests that wait for a peer, with the tags of their envelopes."""
        return {
            cohort.wire_req_id: cohort.envelopes[peer]
            for cohort in self._open.values()
            if cohort.awaits(peer) and peer in cohort.envelopes
        }

    def of_envelope(self, tag: int, peer: PeerId) -> Cohort | None:
        """Return the open cohort whose request to a peer, unanswered, is in this envelope."""
        found = self._of_tag.get(tag)
        return found[0] if found is not None and found[1] == peer else None

    def classify_refusal(self, wire_req_id: int, peer: PeerId) -> ResponseStatus:
        """Return the status that a refusal of `peer` would get; changes nothing."""
        status = self.classify(wire_req_id, peer)
        if status is ResponseStatus.ACCEPTED and peer in self._open[wire_req_id].failed:
            return ResponseStatus.DUPLICATE
        return status

    def fail(self, cohort: Cohort, peer: PeerId, why: WireRefusal) -> bool:
        """Record why a peer will not answer; return False if that is known, or it has answered."""
        if cohort.state is not CohortState.OPEN or not cohort.awaits(peer):
            return False
        cohort.failed[peer] = why
        tag = cohort.envelopes.pop(peer, None)
        if tag is not None:
            del self._of_tag[tag]
        self._close_if_done(cohort)
        return True

    def deadline(self, wire_req_id: int) -> Cohort | None:
        """Close a cohort whose time is over; None when it closed before."""
        cohort = self._open.get(wire_req_id)
        if cohort is not None:
            enough = len(cohort.answers) >= cohort.needed
            self._move(
                cohort,
                CohortEvent.DEADLINE_WITH_QUORUM if enough else CohortEvent.DEADLINE_BELOW_QUORUM,
            )
        return cohort

    def abandon(self, wire_req_id: int) -> Cohort | None:
        """Close a cohort whose execution ended; None when it closed before."""
        cohort = self._open.get(wire_req_id)
        if cohort is not None:
            self._move(cohort, CohortEvent.EXECUTION_ENDED)
        return cohort

    def _close_if_done(self, cohort: Cohort) -> None:
        answered = len(cohort.answers)
        if answered == len(cohort.asked):
            self._move(cohort, CohortEvent.LAST_ANSWER)
        elif not cohort.failed:
            return
        elif cohort.out_of_reach:
            self._move(cohort, CohortEvent.QUORUM_OUT_OF_REACH)
        elif answered == len(cohort.asked) - len(cohort.failed):
            self._move(cohort, CohortEvent.REST_CANNOT_ANSWER)

    def _move(self, cohort: Cohort, event: CohortEvent) -> None:
        cohort.state = TRANSITIONS[cohort.state, event]
        del self._open[cohort.wire_req_id]
        for tag in cohort.envelopes.values():
            del self._of_tag[tag]
        cohort.envelopes.clear()
        if self._closed is EMPTY:
            self._closed = OrderedDict()
        self._closed[cohort.wire_req_id] = None
        if len(self._closed) > MAX_CLOSED_REMEMBERED:
            self._closed.popitem(last=False)

    def state(self, writer: SnapshotWriter) -> Any:
        """Return what a snapshot saves: open cohorts and ids of closed ones, oldest first."""
        return [_COHORTS.save(self._open.values(), writer), list(self._closed)]

    def load(self, plain: Any, reader: SnapshotReader) -> None:
        """Load what `state` returned."""
        cohorts, closed = plain
        self._open = {cohort.wire_req_id: cohort for cohort in _COHORTS.load(cohorts, reader)}
        self._closed = OrderedDict.fromkeys(closed)
        self._of_tag = {
            tag: (cohort, peer)
            for cohort in self._open.values()
            for peer, tag in cohort.envelopes.items()
        }


def needed_answers(quorum: int, asked: int) -> int:
    """Return how many of `asked` peers have to answer; a quorum of 0 means all."""
    return asked if quorum == 0 else quorum


@dataclass(eq=False, repr=False)
class Cohorts:
    """Opens, collects and closes the requests of one node's executions."""

    __slots__ = (
        "_closed",
        "_frames",
        "_next_request",
        "_timers",
        "_waiters",
        "clock",
        "outbound",
        "reports",
        "scheduler",
        "suspensions",
        "table",
        "wire_ids",
    )

    clock: NodeClock
    reports: Reports
    scheduler: Scheduler
    suspensions: Suspensions
    outbound: EnvelopeOutbox
    wire_ids: SplitMix64

    def __post_init__(self) -> None:
        self.table = CohortTable()
        self._frames: dict[int, Frame] = {}  # wire_req_id -> the frame whose request it is
        self._timers: dict[int, Timer] = {}
        self._waiters: dict[int, int] = {}  # wire_req_id -> token of the RecvRespBatched
        self._closed: dict[int, Cohort] = {}  # closed before anybody collected
        self._next_request = 0

    def open(
        self,
        frame: Frame,
        op: Op,
        name: str,
        peers: Sequence[PeerId],
        fill: SlotFill,
        quorum: int,
        budget_ns: int,
        site: int | None,
    ) -> int:
        """Send a request whose answers come to `site` (None: nobody collects them).

        Returns its request id. Raises QuorumNotReached when fewer peers can be asked than have to
        answer.
        """
        now_ns = self.clock.now_ns
        size = self.outbound.check(op, fill, len(peers))
        why: dict[PeerId, str] = {}
        found = tuple(sorted(self.outbound.reachable(frame, op, peers, fill.dest_suffix, why)))
        needed = needed_answers(quorum, len(found))
        left_out = tuple(sorted(why))
        if len(found) < needed or (peers and not found):
            reasons = listed([f"{peer} ({why[peer]})" for peer in left_out], _NAMED)
            raise QuorumNotReached(
                f"{name}: {len(found)} of {len(peers)} peers can be asked and "
                f"{max(needed, 1)} have to answer; not reachable: {reasons}"
            )
        wire_req_id = self.wire_ids.next_u64()
        deadline_ns = now_ns + budget_ns
        if frame.deadline_ns is not None:
            deadline_ns = min(deadline_ns, frame.deadline_ns)
        self.outbound.queue(
            frame,
            op,
            found,
            fill,
            size,
            CorrelationKind.REQUEST,
            wire_req_id,
            max(deadline_ns - now_ns, 1),
            frame.chain or frame.wire_out_id,
        )
        self._next_request += 1
        request = self._next_request
        self.reports.telemetry(
            "request.sent",
            request=request,
            execution=frame.execution,
            port=name,
            peers=found,
            unresolved=left_out,
            needed=needed,
            deadline_ns=deadline_ns,
        )
        if site is None:
            return request  # nobody waits for answers; they will be dropped as unknown
        cohort = Cohort(
            wire_req_id=wire_req_id,
            request_id=request,
            execution=frame.execution,
            name=name,
            asked=tuple(sorted((*found, *left_out))),
            needed=needed,
            opened_ns=now_ns,
            deadline_ns=deadline_ns,
            site=site,
            edge=parse_site_suffix(fill.dest_suffix) or 0,
            # Who is denied or unknown is missing from the start, with the reason.
            failed={peer: WireRefusal(NOT_SENT, why[peer]).bounded() for peer in left_out},
        )
        if frame.cohorts is None:
            frame.cohorts = {}
        frame.cohorts[request] = wire_req_id
        self._frames[wire_req_id] = frame
        self.table.open(cohort)
        if cohort.state is CohortState.OPEN:
            self._timers[wire_req_id] = self.scheduler.set(
                deadline_ns, TimerKind.REQUEST_DEADLINE, wire_req_id
            )
        else:
            self._close(cohort)
        return request

    def collect(self, frame: Frame, op: Op, request: int) -> Any:
        """Return the batch, or PARKED until the cohort closes. Raises QuorumNotReached."""
        wire_req_id = (frame.cohorts or {}).get(request)
        if wire_req_id is None:
            raise InvalidOperand(f"{op.name}: request {request} is not of this execution")
        closed = self._closed.pop(wire_req_id, None)
        if closed is not None:
            return self._result(closed, frame, op)
        cohort = self.table.get(wire_req_id)
        if cohort is None or wire_req_id in self._waiters:
            raise InvalidOperand(f"{op.name}: request {request} was collected before")
        token = self._waiters[wire_req_id] = self.suspensions.new_token()
        return self.suspensions.park(
            frame,
            op,
            WaitReason.RESPONSES,
            cohort.name,
            until_ns=cohort.deadline_ns,
            token=token,
            timer_kind=None,
        )

    def answer(self, wire_req_id: int, peer: PeerId, value: Value, came_ns: int) -> ResponseStatus:
        """Add one peer's answer; the caller has counted and classified it."""
        cohort = self.table.get(wire_req_id)
        status = self.table.answer(wire_req_id, peer, value, came_ns)
        if cohort is not None and status in (ResponseStatus.ACCEPTED, ResponseStatus.COMPLETE):
            self.reports.telemetry(
                "request.response",
                request=cohort.request_id,
                execution=cohort.execution,
                peer=peer,
                answered=len(cohort.answers),
                asked=len(cohort.asked),
            )
            if status is ResponseStatus.COMPLETE:
                self._close(cohort)
        return status

    def failed_in(self, tag: int, peer: PeerId, why: WireRefusal) -> bool:
        """Record that the request in an envelope has no answer; return False if none is open."""
        cohort = self.table.of_envelope(tag, peer)
        if cohort is None:
            return False
        self._fail(cohort, peer, why)
        return True

    def refused(self, wire_req_id: int, peer: PeerId, why: WireRefusal) -> ResponseStatus:
        """Record what a peer said, or what became of its answer; counted by the caller."""
        status = self.table.classify_refusal(wire_req_id, peer)
        cohort = self.table.get(wire_req_id)
        if status is ResponseStatus.ACCEPTED and cohort is not None:
            self._fail(cohort, peer, why)
        return status

    def awaits(self, peer: PeerId) -> bool:
        """Return True if some request waits for the peer."""
        return any(cohort.awaits(peer) for cohort in self.table.open_cohorts())

    def peer_lost(self, peer: PeerId, since_ns: int, why: WireRefusal) -> None:
        """Fail a peer in all requests that were open when its connection was lost."""
        for cohort in self.table.open_cohorts():
            if cohort.opened_ns <= since_ns:
                self._fail(cohort, peer, why)

    def _fail(self, cohort: Cohort, peer: PeerId, why: WireRefusal) -> None:
        why = why.bounded()
        if not self.table.fail(cohort, peer, why):
            return
        self.reports.telemetry(
            "request.failed",
            request=cohort.request_id,
            execution=cohort.execution,
            port=cohort.name,
            peer=peer,
            kind=why.kind,
            detail=why.detail,
            where=why.where,
        )
        if cohort.state is not CohortState.OPEN:
            self._close(cohort)

    def frame_of(self, wire_req_id: int) -> Frame | None:
        """Return the execution that waits for an open request."""
        return self._frames.get(wire_req_id)

    def missing(self, token: int) -> str | None:
        """Return, as text, the peers that a parked RecvRespBatched waits for, or None."""
        for wire_req_id, waiter in self._waiters.items():
            cohort = self.table.get(wire_req_id) if waiter == token else None
            if cohort is not None:
                return ", ".join(_with_reasons(cohort))
        return None

    def deadline(self, wire_req_id: int) -> None:
        """Close a cohort whose time is over."""
        cohort = self.table.deadline(wire_req_id)
        if cohort is not None:
            self._close(cohort)

    def drop_frame(self, frame: Frame) -> None:
        """Forget everything that belongs to an execution that has ended."""
        for wire_req_id in (frame.cohorts or {}).values():
            cohort = self.table.abandon(wire_req_id)
            if cohort is not None:
                self._report(cohort)
            self._forget(wire_req_id)
            self._closed.pop(wire_req_id, None)
            self._waiters.pop(wire_req_id, None)

    def _forget(self, wire_req_id: int) -> None:
        self._frames.pop(wire_req_id, None)
        timer = self._timers.pop(wire_req_id, None)
        if timer is not None:
            self.scheduler.cancel(timer)

    def _close(self, cohort: Cohort) -> None:
        self._report(cohort)
        self._forget(cohort.wire_req_id)
        token = self._waiters.pop(cohort.wire_req_id, None)
        parked = None if token is None else self.suspensions.get(token)
        if token is None or parked is None:
            self._closed[cohort.wire_req_id] = cohort
            return
        try:
            result = self._result(cohort, parked.frame, parked.op)
        except QuorumNotReached as error:
            self.suspensions.resume(token, None, error)
        else:
            self.suspensions.resume(token, result, None)

    def _result(self, cohort: Cohort, frame: Frame, op: Op) -> Value:
        if cohort.state is CohortState.BELOW_QUORUM:
            within = ""
            if not cohort.out_of_reach:
                took = seconds(cohort.deadline_ns - cohort.opened_ns)
                wait_ns = self.suspensions.limits.wait_ns
                within = f" in {took} ({bound_by(frame, op, cohort.deadline_ns, wait_ns)})"
            raise QuorumNotReached(
                f"{cohort.name}: {len(cohort.answers)} of {len(cohort.asked)} peers answered"
                f"{within} and {cohort.needed} "
                f"had to; missing: {listed(_with_reasons(cohort), _NAMED)}",
                too_few_asked=len(cohort.asked) < cohort.needed,
            )
        return cohort.batch()

    def _report(self, cohort: Cohort) -> None:
        self.reports.telemetry(
            "request.closed",
            request=cohort.request_id,
            execution=cohort.execution,
            responded=cohort.responded,
            missing=cohort.missing,
            reasons={str(peer): str(why) for peer, why in sorted(cohort.failed.items())},
            numbers={peer: _numbers(cohort.answers[peer]) for peer in cohort.responded},
            reason=cohort.state.value,
        )

    def state(self, writer: SnapshotWriter) -> Any:
        """Return what a snapshot saves: the table, and its ties to executions."""
        return [
            self.table.state(writer),
            _FRAMES.save(self._frames, writer),
            _TIMERS.save(self._timers, writer),
            [[wire, token] for wire, token in self._waiters.items()],
            _COHORTS.save(self._closed.values(), writer),
            self._next_request,
        ]

    def load(self, plain: Any, reader: SnapshotReader) -> None:
        """Load what `state` returned."""
        table, frames, timers, waiters, closed, self._next_request = plain
        self.table.load(table, reader)
        self._frames = _FRAMES.load(frames, reader)
        armed = _TIMERS.load(timers, reader)
        self._timers = {wire: timer for wire, timer in armed.items() if timer is not None}
        self._waiters = dict(waiters)
        self._closed = {cohort.wire_req_id: cohort for cohort in _COHORTS.load(closed, reader)}


def _with_reasons(cohort: Cohort) -> list[str]:
    """Return the peers that are missing, each with its reason where there is one."""
    failed = cohort.failed
    return [f"{peer} ({failed[peer]})" if peer in failed else str(peer) for peer in cohort.missing]


def _numbers(answer: Value) -> dict[str, float]:
    """Return the first numbers of the Metadata in an answer, as its peer says them."""
    parts = answer if isinstance(answer, Composite) else (answer,)
    said = next((part for part in parts if isinstance(part, Metadata)), None)
    if said is None:
        return {}
    found: dict[str, float] = {}
    for name, item in itertools.islice(said.items(), _MAX_SAID):
        is_number = type(item) is int or (type(item) is float and math.isfinite(item))
        if is_number and len(name) <= _MAX_SAID_CHARS:
            found[name] = item  # type: ignore[assignment]
    return found
