"""The control plane: over a real unix socket, with clients that behave and clients that do not."""

from __future__ import annotations

import json
import os
import socket
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from bbnode.daemon import control_wire as wire
from bbnode.daemon.control import AsyncControlClient, ControlClient, ControlLimits, ControlServer
from bbnode.ir.errors import DeploymentError, EnvironmentFault

# Far beyond what any of this takes: it only ends a test that would hang.
LIMIT_S = 20.0


class Refused(DeploymentError):
    """What a command of these tests raises."""


async def echo(args: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"args": dict(args)}


async def refuse(args: Mapping[str, Any]) -> Mapping[str, Any]:
    raise Refused("not today; try tomorrow")


async def crash(args: Mapping[str, Any]) -> Mapping[str, Any]:
    raise ZeroDivisionError("a fault of ours")


async def never(args: Mapping[str, Any]) -> Mapping[str, Any]:
    await trio.sleep_forever()
    raise AssertionError


async def unprintable(args: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"x": object()}


COMMANDS = {
    "echo": echo,
    "refuse": refuse,
    "crash": crash,
    "never": never,
    "unprintable": unprintable,
}


def make_server(tmp_path: Path, **limits: Any) -> ControlServer:
    server = ControlServer(tmp_path / "control.sock", limits=ControlLimits(**limits))
    for name, command in COMMANDS.items():
        server.register(name, command)
    return server


@pytest.fixture
async def server(tmp_path: Path, nursery: trio.Nursery) -> ControlServer:
    server = make_server(tmp_path)
    with trio.fail_after(LIMIT_S):
        await nursery.start(server.run)
    return server


async def subscribed(server: ControlServer, count: int) -> None:
    """Wait until so many clients listen to events."""
    while server.counters()["control.subscribers"] != count:
        await trio.lowlevel.checkpoint()


async def raw(path: Path, data: bytes, *, lines: int = 1) -> list[dict[str, Any]]:
    """Send bytes as they are, and read so many lines of answer (fewer if it closes)."""
    received = b""
    with trio.fail_after(LIMIT_S):
        async with await trio.open_unix_socket(str(path)) as stream:
            await stream.send_all(data)
            while received.count(b"\n") < lines:
                some = await stream.receive_some(65536)
                if not some:
                    break
                received += some
    return [json.loads(line) for line in received.splitlines()]


async def test_a_command_is_answered_with_its_result(server: ControlServer) -> None:
    with trio.fail_after(LIMIT_S):
        async with AsyncControlClient(server.path) as client:
            assert await client.call("echo", a=1, b=["x"]) == {"args": {"a": 1, "b": ["x"]}}
            assert await client.call("echo") == {"args": {}}


async def test_the_plain_client_says_the_same(server: ControlServer) -> None:
    def ask() -> dict[str, Any]:
        with ControlClient(server.path) as client:
            client.call("echo")
            return client.call("echo", n=2)

    with trio.fail_after(LIMIT_S):
        assert await trio.to_thread.run_sync(ask) == {"args": {"n": 2}}


async def test_only_the_owner_can_open_the_socket(server: ControlServer) -> None:
    assert stat.S_IMODE(server.path.stat().st_mode) == 0o600


@pytest.mark.parametrize(
    ("command", "kind", "message"),
    [
        ("refuse", "Refused", "not today; try tomorrow"),
        ("crash", "InternalError", "its log says where"),
        ("unprintable", "ControlProtocolError", "not JSON"),
        ("nothing", "UnknownCommand", "there is: crash, echo, events, never, refuse"),
    ],
)
async def test_a_command_that_fails_says_why_and_the_connection_goes_on(
    server: ControlServer, command: str, kind: str, message: str
) -> None:
    with trio.fail_after(LIMIT_S):
        async with AsyncControlClient(server.path) as client:
            with pytest.raises(wire.ControlError, match=message) as caught:
                await client.call(command)
            assert caught.value.kind == kind
            assert await client.call("echo") == {"args": {}}


async def test_a_command_has_a_deadline(tmp_path: Path, nursery: trio.Nursery) -> None:
    server = make_server(tmp_path, command_s=0.01)
    await nursery.start(server.run)
    with trio.fail_after(LIMIT_S):
        async with AsyncControlClient(server.path) as client:
            with pytest.raises(wire.ControlError, match=r"not done within 0\.01 s") as caught:
                await client.call("never")
            assert caught.value.kind == "Timeout"


