"""A client that is restarted in the middle of a round: the server hears what became of its request.

Rule: no deadline and no grace ends these rounds, which have ten minutes.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import pytest

from tests.chaos.cluster import Cluster
from tests.patience import PATIENCE_S

LONG_MS = 600_000


def patient(make_cluster: Callable[..., Cluster]) -> Cluster:
    cluster = make_cluster(
        deadline_s=LONG_MS / 1000, limits={"lost_peer_grace_ms": LONG_MS, "bus_events": 1024}
    )
    cluster.start(*cluster.all)
    return cluster


def reasons(cluster: Cluster, number: int) -> dict[str, Any]:
    """Why the peers that are missing from a round are."""
    with cluster.server.control() as client:
        rounds = client.get("/v1/rounds", {"last": 200})["rounds"]
    (made,) = (each for each in rounds if each["round"] == number)
    return dict(made["missing_why"])


def test_a_request_that_a_killed_client_lost_ends_at_once(
    make_cluster: Callable[..., Cluster],
) -> None:
    cluster = patient(make_cluster)
    victim = cluster.clients[0]
    with cluster.events() as rounds:
        rounds.with_all()
        # It has the request, and no checkpoint with it.
        with cluster.gates.hold("train", victim.name):
            victim.kill()
        cluster.start(victim)
        told = rounds.without(victim)
        assert reasons(cluster, told["round"])[victim.peer].startswith("PeerRestarted")
        assert told["seconds"] < PATIENCE_S
        rounds.with_all()


def test_a_client_that_goes_on_from_its_snapshot_is_waited_for(
    make_cluster: Callable[..., Cluster],
) -> None:
    cluster = patient(make_cluster)
    victim = cluster.clients[0]
    with cluster.events() as rounds:
        rounds.with_all()
        with cluster.gates.hold("train", victim.name):
            with victim.control() as client:
                client.post("/v1/snapshot", {})
            victim.kill()
        (made,) = cluster.server.get("rounds")["invoke"]
        cluster.start(victim)
        told = rounds.more(1)
        assert victim.peer in told["responded"], told
        assert told["round"] >= made["done"]
        rounds.with_all()
    assert "PeerRestarted" not in cluster.server.log


@pytest.mark.slow
def test_a_client_that_is_stopped_in_order_is_waited_for(
    make_cluster: Callable[..., Cluster],
) -> None:
    cluster = patient(make_cluster)
    victim = cluster.clients[0]
    with cluster.events() as rounds:
        rounds.with_all()
        with cluster.gates.hold("train", victim.name):
            victim.signal(signal.SIGTERM)
            victim.wait_ended(PATIENCE_S)
        cluster.start(victim)
        assert victim.peer in rounds.more(1)["responded"]
        rounds.with_all()
    assert "PeerRestarted" not in cluster.server.log
