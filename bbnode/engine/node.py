"""A node: the entry points of a host, and the poll that drives everything.

Rule: `poll` goes through its phases in a fixed order: ingress, frontier, bus, timers,
completions, frontier, outbound. It returns steps and never raises for anything that came from
outside. Entry points check what they are given, copy it, and queue it; all of them may be called
from any thread, but for those that say otherwise.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from multiaddr import Multiaddr

from bbnode.engine import ingress as ev
from bbnode.engine import steps
from bbnode.engine.admission import adopt_event, adopt_inputs
from bbnode.engine.bootstrap.bootstraps import Bootstraps
from bbnode.engine.bootstrap.targets import BootstrapTarget
from bbnode.engine.bus import FIRST_PROGRAM_KIND, MAX_KIND
from bbnode.engine.clock import NodeClock
from bbnode.engine.errors import (
    STOPS,
    InvalidEventKind,
    SnapshotRefused,
    UnknownSlot,
    did_you_mean,
)
from bbnode.engine.node_views import NodeViews
from bbnode.engine.planning.program import Program
from bbnode.engine.record.recording import Recorder, Sink
from bbnode.engine.runtime import Runtime
from bbnode.engine.snapshot.whole import NodeParts, restore_snapshot, take_snapshot
from bbnode.engine.sources import Dispatch
from bbnode.ir.caps import MAX_POLL_DECODE_US
from bbnode.ir.peer import PeerId
from bbnode.ir.types import TypeNode
from bbnode.ir.values import Value


class Node(NodeViews):
    """Installed targets and their state. Made by `install`."""

    def __init__(self, program: Program, rt: Runtime) -> None:
        self._program = program
        super().__init__(rt, Bootstraps(rt, program.bootstraps), NodeClock(rt))
        self._dispatch = Dispatch(program, rt, self._bootstraps)
        # For snapshots, records and replays; nobody else's.
        self.parts = NodeParts(
            program=program, rt=rt, dispatch=self._dispatch, bootstraps=self._bootstraps
        )
        self._recorder: Recorder | None = None

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

    def inputs(self, target: str) -> Mapping[str, TypeNode | None]:
        """Inputs of a target and their declared types, where known. Raises UnknownTarget."""
        return self._program.find(target).inputs

    def component(self, slot: str) -> Any:
        """The component of a slot, to be looked at on the polling thread. Raises UnknownSlot.

        What changes it belongs into the program: the engine keeps ops of one component apart.
        """
        for cell in self._rt.cells:
            if cell.slot == slot:
                return cell.component
        known = [cell.slot for cell in self._rt.cells]
        raise UnknownSlot(
            f"this node has no slot {slot!r}{did_you_mean(slot, known)}; it has: "
            f"{', '.join(known) or 'none'}"
        )

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
        self._note("set_addresses", [bytes(address.to_bytes()) for address in addresses])
        self._rt.neighbours.set_addresses(addresses)

    @property
    def tracing(self) -> bool:
        """Whether polls tell every execution, op and fill."""
        return self._rt.tracer is not None

    def set_tracing(self, on: bool) -> None:
        """Tell every execution, op and fill from the next poll on, or no more (polling thread)."""
        self._note("set_tracing", on)
        self._rt.set_tracing(on)

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
        return self._rt.ingress.push_invocation(plan.name, None, adopted, size)

    def deliver_event(self, target: str, input: str, value: Value) -> int:  # noqa: A002
        """Start one execution with one input of a target; returns its id. Raises as `invoke`."""
        plan = self._program.find(target)
        adopted, size = adopt_event(plan, input, value, self._rt.limits)
        return self._rt.ingress.push_invocation(plan.name, input, {input: adopted}, size)

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
            raise self._rt.ingress.refusal("run_bootstrap")
        self._bootstraps.accepted(asked)
        return {start.name: start.execution for start in asked.starts}

    def deliver_inbound(
        self, peer: PeerId, data: bytes | memoryview, observed_address: Multiaddr | None = None
    ) -> None:
        """One envelope of an authenticated peer; what is refused shows in steps or counters.

        A read-only view is kept as it is, and belongs to the node from now on.
        """
        rt = self._rt
        cap = rt.limits.envelope_bytes
        if cap is not None and len(data) > cap:
            self._note_refused(
                peer, len(data), "EnvelopeTooLarge", f"limit envelope_bytes is {cap}"
            )
            return
        kept = data if isinstance(data, memoryview) and data.readonly else bytes(data)
        if not rt.ingress.push_inbound(peer, kept, observed_address):
            left = f"{rt.ingress.budget.remaining} bytes are left (limit ingress_bytes)"
            self._note_refused(peer, len(data), "BudgetExceeded", left)

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

    def send_failed(
        self, peer: PeerId, reason: str, *, tag: int | None = None, blames_peer: bool = True
    ) -> None:
        """The transport could not send an envelope, and will not any more.

        `tag`: of the SendEnvelope, so that a request that went out in it waits for this peer no
        longer. Backoff and governor hear of it only where it says something of the peer as it is
        now; a peer that was restarted has a clean slate.
        """
        self._rt.ingress.push(
            ev.SendFailed(peer=peer, reason=reason, blames_peer=blames_peer, tag=tag),
            must=tag is not None,  # each envelope fails once, and somebody may wait for it
        )

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
        self._note("block_peer", peer.to_bytes())
        self._rt.neighbours.governor.block(peer)
        self._rt.neighbours.peers.invalidate()

    def unblock_peer(self, peer: PeerId) -> None:
        """Deny a peer no more."""
        self._note("unblock_peer", peer.to_bytes())
        self._rt.neighbours.governor.unblock(peer)
        self._rt.neighbours.peers.invalidate()

    def allow_only(self, peers: Iterable[PeerId] | None) -> None:
        """Deny everybody else; None lifts it."""
        allowed = None if peers is None else sorted(peers)
        self._note("allow_only", None if allowed is None else [p.to_bytes() for p in allowed])
        self._rt.neighbours.governor.allow_only(allowed)
        self._rt.neighbours.peers.invalidate()

    # -- driving it --------------------------------------------------------------------------

    def poll(self, now_ns: int) -> list[steps.Step]:
        """Do what can be done at `now_ns` (monotonic; a clock that goes back stands still)."""
        rt = self._rt
        self._clock.tell(now_ns)
        if self._recorder is not None:
            self._recorder.begin(now_ns)
        if not rt.booted:
            rt.booted = True
            self._dispatch.boot()
        if self._clock.resumed is not None:
            rt.suspensions.hand_out_again(same_life=self._clock.resumed)
            self._clock.resumed = None
        take = self._dispatch.take
        events = rt.ingress.take_events()
        rt.decoder.left_us = MAX_POLL_DECODE_US
        done = 0
        for event in events:
            if rt.decoder.left_us <= 0:
                break  # the others have their turn first: threads, streams, timers
            done += 1
            try:
                take[type(event)](event)
            except STOPS:
                raise
            except BaseException as error:  # noqa: BLE001 - whatever one event does
                rt.failed_step(0, "", type(event).__name__, error)
        if done < len(events):
            rt.ingress.untake(itertools.islice(events, done, None))
        if self._recorder is not None:
            self._recorder.took(itertools.islice(events, done))
        self._bootstraps.advance()
        budget = rt.limits.cycle_ops
        fired = rt.run(budget)
        if rt.bus:
            self._dispatch.deliver_bus()
        for timer in rt.scheduler.matured(rt.now_ns):
            try:
                self._dispatch.mature(timer.kind, timer.key, timer.when_ns)
            except STOPS:
                raise
            except BaseException as error:  # noqa: BLE001 - whatever one timer does
                rt.failed_step(0, "", timer.kind.name, error)
        if rt.ingress.has_completions():
            completions = rt.ingress.take_completions()
            if self._recorder is not None:
                self._recorder.completed(completions)
            for completed in completions:
                try:
                    rt.suspensions.complete(completed)
                except STOPS:
                    raise
                except BaseException as error:  # noqa: BLE001 - whatever one result does
                    rt.failed_step(0, "", "Completed", error)
        if rt.ready:
            fired += rt.run(None if budget is None else budget - fired)
        while self._bootstraps.advance():
            fired += rt.run(None if budget is None else budget - fired)
        rt.outbound.flush()
        rt.counts["ops.fired"] += fired
        if rt.ready and budget is not None:
            rt.steps.append(steps.CycleBudgetExceeded(budget=budget, remaining=rt.ops_ready()))
        self._dispatch.check_booted()
        made, rt.steps = rt.steps, []
        if self._recorder is not None:
            self._recorder.end(made)
        return made

    def next_deadline(self) -> int | None:
        """When the next poll is due at the latest, absent new events; None: never."""
        rt = self._rt
        if rt.ready or rt.bus or rt.ingress.pending() or not rt.booted or self._clock.must_poll:
            return self._clock.host_ns(rt.now_ns)
        due_ns = rt.scheduler.next_deadline()
        return None if due_ns is None else self._clock.host_ns(due_ns)

    # -- snapshots ---------------------------------------------------------------------------

    def snapshot(self, now_ns: int | None = None) -> bytes:
        """All state of the node, between two polls; `bbnode.engine.snapshot` says what it is.

        `now_ns`: the host's time, at which a node that takes it up goes on, with whatever time was
        left to what waits. None: the time of the last poll.

        Raises SnapshotFailed where a component or a value can't be saved (NodeBusy: not now).
        """
        with self._clock.shown(now_ns):
            return take_snapshot(self.parts)

    def restore(self, data: bytes, now_ns: int | None = None, *, same_life: bool = False) -> None:
        """Take up a snapshot, before anything else is done with the node.

        `now_ns`: the host's time at which the node's own goes on; None: that of the first poll.
        `same_life`: no new incarnation, and connections are as they were.

        Raises SnapshotRefused; install the node anew then.
        """
        if self._rt.booted:
            raise SnapshotRefused("the node has polled; restore right after install")
        if self._recorder is not None:
            self._recorder.restored(data, now_ns, same_life=same_life)
        restore_snapshot(self.parts, data, same_life=same_life)
        self._clock.resume(now_ns, same_life=same_life)

    def record(self, sink: Sink, head: Mapping[str, Any]) -> None:
        """For `install`: write down all that comes in from now on."""
        self._recorder = Recorder(sink, self.parts, head)

    def _note(self, method: str, *arguments: Any) -> None:
        if self._recorder is not None:
            self._recorder.called(method, *arguments)

    # -- ingress events ----------------------------------------------------------------------

    def _push_completion(self, completed: ev.Completed) -> None:
        if completed.token not in self._rt.parking:
            self._rt.ingress.count("completion.unknown")
            return
        self._rt.ingress.push_completion(completed)

    def _note_refused(self, peer: PeerId, size: int, kind: str, detail: str) -> None:
        self._rt.ingress.push(ev.InboundRefused(peer=peer, size=size, kind=kind, detail=detail))
