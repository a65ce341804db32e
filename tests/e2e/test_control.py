"""The control plane of real daemons, asked by the real command line."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bbnode.daemon import paths
from bbnode.daemon.artifacts.artifact import serialize
from bbnode.daemon.control.client import ControlClient
from bbnode.daemon.testbed.nodes import choose_port
from tests.daemon.live import compiled
from tests.e2e.cluster import wait_for_ready
from tests.patience import PATIENCE_S, patiently


def bbnode(*words: object) -> tuple[int, str, str]:
    command = [sys.executable, "-m", "bbnode", *patiently(*words)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr


def ask(node: Path, *words: object) -> dict[str, Any]:
    code, out, err = bbnode(*words, "--state-dir", node / "state", "--json")
    assert code == 0, err
    return json.loads(out)


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    """A server and a client, ready."""
    (tmp_path / "a.onnx").write_bytes(serialize(compiled()))
    made = {role: tmp_path / role for role in ("server", "client")}
    listen = f"/ip4/127.0.0.1/tcp/{choose_port(0)}"
    artifact = ["--artifact", tmp_path / "a.onnx"]
    code, peer, err = bbnode(
        "init", made["server"], *artifact, "--target", "server", "--listen", listen
    )
    assert code == 0, err
    bootstrap = ["--bootstrap", f"{listen}/p2p/{peer.strip()}"]
    assert bbnode("init", made["client"], *artifact, "--target", "client", *bootstrap)[0] == 0
    processes = []
    try:
        with wait_for_ready(tmp_path, len(made)) as environment:
            for role, folder in made.items():
                log = (tmp_path / f"{role}.log").open("wb")
                run = [sys.executable, "-m", "bbnode", "run", "-c", str(folder / "node.toml")]
                processes.append(subprocess.Popen(run, env=environment, stderr=log))
                log.close()
        yield made["server"], made["client"]
    finally:
        for process in processes:
            process.kill()
            process.wait()


def test_a_daemon_is_asked_and_told(nodes: tuple[Path, Path]) -> None:
    server, client = nodes
    (peer,) = ask(server, "wait", "--ready", "--peers", 1, "--class", "client")["peers"]
    assert peer == ask(client, "id")["peer_id"]
    assert ask(server, "ping", peer, "-n", 2, "--every", 0)["min_ms"] > 0

    # One execution, followed from the node that asked to the one that answered.
    for node in nodes:
        assert ask(node, "trace", "--on")["tracing"] is True
    told = ask(server, "invoke", "server", "-i", "question=[1.5]")
    assert told["outputs"]["answers"] == {"responded": [peer], "missing": [], "reasons": {}}
    traced = ask(server, "trace", told["execution"], "--also", client / "state")
    here, there = traced["traces"]
    assert there["peer_id"] == peer
    started = there["steps"][0]
    assert (started["type"], started["source_peer"]) == ("execution_started", here["peer_id"])
    assert any(step["type"] == "fill_sent" for step in there["steps"])

    assert ask(server, "snapshot")["bytes"] > 0
    assert ask(server, "logs", "--set-level", "debug")["before"] == "info"
    with ControlClient(paths.control_socket(server / "state"), timeout_s=PATIENCE_S) as control:
        status, page = control.fetch("GET", "/metrics")
        assert status == 200
        assert b"bbnode_executions_total 1.0\n" in page
        assert f'bbnode_peer_received_bytes_total{{peer="{peer}"}}'.encode() in page

    assert ask(server, "peers", "block", peer)["blocked"] is True
    rules = {rule["rule"]: rule["detail"] for rule in ask(server, "peers", "--why", peer)["why"]}
    assert rules["access: block_list"].startswith("blocklisted: ")
    assert ask(server, "peers", "allow", peer)["blocked"] is False
