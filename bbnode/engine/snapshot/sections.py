"""What a node's state consists of: every table, by the name under which it is saved.

Rule: the order is that of loading. Timers and frames come first, others refer to them; lines
come to be with the parked ops that stand in them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from bbnode.engine.frame import EntryPlan
from bbnode.engine.planning.sites import RecvSite
from bbnode.engine.snapshot.events import IngressTable
from bbnode.engine.snapshot.frames import FrameTable

if TYPE_CHECKING:
    from bbnode.engine.bootstrap.bootstraps import Bootstraps
    from bbnode.engine.planning.program import Program
    from bbnode.engine.runtime import Runtime
    from bbnode.engine.snapshot.codec import LoadedNames, SavedNames
    from bbnode.engine.sources import Dispatch


class Table(Protocol):
    """Something that outlives a poll."""

    def state(self, names: SavedNames) -> Any:
        """Plain data."""

    def load(self, plain: Any, names: LoadedNames) -> None:
        """Take up what `state` gave."""


def tables_of(
    rt: Runtime, ingress: IngressTable, dispatch: Dispatch, bootstraps: Bootstraps
) -> dict[str, Table]:
    """All tables of a node."""
    return {
        "timers": rt.scheduler,
        "frames": FrameTable(rt),
        "runtime": rt,
        "parked": rt.parking,
        "requests": rt.cohorts,
        "bootstraps": bootstraps,
        "booting": dispatch,
        "stores": rt.stores,
        "bus": rt.bus,
        "dedup": rt.dedup,
        "addresses": rt.neighbours.book,
        "backoff": rt.neighbours.backoff,
        "governor": rt.neighbours.governor,
        "peers": rt.neighbours.peers,
        "outbound": rt.outbound,
        "round_trips": rt.round_trips,
        "control": rt.control,
        "turns": rt.turns,
        "records": rt.records,
        "ingress": ingress,
    }


def plans_of(program: Program, rt: Runtime, bootstraps: Bootstraps) -> list[EntryPlan]:
    """All plans that an execution may follow, in an order that is the program's."""
    found: dict[int, EntryPlan] = {}
    plans = [
        *(plan for t in program.targets for plan in (t.invoke, *t.events.values())),
        *(site.plan for site in program.sites.values() if isinstance(site, RecvSite)),
        *(source.plan for source in program.sources),
        *bootstraps.plans(),
        *rt.control.plans,
        rt.decoder.plan,
    ]
    for plan in plans:
        found.setdefault(id(plan), plan)
    return list(found.values())
