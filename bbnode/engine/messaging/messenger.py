"""The control plane: components of different peers that talk to each other, and to themselves.

Rule: what comes for a component (an inbound op, an answer, a timer) is an execution of one op, by
the rules of all ops: one at a time on a component, in the order of coming, with a deadline, and a
failure is a step. What a component asks for (sends, timers) is carried out when its method has
returned. Payloads are the component's own; the fill says type hash 0. An answer goes back to the
suffix that was asked, under the request's id, and only who waits for it takes it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from bbnode.components.contracts import inbound_ops
from bbnode.engine.component_timers import RETRY_NS, ComponentTimers
from bbnode.engine.errors import InvalidArtifact, WrongResultType
from bbnode.engine.frame import MISSING, EntryPlan, Frame, Op
from bbnode.engine.messaging.pending import OpenCall, OpenCalls
from bbnode.engine.ops.context import (
    Asked,
    CancelTimer,
    LearnAddresses,
    SendMessage,
    SetTimer,
    suffix_of,
)
from bbnode.engine.ops.role import bind_method
from bbnode.engine.parking import Waiting
from bbnode.engine.requests import Verdict
from bbnode.ir import ids, types
from bbnode.ir.address import parse_component_suffix
from bbnode.ir.caps import MAX_UNDER_WAY
from bbnode.ir.envelope import CorrelationKind, SlotFill, WireEnvelope
from bbnode.ir.peer import PeerId
from bbnode.ir.values import TRIGGER, Value

if TYPE_CHECKING:
    from bbnode.engine.ingress import InboundBytes
    from bbnode.engine.runtime import Runtime
    from bbnode.engine.snapshot.codec import LoadedNames, SavedNames


_KIND_SUFFIX = {
    CorrelationKind.NONE: "",
    CorrelationKind.REQUEST: " (request)",
}


class _Hooks:
    """The methods of one component that the engine itself calls; None where it has none."""

    __slots__ = ("on_answer", "on_no_answer", "on_timer")

    def __init__(self, make: Callable[[str, int], EntryPlan | None]) -> None:
        self.on_timer = make("on_timer", 1)
        self.on_answer = make("on_answer", 2)
        self.on_no_answer = make("on_no_answer", 2)


class ControlPlane:
    """The control plane of one node."""

    def __init__(self, rt: Runtime) -> None:
        self._rt = rt
        self.calls = OpenCalls(rt.scheduler)
        self.timers = ComponentTimers(rt.scheduler)
        self.plans: list[EntryPlan] = []  # all of this node, in an order that never changes
        self._routes: dict[bytes, dict[CorrelationKind, EntryPlan]] = {}
        self._sites: dict[bytes, int] = {}  # suffix -> its name in the window of seen messages
        self._refs: dict[int, str] = {}
        self._under_way = [0] * len(rt.cells)
        self._hooks: list[_Hooks] = []
        for cell_at, cell in enumerate(rt.cells):
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
                return TRIGGER
            if kind is not CorrelationKind.REQUEST or not isinstance(result, bytes):
                wanted = "bytes or None" if kind is CorrelationKind.REQUEST else "None"
                raise WrongResultType(
                    f"inbound op {name} returned {type(result).__name__}; expected {wanted}"
                )
            if frame.source_peer is not None:
                fill = SlotFill(dest_suffix=suffix, payload=result)
                self._rt.outbound.send(
                    frame,
                    plan.ops[0],
                    (frame.source_peer,),
                    fill,
                    CorrelationKind.RESPONSE,
                    frame.wire_req_id,
                    frame.remaining_ns(self._rt.now_ns, 0, 0),
                )
            return TRIGGER

        plan = self._plan(cell_at, f"op {name}{_KIND_SUFFIX[kind]}", method, 1, finish, kind)
        return plan

    def _hook(self, cell_at: int, method: str, count: int) -> EntryPlan | None:
        if not callable(getattr(self._rt.cells[cell_at].component, method, None)):
            return None

        def finish(_frame: Frame, result: Any) -> Value:
            if result is not None:
                raise WrongResultType(f"{method} returned {type(result).__name__}; expected None")
            return TRIGGER

        kind = CorrelationKind.RESPONSE if method == "on_answer" else None
        return self._plan(cell_at, method, method, count, finish, kind)

    def _plan(
        self,
        cell_at: int,
        name: str,
        method: str,
        count: int,
        finish: Callable[[Frame, Any], Value],
        kind: CorrelationKind | None,
    ) -> EntryPlan:
        slot = self._rt.cells[cell_at].slot
        op = Op(0, f"{slot}.{name}", method, 0)
        plan = EntryPlan(name, slot)
        plan.seeds = tuple(range(count))
        plan.template = [MISSING] * (count + 1)  # and scratch
        plan.complete((op,), {})
        plan.component = cell_at
        op.fire = bind_method(op, cell_at, method, plan.seeds, finish, correlation=kind)
        self.plans.append(plan)
        return plan

    # -- what comes --------------------------------------------------------------------------

    def receive(self, event: InboundBytes, envelope: WireEnvelope, index: int) -> bool:
        """Take a fill for a component; False when its suffix names none."""
        fill = envelope.fills[index]
        where = parse_component_suffix(fill.dest_suffix)
        if where is None:
            return False
        rt = self._rt
        if fill.type_hash:
            detail = f"{_shown(where)} takes bytes of its own, type hash 0"
            self._refuse(event.peer, index, fill, "TypeMismatch", detail)
        elif envelope.correlation.kind is CorrelationKind.RESPONSE:
            self._answered(event, envelope, index)
        elif fill.dest_suffix not in self._routes:
            if where[0] in self._refs:
                op_of = f"slot {self._refs[where[0]]!r} has no inbound op {where[1]!r}"
                self._refuse(event.peer, index, fill, "UnknownComponentOp", op_of)
            else:
                detail = f"no component here has the ref {where[0]}"
                self._refuse(event.peer, index, fill, "UnknownComponent", detail)
        else:
            denied = self._denied(event.peer, envelope.correlation.wire_req_id, fill.dest_suffix)
            if denied is not None:
                rt.counts[f"gate.denied.{denied}"] += 1
                self._refuse(
                    event.peer, index, fill, "GateDenied", f"reason={denied}: {_shown(where)}"
                )
            else:
                rt.decoder.charge(types.BYTES, fill.payload)
                plan = self._routes[fill.dest_suffix][envelope.correlation.kind]
                self._deliver(plan, (bytes(fill.payload),), event, envelope, index)
        return True

    def _denied(self, peer: PeerId, wire_req_id: int, suffix: bytes) -> str | None:
        """The reason of the first receive gate that denies: they stand here as before a Recv."""
        rt = self._rt
        if rt.dedup.record(peer, wire_req_id, self._sites[suffix]):
            return "duplicate"
        reason = rt.neighbours.governor.check_inbound(peer)
        if reason is not None:
            return reason.value
        return None if rt.neighbours.backoff.should_retry(peer, rt.now_ns) else "cooldown"

    def _answered(self, event: InboundBytes, envelope: WireEnvelope, index: int) -> None:
        rt = self._rt
        wire_req_id = envelope.correlation.wire_req_id
        fill = envelope.fills[index]
        if rt.neighbours.governor.check_inbound(event.peer):
            rt.counts[f"response.{Verdict.STRANGER.value}"] += 1
            return
        call = self.calls.answer(wire_req_id, event.peer, fill.dest_suffix)
        if isinstance(call, Verdict):
            rt.counts[f"response.{call.value}"] += 1
            return
        rt.show(rt.neighbours.succeeded(event.peer))
        rt.round_trips.learn(envelope.edge_rtt_reports)
        plan = self._hooks[call.cell_at].on_answer
        if plan is not None:
            rt.decoder.charge(types.BYTES, fill.payload)
            self._deliver(plan, (call.tag, bytes(fill.payload)), event, envelope, index)

    def _deliver(
        self,
        plan: EntryPlan,
        values: Sequence[Value],
        event: InboundBytes,
        envelope: WireEnvelope,
        index: int,
    ) -> None:
        """Start the execution of something that came on the wire."""
        rt = self._rt
        at = plan.component
        if at is not None and self._under_way[at] >= MAX_UNDER_WAY:
            detail = f"{MAX_UNDER_WAY} calls of slot {rt.cells[at].slot!r} are under way"
            self._refuse(event.peer, index, envelope.fills[index], "ComponentBusy", detail)
            return
        frame = rt.start(plan, rt.next_execution())
        if frame is None:
            return
        frame.source_peer = event.peer
        frame.wire_req_id = envelope.correlation.wire_req_id
        frame.hold_charge(event.charge.hold())
        if envelope.remaining_deadline_ns:
            frame.deadline_ns = rt.now_ns + envelope.remaining_deadline_ns
        frame.values[: len(values)] = values
        rt.launch(frame)

    def _refuse(self, peer: PeerId, index: int, fill: SlotFill, kind: str, detail: str) -> None:
        self._rt.refuse(peer, index, fill.type_hash, fill.payload_size, kind, detail)

    # -- what is due -------------------------------------------------------------------------

    def timer_is_due(self, number: int) -> None:
        """A component's timer matured."""
        rt = self._rt
        cell_at, key = self.timers.take(number)
        plan = self._hooks[cell_at].on_timer
        if plan is not None and not self._start(plan, (key,)):
            self.timers.set(cell_at, key, rt.now_ns + RETRY_NS)

    def call_is_late(self, wire_req_id: int) -> None:
        """A component's request has no answer."""
        call = self.calls.too_late(wire_req_id)
        if call is not None:
            self._unanswered(call)

    def send_failed(self, envelope: int, peer: PeerId, reason: str) -> None:
        """An envelope did not come to a peer: a request in it will have no answer."""
        call = self.calls.send_failed(envelope, peer)
        if call is not None:
            slot = self._rt.cells[call.cell_at].slot
            self._rt.telemetry("call.unsent", slot=slot, tag=call.tag, peer=peer, reason=reason)
            self._unanswered(call)

    def _unanswered(self, call: OpenCall) -> None:
        self._rt.counts["calls.unanswered"] += 1
        plan = self._hooks[call.cell_at].on_no_answer
        if plan is not None and not self._start(plan, (call.tag, call.peer)):
            # It is told all the same: the call is open again until the component can listen.
            now_ns = self._rt.now_ns
            self.calls.open(
                call.wire_req_id,
                cell_at=call.cell_at,
                tag=call.tag,
                peer=call.peer,
                suffix=call.suffix,
                now_ns=call.opened_ns,
                until_ns=now_ns + RETRY_NS,
            )

    def _start(self, plan: EntryPlan, values: Sequence[Value]) -> bool:
        """Start an execution of a component's own; False when it can't take it now."""
        rt = self._rt
        limit = rt.limits.frames
        cell = rt.cells[plan.component or 0]
        if cell.busy or cell.gate is not None or (limit is not None and len(rt.frames) >= limit):
            return False
        frame = rt.start(plan, rt.next_execution())
        if frame is None:
            return False
        frame.values[: len(values)] = values
        rt.launch(frame)
        return True

    def started(self, cell_at: int) -> None:
        """An execution of a component begins."""
        self._under_way[cell_at] += 1

    def ended(self, cell_at: int) -> None:
        """An execution of a component is over."""
        self._under_way[cell_at] -= 1

    # -- what components ask for -------------------------------------------------------------

    def carry_out(self, cell_at: int, frame: Frame, op: Op, asked: Sequence[Asked]) -> None:
        """Do what a method asked for, now that it has returned."""
        rt = self._rt
        for wish in asked:
            if isinstance(wish, SendMessage):
                self._send(cell_at, frame, op, wish)
            elif isinstance(wish, SetTimer):
                self.timers.set(cell_at, wish.key, rt.now_ns + wish.after_ns)
            elif isinstance(wish, CancelTimer):
                self.timers.cancel(cell_at, wish.key)
            elif isinstance(wish, LearnAddresses):
                raws = tuple(bytes(address.to_bytes()) for address in wish.addresses)
                refused = rt.neighbours.book.merge_claimed(wish.peer, raws)
                if refused:
                    rt.counts["addresses.refused"] += refused

    def _send(self, cell_at: int, frame: Frame, op: Op, wish: SendMessage) -> None:
        rt = self._rt
        kind = CorrelationKind.NONE if wish.tag is None else CorrelationKind.REQUEST
        fill = SlotFill(dest_suffix=wish.suffix, payload=wish.payload)
        size = rt.outbound.check(op, fill, 1)
        found = rt.outbound.reachable(frame, op, (wish.peer,))
        if wish.tag is not None:
            self.calls.open(
                wish.wire_req_id,
                cell_at=cell_at,
                tag=wish.tag,
                peer=wish.peer,
                suffix=wish.suffix,
                now_ns=rt.now_ns,
                # Who can't be reached will not answer: the component hears of it at once.
                until_ns=rt.now_ns + (wish.deadline_ns if found else 0),
            )
        if rt.tracer is not None:
            rt.tracer.sent(frame, op, found, kind, wish.wire_req_id, wish.suffix)
        for peer in found:
            rt.outbound.queue(peer, fill, size, kind, wish.wire_req_id, wish.deadline_ns)

    # -- looking at it -----------------------------------------------------------------------

    def waiting(self) -> list[Waiting]:
        """Requests of components that wait for answers."""
        return [
            Waiting(
                what=f"{self._rt.cells[call.cell_at].slot}: {call.tag}",
                why="answer",
                whom=str(call.peer),
                execution=0,
                target=self._rt.cells[call.cell_at].slot,
                since_ns=call.opened_ns,
                until_ns=call.timer.when_ns,
            )
            for call in self.calls.all()
        ]

    # -- snapshot ----------------------------------------------------------------------------

    def state(self, names: SavedNames) -> Any:
        """For a snapshot: timers and calls; what is under way is counted from the frames."""
        return [self.timers.state(names), self.calls.state(names)]

    def load(self, plain: Any, names: LoadedNames) -> None:
        """Take up what `state` gave, after the scheduler and the frames."""
        timers, calls = plain
        self.timers.load(timers, names)
        self.calls.load(calls, names)
        self._under_way = [0] * len(self._rt.cells)
        for frame in self._rt.frames.values():
            if frame.plan.component is not None:
                self._under_way[frame.plan.component] += 1


def _shown(where: tuple[int, str]) -> str:
    return f"/component/{where[0]}/op/{where[1]}"
