"""Fault schedules, drawn from a seed.

Rule: a schedule is plain data and a pure function of the arguments of `draw_faults`; its text is
shown in reports. Every fault ends: a crashed node comes back, a cut heals, so the network has to
recover after `until_ns`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from bbnode.engine.errors import NodeBusy
from bbnode.engine.rng import SplitMix64, mix64
from bbnode.sim.models import MS, Clock, LinkModel

if TYPE_CHECKING:
    from bbnode.sim.network import Network

# Worse than the internet on a bad day.
_MAX_LATENCY_NS = 30 * MS
_MAX_JITTER_NS = 20 * MS
_MAX_PER_MILLE = 150  # of loss, duplication and reordering
_MAX_DRIFT_PPM = 1000  # ten times that of quartz
_MIN_OUTAGE_NS = 20 * MS


@dataclass(frozen=True, slots=True, kw_only=True)
class Save:
    """A node stores a snapshot for its next restart, unless it is busy."""

    at_ns: int
    node: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Crash:
    """A node dies, and restarts from the last `Save` (as a new one without any)."""

    at_ns: int
    node: str
    back_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """The nodes of two sides can't reach each other for a while."""

    at_ns: int
    side: tuple[str, ...]
    other: tuple[str, ...]
    heal_ns: int


Fault: TypeAlias = Save | Crash | Cut


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """A schedule of faults, and the permanent properties of links and clocks.

    `link` is for `Network(link=…)` and `clocks[name]` for `Network.add(clock=…)`; `schedule`
    plans the rest.
    """

    link: LinkModel
    clocks: Mapping[str, Clock] = field(default_factory=dict)
    events: tuple[Fault, ...] = ()

    def schedule(self, network: Network) -> None:
        """Plan all events on a network that has all the nodes."""
        for event in self.events:
            _plan(network, event)

    def lines(self) -> list[str]:
        """Return the faults, one line each, for a report."""
        return [str(self.link), *(str(event) for event in self.events)]


def draw_faults(
    seed: int,
    names: Sequence[str],
    *,
    until_ns: int,
    outages: int,
    immortal: Collection[str] = (),
) -> Faults:
    """Draw faults for nodes of these names.

    Args:
        seed: equal seeds (and arguments) draw equal faults.
        names: at least two.
        until_ns: the end of the last outage.
        outages: number of crashes and cuts, about half each; each crash has an earlier `Save`.
        immortal: names of nodes that do not crash.
    """
    rng = SplitMix64(mix64(seed % (1 << 64) ^ 0xFA17))

    def below(n: int) -> int:
        return rng.next_u64() * n >> 64

    def per_mille() -> float:
        return below(_MAX_PER_MILLE + 1) / 1000

    link = LinkModel(
        latency_ns=MS + below(_MAX_LATENCY_NS),
        jitter_ns=below(_MAX_JITTER_NS),
        loss=per_mille(),
        duplication=per_mille(),
        reorder=per_mille(),
        reorder_ns=MS + below(_MAX_JITTER_NS),
    )
    clocks = {
        name: Clock(drift_ppm=below(2 * _MAX_DRIFT_PPM + 1) - _MAX_DRIFT_PPM) for name in names
    }
    mortal = [name for name in names if name not in immortal]
    events: list[Fault] = []
    for _ in range(outages):
        at_ns = below(until_ns - _MIN_OUTAGE_NS)
        end_ns = at_ns + _MIN_OUTAGE_NS + below((until_ns - at_ns - _MIN_OUTAGE_NS) // 2 + 1)
        if mortal and below(2):
            node = mortal[below(len(mortal))]
            events.append(Save(at_ns=below(at_ns + 1), node=node))
            events.append(Crash(at_ns=at_ns, node=node, back_ns=end_ns))
            continue
        sides: tuple[list[str], list[str]] = ([], [])
        for name in names:
            sides[below(2)].append(name)
        if all(sides):
            side, other = (tuple(names) for names in sides)
            events.append(Cut(at_ns=at_ns, side=side, other=other, heal_ns=end_ns))
    return Faults(link=link, clocks=clocks, events=tuple(sorted(events, key=lambda e: e.at_ns)))


def _plan(network: Network, event: Fault) -> None:
    match event:
        case Save(at_ns=at_ns, node=node):
            network.at(at_ns, lambda: _save(network, node))
        case Crash(at_ns=at_ns, node=node, back_ns=back_ns):
            network.at(at_ns, lambda: network.crash(node))
            network.at(back_ns, lambda: network.restart(node))
        case Cut(at_ns=at_ns, side=side, other=other, heal_ns=heal_ns):
            network.at(at_ns, lambda: network.partition(side, other))
            network.at(heal_ns, lambda: _heal(network, side, other))


def _save(network: Network, name: str) -> None:
    node = network[name]
    if not node.is_up:
        return
    try:
        node.checkpoint()
    except NodeBusy:
        return  # it keeps its earlier snapshot


def _heal(network: Network, side: Sequence[str], other: Sequence[str]) -> None:
    for one in side:
        for another in other:
            network.heal(one, another)
