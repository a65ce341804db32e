"""A peer that sends garbage, half frames, huge lengths, or valid envelopes in a flood."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest

from tests.chaos.cluster import Cluster, Rounds
from tests.hostile.stranger import attack
from tests.patience import PATIENCE_S

ATTACKS = ["garbage", "frames", "half", "huge", "senseless", "flood"]
QUICK = {"senseless", "flood"}
# Of a round, while the node is attacked. It takes 20 ms without; the rest is for a busy machine.
ROUND_S = 20.0
MORE_FILES = 3
# A stranger can't fill the disk with what is said of it.
MOST_LOG_CHARS = 200_000
# Queues, windows and the allocator's arenas of twenty strangers; not the 4 GiB that they announce.
MORE_RSS_MB = 40.0


@pytest.mark.parametrize(
    "name", [pytest.param(a, marks=[] if a in QUICK else [pytest.mark.slow]) for a in ATTACKS]
)
def test_rounds_go_on(cluster: Cluster, name: str) -> None:
    cluster.start(*cluster.all)
    with cluster.events() as rounds:
        rounds.with_all()
        begun = rounds.more(1)["round"]
        before = cluster.server.owned()
        (address,) = cluster.server.get("status")["listen"]
        with attack(f"floods:{name}", address) as process:
            during = _until_ended(rounds, process)
        # By their numbers: some may not have been read yet when it ended.
        during.append(rounds.more(1))
        assert during[-1]["round"] >= begun + 3
        assert max(each["seconds"] for each in during) < ROUND_S
        assert all(len(each["responded"]) == len(cluster.clients) for each in during)
        assert len(cluster.server.log) < MOST_LOG_CHARS
        # The strangers are gone, and so is what was kept for them.
        rounds.more(5)
        after = cluster.server.owned()
        assert after.files <= before.files + MORE_FILES
        assert after.rss_mb <= before.rss_mb + MORE_RSS_MB


def _until_ended(rounds: Rounds, process: subprocess.Popen[bytes]) -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = []
    while process.poll() is None:
        made.append(rounds.next())
        assert len(made) < PATIENCE_S / 0.1, "the attack does not end"
    return made
