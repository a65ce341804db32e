"""The control plane's sockets, clients, streams and bounds, over real sockets."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import stat
import threading
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.lowlevel

from bbnode.daemon.control import token as tokens
from bbnode.daemon.control.async_client import AsyncControlClient
from bbnode.daemon.control.client import ControlClient
from bbnode.daemon.control.errors import (
    AlreadyRunning,
    ControlError,
    ControlProtocolError,
    ControlTimeout,
    NotRunning,
    TcpRefused,
)
from bbnode.daemon.control.feed import Feed, followed
from bbnode.daemon.control.listen import UnknownGroup, parse_tcp, unix_listener
from bbnode.daemon.control.server import ControlLimits, HttpLimits
from bbnode.ir.errors import EnvironmentFault
from tests.daemon.live import Live, in_thread, running
from tests.daemon.test_control_api import raw
from tests.patience import PATIENCE_S


async def test_the_plain_client_says_the_same_as_the_one_on_trio(tmp_path: Path) -> None:
    async with running(tmp_path) as live:

        def plain() -> dict[str, Any]:
            with ControlClient(live.socket, timeout_s=PATIENCE_S) as client:
                client.get("/v1/status")
                return client.get("/v1/peers")

        async with AsyncControlClient(live.socket, timeout_s=PATIENCE_S) as client:
            await client.get("/v1/status")
            told = await client.get("/v1/peers")
        again = await in_thread(plain)
        assert [p["peer"] for p in again["peers"]] == [p["peer"] for p in told["peers"]]


async def test_only_the_owner_can_open_the_socket(tmp_path: Path) -> None:
    async with running(tmp_path, client=False) as live:
        assert stat.S_IMODE(live.socket.stat().st_mode) == 0o600
    assert not live.socket.exists()


async def test_a_group_can_open_it_where_that_is_configured(tmp_path: Path) -> None:
    import grp

    group = grp.getgrgid(os.getegid()).gr_name
    async with running(tmp_path, client=False, **{"control.group": group}) as live:
        assert stat.S_IMODE(live.socket.stat().st_mode) == 0o660
        assert stat.S_IMODE(live.socket.parent.stat().st_mode) == 0o710
        assert live.socket.stat().st_gid == os.getegid()
    path = tmp_path / "s.sock"
    with pytest.raises(UnknownGroup, match="no group"), unix_listener(path, group="no-such-group"):
        pass


async def test_a_second_daemon_is_refused_and_the_first_goes_on(tmp_path: Path) -> None:
    async with running(tmp_path, client=False) as live:
        with pytest.raises(AlreadyRunning), unix_listener(live.socket):
            pass
        async with AsyncControlClient(live.socket, timeout_s=PATIENCE_S) as client:
            await client.get("/v1/status")


async def test_the_socket_of_a_killed_daemon_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "control.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(os.fspath(path))
    assert path.is_socket()
    with unix_listener(path):
        assert path.is_socket()
    assert not path.exists()


async def test_another_file_of_that_name_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "control.sock"
    path.write_text("mine")
    refused = pytest.raises(EnvironmentFault, match="something else has that name")
    with refused, unix_listener(path):
        pass
    assert path.read_text() == "mine"


async def test_nobody_there_is_said_at_once(tmp_path: Path) -> None:
    with pytest.raises(NotRunning, match="start it with `bbnode run`"):
        ControlClient(tmp_path / "control.sock").__enter__()
    with pytest.raises(NotRunning, match="start it with `bbnode run`"):
        async with AsyncControlClient(tmp_path / "control.sock"):
            pass


async def test_a_client_has_a_deadline(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as mute:
        mute.bind(os.fspath(tmp_path / "mute.sock"))
        mute.listen(4)

        def ask() -> None:
            with ControlClient(tmp_path / "mute.sock", timeout_s=0.01) as client:
                client.get("/v1/status")

        with pytest.raises(ControlTimeout, match="longer --timeout"):
            await in_thread(ask)
        with pytest.raises(ControlTimeout, match="longer --timeout"):
            async with AsyncControlClient(tmp_path / "mute.sock", timeout_s=0.01) as client:
                await client.get("/v1/status")


async def test_a_server_that_speaks_something_else_is_an_error_and_no_traceback(
    tmp_path: Path, nursery: trio.Nursery
) -> None:
    listener = trio.socket.socket(socket.AF_UNIX)
    await listener.bind(os.fspath(tmp_path / "odd.sock"))
    listener.listen(4)
    ok = b"HTTP/1.1 200 OK\r\n"
    half = ok + b"Content-Length: 9\r\n\r\n"
    answers = [b"SSH-2.0-odd\r\n", half, ok + b"Content-Length: 2\r\n\r\n[]"] * 2

    async def serve() -> None:
        for answer in answers:
            stream = trio.SocketStream((await listener.accept())[0])
            async with stream:
                await stream.receive_some(4096)
                await stream.send_all(answer)

    nursery.start_soon(serve)

    def ask() -> None:
        with ControlClient(tmp_path / "odd.sock", timeout_s=PATIENCE_S) as client:
            client.get("/v1/status")

    for expected in (NotRunning, NotRunning, ControlProtocolError):
        with pytest.raises(expected):
            await in_thread(ask)
    for expected in (NotRunning, NotRunning, ControlProtocolError):
        with pytest.raises(expected):
            async with AsyncControlClient(tmp_path / "odd.sock", timeout_s=PATIENCE_S) as client:
                await client.get("/v1/status")
    listener.close()


async def test_too_many_clients_are_told_so(tmp_path: Path) -> None:
    limits = ControlLimits(connections=1)
    async with (
        running(tmp_path, client=False, limits=limits) as live,
        AsyncControlClient(live.socket, timeout_s=PATIENCE_S) as first,
    ):
        await first.get("/v1/status")
        async with AsyncControlClient(live.socket, timeout_s=PATIENCE_S) as second:
            with pytest.raises(ControlError, match="too many") as caught:
                await second.get("/v1/status")
            assert caught.value.status == 503
        await first.get("/v1/status")


async def test_a_request_has_a_deadline(tmp_path: Path) -> None:
    limits = ControlLimits(request_s=0.01)
    async with running(tmp_path, limits=limits) as live:
        live.save = trio.sleep_forever  # type: ignore[method-assign, assignment]
        async with AsyncControlClient(live.socket, timeout_s=PATIENCE_S) as client:
            with pytest.raises(ControlError, match=r"not answered within 0\.01 s") as caught:
                await client.post("/v1/snapshot")
            assert (caught.value.status, caught.value.kind) == (504, "Timeout")
            await client.get("/v1/status")


async def test_a_fault_in_a_handler_costs_that_request_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(tmp_path) as live:
        live.save_fails = ZeroDivisionError("a fault of ours")
        async with AsyncControlClient(live.socket, timeout_s=PATIENCE_S) as client:
            with pytest.raises(ControlError, match="its log says where") as caught:
                await client.post("/v1/snapshot")
            assert (caught.value.status, caught.value.kind) == (500, "InternalError")
            counters = (await client.get("/v1/status"))["counters"]
        assert counters["control.internal_errors"] == 1
    assert "a fault of ours" in caplog.text


async def subscribed(live: Live, count: int) -> None:
    """Wait until so many clients listen."""
    while live.plane.host.events.subscribers != count:
        await trio.lowlevel.checkpoint()


async def test_events_reach_every_subscriber_in_order(tmp_path: Path) -> None:
    async with running(tmp_path, client=False) as live:
        async with (
            AsyncControlClient(live.socket, timeout_s=PATIENCE_S) as one,
            AsyncControlClient(live.socket, timeout_s=PATIENCE_S) as two,
        ):
            streams = [await c.stream("/v1/events", {"type": ["a", "b"]}) for c in (one, two)]
            for kind in ("a", "b", "c", "a"):
                live.plane.publish({"type": kind})
            for stream in streams:
                found = [await anext(stream) for _ in range(3)]
                assert [line["event"]["type"] for line in found] == ["a", "b", "a"]
                assert {line["dropped"] for line in found} == {0}
                assert found[0]["schema"] == "bbnode/event/1"
        await subscribed(live, 0)


async def test_kept_events_come_first_for_those_that_ask(tmp_path: Path) -> None:
    async with running(tmp_path, client=False) as live:
        for number in range(4):
            live.plane.publish({"type": "mine", "n": number})
        async with AsyncControlClient(live.socket, timeout_s=PATIENCE_S) as client:
            query = {"last": 2, "type": ["mine"], "follow": 0}
            lines = [line async for line in await client.stream("/v1/events", query)]
        assert [line["event"]["n"] for line in lines] == [2, 3]


async def test_a_stopped_daemon_ends_its_streams(tmp_path: Path) -> None:
    async with trio.open_nursery() as clients:
        seen: list[Any] = []
        client: Any = None

        async def listen() -> None:
            seen.extend([line async for line in await client.stream("/v1/events")])

        async with running(tmp_path, client=False) as live:
            client = await AsyncControlClient(live.socket, timeout_s=PATIENCE_S).__aenter__()
            clients.start_soon(listen)
            await subscribed(live, 1)
        with trio.fail_after(PATIENCE_S):
            while clients.child_tasks:
                await trio.lowlevel.checkpoint()
        await client.__aexit__()
    assert seen == []


async def test_a_slow_subscriber_loses_the_oldest_and_learns_how_many() -> None:
    feed = Feed("event", queued=2, clock=lambda: 1.0)
    subscription = feed.subscribe()
    for number in range(5):
        feed.publish({"n": number})
    feed.close()
    lines = [await subscription.next() for _ in range(3)]
    assert [line and b'"n": 3' in line and b'"dropped": 3' in line for line in lines[:1]] == [True]
    assert lines[1] is not None
    assert b'"n": 4' in lines[1]
    assert b'"dropped": 0' in lines[1]
    assert lines[2] is None
    assert feed.dropped == 3


async def test_what_has_no_json_is_told_as_such() -> None:
    feed = Feed("event")
    subscription = feed.subscribe()
    feed.publish({"x": object()})
    line = await subscription.next()
    assert line is not None
    assert b"unprintable" in line


async def test_a_subscriber_that_does_not_read_is_given_up_and_counted(tmp_path: Path) -> None:
    limits = ControlLimits(http=HttpLimits(write_s=0.01))
    async with running(tmp_path, client=False, limits=limits) as live:
        stream = await trio.open_unix_socket(str(live.socket))
        async with stream:
            await stream.send_all(b"GET /v1/events HTTP/1.1\r\nHost: x\r\n\r\n")
            await subscribed(live, 1)
            while live.plane.host.events.subscribers:
                live.plane.publish({"type": "flood", "text": "x" * 65536})
                await trio.lowlevel.checkpoint()
        while not live.plane.server.counters().get("control.clients_lost"):
            await trio.lowlevel.checkpoint()
        async with AsyncControlClient(live.socket, timeout_s=PATIENCE_S) as client:
            await client.get("/v1/status")


async def test_logs_come_from_every_thread_and_can_be_followed(tmp_path: Path) -> None:
    logger = logging.getLogger("bbnode.test")
    async with running(tmp_path, client=False) as live:
        async with AsyncControlClient(live.socket, timeout_s=PATIENCE_S) as client:
            await ask_level(live, "info")
            logger.info("before", extra={"n": 1})
            logger.debug("not at this level")
            stream = await client.stream("/v1/logs", {"level": "warning"})
            logger.info("too mild")
            logger.warning("here")
            thread = threading.Thread(target=logger.error, args=("from a thread",))
            thread.start()
            with trio.fail_after(PATIENCE_S):
                found = [(await anext(stream))["log"] for _ in range(3)]
        assert [line["msg"] for line in found] == ["log level changed", "here", "from a thread"]
        kept = [item.data["msg"] for item in live.plane.host.logs.kept()]
        assert "before" in kept
        assert "not at this level" not in kept
        thread.join()
    assert not any(type(h).__name__ == "LogFeedHandler" for h in logging.getLogger().handlers)


async def ask_level(live: Live, level: str) -> None:
    async with AsyncControlClient(live.socket, timeout_s=PATIENCE_S) as client:
        await client.request("PUT", "/v1/log-level", {"level": level})


async def test_a_flood_of_lines_from_a_thread_is_bounded() -> None:
    feed = Feed("log")
    with followed(feed):
        handler = logging.getLogger().handlers[-1]

        def flood() -> None:
            for number in range(3000):
                handler.handle(logging.makeLogRecord({"msg": f"line {number}"}))

        thread = threading.Thread(target=flood)
        thread.start()
        thread.join()
        assert feed.dropped >= 3000 - 1024
        await trio.lowlevel.checkpoint()
        await trio.testing.wait_all_tasks_blocked()
        assert len(feed.kept()) == 1024


@pytest.mark.parametrize(
    "address",
    ["0.0.0.0:1", "127.0.0.1", "127.0.0.1:", "127.0.0.1:x", "127.0.0.1:70000", "host:1", "[::]:1"],
)
def test_tcp_is_loopback_alone(address: str) -> None:
    with pytest.raises(TcpRefused, match=r"127\.0\.0\.1:PORT"):
        parse_tcp(address)


def test_loopback_has_two_families() -> None:
    assert parse_tcp("127.0.0.1:80") == ("127.0.0.1", 80)
    assert parse_tcp("[::1]:0") == ("::1", 0)


async def test_tcp_takes_nobody_without_the_token(tmp_path: Path) -> None:
    async with running(tmp_path, client=False, **{"control.tcp": "127.0.0.1:0"}) as live:
        file = tokens.token_file(live.state_dir)
        token = file.read_text().strip()
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        port = live.plane.server.tcp_port
        assert port is not None
        for header, status in (
            ("", b"401"),
            ("Authorization: Bearer wrong\r\n", b"401"),
            (f"Authorization: Basic {token}\r\n", b"401"),
            (f"Authorization: Bearer {token}x\r\n", b"401"),
            (f"Authorization: Bearer {token}\r\n", b"200"),
        ):
            async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
                request = (
                    f"GET /healthz HTTP/1.1\r\nHost: localhost\r\n{header}Connection: close\r\n\r\n"
                )
                await stream.send_all(request.encode())
                assert (await stream.receive_some(4096)).split()[1] == status
        # The unix socket's own mode is what guards it.
        assert b" 200 " in await raw(live, "/healthz")
        assert live.plane.server.counters()["control.unauthorized"] == 4


def test_a_token_is_made_once_and_never_read_from_an_open_file(tmp_path: Path) -> None:
    file = tmp_path / "control.token"
    token = tokens.load_or_create_token(file)
    assert tokens.load_or_create_token(file) == token
    file.chmod(0o644)
    with pytest.raises(tokens.TokenFileUnsafe, match="chmod 600"):
        tokens.load_or_create_token(file)
    for content in ("", "short\n", "y" * 300, "ü" * 40):
        file.write_text(content, encoding="utf-8")
        file.chmod(0o600)
        with pytest.raises(tokens.TokenFileUnsafe, match="remove it"):
            tokens.load_or_create_token(file)


BODY = 1 << 20


async def begun(port: int, header: str = "") -> trio.SocketStream:
    """A client that says it sends a MiB."""
    stream = await trio.open_tcp_stream("127.0.0.1", port)
    head = f"POST /v1/stop HTTP/1.1\r\nHost: localhost\r\n{header}Content-Length: {BODY}\r\n\r\n"
    await stream.send_all(head.encode())
    return stream


async def test_without_the_token_no_byte_of_a_body_is_read(tmp_path: Path) -> None:
    async with running(tmp_path, client=False, **{"control.tcp": "127.0.0.1:0"}) as live:
        server = live.plane.server
        assert server.tcp_port is not None
        for header in ("", "Authorization: Bearer wrong\r\n", "Expect: 100-continue\r\n"):
            async with await begun(server.tcp_port, header) as stream:
                with trio.fail_after(PATIENCE_S):
                    # It is answered at once, and hears why although it sends on.
                    assert (await stream.receive_some(4096)).split()[1] == b"401"
                    with contextlib.suppress(trio.BrokenResourceError):
                        await stream.send_all(bytes(BODY))
                        while await stream.receive_some(4096):
                            pass
        assert server._bodies.held_bytes == 0
        assert not live.stopped


async def test_the_bodies_of_all_requests_are_bounded(tmp_path: Path) -> None:
    limits = ControlLimits(bodies_bytes=BODY + BODY // 2)
    flags = {"control.tcp": "127.0.0.1:0"}
    async with running(tmp_path, client=False, limits=limits, **flags) as live:
        server = live.plane.server
        assert server.tcp_port is not None
        token = tokens.token_file(live.state_dir).read_text().strip()
        bearer = f"Authorization: Bearer {token}\r\n"
        async with await begun(server.tcp_port, bearer) as first:
            await first.send_all(bytes(BODY - 1))
            while server._bodies.held_bytes < BODY - 1:
                await trio.lowlevel.checkpoint()
            async with await begun(server.tcp_port, bearer) as second:
                with trio.fail_after(PATIENCE_S), contextlib.suppress(trio.BrokenResourceError):
                    await second.send_all(bytes(BODY - 1))
                with trio.fail_after(PATIENCE_S):
                    assert (await second.receive_some(4096)).split()[1] == b"503"
            assert server._bodies.held_bytes <= limits.bodies_bytes
        with trio.fail_after(PATIENCE_S):
            while server._bodies.held_bytes:
                await trio.lowlevel.checkpoint()


async def test_clients_that_prove_nothing_shut_nobody_out(tmp_path: Path) -> None:
    """Two hundred silent ones: who has the token gets in, and the node has its descriptors."""
    async with running(tmp_path, client=False, **{"control.tcp": "127.0.0.1:0"}) as live:
        server = live.plane.server
        assert server.tcp_port is not None
        token = tokens.token_file(live.state_dir).read_text().strip()
        bearer = f"Authorization: Bearer {token}\r\n"
        async with contextlib.AsyncExitStack() as stack:
            for _ in range(200):
                stream = await trio.open_tcp_stream("127.0.0.1", server.tcp_port)
                await stack.enter_async_context(stream)
            async with await trio.open_tcp_stream("127.0.0.1", server.tcp_port) as stream:
                head = f"GET /healthz HTTP/1.1\r\nHost: localhost\r\n{bearer}\r\n"
                await stream.send_all(head.encode())
                with trio.fail_after(PATIENCE_S):
                    assert (await stream.receive_some(4096)).split()[1] == b"200"
                assert server.counters()["control.connections"] <= ControlLimits().unproved + 1


async def test_more_clients_than_can_be_told_so_are_closed(tmp_path: Path) -> None:
    limits = ControlLimits(connections=2, told_busy=2)
    async with (
        running(tmp_path, client=False, limits=limits) as live,
        contextlib.AsyncExitStack() as stack,
    ):
        streams = [
            await stack.enter_async_context(await trio.open_unix_socket(str(live.socket)))
            for _ in range(8)
        ]
        with trio.fail_after(PATIENCE_S):
            assert await streams[-1].receive_some(16) == b""
        assert live.plane.server.counters()["control.connections"] <= 4
        assert live.plane.server.counters()["control.not_accepted"] >= 1
