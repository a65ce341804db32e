"""Cohorts: requests to many peers that are answered once.

Rule: a cohort closes once. ALL_ANSWERED when everyone asked has; at its deadline, QUORUM
when enough have and BELOW_QUORUM when not. Who could not be sent to is missing from then on, and
closes it early with the outcome of its deadline: when the others have answered, or when they are
too few. An answer of such a peer counts all the same while the cohort is open (it may have been
told to a peer that was restarted). What comes after, twice, from strangers or for nobody's request
is told apart and dropped. Answers are handed out in PeerId order.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from bbnode.ir.caps import MAX_CLOSED_REMEMBERED
from bbnode.ir.peer import PeerId
from bbnode.ir.values import ResponseBatch, Value

if TYPE_CHECKING:
    from bbnode.engine.snapshot.codec import LoadedNames, SavedNames


class CohortState(enum.Enum):
    """Where a cohort is; all but OPEN are final."""

    OPEN = "open"
    ALL_ANSWERED = "all_answered"
    QUORUM = "quorum"
    BELOW_QUORUM = "below_quorum"
    ABANDONED = "abandoned"  # its execution ended before it did


class Happening(enum.Enum):
    """What can happen to an open cohort."""

    LAST_ANSWER = "last_answer"
    REST_CANNOT_ANSWER = "rest_cannot_answer"  # enough have, the others can't be sent to
    QUORUM_OUT_OF_REACH = "quorum_out_of_reach"  # too many can't be sent to
    DEADLINE_WITH_QUORUM = "deadline_with_quorum"
    DEADLINE_BELOW_QUORUM = "deadline_below_quorum"
    EXECUTION_ENDED = "execution_ended"


# What is not here can't happen: a closed cohort does not move.
TRANSITIONS: dict[tuple[CohortState, Happening], CohortState] = {
    (CohortState.OPEN, Happening.LAST_ANSWER): CohortState.ALL_ANSWERED,
    (CohortState.OPEN, Happening.REST_CANNOT_ANSWER): CohortState.QUORUM,
    (CohortState.OPEN, Happening.QUORUM_OUT_OF_REACH): CohortState.BELOW_QUORUM,
    (CohortState.OPEN, Happening.DEADLINE_WITH_QUORUM): CohortState.QUORUM,
    (CohortState.OPEN, Happening.DEADLINE_BELOW_QUORUM): CohortState.BELOW_QUORUM,
    (CohortState.OPEN, Happening.EXECUTION_ENDED): CohortState.ABANDONED,
}


class Verdict(enum.Enum):
    """What became of an answer; the value is the counter's suffix."""

    ACCEPTED = "accepted"
    COMPLETE = "complete"  # accepted, and the cohort closed with it
    DUPLICATE = "duplicate"
    STRANGER = "stranger"  # from a peer that was not asked
    LATE = "late"  # its cohort closed before
    UNKNOWN = "unknown"  # no such request


@dataclass(slots=True, kw_only=True)
class Cohort:
    """One request: `asked` in PeerId order, `needed` answers at the deadline.

    `envelopes`: tags of the envelopes to those that have not answered, each peer has one; `unsent`:
    to whom it is known not to have come, and why.
    """

    wire_req_id: int
    request_id: int
    execution: int
    name: str
    asked: tuple[PeerId, ...]
    unresolved: tuple[PeerId, ...] = ()
    needed: int
    site: int  # where answers have to come to
    edge: int = 0  # the site that was asked, whose round trips are measured; 0: no site
    opened_ns: int
    deadline_ns: int
    state: CohortState = CohortState.OPEN
    answers: dict[PeerId, Value] = field(default_factory=dict)
    envelopes: dict[PeerId, int] = field(default_factory=dict)
    unsent: dict[PeerId, str] = field(default_factory=dict)
    members: frozenset[PeerId] = field(init=False)

    def __post_init__(self) -> None:
        self.members = frozenset(self.asked)

    @property
    def responded(self) -> tuple[PeerId, ...]:
        """Who answered, in PeerId order."""
        return tuple(peer for peer in self.asked if peer in self.answers)

    @property
    def missing(self) -> tuple[PeerId, ...]:
        """Who did not, in PeerId order."""
        return tuple(peer for peer in self.asked if peer not in self.answers)

    @property
    def out_of_reach(self) -> bool:
        """Whether fewer than `needed` have answered or still can."""
        return len(self.asked) - len(self.unsent) < self.needed

    def batch(self) -> ResponseBatch:
        """The answers, in PeerId order."""
        return ResponseBatch(
            responses=tuple((peer, self.answers[peer]) for peer in self.responded),
            missing=self.missing,
        )


