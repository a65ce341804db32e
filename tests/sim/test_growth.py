"""Nothing grows: neither over many rounds, nor with the number of nodes more than it has to.

Rule: sizes are compared at barriers, where every node is idle, after as many rounds as fill
whatever is bounded (the dedup window holds 8,192 names). A block is one of Python's own memory
blocks (`sys.getallocatedblocks`); arrays and protobufs are seen by RSS only.
"""

from __future__ import annotations

import gc
import sys

import psutil
import pytest

from bbnode.ir.values import TRIGGER
from bbnode.sim import MS, LinkModel, Network, Trace
from bbnode.sim.invariants import AT_REST, check_at_rest, check_waits, table_sizes
from tests.sim import gossip as averaging
from tests.sim import programs, scenarios

MIB = 1 << 20


def blocks() -> int:
    gc.collect()
    return sys.getallocatedblocks()


def rounds(network: Network, ledger: scenarios.Ledger, count: int) -> None:
    """Rounds of the federated program one by one, each judged by its ledger and forgotten."""
    for _ in range(count):
        ledger.begin()
        network.run_until_idle()
        assert all(ledger.ended[execution] for execution in ledger.asked_ns)
        ledger.forget()


def lossy_federated() -> tuple[Network, scenarios.Ledger]:
    """Answers come twice and out of order; now and then one is missing at the deadline."""
    link = LinkModel(latency_ns=MS, jitter_ns=2 * MS, duplication=0.2, reorder=0.2, loss=0.01)
    network, _, ledger = scenarios.build_federated(1, Trace(kept=10), link, {}, kept_steps=10)
    return network, ledger


def gossip(peers: int = 4) -> Network:
    link = LinkModel(latency_ns=MS, jitter_ns=2 * MS, duplication=0.2, reorder=0.2, loss=0.05)
    network = Network(1, link=link, trace=Trace(kept=10), kept_steps=10)
    for i in range(peers):
        averaging.add_peer(network, i, (float(i),))
    return network


def test_federated_rounds_leave_nothing_behind() -> None:
    network, ledger = lossy_federated()
    rounds(network, ledger, 20)
    tables, before = table_sizes(network), blocks()
    rounds(network, ledger, 200)
    check_waits(network)
    check_at_rest(network)
    assert table_sizes(network) == tables
    # 200 names in each of four dedup windows and in the server's own: some 4 blocks each.
    assert blocks() - before < 6_000


def test_gossip_leaves_nothing_behind() -> None:
    network = gossip()
    period_ns = averaging.PERIOD_NS
    network.run(until=100 * period_ns + period_ns // 2)
    tables, before = table_sizes(network), blocks()
    network.run(until=400 * period_ns + period_ns // 2)
    check_waits(network)
    assert table_sizes(network) == tables
    assert {tables[name] for name in AT_REST} == {0}
    assert blocks() - before < 6_000  # 300 names in each of four dedup windows


@pytest.mark.soak
def test_federated_rounds_do_not_grow_memory_over_10_000() -> None:
    network, ledger = lossy_federated()
    rounds(network, ledger, 9_000)
    tables, before, rss = table_sizes(network), blocks(), psutil.Process().memory_info().rss
    rounds(network, ledger, 10_000)
    check_waits(network)
    check_at_rest(network)
    assert table_sizes(network) == tables
    assert blocks() - before < 1_000
    assert psutil.Process().memory_info().rss - rss < 16 * MIB


@pytest.mark.soak
def test_gossip_does_not_grow_memory_over_10_000_rounds() -> None:
    network = gossip()
    period_ns = averaging.PERIOD_NS
    network.run(until=9_000 * period_ns + period_ns // 2)
    tables, before, rss = table_sizes(network), blocks(), psutil.Process().memory_info().rss
    network.run(until=19_000 * period_ns + period_ns // 2)
    check_waits(network)
    assert table_sizes(network) == tables
    assert blocks() - before < 1_000
    assert psutil.Process().memory_info().rss - rss < 16 * MIB


# --- many nodes ----------------------------------------------------------------------------


def asked_by_one(workers: int) -> Network:
    """One node asks all others, by connections of its own.

    Answers come one after the other: a node takes 4,096 events between two polls at most.
    """
    link = LinkModel(latency_ns=MS, jitter_ns=100 * MS)
    network = Network(link=link, mesh=False, trace=Trace(kept=10))
    asker = network.add("asker", programs.rounds(quorum=0), ["server"])
    for i in range(workers):
        network.add(f"worker-{i}", programs.rounds(quorum=0), ["client"])
        network.connect(asker, f"worker-{i}")
    network.run_until_idle()
    execution = asker.invoke("server", {"tick": TRIGGER})
    network.run_until_idle()
    assert len(asker.outputs(execution)["answers"].responses) == workers
    return network


@pytest.mark.parametrize("workers", [1, 30, 300])
def test_a_network_of_any_size_answers(workers: int) -> None:
    network = asked_by_one(workers)
    check_at_rest(network)
    assert network.trace.digest == asked_by_one(workers).trace.digest


@pytest.mark.slow
def test_a_network_of_10_000_nodes_answers() -> None:
    check_at_rest(asked_by_one(9_999))
