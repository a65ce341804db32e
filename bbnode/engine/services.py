"""The services of one node that its ops use.

Rule: ops share their plan with other nodes, and so reach everything of their own node through
`frame.rt`. Only ops and the code that composes a node use it; a table gets the few services that it
needs as arguments.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Protocol

from bbnode.components.contracts import HostSecrets
from bbnode.engine.cells import ComponentCell
from bbnode.engine.clock import NodeClock
from bbnode.engine.cohorts import Cohorts
from bbnode.engine.executor import Executor
from bbnode.engine.frame import Frame, Op
from bbnode.engine.ingress import Ingress
from bbnode.engine.joins import Joins
from bbnode.engine.latches import Latches
from bbnode.engine.messaging.actions import Action
from bbnode.engine.messaging.pending import ComponentTimers, PendingCalls
from bbnode.engine.peers.neighbours import Neighbours
from bbnode.engine.peers.round_trips import RoundTrips
from bbnode.engine.reports import Reports
from bbnode.engine.rng import SplitMix64
from bbnode.engine.stores import Records, Stores
from bbnode.engine.suspensions import Suspensions
from bbnode.engine.wire.decoder import Decoder
from bbnode.engine.wire.inbound import InboundDedup
from bbnode.engine.wire.outbound import EnvelopeOutbox
from bbnode.ir.values import Value


class RunnableGraph(Protocol):
    """A graph that a backend has prepared."""

    run: Callable[[Sequence[Value]], Sequence[Value]]

    def run_singly(
        self, inputs: Sequence[Value], error: BaseException | None = None
    ) -> tuple[list[Value], list[tuple[int, BaseException]]]:
        """Run its ops one by one; returns outputs, and the ops that failed."""

    def lost_outputs(self, inputs: Sequence[Value]) -> list[bool]:
        """Return for each output if it needs an input that is MISSING."""


class Services(ABC):
    """The services that ops of one node reach as `frame.rt`."""

    __slots__ = ()

    cells: tuple[ComponentCell, ...]
    graphs: tuple[RunnableGraph, ...]
    clock: NodeClock
    reports: Reports
    ingress: Ingress
    executor: Executor
    suspensions: Suspensions
    neighbours: Neighbours
    decoder: Decoder
    dedup: InboundDedup
    round_trips: RoundTrips
    outbound: EnvelopeOutbox
    cohorts: Cohorts
    calls: PendingCalls
    timers: ComponentTimers
    stores: Stores
    joins: Joins
    latches: Latches
    records: Records
    rng: SplitMix64
    wire_ids: SplitMix64
    secrets: HostSecrets | None  # None: a replay, whose results come from the record

    @abstractmethod
    def carry_out(self, cell_at: int, frame: Frame, op: Op, actions: Sequence[Action]) -> None:
        """Carry out what a component's method asked for."""
