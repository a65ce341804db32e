"""One simulated peer: a real node, its steps, and its connections.

Rule: only its network drives the node; the methods here use its entry points, as a host does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Protocol, TypeVar

from multiaddr import Multiaddr

from bbnode.engine import Limits, Node, ProgramPlan, steps
from bbnode.engine.node import ExecutionInfo
from bbnode.engine.peers.agreeing import LocalAgreement
from bbnode.engine.rng import SplitMix64, mix64
from bbnode.engine.suspensions import Waiting
from bbnode.ir.crossing import Crossing
from bbnode.ir.ids import fnv1a_64
from bbnode.ir.peer import PeerId
from bbnode.ir.values import Value
from bbnode.sim.errors import NodeIsDown, NodeIsElsewhere
from bbnode.sim.models import Clock, LinkModel
from bbnode.sim.topics import SimTopics

_TWO_64: Final = 1 << 64

# Steps kept per node by default, without envelopes and tasks.
KEPT_STEPS = 10_000

Kind = TypeVar("Kind")


class Time(Protocol):
    """The part of a network that its nodes use."""

    now_ns: int

    def wake(self, node: SimNode) -> None:
        """Have a node polled now."""

    def install(self, node: SimNode, incarnation: int) -> Node:
        """Create the engine's node for one life of a node."""


class SimNode:
    """A peer of a `Network`; created by `Network.add`.

    Attributes:
        name: unique in its network; the PeerId and all draws are derived from it.
        index: its number in its network.
        peer_id: its PeerId.
        address: the address that it claims.
        program, config, limits: what it is installed from, as for `Network.add`.
        clock: the node's clock.
        task_ns: duration of offloaded work on it, in its network's time.
        is_up: True while it runs.
        here: the engine's node, if this process runs it and it has not crashed.
    """

    __slots__ = (
        "_incarnation",
        "_is_here",
        "_kept_steps",
        "_network",
        "_saved",
        "_steps",
        "address",
        "agreement",
        "clock",
        "config",
        "here",
        "index",
        "is_up",
        "life",
        "limits",
        "name",
        "peer_id",
        "planned_ns",
        "program",
        "task_ns",
        "topics",
        "wake_ns",
        "wires",
    )

    def __init__(
        self,
        name: str,
        index: int,
        *,
        address: Multiaddr,
        peer_id: PeerId,
        program: ProgramPlan,
        config: Mapping[str, Mapping[str, Any]] | None,
        limits: Limits | None,
        clock: Clock,
        task_ns: int,
        kept_steps: int,
        network: Time,
        is_here: bool,
    ) -> None:
        """Create a running node, here or in another process."""
        self.name = name
        self.index = index
        self.peer_id = peer_id
        self.address = address
        self.clock = clock
        self.task_ns = task_ns
        self.program = program
        self.config = config
        self.limits = limits
        # Maintained by the network: the connections, the time of the next poll, and the time
        # for which the agenda has a poll already.
        self.wires: dict[PeerId, Wire] = {}
        self.topics: SimTopics | None = None  # None until it uses topics
        self.wake_ns: int | None = None
        self.planned_ns: int | None = None
        self.life = 0
        self.is_up = True
        self._network = network
        self._is_here = is_here
        self._saved: bytes | None = None
        self._kept_steps = kept_steps
        self._steps: list[tuple[int, steps.Step]] = []
        self._incarnation = 1
        # The meaning of its data, if the network compares that; it survives a crash.
        self.agreement: LocalAgreement | None = None
        self.here: Node | None = None
        if is_here:
            self.here = network.install(self, 1)
            self.here.set_wake(self.wake)

    def __repr__(self) -> str:
        return f"SimNode({self.name!r}, {', '.join(self.classes)})"

    # -- the node ----------------------------------------------------------------------------

    @property
    def classes(self) -> tuple[str, ...]:
        """The classes of peer that it plays."""
        return self.program.classes

    @property
    def crossings(self) -> tuple[Crossing, ...]:
        """All crossings that it sends and takes, as in a hello."""
        return self.program.crossings if self.here is None else self.here.crossings

    @property
    def node(self) -> Node:
        """The engine's node; NodeIsDown while it is crashed, NodeIsElsewhere in a SplitNetwork."""
        if self.here is None:
            if self.is_up:
                raise NodeIsElsewhere(
                    f"{self.name} runs in another process, where nothing can be reached but by "
                    "the methods of SimNode"
                )
            raise NodeIsDown(f"{self.name} is crashed; call Network.restart({self.name!r}) first")
        return self.here

    @property
    def incarnation(self) -> int:
        """The number of its life, from 1 on."""
        return self._incarnation

    def invoke(
        self, target: str, inputs: Mapping[str, Value], deadline_ns: int | None = None
    ) -> int:
        """Start an execution at the next poll and return its id; raises as `Node.invoke`."""
        return self.node.invoke(target, inputs, deadline_ns=deadline_ns)

    def deliver_event(
        self,
        target: str,
        input: str,  # noqa: A002
        value: Value,
        deadline_ns: int | None = None,
    ) -> int:
        """Start an execution with one input and return its id. Raises as `Node.deliver_event`."""
        return self.node.deliver_event(target, input, value, deadline_ns=deadline_ns)

    def checkpoint(self) -> None:
        """Keep a snapshot for `Network.restart`. Raises NodeBusy while a component works."""
        self._saved = self.node.snapshot(self.clock.local_ns(self._network.now_ns))

    def component(self, slot: str) -> Any:
        """Return the component of a slot, for inspection; a restart creates a new one.

        Raises UnknownSlot, or NodeIsDown.
        """
        return self.node.component(slot)

    def waiting(self) -> list[Waiting]:
        """Return everything that waits on it, with its reason and its deadline."""
        return self.node.waiting()

    def executions(self) -> list[ExecutionInfo]:
        """Return its executions under way, oldest first."""
        return self.node.executions()

    def counters(self) -> dict[str, int]:
        """Return its counts, and a few gauges."""
        return self.node.counters()

    # -- its steps ---------------------------------------------------------------------------

    def seen(self, kind: type[Kind]) -> list[Kind]:
        """Return the kept steps of one class, oldest first."""
        return [step for _, step in self.history() if isinstance(step, kind)]

    def history(self) -> list[tuple[int, steps.Step]]:
        """Return all kept steps with the network's time, oldest first."""
        return self._steps[max(len(self._steps) - self._kept_steps, 0) :]

    def values(self, topic: str) -> list[Value]:
        """Return the values of all app events with this topic, oldest first."""
        return [event.value for event in self.seen(steps.AppEvent) if event.topic == topic]

    def outputs(self, execution: int) -> dict[str, Value]:
        """Return the outputs of one execution of this node: topic to the last value."""
        events = self.seen(steps.AppEvent)
        return {event.topic: event.value for event in events if event.execution == execution}

    def skipped(self, execution: int) -> dict[str, str]:
        """Return the outputs that one execution of this node skipped: name to the reason."""
        events = self.seen(steps.OutputSkipped)
        return {event.name: event.reason for event in events if event.execution == execution}

    def failures(self) -> list[steps.OpFailed]:
        """Return the ops that failed on this node, oldest first."""
        return self.seen(steps.OpFailed)

    def has_finished(self, execution: int) -> bool:
        """Return True if an execution that was started here has ended."""
        ended = self.seen(steps.ExecutionFinished)
        return any(step.execution == execution for step in ended)

    # -- for the network ---------------------------------------------------------------------

    def keep(self, at_ns: int, step: steps.Step) -> None:
        """Keep a step for inspection."""
        self._steps.append((at_ns, step))
        # A list, since even an empty deque takes 760 bytes per node.
        if len(self._steps) >= 2 * self._kept_steps:
            del self._steps[: len(self._steps) - self._kept_steps]

    def wake(self) -> None:
        """Poll this node now; its engine calls it."""
        self._network.wake(self)

    def go_down(self) -> None:
        """Drop everything but the last checkpoint."""
        self.is_up = False
        self.here = None
        self.topics = self.topics and SimTopics(self.topics.published)
        self.wake_ns = self.planned_ns = None
        self.life += 1

    def come_up(self) -> None:
        """Install anew, as the next incarnation, from the last checkpoint."""
        incarnation = self._incarnation + 1
        self.life += 1
        if self._is_here:
            node = self._network.install(self, incarnation)
            if self._saved is not None:
                node.restore(self._saved)
            node.set_wake(self.wake)
            self.here = node
        self._incarnation = incarnation
        self.is_up = True


