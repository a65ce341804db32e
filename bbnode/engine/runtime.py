"""The heart of a node: its frames and the queue of what can fire.

Rule: ops fire in the order in which they became ready, over all executions. Everything that
an op does goes through here and ends here: a result wakes consumers, an exception becomes an
OpFailed step, PARKED leaves the op to the table of waiting ops. Nothing leaves as an exception.
"""

from __future__ import annotations

import sys
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

from bbnode.engine import steps
from bbnode.engine.bus import Bus, BusKind
from bbnode.engine.cells import ComponentCell
from bbnode.engine.cohorts import Cohorts
from bbnode.engine.errors import STOPS, FramesExceeded, GateDenied, describe
from bbnode.engine.frame import PARKED, EntryPlan, Frame, Op, _Marker
from bbnode.engine.inbound_dedup import InboundDedup
from bbnode.engine.ingress import Ingress
from bbnode.engine.limits import Limits, cut_text
from bbnode.engine.messaging.messenger import ControlPlane
from bbnode.engine.ops.graphs import GraphRunner
from bbnode.engine.parking import ParkingTable
from bbnode.engine.peers.neighbours import Neighbours
from bbnode.engine.peers.round_trips import RoundTrips
from bbnode.engine.records import Records
from bbnode.engine.rng import program_rng, wire_ids
from bbnode.engine.scheduler import Scheduler
from bbnode.engine.stores import StorePlan, Stores
from bbnode.engine.suspensions import Suspensions
from bbnode.engine.tracing import Tracer
from bbnode.engine.turns import Turns
from bbnode.engine.wire.decoder import Decoder
from bbnode.engine.wire.outbound import Outbound
from bbnode.ir.errors import BbnodeError
from bbnode.ir.peer import PeerId

if TYPE_CHECKING:
    from bbnode.engine.snapshot.codec import LoadedNames, SavedNames


