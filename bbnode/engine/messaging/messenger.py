"""The messenger: messages between components of different peers, their answers, and timers.

Rule: an inbound op, an answer or a timer of a component is an execution of one op, by the rules of
all ops: one at a time per component, in order of arrival, with a deadline, and a failure is a step.
Sends and timers that a method asks for are carried out when it has returned. The component defines
the payload; the fill has type hash 0. An answer goes to the suffix of the request, under its id,
and is accepted only while the request is open. A timer that is due while its component is busy is
set again a little later, so that a protocol never loses its heartbeat to a long op.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from bbnode.components.contracts import inbound_ops
from bbnode.engine.cells import ComponentCell
from bbnode.engine.clock import NodeClock
from bbnode.engine.cohorts import NOT_SENT, ResponseStatus
from bbnode.engine.errors import (
    REASON_DUPLICATE,
    DeadlineExceeded,
    FramesExceeded,
    InvalidArtifact,
    WrongResultType,
)
from bbnode.engine.executor import Executor
from bbnode.engine.frame import OWED, EntryPlan, Frame, Op
from bbnode.engine.ingress import InboundBytes, TopicMessage
from bbnode.engine.messaging.actions import (
    Action,
    CancelTimer,
    Follow,
    LearnAddresses,
    PublishEvent,
    PublishOnTopic,
    SendMessage,
    SetTimer,
    suffix_of,
)
from bbnode.engine.messaging.pending import ComponentTimers, PendingCall, PendingCalls
from bbnode.engine.messaging.topics import FollowedTopics
from bbnode.engine.ops.role import bind_method
from bbnode.engine.peers.neighbours import Neighbours
from bbnode.engine.peers.round_trips import RoundTrips
from bbnode.engine.reports import Reports
from bbnode.engine.steps import PublishMessage
from bbnode.engine.suspensions import Waiting
from bbnode.engine.wire.decoder import Decoder
from bbnode.engine.wire.inbound import InboundDedup
from bbnode.engine.wire.outbound import EnvelopeOutbox
from bbnode.engine.wire.refusals import LEAVING, Refusals
from bbnode.ir import ids, types
from bbnode.ir.address import parse_component_suffix
from bbnode.ir.caps import MAX_UNDER_WAY
from bbnode.ir.envelope import CorrelationKind, SlotFill, WireEnvelope
from bbnode.ir.peer import PeerId
from bbnode.ir.refusal import WireRefusal
from bbnode.ir.values import TRIGGER, Value

# The delay of a timer whose component is busy: well below what any protocol calls late, and rare
# enough to cost nothing.
RETRY_NS = 100_000_000

_KIND_SUFFIX = {
    CorrelationKind.NONE: "",
    CorrelationKind.REQUEST: " (request)",
}


class _Hooks:
    """The methods of one component that the engine itself calls; None where it has none."""

    __slots__ = ("on_answer", "on_message", "on_no_answer", "on_peer_down", "on_timer")

    def __init__(self, make: Callable[[str, int], EntryPlan | None]) -> None:
        self.on_timer = make("on_timer", 1)
        self.on_answer = make("on_answer", 2)
        self.on_no_answer = make("on_no_answer", 2)
        self.on_peer_down = make("on_peer_down", 1)
        self.on_message = make("on_message", 2)


@dataclass(eq=False, repr=False)
class ComponentMessenger:
    """Delivers messages, answers and timers to the components of one node, and sends theirs."""

    __slots__ = (
        "_hooks",
        "_refs",
        "_routes",
        "_sites",
        "calls",
        "cells",
        "clock",
        "decoder",
        "dedup",
        "executor",
        "neighbours",
        "outbound",
        "plans",
        "refusals",
        "reports",
        "round_trips",
        "timers",
        "topics",
    )

    cells: Sequence[ComponentCell]
    calls: PendingCalls
    timers: ComponentTimers
    clock: NodeClock
    reports: Reports
    executor: Executor
    neighbours: Neighbours
    round_trips: RoundTrips
    dedup: InboundDedup
    decoder: Decoder
    outbound: EnvelopeOutbox
    refusals: Refusals

    def __post_init__(self) -> None:
        self.topics = FollowedTopics(self.reports)
        self.plans: list[EntryPlan] = []  # all of this node, in an order that never changes
        self._routes: dict[bytes, dict[CorrelationKind, EntryPlan]] = {}
        self._sites: dict[bytes, int] = {}  # suffix -> its name in the window of seen messages
        self._refs: dict[int, str] = {}
        self._hooks: list[_Hooks] = []
        for cell_at, cell in enumerate(self.cells):
            ref = ids.component_ref(cell.slot)
            if ref in self._refs:
                raise InvalidArtifact(
                    f"slot {cell.slot!r}",
                    f"has the component ref of slot {self._refs[ref]!r}; rename one of them",
                )
            self._refs[ref] = cell.slot
            for name, method in inbound_ops(type(cell.component)).items():
                suffix = suffix_of(cell.slot, name)
                self._sites[suffix] = ids.fnv1a_64(suffix)
                self._routes[suffix] = {
                    kind: self._inbound_plan(cell_at, name, method, kind, suffix)
                    for kind in _KIND_SUFFIX
                }
            self._hooks.append(_Hooks(partial(self._hook, cell_at)))

    # -- plans -------------------------------------------------------------------------------

    def _inbound_plan(
        self, cell_at: int, name: str, method: str, kind: CorrelationKind, suffix: bytes
    ) -> EntryPlan:
        def finish(frame: Frame, result: Any) -> Value:
            if result is None:
                return TRIGGER  # who asked is told that there is no answer
            if kind is not CorrelationKind.REQUEST or not isinstance(result, bytes):
                wanted = "bytes or None" if kind is CorrelationKind.REQUEST else "None"
                raise WrongResultType(
                    f"inbound op {name} returned {type(result).__name__}; expected {wanted}"
                )
            if frame.source_peer is not None:
                fill = SlotFill(dest_suffix=suffix, payload=result)
                self.outbound.send(
                    frame,
                    plan.ops[0],
                    (frame.source_peer,),
                    fill,
                    CorrelationKind.RESPONSE,
                    frame.wire_req_id,
                    self.outbound.remaining_ns(frame, plan.ops[0], 1, 0),
                )
                frame.debt = None  # paid
            return TRIGGER

        plan = self._plan(cell_at, f"op {name}{_KIND_SUFFIX[kind]}", method, 1, finish, kind)
        return plan  # named, since `finish` needs it

    def _hook(self, cell_at: int, method: str, count: int) -> EntryPlan | None:
        if not callable(getattr(self.cells[cell_at].component, method, None)):
            return None

        def finish(_frame: Frame, result: Any) -> Value:
            if result is not None:
                raise WrongResultType(f"{method} returned {type(result).__name__}; expected None")
            return TRIGGER

        kind = CorrelationKind.RESPONSE if method == "on_answer" else None
        has_reason = method == "on_no_answer"
        return self._plan(cell_at, method, method, count, finish, kind, has_reason=has_reason)

    def _plan(
        self,
        cell_at: int,
        name: str,
        method: str,
        count: int,
        finish: Callable[[Frame, Any], Value],
        kind: CorrelationKind | None,
        *,
        has_reason: bool = False,
    ) -> EntryPlan:
        """Return the plan of a method with `count` arguments and, behind them, a reason."""
        slot = self.cells[cell_at].slot
        op = Op(0, f"{slot}.{name}", method, 0)
        plan = EntryPlan.of_op(op, name, slot, count + has_reason)
        plan.component = cell_at
        op.fire = bind_method(
            op,
            cell_at,
            method,
            plan.seeds[:count],
            finish,
            correlation=kind,
            reason_at=count if has_reason else None,
        )
        self.plans.append(plan)
        return plan

    # -- receiving --------------------------------------------------------------------------

    def receive(self, event: InboundBytes, envelope: WireEnvelope, index: int) -> bool:
        """Accept a fill for a component; return False if its suffix names no component."""
        fill = envelope.fills[index]
        where = parse_component_suffix(fill.dest_suffix)
        if where is None:
            return False
        if fill.type_hash:
            detail = f"{_shown(where)} takes bytes of its own, type hash 0"
            self._refuse(event, envelope, index, "TypeMismatch", detail)
        elif envelope.correlation.kind is CorrelationKind.RESPONSE:
            self._answered(event, envelope, index)
        elif fill.dest_suffix not in self._routes:
            if where[0] in self._refs:
                op_of = f"slot {self._refs[where[0]]!r} has no inbound op {where[1]!r}"
                self._refuse(event, envelope, index, "UnknownComponentOp", op_of)
            else:
                detail = f"no component here has the ref {where[0]}"
                self._refuse(event, envelope, index, "UnknownComponent", detail)
        else:
            denied = self._denied(event.peer, envelope.correlation.wire_req_id, fill.dest_suffix)
            if denied is not None:
                self.reports.counts[f"gate.denied.{denied}"] += 1
                detail = f"reason={denied}: {_shown(where)}"
                tells = denied != REASON_DUPLICATE
                self._refuse(event, envelope, index, "GateDenied", detail, tells=tells)
            else:
                self.decoder.charge(types.BYTES, fill.payload)
                plan = self._routes[fill.dest_suffix][envelope.correlation.kind]
                self._deliver(plan, (bytes(fill.payload),), event, envelope, index)
        return True

    def _denied(self, peer: PeerId, wire_req_id: int, suffix: bytes) -> str | None:
        """Return the reason of the first gate that denies; the gates are those of a Recv."""
        if self.dedup.record(peer, wire_req_id, self._sites[suffix]):
            return REASON_DUPLICATE
        reason = self.neighbours.governor.check_inbound(peer)
        if reason is not None:
            return reason.value
        may_try = self.neighbours.backoff.should_retry(peer, self.clock.now_ns)
        return None if may_try else "cooldown"

    def _answered(self, event: InboundBytes, envelope: WireEnvelope, index: int) -> None:
        counts = self.reports.counts
        wire_req_id = envelope.correlation.wire_req_id
        fill = envelope.fills[index]
        if self.neighbours.governor.check_inbound(event.peer):
            counts[f"response.{ResponseStatus.STRANGER.value}"] += 1
            return
        call = self.calls.answer(wire_req_id, event.peer, fill.dest_suffix)
        if isinstance(call, ResponseStatus):
            counts[f"response.{call.value}"] += 1
            return
        self.reports.peers_changed(self.neighbours.succeeded(event.peer))
        self.round_trips.learn(envelope.edge_rtt_reports)
        plan = self._hooks[call.cell_at].on_answer
        if plan is not None:
            self.decoder.charge(types.BYTES, fill.payload)
            self._deliver(plan, (call.tag, bytes(fill.payload)), event, envelope, index)

    def _deliver(
        self,
        plan: EntryPlan,
        values: Sequence[Value],
        event: InboundBytes,
        envelope: WireEnvelope,
        index: int,
    ) -> None:
        at = plan.component
        if at is not None and self.executor.under_way[at] >= MAX_UNDER_WAY:
            detail = f"{MAX_UNDER_WAY} calls of slot {self.cells[at].slot!r} are under way"
            self._refuse(event, envelope, index, "ComponentBusy", detail)
            return
        correlation = envelope.correlation
        if correlation.kind is CorrelationKind.REQUEST and self.refusals.leaving:
            self._refuse(event, envelope, index, LEAVING.kind, LEAVING.detail)
            return
        frame = self.executor.start(plan)
        if frame is None:
            why = WireRefusal(
                FramesExceeded.__name__, "too many executions are under way", plan.name
            )
            kind, wire_req_id = correlation.kind, correlation.wire_req_id
            self.refusals.at_arrival(event.peer, kind, wire_req_id, why)
            return
        if correlation.kind is CorrelationKind.REQUEST:
            frame.debt = OWED
        frame.source_peer = event.peer
        frame.wire_req_id = envelope.correlation.wire_req_id
        frame.hold_charge(event.charge.hold())
        if envelope.remaining_deadline_ns:
            frame.deadline_ns = self.clock.now_ns + envelope.remaining_deadline_ns
        frame.values[: len(values)] = values
        self.executor.launch(frame)

    def _refuse(
        self,
        event: InboundBytes,
        envelope: WireEnvelope,
        index: int,
        kind: str,
        detail: str,
        *,
        tells: bool = True,
    ) -> None:
        """Report a fill that is refused; `tells`: and tell whoever waits for what comes of it."""
        fill, said, peer = envelope.fills[index], envelope.correlation, event.peer
        self.reports.receive_failed(peer, index, fill.type_hash, fill.payload_size, kind, detail)
        where = parse_component_suffix(fill.dest_suffix)
        why = WireRefusal(kind, detail, "" if where is None else _shown(where))
        if said.kind is CorrelationKind.RESPONSE:
            self.refused(peer, said.wire_req_id, why)
        elif tells:
            self.refusals.at_arrival(peer, said.kind, said.wire_req_id, why)

    def message(self, event: TopicMessage) -> None:
        """Tell the components that follow a topic what a peer has published there."""
        try:
            reason = self.neighbours.governor.check_inbound(event.peer)
            if reason is not None:
                self.reports.counts[f"topics.denied.{reason.value}"] += 1
                return
            for cell_at in self.topics.followers(event.topic):
                plan = self._hooks[cell_at].on_message
                if plan is None:
                    continue
                full = self.executor.under_way[cell_at] >= MAX_UNDER_WAY
                frame = None if full else self.executor.start(plan)
                if frame is None:
                    self.reports.counts["topics.too_busy"] += 1
                    continue
                self.reports.counts["topics.delivered"] += 1
                self.decoder.charge(types.BYTES, event.data)
                frame.source_peer = event.peer
                frame.hold_charge(event.charge.hold())
                frame.values[:2] = (event.topic, event.data)
                self.executor.launch(frame)
        finally:
            event.charge.release()

    # -- due -------------------------------------------------------------------------

    def timer_is_due(self, number: int) -> None:
        """Tell a component that its timer matured."""
        cell_at, key = self.timers.take(number)
        plan = self._hooks[cell_at].on_timer
        if plan is not None and not self._start(plan, (key,)):
            self.timers.set(cell_at, key, self.clock.now_ns + RETRY_NS)

    def call_is_late(self, wire_req_id: int) -> None:
        """Tell a component that its request has no answer."""
        call = self.calls.too_late(wire_req_id)
        if call is not None:
            waited_ms = (self.clock.now_ns - call.opened_ns) // 1_000_000
            late = f"{DeadlineExceeded.__name__}: no answer within {waited_ms} ms"
            self._unanswered(call, call.reason or late)

    def failed_in(self, envelope: int, peer: PeerId, why: WireRefusal) -> bool:
        """Tell a component that its request in an envelope will have no answer.

        Returns False if none is open.
        """
        call = self.calls.failed_in(envelope, peer)
        if call is None:
            return False
        self._failed(call, why)
        return True

    def refused(self, peer: PeerId, wire_req_id: int, why: WireRefusal) -> ResponseStatus:
        """Tell a component that a peer refuses its request; UNKNOWN if there is no such request."""
        call = self.calls.refused(wire_req_id, peer)
        if isinstance(call, ResponseStatus):
            return call
        self._failed(call, why)
        return ResponseStatus.ACCEPTED

    def peer_lost(self, peer: PeerId, since_ns: int, why: WireRefusal) -> None:
        """Tell components that a peer will not answer what they asked before it was lost."""
        for call in self.calls.lost(peer, since_ns):
            self._failed(call, why)

    def peer_down(self, peer: PeerId) -> None:
        """Tell components that want to know of the loss of a connection."""
        for hooks in self._hooks:
            if hooks.on_peer_down is not None:
                self._start(hooks.on_peer_down, (peer,))

    def _failed(self, call: PendingCall, why: WireRefusal) -> None:
        why = why.bounded()
        self.reports.telemetry(
            "call.failed",
            slot=self.cells[call.cell_at].slot,
            tag=call.tag,
            peer=call.peer,
            kind=why.kind,
            detail=why.detail,
            where=why.where,
        )
        self._unanswered(call, str(why))

    def _unanswered(self, call: PendingCall, reason: str) -> None:
        self.reports.counts["calls.unanswered"] += 1
        plan = self._hooks[call.cell_at].on_no_answer
        if plan is not None and not self._start(plan, (call.tag, call.peer, reason)):
            # The component is busy: the call stays open until it can be told.
            self.calls.open(
                call.wire_req_id,
                cell_at=call.cell_at,
                tag=call.tag,
                peer=call.peer,
                suffix=call.suffix,
                opened_ns=call.opened_ns,
                until_ns=self.clock.now_ns + RETRY_NS,
                reason=reason,
            )

    def _start(self, plan: EntryPlan, values: Sequence[Value]) -> bool:
        """Start an execution of a component's method; return False if it is busy."""
        cell = self.cells[plan.component or 0]
        if cell.busy or cell.gate is not None or self.executor.is_full:
            return False
        frame = self.executor.start(plan)
        if frame is None:
            return False
        frame.values[: len(values)] = values
        self.executor.launch(frame)
        return True

    # -- actions -----------------------------------------------------------------------------

    def carry_out(self, cell_at: int, frame: Frame, op: Op, actions: Sequence[Action]) -> None:
        """Do what a method asked for, now that it has returned."""
        for action in actions:
            if isinstance(action, SendMessage):
                self._send(cell_at, frame, op, action)
            elif isinstance(action, SetTimer):
                self.timers.set(cell_at, action.key, self.clock.now_ns + action.after_ns)
            elif isinstance(action, CancelTimer):
                self.timers.cancel(cell_at, action.key)
            elif isinstance(action, LearnAddresses):
                raws = tuple(bytes(address.to_bytes()) for address in action.addresses)
                refused = self.neighbours.book.merge_claimed(action.peer, raws)
                if refused:
                    self.reports.counts["addresses.refused"] += refused
            elif isinstance(action, PublishOnTopic):
                self.reports.counts["topics.published"] += 1
                self.reports.steps.append(
                    PublishMessage(topic=action.topic, payload=action.payload)
                )
            elif isinstance(action, Follow):
                self.topics.set(cell_at, action.topic, on=action.on)
            elif isinstance(action, PublishEvent):
                self.reports.bus.publish(action.kind)

    def _send(self, cell_at: int, frame: Frame, op: Op, message: SendMessage) -> None:
        kind = CorrelationKind.NONE if message.tag is None else CorrelationKind.REQUEST
        fill = SlotFill(dest_suffix=message.suffix, payload=message.payload)
        size = self.outbound.check(op, fill, 1)
        found = self.outbound.reachable(frame, op, (message.peer,))
        now_ns = self.clock.now_ns
        if message.tag is not None:
            self.calls.open(
                message.wire_req_id,
                cell_at=cell_at,
                tag=message.tag,
                peer=message.peer,
                suffix=message.suffix,
                opened_ns=now_ns,
                # An unreachable peer will not answer, so the component is told at once.
                until_ns=now_ns + (message.deadline_ns if found else 0),
                reason="" if found else f"{NOT_SENT}: {self.neighbours.unreachable(message.peer)}",
            )
        self.outbound.queue(
            frame, op, found, fill, size, kind, message.wire_req_id, message.deadline_ns
        )

    def waiting(self) -> list[Waiting]:
        """Return the requests of components that wait for answers."""
        return [
            Waiting(
                what=f"{self.cells[call.cell_at].slot}: {call.tag}",
                why="answer",
                whom=str(call.peer),
                execution=0,
                target=self.cells[call.cell_at].slot,
                since_ns=call.opened_ns,
                until_ns=call.timer.when_ns,
            )
            for call in self.calls.all()
        ]


def _shown(where: tuple[int, str]) -> str:
    return f"/component/{where[0]}/op/{where[1]}"
