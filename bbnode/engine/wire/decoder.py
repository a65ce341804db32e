"""Decoding of large payloads, in worker threads, with delivery in the order of arrival.

Rule: one poll decodes for a bounded time. The time is estimated from types and sizes and never
measured, so that a replay does the same. A longer decoding becomes an execution of one op, which
the host runs in a worker thread; it holds the envelope's charge, and is saved, recorded and
replayed like any other. While a payload of a peer waits to be decoded, later ones of that peer to
the same site wait behind it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeAlias

from bbnode.engine import steps
from bbnode.engine.clock import NodeClock
from bbnode.engine.executor import Executor
from bbnode.engine.frame import OWED, EntryPlan, Frame, Op, Task
from bbnode.engine.ingress import InboundBytes
from bbnode.engine.reports import Reports
from bbnode.engine.suspensions import Suspensions
from bbnode.ir import types
from bbnode.ir.caps import MAX_INLINE_DECODE_US, MAX_POLL_DECODE_US
from bbnode.ir.codec import cost_of
from bbnode.ir.envelope import Buffer
from bbnode.ir.types import TypeKind, TypeNode
from bbnode.ir.values import TRIGGER, Value

# Of each envelope and each fill, whatever is in them.
ENVELOPE_US: Final = 15
FILL_US: Final = 15
# An address that is claimed for the first time is parsed and written again, byte by byte.
CLAIMED_US_PER_BYTE: Final = 5

# Why a payload is no value, as (kind, detail). Plain tuples are no values.
NotDecoded: TypeAlias = tuple[str, str]

_TENSOR = TypeKind.TENSOR
# Tensors whose bytes are looked at, one by one.
_LOOKED_INTO = frozenset({types.TENSOR_BOOL, types.TENSOR_STRING})

# The values of a frame that decodes.
_PAYLOAD, _TYPE_HASH, _INDEX, _SIZE = range(4)


class Landing(Protocol):
    """The part of `Inbound` that decodes and delivers values."""

    def is_wanted(self, frame: Frame) -> bool:
        """Return True if the value is still awaited, else count it."""

    def maker(self, frame: Frame, node: TypeNode, payload: Any) -> Callable[[], Value | NotDecoded]:
        """Return a function that decodes a payload, in any thread: to a value or a refusal."""

    def land(self, frame: Frame, value: Value) -> None:
        """Deliver a decoded value."""

    def refuse_decoded(self, frame: Frame, kind: str, detail: str) -> None:
        """Report a payload that is no value."""


@dataclass(eq=False, repr=False)
class Decoder:
    """The payloads of one node that are decoded in worker threads."""

    __slots__ = (
        "clock",
        "executor",
        "landing",
        "left_us",
        "reports",
        "suspensions",
    )

    clock: NodeClock
    reports: Reports
    executor: Executor
    suspensions: Suspensions

    def __post_init__(self) -> None:
        self.landing: Landing | None = None
        self.left_us = MAX_POLL_DECODE_US

    def takes_now(self, event: InboundBytes, site: int, node: TypeNode, payload: Any) -> bool:
        """Return True if a payload can be decoded in this poll, and charge it to the poll.

        It can't while an earlier one of its peer and site waits.
        """
        turns = self.executor.turns
        if turns.running and (PLAN, event.peer, site) in turns.running:
            return False
        if node.kind is _TENSOR and node not in _LOOKED_INTO:
            return True  # a view
        return self._affords(node, payload)

    def _affords(self, node: TypeNode, payload: Any) -> bool:
        most = min(MAX_INLINE_DECODE_US, self.left_us)
        cost = cost_of(node, payload, most)
        if cost > most and cost > 1:
            return False
        self.left_us -= cost
        return True

    def charge(self, node: TypeNode, payload: Any) -> None:
        """Charge a payload that can't wait to this poll; later ones then wait."""
        self.left_us -= cost_of(node, payload, MAX_INLINE_DECODE_US)

    def later(
        self,
        event: InboundBytes,
        wire_req_id: int,
        deadline_ns: int | None,
        site: int,
        type_hash: int,
        trigger_only: bool,
        payload: Buffer,
        index: int,
        *,
        is_request: bool,
        chain: int,
    ) -> bool:
        """Decode a fill when it is its turn; return False if there are too many executions."""
        executor = self.executor
        frame = executor.start_from(PLAN, event.peer, wire_req_id, site, chain)
        if frame is None:
            return False
        self.reports.counts["decode.deferred"] += 1
        if is_request:
            frame.debt = OWED  # until it is delivered
        frame.deadline_ns = deadline_ns
        frame.charges = [event.charge.hold()]
        # A view, also of nothing: so that a snapshot saves it as what it is.
        kept = TRIGGER if trigger_only else memoryview(payload)
        frame.values[:4] = (kept, type_hash, index, len(payload))
        if executor.turns.take(frame):
            executor.begin(frame)
        return True

    # -- its op ------------------------------------------------------------------------------

    def fire(self, frame: Frame) -> Any:
        landing, payload = self.landing, frame.values[_PAYLOAD]
        node = types.type_by_hash(frame.values[_TYPE_HASH])
        if landing is None or not landing.is_wanted(frame):
            return TRIGGER
        if payload is TRIGGER or node is None:
            return self.finish(frame, TRIGGER)
        if self._affords(node, payload):
            return self.finish(frame, landing.maker(frame, node, payload)())
        return self.suspensions.hand_out(
            frame,
            frame.plan.ops[0],
            None,
            (payload,),
            whom="the decoder",
        )

    def hand_out(self, parked: Task) -> steps.RunTask:
        frame = parked.frame
        (payload,) = parked.arguments or (b"",)
        node = types.type_by_hash(0 if frame.ended else frame.values[_TYPE_HASH])
        fn: Callable[[], Value] = _nothing
        if self.landing is not None and node is not None:
            fn = self.landing.maker(frame, node, payload)
        return steps.RunTask(token=parked.token, fn=fn, op=parked.op.name)

    def finish(self, frame: Frame, result: Value | NotDecoded) -> Value:
        if type(result) is tuple:
            kind, detail = result
            _, type_hash, index, size = frame.values[:4]
            if frame.source_peer is not None:
                self.reports.receive_failed(frame.source_peer, index, type_hash, size, kind, detail)
            if self.landing is not None:
                self.landing.refuse_decoded(frame, kind, detail)
        elif self.landing is not None and self.landing.is_wanted(frame):
            self.landing.land(frame, result)
        return TRIGGER


def _nothing() -> Value:
    return ("DecodeFailed", "nobody waits for it any more")


def _plan() -> EntryPlan:
    op = Op(0, "decode", "Decode", 0)
    op.fire = lambda frame: frame.rt.decoder.fire(frame)
    op.finish = lambda frame, result: frame.rt.decoder.finish(frame, result)
    op.hand_out = lambda parked: parked.frame.rt.decoder.hand_out(parked)
    plan = EntryPlan.of_op(op, "decode", "inbound", 4)
    plan.in_turn = True
    plan.by_sender = True
    return plan


# Of all nodes.
PLAN: Final = _plan()