class Wire:
    """One direction between two nodes.

    It has a random stream of its own, a function of the network's seed and the two names; so it
    does not depend on other nodes. It keeps the order of envelopes, as the streams of a real
    connection do, unless its link reorders.

    `wanted`: the nodes should be connected; `cut`: the network keeps them apart; `up`: connected
    now. Envelopes of an earlier `session` never arrive: they were lost with its connection.
    `count`: the number of planned arrivals.
    """

    __slots__ = (
        "_last_ns",
        "_rng",
        "_seed",
        "count",
        "cut",
        "link",
        "session",
        "source",
        "target",
        "up",
        "wanted",
    )

    def __init__(self, source: SimNode, target: SimNode, link: LinkModel, seed: int) -> None:
        self.source = source
        self.target = target
        self.link = link
        self.session = 0
        self.count = 0
        self.up = False
        self.wanted = False
        self.cut = False
        self._last_ns = 0
        self._seed = seed
        self._rng: SplitMix64 | None = None  # None until the first draw: most links have no faults

    def arrivals(self, now_ns: int) -> list[int]:
        """Return the arrival times of an envelope sent now: none, one, or two."""
        # No draw for faults that a link does not have, since most links have none.
        link = self.link
        if link.is_plain:
            at_ns = now_ns + link.latency_ns
            if at_ns > self._last_ns:
                self._last_ns = at_ns
            return [self._last_ns]
        if link.loss and self._happens(link.loss):
            return []
        if link.duplication and self._happens(link.duplication):
            return [self._arrival(now_ns), self._arrival(now_ns)]
        return [self._arrival(now_ns)]

    def _arrival(self, now_ns: int) -> int:
        link = self.link
        at_ns = now_ns + link.latency_ns
        if link.jitter_ns:
            at_ns += self._up_to(link.jitter_ns)
        if link.reorder and self._happens(link.reorder):
            return at_ns + 1 + self._up_to(link.reorder_ns)
        if at_ns > self._last_ns:
            self._last_ns = at_ns
        return self._last_ns

    def _happens(self, probability: float) -> bool:
        return self._draw() < int(probability * _TWO_64)

    def _up_to(self, most: int) -> int:
        return self._draw() * (most + 1) >> 64

    def _draw(self) -> int:
        if self._rng is None:
            stream = fnv1a_64(f"{self.source.name}\0{self.target.name}".encode())
            self._rng = SplitMix64(mix64(mix64(self._seed % _TWO_64) ^ stream))
        return self._rng.next_u64()
