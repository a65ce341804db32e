"""One simulated peer: a real node, its steps, and its connections.

Rule: only its network drives the node; the methods here use its entry points, as a host does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

from multiaddr import Multiaddr

from bbnode.engine import Node, steps
from bbnode.engine.rng import SplitMix64, mix64
from bbnode.ir.ids import fnv1a_64
from bbnode.ir.peer import PeerId
from bbnode.ir.values import Value
from bbnode.sim.errors import NodeIsDown
from bbnode.sim.models import Clock, LinkModel

_TWO_64: Final = 1 << 64

# Steps kept per node by default, without envelopes and tasks.
KEPT_STEPS = 10_000

Kind = TypeVar("Kind")


class SimNode:
    """A peer of a `Network`; made by `Network.add`.

    Attributes:
        name: unique in its network; the PeerId and all draws follow from it.
        peer_id: of the node.
        address: the address that it claims.
        clock: the node's clock.
        task_ns: how long offloaded work takes on it, in its network's time.
    """

    def __init__(
        self,
        name: str,
        *,
        address: Multiaddr,
        peer_id: PeerId,
        clock: Clock,
        task_ns: int,
        kept_steps: int,
        now_ns: Callable[[], int],
        bring_up: Callable[[int], Node],
    ) -> None:
        self.name = name
        self.peer_id = peer_id
        self.address = address
        self.clock = clock
        self.task_ns = task_ns
        # Kept by the network: the connections, when it is polled next, and the time
        # for which the agenda has a wakeup of it already.
        self.wires: dict[PeerId, Wire] = {}
        self.wake_ns: int | None = None
        self.planned_ns: int | None = None
        self.life = 0
        self._now_ns = now_ns  # of the network
        self._bring_up = bring_up
        self._saved: bytes | None = None
        self._steps: deque[tuple[int, steps.Step]] = deque(maxlen=kept_steps)
        self._node: Node | None = bring_up(1)
        self._incarnation = self._node.incarnation
        self._classes = self._node.classes

    def __repr__(self) -> str:
        return f"SimNode({self.name!r}, {', '.join(self._classes)})"

    # -- the node ----------------------------------------------------------------------------

    @property
    def node(self) -> Node:
        """The engine's node; NodeIsDown while it is crashed."""
        if self._node is None:
            raise NodeIsDown(f"{self.name} is crashed; call Network.restart({self.name!r}) first")
        return self._node

    @property
    def is_up(self) -> bool:
        """True while it runs."""
        return self._node is not None

    @property
    def classes(self) -> tuple[str, ...]:
        """The classes that it plays."""
        return self._classes

    def invoke(self, target: str, inputs: Mapping[str, Value]) -> int:
        """Start an execution at the next poll and return its id; raises as `Node.invoke`."""
        return self.node.invoke(target, inputs)

    def deliver_event(self, target: str, input: str, value: Value) -> int:  # noqa: A002
        """Start an execution with one input and return its id. Raises as `Node.deliver_event`."""
        return self.node.deliver_event(target, input, value)

    def checkpoint(self) -> None:
        """Keep a snapshot for `Network.restart`. Raises NodeBusy while a component works."""
        self._saved = self.node.snapshot(self.clock.local_ns(self._now_ns()))

    def component(self, slot: str) -> Any:
        """Return the component of a slot, to be looked at; a restart makes a new one.

        Raises UnknownSlot, or NodeIsDown.
        """
        return self.node.component(slot)

    # -- its steps ---------------------------------------------------------------------------

    def seen(self, kind: type[Kind]) -> list[Kind]:
        """Return the kept steps of one class, oldest first."""
        return [step for _, step in self._steps if isinstance(step, kind)]

    def history(self) -> list[tuple[int, steps.Step]]:
        """Return all kept steps with the network's time, oldest first."""
        return list(self._steps)

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
        """Keep a step to be looked at."""
        self._steps.append((at_ns, step))

    def go_down(self) -> None:
        """Drop everything but the last checkpoint."""
        self._node = None
        self.wake_ns = self.planned_ns = None
        self.life += 1

    def come_up(self) -> None:
        """Install anew, as the next incarnation, from the last checkpoint."""
        node = self._bring_up(self._incarnation + 1)
        if self._saved is not None:
            node.restore(self._saved)
        self._node = node
        self._incarnation = node.incarnation
        self.life += 1


class Wire:
    """One direction between two nodes.

    It draws from a stream of its own, a function of the network's seed and the two names; so it
    does not depend on other nodes. It keeps the order of envelopes, as the streams of a real
    connection do, unless its link reorders.

    `wanted`: somebody connected them; `cut`: the network keeps them apart; `up`: connected now.
    Envelopes of an earlier `session` never arrive: they were lost with its connection.
    """

    __slots__ = ("_last_ns", "_rng", "cut", "link", "session", "source", "target", "up", "wanted")

    def __init__(self, source: SimNode, target: SimNode, link: LinkModel, seed: int) -> None:
        self.source = source
        self.target = target
        self.link = link
        self.session = 0
        self.up = False
        self.wanted = False
        self.cut = False
        self._last_ns = 0
        stream = fnv1a_64(f"{source.name}\0{target.name}".encode())
        self._rng = SplitMix64(mix64(mix64(seed % _TWO_64) ^ stream))

    def arrivals(self, now_ns: int) -> list[int]:
        """Return when an envelope that is sent now arrives: never, once, or twice."""
        # A fault that a link does not have costs no draw: links without faults are the rule.
        link = self.link
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
        return self._rng.next_u64() < int(probability * _TWO_64)

    def _up_to(self, most: int) -> int:
        return self._rng.next_u64() * (most + 1) >> 64
