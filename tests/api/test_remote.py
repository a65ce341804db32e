"""`bbnode.connect`: a running daemon by any of its names, and what it refuses."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

import bbnode
from bbnode.api.where import control_address
from bbnode.daemon.control.client import TcpAddress
from tests.api.programs import Batches
from tests.patience import PATIENCE_S

TICK = {"tick": "trigger"}


@pytest.fixture
def node(tmp_path: Path) -> Iterator[bbnode.BlockingNode]:
    with bbnode.open(
        Batches,
        transport="memory",
        state_dir=tmp_path / "state",
        settings={"control.tcp": "127.0.0.1:0"},
    ) as opened:
        yield opened


def url(node: bbnode.BlockingNode) -> str:
    return f"http://127.0.0.1:{node._node._daemon._control.server.tcp_port}"


def test_a_daemon_has_many_names(tmp_path: Path, node: bbnode.BlockingNode) -> None:
    file = tmp_path / "node.toml"
    file.write_text(
        '[node]\nstate_dir = "state"\n[artifact]\nmodule = "tests.api.programs:Batches"\n'
        'targets = ["worker"]\n'
    )
    token = tmp_path / "state" / "control.token"
    names = (file, tmp_path, tmp_path / "state", str(node.socket))
    for there in (
        *(bbnode.connect(name, timeout_s=PATIENCE_S) for name in names),
        bbnode.connect(url(node), token=token, timeout_s=PATIENCE_S),
        bbnode.connect(url(node), token=token.read_text(), timeout_s=PATIENCE_S),
    ):
        assert there.status()["peer_id"] == node.peer_id


def test_it_gives_arrays_and_streams(node: bbnode.BlockingNode) -> None:
    there = bbnode.connect(node.socket, timeout_s=PATIENCE_S)
    outcome = there.invoke("worker", TICK)
    assert outcome["batch"].shape == (2, 3)
    assert outcome["labels"].tolist() == [0, 0]
    with there.events(["app_event"], last=2, follow=False) as events:
        assert {line["event"]["topic"] for line in events} == {"batch", "labels"}
    with there.log_lines(last=1, follow=False) as lines:
        assert all("log" in line for line in lines)
    assert there.readyz()["ready"]
    assert there.healthz()
    assert "bbnode" in there.metrics()
    assert "/v1/status" in there.describe()["paths"]


def test_a_refusal_has_its_kind(node: bbnode.BlockingNode) -> None:
    there = bbnode.connect(node.socket, timeout_s=PATIENCE_S)
    with pytest.raises(bbnode.ControlError, match="did you mean 'worker'") as refused:
        there.invoke("workr", TICK)
    assert refused.value.kind == "UnknownTarget"
    # A node of this process answers the same requests in the same way.
    for each in (there, node):
        with pytest.raises(bbnode.ControlError) as refused:
            each.connect("nobody")
        assert refused.value.kind == "InvalidPeerId"
        with pytest.raises(bbnode.ControlError, match="greater than or equal to 1"):
            each.rounds(0)
        with pytest.raises(bbnode.ControlError, match="last"):
            each.events(last=-1)
    with pytest.raises(bbnode.WaitTimeout, match="0 of 1 peers connected"):
        there.wait_for_peers(timeout_s=0)


def test_a_wrong_token_is_refused(node: bbnode.BlockingNode) -> None:
    with pytest.raises(bbnode.ControlError) as refused:
        bbnode.connect(url(node), token="x" * 43, timeout_s=PATIENCE_S)
    assert refused.value.kind == "Unauthorized"


def test_stopping_it_returns_when_it_has_stopped(node: bbnode.BlockingNode) -> None:
    there = bbnode.connect(node.socket, timeout_s=PATIENCE_S)
    there.stop()
    there.stop()
    with pytest.raises(bbnode.NotRunning):
        there.status()
    with pytest.raises(bbnode.NodeStopped):
        node.status()


def test_asyncio_asks_a_daemon_too(node: bbnode.BlockingNode) -> None:
    async def main() -> None:
        async with bbnode.aio.connect(node.socket, timeout_s=PATIENCE_S) as there:
            async with await there.events() as events:
                outcome = await there.invoke("worker", TICK)
                assert outcome["batch"].shape == (2, 3)
                assert (await anext(events))["event"]["type"]
            waiting = asyncio.create_task(anext(await there.events(["never"])))
            await asyncio.sleep(0)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            with pytest.raises(bbnode.NotRunning):
                await bbnode.aio.connect("/nowhere/control.sock")

    asyncio.run(main())


@pytest.mark.parametrize(
    ("name", "token", "problem"),
    [
        ("https://127.0.0.1:1", "t", "write it as http://127.0.0.1:PORT"),
        ("http://example.org:80", "t", "ssh tunnel"),
        ("http://127.0.0.1", "t", "PORT"),
        ("http://127.0.0.1:99999", "t", "PORT"),
        ("http://127.0.0.1:1", None, "control.token"),
        ("http://127.0.0.1:1", "two\nlines", "not the content"),
        ("http://127.0.0.1:1", Path("/nowhere"), "can't be read"),
        ("node.onnx", None, "no configuration"),
        ("state", "t", "a token goes with the URL"),
    ],
)
def test_what_names_no_daemon_is_refused(name: str, token: object, problem: str) -> None:
    with pytest.raises(bbnode.ConfigError, match=problem):
        control_address(name, token)  # type: ignore[arg-type]


def test_a_token_is_not_shown() -> None:
    found = control_address("http://[::1]:80", "secret")
    assert isinstance(found, TcpAddress)
    assert "secret" not in repr(found)
    assert str(found) == "http://[::1]:80"
    assert "secret" not in repr(bbnode.RemoteNode("http://[::1]:80", token="secret"))
