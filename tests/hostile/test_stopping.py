"""Stopping when something is in the way: peers that take nothing, a component that stands still,
a machine with more to do than it can.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import pytest

from bbnode.daemon.lifecycle.stopping import NOT_SAVED
from tests.chaos.cluster import Cluster
from tests.patience import PATIENCE_S

GRACE_S = 5.0
# For a turn on a machine that does much else.
MARGIN_S = 15.0


@pytest.mark.slow
def test_what_peers_do_not_take_is_kept_and_sent_again(
    make_cluster: Callable[..., Cluster],
) -> None:
    """The clients hang when a round begins, and never read it: it ends well all the same, when
    they and the server have been started again.
    """
    cluster = make_cluster(deadline_s=PATIENCE_S)
    cluster.start(*cluster.all)
    with cluster.events() as rounds:
        rounds.with_all()
        for client in cluster.clients:
            client.signal(signal.SIGSTOP)
        # What begins now reaches nobody.
        asked = rounds.until("round_started")
        cluster.server.signal(signal.SIGTERM)
    began_s = time.monotonic()
    assert cluster.server.wait_ended(PATIENCE_S) == 0
    assert time.monotonic() - began_s < GRACE_S + MARGIN_S
    assert "not acknowledged, kept for the next start" in cluster.server.log
    for client in cluster.clients:
        client.kill()
    cluster.start(cluster.server)
    with cluster.events() as rounds:
        cluster.start(*cluster.clients)
        made = rounds.until("round_finished", round=asked["round"])
    assert made["ok"]
    assert len(made["responded"]) == len(cluster.clients)


@pytest.mark.slow
def test_a_component_that_stands_still(make_cluster: Callable[..., Cluster]) -> None:
    """Its state cannot be had; the process ends all the same."""
    cluster = make_cluster(clients=1)
    cluster.start(*cluster.all)
    with cluster.events() as rounds:
        rounds.with_all()
    with cluster.gates.hold("save", "server"):
        cluster.server.signal(signal.SIGTERM)
        assert cluster.server.wait_ended(PATIENCE_S) == NOT_SAVED
    assert "stop took too long, leaving" in cluster.server.log


@pytest.mark.slow
def test_many_on_a_busy_machine(make_cluster: Callable[..., Cluster]) -> None:
    cluster = make_cluster(clients=7)
    cluster.start(*cluster.all)
    with cluster.events() as rounds:
        rounds.with_all()
    busy = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"])
        for _ in range(4 * (os.cpu_count() or 1))
    ]
    try:
        for daemon in cluster.all:
            daemon.signal(signal.SIGTERM)
        began_s = time.monotonic()
        codes = {daemon.name: daemon.wait_ended(PATIENCE_S) for daemon in cluster.all}
        assert time.monotonic() - began_s < GRACE_S + MARGIN_S
    finally:
        for process in busy:
            process.kill()
            process.wait()
    assert set(codes.values()) == {0}, codes
