"""Large tensors from op to op, between two daemons: with default settings, four at once, and of
two gigabytes.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from bbnode.daemon import paths
from bbnode.daemon.artifacts.artifact import serialize
from bbnode.daemon.artifacts.build import compile_module
from bbnode.daemon.control.client import ControlClient
from bbnode.daemon.demo.nodes import DemoNode, choose_port, make_one
from bbnode.transport.identity import create_identity
from tests.e2e.cluster import stop, wait_for_ready

MIB = 2**20
# Beyond the tensor itself, of the receiving process: what issue and documents allow.
ALLOWED_MIB = 64
PATIENCE_S = 300.0


@pytest.fixture(autouse=True)
def _program_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Daemons import `tests.e2e.one_tensor`."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))


@contextmanager
def pair(folder: Path, tensor_bytes: int, limits: dict[str, int]) -> Iterator[list[DemoNode]]:
    """A server and a client of `OneTensor` that are connected."""
    artifact = folder / "artifact.onnx"
    args = {"size": tensor_bytes // 4}
    artifact.write_bytes(serialize(compile_module("tests.e2e.one_tensor:OneTensor", args)))
    listen = f"/ip4/127.0.0.1/tcp/{choose_port(0)}"
    made: list[DemoNode] = []
    for name in ("server", "client"):
        paths.make_state_dir(folder / name / "state")
        identity = create_identity(paths.identity_file(folder / name / "state"))
        network: dict[str, Any] = {"listen": [listen]}
        if made:
            network = {"bootstrap": [f"{listen}/p2p/{made[0].peer}"]}
        settings = {
            "node": {
                "name": name,
                "state_dir": str(folder / name / "state"),
                "components": ["tests.e2e.one_tensor"],
            },
            "artifact": {"path": str(artifact), "targets": [name]},
            "network": network,
            "limits": limits,
        }
        made.append(make_one(folder / name, identity, settings))
    try:
        with (
            tempfile.TemporaryDirectory() as short,
            wait_for_ready(Path(short), len(made)) as environment,
        ):
            for node in made:
                node.start(notify_socket=Path(environment["NOTIFY_SOCKET"]))
        with ControlClient(paths.control_socket(made[0].state_dir), timeout_s=60.0) as client:
            for _ in client.stream("/v1/events", {"type": "peer_up", "last": 10}):
                break
        yield made
    finally:
        for node in made:
            stop(node)


def moved(server: DemoNode) -> dict[str, Any]:
    """What the server says of one transfer."""
    with ControlClient(paths.control_socket(server.state_dir), timeout_s=PATIENCE_S) as client:
        return client.post(
            "/v1/invoke", {"target": "server", "inputs": {"tick": "trigger"}, "wait_s": PATIENCE_S}
        )


def most_mib(node: DemoNode) -> int:
    """The most memory that a daemon has had so far."""
    assert node.process is not None
    lines = Path(f"/proc/{node.process.pid}/status").read_text("ascii").splitlines()
    (line,) = (line for line in lines if line.startswith("VmHWM:"))
    return int(line.split()[1]) // 1024


def test_64_mib_pass_with_default_settings(tmp_path: Path) -> None:
    with pair(tmp_path, 64 * MIB, {}) as (server, _client):
        told = moved(server)
    assert told["ok"], told
    assert len(told["outputs"]["answer"]["responded"]) == 1


def test_four_of_64_mib_at_once_wait_for_each_other(tmp_path: Path) -> None:
    with pair(tmp_path, 64 * MIB, {}) as (server, client):
        before = most_mib(client)
        with ThreadPoolExecutor(4) as callers:
            told = list(callers.map(moved, [server] * 4))
        took = most_mib(client) - before
    for each in told:
        assert each["ok"], told
        assert len(each["outputs"]["answer"]["responded"]) == 1
    # One that is looked at, one that comes, and one more that has not been given back yet.
    assert took <= 3 * 64 + ALLOWED_MIB


@pytest.mark.slow
def test_two_gigabytes_pass_and_take_little_more_than_themselves(tmp_path: Path) -> None:
    limits = {"envelope_bytes": 3 * 1024 * MIB, "ingress_bytes": 3 * 1024 * MIB}
    with pair(tmp_path, 2048 * MIB, limits) as (server, client):
        before = most_mib(client)
        told = moved(server)
        took = most_mib(client) - before
    assert told["ok"], told
    assert len(told["outputs"]["answer"]["responded"]) == 1
    assert 2048 <= took <= 2048 + ALLOWED_MIB
