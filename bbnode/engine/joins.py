"""Joins: values of several executions, gathered on the node until they are enough.

Rule: an execution deposits a value and goes on; it does not wait, and its end or failure takes
nothing back. A join opens with its first arrival and closes once: when `count` have come, or when
its time is over. With enough of them it starts one execution, seeded with the batch in PeerId order
(a barrier: with a Trigger); with fewer it fails with JoinIncomplete, which names who came. The next
arrival opens the next batch.

What is gathered is charged to the node's byte budget, and then to the execution that has the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from bbnode.engine.clock import NodeClock
from bbnode.engine.deadlines import bound_of_node, seconds
from bbnode.engine.empty import EMPTY
from bbnode.engine.errors import AlreadyGathered, InvalidOperand, JoinFull, JoinIncomplete
from bbnode.engine.executor import Executor
from bbnode.engine.frame import EntryPlan, Frame
from bbnode.engine.limits import Limits
from bbnode.engine.places import SourcePlace
from bbnode.engine.reports import Reports
from bbnode.engine.scheduler import Scheduler, Timer, TimerKind
from bbnode.engine.snapshot.codec import (
    ARMED,
    PEER,
    PLAIN,
    RowForm,
    SnapshotReader,
    SnapshotWriter,
    many,
    mapping,
    optional,
)
from bbnode.engine.stores import STORED, StoredValue, Stores
from bbnode.engine.suspensions import Waiting
from bbnode.ir.caps import MAX_GATHERED
from bbnode.ir.peer import PeerId
from bbnode.ir.texts import listed
from bbnode.ir.values import TRIGGER, ResponseBatch, Value

_NAMED = 16  # peers that a message names


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinPlan:
    """One join of the program.

    Attributes:
        place: where the program says it.
        plan: the entry whose execution gets what was gathered.
        keeps: values are kept, as a ResponseBatch; else arrivals are counted.
        count: arrivals that close it; 0 where only time does.
        needed: arrivals that are enough when the time is over.
        within_ns: the time from the first arrival; 0: as the node's limit `wait_s` says.
        per_peer: a peer counts once.
    """

    place: SourcePlace
    plan: EntryPlan
    keeps: bool
    count: int
    needed: int
    within_ns: int
    per_peer: bool


@dataclass(frozen=True, slots=True)
class Deposit:
    """One value, or one mere arrival; `peer` is None of what no peer sent."""

    peer: PeerId | None
    kept: StoredValue | None


@dataclass(slots=True, kw_only=True)
class Gathering:
    """A join that is open."""

    opened_ns: int
    until_ns: int
    timer: Timer
    arrivals: list[Deposit] = field(default_factory=list)
    # The chain of the first arrival.
    chain: int = 0
    peers: set[PeerId] = field(init=False)

    def __post_init__(self) -> None:
        self.peers = {each.peer for each in self.arrivals if each.peer is not None}


_OPEN = mapping(
    PLAIN,
    RowForm(
        Gathering,
        opened_ns=PLAIN,
        until_ns=PLAIN,
        timer=ARMED,
        arrivals=many(RowForm(Deposit, peer=optional(PEER), kept=optional(STORED)), list),
        chain=PLAIN,
    ),
)


@dataclass(eq=False, repr=False)
class Joins:
    """The joins of one node, by number."""

    __slots__ = (
        "_open",
        "clock",
        "executor",
        "limits",
        "plans",
        "reports",
        "scheduler",
        "stores",
    )

    plans: Sequence[JoinPlan]
    clock: NodeClock
    reports: Reports
    scheduler: Scheduler
    executor: Executor
    stores: Stores
    limits: Limits

    def __post_init__(self) -> None:
        self._open: dict[int, Gathering] = EMPTY

    def __len__(self) -> int:
        return len(self._open)

    def deposit(self, number: int, frame: Frame, value: Value) -> None:
        """Add what an execution brings.

        Raises AlreadyGathered, JoinFull, BudgetExceeded, or InvalidOperand where values are
        gathered by peer and none sent this one; then nothing is added.
        """
        join, peer = self.plans[number], frame.source_peer
        name = join.plan.name
        if peer is None and join.keeps:
            raise InvalidOperand(f"{name}: no peer sent the value, and it gathers by peer")
        found = self._open.get(number)
        if found is not None:
            if join.per_peer and peer in found.peers:
                self.reports.counts["joins.again"] += 1
                raise AlreadyGathered(
                    f"{name}: {peer} has contributed to this batch, which takes one value of "
                    "each peer (per_peer=False takes all)"
                )
            if len(found.arrivals) >= MAX_GATHERED:
                raise JoinFull(f"{name}: a batch of {MAX_GATHERED} values takes no more")
        kept = self.stores.keep(value, name) if join.keeps else None
        if found is None:
            now_ns = self.clock.now_ns
            until_ns = now_ns + (join.within_ns or self.limits.wait_ns)
            timer = self.scheduler.set(until_ns, TimerKind.JOIN_DEADLINE, number)
            chain = frame.chain or frame.rt.outbound.one_way_id(frame)
            found = Gathering(opened_ns=now_ns, until_ns=until_ns, timer=timer, chain=chain)
            if self._open is EMPTY:
                self._open = {}
            self._open[number] = found
        found.arrivals.append(Deposit(peer, kept))
        if peer is not None:
            found.peers.add(peer)
        if len(found.arrivals) == join.count:
            self._start(join, self._close(number), found.chain)

    def too_late(self, number: int) -> None:
        """Close a join whose time is over."""
        join, chain = self.plans[number], self._open[number].chain
        took = seconds(self._open[number].until_ns - self._open[number].opened_ns)
        by = "until=… of the join" if join.within_ns else bound_of_node(self.limits.wait_ns)
        arrivals = self._close(number)
        if len(arrivals) >= join.needed:
            self._start(join, arrivals, chain)
            return
        for each in arrivals:
            if each.kept is not None:
                each.kept.charge.release()
        self.reports.counts["joins.incomplete"] += 1
        error = JoinIncomplete(
            f"{join.plan.name}: {len(arrivals)} came in {took} ({by}) and "
            f"{join.needed} had to; came: {_names(arrivals)}"
        )
        execution = self.executor.numbers.next()
        self.executor.fail_start(execution, join.plan, error, place=join.place, chain=chain)

    def _close(self, number: int) -> list[Deposit]:
        found = self._open.pop(number)
        self.scheduler.cancel(found.timer)
        return found.arrivals

    def _start(self, join: JoinPlan, arrivals: Sequence[Deposit], chain: int) -> None:
        self.reports.counts["joins.complete"] += 1
        charges = [each.kept.charge for each in arrivals if each.kept is not None]
        frame = self.executor.start(join.plan)
        if frame is None:  # too many are under way: a step says so
            for charge in charges:
                charge.release()
            return
        frame.charges, frame.chain = charges, chain
        for index in join.plan.seeds:
            frame.values[index] = _batch(arrivals) if join.keeps else TRIGGER
        self.executor.launch(frame)

    def waiting(self) -> list[Waiting]:
        """Return the open joins, for the host."""
        found = []
        for number, each in self._open.items():
            join = self.plans[number]
            of = f" of {join.count}" if join.count else ""
            found.append(
                Waiting(
                    what=join.plan.name,
                    why="deliveries",
                    whom=f"{len(each.arrivals)}{of} came: {_names(each.arrivals)}",
                    execution=0,
                    target=join.plan.target,
                    since_ns=each.opened_ns,
                    until_ns=each.until_ns,
                )
            )
        return found

    def state(self, writer: SnapshotWriter) -> Any:
        """Return what a snapshot saves: the open joins."""
        return _OPEN.save(self._open, writer)

    def load(self, plain: Any, reader: SnapshotReader) -> None:
        """Load what `state` returned."""
        self._open = _OPEN.load(plain, reader)


def _batch(arrivals: Sequence[Deposit]) -> ResponseBatch:
    pairs = [
        (each.peer, each.kept.value)
        for each in arrivals
        if each.peer is not None and each.kept is not None
    ]
    pairs.sort(key=lambda pair: pair[0])  # stable: of one peer in the order of their coming
    return ResponseBatch(responses=tuple(pairs))


def _names(arrivals: Sequence[Deposit]) -> str:
    peers = list(dict.fromkeys(each.peer for each in arrivals))
    return listed(["this node" if peer is None else str(peer) for peer in peers], _NAMED)
