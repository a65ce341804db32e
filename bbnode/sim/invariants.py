"""Invariants: they hold in every network, whatever its program and its faults.

Rule: checks run between events, use only the nodes' public entry points, change nothing, and raise
InvariantBroken that says what, where and when.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Final

from bbnode.sim.errors import InvariantBroken

if TYPE_CHECKING:
    from bbnode.sim.network import Network
    from bbnode.sim.node import SimNode

# Gauges of `Node.counters` that are 0 when a node has nothing to do. What a program keeps on
# purpose (queues, holds, timers of an Interval) and the peers it knows are not among them.
AT_REST: Final = ("executions.live", "ops.parked", "requests.open", "ingress.bytes", "bus.waiting")

# Those whose size is what a node holds at a time.
TABLES: Final = (*AT_REST, "timers", "queues.values", "holds.values", "peers.known")


def require(condition: object, what: str) -> None:
    """Raise InvariantBroken unless the condition holds."""
    if not condition:
        raise InvariantBroken(what)


def check_waits(network: Network) -> None:
    """Nothing waits past its deadline, and every execution under way waits for something.

    Call it when all events up to now have been run, as after `Network.run`.
    """
    for node in network.nodes:
        if not node.is_up:
            continue
        local_ns = node.clock.local_ns(network.now_ns)
        waiting = node.waiting()
        for entry in waiting:
            # A thread cannot be taken back: its op has failed, its component is still held.
            abandoned = entry.why.endswith("(given up)")
            require(
                abandoned or entry.until_ns > local_ns,
                f"{_at(network, node)}: {entry.what} waits for {entry.whom} ({entry.why}) since "
                f"{entry.since_ns} ns, and its deadline was {entry.until_ns} ns by its clock, "
                f"which shows {local_ns} ns",
            )
        busy = {entry.execution for entry in waiting}
        for info in node.executions():
            require(
                info.execution in busy,
                f"{_at(network, node)}: execution {info.execution} of {info.target} "
                f"({info.entry}) is under way since {info.started_ns} ns and waits for nothing",
            )


def check_at_rest(network: Network) -> None:
    """Nodes that have nothing to do hold nothing of what they did."""
    for node in network.nodes:
        if not node.is_up:
            continue
        counters = node.counters()
        left = {name: counters[name] for name in AT_REST if counters.get(name)}
        require(not left, f"{_at(network, node)}: nothing is to be done, and there is {left}")


def check_failures(network: Network, allowed: Collection[str]) -> None:
    """Ops fail in the ways that the faults explain, and in no other."""
    for node in network.nodes:
        for failed in node.failures():
            require(
                failed.kind in allowed,
                f"{_at(network, node)}: {failed}; "
                f"only {', '.join(sorted(allowed))} can happen here",
            )


def table_sizes(network: Network) -> Mapping[str, int]:
    """Return the largest size of each table over all nodes that run."""
    counters = [node.counters() for node in network.nodes if node.is_up]
    return {name: max((c.get(name, 0) for c in counters), default=0) for name in TABLES}


def _at(network: Network, node: SimNode) -> str:
    return f"{node.name} at {network.now_ns} ns"
