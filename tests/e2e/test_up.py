"""`bbnode up` with nodes that die, and when it is told to stop."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from bbnode.daemon.testbed.nodes import holder_of
from tests.patience import PATIENCE_S

DIGITS = (
    *("bbnode.examples.federated_digits:FederatedRound", "--arg", "clients=2"),
    *("--set", "slots.data.dataset=digits", "--set", "client.slots.data.shards={n}"),
)
UP = (sys.executable, "-m", "bbnode", "up")


def running(out: Path) -> list[str]:
    """The nodes of a testbed whose daemons hold their state."""
    locks = sorted(out.glob("nodes/*/state/lock"))
    return [lock.parent.parent.name for lock in locks if holder_of(lock) is not None]


def test_a_node_that_dies_at_once_ends_it_and_is_named_with_its_reason(tmp_path: Path) -> None:
    done = subprocess.run(
        [*UP, *DIGITS, "--set", "client.1.slots.data.shard=9", "--json"],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("error: client-1 gave up (exit code 2): ")
    assert "shard 9 of 2" in last
    assert json.loads(done.stdout)["failure"] in last
    assert running(tmp_path / "up-out") == []


def bbnode(folder: Path, *words: str, code: int = 0) -> str:
    """Run a command; return what it printed on both streams."""
    done = subprocess.run(
        [sys.executable, "-m", "bbnode", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=PATIENCE_S,
        check=False,
        cwd=folder,
    )
    assert done.returncode == code, done.stdout
    return done.stdout


@pytest.mark.slow
def test_a_typing_error_costs_no_earlier_run_and_another_program_gets_rounds(
    tmp_path: Path,
) -> None:
    rounds = ("--best", "loss", "--patience", "1", "--times", "30")
    server = "up-out/nodes/server/node.toml"
    told = bbnode(tmp_path, "up", *DIGITS, *rounds, "--arg", "learning_rate=4.0")
    assert "stopped early" in told
    told = bbnode(tmp_path, "up", *DIGITS, "--set", "client.slots.data.shard=9", code=1)
    assert "the run before stays in" in told
    exported = bbnode(tmp_path, "export", "-c", server, "--slot", "global", "-o", "model.onnx")
    assert "after round" in exported
    assert "no round has ended yet" in bbnode(
        tmp_path, "rounds", "-c", "up-out/failed/server/node.toml"
    )
    before = len(json.loads((tmp_path / "up-out" / "report.json").read_text())["rounds"])
    bbnode(tmp_path, "up", *DIGITS, *rounds, "--arg", "learning_rate=0.05", "--keep")
    later = json.loads((tmp_path / "up-out" / "report.json").read_text())["rounds"]
    assert later[0]["round"] == before + 1


@contextlib.contextmanager
def gossiping(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Run a testbed whose nodes talk with each other, each with its value."""
    program = "bbnode.examples.gossip_averaging:GossipAveraging"
    with subprocess.Popen(
        [*UP, program, "--set", "peer.slots.mass.value=[{i}.0]"],
        stdout=subprocess.PIPE,
        text=True,
        cwd=folder,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    ) as process:
        assert process.stdout is not None
        watchdog = threading.Timer(PATIENCE_S, process.kill)
        watchdog.start()
        next(line for line in process.stdout if "estimate = " in line)
        yield process
        watchdog.cancel()


def test_a_kill_leaves_no_daemon(tmp_path: Path) -> None:
    with gossiping(tmp_path) as process:
        locks = sorted((tmp_path / "up-out").glob("nodes/*/state/lock"))
        daemons = [holder_of(lock) for lock in locks]
        assert all(daemons)
        process.kill()
    for pid in daemons:
        with contextlib.suppress(psutil.NoSuchProcess):
            psutil.Process(pid).wait(PATIENCE_S)
    assert running(tmp_path / "up-out") == []


def test_ctrl_c_stops_all_nodes(tmp_path: Path) -> None:
    with gossiping(tmp_path) as process:
        assert process.stdout is not None
        assert running(tmp_path / "up-out")
        process.send_signal(signal.SIGINT)
        process.stdout.read()
        assert process.wait(PATIENCE_S) == 0
    assert running(tmp_path / "up-out") == []
    report = json.loads((tmp_path / "up-out" / "report.json").read_text())
    assert report["ok"]
    assert report["values"]
