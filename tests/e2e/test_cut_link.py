"""A link that is cut without a word, between two network namespaces of our own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from bbnode.daemon import paths
from bbnode.daemon.control.client import ControlClient
from bbnode.transport.identity import load_identity
from tests.e2e.cluster import Events, wait_for_ready

NEEDS = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("ip") is None, reason="needs root and iproute2"
)
HOSTS = {"server": "10.77.0.1", "client": "10.77.0.2"}


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def bbnode(*words: str | Path) -> str:
    command = [sys.executable, "-m", "bbnode", *map(str, words)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def namespaces() -> Iterator[dict[str, str]]:
    """Namespace by role, joined by a veth pair."""
    made = {role: f"bbtest-{os.getpid()}-{role}" for role in HOSTS}
    try:
        for name in made.values():
            ip("netns", "add", name)
        ends = [("server", "bbv0"), ("client", "bbv1")]
        (a, va), (b, vb) = ((made[role], device) for role, device in ends)
        ip("link", "add", va, "netns", a, "type", "veth", "peer", "name", vb, "netns", b)
        for role, device in ends:
            ip("-n", made[role], "addr", "add", f"{HOSTS[role]}/24", "dev", device)
            for each in ("lo", device):
                ip("-n", made[role], "link", "set", each, "up")
        yield made
    finally:
        for name in made.values():
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


@pytest.mark.slow
@NEEDS
def test_a_cut_link_is_noticed_within_twenty_seconds(
    tmp_path: Path, namespaces: dict[str, str]
) -> None:
    artifact = tmp_path / "artifact.onnx"
    bbnode("compile", "bbnode.examples.federated_digits:FederatedRound", "-o", artifact)
    options: list[str] = []
    for role, host in HOSTS.items():
        listen = f"/ip4/{host}/tcp/4001"
        bbnode("init", tmp_path / role, "--artifact", artifact, "--target", role,
               "--listen", listen, *options)  # fmt: skip
        peer = load_identity(paths.identity_file(tmp_path / role / "state")).peer_id
        options = ["--bootstrap", f"{listen}/p2p/{peer}"]
    processes = []
    try:
        with wait_for_ready(tmp_path, 2) as environment:
            for role, namespace in namespaces.items():
                log = (tmp_path / f"{role}.log").open("wb")
                command = ["ip", "netns", "exec", namespace, sys.executable, "-m", "bbnode",
                           "run", "--config", str(tmp_path / role / "node.toml")]  # fmt: skip
                processes.append(subprocess.Popen(command, env=environment, stderr=log))
                log.close()
        socket = paths.control_socket(tmp_path / "server" / "state")
        with (
            ControlClient(socket, timeout_s=60.0) as subscribed,
            ControlClient(socket, timeout_s=60.0) as control,
        ):
            events = Events(subscribed)
            if not control.get("/v1/status")["peers"]:
                events.until(lambda e: e["type"] == "peer_up")
            ip("-n", namespaces["server"], "link", "set", "bbv0", "down")
            begun = time.monotonic()
            events.until(lambda e: e["type"] == "peer_down")
            assert time.monotonic() - begun < 20.0
            ip("-n", namespaces["server"], "link", "set", "bbv0", "up")
            events.until(lambda e: e["type"] == "peer_up")
    finally:
        for process in processes:
            process.kill()
            process.wait()
