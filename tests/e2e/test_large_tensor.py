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
from bbnode.daemon.control.client import ControlClient
from bbnode.daemon.testbed.nodes import ChildNode, held_folder, write_nodes
from bbnode.daemon.testbed.plan import make_plan
from bbnode.daemon.testbed.program import find_program
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
def pair(folder: Path, tensor_bytes: int, limits: dict[str, int]) -> Iterator[list[ChildNode]]:
    """A server and a client of `OneTensor` that are connected."""
    program = find_program("tests.e2e.one_tensor:OneTensor", {"size": tensor_bytes // 4})
    plan = make_plan(
        program,
        nodes="server=1,client=1",
        settings=[f"limits.{key}={value}" for key, value in limits.items()],
        base=folder,
    )
    with held_folder(folder) as nodes:
        made = write_nodes(plan, nodes, port=0, wait_s=PATIENCE_S)
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


def moved(server: ChildNode) -> dict[str, Any]:
    """What the server says of one transfer."""
    with ControlClient(paths.control_socket(server.state_dir), timeout_s=PATIENCE_S) as client:
        return client.post(
            "/v1/invoke", {"target": "server", "inputs": {"tick": "trigger"}, "wait_s": PATIENCE_S}
        )


def most_mib(node: ChildNode) -> int:
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
    # One that is looked at, one that comes, one that has not been given back yet, and one whose
    # memory lies free to be used again.
    assert took <= 4 * 64 + ALLOWED_MIB


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
