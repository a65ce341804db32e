"""A daemon under a supervisor: what it reports, reloads and records."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from bbnode.cli.main import main
from tests.patience import PATIENCE_S

CONFIG = """[node]
name = "peer"
state_dir = "state"
log_level = "info"
[artifact]
module = "bbnode.examples.federated_digits:FederatedRound"
targets = ["server"]
[network]
bootstrap = []
"""


@pytest.fixture
def supervisor(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(tmp_path / "notify"))
        listener.settimeout(1.0)
        yield listener


@pytest.fixture
def daemon(tmp_path: Path, supervisor: socket.socket) -> Iterator[subprocess.Popen[bytes]]:
    file = tmp_path / "node.toml"
    file.write_text(CONFIG)
    environment = {
        **os.environ,
        "NOTIFY_SOCKET": str(supervisor.getsockname()),
        "WATCHDOG_USEC": "4000000",
    }
    command = [sys.executable, "-m", "bbnode", "run", "-c", str(file)]
    command += ["--record", str(tmp_path / "record")]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(command, env=environment, stderr=log)
        try:
            yield process
        finally:
            process.kill()
            process.wait()


def _until(supervisor: socket.socket, daemon: subprocess.Popen[bytes], wanted: str) -> list[str]:
    """All lines up to the first datagram that has a line which begins with `wanted`."""
    lines: list[str] = []
    end = time.monotonic() + PATIENCE_S
    while True:
        try:
            told = supervisor.recv(4096).decode().split("\n")
        except TimeoutError:
            assert daemon.poll() is None, "the daemon is gone"
            assert time.monotonic() < end, f"no {wanted} within {PATIENCE_S} s: {lines[-5:]}"
            continue
        lines += told
        if any(line.startswith(wanted) for line in told):
            return lines


def test_ready_watchdog_reload_stop_and_the_record(
    tmp_path: Path,
    supervisor: socket.socket,
    daemon: subprocess.Popen[bytes],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert any(
        line.startswith("STATUS=ready, server#") for line in _until(supervisor, daemon, "READY=1")
    )
    _until(supervisor, daemon, "WATCHDOG=1")
    file = tmp_path / "node.toml"

    file.write_text(CONFIG.replace('"info"', '"debug"').replace('"peer"', '"other"'))
    daemon.send_signal(signal.SIGHUP)
    _until(supervisor, daemon, "RELOADING=1")
    _until(supervisor, daemon, "READY=1")
    log = (tmp_path / "log").read_text()
    assert "reloaded changed=node.log_level" in log
    assert "needs a restart keys=node.name" in log

    file.write_text("[nod]\n")
    daemon.send_signal(signal.SIGHUP)
    _until(supervisor, daemon, "RELOADING=1")
    _until(supervisor, daemon, "READY=1")
    assert "reload refused, nothing changed" in (tmp_path / "log").read_text()

    # Who asks is told, too: by the daemon, which knows the configuration that it began with.
    state_dir = str(tmp_path / "state")
    assert main(["reload", "--state-dir", state_dir, "--timeout", str(PATIENCE_S)]) == 2
    assert "nod" in capsys.readouterr().err
    _until(supervisor, daemon, "RELOADING=1")
    _until(supervisor, daemon, "READY=1")

    assert main(["bugreport", "-c", str(file), "--json"]) == 2  # as everything with such a file
    capsys.readouterr()
    file.write_text(CONFIG)
    assert main(["reload", "--state-dir", state_dir, "--timeout", str(PATIENCE_S)]) == 0
    assert capsys.readouterr().out == "changed: node.log_level\n"
    assert main(["bugreport", "-c", str(file), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["daemon"]["status"]["phase"] == "ready"
    assert any("reload refused" in json.dumps(line) for line in told["daemon"]["log"])

    daemon.send_signal(signal.SIGTERM)
    _until(supervisor, daemon, "STOPPING=1")
    assert daemon.wait(PATIENCE_S) == 0
    assert main(["replay", str(tmp_path / "record"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["polls"] > 0
