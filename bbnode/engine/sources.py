"""What ingress events and matured timers do.

Rule: one method per event class and one branch per timer kind; nothing here raises.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from bbnode.engine import ingress as ev
from bbnode.engine import steps
from bbnode.engine.bootstrap.bootstraps import Bootstraps
from bbnode.engine.frame import EntryPlan, Frame
from bbnode.engine.planning.program import Program
from bbnode.engine.runtime import Runtime
from bbnode.engine.scheduler import TimerKind
from bbnode.engine.wire.inbound import Inbound
from bbnode.ir.values import TRIGGER, EventKind, Timestamp, Value

if TYPE_CHECKING:
    from bbnode.engine.snapshot.codec import LoadedNames, SavedNames


class Dispatch:
    """Turns events and timers of one node into executions and table changes."""

    def __init__(self, program: Program, rt: Runtime, bootstraps: Bootstraps) -> None:
        self._program = program
        self._bootstraps = bootstraps
        self._rt = rt
        self._booting: list[Frame] | None = None
        self._listeners: dict[int, list[EntryPlan]] = {}
        for source in program.sources:
            if source.kind == "EventSource":
                self._listeners.setdefault(source.argument, []).append(source.plan)
        self.take: Mapping[type, Callable[[Any], None]] = {
            ev.InboundBytes: Inbound(rt, program.sites).receive,
            ev.InboundRefused: self._take_refused,
            ev.Invocation: self._take_invocation,
            ev.PeerConnected: self._take_connected,
            ev.PeerDisconnected: self._take_disconnected,
            ev.SendFailed: self._take_send_failed,
            ev.Lifecycle: self._take_lifecycle,
            ev.Published: self._take_published,
            ev.BootstrapAsked: bootstraps.take,
        }

    def state(self, names: SavedNames) -> Any:
        """For a snapshot: what the first poll fired and has not ended yet."""
        return None if self._booting is None else [names.frame(frame) for frame in self._booting]

    def load(self, plain: Any, names: LoadedNames) -> None:
        """Take up what `state` gave."""
        self._booting = None if plain is None else [names.frame(number) for number in plain]

    def _take_refused(self, event: ev.InboundRefused) -> None:
        self._rt.refuse(event.peer, -1, 0, event.size, event.kind, event.detail)

    def _take_invocation(self, event: ev.Invocation) -> None:
        rt = self._rt
        target = self._program.by_name[event.target]
        plan = target.invoke if event.event is None else target.events[event.event]
        frame = rt.start(plan, event.execution)
        if frame is None:
            event.charge.release()
            rt.steps.append(
                steps.ExecutionFinished(
                    execution=event.execution, target=target.name, ok=False, failures=1
                )
            )
            return
        frame.charges = [event.charge]
        frame.report = True
        values, inputs = frame.values, event.inputs
        for name, index in zip(plan.seed_names, plan.seeds):  # noqa: B905 - made as pairs
            values[index] = inputs[name]
        rt.launch(frame)

    def _take_connected(self, event: ev.PeerConnected) -> None:
        self._rt.show(self._rt.neighbours.connected(event.peer, event.classes, event.addresses))

    def _take_disconnected(self, event: ev.PeerDisconnected) -> None:
        self._rt.show(self._rt.neighbours.disconnected(event.peer, event.reason))

    def _take_send_failed(self, event: ev.SendFailed) -> None:
        rt = self._rt
        rt.counts["send.failed"] += 1
        if event.blames_peer:
            rt.show(rt.neighbours.failed(event.peer, event.reason, rt.now_ns))
        tag = event.tag
        if tag is not None and not rt.cohorts.send_failed(tag, event.peer, event.reason):
            rt.control.send_failed(tag, event.peer, event.reason)

    def _take_lifecycle(self, event: ev.Lifecycle) -> None:
        for source in self._program.sources:
            if source.kind == "LifecyclePhase" and source.argument == event.phase:
                self._fire_source(source.plan, TRIGGER)

    def _take_published(self, event: ev.Published) -> None:
        self._rt.bus.publish(event.kind)

    def deliver_bus(self) -> None:
        """Start what listens for the events that wait on the bus."""
        for kind in self._rt.bus.take():
            for plan in self._listeners[kind]:
                self._fire_source(plan, EventKind(kind), from_bus=True)

    # -- what fires by itself ----------------------------------------------------------------

    def boot(self) -> None:
        """At the first poll: fire every Pulse, arm every Interval."""
        rt = self._rt
        self._booting = []
        for index, source in enumerate(self._program.sources):
            if source.kind == "Interval":
                rt.scheduler.set(rt.now_ns + source.argument, TimerKind.INTERVAL, index)
            elif source.kind == "Pulse":
                frame = self._fire_source(source.plan, TRIGGER)
                if frame is not None:
                    self._booting.append(frame)

    def check_booted(self) -> None:
        """Say once when everything that `boot` fired has ended."""
        if self._booting is None or not all(frame.ended for frame in self._booting):
            return
        ok = not any(frame.failures for frame in self._booting)
        self._rt.steps.append(steps.BootstrapComplete(executions=len(self._booting), ok=ok))
        self._booting = None

    def _fire_source(
        self, plan: EntryPlan, value: Value, *, from_bus: bool = False
    ) -> Frame | None:
        frame = self._rt.start(plan, self._rt.next_execution(), from_bus=from_bus)
        if frame is not None:
            for index in plan.seeds:
                frame.values[index] = value
            self._rt.launch(frame)
        return frame

    def mature(self, kind: TimerKind, key: int, when_ns: int) -> None:
        """A timer is due."""
        rt = self._rt
        if kind is TimerKind.PARKED_DONE:
            rt.suspensions.resume(key, TRIGGER, None)
        elif kind is TimerKind.PARKED_DEADLINE:
            rt.suspensions.too_late(key)
        elif kind is TimerKind.REQUEST_DEADLINE:
            rt.cohorts.deadline(key)
        elif kind is TimerKind.BOOTSTRAP_TURN:
            self._bootstraps.turn_is_over(key)
        elif kind is TimerKind.COMPONENT_TIMER:
            rt.control.timer_is_due(key)
        elif kind is TimerKind.CALL_DEADLINE:
            rt.control.call_is_late(key)
        else:
            self._tick(key, when_ns)

    def _tick(self, index: int, when_ns: int) -> None:
        rt = self._rt
        source = self._program.sources[index]
        missed = (rt.now_ns - when_ns) // source.argument
        rt.counts["interval.missed"] += missed
        following_ns = when_ns + (missed + 1) * source.argument
        rt.scheduler.set(following_ns, TimerKind.INTERVAL, index)
        self._fire_source(source.plan, Timestamp(rt.now_ns))
