"""A host whose places are all taken by strangers that do not let go: its peers come in."""

from __future__ import annotations

import resource
import time

import pytest

from bbnode.transport.limits import TransportLimits
from bbnode.transport.links.admission import reserved
from tests.chaos.cluster import Cluster
from tests.hostile.stranger import attack
from tests.patience import PATIENCE_S

LIMITS = TransportLimits()
STRANGERS = LIMITS.max_connections - reserved(LIMITS)
# Two processes have a descriptor for each connection.
FILES = LIMITS.max_connections + 512


@pytest.mark.slow
@pytest.mark.skipif(
    resource.getrlimit(resource.RLIMIT_NOFILE)[1] < FILES, reason="too few files may be open"
)
def test_peers_come_back_to_a_full_host_and_new_ones_come_in(cluster: Cluster) -> None:
    back, new = cluster.clients[0], cluster.clients[-1]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, FILES), hard))
    try:
        cluster.start(*(each for each in cluster.all if each is not new))
        with cluster.events() as rounds:
            rounds.without(new)
            (address,) = cluster.server.get("status")["listen"]
            with attack("places:all_places", address) as process:
                end = time.monotonic() + 4 * PATIENCE_S
                while len(cluster.server.get("peers")["peers"]) < STRANGERS:
                    # Rounds go on while they come.
                    rounds.more(1)
                    assert time.monotonic() < end
                    assert process.poll() is None
                # A round that waits for it has too few answers.
                cluster.may_fail = True
                back.kill()
                cluster.start(back, new)
                made = rounds.with_all()
                assert {back.peer, new.peer} <= set(made["responded"])
                assert len(cluster.server.get("peers")["peers"]) >= STRANGERS
                rounds.with_all()
                process.terminate()
                process.wait()
                process.returncode = 0
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
