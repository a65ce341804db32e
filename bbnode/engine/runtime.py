"""The composition of a node: every service, with the others that it uses.

Rule: services get each other as arguments. What one tells another that is made after it (an ending
frame and what it holds, a request and its envelope) goes through a method here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, Protocol

from bbnode.components.contracts import HostSecrets
from bbnode.components.errors import NotEnoughPeers
from bbnode.engine import ingress as ev
from bbnode.engine import steps
from bbnode.engine.bootstrap.bootstraps import Bootstraps
from bbnode.engine.cells import ComponentCell
from bbnode.engine.clock import NodeClock
from bbnode.engine.cohorts import CONNECTION_LOST, NOT_SENT, PEER_RESTARTED, Cohorts
from bbnode.engine.errors import QuorumNotReached
from bbnode.engine.executor import Executor
from bbnode.engine.frame import EntryPlan, Frame, Op
from bbnode.engine.ingress import Ingress
from bbnode.engine.joins import Joins
from bbnode.engine.latches import Latches
from bbnode.engine.limits import Limits
from bbnode.engine.messaging.actions import Action
from bbnode.engine.messaging.messenger import ComponentMessenger
from bbnode.engine.messaging.pending import ComponentTimers, PendingCalls
from bbnode.engine.peers.lost import LostPeers
from bbnode.engine.peers.neighbours import Neighbours
from bbnode.engine.peers.round_trips import RoundTrips
from bbnode.engine.places import SourcePlace
from bbnode.engine.planning.program import ProgramPlan
from bbnode.engine.planning.sites import RecvSite
from bbnode.engine.readiness import SlotReadiness
from bbnode.engine.reports import Reports
from bbnode.engine.rng import program_rng, wire_ids
from bbnode.engine.scheduler import Scheduler, TimerKind
from bbnode.engine.services import RunnableGraph, Services
from bbnode.engine.snapshot.codec import Line, SnapshotReader, SnapshotWriter
from bbnode.engine.snapshot.events import IngressTable
from bbnode.engine.sources import Sources
from bbnode.engine.stores import Records, Stores
from bbnode.engine.suspensions import Suspensions
from bbnode.engine.tracing import Tracer
from bbnode.engine.wire.decoder import PLAN as DECODING
from bbnode.engine.wire.decoder import Decoder
from bbnode.engine.wire.inbound import Inbound, InboundDedup
from bbnode.engine.wire.outbound import EnvelopeOutbox
from bbnode.engine.wire.refusals import LEAVING, Refusals
from bbnode.ir.peer import PeerId
from bbnode.ir.refusal import WireRefusal
from bbnode.ir.values import TRIGGER


class Table(Protocol):
    """State that outlives a poll."""

    def state(self, writer: SnapshotWriter, /) -> Any:
        """Return it as plain data."""

    def load(self, plain: Any, reader: SnapshotReader, /) -> None:
        """Load what `state` returned."""


class Runtime(Services):
    """All services of one node, and what each event and each timer does."""

    # There are more than instances of one class share a dict of: an idle node would hold its own.
    __slots__ = (
        "_plans",
        "bootstraps",
        "calls",
        "cells",
        "clock",
        "cohorts",
        "decoder",
        "dedup",
        "executor",
        "graphs",
        "inbound",
        "incarnation",
        "ingress",
        "joins",
        "latches",
        "limits",
        "lost",
        "messenger",
        "neighbours",
        "outbound",
        "program",
        "readiness",
        "records",
        "refusals",
        "reports",
        "rng",
        "round_trips",
        "scheduler",
        "secrets",
        "sources",
        "stores",
        "suspensions",
        "timers",
        "tracer",
        "wire_ids",
    )

    def __init__(
        self,
        program: ProgramPlan,
        *,
        neighbours: Neighbours,
        cells: Sequence[ComponentCell],
        graphs: Sequence[RunnableGraph],
        limits: Limits,
        seed: int,
        incarnation: int,
        keeps_states: bool,
        secrets: HostSecrets | None = None,
    ) -> None:
        self.program = program
        self._plans: list[EntryPlan] | None = None
        self.secrets = secrets
        self.neighbours = neighbours
        self.cells = tuple(cells)
        self.graphs = tuple(graphs)
        self.limits = limits
        self.incarnation = incarnation
        peer = neighbours.self_peer.to_bytes()
        self.wire_ids = wire_ids(peer, incarnation)
        self.rng = program_rng(seed, incarnation, peer)
        self.clock = clock = NodeClock()
        listened = [s.argument for s in program.sources if s.kind == "EventSource"]
        self.reports = reports = Reports(limits, listened)
        self.ingress = Ingress(limits)
        self.scheduler = scheduler = Scheduler()
        self.tracer = Tracer(clock, reports)
        self.executor = executor = Executor(
            clock, reports, limits, self.tracer, self.ingress.executions
        )
        self.stores = Stores(self.ingress.budget, program.stores)
        self.latches = Latches(program.latches, executor.frames, reports)
        self.joins = Joins(program.joins, clock, reports, scheduler, executor, self.stores, limits)
        self.records = Records(self.ingress.budget, reports.counts)
        self.suspensions = Suspensions(
            executor,
            clock,
            scheduler,
            self.ingress,
            reports,
            limits,
            semaphores=self.stores.semaphores,
            keeps_states=keeps_states,
        )
        self.dedup = InboundDedup()
        self.round_trips = RoundTrips()
        self.outbound = EnvelopeOutbox(
            neighbours=neighbours,
            round_trips=self.round_trips,
            ingress=self.ingress,
            clock=clock,
            reports=reports,
            tracer=self.tracer,
            limits=limits,
            wire_ids=self.wire_ids,
        )
        self.refusals = Refusals(clock, reports, self.outbound)
        self.readiness = SlotReadiness(self.cells, neighbours, self.outbound, reports)
        self.lost = LostPeers(scheduler, limits.lost_peer_grace_ms)
        self.cohorts = Cohorts(
            clock, reports, scheduler, self.suspensions, self.outbound, self.wire_ids
        )
        self.decoder = Decoder(clock, reports, executor, self.suspensions)
        self.calls = PendingCalls(scheduler)
        self.timers = ComponentTimers(scheduler)
        self.messenger = ComponentMessenger(
            self.cells,
            calls=self.calls,
            timers=self.timers,
            clock=clock,
            reports=reports,
            executor=executor,
            neighbours=neighbours,
            round_trips=self.round_trips,
            dedup=self.dedup,
            decoder=self.decoder,
            outbound=self.outbound,
            refusals=self.refusals,
        )
        self.inbound = Inbound(
            program.sites,
            self.cells,
            limits=limits,
            clock=clock,
            reports=reports,
            executor=executor,
            neighbours=neighbours,
            round_trips=self.round_trips,
            cohorts=self.cohorts,
            decoder=self.decoder,
            components=self.messenger,
            dedup=self.dedup,
            refusals=self.refusals,
            outbound=self.outbound,
            readiness=self.readiness,
        )
        self.bootstraps = Bootstraps(
            program.bootstraps,
            self.cells,
            clock=clock,
            reports=reports,
            limits=limits,
            ingress=self.ingress,
            scheduler=scheduler,
            executor=executor,
            suspensions=self.suspensions,
            readiness=self.readiness,
        )
        self.readiness.plans = self
        self.sources = Sources(program.sources, clock, reports, scheduler, executor)
        self.outbound.requests = self
        executor.rt = self

    def of_classes(self) -> dict[str, list[EntryPlan]]:
        """Return the plans of the executions of each class, events and bootstraps left out."""
        class_of = {target.name: target.peer_class for target in self.program.targets}
        found: dict[str, list[EntryPlan]] = {name: [] for name in class_of.values()}
        for plan in self.plans:
            if plan.target in class_of:
                found[class_of[plan.target]].append(plan)
        return found

    def begin_life(self, incarnation: int) -> None:
        """Continue as another incarnation, with a new stream of ids for the wire."""
        self.incarnation = incarnation
        self.wire_ids.restart(wire_ids(self.neighbours.self_peer.to_bytes(), incarnation))

    def invoke(self, event: ev.Invocation) -> None:
        """Start the execution that was asked for."""
        target = self.program.by_name[event.target]
        plan = target.invoke if event.event is None else target.events[event.event]
        frame = self.executor.start(plan, event.execution)
        if frame is None:
            event.charge.release()
            self.reports.steps.append(
                steps.ExecutionFinished(
                    execution=event.execution, target=target.name, ok=False, failures=1
                )
            )
            return
        frame.charges = [event.charge]
        frame.report = True
        if isinstance(event, ev.TimedInvocation):
            frame.deadline_ns = self.clock.now_ns + event.budget_ns
        values, inputs = frame.values, event.inputs
        for name, index in zip(plan.seed_names, plan.seeds):  # noqa: B905 - made as pairs
            values[index] = inputs[name]
        alone = target.alone.get(event.event or "")
        if alone is not None:
            reason = f"it needs {', '.join(alone.needs)} too, and {event.event} alone was given"
            self.reports.steps += [
                steps.OutputSkipped(
                    execution=event.execution, target=target.name, name=name, reason=reason
                )
                for name in alone.lost
            ]
        for op, reason, place in plan.left_out:
            self.reports.op_not_run(frame.execution, target.name, op, reason, place.of(), 0)
        self.executor.launch(frame)

    def send_failed(self, event: ev.SendFailed) -> None:
        """Tell everybody who waits for an envelope that it will not arrive."""
        self.reports.counts["send.failed"] += 1
        if event.blames_peer:
            self.reports.peers_changed(
                self.neighbours.failed(event.peer, event.reason, self.clock.now_ns)
            )
        tag = event.tag
        why = WireRefusal(NOT_SENT, event.reason)
        if tag is not None and not self.cohorts.failed_in(tag, event.peer, why):
            self.messenger.failed_in(tag, event.peer, why)
            self.refusals.undelivered(tag, event.peer, event.reason)

    def request_lost(self, event: ev.RequestLost) -> None:
        """End the wait for a peer that was restarted without a request of this node."""
        peer, tag = event.peer, event.tag
        why = WireRefusal(PEER_RESTARTED, "it was restarted after it had got the request")
        # Its answer may have come before this event.
        if self.cohorts.failed_in(tag, peer, why) or self.messenger.failed_in(tag, peer, why):
            self.reports.counts["requests.lost"] += 1

    def peer_connected(self, event: ev.PeerConnected) -> None:
        """Take note of a connection with a peer."""
        self.lost.back(event.peer)
        self.reports.peers_changed(
            self.neighbours.connected(event.peer, event.classes, event.addresses, event.not_taken)
        )
        self.readiness.connected(event.peer)

    def peer_unfit(self, event: ev.PeerUnfit) -> None:
        """Take note that a peer's sizes do not fit."""
        if self.neighbours.peers.now_unfit(event.peer, event.unfit) and event.unfit.classes:
            classes, reason = event.unfit.classes, event.unfit.reason
            self.reports.telemetry(
                "peer.not_ready", peer=event.peer, classes=classes, reason=reason
            )

    def peer_disconnected(self, event: ev.PeerDisconnected) -> None:
        """Take note of the loss of a peer; whoever waits for its answer does so for a while."""
        peer = event.peer
        is_gone = peer in self.neighbours.peers and not event.ours
        if is_gone and (self.cohorts.awaits(peer) or self.calls.awaits(peer)):
            self.lost.lose(peer, event.reason, self.clock.now_ns)
        gone = self.neighbours.disconnected(peer, event.reason)
        self.reports.peers_changed(gone)
        if gone:
            self.messenger.peer_down(peer)

    def leave(self) -> None:
        """Refuse the requests that this node owes an answer, and all that come from now on."""
        self.refusals.leaving = True
        for frame in list(self.executor.frames.values()):
            if frame.debt is not None:
                frame.debt = LEAVING
                frame.failures += 1
                self.executor.end(frame)

    def forget_lost(self) -> None:
        """End the grace of peers for which nobody waits any more."""
        for peer in self.lost.peers():
            if not self.cohorts.awaits(peer) and not self.calls.awaits(peer):
                self.lost.back(peer)

    def peer_is_gone(self, number: int) -> None:
        """End the wait for a peer that did not come back in time, in every request."""
        lost = self.lost.take(number)
        away_ms = (self.clock.now_ns - lost.since_ns) // 1_000_000
        why = WireRefusal(CONNECTION_LOST, f"{lost.reason}; not back within {away_ms} ms")
        self.cohorts.peer_lost(lost.peer, lost.since_ns, why)
        self.messenger.peer_lost(lost.peer, lost.since_ns, why)

    def request_is_out(self, wire_req_id: int, peer: PeerId, tag: int) -> None:
        """Record the envelope of a request, for whoever waits for the answer."""
        if not self.cohorts.table.sent(wire_req_id, peer, tag):
            self.calls.sent(wire_req_id, tag)

    def unanswered(self, frame: Frame) -> None:
        """Tell the requester of an execution that it will not answer."""
        self.refusals.unanswered(frame)

    def why_few(self, error: BaseException) -> str:
        """Return, for behind a failure for want of peers, who is connected and was left out."""
        if isinstance(error, NotEnoughPeers):
            return self.readiness.left_out(error.peer_class, self.clock.now_ns)
        if isinstance(error, QuorumNotReached) and error.too_few_asked:
            return self.readiness.left_out("", self.clock.now_ns)
        return ""

    def undone(self, frame: Frame, op: str, error: BaseException, place: SourcePlace) -> None:
        """Tell the sender of a message that what it started has failed."""
        self.inbound.undone(frame, op, error, place)

    def drop_frame(self, frame: Frame) -> None:
        """Free what an execution that ends still holds."""
        self.suspensions.drop_frame(frame)
        self.cohorts.drop_frame(frame)
        self.suspensions.reclaim(frame)

    def carry_out(self, cell_at: int, frame: Frame, op: Op, actions: Sequence[Action]) -> None:
        """Carry out what a component's method asked for."""
        self.messenger.carry_out(cell_at, frame, op, actions)

    # -- snapshots ---------------------------------------------------------------------------

    def tables(self, ingress: IngressTable) -> dict[str, Table]:
        """Return all tables of the node by the names under which they are saved.

        The order is that of loading. Timers and frames come first, because others refer to them;
        lines are restored with the parked ops in them.
        """
        return {
            "timers": self.scheduler,
            "executions": self.executor,
            "runtime": self,
            "clock": self.clock,
            "reports": self.reports,
            "parked": self.suspensions,
            "requests": self.cohorts,
            "bootstraps": self.bootstraps,
            "sources": self.sources,
            "stores": self.stores,
            "joins": self.joins,
            "latches": self.latches,
            "dedup": self.dedup,
            "addresses": self.neighbours.book,
            "backoff": self.neighbours.backoff,
            "governor": self.neighbours.governor,
            "peers": self.neighbours.peers,
            "outbound": self.outbound,
            "round_trips": self.round_trips,
            "component_timers": self.timers,
            "calls": self.calls,
            "topics": self.messenger.topics,
            "lost_peers": self.lost,
            "refusals": self.refusals,
            "refusals_heard": self.inbound,
            "readiness": self.readiness,
            "turns": self.executor.turns,
            "records": self.records,
            "ingress": ingress,
        }

    @property
    def plans(self) -> list[EntryPlan]:
        """All plans of executions, in the program's order."""
        if self._plans is not None:
            return self._plans
        program = self.program
        plans: Iterable[EntryPlan] = (
            *(plan for t in program.targets for plan in (t.invoke, *t.events.values())),
            *(site.plan for site in program.sites.values() if isinstance(site, RecvSite)),
            *(source.plan for source in program.sources),
            *(join.plan for join in program.joins),
            *self.bootstraps.entry_plans(),
            *self.messenger.plans,
            DECODING,
        )
        self._plans = list({id(plan): plan for plan in plans}.values())
        return self._plans

    def lines(self) -> list[Line]:
        """Return every line in which ops wait for their turn, in the program's order."""
        return [
            *(cell.line for cell in self.cells),
            *(semaphore.line for semaphore in self.stores.semaphores),
            *(queue.line for queue in self.stores.queues),
        ]

    def writer(self) -> SnapshotWriter:
        """Return a writer of this node's references."""
        return SnapshotWriter(self.plans, self.lines(), self.cells)

    def reader(self, lists: dict[str, Any]) -> SnapshotReader:
        """Return a reader of references into this node."""
        return SnapshotReader(
            lists, self.plans, self.lines(), self.cells, budget=self.ingress.budget, rt=self
        )

    def state(self, _writer: object) -> Any:
        """Return what a snapshot saves: ids and random numbers."""
        return [self.incarnation, self.wire_ids.state(), self.rng.state()]

    def load(self, plain: Any, _reader: object) -> None:
        """Load what `state` returned."""
        self.incarnation, ids, rng = plain
        self.wire_ids.load(ids)
        self.rng.load(rng)


