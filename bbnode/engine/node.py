"""A node: the entry points of a host, and the poll that drives everything.

Rule: `poll` goes through its phases in a fixed order: ingress, frontier, bus, timers,
completions, frontier, outbound. It returns steps and never raises for anything that came from
outside. Entry points check what they are given, copy it, and queue it; all of them may be called
from any thread, but for those that say otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from multiaddr import Multiaddr

from bbnode.engine import ingress as ev
from bbnode.engine import steps
from bbnode.engine.admission import adopt_event, adopt_inputs
from bbnode.engine.bootstrap_targets import BootstrapInfo, BootstrapStatus, BootstrapTarget
from bbnode.engine.bootstraps import Bootstraps
from bbnode.engine.bus import FIRST_PROGRAM_KIND, MAX_KIND
from bbnode.engine.dispatch import Dispatch
from bbnode.engine.errors import (
    BudgetExceeded,
    EntryError,
    IngressClosed,
    IngressFull,
    InvalidEventKind,
)
from bbnode.engine.parking import Waiting, Why
from bbnode.engine.program import Program
from bbnode.engine.runtime import Runtime
from bbnode.engine.snapshot import restore_snapshot, take_snapshot
from bbnode.ir.envelope import MAX_ENVELOPE_BYTES
from bbnode.ir.peer import PeerId
from bbnode.ir.values import Value


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutionInfo:
    """One execution under way."""

    execution: int
    target: str
    entry: str
    started_ns: int
    deadline_ns: int | None
    source_peer: PeerId | None


class Node:
    """Installed targets and their state. Made by `install`."""

    def __init__(self, program: Program, rt: Runtime) -> None:
        self._program = program
        self._rt = rt
        self._bootstraps = Bootstraps(rt, program.bootstraps)
        self._dispatch = Dispatch(program, rt, self._bootstraps)
        self._polled = False

    # -- who it is ---------------------------------------------------------------------------

    @property
    def peer_id(self) -> PeerId:
        """This node's own id."""
        return self._rt.self_peer

    @property
    def targets(self) -> tuple[str, ...]:
        """Names of the installed targets."""
        return tuple(target.name for target in self._program.targets)

    @property
    def classes(self) -> tuple[str, ...]:
        """Classes that this node plays, in the order of its targets."""
        return tuple(dict.fromkeys(target.peer_class for target in self._program.targets))

    @property
    def incarnation(self) -> int:
        """Which life of this peer this is."""
        return self._rt.incarnation

    @property
    def unreachable_ops(self) -> tuple[str, ...]:
        """Ops that no entry can ever fire, for instance where values of two Recvs would meet."""
        return self._program.unreachable

    def set_addresses(self, addresses: Sequence[Multiaddr]) -> None:
        """Replace this node's own addresses (on the polling thread)."""
        self._rt.neighbours.set_addresses(addresses)

    def set_wake(self, wake: Callable[[], None] | None) -> None:
        """`wake` is called, from any thread, when something comes to an empty ingress."""
        self._rt.ingress.set_wake(wake)

    # -- entry points ------------------------------------------------------------------------

    def invoke(self, target: str, inputs: Mapping[str, Value]) -> int:
        """Start one execution of a target with all of its inputs; returns its id.

        Raises UnknownTarget, UnknownInput, MissingInput, TooManyInputs, InputTypeMismatch,
        OversizePayload, BudgetExceeded, IngressFull, IngressClosed; nothing was started then.
        """
        plan = self._program.find(target)
        adopted, size = adopt_inputs(plan, inputs, self._rt.limits)
        return self._queue_invocation(plan.name, None, adopted, size)

    def deliver_event(self, target: str, input: str, value: Value) -> int:  # noqa: A002
        """Start one execution with one input of a target; returns its id. Raises as `invoke`."""
        plan = self._program.find(target)
        adopted, size = adopt_event(plan, input, value, self._rt.limits)
        return self._queue_invocation(plan.name, input, {input: adopted}, size)

    def run_bootstrap(self, target: BootstrapTarget) -> dict[str, int]:
        """Queue bootstraps, all of a batch or none (on the polling thread).

        Returns the execution of each by name (of a component's: `slot:<slot>`); each ends with a
        BootstrapComplete step.

        Raises UnknownTarget, UnknownInput, MissingInput, TooManyInputs, InputTypeMismatch,
        OversizePayload, BudgetExceeded, AlreadyTransitivelyQueued, IngressFull, IngressClosed;
        nothing was queued then.
        """
        asked = self._bootstraps.stage(target)
        if asked is None:
            return {}
        if not self._rt.ingress.push(asked):
            for start in asked.starts:
                start.charge.release()
            raise self._refusal("run_bootstrap")
        self._bootstraps.accepted(asked)
        return {start.name: start.execution for start in asked.starts}

    def deliver_inbound(
        self, peer: PeerId, data: bytes, observed_address: Multiaddr | None = None
    ) -> None:
        """One envelope of an authenticated peer; what is refused shows in steps or counters."""
        rt = self._rt
        cap = rt.limits.envelope_bytes or MAX_ENVELOPE_BYTES
        if len(data) > cap:
            self._note_refused(
                peer, len(data), "EnvelopeTooLarge", f"limit envelope_bytes is {cap}"
            )
            return
        charge = rt.ingress.budget.charge(len(data))
        if charge is None:
            left = f"{rt.ingress.budget.remaining} bytes are left (limit ingress_bytes)"
            self._note_refused(peer, len(data), "BudgetExceeded", left)
            return
        if not rt.ingress.push(ev.make_inbound(peer, bytes(data), observed_address, charge)):
            charge.release()

    def peer_connected(
        self, peer: PeerId, classes: Iterable[str] = (), addresses: Iterable[Multiaddr] = ()
    ) -> None:
        """A connection with a peer is there, and it said which classes it plays."""
        self._rt.ingress.push(
            ev.PeerConnected(peer=peer, classes=tuple(classes), addresses=tuple(addresses)),
            must=True,
        )

    def peer_disconnected(self, peer: PeerId, reason: str) -> None:
        """The last connection with a peer is gone."""
        self._rt.ingress.push(ev.PeerDisconnected(peer=peer, reason=reason), must=True)

    def send_failed(self, peer: PeerId, reason: str) -> None:
        """The transport could not send an envelope."""
        self._rt.ingress.push(ev.SendFailed(peer=peer, reason=reason))

    def fire_lifecycle(self, phase: int) -> None:
        """Fire what waits for a phase: Shutdown is 1, Snapshot 2, others are the program's."""
        self._rt.ingress.push(ev.Lifecycle(phase=phase))

    def publish_event(self, kind: int) -> None:
        """Put an event of the program's own on the bus: `FIRST_PROGRAM_KIND` and above.

        Raises InvalidEventKind for the engine's own kinds and what is none.
        """
        if type(kind) is not int or not FIRST_PROGRAM_KIND <= kind <= MAX_KIND:
            raise InvalidEventKind(
                f"event kind {kind!r}; give an integer from {FIRST_PROGRAM_KIND} on, those below "
                "are the engine's own"
            )
        self._rt.ingress.push(ev.Published(kind=kind))

    def complete(self, token: int, result: Value) -> None:
        """A RunTask's result."""
        self._push_completion(ev.Completed(token=token, result=result, error=None))

    def fail(self, token: int, error: BaseException) -> None:
        """What a RunTask raised."""
        self._push_completion(ev.Completed(token=token, result=None, error=error))

    def close(self) -> None:
        """Refuse everything from now on; what is under way can still be polled."""
        self._rt.ingress.close()

    def block_peer(self, peer: PeerId) -> None:
        """Deny a peer in both directions (on the polling thread, as the two below)."""
        self._rt.neighbours.governor.block(peer)
        self._rt.neighbours.peers.invalidate()

    def unblock_peer(self, peer: PeerId) -> None:
        """Deny a peer no more."""
        self._rt.neighbours.governor.unblock(peer)
        self._rt.neighbours.peers.invalidate()

    def allow_only(self, peers: Iterable[PeerId] | None) -> None:
        """Deny everybody else; None lifts it."""
        self._rt.neighbours.governor.allow_only(peers)
        self._rt.neighbours.peers.invalidate()

    # -- driving it --------------------------------------------------------------------------

    def poll(self, now_ns: int) -> list[steps.Step]:
        """Do what can be done at `now_ns` (monotonic; a clock that goes back stands still)."""
        rt = self._rt
        rt.now_ns = max(rt.now_ns, now_ns)
        if not self._polled:
            self._polled = True
            self._dispatch.boot()
        take = self._dispatch.take
        for event in rt.ingress.take_events():
            take[type(event)](event)
        self._bootstraps.advance()
        budget = rt.limits.cycle_ops
        fired = rt.run(budget)
        if rt.bus:
            self._dispatch.deliver_bus()
        for timer in rt.scheduler.matured(rt.now_ns):
            self._dispatch.mature(timer.kind, timer.key, timer.when_ns)
        if rt.ingress.has_completions():
            for completed in rt.ingress.take_completions():
                rt.suspensions.complete(completed)
        if rt.ready:
            fired += rt.run(None if budget is None else budget - fired)
        while self._bootstraps.advance():
            fired += rt.run(None if budget is None else budget - fired)
        rt.outbound.flush()
        rt.counts["ops.fired"] += fired
        if rt.ready and budget is not None:
            rt.steps.append(steps.CycleBudgetExceeded(budget=budget, remaining=len(rt.ready)))
        self._dispatch.check_booted()
        made, rt.steps = rt.steps, []
        return made

    def next_deadline(self) -> int | None:
        """When the next poll is due at the latest, absent new events; None: never."""
        rt = self._rt
        if rt.ready or rt.bus or rt.ingress.pending() or not self._polled:
            return rt.now_ns
        return rt.scheduler.next_deadline()

    # -- looking at it -----------------------------------------------------------------------

    def counters(self) -> dict[str, int]:
        """What was counted since the start, and a few gauges."""
        rt = self._rt
        return {
            **rt.counts,
            **rt.ingress.counters(),
            **rt.stores.counters(),
            "bus.waiting": len(rt.bus),
            "ingress.bytes": rt.ingress.budget.used,
            "executions.live": len(rt.frames),
            "ops.parked": len(rt.parking),
            "requests.open": len(rt.cohorts.table),
            "timers": len(rt.scheduler),
            "peers.connected": len(rt.neighbours.peers),
            "peers.known": len(rt.neighbours.book),
        }

    def executions(self) -> list[ExecutionInfo]:
        """Executions under way, oldest first."""
        return [
            ExecutionInfo(
                execution=frame.execution,
                target=frame.plan.target,
                entry=frame.plan.name,
                started_ns=frame.started_ns,
                deadline_ns=frame.deadline_ns,
                source_peer=frame.source_peer,
            )
            for frame in self._rt.frames.values()
        ]

    def waiting(self) -> list[Waiting]:
        """Whatever waits: what, for whom, until when and why."""
        rt = self._rt
        found = []
        for parked in rt.parking.entries():
            cohort = None
            if parked.why is Why.RESPONSES:
                cohort = rt.cohorts.waited_for(parked.token)
            missing = ", ".join(str(p) for p in cohort.missing) if cohort else parked.whom
            found.append(
                Waiting(
                    what=parked.op.name,
                    why=parked.why.value + (" (given up)" if parked.abandoned else ""),
                    whom=missing,
                    execution=parked.frame.execution,
                    target=parked.frame.plan.target,
                    since_ns=parked.since_ns,
                    until_ns=parked.until_ns,
                )
            )
        return found + self._bootstraps.waiting()

    def bootstrap_status(self, name: str | None = None) -> BootstrapStatus:
        """How a bootstrap stands: of a Module, of a component (`slot:<slot>`), or all together.

        Raises UnknownTarget.
        """
        return self._bootstraps.status(name)

    def bootstraps(self) -> list[BootstrapInfo]:
        """All bootstraps of this node, in the order in which `All` runs them."""
        return self._bootstraps.infos()

    def connected_peers(self, peer_class: str | None = None) -> Sequence[PeerId]:
        """Peers that can be used now, in PeerId order; of one class if given."""
        return self._rt.neighbours.view(self._rt.now_ns).connected(peer_class)

    def records(self, name: str | None = None) -> list[tuple[int, int, str, Value]]:
        """What Record kept, oldest first: (time, execution, name, value)."""
        return [row for row in self._rt.records if name is None or row[2] == name]

    def snapshot(self) -> bytes:
        """State of the node, between two polls. Raises NodeBusy while a component works."""
        return take_snapshot(self._rt)

    def restore(self, data: bytes) -> None:
        """Take up a snapshot, before the first poll. Raises SnapshotRefused."""
        restore_snapshot(self._rt, data)

    # -- ingress events ----------------------------------------------------------------------

    def _queue_invocation(
        self, target: str, event: str | None, inputs: dict[str, Value], size: int
    ) -> int:
        ingress = self._rt.ingress
        charge = ingress.budget.charge(size)
        if charge is None:
            raise BudgetExceeded(
                f"{target}: {size} bytes of input and {ingress.budget.remaining} are left "
                "(limit ingress_bytes); wait until executions have finished"
            )
        execution = self._rt.next_execution()
        queued = ingress.push(
            ev.Invocation(
                execution=execution, target=target, event=event, inputs=inputs, charge=charge
            )
        )
        if queued:
            return execution
        charge.release()
        raise self._refusal(target)

    def _refusal(self, what: str) -> EntryError:
        if self._rt.ingress.closed:
            return IngressClosed(f"{what}: the node was closed")
        return IngressFull(f"{what}: too many events wait for a poll (limit ingress_events)")

    def _push_completion(self, completed: ev.Completed) -> None:
        if completed.token not in self._rt.parking:
            self._rt.ingress.count("completion.unknown")
            return
        self._rt.ingress.push_completion(completed)

    def _note_refused(self, peer: PeerId, size: int, kind: str, detail: str) -> None:
        self._rt.ingress.push(ev.InboundRefused(peer=peer, size=size, kind=kind, detail=detail))
