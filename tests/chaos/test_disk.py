"""A disk that is full: rounds go on without checkpoints, and checkpoints come back with room."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from bbnode.daemon import paths
from bbnode.daemon.state import checkpoint
from tests.chaos.cluster import ROOT, Cluster
from tests.patience import PATIENCE_S

DISK_BYTES = 1_000_000
# 80 KB of weights: no checkpoint fits into what a full disk has left.
SIZE = 20_000

AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to mount a small disk")


@contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    """A disk of DISK_BYTES in place of a folder, with what was in it."""
    kept = folder.with_name(f"{folder.name}.kept")
    shutil.copytree(folder, kept)
    options = f"size={DISK_BYTES},mode=0700"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", str(folder)], check=True)
    try:
        shutil.copytree(kept, folder, dirs_exist_ok=True)
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@contextmanager
def full(folder: Path) -> Iterator[Callable[[], None]]:
    """Nothing fits on this disk meanwhile; gives what fills it again."""
    filler = folder / "filler"

    def fill() -> None:
        with filler.open("ab", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(4096))

    fill()
    try:
        yield fill
    finally:
        filler.unlink()


@AS_ROOT
def test_full_while_it_runs_and_when_it_starts(make_cluster: Callable[..., Cluster]) -> None:
    cluster = make_cluster(size=SIZE)
    server = cluster.server
    with small_disk(server.state_dir):
        try:
            cluster.start(*cluster.all)
            with cluster.events() as rounds:
                rounds.with_all()
                with full(server.state_dir) as fill:
                    # One that was just written gives back the place of the one before it.
                    rounds.more(1)
                    fill()
                    full_at = rounds.more(3)
                    assert "No space left" in server.log
                    saved = newest(cluster)
                    assert saved < full_at["round"]
                last = rounds.more(3)
                assert newest(cluster) >= last["round"]
                with full(server.state_dir):
                    rounds.more(1)
                    server.kill()
            with full(server.state_dir):
                refused = subprocess.run(
                    [sys.executable, "-m", "bbnode", "run", "-c", str(server.config)],
                    cwd=ROOT,
                    env={**os.environ, **server.environment},
                    capture_output=True,
                    text=True,
                    timeout=PATIENCE_S,
                    check=False,
                )
                assert refused.returncode == 1, refused.stderr
                assert "No space left" in refused.stderr.strip().splitlines()[-1]
                assert "Traceback" not in refused.stderr
            cluster.start(server)
            with cluster.events() as rounds:
                assert rounds.with_all()["round"] > last["round"]
        finally:
            cluster.end()
            cluster.check_files()


def test_no_file_may_grow(make_cluster: Callable[..., Cluster]) -> None:
    """What RLIMIT_FSIZE does is what a full disk does, to logs as well."""
    cluster = make_cluster(size=SIZE)
    server = cluster.server
    cluster.start(*cluster.all)
    with cluster.events() as rounds:
        rounds.with_all()
        _, hard = resource.prlimit(server.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(server.pid, resource.RLIMIT_FSIZE, (1024, hard))
        limited = rounds.more(3)
        assert newest(cluster) < limited["round"]
        resource.prlimit(server.pid, resource.RLIMIT_FSIZE, (hard, hard))
        last = rounds.more(3)
        assert newest(cluster) >= last["round"]
    server.signal(signal.SIGTERM)
    assert server.wait_ended(PATIENCE_S) == 0
    assert not list(paths.identity_file(server.state_dir).parent.glob("*.new"))


def newest(cluster: Cluster) -> int:
    """The round of the newest checkpoint."""
    saved = next(checkpoint.usable(cluster.server.state_dir, cluster.sha256))
    return saved.rounds_done["server"]
