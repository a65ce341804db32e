"""Invariants that hold in every network, whatever its program and its faults.

Rule: checks run between events, use only the nodes' public entry points, change nothing, and raise
InvariantBroken with the fault, the node and the time.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Final

from bbnode.sim.errors import InvariantBroken

if TYPE_CHECKING:
    from bbnode.sim.network import Network
    from bbnode.sim.node import SimNode

# Gauges of `Node.counters` that are 0 when a node is idle. State that a program keeps on purpose
# (queues, holds, timers of an Interval) and known peers are not among them.
AT_REST: Final = ("executions.live", "ops.parked", "requests.open", "ingress.bytes", "bus.waiting")

# Gauges of the state that a node holds.
TABLES: Final = (*AT_REST, "timers", "queues.values", "holds.values", "peers.known")


def require(condition: object, what: str) -> None:
    """Raise InvariantBroken unless the condition holds."""
    if not condition:
        raise InvariantBroken(what)


def check_waits(network: Network) -> None:
    """Check that nothing waits past its deadline, and that every execution waits for something.

    Call it after all events up to the present have run, as after `Network.run`.
    """
    for node in network.nodes:
        if not node.is_up:
            continue
        local_ns = node.clock.local_ns(network.now_ns)
        waiting = node.waiting()
        for entry in waiting:
            # A thread cannot be cancelled: its op has failed, but its component is still in use.
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
    """Check that idle nodes hold no state of finished work."""
    for node in network.nodes:
        if not node.is_up:
            continue
        counters = node.counters()
        left = {name: counters[name] for name in AT_REST if counters.get(name)}
        require(not left, f"{_at(network, node)}: nothing is to be done, and there is {left}")


def check_failures(network: Network, allowed: Collection[str]) -> None:
    """Check that ops fail only in the `allowed` ways, which the faults explain."""
    for node in network.nodes:
        for failed in node.failures():
            require(
                failed.kind in allowed,
                f"{_at(network, node)}: {failed}; "
                f"only {', '.join(sorted(allowed))} can happen here",
            )


def table_sizes(network: Network) -> Mapping[str, int]:
    """Return the largest size of each table over all running nodes."""
    counters = [node.counters() for node in network.nodes if node.is_up]
    return {name: max((c.get(name, 0) for c in counters), default=0) for name in TABLES}


def _at(network: Network, node: SimNode) -> str:
    return f"{node.name} at {network.now_ns} ns"