async def test_a_client_has_a_deadline_too(server: ControlServer) -> None:
    with trio.fail_after(LIMIT_S):
        async with AsyncControlClient(server.path, timeout_s=0.01) as client:
            with pytest.raises(wire.ControlTimeout):
                await client.call("never")

    def ask() -> None:
        with ControlClient(server.path, timeout_s=0.01) as client:
            client.call("never")

    with trio.fail_after(LIMIT_S), pytest.raises(wire.ControlTimeout, match="longer --timeout"):
        await trio.to_thread.run_sync(ask)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (b"garbage", "not a line of JSON"),
        (b"\xff\xfe", "not a line of JSON"),
        (b"[" * 50_000, "not a line of JSON"),
        (b"", "not a line of JSON"),
        (b"[]", "not a JSON object"),
        (b'{"cmd": "echo"}', "version None is not supported"),
        (b'{"v": 2, "cmd": "echo"}', "version 2 is not supported"),
        (b'{"v": true, "cmd": "echo"}', "version True is not supported"),
        (b'{"v": 1}', "'cmd' has to be"),
        (b'{"v": 1, "cmd": 3}', "'cmd' has to be"),
        (b'{"v": 1, "cmd": "echo", "args": []}', "'args' has to be"),
        (b'{"v": 1, "cmd": "echo", "id": {}}', "'id' has to be"),
        (b'{"v": 1, "cmd": "echo", "extra": 1}', "unknown field 'extra'"),
    ],
)
async def test_garbage_gets_an_error_and_the_next_line_an_answer(
    server: ControlServer, line: bytes, expected: str
) -> None:
    good = b'{"v": 1, "id": "x", "cmd": "echo"}\n'
    refused, answered = await raw(server.path, line + b"\n" + good, lines=2)
    assert refused["ok"] is False
    assert refused["error"]["kind"] == "BadRequest"
    assert expected in refused["error"]["message"]
    assert answered == {"v": 1, "id": "x", "ok": True, "result": {"args": {}}}
    assert server.counters()["control.bad_requests"] == 1


async def test_a_line_without_an_end_is_cut_off(server: ControlServer) -> None:
    answers = await raw(server.path, b"x" * (wire.MAX_REQUEST_BYTES + 1), lines=2)
    assert [a["error"]["kind"] for a in answers] == ["BadRequest"]
    assert (await raw(server.path, wire.request_line("echo", {}, 1)))[0]["ok"] is True


async def test_too_many_clients_are_told_so(tmp_path: Path, nursery: trio.Nursery) -> None:
    server = make_server(tmp_path, connections=1)
    await nursery.start(server.run)
    with trio.fail_after(LIMIT_S):
        async with AsyncControlClient(server.path) as first:
            await first.call("echo")
            (busy,) = await raw(server.path, b"", lines=2)
            assert busy["error"]["kind"] == "Busy"
            await first.call("echo")


async def test_an_idle_client_is_closed(tmp_path: Path, nursery: trio.Nursery) -> None:
    server = make_server(tmp_path, idle_s=0.01)
    await nursery.start(server.run)
    assert await raw(server.path, b"") == []


async def test_events_reach_every_subscriber_in_order(server: ControlServer) -> None:
    with trio.fail_after(LIMIT_S):
        async with AsyncControlClient(server.path) as one, AsyncControlClient(server.path) as two:
            await one.subscribe()
            await two.subscribe()
            for number in range(3):
                server.publish({"n": number})
            for stream in (one.events(), two.events()):
                found = [await anext(stream) for _ in range(3)]
                assert [line["event"]["n"] for line in found] == [0, 1, 2]
                assert {line["dropped"] for line in found} == {0}


async def test_a_slow_subscriber_loses_the_oldest_events_and_learns_how_many(
    tmp_path: Path, nursery: trio.Nursery
) -> None:
    server = make_server(tmp_path, queued_events=2)
    await nursery.start(server.run)
    with trio.fail_after(LIMIT_S):
        async with AsyncControlClient(server.path) as client:
            await client.subscribe()
            stream = client.events()
            # No checkpoint between these: the server cannot send meanwhile.
            for number in range(5):
                server.publish({"n": number})
            first, second = await anext(stream), await anext(stream)
            assert (first["event"], first["dropped"]) == ({"n": 3}, 3)
            assert (second["event"], second["dropped"]) == ({"n": 4}, 0)
    assert server.counters()["control.events_dropped"] == 3