def save_cohort(cohort: Cohort, names: SavedNames) -> list[Any]:
    """A cohort, for a snapshot."""
    return [
        cohort.wire_req_id,
        cohort.request_id,
        cohort.execution,
        cohort.name,
        [names.peer(peer) for peer in cohort.asked],
        [names.peer(peer) for peer in cohort.unresolved],
        cohort.needed,
        cohort.site,
        cohort.edge,
        cohort.opened_ns,
        cohort.deadline_ns,
        cohort.state.value,
        [[names.peer(peer), names.value(value)] for peer, value in cohort.answers.items()],
        [[names.peer(peer), tag] for peer, tag in cohort.envelopes.items()],
        [[names.peer(peer), reason] for peer, reason in cohort.unsent.items()],
    ]


def load_cohort(plain: list[Any], names: LoadedNames) -> Cohort:
    """What `save_cohort` gave."""
    (wire, request, execution, name, asked, unresolved, needed, site, edge, *rest) = plain
    opened_ns, deadline_ns, state, answers, envelopes, unsent = rest
    return Cohort(
        wire_req_id=wire,
        request_id=request,
        execution=execution,
        name=name,
        asked=tuple(map(names.peer, asked)),
        unresolved=tuple(map(names.peer, unresolved)),
        needed=needed,
        site=site,
        edge=edge,
        opened_ns=opened_ns,
        deadline_ns=deadline_ns,
        state=CohortState(state),
        answers={names.peer(peer): names.value(value) for peer, value in answers},
        envelopes={names.peer(peer): tag for peer, tag in envelopes},
        unsent={names.peer(peer): reason for peer, reason in unsent},
    )


