"""Members that lie: the model is that of the others, and everybody sees who it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.chaos.cluster import Cluster, Daemon
from tests.hostile.members import ARTIFACT_VARIABLE, FALSE_SERVER, LIES, LYING_CLIENT, TIMES
from tests.hostile.stranger import attack, identity_of
from tests.patience import PATIENCE_S


@pytest.fixture
def known(
    make_cluster: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch
) -> Callable[[int], Cluster]:
    """Make a cluster of so many clients, whose program its attackers have."""

    def make(clients: int) -> Cluster:
        cluster = make_cluster(clients=clients)
        monkeypatch.setenv(ARTIFACT_VARIABLE, str(cluster.artifact))
        return cluster

    return make


def test_a_client_that_lies_is_named_and_the_model_is_that_of_the_others(
    known: Callable[[int], Cluster],
) -> None:
    cluster = known(3)
    who = str(identity_of(LYING_CLIENT).peer_id)
    cluster.start(cluster.server, *cluster.clients[:2])
    (address,) = cluster.server.get("status")["listen"]
    # Each round that ends is checked by its exact weights: see `Rounds`.
    with cluster.events() as rounds, attack("members:lying_client", address) as process:
        lied: list[dict[str, Any]] = []
        while len(lied) < len(LIES):
            made = rounds.next()
            lied += [made] if who in made["responded"] else []
        assert process.wait(PATIENCE_S) == 0
    with cluster.events() as rounds:
        last = rounds.more(2)
    assert last["ok"]
    assert who not in last["responded"]
    for (name, (_, reason)), made in zip(LIES.items(), lied, strict=True):
        stats = made["outputs"]["stats"]
        assert who in made["responded"], name
        assert (stats["contributors"], stats["refused"]) == (2, 1), name
        assert stats["refused_why"].startswith(f"{who}: "), name
        assert reason in stats["refused_why"], name
        # A shape is judged in a worker thread here, in comparison with the others.
        assert list(made["refused"]) == ([] if name == "shape" else [who]), name


def test_only_the_server_has_a_client_train(known: Callable[[int], Cluster]) -> None:
    cluster = known(1)
    (client,) = cluster.clients
    cluster.start(*cluster.all)
    with cluster.events() as rounds:
        rounds.with_all()
    (address,) = client.get("status")["listen"]
    with client.control() as control:
        heard = control.stream("/v1/events", {"type": ["wire_receive_failed"]})
        with attack("members:false_server", address) as process:
            refused = [next(heard)["event"] for _ in range(TIMES)]
            assert process.wait(PATIENCE_S) == 0
    with cluster.events() as rounds:
        assert len(rounds.more(3)["responded"]) == len(cluster.clients)
    assert {each["peer"] for each in refused} == {str(identity_of(FALSE_SERVER).peer_id)}
    assert {each["kind"] for each in refused} == {"SenderNotOfClass"}
    assert all("takes from server, the peer plays client" in each["detail"] for each in refused)
    assert _metric(client, "bbnode_receive_failures_total", "SenderNotOfClass") == TIMES


def _metric(daemon: Daemon, name: str, label: str) -> float:
    with daemon.control() as control:
        _, page = control.fetch("GET", "/metrics")
    (line,) = (
        line
        for line in page.decode().splitlines()
        if line.startswith(f"{name}{{") and label in line
    )
    return float(line.rsplit(" ", 1)[1])
