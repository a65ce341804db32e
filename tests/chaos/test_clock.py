"""A wall clock that jumps by an hour, there and back: rounds run on the monotonic one."""

from __future__ import annotations

import shutil
import struct
import subprocess
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tests.chaos.cluster import Cluster, Daemon

HOUR_S = 3600
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