class RequestsTable:
    """All cohorts of a node that are open, and the ids of those that were."""

    def __init__(self) -> None:
        self._open: dict[int, Cohort] = {}
        self._closed: dict[int, None] = {}
        # Envelope -> whose request to whom, while there is no answer.
        self._of_tag: dict[int, tuple[Cohort, PeerId]] = {}

    def __len__(self) -> int:
        return len(self._open)

    def open_cohorts(self) -> Sequence[Cohort]:
        """Open cohorts, oldest first."""
        return tuple(self._open.values())

    def open(self, cohort: Cohort) -> Cohort:
        """Take up a cohort; one that asks nobody is closed at once."""
        self._open[cohort.wire_req_id] = cohort
        if not cohort.asked:
            self._move(cohort, Happening.LAST_ANSWER)
        return cohort

    def classify(self, wire_req_id: int, peer: PeerId) -> Verdict:
        """What would become of an answer of `peer`; changes nothing.

        Asked before a payload is decoded, so that an answer that nobody wants costs nothing.
        """
        cohort = self._open.get(wire_req_id)
        if cohort is None:
            return Verdict.LATE if wire_req_id in self._closed else Verdict.UNKNOWN
        if peer not in cohort.members:
            return Verdict.STRANGER
        return Verdict.DUPLICATE if peer in cohort.answers else Verdict.ACCEPTED

    def get(self, wire_req_id: int) -> Cohort | None:
        """The open cohort with this id, or None."""
        return self._open.get(wire_req_id)

    def answer(self, wire_req_id: int, peer: PeerId, value: Value) -> Verdict:
        """Take an answer, or say why not."""
        verdict = self.classify(wire_req_id, peer)
        if verdict is not Verdict.ACCEPTED:
            return verdict
        cohort = self._open[wire_req_id]
        cohort.answers[peer] = value
        cohort.unsent.pop(peer, None)
        tag = cohort.envelopes.pop(peer, None)
        if tag is not None:
            del self._of_tag[tag]
        self._look(cohort)
        return Verdict.ACCEPTED if cohort.state is CohortState.OPEN else Verdict.COMPLETE

    def sent(self, wire_req_id: int, peer: PeerId, tag: int) -> bool:
        """The request to a peer has gone out in the envelope `tag`; False: nobody waits for it."""
        cohort = self._open.get(wire_req_id)
        if cohort is None:
            return False
        cohort.envelopes[peer] = tag
        self._of_tag[tag] = (cohort, peer)
        return True

    def send_failed(self, tag: int, peer: PeerId, reason: str) -> Cohort | None:
        """An envelope did not come to a peer; the cohort that has to do without, or None."""
        found = self._of_tag.get(tag)
        if found is None or found[1] != peer:
            return None
        cohort, _ = self._of_tag.pop(tag)
        del cohort.envelopes[peer]
        cohort.unsent[peer] = reason
        self._look(cohort)
        return cohort

    def deadline(self, wire_req_id: int) -> Cohort | None:
        """Close a cohort whose time is over; None when it closed before."""
        cohort = self._open.get(wire_req_id)
        if cohort is None:
            return None
        enough = len(cohort.answers) >= cohort.needed
        self._move(
            cohort,
            Happening.DEADLINE_WITH_QUORUM if enough else Happening.DEADLINE_BELOW_QUORUM,
        )
        return cohort

    def abandon(self, wire_req_id: int) -> Cohort | None:
        """Close a cohort whose execution ended; None when it closed before."""
        cohort = self._open.get(wire_req_id)
        if cohort is not None:
            self._move(cohort, Happening.EXECUTION_ENDED)
        return cohort

    def state(self, names: SavedNames) -> Any:
        """For a snapshot: open cohorts, and the ids of closed ones, both oldest first."""
        return [[save_cohort(c, names) for c in self._open.values()], list(self._closed)]

    def load(self, plain: Any, names: LoadedNames) -> None:
        """Take up what `state` gave."""
        cohorts, closed = plain
        self._open = {c.wire_req_id: c for c in (load_cohort(row, names) for row in cohorts)}
        self._closed = dict.fromkeys(closed)
        self._of_tag = {
            tag: (cohort, peer)
            for cohort in self._open.values()
            for peer, tag in cohort.envelopes.items()
        }

    def _look(self, cohort: Cohort) -> None:
        """Close a cohort that has nobody left to wait for."""
        answered = len(cohort.answers)
        if answered == len(cohort.asked):
            self._move(cohort, Happening.LAST_ANSWER)
        elif not cohort.unsent:
            return
        elif cohort.out_of_reach:
            self._move(cohort, Happening.QUORUM_OUT_OF_REACH)
        elif answered == len(cohort.asked) - len(cohort.unsent):
            self._move(cohort, Happening.REST_CANNOT_ANSWER)

    def _move(self, cohort: Cohort, happening: Happening) -> None:
        cohort.state = TRANSITIONS[cohort.state, happening]
        del self._open[cohort.wire_req_id]
        for tag in cohort.envelopes.values():
            del self._of_tag[tag]
        cohort.envelopes.clear()
        self._closed[cohort.wire_req_id] = None
        if len(self._closed) > MAX_CLOSED_REMEMBERED:
            del self._closed[next(iter(self._closed))]


def needed_answers(quorum: int, asked: int) -> int:
    """How many of `asked` peers have to answer; a quorum of 0 means all of them."""
    return asked if quorum == 0 else quorum
