"""A peer that sends garbage, half frames, huge lengths, or valid envelopes in a flood."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.chaos.cluster import ROOT, Cluster, Rounds
from tests.chaos.gate import PATIENCE_S

ATTACKS = ["garbage", "frames", "half", "huge", "flood"]
QUICK = {"frames", "flood"}
# Of a round, while the node is attacked; without it takes 20 ms.
ROUND_S = 3.0
MORE_FILES = 3
# A stranger can't fill the disk with what is said of it.
MOST_LOG_CHARS = 200_000
# Queues, windows and the allocator's arenas of twenty strangers; not the 4 GiB that they announce.
MORE_RSS_MB = 40.0


@pytest.mark.parametrize(
    "attack", [pytest.param(a, marks=[] if a in QUICK else [pytest.mark.slow]) for a in ATTACKS]
)
def test_rounds_go_on(cluster: Cluster, attack: str) -> None:
    cluster.start(*cluster.all)
    with cluster.events() as rounds:
        rounds.with_all()
        rounds.with_all()
        before = cluster.server.owned()
        (address,) = cluster.server.get("status")["listen"]
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.chaos.hostile", attack, address], cwd=ROOT, env=os.environ
        )
        try:
            during = _until_ended(rounds, process)
        finally:
            process.kill()
            process.wait()
        assert process.returncode == 0
        assert len(during) >= 3
        assert max(each["seconds"] for each in during) < ROUND_S
        assert all(len(each["responded"]) == len(cluster.clients) for each in during)
        assert len(cluster.server.log) < MOST_LOG_CHARS
        # The strangers are gone, and so is what was kept for them.
        rounds.for_seconds(1.0)
        after = cluster.server.owned()
        assert after.files <= before.files + MORE_FILES
        assert after.rss_mb <= before.rss_mb + MORE_RSS_MB


def _until_ended(rounds: Rounds, process: subprocess.Popen[bytes]) -> list[dict[str, object]]:
    made: list[dict[str, object]] = []
    while process.poll() is None:
        made.append(rounds.next())
        assert len(made) < PATIENCE_S / 0.1, "the attack does not end"
    return made
