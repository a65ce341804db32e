"""What a host may see of a node: everything here only looks.

Rule: copies and immutable things, in the host's time; nothing changes by being looked at.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from bbnode.engine.bootstrap.bootstraps import Bootstraps
from bbnode.engine.bootstrap.targets import BootstrapInfo, BootstrapStatus
from bbnode.engine.clock import NodeClock
from bbnode.engine.parking import Waiting, Why
from bbnode.engine.peers.neighbours import PeerStanding
from bbnode.engine.peers.round_trips import RoundTrip
from bbnode.engine.requests import Cohort
from bbnode.engine.runtime import Runtime
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


class NodeViews:
    """The part of a `Node` that shows its state."""

    def __init__(self, rt: Runtime, bootstraps: Bootstraps, clock: NodeClock) -> None:
        self._rt = rt
        self._bootstraps = bootstraps
        self._clock = clock

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
            "calls.open": len(rt.control.calls),
            "executions.in_line": len(rt.turns),
            "timers.components": len(rt.control.timers),
            "records": len(rt.records),
            "round_trips": len(rt.round_trips),
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
                started_ns=self._clock.host_ns(frame.started_ns),
                deadline_ns=None
                if frame.deadline_ns is None
                else self._clock.host_ns(frame.deadline_ns),
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
            missing = _missing(cohort) if cohort else parked.whom
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
        found += rt.control.waiting() + rt.turns.waiting() + self._bootstraps.waiting()
        host_ns = self._clock.host_ns
        return [
            replace(w, since_ns=host_ns(w.since_ns), until_ns=host_ns(w.until_ns)) for w in found
        ]

    def bootstrap_status(self, name: str | None = None) -> BootstrapStatus:
        """How a bootstrap stands: of a Module, of a component (`slot:<slot>`), or all together.

        Raises UnknownTarget.
        """
        return self._bootstraps.status(name)

    def bootstraps(self) -> list[BootstrapInfo]:
        """All bootstraps of this node, in the order in which `All` runs them."""
        return self._bootstraps.infos()

    def round_trips(self) -> list[RoundTrip]:
        """What is known of how long requests take, by the site that they go to."""
        return self._rt.round_trips.all()

    def connected_peers(self, peer_class: str | None = None) -> Sequence[PeerId]:
        """Peers that can be used now, in PeerId order; of one class if given."""
        return self._rt.neighbours.view(self._rt.now_ns).connected(peer_class)

    def peer_standing(self, peer: PeerId) -> PeerStanding:
        """What this node thinks of a peer, known or not (on the polling thread)."""
        return self._rt.neighbours.standing(peer, self._rt.now_ns)

    def records(self, name: str | None = None) -> list[tuple[int, int, str, Value]]:
        """What Record kept, oldest first: (the node's own time, execution, name, value)."""
        return [row for row in self._rt.records.rows() if name is None or row[2] == name]


def _missing(cohort: Cohort) -> str:
    """Who has not answered; of whom could not be sent to, why."""
    why = {peer: f" (not sent: {reason})" for peer, reason in cohort.unsent.items()}
    return ", ".join(f"{peer}{why.get(peer, '')}" for peer in cohort.missing)
