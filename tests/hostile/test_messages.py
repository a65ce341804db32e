"""A member whose answers are made to end the node that asked, or to keep it from its work."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.chaos.cluster import Cluster
from tests.hostile.messages import ARTIFACT_VARIABLE, liar_ids
from tests.hostile.stranger import attack


def test_no_answer_ends_the_server_or_its_rounds(
    make_cluster: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The right answer comes behind all bad ones, and is taken: what is refused harms nothing."""
    cluster = make_cluster(clients=2, deadline_s=2.0)
    monkeypatch.setenv(ARTIFACT_VARIABLE, str(cluster.artifact))
    cluster.start(cluster.server, cluster.clients[0])
    pid = cluster.server.pid
    (address,) = cluster.server.get("status")["listen"]
    with cluster.events() as rounds, attack("messages:bad_answers", address) as process:
        left = liar_ids()
        while process.poll() is None:
            left -= set(rounds.next()["responded"])
    assert not left
    assert cluster.server.pid == pid
    assert cluster.server.process is not None
    assert cluster.server.process.poll() is None
    assert "Traceback" not in cluster.server.log