async def test_a_subscriber_that_left_is_forgotten(server: ControlServer) -> None:
    with trio.fail_after(LIMIT_S):
        async with AsyncControlClient(server.path) as client:
            await client.call("events")
            assert server.counters()["control.subscribers"] == 1
        await subscribed(server, 0)


async def test_a_stopped_daemon_ends_the_stream_and_removes_its_socket(tmp_path: Path) -> None:
    server = make_server(tmp_path)
    seen = []

    async def listen(client: AsyncControlClient) -> None:
        seen.extend([line async for line in client.events()])

    with trio.fail_after(LIMIT_S):
        async with trio.open_nursery() as clients, trio.open_nursery() as daemon:
            await daemon.start(server.run)
            client = await AsyncControlClient(server.path).__aenter__()
            clients.start_soon(listen, client)
            await subscribed(server, 1)
            daemon.cancel_scope.cancel()
        await client.__aexit__()
    assert seen == []
    assert not server.path.exists()
    with pytest.raises(wire.NotRunning, match="start it with `bbnode run`"):
        ControlClient(server.path).__enter__()


async def test_the_socket_of_a_killed_daemon_is_replaced(tmp_path: Path) -> None:
    server = make_server(tmp_path)
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(os.fspath(server.path))
    assert server.path.is_socket()
    with trio.fail_after(LIMIT_S):
        async with trio.open_nursery() as nursery:
            await nursery.start(server.run)
            async with AsyncControlClient(server.path) as client:
                await client.call("echo")
            nursery.cancel_scope.cancel()


async def test_a_second_daemon_is_refused_and_the_first_goes_on(
    server: ControlServer, tmp_path: Path
) -> None:
    with pytest.raises(wire.AlreadyRunning):
        await make_server(tmp_path).run()
    async with AsyncControlClient(server.path) as client:
        await client.call("echo")


async def test_another_file_of_that_name_is_left_alone(tmp_path: Path) -> None:
    server = make_server(tmp_path)
    server.path.write_text("mine")
    with pytest.raises(EnvironmentFault, match="something else has that name"):
        await server.run()
    assert server.path.read_text() == "mine"


def test_a_command_is_registered_once(tmp_path: Path) -> None:
    server = make_server(tmp_path)
    with pytest.raises(ValueError, match="registered already"):
        server.register("echo", echo)
    with pytest.raises(ValueError, match="registered already"):
        server.register("events", echo)


@given(line=st.binary(max_size=200))
def test_any_request_is_one_or_a_protocol_error(line: bytes) -> None:
    try:
        assert isinstance(wire.parse_request(line), wire.Request)
    except wire.ControlProtocolError as error:
        assert str(error)  # noqa: PT017 - both ends are right; the message must not be empty


JSON_SCALARS = st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.text(max_size=20)
ARGS = st.dictionaries(st.text(max_size=8), JSON_SCALARS | st.lists(JSON_SCALARS), max_size=4)


@given(args=ARGS, cmd=st.text(min_size=1, max_size=12), number=st.integers(0, 2**40))
def test_a_request_reads_back_as_it_was_written(args: dict, cmd: str, number: int) -> None:
    line = wire.request_line(cmd, args, number)
    assert line.count(b"\n") == 1
    parsed = wire.parse_request(line[:-1])
    if all(not 0xD800 <= ord(c) < 0xE000 for c in repr((args, cmd))):
        assert parsed == wire.Request(cmd=cmd, args=args, id=number)


@given(chunks=st.lists(st.binary(max_size=8)))
def test_lines_are_cut_wherever_the_chunks_end(chunks: list[bytes]) -> None:
    lines = wire.LineBuffer(1000)
    found = []
    for chunk in chunks:
        lines.add(chunk)
        while (line := lines.take()) is not None:
            found.append(line)
    assert found == b"".join(chunks).split(b"\n")[:-1]


def test_numbers_that_are_not_json_become_null() -> None:
    line = wire.success(1, {"a": float("nan"), "b": [float("inf")], "c": 1.5})
    assert json.loads(line)["result"] == {"a": None, "b": [None], "c": 1.5}
