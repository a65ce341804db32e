"""Real daemons: what dies, comes back, or is told to stop."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from bbnode.daemon.testbed.nodes import ChildNode
from tests.e2e.cluster import Cluster, start, stop
from tests.patience import PATIENCE_S

# What a machine that is busy has to train in; a client that is killed costs a round all of it, as
# the grace of a lost connection is longer.
DEADLINE_S = 8.0
# Five seconds of grace, and the rest for a machine that stands still meanwhile.
STOPS_S = 30.0


# No more than a test is about: most of what these cost is the start of daemons.
@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path / "net", clients=2, rounds=1000, deadline_s=DEADLINE_S)
    try:
        yield made
    finally:
        for node in made.all:
            stop(node)


def test_a_client_killed_in_a_round_costs_that_round_its_deadline(cluster: Cluster) -> None:
    start(*cluster.all)
    victim = cluster.clients[0]
    others = sorted(node.peer for node in cluster.clients[1:])
    assert victim.process is not None
    with cluster.events(cluster.server) as events:
        # The first round also loads the data, which a busy machine may not do in time.
        events.until(lambda e: e["type"] == "round_finished" and len(e["responded"]) == 2)
        # Frozen first, so that the kill surely falls into a round that has begun.
        os.kill(victim.process.pid, signal.SIGSTOP)
        events.until(lambda e: e["type"] == "round_finished")
        begun = events.until(lambda e: e["type"] == "round_started")
        victim.process.kill()
        victim.process.wait()
        hurt = events.until(
            lambda e: (
                # That of the round before may come after the beginning of this one.
                e["type"] == "round_finished"
                and e["round"] >= begun["round"]
                and bool(e["missing"] or len(e["responded"]) < 2)
            )
        )
        assert hurt["ok"]
        assert sorted(hurt["responded"]) == others
        # And no other: nobody waits for it any more.
        events.until(
            lambda e: (
                e["type"] == "round_finished"
                and e["ok"]
                and sorted(e["responded"]) == others
                and e["seconds"] < DEADLINE_S
            )
        )
    start(victim)
    # Anew: nobody read the events of the many rounds that were made meanwhile.
    with cluster.events(cluster.server) as events:
        events.until(
            lambda e: e["type"] == "round_finished" and e["ok"] and len(e["responded"]) == 2
        )


def test_a_client_without_data_says_why_and_takes_part_once_it_has_them(tmp_path: Path) -> None:
    made = Cluster(tmp_path / "net", clients=2, rounds=1, deadline_s=10 * PATIENCE_S)
    poor = made.clients[0]
    text = poor.config.read_text()
    wrong = re.sub(r"(?m)^shards = .*$", "shards = 100000", text)
    poor.config.write_text(re.sub(r"(?m)^shard = .*$", "shard = 99999", wrong))
    assert poor.config.read_text() != text
    why = "bbnode.SklearnDataSource: shard 99999 of 100000"
    try:
        start(*made.all)
        with made.events(made.server) as events:

            def waits() -> str:
                invoke = made.ask(made.server, "rounds")["invoke"][0]
                return f"{invoke['done']} done; {invoke['waiting_for']}"

            deadline_s = time.monotonic() + PATIENCE_S
            while why not in waits():  # until it has connected, and has said so
                assert time.monotonic() < deadline_s, waits()
            told = [p["not_ready"] for p in made.ask(made.server, "peers")["peers"]]
            assert any(why in reason for reason in told if reason)
            assert why in command("status", made.server)
            assert "not ready" in command("status", poor)
            stop(poor)
            poor.config.write_text(text)
            start(poor)
            done = events.round(1)
        assert done["ok"]
        assert set(done["responded"]) == {node.peer for node in made.clients}
    finally:
        for node in made.all:
            stop(node)


def command(name: str, node: ChildNode) -> str:
    """What a command says of a node."""
    return subprocess.run(
        [sys.executable, "-m", "bbnode", name, "--state-dir", node.state_dir],
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, "COLUMNS": "400"},
    ).stdout


def test_a_server_killed_goes_on_where_it_was(cluster: Cluster) -> None:
    start(*cluster.all)
    with cluster.events(cluster.server) as events:
        before = events.until(lambda e: e["type"] == "round_finished" and e["round"] >= 3)
    assert cluster.server.process is not None
    cluster.server.process.kill()
    cluster.server.process.wait()
    start(cluster.server)
    with cluster.events(cluster.server) as events:
        after = events.until(lambda e: e["type"] == "round_finished" and e["ok"])
    assert after["round"] > before["round"]
    # The parameters came back as well: an untrained model is right on every tenth digit.
    assert after["outputs"]["accuracy"] > before["outputs"]["accuracy"] - 0.05
    assert after["outputs"]["accuracy"] > 0.6


def test_status_tells_who_is_connected_and_sigterm_stops_within_the_grace(
    cluster: Cluster,
) -> None:
    start(*cluster.all)
    with cluster.events(cluster.server) as events:
        events.until(lambda e: e["type"] == "round_finished")
    status = cluster.ask(cluster.server, "status")
    assert {p["peer"] for p in status["peers"]} == {node.peer for node in cluster.clients}
    assert all(p["classes"] == ["client"] for p in status["peers"])
    assert status["targets"][0].startswith("server#")
    assert status["invoke"][0]["done"] >= 1
    key = cluster.server.state_dir / "identity.key"
    assert key.stat().st_mode & 0o777 == 0o600
    for node in (cluster.clients[0], cluster.server):  # a client that trains, or is about to
        assert node.process is not None
        node.process.terminate()
        assert node.process.wait(STOPS_S) == 0, node.log.read_text()
        assert not (node.state_dir / "control.sock").exists()


def test_a_second_signal_ends_a_daemon_at_once(cluster: Cluster) -> None:
    server, frozen = cluster.server, cluster.clients[0]
    # It does not end by itself before the second signal, however late that comes.
    text = server.config.read_text()
    server.config.write_text(text.replace("[node]\n", f"[node]\nstop_grace_s = {PATIENCE_S}\n"))
    start(*cluster.all)
    assert server.process is not None
    assert frozen.process is not None
    # A peer that does not answer the goodbye keeps a graceful stop busy for its grace.
    os.kill(frozen.process.pid, signal.SIGSTOP)
    with cluster.events(server) as events:
        server.process.terminate()
        events.until(lambda e: e["type"] == "stopping")
        server.process.terminate()
    assert server.process.wait(PATIENCE_S) == 128 + signal.SIGTERM