# What each event does: one table for all nodes, so that an idle one is small.
ON_EVENT: Final[Mapping[type, Callable[[Runtime, Any], object]]] = {
    ev.InboundBytes: lambda rt, e: rt.inbound.receive(e),
    ev.TopicMessage: lambda rt, e: rt.messenger.message(e),
    ev.InboundRefused: lambda rt, e: rt.inbound.refuse_unread(e),
    ev.Invocation: Runtime.invoke,
    ev.TimedInvocation: Runtime.invoke,
    ev.PeerConnected: Runtime.peer_connected,
    ev.PeerUnfit: Runtime.peer_unfit,
    ev.PeerDisconnected: Runtime.peer_disconnected,
    ev.SendFailed: Runtime.send_failed,
    ev.RequestLost: Runtime.request_lost,
    ev.PeerHeld: lambda rt, e: rt.readiness.hold(e.peer, e.classes, e.reason),
    ev.Lifecycle: lambda rt, e: rt.sources.enter_phase(e.phase),
    ev.Published: lambda rt, e: rt.reports.bus.publish(e.kind),
    ev.BootstrapAsked: lambda rt, e: rt.bootstraps.take(e),
}

# The handler of each kind of timer, called with its key and the time at which it was due.
ON_TIMER: Final[Mapping[TimerKind, Callable[[Runtime, int, int], object]]] = {
    TimerKind.PARKED_DONE: lambda rt, key, _: rt.suspensions.resume(key, TRIGGER, None),
    TimerKind.PARKED_DEADLINE: lambda rt, key, _: rt.suspensions.too_late(key),
    TimerKind.REQUEST_DEADLINE: lambda rt, key, _: rt.cohorts.deadline(key),
    TimerKind.INTERVAL: lambda rt, key, when_ns: rt.sources.tick(key, when_ns),
    TimerKind.BOOTSTRAP_TURN: lambda rt, key, _: rt.bootstraps.turn_is_over(key),
    TimerKind.COMPONENT_TIMER: lambda rt, key, _: rt.messenger.timer_is_due(key),
    TimerKind.CALL_DEADLINE: lambda rt, key, _: rt.messenger.call_is_late(key),
    TimerKind.JOIN_DEADLINE: lambda rt, key, _: rt.joins.too_late(key),
    TimerKind.PEER_LOST: lambda rt, key, _: rt.peer_is_gone(key),
}
