"""Strangers that fill memory before they have said who they are, or take all places."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.cluster import Cluster, Rounds
from tests.hostile.stranger import attack
from tests.patience import PATIENCE_S

# Windows and queues of six strangers, and the allocator's arenas; they announce gigabytes.
MORE_RSS_MB = 40.0
# Of 1,024 silent sockets: a quarter of them waits at a time.
MORE_RSS_SILENT_MB = 80.0
MORE_FILES = 3
ROUND_S = 20.0
# Of 0.2 s at least.
ROUNDS_TO_CLOSE = 100


@pytest.mark.parametrize(
    ("name", "more_rss_mb"),
    [
        ("lengths", MORE_RSS_MB),
        ("unread", MORE_RSS_MB),
        pytest.param("silent", MORE_RSS_SILENT_MB, marks=pytest.mark.slow),
    ],
)
def test_strangers_take_nothing(cluster: Cluster, name: str, more_rss_mb: float) -> None:
    cluster.start(*cluster.all)
    with cluster.events() as rounds:
        rounds.with_all()
        rounds.more(3)
        before, before_mb = cluster.server.owned(), _most_rss_mb(cluster.server.pid)
        (address,) = cluster.server.get("status")["listen"]
        with attack(f"strangers:{name}", address) as process:
            during = _until_ended(rounds, process)
        during.append(rounds.more(1))
        assert max(each["seconds"] for each in during) < ROUND_S
        assert all(len(each["responded"]) == len(cluster.clients) for each in during)
        assert _most_rss_mb(cluster.server.pid) <= before_mb + more_rss_mb
        # What the kernel had accepted for the node is looked at, and lives 3 s at most.
        left = ROUNDS_TO_CLOSE
        while left and cluster.server.owned().files > before.files + MORE_FILES:
            rounds.more(1)
            left -= 1
        assert left


def _until_ended(rounds: Rounds, process: subprocess.Popen[bytes]) -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = []
    while process.poll() is None:
        made.append(rounds.next())
        assert len(made) < PATIENCE_S / 0.1, "the attack does not end"
    return made


def _most_rss_mb(pid: int) -> float:
    """The most memory that a process ever had."""
    status = Path(f"/proc/{pid}/status").read_text()
    (line,) = (each for each in status.splitlines() if each.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024 / 1e6
