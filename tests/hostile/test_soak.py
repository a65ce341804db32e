"""Rounds with clients that come and go and an attacker that never rests: nothing grows."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable

import pytest

from tests.chaos.cluster import Cluster, Owned
from tests.hostile.stranger import attack

ATTACKS = (
    *("floods:garbage", "floods:frames", "floods:half", "floods:huge", "floods:flood"),
    *("strangers:lengths", "strangers:unread", "room:trickle", "room:undecodable"),
)
# Of the server, between the median of what it held after the first pass and after the last.
GROWTH = 1.10
MORE_FILES = 8


@pytest.mark.soak
def test_rounds_outlive_every_attack(
    make_cluster: Callable[..., Cluster], pytestconfig: pytest.Config
) -> None:
    minutes = float(pytestconfig.getoption("--chaos-minutes"))
    cluster = make_cluster(every_s=0.1)
    cluster.start(*cluster.all)
    pid = cluster.server.pid
    (address,) = cluster.server.get("status")["listen"]
    owned: list[Owned] = []
    made = 0
    end = time.monotonic() + 60 * minutes
    with cluster.events() as rounds:
        rounds.with_all()
        for turn, name in enumerate(itertools.cycle(ATTACKS)):
            # The first pass fills tables up to their bounds; the second is what is compared.
            if turn >= 2 * len(ATTACKS) and time.monotonic() > end:
                break
            victim = cluster.clients[turn % len(cluster.clients)]
            with attack(name, address) as process:
                victim.kill()
                rounds.without(victim)
                cluster.start(victim)
                while process.poll() is None:
                    rounds.next()
                    made += 1
            rounds.with_all()
            owned.append(cluster.server.owned())
    first, last = owned[: len(ATTACKS)], owned[-len(ATTACKS) :]
    before, after = (statistics.median(each.rss_mb for each in some) for some in (first, last))
    print(f"{made} rounds, {len(owned)} attacks: RSS {before:.1f} to {after:.1f} MB")
    assert cluster.server.pid == pid
    assert after < before * GROWTH
    assert last[-1].files <= first[0].files + MORE_FILES