class Runtime:
    """State of one node; ops reach it as `frame.rt`."""

    def __init__(
        self,
        *,
        neighbours: Neighbours,
        cells: Sequence[ComponentCell],
        graphs: Sequence[GraphRunner],
        limits: Limits,
        seed: int,
        incarnation: int,
        saves_states: bool,
        stores: StorePlan,
        subscribed: Sequence[int],
    ) -> None:
        self.self_peer: PeerId = neighbours.self_peer
        self.neighbours = neighbours
        self.cells = tuple(cells)
        self.graphs = tuple(graphs)
        self.limits = limits
        self.seed = seed
        self.now_ns = 0
        self.booted = False  # polled once
        self.steps: list[steps.Step] = []
        self.counts: Counter[str] = Counter()
        self.frames: dict[int, Frame] = {}
        # Of those, how many each peer's messages started.
        self.frames_of: dict[PeerId, int] = {}
        # What can fire, oldest first: ops of one execution that became ready together.
        self.ready: deque[tuple[Frame, tuple[Op, ...]]] = deque()
        self.ingress = Ingress(limits)
        self.records = Records(self.ingress.budget, self.counts)
        self.stores = Stores(self.ingress.budget, stores)
        self.bus = Bus(limits.bus_events, subscribed, self.counts)
        self.scheduler = Scheduler()
        self.parking = ParkingTable()
        self.dedup = InboundDedup()
        self.suspensions = Suspensions(self)
        self.outbound = Outbound(self)
        self.cohorts = Cohorts(self)
        self.round_trips = RoundTrips()
        self.control = ControlPlane(self)
        self.turns = Turns(self)
        self.decoder = Decoder(self)
        self.tracer: Tracer | None = None
        self.run: Callable[[int | None], int] = self._run
        self._commands = 0
        # What numbers executions: of the host's calls, from any thread, and of what starts here.
        self.executions = self.ingress.executions
        self.next_execution: Callable[[], int] = self.executions
        self.saves_states = saves_states
        self.incarnation = incarnation
        self.set_incarnation(incarnation)

    def state(self, names: SavedNames) -> Any:
        """For a snapshot: time, ids, random numbers, counters and the frontier."""
        return [
            self.now_ns,
            self.booted,
            self.incarnation,
            self.wire_ids.state(names),
            self.rng.state(names),
            self._commands,
            self.executions.last,
            sorted(self.counts.items()),
            [[names.frame(frame), op.index] for frame, ops in self.ready for op in ops],
        ]

    def load(self, plain: Any, names: LoadedNames) -> None:
        """Take up what `state` gave, frames being there."""
        self.now_ns, self.booted, incarnation, wire_ids, rng, *rest = plain
        self.incarnation = incarnation
        self._commands, last, counts, ready = rest
        self.wire_ids.load(wire_ids, names)
        self.rng.load(rng, names)
        self.executions.last = last
        self.counts.update(dict(counts))
        for frame in self.frames.values():
            if frame.site and frame.source_peer is not None:
                self.frames_of[frame.source_peer] = self.frames_of.get(frame.source_peer, 0) + 1
        for execution, op in ready:
            frame = names.frame(execution)
            self.ready.append((frame, frame.plan.ops[op].alone))

    def begin_life(self, incarnation: int) -> None:
        """Go on as another incarnation: ids on the wire come from a stream of its own."""
        self.incarnation = incarnation
        self.wire_ids = wire_ids(self.self_peer.to_bytes(), incarnation)

    def set_incarnation(self, incarnation: int) -> None:
        """Start the streams of ids and random numbers of one life of the node."""
        self.incarnation = incarnation
        raw = self.self_peer.to_bytes()
        self.wire_ids = wire_ids(raw, incarnation)
        self.rng = program_rng(self.seed, incarnation, raw)

    # -- frames ------------------------------------------------------------------------------

    def start(self, plan: EntryPlan, execution: int, *, from_bus: bool = False) -> Frame | None:
        """A new frame, to be seeded and launched; None, with a step, when there are too many."""
        limit = self.limits.frames
        if limit is not None and len(self.frames) >= limit:
            error = FramesExceeded(f"{len(self.frames)} executions are under way (limit frames)")
            self.fail_start(execution, plan, error, from_bus=from_bus)
            return None
        frame = Frame(self, plan, execution, self.now_ns)
        frame.from_bus = from_bus
        self.frames[execution] = frame
        if plan.component is not None:
            self.control.started(plan.component)
        return frame

    def came_from(self, frame: Frame, peer: PeerId, wire_req_id: int, site: int) -> None:
        """Note whose message a new frame is of, and where it came in."""
        frame.source_peer, frame.wire_req_id, frame.site = peer, wire_req_id, site
        self.frames_of[peer] = self.frames_of.get(peer, 0) + 1

    def fail_start(
        self, execution: int, plan: EntryPlan, error: BbnodeError, *, from_bus: bool = False
    ) -> None:
        """An execution that can't be started."""
        self.failed_step(execution, plan.target, plan.name, error)
        if not from_bus:
            self.bus.publish(BusKind.OP_FAILED)

    def launch(self, frame: Frame) -> None:
        """Queue what can fire at once, or the execution itself until it is its turn."""
        self.counts["executions"] += 1
        if not frame.plan.in_turn or self.turns.take(frame):
            self.begin(frame)

    def begin(self, frame: Frame) -> None:
        """Queue what can fire at once."""
        if self.tracer is not None:
            self.tracer.started(frame)
        initial = frame.plan.initial
        if initial:
            frame.live = len(initial)
            self.ready.append((frame, initial))
        else:
            self.end(frame)

    def end(self, frame: Frame) -> None:
        """Drop a frame: it is finished, or stopped."""
        if frame.ended:
            return
        frame.ended = True
        del self.frames[frame.execution]
        peer = frame.source_peer
        if peer is not None and frame.site:
            left = self.frames_of[peer] - 1
            if left:
                self.frames_of[peer] = left
            else:
                del self.frames_of[peer]
        if frame.plan.component is not None:
            self.control.ended(frame.plan.component)
        if frame.parked:
            for token in list(frame.parked):
                self.suspensions.give_up(token)
        if frame.cohorts is not None:
            self.cohorts.drop_frame(frame)
        if frame.charges is not None:
            for charge in frame.charges:
                charge.release()
        if frame.units and frame.failures:
            self.suspensions.reclaim(frame.units)
        # The queue may still name the frame; its values must not wait for that.
        frame.values = []
        if self.tracer is not None:
            self.tracer.ended(frame)
        if frame.report:
            self.steps.append(
                steps.make_finished(
                    frame.execution, frame.plan.target, frame.failures == 0, frame.failures
                )
            )
        if frame.plan.in_turn:
            self.turns.give_back(frame)

    # -- the frontier ------------------------------------------------------------------------

    def set_tracing(self, on: bool) -> None:
        """Choose the loop that fires ops."""
        self.tracer = Tracer(self) if on else None
        self.run = self.tracer.run if self.tracer is not None else self._run

    def _run(self, budget: int | None) -> int:
        """Fire what is ready, at most `budget` ops; returns how many fired.

        This loop is what every op pays for: it does nothing by name, and nothing twice. The ops of
        one entry share all that can be shared: until the last of them has fired, `frame.live`
        still counts those that have, and not yet those that they woke, so that it can't come to 0
        too early. An op that is alone in its entry and wakes one op, with nothing else in the
        queue, is followed by that one at once: through the queue it would come to the same.
        """
        ready = self.ready
        pop = ready.popleft
        push = ready.append
        parked = PARKED  # a local name is quicker than a global one
        most = left = sys.maxsize if budget is None else budget
        while ready:
            frame, ops = pop()
            if frame.ended:
                continue
            count = len(ops)
            if count > left:
                ready.appendleft((frame, ops[left:]))
                if not left:
                    break
                ops = ops[:left]
                count = left
            left -= count
            values = frame.values
            pending = frame.pending
            gained = -count  # how `live` has to change: woken less fired
            coming = iter(ops)
            for op in coming:
                while True:
                    try:
                        result = op.fire(frame)
                    except STOPS:
                        rest = tuple(coming)
                        frame.live += gained + 1 + len(rest)  # this op stays under way for ever
                        if rest:
                            ready.appendleft((frame, rest))
                        raise
                    except BaseException as error:  # noqa: BLE001 - the boundary to components
                        gained += 1  # `fail` counts by itself
                        self.fail(frame, op, error)
                        if frame.execution not in self.frames:
                            left += len(tuple(coming))  # it has ended: they will not fire
                        break
                    if result is parked:
                        gained += 1  # it stays live, or `retire` has counted
                        break
                    out = op.out
                    if out is not None:
                        values[out] = result
                    else:
                        for index, value in zip(op.outs or (), result, strict=False):
                            values[index] = value
                    wakes = op.wakes
                    if wakes:
                        if count == 1 and left and not ready and len(wakes) == 1:
                            left -= 1
                            op = wakes[0]
                            continue
                        push((frame, wakes))
                        gained += len(wakes)
                    elif wakes is None:
                        for consumer in op.consumers:
                            index = consumer.index
                            waits = pending[index] - 1
                            pending[index] = waits
                            if not waits:
                                push((frame, consumer.alone))
                                gained += 1
                    break
            if gained:
                frame.live += gained
                if not frame.live:
                    self.end(frame)
        return most - left

    def emit(self, frame: Frame, op: Op, result: Any, started_ns: int | None = None) -> None:
        """What `_run` does with a result, for an op that was parked (since `started_ns`)."""
        if frame.ended:
            return
        if self.tracer is not None:
            self.tracer.completed(frame, op, started_ns)
        if op.out is not None:
            frame.values[op.out] = result
        else:
            for index, value in zip(op.outs or (), result, strict=False):
                frame.values[index] = value
        if op.wakes is not None:
            self._push(frame, op.wakes)
        else:
            for consumer in op.consumers:
                frame.pending[consumer.index] -= 1
                if not frame.pending[consumer.index]:
                    self._push(frame, consumer.alone)
        self.retire(frame)

    def _push(self, frame: Frame, ops: tuple[Op, ...]) -> None:
        if ops:
            self.ready.append((frame, ops))
            frame.live += len(ops)

    def ops_ready(self) -> int:
        """How many ops wait in the queue."""
        return sum(len(ops) for _, ops in self.ready)

    def retire(self, frame: Frame) -> Literal[_Marker.PARKED]:
        """An op of the frame is done without a result; returns what its `fire` returns."""
        frame.live -= 1
        if not frame.live:
            self.end(frame)
        return PARKED

    def fail(self, frame: Frame, op: Op, error: BaseException) -> None:
        """An op failed: what depends on it does not fire; a denied gate ends everything."""
        if frame.ended:
            return
        frame.failures += 1
        self.failed_step(frame.execution, frame.plan.target, op.name, error)
        self.publish(BusKind.OP_FAILED, frame)
        if isinstance(error, GateDenied):
            self.counts[f"gate.denied.{error.reason}"] += 1
            self.end(frame)
        else:
            self.retire(frame)

    def failed_step(self, execution: int, target: str, op: str, error: BaseException) -> None:
        """Tell that something failed; outside of any execution that is number 0."""
        kind, detail = describe(error)
        self.counts["ops.failed"] += 1
        self.steps.append(
            steps.OpFailed(
                execution=execution,
                target=target,
                op=op,
                kind=kind,
                detail=cut_text(detail, self.limits.failure_detail_bytes),
            )
        )

    # -- small services of ops ---------------------------------------------------------------

    def next_command(self) -> int:
        """Names a finished side effect."""
        self._commands += 1
        return self._commands

    def publish(self, kind: BusKind, frame: Frame) -> None:
        """What went wrong in an execution, as an event; not if an event started it."""
        if not frame.from_bus:
            self.bus.publish(kind)

    def show(self, made: Sequence[steps.Step]) -> None:
        """Surface what the tables about peers say, and tell it on the bus."""
        self.steps.extend(made)
        for step in made:
            if isinstance(step, steps.PeerUp):
                self.bus.publish(BusKind.PEER_UP)
            elif isinstance(step, steps.PeerDown):
                self.bus.publish(BusKind.PEER_DOWN)

    def telemetry(self, name: str, **attributes: Any) -> None:
        """Surface an observation."""
        self.steps.append(steps.Telemetry(name=name, attributes=attributes))

    def refuse(
        self, peer: PeerId, fill: int, type_hash: int, size: int, kind: str, detail: str
    ) -> None:
        """Surface a fill, or with `fill` -1 an envelope, that was not taken."""
        self.counts[f"receive.failed.{kind}"] += 1
        self.bus.publish(BusKind.WIRE_RECEIVE_FAILED)
        self.steps.append(
            steps.WireReceiveFailed(
                peer=peer,
                fill=fill,
                type_hash=type_hash,
                payload_size=size,
                kind=kind,
                detail=cut_text(detail, self.limits.failure_detail_bytes),
            )
        )
