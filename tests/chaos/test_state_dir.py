"""Two daemons on one state directory, and an artifact that is changed on disk."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.chaos.cluster import ROOT, Cluster, Daemon
from tests.patience import PATIENCE_S


def run(daemon: Daemon) -> subprocess.CompletedProcess[str]:
    """`bbnode run` of a daemon that is expected to refuse."""
    return subprocess.run(
        [sys.executable, "-m", "bbnode", "run", "-c", str(daemon.config)],
        cwd=ROOT,
        env={**os.environ, **daemon.environment},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


def last_line(done: subprocess.CompletedProcess[str]) -> str:
    return done.stderr.strip().splitlines()[-1]


def test_a_second_daemon_is_refused_and_the_first_goes_on(cluster: Cluster) -> None:
    orphan = cluster.server.state_dir / ".checkpoint.new.abcdefgh"
    orphan.write_bytes(b"what a killed daemon left")
    cluster.start(*cluster.all)
    with cluster.events() as rounds:
        rounds.with_all()
        assert not orphan.exists()
        orphan.write_bytes(b"what the first one writes now")
        second = run(cluster.server)
        assert orphan.exists()
        assert second.returncode == 1
        assert str(cluster.server.pid) in last_line(second)
        assert "Traceback" not in second.stderr
        rounds.with_all()


def test_an_artifact_changed_while_running_does_no_harm_and_is_refused_at_the_next_start(
    cluster: Cluster,
) -> None:
    server = cluster.server
    cluster.start(*cluster.all)
    good = cluster.artifact.read_bytes()
    with cluster.events() as rounds:
        rounds.with_all()
        changed = bytearray(good)
        changed[len(good) // 2] ^= 0xFF
        cluster.artifact.write_bytes(bytes(changed))
        last = rounds.with_all()
    server.kill()
    refused = run(server)
    assert refused.returncode == 5
    assert "sha256" in last_line(refused)
    assert "Traceback" not in refused.stderr
    cluster.artifact.write_bytes(good)
    cluster.start(server)
    with cluster.events() as rounds:
        assert rounds.with_all()["round"] >= last["round"]


@pytest.mark.parametrize("at", [0.1, 0.5, 0.9])
def test_a_changed_artifact_that_nobody_has_a_digest_of(cluster: Cluster, at: float) -> None:
    """Without artifact.sha256 in the configuration, what was compiled says so itself."""
    config = cluster.server.config
    config.write_text(
        "\n".join(line for line in config.read_text().splitlines() if "sha256" not in line)
    )
    data = bytearray(cluster.artifact.read_bytes())
    data[int(len(data) * at)] ^= 0x01
    cluster.artifact.write_bytes(bytes(data))
    refused = run(cluster.server)
    assert refused.returncode == 5
    assert "Traceback" not in refused.stderr


def test_a_torn_artifact(cluster: Cluster) -> None:
    data = cluster.artifact.read_bytes()
    cluster.artifact.write_bytes(data[: len(data) // 2])
    refused = run(cluster.server)
    assert refused.returncode == 5
    assert "Traceback" not in refused.stderr
