"""A frame: one execution over one plan.

Rule: a frame owns all values of its execution; two frames never share one. When none of its ops is
ready or parked, the frame is finished and dropped as a whole. The last element of `values` is
scratch: outputs that no op reads are written there.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, Final, Protocol

from bbnode.engine.ingress import Charge
from bbnode.engine.places import NOWHERE, OpPlace, SourcePlace
from bbnode.engine.steps import RunTask
from bbnode.ir import keys
from bbnode.ir.peer import PeerId
from bbnode.ir.refusal import WireRefusal
from bbnode.ir.values import Value


class Marker(enum.Enum):
    """Objects in the place of a value."""

    MISSING = "missing"
    PARKED = "parked"


MISSING: Final = Marker.MISSING  # a value that is not there yet
PARKED: Final = Marker.PARKED  # what `fire` returns when the op has no result now

SCRATCH: Final = -1  # index of the scratch element
_NO_INDICES: Final[frozenset[int]] = frozenset()
_NO_OPS: Final[frozenset[str]] = frozenset()
_NO_CALLS: Final[frozenset[tuple[int, str]]] = frozenset()

OWED: Final = WireRefusal("")  # an answer is owed, and nothing has failed yet


class Task(Protocol):
    """A parked op whose method a worker thread runs."""

    token: int
    frame: Frame
    op: Op
    since_ns: int
    arguments: tuple[Value, ...] | None


class Op:
    """One op of a plan, ready to fire.

    `fire(frame)` returns the op's output: one value, or a sequence with one per element of
    `outs` where that is not None; or PARKED, which `Executor.skip` returns too. `consumers` lose
    one pending count each when it has fired or was skipped; those in `order_only`, by index, need
    no result of it; `needs` are the indices of the values that it does need. `skip(frame, reason)`
    is called when it is skipped, and returns False where its consumers are to wait on (for a rival
    that may still fire); `lose(frame)` likewise when a value that it needs was lost to a failure.
    `salvage(frame, lost, reason)` is called instead of both where a part of its outputs may still
    come: with the lost values, and why the op is skipped (None: it is not).

    `cell` is the number of its component (-1: none); `breaks` are the op types of that component
    that can't go on in an execution in which this op failed (None: all).

    `EntryPlan.complete` fills in what the loop reads instead: `alone`, the op as a batch of one;
    `wakes`, all consumers where each waits for this op and nothing else (so that nothing is to be
    counted), else None; `next`, the only one of `wakes`; and `out`, None where `outs` is not.
    """

    __slots__ = (
        "alone",
        "breaks",
        "cell",
        "consumers",
        "deadline_from",
        "deadline_ns",
        "finish",
        "fire",
        "hand_out",
        "index",
        "lose",
        "name",
        "needs",
        "next",
        "op_type",
        "order_only",
        "out",
        "outs",
        "salvage",
        "skip",
        "wakes",
    )

    def __init__(
        self, index: int, name: str, op_type: str, deadline_ns: int = 0, deadline_from: str = ""
    ) -> None:
        self.index = index
        self.name = name
        self.op_type = op_type
        self.deadline_ns = deadline_ns  # 0: none
        # As `keys.DEADLINE_FROM_KEY`: a deadline that is not its own gives way to that of the
        # execution. Of ops that no program has it is that of nobody.
        self.deadline_from = deadline_from if deadline_ns else keys.DEADLINE_FROM_NOBODY
        self.out: int | None = SCRATCH
        self.outs: tuple[int, ...] | None = None
        self.consumers: tuple[Op, ...] = ()
        self.order_only: frozenset[int] = _NO_INDICES
        self.needs: tuple[int, ...] = ()
        self.cell = -1
        self.breaks: frozenset[str] | None = _NO_OPS
        self.alone: tuple[Op, ...] = (self,)
        self.wakes: tuple[Op, ...] | None = None
        self.next: Op | None = None
        self.fire: Callable[[Frame], Any] = _unbound
        self.skip: Callable[[Frame, str], bool] | None = None
        self.lose: Callable[[Frame], bool] | None = None
        self.salvage: Callable[[Frame, Set[int], str | None], object] | None = None
        # For ops that park: the function from the result to outputs, and the one that makes the
        # RunTask of an op that runs in a worker thread.
        self.finish: Callable[[Frame, Any], Any] | None = None
        self.hand_out: Callable[[Task], RunTask] | None = None

    def __repr__(self) -> str:
        return f"Op({self.name}: {self.op_type})"


def _unbound(_frame: Frame) -> Value:
    raise RuntimeError("an op fired before its plan was complete")


class EntryPlan:
    """The plan of one entry: shared by its executions, immutable once built.

    `template` and `pending` are copied into each frame; `initial` are the ops that nothing
    but the entry's own seeds and constants hold up. `seeds` maps the entry's outputs (by
    position; by name for inputs of a target) to value indices, where the slice reads them.
    """

    __slots__ = (
        "by_sender",
        "calls",
        "component",
        "counts",
        "in_order",
        "in_turn",
        "initial",
        "is_request",
        "left_out",
        "name",
        "ops",
        "pending",
        "places",
        "seed_names",
        "seeds",
        "target",
        "template",
    )

    def __init__(self, name: str, target: str) -> None:
        self.name = name
        self.target = target
        self.template: list[Value] = []
        self.pending: list[int] = []
        self.ops: tuple[Op, ...] = ()
        self.places: tuple[OpPlace | None, ...] = ()  # of its ops; empty where no author has any
        self.initial: tuple[Op, ...] = ()
        # Of an event: ops that need more than it brings, why they do not run, and where they are.
        self.left_out: tuple[tuple[str, str, OpPlace], ...] = ()
        self.seeds: tuple[int, ...] = ()
        self.seed_names: tuple[str, ...] = ()
        self.component: int | None = None  # the number of the component that it is for
        # Number of the slot and method, of each call of a component.
        self.calls: frozenset[tuple[int, str]] = _NO_CALLS
        self.in_turn = False  # one execution at a time (`turns`)
        self.is_request = False  # a peer that asked waits for the answer
        self.by_sender = False  # … of those that one peer started at one site
        self.counts = False  # some op waits for several others
        # Of the ops that are ready at one time, the first in the program fires first.
        self.in_order = False

    @classmethod
    def of_op(cls, op: Op, name: str, target: str, values: int = 0) -> EntryPlan:
        """Return the plan of one op with `values` seeds."""
        plan = cls(name, target)
        plan.seeds = tuple(range(values))
        plan.template = [MISSING] * (values + 1)  # and scratch
        plan.complete((op,), {})
        return plan

    def place_of(self, op: Op, error: BaseException | None = None) -> SourcePlace:
        """Return where the author wrote an op, which failed with `error`."""
        place = self.places[op.index] if op.index < len(self.places) else None
        return NOWHERE if place is None else place.of(error)

    def complete(self, ops: Sequence[Op], waits: Mapping[int, int]) -> None:
        """Set the ops, whose consumers are set, and how many ops each index waits for (or 0).

        Rivals of one group (the relays of an Any) count as one, since only one of them ever has a
        result.
        """
        self.ops = tuple(ops)
        self.pending = [waits.get(op.index, 0) for op in ops]
        self.initial = tuple(op for op in ops if not waits.get(op.index))
        for op in ops:
            if op.outs is not None:
                op.out = None
            if all(waits.get(consumer.index) == 1 for consumer in op.consumers):
                op.wakes = op.consumers
                op.next = op.wakes[0] if len(op.wakes) == 1 else None
            else:
                self.counts = True


class BootstrapBody(Protocol):
    """The bootstrap that an execution belongs to."""

    def failed(self, error: BaseException) -> None:
        """Note the failure of an op."""


class Frame:
    """One execution.

    `rt` is a `bbnode.engine.services.Services`, for ops only. `skipped` has the ops, by index, that
    will certainly not fire, and why; `lost` the values, by index, that a failure took away, and
    `broken` what can't go on behind a change that failed: by component and op type ("" for all),
    the op that failed. `apart` is True once one of the three has something, or the execution has
    ended, or its ops fire in order: the quick loop leaves it alone. `in_order` holds the indices of
    its ready ops where they fire in the order of the program (a heap).
    """

    __slots__ = (
        "apart",
        "bootstrap",
        "broken",
        "chain",
        "charges",
        "cohorts",
        "deadline_ns",
        "debt",
        "ended",
        "execution",
        "failures",
        "from_bus",
        "in_order",
        "live",
        "lost",
        "parked",
        "pending",
        "plan",
        "report",
        "rt",
        "site",
        "skipped",
        "source_peer",
        "started_ns",
        "units",
        "values",
        "wire_out_id",
        "wire_req_id",
    )

    def __init__(self, rt: Any, plan: EntryPlan, execution: int, started_ns: int) -> None:
        self.rt: Any = rt
        self.plan = plan
        self.execution = execution
        self.started_ns = started_ns
        self.values: list[Value] = plan.template.copy()
        # Copied only if some op waits for several others; else nothing is counted.
        self.pending = plan.pending.copy() if plan.counts else plan.pending
        self.live = 0  # ops that are ready or parked
        self.ended = False
        self.apart = plan.in_order
        self.in_order: list[int] | None = [] if plan.in_order else None
        self.skipped: dict[int, str] | None = None
        self.lost: set[int] | None = None
        self.broken: dict[tuple[int, str], str] | None = None
        self.failures = 0
        self.report = False  # tell the host of the end
        self.deadline_ns: int | None = None
        # While it owes an answer to the request that started it: OWED, or what failed first.
        self.debt: WireRefusal | None = None
        self.source_peer: PeerId | None = None
        self.wire_req_id = 0  # of the envelope that started it
        self.site = 0
        # The chain of messages that started it: the id of the first one. 0: none did.
        self.chain = 0
        self.wire_out_id = 0  # of what it sends one-way, made with the first send
        self.charges: list[Charge] | None = None
        self.parked: dict[int, None] | None = None  # its tokens
        self.cohorts: dict[int, int] | None = None  # request id -> wire_req_id
        self.units: list[int] | None = None  # numbers of the semaphores it holds a unit of
        self.from_bus = False  # started by an event: its failures are no events
        self.bootstrap: BootstrapBody | None = (
            None  # whose body it is; components know their holder
        )

    def hold_charge(self, charge: Charge) -> None:
        """Release a charge with this execution."""
        if self.charges is None:
            self.charges = [charge]
        else:
            self.charges.append(charge)

    def take_unit(self, semaphore: int) -> None:
        """Record a unit that this execution has taken."""
        if self.units is None:
            self.units = [semaphore]
        else:
            self.units.append(semaphore)

    def drop_unit(self, semaphore: int) -> None:
        """Forget a unit that was given back, if this execution had taken it."""
        if self.units is not None and semaphore in self.units:
            self.units.remove(semaphore)
