"""A wall clock that jumps, there and back: rounds run on the monotonic one, and memberships, which
are dated by the wall clock, hold again as soon as it is right again."""

from __future__ import annotations

import json
import shutil
import struct
import subprocess
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest

from bbnode.access.keys import SigningKey
from bbnode.access.statement import grant
from bbnode.daemon.access import files as access_files
from bbnode.ir.peer import PeerId
from tests.chaos.cluster import Cluster, Daemon

HOUR_S = 3600
DAY_S = 24 * HOUR_S
YEAR_S = 365 * DAY_S
NEEDS_COMPILER = pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")


class Clock:
    """The wall clock of daemons that are started with it."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "jump"
        self._library = folder / "jumping_clock.so"
        source = Path(__file__).with_name("jumping_clock.c")
        subprocess.run(
            ["gcc", "-shared", "-fPIC", "-O2", "-o", self._library, source, "-ldl"], check=True
        )
        self.jump(0)

    def jump(self, seconds: int) -> None:
        """From now on the clock is this far from the true time."""
        if not self._file.exists():
            self._file.write_bytes(bytes(8))
        with self._file.open("r+b") as file:
            file.write(struct.pack("=q", seconds))

    def give(self, daemon: Daemon) -> None:
        """Have a daemon started with this clock."""
        daemon.environment["LD_PRELOAD"] = str(self._library)
        daemon.environment["JUMPING_CLOCK"] = str(self._file)


def hours_ahead(daemon: Daemon) -> float:
    """How far the last line of its log is from now."""
    stamp = daemon.log.strip().splitlines()[-1].split()[0]
    said = datetime.fromisoformat(stamp)
    return (said - datetime.now(UTC)).total_seconds() / HOUR_S


@NEEDS_COMPILER
@pytest.mark.slow
@pytest.mark.parametrize("role", ["server", "client"])
def test_jumps(cluster: Cluster, tmp_path: Path, role: str) -> None:
    clock = Clock(tmp_path)
    jumping = cluster.server if role == "server" else cluster.clients[0]
    clock.give(jumping)
    cluster.start(*cluster.all)
    with cluster.events() as rounds:
        rounds.with_all()
        for hours in (1, -1, 0):
            clock.jump(hours * HOUR_S)
            # Neither waits for the time that was skipped nor ends for what was not.
            made = rounds.for_seconds(3.0)
            assert len(made) >= 5
            assert max(each["seconds"] for each in made) < 3.0
            assert all(len(each["responded"]) == len(cluster.clients) for each in made)
            if role == "server":
                assert abs(hours_ahead(jumping) - hours) < 0.1
        clock.jump(-HOUR_S)
        last = rounds.next()
    # What it wrote is from its future when it starts again.
    clock.jump(-2 * HOUR_S)
    jumping.kill()
    cluster.start(jumping)
    with cluster.events() as rounds:
        assert rounds.with_all()["round"] >= last["round"]


def found_network(cluster: Cluster) -> None:
    """Make everybody a member of one private network, from now on and for a day."""
    owner, now_s = SigningKey.from_seed(b"o" * 32), int(time.time())
    for number, daemon in enumerate(cluster.all):
        membership = grant(
            owner,
            member=PeerId.parse(daemon.peer),
            not_before_s=now_s,
            expires_s=now_s + DAY_S,
            serial=number,
        )
        access_files.save_membership(daemon.state_dir, membership)


@NEEDS_COMPILER
@pytest.mark.parametrize(
    ("role", "jump_s"),
    [
        # Its memberships of others are not valid yet, then have long ended.
        ("server", -HOUR_S),
        pytest.param("server", YEAR_S, marks=pytest.mark.slow),
        pytest.param("client", -HOUR_S, marks=pytest.mark.slow),
        pytest.param("client", YEAR_S, marks=pytest.mark.slow),
    ],
)
def test_a_clock_that_is_wrong_for_a_while(
    make_cluster: Callable[..., Cluster], tmp_path: Path, role: str, jump_s: int
) -> None:
    """Nobody is blamed for what our own clock denies: when it is right, rounds go on."""
    clock = Clock(tmp_path)
    cluster = make_cluster(deadline_s=3.0)
    cluster.may_fail = True
    found_network(cluster)
    jumping = cluster.server if role == "server" else cluster.clients[0]
    clock.give(jumping)
    cluster.start(*cluster.all)
    with cluster.events() as rounds:
        rounds.with_all()
        clock.jump(jump_s)
        if role == "server":
            assert not_ready(jumping) == {"membership"}
            # More in a row than a peer may fail before it counts as down.
            for _ in range(6):
                assert not rounds.until("round_finished", ok=False)["responded"]
        else:
            rounds.without(jumping)
        clock.jump(0)
        rounds.with_all()
    assert not_ready(cluster.server) == set()
    assert "the wall clock was set" in jumping.log


def not_ready(daemon: Daemon) -> set[str]:
    """What `/readyz` says that keeps a daemon from its work."""
    with daemon.control() as client:
        status, body = client.fetch("GET", "/readyz")
    told = json.loads(body)
    assert (status == 200) == told["ready"]
    return {reason["what"] for reason in told["reasons"]}
