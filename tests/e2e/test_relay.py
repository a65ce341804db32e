"""Two real daemons that nobody can dial, and a server between them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bbnode.daemon.artifacts.artifact import serialize
from bbnode.daemon.testbed.nodes import choose_port
from tests.daemon.live import compiled
from tests.e2e.cluster import wait_for_ready
from tests.patience import PATIENCE_S, patiently


def bbnode(*words: object) -> str:
    command = [sys.executable, "-m", "bbnode", *patiently(*words)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def ask(node: Path, *words: object) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(bbnode(*words, "--state-dir", node / "state", "--json"))
    return found


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[tuple[Path, dict[str, str]]]:
    """A server that relays and two clients that only dial it; their ids by name."""
    (tmp_path / "a.onnx").write_bytes(serialize(compiled()))
    port = choose_port(0)
    listen = f"/ip4/127.0.0.1/tcp/{port}"
    ids: dict[str, str] = {}
    for name in ("server", "left", "right"):
        folder = tmp_path / name
        target = "server" if name == "server" else "client"
        ids[name] = bbnode(
            "init", folder, "--artifact", tmp_path / "a.onnx", "--target", target
        ).strip()
        relay = f"{listen}/p2p/{ids['server']}"
        other = f'"{relay}/p2p-circuit/p2p/{ids["left"]}"' if name == "right" else ""
        more = {
            "server": f'[network]\nlisten = ["{listen}"]\n[relay]\nserve = true\n',
            "left": f'[network]\nlisten = []\nbootstrap = ["{relay}"]\n',
            "right": f'[network]\nlisten = []\nbootstrap = ["{relay}", {other}]\n',
        }[name]
        with (folder / "node.toml").open("a") as file:
            file.write(f"\n{more}")
    processes = []
    try:
        with wait_for_ready(tmp_path, len(ids)) as environment:
            for name in ids:
                with (tmp_path / f"{name}.log").open("wb") as log:
                    run = [sys.executable, "-m", "bbnode", "run", "-c"]
                    run.append(str(tmp_path / name / "node.toml"))
                    processes.append(subprocess.Popen(run, env=environment, stderr=log))
        yield tmp_path, ids
    finally:
        for process in processes:
            process.kill()
            process.wait()


def test_two_clients_meet_through_the_server(nodes: tuple[Path, dict[str, str]]) -> None:
    folder, ids = nodes
    bbnode("wait", "--peers", 2, "--timeout", PATIENCE_S, "--state-dir", folder / "right" / "state")
    peers = {each["peer"]: each for each in ask(folder / "right", "peers")["peers"]}
    assert peers[ids["server"]]["via"] == "direct"
    assert peers[ids["left"]]["via"] == "relay"
    assert f"/p2p/{ids['server']}/p2p-circuit/p2p/{ids['left']}" in peers[ids["left"]]["address"]
    pong = ask(folder / "right", "ping", ids["left"])
    assert pong
    back = ask(folder / "left", "ping", ids["right"])
    assert back
    listen = ask(folder / "left", "status")["listen"]
    assert [a.split("/p2p/")[1:] for a in listen] == [[f"{ids['server']}/p2p-circuit", ids["left"]]]
    counters = ask(folder / "server", "status")["counters"]
    assert counters["transport.relay.reserved"] == 2
    assert counters["transport.relay.bytes"] > 0
