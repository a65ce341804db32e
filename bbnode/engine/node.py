"""A node: the entry points of a host, and the poll that drives everything.

Rule: `poll` runs its phases in a fixed order: ingress, frontier, bus, timers, completions,
frontier, outbound. It returns steps and never raises for anything that came from outside. Entry
points check, copy and queue their arguments, and may be called from any thread unless they say
otherwise.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from multiaddr import Multiaddr

from bbnode.components.contracts import Component, Model
from bbnode.components.data.shared_schema import SharedSchema
from bbnode.engine import ingress as ev
from bbnode.engine import steps
from bbnode.engine.admission import adopt_event, adopt_inputs, checked_deadline
from bbnode.engine.bootstrap.targets import BootstrapInfo, BootstrapStatus, BootstrapTarget
from bbnode.engine.bus import FIRST_PROGRAM_KIND, MAX_KIND
from bbnode.engine.cells import ComponentCell, Facts
from bbnode.engine.errors import (
    ComponentConstructionFailed,
    InvalidEventKind,
    InvalidPeerAddress,
    SnapshotRefused,
    UnknownSlot,
    did_you_mean,
)
from bbnode.engine.peers.neighbours import PeerStanding
from bbnode.engine.peers.round_trips import RoundTrip
from bbnode.engine.readiness import NotReadyPeer
from bbnode.engine.record.recording import Recorder, Sink
from bbnode.engine.runtime import ON_EVENT, ON_TIMER, Runtime
from bbnode.engine.snapshot.events import IngressTable
from bbnode.engine.snapshot.whole import (
    Adopted,
    adopt_components,
    restore_snapshot,
    take_snapshot,
)
from bbnode.engine.suspensions import Waiting, WaitReason
from bbnode.ir.address import named_peer
from bbnode.ir.caps import MAX_POLL_DECODE_US
from bbnode.ir.crossing import Crossing, at_node, not_taken, unfit, unrunnable
from bbnode.ir.envelope import correlation_of
from bbnode.ir.errors import BbnodeError
from bbnode.ir.interrupts import let_stop
from bbnode.ir.peer import PeerId
from bbnode.ir.slots import Binding
from bbnode.ir.types import TypeNode
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

    def __init__(self, rt: Runtime) -> None:
        self._rt = rt
        self._program = rt.program
        self._recorder: Recorder | None = None
        sizes = _model_sizes(rt.cells)
        expected = self._program.model_sizes
        self._crossings = at_node(self._program.crossings, sizes, expected)
        for slot, (size, other) in unrunnable(sizes, expected).items():
            number = next(n for n, cell in enumerate(rt.cells) if cell.slot == slot)
            why = (
                f"its model has {size:,} parameters, and the program is compiled for {other:,}; "
                "take its settings out of the configuration, or compile the program with this model"
            )
            rt.readiness.can_not_run(number, why)

    @property
    def runtime(self) -> Runtime:
        """All services of the node: for replays and tests, not for hosts."""
        return self._rt

    # -- identity ---------------------------------------------------------------------------

    @property
    def peer_id(self) -> PeerId:
        """This node's own id."""
        return self._rt.neighbours.self_peer

    @property
    def targets(self) -> tuple[str, ...]:
        """Names of the installed targets."""
        return tuple(target.name for target in self._program.targets)

    @property
    def classes(self) -> tuple[str, ...]:
        """Classes that this node plays, in the order of its targets."""
        return self._program.classes

    def inputs(self, target: str) -> Mapping[str, TypeNode | None]:
        """Return inputs of a target and their declared types, where known. Raises UnknownTarget."""
        return self._program.find(target).inputs

    @property
    def slots(self) -> tuple[str, ...]:
        """The slots of the installed targets."""
        return tuple(cell.slot for cell in self._rt.cells)

    def component(self, slot: str) -> Any:
        """Return the component of a slot, to be read on the polling thread. Raises UnknownSlot.

        Change it only by ops of the program, of which the engine runs one at a time.
        """
        return self._cell(slot).component

    def binding(self, slot: str) -> Binding:
        """Return a slot's role and component type. Raises UnknownSlot."""
        return self._cell(slot).binding

    def copy_of(self, slot: str) -> Callable[[], Component]:
        """Capture a component's state as of no op under way, between two polls.

        The returned function, in any thread, makes another instance with the same settings and this
        state, to which nothing is bound; it raises what the component's class raises. Raises
        UnknownSlot, and SnapshotFailed where the state can't be had (NodeBusy: not now).
        """
        cell = self._cell(slot)
        state = cell.state(IngressTable(self._rt.ingress).done)

        def make() -> Component:
            component: Component = cell.component.twin()
            component.restore(state)
            return component

        return make

    def _cell(self, slot: str) -> ComponentCell:
        for cell in self._rt.cells:
            if cell.slot == slot:
                return cell
        known = [cell.slot for cell in self._rt.cells]
        near = did_you_mean(slot, known, f"it has: {', '.join(known) or 'none'}")
        raise UnknownSlot(f"this node has no slot {slot!r}{near}")

    @property
    def incarnation(self) -> int:
        """The number of this life of the peer."""
        return self._rt.incarnation

    @property
    def program_name(self) -> str:
        """The name of the program, which is that of its root Module."""
        return self._program.name

    @property
    def crossings(self) -> tuple[Crossing, ...]:
        """The crossings of the installed targets: what they send and take, by site.

        Their sizes are those of this node's own models.
        """
        return self._crossings

    @property
    def schemas(self) -> Mapping[str, SharedSchema]:
        """The schemas that the program declares for data slots, by slot."""
        return self._program.schemas

    def set_addresses(self, addresses: Sequence[Multiaddr]) -> None:
        """Replace this node's own addresses (on the polling thread)."""
        self._note("set_addresses", [bytes(address.to_bytes()) for address in addresses])
        self._rt.neighbours.set_addresses(addresses)

    @property
    def tracing(self) -> bool:
        """True while polls report every execution, op and fill."""
        return self._rt.tracer.on

    def set_tracing(self, on: bool) -> None:
        """Switch steps for every execution, op and fill, from the next poll (polling thread)."""
        self._note("set_tracing", on)
        self._rt.executor.set_tracing(on)

    def set_wake(self, wake: Callable[[], None] | None) -> None:
        """Set a callback, called from any thread when something comes to an empty ingress."""
        self._rt.ingress.set_wake(wake)

    # -- entry points ------------------------------------------------------------------------

    def invoke(
        self, target: str, inputs: Mapping[str, Value], *, deadline_ns: int | None = None
    ) -> int:
        """Start one execution of a target and return its id.

        `inputs` are all that it has, or those of one part of the program: of what no op joins with
        the others. With `deadline_ns` the execution, and what it asks of peers, may take so long
        from the poll that begins it; else each op and request as it says itself.

        Raises InvalidDeadline, UnknownTarget, UnknownInput, MissingInput, TooManyInputs,
        InputTypeMismatch, OversizePayload, BudgetExceeded, IngressFull, IngressClosed; then nothing
        is started.
        """
        plan = self._program.find(target)
        adopted, size = adopt_inputs(plan, inputs, self._rt.limits)
        part = plan.part_of(adopted.keys())
        return self._rt.ingress.push_invocation(
            plan.name, part, adopted, size, checked_deadline(deadline_ns)
        )

    def deliver_event(
        self,
        target: str,
        input: str,  # noqa: A002
        value: Value,
        *,
        deadline_ns: int | None = None,
    ) -> int:
        """Start one execution with one input of a target; returns its id. Raises as `invoke`.

        It runs what can fire from that input; outputs that need others too are skipped. Where
        nothing can, it is a MissingInput.
        """
        plan = self._program.find(target)
        adopted, size = adopt_event(plan, input, value, self._rt.limits)
        plan.check_event(input)
        return self._rt.ingress.push_invocation(
            plan.name, input, {input: adopted}, size, checked_deadline(deadline_ns)
        )

    def run_bootstrap(self, target: BootstrapTarget) -> dict[str, int]:
        """Queue bootstraps, all of a batch or none (on the polling thread).

        Returns the execution of each by name (of a component's: `slot:<slot>`); each ends with a
        BootstrapComplete step.

        Raises UnknownTarget, UnknownInput, MissingInput, TooManyInputs, InputTypeMismatch,
        OversizePayload, BudgetExceeded, AlreadyTransitivelyQueued, IngressFull, IngressClosed;
        then nothing is queued.
        """
        asked = self._rt.bootstraps.stage(target)
        if asked is None:
            return {}
        if not self._rt.ingress.push(asked):
            for start in asked.starts:
                start.charge.release()
            raise self._rt.ingress.refusal("run_bootstrap")
        self._rt.bootstraps.accepted(asked)
        return {start.name: start.execution for start in asked.starts}

    def deliver_inbound(
        self, peer: PeerId, data: bytes | memoryview, observed_address: Multiaddr | None = None
    ) -> None:
        """Queue one envelope of an authenticated peer; a refusal shows in steps or counters.

        A read-only view is kept as it is, and belongs to the node from now on.
        """
        rt = self._rt
        cap = rt.limits.envelope_bytes
        if cap is not None and len(data) > cap:
            self._note_refused(peer, data, "EnvelopeTooLarge", f"limit envelope_bytes is {cap}")
            return
        kept = data
        if type(data) is not bytes and not (isinstance(data, memoryview) and data.readonly):
            kept = bytes(data)
        if rt.ingress.push_inbound(peer, kept, observed_address) == "BudgetExceeded":
            left = f"{rt.ingress.budget.remaining} bytes are left (limit ingress_bytes)"
            self._note_refused(peer, data, "BudgetExceeded", left)

    def deliver_message(self, peer: PeerId, topic: str, data: bytes) -> bool:
        """Queue a message on a topic, published by an authenticated peer.

        Returns False, and counts it, when there is no room for it (`ingress_bytes`,
        `ingress_events`).
        """
        return self._rt.ingress.push_message(peer, topic, data)

    def peer_connected(
        self, peer: PeerId, classes: Iterable[str] = (), addresses: Iterable[Multiaddr] = (),
        crossings: Sequence[Crossing] | None = None,
    ) -> None:  # fmt: skip
        """Report a connection with a peer that plays these classes.

        `crossings` are those of the peer's program, as it tells them: what this node would send to
        a site that is not among them fails here, at once, and so for one that takes another size,
        for which the peer is chosen no more. None: it does not tell.
        """
        plays = tuple(classes)
        self._rt.ingress.push(
            ev.PeerConnected(
                peer=peer,
                classes=plays,
                addresses=tuple(addresses),
                not_taken=not_taken(self.crossings, crossings, plays),
            ),
            must=True,
        )
        found = unfit(self.crossings, self.classes, crossings, plays)
        if found is not None:
            self._rt.ingress.push(ev.PeerUnfit(peer=peer, unfit=found), must=True)

    def peer_disconnected(self, peer: PeerId, reason: str) -> None:
        """Report that the last connection with a peer is gone."""
        self._rt.ingress.push(ev.PeerDisconnected(peer=peer, reason=reason), must=True)

    def hold_peer(self, peer: PeerId, classes: Iterable[str], reason: str) -> None:
        """Choose a peer for none of these classes until it is held for none; `reason` is shown.

        Call it with no classes to let go. It may come before `peer_connected`, and ends with
        `peer_disconnected`.
        """
        held = ev.PeerHeld(peer=peer, classes=tuple(classes), reason=reason)
        self._rt.ingress.push(held, must=True)

    def send_failed(
        self, peer: PeerId, reason: str, *, tag: int | None = None, blames_peer: bool = True
    ) -> None:
        """Report that the transport has given up an envelope.

        `tag` is that of the SendEnvelope, so that its request no longer waits for this peer. Only a
        failure that is the peer's fault counts for backoff and governor.
        """
        self._rt.ingress.push(
            ev.SendFailed(peer=peer, reason=reason, blames_peer=blames_peer, tag=tag),
            must=tag is not None,  # each envelope fails once, and somebody may wait for it
        )

    def request_lost(self, peer: PeerId, tag: int) -> None:
        """Report that a peer was restarted and no longer has the request in an envelope of ours.

        Whoever waits for its answer hears `PeerRestarted` at once. `tag` is as of `awaited`.
        """
        self._rt.ingress.push(ev.RequestLost(peer=peer, tag=tag), must=True)

    def fire_lifecycle(self, phase: int) -> None:
        """Fire what waits for a phase: Shutdown is 1, Snapshot 2, others are the program's."""
        self._rt.ingress.push(ev.Lifecycle(phase=phase))

    def publish_event(self, kind: int) -> None:
        """Publish an event of the program on the bus, of kind `FIRST_PROGRAM_KIND` or above.

        Raises InvalidEventKind for kinds of the engine's own, and for anything but an integer.
        """
        if type(kind) is not int or not FIRST_PROGRAM_KIND <= kind <= MAX_KIND:
            raise InvalidEventKind(
                f"event kind {kind!r}; give an integer from {FIRST_PROGRAM_KIND} on, those below "
                "are the engine's own"
            )
        self._rt.ingress.push(ev.Published(kind=kind))

    def complete(self, token: int, result: Value) -> None:
        """Complete a RunTask with its result."""
        self._push_completion(ev.Completed(token=token, result=result, error=None))

    def fail(self, token: int, error: BaseException) -> None:
        """Complete a RunTask with the error that it raised."""
        self._push_completion(ev.Completed(token=token, result=None, error=error))

    def close(self) -> None:
        """Refuse everything from now on; what is under way can still be polled."""
        self._rt.ingress.close()

    def stop_components(self) -> dict[str, str]:
        """Tell all components that the node has stopped; returns what they raised, by slot.

        For a host that uses the node no more; it may take long.
        """
        return {
            cell.slot: error for cell in self._rt.cells if (error := cell.stopped()) is not None
        }

    def leave(self) -> None:
        """Refuse all requests, those under way too, which end (on the polling thread).

        For a host that stops and keeps no snapshot; poll once more to send the refusals. With a
        snapshot, what is owed is answered after the restart.
        """
        self._note("leave")
        self._rt.leave()

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
        """Deny all other peers; None lifts this."""
        allowed = None if peers is None else sorted(peers)
        self._note("allow_only", None if allowed is None else [p.to_bytes() for p in allowed])
        self._rt.neighbours.governor.allow_only(allowed)
        self._rt.neighbours.peers.invalidate()

    # -- the address book: what the host knows of peers (on the polling thread) ------------------

    def add_addresses(self, peer: PeerId, addresses: Sequence[Multiaddr]) -> None:
        """Add addresses of a peer, all or none; the entry stays until `forget_peer`.

        Raises:
            InvalidPeerAddress: none is given, it is this node itself, or one names another peer.
            AddressBookFull: the peer, or the book, has no room for them.
        """
        self._check_addresses(peer, addresses)
        self._note("add_addresses", peer.to_bytes(), [bytes(a.to_bytes()) for a in addresses])
        self._rt.neighbours.book.keep(peer, addresses)

    def drop_address(self, peer: PeerId, address: Multiaddr) -> bool:
        """Remove one address of a peer; False if it is not in the book.

        A connected peer may tell of it again. Raises InvalidPeerAddress as `add_addresses`.
        """
        self._check_addresses(peer, [address])
        book = self._rt.neighbours.book
        if address not in book.lookup(peer):
            return False
        self._note("drop_address", peer.to_bytes(), bytes(address.to_bytes()))
        book.forget_address(peer, address)
        return True

    def forget_peer(self, peer: PeerId) -> bool:
        """Remove a peer from the book, with all that host and program added; False if unknown.

        It stays connected if it is, and may tell of itself again. Raises InvalidPeerAddress for
        this node itself.
        """
        self._check_addresses(peer, None)
        if peer not in self._rt.neighbours.book:
            return False
        self._note("forget_peer", peer.to_bytes())
        return self._rt.neighbours.book.forget(peer)

    def passing_peers(self) -> list[PeerId]:
        """Return the peers in the book that are not connected, and that nobody has put there.

        They or others have told of them. `forget_peer` gives their memory back.
        """
        neighbours = self._rt.neighbours
        return [
            peer
            for peer in neighbours.book.unreferenced()
            if peer not in neighbours.peers and peer != self.peer_id
        ]

    def address_book(self) -> dict[PeerId, tuple[Multiaddr, ...]]:
        """Return the addresses of all peers that this node knows, its own among them."""
        return dict(self._rt.neighbours.book.peers())

    def _check_addresses(self, peer: PeerId, addresses: Sequence[Multiaddr] | None) -> None:
        if peer == self.peer_id:
            raise InvalidPeerAddress(
                "these are this node's own addresses; set_addresses, or the listen addresses of "
                "its transport, change them"
            )
        if addresses is None:
            return
        if not addresses:
            raise InvalidPeerAddress(f"no address of {peer.short} is given; give at least one")
        for address in addresses:
            named = named_peer(address)
            if named is not None and named != peer:
                raise InvalidPeerAddress(
                    f"{address} is an address of {named.short}, not of {peer.short}; correct one"
                )

    # -- polling --------------------------------------------------------------------------

    def poll(self, now_ns: int) -> list[steps.Step]:
        """Do what can be done at `now_ns` (monotonic; if it goes back, time stops)."""
        # Most polls are of one envelope or one timer: what has nothing to do is not called.
        rt, recorder = self._rt, self._recorder
        clock, executor, ingress, reports = rt.clock, rt.executor, rt.ingress, rt.reports
        clock.tell(now_ns)
        if recorder is not None:
            recorder.begin(now_ns)
        if not clock.started:
            clock.started = True
            rt.sources.boot()
        if clock.resumed is not None:
            rt.suspensions.hand_out_again(same_life=clock.resumed)
            clock.resumed = None
        events = ingress.take_events()
        decoder = rt.decoder
        decoder.left_us = MAX_POLL_DECODE_US
        done = 0
        for event in events:
            if decoder.left_us <= 0:
                break  # the others have their turn first: threads, streams, timers
            done += 1
            try:
                if type(event) is ev.InboundBytes:
                    rt.inbound.receive(event)
                else:
                    ON_EVENT[type(event)](rt, event)
            except BaseException as error:  # noqa: BLE001 - whatever one event does
                let_stop(error)
                reports.op_failed(0, "", type(event).__name__, error)
        if done < len(events):
            ingress.untake(itertools.islice(events, done, None))
        if recorder is not None:
            recorder.took(itertools.islice(events, done))
        bootstraps = rt.bootstraps
        # More of them come by events alone.
        under_way = bool(bootstraps.running or bootstraps.queue)
        if under_way:
            bootstraps.advance()
        budget = rt.limits.cycle_ops
        fired = 0
        if executor.ready:
            run = executor.run  # as in the loop itself: called as a method it would take longer
            fired = run(budget)
        if reports.bus.waiting:
            rt.sources.deliver_bus()
        scheduler = rt.scheduler
        for timer in scheduler.matured(clock.now_ns) if scheduler.heap else ():
            try:
                ON_TIMER[timer.kind](rt, timer.key, timer.when_ns)
            except BaseException as error:  # noqa: BLE001 - whatever one timer does
                let_stop(error)
                reports.op_failed(0, "", timer.kind.name, error)
        if ingress.completions:
            completions = ingress.take_completions()
            if recorder is not None:
                recorder.completed(completions)
            for completed in completions:
                try:
                    rt.suspensions.complete(completed)
                except BaseException as error:  # noqa: BLE001 - whatever one result does
                    let_stop(error)
                    reports.op_failed(0, "", "Completed", error)
        if executor.ready:
            fired += executor.run(None if budget is None else budget - fired)
        while under_way and bootstraps.advance():
            fired += executor.run(None if budget is None else budget - fired)
        if rt.lost.away:
            rt.forget_lost()
        if rt.readiness.untold:
            rt.readiness.tell()
        outbound = rt.outbound
        if outbound.packs:
            outbound.flush()
        reports.counts["ops.fired"] += fired
        if budget is not None and executor.ready:
            reports.steps.append(
                steps.CycleBudgetExceeded(budget=budget, remaining=executor.ops_ready())
            )
        if rt.sources.booting is not None:
            rt.sources.check_booted()
        made = reports.take()
        if recorder is not None:
            recorder.end(made)
        return made

    def next_deadline(self) -> int | None:
        """Return when the next poll is due at the latest, absent new events; None: never."""
        rt, clock = self._rt, self._rt.clock
        waits = rt.executor.ready or rt.reports.bus.waiting or rt.ingress.pending()
        if waits or not clock.started or clock.resumed is not None:
            return clock.host_ns(clock.now_ns)
        due_ns = rt.scheduler.next_deadline() if rt.scheduler.heap else None
        return None if due_ns is None else clock.host_ns(due_ns)

    # -- snapshots ---------------------------------------------------------------------------

    def snapshot(self, now_ns: int | None = None) -> bytes:
        """Return all state of the node, between two polls (see `bbnode.engine.snapshot`).

        `now_ns`: the host's time, from which a restored node continues: what waits keeps its
        remaining time. None: the time of the last poll.

        Raises SnapshotFailed where a component or a value can't be saved (NodeBusy: not now).
        """
        with self._rt.clock.shown(now_ns):
            return take_snapshot(self._rt)

    def restore(self, data: bytes, now_ns: int | None = None, *, same_life: bool = False) -> None:
        """Load a snapshot, before anything else is done with the node.

        `now_ns`: the host's time at which the node's own continues; None: that of the first poll.
        `same_life`: no new incarnation, and connections are as they were.

        Raises SnapshotRefused; then install the node again.
        """
        if self._rt.clock.started:
            raise SnapshotRefused("the node has polled; restore right after install")
        if self._recorder is not None:
            self._recorder.restored(data, now_ns, same_life=same_life)
        restore_snapshot(self._rt, data, same_life=same_life)
        self._rt.clock.resume(now_ns, same_life=same_life)

    def adopt(self, data: bytes, slots: Sequence[str] | None = None) -> Adopted:
        """Take the states of components from a snapshot of another version of the program.

        Call it before anything else is done with the node, as `restore`. A state goes where slot
        and component type agree; only to `slots` if they are given. Nothing else is taken: no
        execution, no timer, no peer.

        Raises SnapshotRefused; StateRefused names the slot whose component refuses its state.
        Then install the node again.
        """
        if self._rt.clock.started:
            raise SnapshotRefused("the node has polled; adopt right after install")
        made = adopt_components(self._rt, data, slots)
        self._note("adopt", data, None if slots is None else list(slots))
        return made

    def record(self, sink: Sink, head: Mapping[str, Any]) -> None:
        """Record all input from now on; for `install`."""
        self._recorder = Recorder(sink, self._rt, head)

    def _note(self, method: str, *arguments: Any) -> None:
        if self._recorder is not None:
            self._recorder.called(method, *arguments)

    # -- views: copies and immutable things, in the host's time -----------------------------------

    def counters(self) -> dict[str, int]:
        """Return the counts since the start, and a few gauges."""
        rt = self._rt
        return {
            **rt.reports.counts,
            **rt.ingress.counters(),
            **rt.stores.counters(),
            "bus.waiting": len(rt.reports.bus),
            "ingress.bytes": rt.ingress.budget.used,
            "executions.live": len(rt.executor.frames),
            "ops.parked": len(rt.suspensions),
            "requests.open": len(rt.cohorts.table),
            "joins.open": len(rt.joins),
            "calls.open": len(rt.calls),
            "executions.in_line": len(rt.executor.turns),
            "timers.components": len(rt.timers),
            "records": len(rt.records),
            "round_trips": len(rt.round_trips),
            "timers": len(rt.scheduler),
            "slots.not_ready": len(rt.readiness.failed),
            "peers.not_ready": len(rt.readiness.peers()),
            "peers.connected": len(rt.neighbours.peers),
            "peers.known": len(rt.neighbours.book),
        }

    def facts(self) -> dict[str, Facts]:
        """Return what components tell of themselves, by slot; without those that tell nothing."""
        found = {cell.slot: cell.facts() for cell in self._rt.cells}
        return {slot: told for slot, told in found.items() if told}

    def executions(self) -> list[ExecutionInfo]:
        """Return the executions under way, oldest first."""
        host_ns = self._rt.clock.host_ns
        return [
            ExecutionInfo(
                execution=frame.execution,
                target=frame.plan.target,
                entry=frame.plan.name,
                started_ns=host_ns(frame.started_ns),
                deadline_ns=None if frame.deadline_ns is None else host_ns(frame.deadline_ns),
                source_peer=frame.source_peer,
            )
            for frame in self._rt.executor.frames.values()
        ]

    def waiting(self) -> list[Waiting]:
        """Return everything that waits, with its reason and its deadline."""
        rt = self._rt
        found = []
        for parked in rt.suspensions:
            missing = (
                rt.cohorts.missing(parked.token) if parked.why is WaitReason.RESPONSES else None
            )
            found.append(
                Waiting(
                    what=parked.op.name,
                    why=parked.why.value + (" (given up)" if parked.abandoned else ""),
                    whom=parked.whom if missing is None else missing,
                    execution=parked.frame.execution,
                    target=parked.frame.plan.target,
                    since_ns=parked.since_ns,
                    until_ns=parked.until_ns,
                )
            )
        found += rt.joins.waiting() + rt.messenger.waiting()
        found += rt.executor.turns.waiting() + rt.bootstraps.waiting()
        host_ns = rt.clock.host_ns
        return [
            replace(w, since_ns=host_ns(w.since_ns), until_ns=host_ns(w.until_ns)) for w in found
        ]

    def awaited(self, peer: PeerId) -> dict[int, int]:
        """Return the requests that wait for a peer's answer: id -> tag of the SendEnvelope."""
        rt = self._rt
        return {**rt.cohorts.table.awaited(peer), **rt.calls.awaited(peer)}

    def has_requests(self, peer: PeerId, ids: Iterable[int], tags: Container[int]) -> set[int]:
        """Return those of a peer's requests that this node has and is about to answer.

        `tags` are of the envelopes to the peer that it has not acknowledged: an answer may be among
        them.
        """
        rt, asked = self._rt, set(ids)
        found = asked & rt.outbound.answered_in(tags)
        for frame in rt.executor.frames.values():
            if frame.wire_req_id in asked and frame.source_peer == peer:
                found.add(frame.wire_req_id)
        for event in rt.ingress.waiting()[0]:
            if isinstance(event, ev.InboundBytes) and event.peer == peer:
                found |= asked & {correlation_of(event.data).wire_req_id}
        return found

    def bootstrap_status(self, name: str | None = None) -> BootstrapStatus:
        """Return the status of a Module's or component's (`slot:<slot>`) bootstrap, or of all.

        Raises UnknownTarget.
        """
        return self._rt.bootstraps.status(name)

    def bootstraps(self) -> list[BootstrapInfo]:
        """Return all bootstraps of this node, in the order in which `All` runs them."""
        return self._rt.bootstraps.infos()

    def not_ready(self) -> dict[str, str]:
        """Return the slots whose components could not be prepared, each with the reason."""
        return self._rt.readiness.slots()

    def peers_not_ready(self) -> dict[PeerId, NotReadyPeer]:
        """Return the connected peers that are not ready, or are held, with the reasons."""
        return self._rt.readiness.peers()

    def round_trips(self) -> list[RoundTrip]:
        """Return the estimates of how long requests take, by the site that they go to."""
        return self._rt.round_trips.all()

    def connected_peers(self, peer_class: str | None = None) -> Sequence[PeerId]:
        """Return peers that can be used now, in PeerId order; of one class if given."""
        return self._rt.neighbours.view(self._rt.clock.now_ns).connected(peer_class)

    def everyone_connected(self) -> tuple[PeerId, ...]:
        """Return all connected peers, those that can't be used now among them."""
        return self._rt.neighbours.peers.everyone()

    def peer_standing(self, peer: PeerId) -> PeerStanding:
        """Return the standing of a peer, known or not (on the polling thread)."""
        return self._rt.neighbours.standing(peer, self._rt.clock.now_ns)

    def records(self, name: str | None = None) -> list[tuple[int, int, str, Value]]:
        """Return the values of Record ops, oldest first: (node's time, execution, name, value)."""
        return [row for row in self._rt.records.rows() if name is None or row[2] == name]

    # -- refusals and completions -------------------------------------------------------------

    def _push_completion(self, completed: ev.Completed) -> None:
        if completed.token not in self._rt.suspensions:
            self._rt.ingress.count("completion.unknown")
            return
        self._rt.ingress.push_completion(completed)

    def _note_refused(self, peer: PeerId, data: bytes | memoryview, kind: str, detail: str) -> None:
        self._rt.ingress.push(
            ev.InboundRefused(
                peer=peer,
                size=len(data),
                kind=kind,
                detail=detail,
                correlation=correlation_of(data),
            )
        )


def _model_sizes(cells: Iterable[ComponentCell]) -> dict[str, int]:
    """Return the number of parameters of each model of a node, by slot, where it says it.

    Raises ComponentConstructionFailed where a model can't be asked.
    """
    found = {}
    for cell in cells:
        if not isinstance(cell.component, Model):
            continue
        where = f"slot {cell.slot!r}: {cell.component.TYPE_NAME}.vector_size()"
        try:
            size = cell.component.vector_size()
        except BbnodeError:
            raise
        except BaseException as error:
            let_stop(error)
            why = f"{where} raised {type(error).__name__}: {error}; report it to its author"
            raise ComponentConstructionFailed(why) from error
        if size is not None and (type(size) is not int or size < 0):
            raise ComponentConstructionFailed(
                f"{where} returned {size!r:.80}, which is no number of parameters; report it to "
                "its author"
            )
        if size is not None:
            found[cell.slot] = size
    return found
