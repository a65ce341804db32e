"""The network: nodes, the links between them, and virtual time.

Both directions between two nodes are created together and go up and down together. Two nodes are
connected if one wants it, nothing cuts the link and both run; both are notified, as by a
transport, with the other's classes and address.

Rule: events are taken in order from one agenda; a node is polled after an arrival or at its
request, and its steps are carried out at once. Computing takes no virtual time, except for
offloaded work, which takes the node's `task_ns`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

from multiaddr import Multiaddr
from onnx import ModelProto

from bbnode.engine import Limits, Node, ProgramPlan, install, plan_program, steps
from bbnode.engine.counts import Counts
from bbnode.engine.peers.agreeing import LocalAgreement
from bbnode.engine.planning.data_slots import (
    NO_DATA,
    DataSlots,
    data_slots_of,
)
from bbnode.engine.rng import mix64
from bbnode.ir.caps import MAX_DEADLINE_S
from bbnode.ir.ids import fnv1a_64
from bbnode.ir.interrupts import let_stop
from bbnode.ir.peer import PeerId
from bbnode.sim.agenda import ARRIVAL, POLL, Agenda, Flight
from bbnode.sim.errors import NameTaken, NotReached, TimeStandsStill, UnknownSimNode
from bbnode.sim.models import Clock, LinkModel, S
from bbnode.sim.node import KEPT_STEPS, SimNode, Wire
from bbnode.sim.secrets import SimSecrets, key_of
from bbnode.sim.topics import MARK, SimMessage, SimTopics, decode
from bbnode.sim.trace import Trace, checksum, describe

# The default limit of a run: longer than any reasonable deadline.
DEFAULT_LIMIT_NS = 3600 * S
# A gap of this length without events means that nodes only wait, maybe for a day (the limit
# `wait_s`). Such gaps do not count against the limit of a run, up to a month of them.
QUIET_NS = 600 * S
MAX_QUIET_NS = MAX_DEADLINE_S * S
# Maximum of events at one time. 10,000 nodes that talk with a hundred others each need less.
MAX_EVENTS_AT_ONCE = 10_000_000
_WORD = (1 << 64) - 1
_EXACT = Clock()

Observer = Callable[[int, SimNode, steps.Step], None]


class Network:
    """Simulated nodes and the links between them.

    `add` the nodes, `invoke` on them, `run_until_idle`, and inspect their steps. Everything runs on
    the calling thread; runs are not repeatable with a component that completes ops from threads of
    its own.
    """

    node_class: ClassVar[type[SimNode]] = SimNode

    def __init__(
        self,
        seed: int = 0,
        *,
        link: LinkModel | None = None,
        mesh: bool = True,
        threads: bool = False,
        observe: Observer | None = None,
        trace: Trace | None = None,
        kept_steps: int = KEPT_STEPS,
        keys: bool = False,
        dials: bool = False,
        compares: bool = True,
    ) -> None:
        """Create a network without nodes.

        Args:
            seed: seed of all draws of links and of nodes (RngU64).
            link: the default link; by default 1 ms, without faults.
            mesh: True to connect each added node with all others; else call `connect`.
            threads: True to run offloaded work in threads, one at a time, as a daemon would; the
                trace is the same.
            observe: called with the time, the node and each of its steps.
            trace: records the run; by default a new one.
            keys: True to give each node an Ed25519 key, derived from its name, so that its
                components can sign; its PeerId is then that of the key.
            dials: True to connect two nodes permanently once one sends to the other at an address
                that it has learned, as a daemon would; else only `connect` connects nodes.
            compares: True to compare the data of connected nodes, as daemons do; False for nodes
                that lie.
            kept_steps: number of newest steps that each node keeps for inspection.
        """
        self.seed = seed
        self.trace = Trace() if trace is None else trace
        self.now_ns = 0
        self._link = link or LinkModel()
        self._nodes: dict[str, SimNode] = {}
        self._mesh = mesh
        self._threads = threads
        self._observe = observe
        self._kept_steps = kept_steps
        self._keys = keys
        self._dials = dials
        self._agenda = Agenda()
        self._fly = self._agenda.arrive
        self._by_peer: dict[PeerId, SimNode] = {}
        self._compares = compares
        self._met: list[tuple[LocalAgreement, LocalAgreement]] = []
        self._data: dict[int, DataSlots] = {}
        self._programs: dict[tuple[int, tuple[str, ...]], tuple[ModelProto, ProgramPlan]] = {}
        self._counts = Counts()
        self._at_once = 0

    # -- nodes -------------------------------------------------------------------------------

    def add(
        self,
        name: str,
        model: ModelProto | ProgramPlan,
        targets: Sequence[str] = (),
        *,
        config: Mapping[str, Mapping[str, Any]] | None = None,
        limits: Limits | None = None,
        clock: Clock | None = None,
        task_ns: int = 0,
    ) -> SimNode:
        """Install a node; its PeerId follows from its name.

        Args:
            name: unique in this network.
            model, targets, config, limits: as for `bbnode.engine.install`. Nodes of one model and
                targets share its plan: do not change the model afterwards.
            clock: the node's clock; by default exact, starting from 0.
            task_ns: duration of offloaded work.

        Raises:
            NameTaken: there is a node with that name.
            BbnodeError: raised by `install`.
        """
        self._check_name(name)
        program = model if isinstance(model, ProgramPlan) else self._plan(model, tuple(targets))
        data = NO_DATA if isinstance(model, ProgramPlan) else self._data_slots(model)
        return self._add(
            *(name, program, clock, task_ns), is_here=True, config=config, limits=limits, data=data
        )

    def install(self, node: SimNode, incarnation: int) -> Node:
        """Create the engine's node for one life of a node."""
        return install(
            node.program,
            peer_id=node.peer_id,
            addresses=(node.address,),
            config=node.config,
            limits=node.limits,
            seed=mix64((self.seed & _WORD) ^ fnv1a_64(node.name.encode())),
            incarnation=incarnation,
            own_artifact=True,  # the caller's own program
            secrets=SimSecrets(node.name, self.seed, incarnation, signs=self._keys),
        )

    def _check_name(self, name: str) -> None:
        if name in self._nodes:
            raise NameTaken(f"a node {name!r} is there already; give each node its own name")

    def _added(self, node: SimNode) -> None:
        """Prepare a new node before it is connected; for subclasses."""

    def _add(
        self,
        name: str,
        program: ProgramPlan,
        clock: Clock | None,
        task_ns: int,
        *,
        is_here: bool,
        config: Mapping[str, Mapping[str, Any]] | None = None,
        limits: Limits | None = None,
        data: DataSlots = NO_DATA,
    ) -> SimNode:
        peer_id = key_of(name).peer_id if self._keys else self.peer_id(name)
        node = self.node_class(
            name,
            len(self._nodes),
            address=Multiaddr(f"/memory/{len(self._nodes) + 1}/p2p/{peer_id}"),
            peer_id=peer_id,
            program=program,
            config=config,
            limits=limits,
            clock=clock or _EXACT,
            task_ns=task_ns,
            kept_steps=self._kept_steps,
            network=self,
            is_here=is_here,
        )
        if data.groups and self._compares:
            node.agreement = LocalAgreement(data, program.schemas, lambda: node.here, node.index)
        others = list(self._nodes.values()) if self._mesh else ()
        self._nodes[name] = self._by_peer[peer_id] = node
        self._added(node)
        self.wake(node)
        for other in others:
            self.connect(other, node)
        return node

    def crash(self, node: SimNode | str) -> None:
        """Crash a node: its connections break, and unsaved state is lost."""
        dead = self.find(node)
        if not dead.is_up:
            return
        self.trace.note(self.now_ns, dead.name, "crash")
        for wire in dead.wires.values():
            self.sever(wire, "the connection was reset")
        dead.go_down()

    def restart(self, node: SimNode | str) -> None:
        """Restart a crashed node, from its last `SimNode.checkpoint` if there is one.

        Raises:
            BbnodeError: raised by `install` or `Node.restore`.
        """
        risen = self.find(node)
        if risen.is_up:
            return
        risen.come_up()
        self.trace.note(self.now_ns, risen.name, f"restart {risen.incarnation}")
        self.wake(risen)
        for wire in risen.wires.values():
            self.establish(wire)

    def __getitem__(self, name: str) -> SimNode:
        """Return a node by name; raises UnknownSimNode."""
        node = self._nodes.get(name)
        if node is None:
            known = ", ".join(list(self._nodes)[:10]) or "none"
            raise UnknownSimNode(f"there is no node {name!r}; there are: {known}")
        return node

    @property
    def nodes(self) -> list[SimNode]:
        """The nodes, in the order of their addition."""
        return list(self._nodes.values())

    @staticmethod
    def peer_id(name: str) -> PeerId:
        """Return the PeerId of a node by name, in a network without `keys`.

        The node need not exist yet.
        """
        return PeerId.from_seed(name)

    def find(self, node: SimNode | str) -> SimNode:
        """Return the node itself, or look it up by name; raises UnknownSimNode."""
        if isinstance(node, str):
            return self[node]
        if self._nodes.get(node.name) is not node:
            raise UnknownSimNode(f"the node {node.name!r} belongs to another network")
        return node

    # -- connections -------------------------------------------------------------------------

    def connect(
        self, one: SimNode | str, other: SimNode | str, link: LinkModel | None = None
    ) -> None:
        """Connect two nodes, and reconnect them after each fault."""
        there, back = self.pair(one, other)
        there.wanted = back.wanted = True
        if link is not None:
            there.link = back.link = link
        self.establish(there)

    def disconnect(self, one: SimNode | str, other: SimNode | str) -> None:
        """End the connection of two nodes permanently."""
        there, back = self.pair(one, other)
        there.wanted = back.wanted = False
        self.sever(there, "disconnected on purpose")

    def set_link(self, source: SimNode | str, target: SimNode | str, link: LinkModel) -> None:
        """Change one direction of a link; envelopes in flight are not affected."""
        self.pair(source, target)[0].link = link

    def set_links(self, link: LinkModel) -> None:
        """Change all links, future ones too; envelopes in flight are not affected."""
        self._link = link
        for node in self._nodes.values():
            for wire in node.wires.values():
                wire.link = link

    def cut(self, one: SimNode | str, other: SimNode | str) -> None:
        """Break the connection of two nodes and allow none until `heal`."""
        there, back = self.pair(one, other)
        there.cut = back.cut = True
        self.sever(there, "the network was cut")

    def heal(self, one: SimNode | str, other: SimNode | str) -> None:
        """Allow connections of two nodes again; wanted ones come back at once."""
        there, back = self.pair(one, other)
        there.cut = back.cut = False
        self.establish(there)

    def partition(self, *groups: Iterable[SimNode | str]) -> None:
        """Cut every node of a group from all nodes of the other groups."""
        for one, other in self._across(groups):
            self.cut(one, other)

    def heal_all(self) -> None:
        """Undo all cuts."""
        for node in self._nodes.values():
            for wire in list(node.wires.values()):
                if wire.cut:
                    self.heal(node, wire.target)

    def pair(self, one: SimNode | str, other: SimNode | str) -> tuple[Wire, Wire]:
        """Return both directions between two nodes."""
        a, b = self.find(one), self.find(other)
        if a is b:
            raise UnknownSimNode(f"{a.name} needs no link with itself; name two nodes")
        if b.peer_id not in a.wires:
            a.wires[b.peer_id] = Wire(a, b, self._link, self.seed)
            b.wires[a.peer_id] = Wire(b, a, self._link, self.seed)
        return a.wires[b.peer_id], b.wires[a.peer_id]

    def establish(self, wire: Wire) -> None:
        """Establish a wanted connection, if it is possible."""
        a, b = wire.source, wire.target
        if wire.up or wire.cut or not wire.wanted or not (a.is_up and b.is_up):
            return
        self.trace.note(self.now_ns, a.name, f"connect {b.name}")
        for each in self.pair(a, b):
            each.up = True
            each.session += 1
        for one, other in ((a, b), (b, a)):
            if one.here is not None:
                one.here.peer_connected(
                    other.peer_id, other.classes, (other.address,), other.crossings
                )
        if a.agreement is not None and b.agreement is not None:
            self._met.append((a.agreement, b.agreement))

    def sever(self, wire: Wire, reason: str) -> None:
        """End a connection; both sides are notified, and envelopes in flight are lost."""
        if not wire.up:
            return
        a, b = wire.source, wire.target
        self.trace.note(self.now_ns, a.name, f"disconnect {b.name}")
        for each in self.pair(a, b):
            each.up = False
        for one, other in ((a, b), (b, a)):
            if one.here is not None:
                one.here.peer_disconnected(other.peer_id, reason)

    def _across(
        self, groups: Iterable[Iterable[SimNode | str]]
    ) -> Iterator[tuple[SimNode, SimNode]]:
        resolved = [[self.find(node) for node in group] for group in groups]
        for index, group in enumerate(resolved):
            for later in resolved[index + 1 :]:
                for one in group:
                    for other in later:
                        yield one, other

    # -- time --------------------------------------------------------------------------------

    def at(self, when_ns: int, action: Callable[[], object]) -> None:
        """Call `action` at a time of the network, e.g. for a fault; a past time means now."""
        self._agenda.call(max(when_ns, self.now_ns), action)

    def run(self, until: int) -> None:
        """Run all events up to and at the time `until`, in nanoseconds."""
        while self._step(until):
            pass
        self._agenda.rest()
        self.now_ns = max(self.now_ns, until)

    def run_until(
        self, condition: Callable[[], object], *, limit_ns: int = DEFAULT_LIMIT_NS
    ) -> None:
        """Run until `condition()` is true; it is evaluated after every event.

        Raises:
            NotReached: no event is left, or `limit_ns` are over, and it is still false. Gaps of
                ten minutes or more without events do not count.
        """
        end_ns = self.now_ns + limit_ns
        last_ns = end_ns + MAX_QUIET_NS
        while not condition():
            if not self._step(end_ns):
                if self._is_quiet(last_ns):
                    end_ns = self._following_ns() + limit_ns
                    continue
                idle = self._agenda.is_empty()
                why = "nothing is left to happen" if idle else f"{limit_ns} ns are over"
                raise NotReached(f"{why}, and the condition does not hold. {self._state()}")
        self._agenda.rest()

    def run_until_idle(self, *, limit_ns: int = DEFAULT_LIMIT_NS) -> None:
        """Run until no event is left.

        Raises:
            NotReached: events are left after `limit_ns`; a program with an Interval is never
                idle. Gaps of ten minutes or more without events do not count.
        """
        end_ns = self.now_ns + limit_ns
        last_ns = end_ns + MAX_QUIET_NS
        while True:
            if not self._step(end_ns):
                if not self._is_quiet(last_ns):
                    break
                end_ns = self._following_ns() + limit_ns
        self._agenda.rest()
        if not self._agenda.is_empty():
            raise NotReached(
                f"after {limit_ns} ns the network is not idle; use run(until=…) for a program "
                f"that never rests, or a larger limit_ns. {self._state()}"
            )

    def counters(self) -> dict[str, int]:
        """Return the counts of polls, of tasks, and of envelopes by their outcome."""
        return dict(self._counts)

    # -- events ------------------------------------------------------------------------------

    def _following_ns(self) -> int:
        """Return the time of the next event, or the present."""
        following = self._agenda.next()
        times = [self._agenda.next_call_ns(), None if following is None else following[0]]
        return min((when_ns for when_ns in times if when_ns is not None), default=self.now_ns)

    def _is_quiet(self, last_ns: int) -> bool:
        """Return True if the next event follows after a long gap, but by `last_ns`."""
        return self.now_ns + QUIET_NS <= self._following_ns() <= last_ns

    def _step(self, until_ns: int) -> bool:
        """Run the next event; return False if there is none up to `until_ns`."""
        agenda = self._agenda
        while self._met:
            # Deferred until time advances: a file may be written after its node was added.
            one, other = self._met.pop(0)
            one.meet(other)
        if agenda.calls:
            call_ns = agenda.calls[0][0]
            following = agenda.next() if call_ns <= until_ns else (0, 0)
            if following is None or call_ns <= following[0]:
                self._at(call_ns)
                agenda.take_call()()
                return True
        taken = agenda.take(until_ns)
        if taken is None:
            return False
        self._happen(taken)
        return True

    def _happen(self, taken: tuple[int, int, Any]) -> None:
        """Run an event of a node, as returned by the agenda."""
        when_ns, rank, what = taken
        self._at(when_ns)
        if rank == POLL:
            self._poll(what)
        elif rank == ARRIVAL:
            self._arrive(what)
        else:
            node, life, task = what
            if node.life == life:
                self._run_task(node.node, task)

    def _at(self, when_ns: int) -> None:
        """Advance to the time of an event."""
        if when_ns > self.now_ns:
            self.now_ns = when_ns
            self._at_once = 0
        self._at_once += 1
        if self._at_once > MAX_EVENTS_AT_ONCE:
            raise TimeStandsStill(
                f"{MAX_EVENTS_AT_ONCE} events happened at {self.now_ns} ns; something sends to "
                f"itself for ever: give links a latency, or let the program end. {self._state()}"
            )

    def wake(self, node: SimNode) -> None:
        """Poll a node at the present time."""
        self._agenda.wake(node, self.now_ns)

    def _arrive(self, arrival: Flight) -> None:
        wire, session, data, crc = arrival
        if not wire.up or wire.session != session:
            self._counts["envelopes.lost_with_connection"] += 1
            return
        self._counts["envelopes.delivered"] += 1
        source, target = wire.source, wire.target
        self.trace.note(self.now_ns, target.name, f"receive {source.name} {crc}")
        if data.startswith(MARK):
            self._hear(wire, data, crc)
            return
        engine = target.here or target.node
        engine.deliver_inbound(source.peer_id, data, source.address)

    def _poll(self, node: SimNode) -> None:
        node.wake_ns = None
        self._counts["polls"] += 1
        engine, life, observe = node.here or node.node, node.life, self._observe
        for step in engine.poll(node.clock.local_ns(self.now_ns)):
            if type(step) is steps.SendEnvelope:
                self._send(node, step)
            else:
                self._take_step(node, step)
            if observe is not None:
                observe(self.now_ns, node, step)
                if node.life != life:
                    return  # the observer crashed the node: its other steps are lost
        due = engine.next_deadline()
        if due is not None:
            self._agenda.wake(node, max(self.now_ns, node.clock.true_ns(due)))

    def _take_step(self, node: SimNode, step: steps.Step) -> None:
        self.trace.note(self.now_ns, node.name, describe(step, self._name_of))
        if type(step) is steps.RunTask:
            self._counts["tasks"] += 1
            self._agenda.end_task(self.now_ns + node.task_ns, node, step)
        elif type(step) is steps.FollowTopic:
            self._follow(node, step)
        elif type(step) is steps.PublishMessage:
            self._publish(node, step)
        else:
            node.keep(self.now_ns, step)

    def _send(self, node: SimNode, step: steps.SendEnvelope) -> None:
        counts = self._counts
        counts["envelopes.sent"] += 1
        data = b"".join(step.parts)
        crc = checksum(data)
        peer = step.peer
        wire = node.wires.get(peer)
        target = self._name_of(peer) if wire is None else wire.target.name
        self.trace.note(self.now_ns, node.name, f"send {target} {len(data)} {crc}")
        if self._dials and (wire is None or not wire.up) and peer in self._by_peer:
            self.connect(node, self._by_peer[peer])
            wire = node.wires[peer]
        if wire is None or not wire.up:
            counts["envelopes.not_connected"] += 1
            node.node.send_failed(peer, f"{self._name_of(peer)} is not connected", tag=step.tag)
            return
        counts["envelopes.bytes"] += len(data)
        arrivals = wire.arrivals(self.now_ns)
        if len(arrivals) != 1:
            counts["envelopes.duplicated" if arrivals else "envelopes.lost"] += 1
        for when_ns in arrivals:
            self._fly(when_ns, (wire, wire.session, data, crc))

    def _follow(self, node: SimNode, step: steps.FollowTopic) -> None:
        own = node.topics = node.topics or SimTopics()
        (own.follows.add if step.on else own.follows.discard)(step.topic)

    def _publish(self, node: SimNode, step: steps.PublishMessage) -> None:
        own = node.topics = node.topics or SimTopics()
        own.published += 1
        self._counts["messages.published"] += 1
        own.heard.add((node.peer_id, own.published), None)
        message = SimMessage(
            publisher=node.peer_id,
            number=own.published,
            topic=step.topic,
            payload=step.payload,
        )
        data = message.encode()
        self._pass_on(node, data, checksum(data), None)

    def _hear(self, wire: Wire, data: bytes, crc: str) -> None:
        """Deliver an arrived topic message and forward it, once each."""
        node, message = wire.target, decode(data)
        own = node.topics
        if own is None or message.topic not in own.follows:
            return
        if own.heard.add((message.publisher, message.number), None):
            self._counts["messages.delivered"] += 1
            engine = node.here or node.node
            engine.deliver_message(message.publisher, message.topic, message.payload)
            self._pass_on(node, data, crc, wire.source)

    def _pass_on(self, node: SimNode, data: bytes, crc: str, giver: SimNode | None) -> None:
        for wire in node.wires.values():
            if wire.up and wire.target is not giver:
                for when_ns in wire.arrivals(self.now_ns):
                    self._fly(when_ns, (wire, wire.session, data, crc))

    def _run_task(self, node: Node, task: steps.RunTask) -> None:
        def work() -> None:
            try:
                result = task.fn()
            except BaseException as error:  # noqa: BLE001 - the boundary of component code
                let_stop(error)
                node.fail(task.token, error)
            else:
                node.complete(task.token, result)

        if self._threads:
            thread = threading.Thread(target=work, name=f"bbnode-task-{task.token}")
            thread.start()
            thread.join()
        else:
            work()

    def _plan(self, model: ModelProto, targets: tuple[str, ...]) -> ProgramPlan:
        key = (id(model), targets)
        known = self._programs.get(key)
        if known is None:
            # The model is kept alive, so that its id is not reused.
            known = self._programs[key] = (model, plan_program(model, targets))
        return known[1]

    def _data_slots(self, model: ModelProto) -> DataSlots:
        known = self._data.get(id(model))  # the plans keep the model alive
        if known is None:
            known = self._data[id(model)] = data_slots_of(model)
        return known

    def _name_of(self, peer: PeerId) -> str:
        node = self._by_peer.get(peer)
        return str(peer) if node is None else node.name

    def _state(self) -> str:
        """Describe all waiting nodes, for an error message."""
        waiting = [
            f"{node.name}: {entry.what} waits for {entry.whom or entry.why}"
            for node in self._nodes.values()
            if node.is_up
            for entry in node.waiting()
        ]
        listed = "; ".join(waiting[:5]) or "no op waits"
        return f"Now it is {self.now_ns} ns (seed {self.seed}); {listed}"
