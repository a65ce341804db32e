"""Peers that take room and give nothing for it: others have theirs, and who floods is cut off."""

from __future__ import annotations

from typing import Any

import pytest

from tests.chaos.cluster import Rounds
from tests.hostile.room import HOLDERS
from tests.hostile.stranger import attack, identity_of

# Weights of a round: an envelope in one frame, or 1 MiB in chunks.
SIZES = [pytest.param(4, marks=pytest.mark.slow), 2**18]
MOST_LOG_CHARS = 200_000
# Queues and arenas; not the 256 MiB that are announced.
MORE_RSS_MB = 60.0


@pytest.mark.parametrize("size", SIZES)
def test_large_messages_that_never_come_stop_nobody(make_cluster: Any, size: int) -> None:
    cluster = make_cluster(size=size)
    cluster.start(*cluster.all)
    with cluster.events() as rounds:
        begun = rounds.with_all()["round"]
        before = cluster.server.owned()
        (address,) = cluster.server.get("status")["listen"]
        with attack("room:trickle", address) as process:
            _until_received(cluster, rounds)
            during = []
            while process.poll() is None:
                during.append(rounds.next())
        assert during[-1]["round"] >= begun + 3
        assert all(len(each["responded"]) == len(cluster.clients) for each in during)
        after = cluster.server.owned()
        assert after.rss_mb <= before.rss_mb + MORE_RSS_MB


def _until_received(cluster: Any, rounds: Rounds) -> None:
    """Until all of them have begun: else there is nothing to withstand."""
    while True:
        rounds.next()
        if len(cluster.server.get("peers")["peers"]) >= HOLDERS + len(cluster.clients):
            return


def test_who_sends_rubbish_is_cut_off_and_kept_out(make_cluster: Any) -> None:
    cluster = make_cluster()
    cluster.start(*cluster.all)
    stranger = str(identity_of(103).peer_id)
    with cluster.events() as rounds, cluster.server.control() as client:
        begun = rounds.with_all()["round"]
        cut_off = client.stream("/v1/events", {"type": ["peer_cut_off"]})
        (address,) = cluster.server.get("status")["listen"]
        with attack("room:undecodable", address) as process:
            during = [rounds.next()]
            while process.poll() is None:
                during.append(rounds.next())
            assert process.returncode == 0, "it was not cut off, or was let in again"
        during.append(rounds.more(1))
        assert during[-1]["round"] > begun
        assert all(len(each["responded"]) == len(cluster.clients) for each in during)
        event = next(iter(cut_off))["event"]
        assert event["peer"] == stranger
        assert "undecodable" in event["reason"]
        assert len(cluster.server.log) < MOST_LOG_CHARS
        assert cluster.server.log.count("peer cut off") == 1
