"""Rounds with clients that come and go: the server holds no more at the end than before."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import pytest

from tests.chaos.cluster import Cluster, Owned

# Of the time, in which tables fill up to their bounds and the allocator finds its size.
WARM_UP_SHARE = 0.3
GROWTH = 1.05
MORE_FILES = 3
ROUNDS_S = 2.0


@pytest.mark.soak
def test_memory_does_not_grow(
    make_cluster: Callable[..., Cluster], pytestconfig: pytest.Config
) -> None:
    minutes = float(pytestconfig.getoption("--chaos-minutes"))
    cluster = make_cluster(every_s=0.02, deadline_s=2.0)
    cluster.start(*cluster.all)
    begun = time.monotonic()
    warm = begun + 60 * minutes * WARM_UP_SHARE
    early: list[Owned] = []
    late: list[Owned] = []
    turn = made = 0
    with cluster.events() as rounds:
        rounds.with_all()
        while time.monotonic() < begun + 60 * minutes or len(late) < 2:
            victim = cluster.clients[turn % len(cluster.clients)]
            turn += 1
            victim.kill()
            rounds.without(victim)
            cluster.start(victim)
            rounds.with_all()
            made += len(rounds.for_seconds(ROUNDS_S))
            # Everybody is connected here, every time: what differs is what was kept.
            owned = cluster.server.owned()
            if time.monotonic() > warm and len(early) < 5:
                early.append(owned)
            elif early:
                late.append(owned)
    before = statistics.median(each.rss_mb for each in early)
    after = statistics.median(each.rss_mb for each in late[-5:])
    print(
        f"{minutes:g} minutes, {made} rounds, {turn} clients killed and started: "
        f"RSS {before:.1f} to {after:.1f} MB, files {early[0].files} to {late[-1].files}"
    )
    assert after < before * GROWTH
    assert late[-1].files <= early[0].files + MORE_FILES
