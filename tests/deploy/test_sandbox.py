"""The daemon works under the rules of its unit, and the rules hold."""

from __future__ import annotations

import ctypes.util
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.deploy.compose import DEPLOY
from tests.patience import PATIENCE_S

UNIT = DEPLOY.parent / "bbnode" / "daemon" / "units" / "bbnode@.service"
KERNEL = tuple(int(part) for part in platform.release().split("-")[0].split(".")[:2])
pytestmark = pytest.mark.skipif(
    os.geteuid() != 0
    or KERNEL < (6, 3)
    or shutil.which("systemd-analyze") is None
    or ctypes.util.find_library("seccomp") is None,
    reason="needs root, Linux 6.3, systemd-analyze and libseccomp",
)


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="bb-", dir="/tmp") as made:
        yield Path(made)


def confined(folder: Path, *words: str) -> list[str]:
    return [sys.executable, "-m", "tests.deploy.sandbox", str(UNIT), str(folder), "--", *words]


def python(folder: Path, code: str) -> str:
    done = subprocess.run(
        confined(folder, sys.executable, "-c", code),
        cwd=DEPLOY.parent,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    return done.stdout + done.stderr.strip().rpartition("\n")[2]


# Python 3.11 has no unshare.
NAMESPACE = "import os; os.unshare(os.CLONE_NEWNS) if hasattr(os, 'unshare') else os.chroot('/')"


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("open('/usr/bbnode-test', 'w')", "Read-only file system"),
        ("import mmap; mmap.mmap(-1, 4096, prot=7)", "Permission"),
        ("import socket; socket.socket(socket.AF_PACKET, socket.SOCK_RAW)", "not permitted"),
        (NAMESPACE, "not permitted"),
        ("import os; print(open('/proc/self/status').read())", "NoNewPrivs:\t1"),
    ],
)
def test_the_rules_hold(folder: Path, code: str, told: str) -> None:
    assert told in python(folder, code)


# Of /proc these need more than the processes: when the machine was started.
PROCESS_METRICS = """
from prometheus_client import CollectorRegistry, ProcessCollector
found = ProcessCollector(registry=CollectorRegistry()).collect()
print(sorted(metric.name for metric in found))
"""


def test_the_metrics_of_the_process_can_be_read(folder: Path) -> None:
    told = python(folder, PROCESS_METRICS)
    for name in ("process_resident_memory_bytes", "process_cpu_seconds", "process_open_fds"):
        assert f"'{name}'" in told


def test_a_node_becomes_ready_and_stops(folder: Path) -> None:
    bbnode = [sys.executable, "-m", "bbnode"]
    made = subprocess.run(
        [
            *bbnode,
            *("init", str(folder / "node"), "--target", "server"),
            *("--module", "bbnode.examples.federated_digits:FederatedRound"),
        ],
        capture_output=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert made.returncode == 0, made.stderr
    config = folder / "node" / "node.toml"
    with config.open("a") as stream:
        stream.write('\n[slots.data]\ndataset = "digits"\nsplit = "test"\n')
        # One execution: the session of ONNX runtime, its threads, and a worker thread of ours.
        stream.write('\n[[invoke]]\ntarget = "server"\ninputs = { tick = "trigger" }\n')
    environ = {"PATH": os.environ["PATH"], "HOME": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    log = folder / "log"
    with log.open("wb") as stream:
        daemon = subprocess.Popen(
            confined(folder, *bbnode, "run", "--config", str(config)),
            cwd=DEPLOY.parent,
            env=environ,
            stdout=stream,
            stderr=stream,
        )
    try:
        waited = subprocess.run(
            [*bbnode, "wait", "--ready", "--timeout", "60", "-c", str(config)],
            capture_output=True,
            timeout=PATIENCE_S,
            check=False,
        )
        assert waited.returncode == 0, log.read_text()
        daemon.send_signal(signal.SIGTERM)
        assert daemon.wait(PATIENCE_S) == 0, log.read_text()
    finally:
        if daemon.poll() is None:
            daemon.kill()
            daemon.wait(PATIENCE_S)
    text = log.read_text()
    assert "Operation not permitted" not in text
    assert (folder / "node" / "state" / "checkpoint").exists(), text
