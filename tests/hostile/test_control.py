"""Bad HTTP at the control plane: each request is answered with what is wrong with it.

The local user who may open the socket may do all that a node does; but a mistake, or a script that
guesses, ends nothing and leaves no traceback.
"""

from __future__ import annotations

import contextlib
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import trio

from bbnode.cli import exits
from bbnode.daemon.control.client import ControlClient
from bbnode.daemon.control.routes import ENDPOINTS
from bbnode.ir.errors import BbnodeError
from tests.daemon.live import Live, in_thread, running
from tests.patience import PATIENCE_S

DEEP = b"[" * 100_000
HUGE = 10**400
LONG = "9" * 5_000
BODIES = [
    b"null",
    b"[]",
    b'"x"',
    b"{",
    b"\xff\xfe",
    b"\x00",
    b'{"a": ' + DEEP,
    b'{"inputs": {"question": ' + b"[" * 900 + b"]" * 900 + b'}, "target": "server"}',
    b'{"value": ' + b"[" * 40 + b"1" + b"]" * 40 + b', "target": "server", "input": "question"}',
    b'{"timeout_s": 1e999, "peer": "x"}',
    b'{"timeout_s": NaN}',
    b'{"wait_s": -Infinity, "target": "server"}',
    b'{"kind": ' + LONG.encode() + b"}",
    *(
        json.dumps(body).encode()
        for body in (
            {"peer": 5},
            {"peer": ""},
            {"peer": "x" * 9_000},
            {"peer": "\ud800"},
            {"addresses": ["/ip4/1.2.3.4", 7, None, {}]},
            {"addresses": "x"},
            {"addresses": [["a"]]},
            {"timeout_s": HUGE, "peer": "x"},
            {"wait_s": HUGE, "target": "server"},
            {"wait_s": True, "target": "server"},
            {"kind": HUGE},
            {"kind": -1},
            {"kind": 1 << 70},
            {"kind": True},
            {"target": "\ud800"},
            {"target": "server", "inputs": {"\ud800": 1}},
            {"target": "server", "inputs": {"question": [[1], [2, 3]]}},
            {"target": "server", "inputs": {"question": HUGE}},
            {"target": "server", "inputs": {"question": [HUGE, 0.5]}},
            {"target": "server", "inputs": {"question": {"npy": "AAAA"}}},
            {"target": "server", "inputs": {"question": {"text": "\ud800"}}},
            {"target": "server", "inputs": {f"i{n}": 0 for n in range(5_000)}},
            {"target": "server", "input": "question", "value": HUGE},
            {"target": "server", "input": "\n", "value": [True, 1]},
            {"level": "\x1b[2J"},
            {"on": 1},
            {"__class__": {}},
        )
    ),
]
QUERIES = [
    "?" + "&".join(f"a{n}=1" for n in range(40)),
    "?last=-1",
    "?last=" + LONG[:300],
    "?last=1e9&level=x&follow=2",
    "?follow=0&level=%00&last=%ff",
    "?x=%ff%fe",
    "?;;;==&&&",
    "?last=\u0661".encode().decode("latin-1"),
]
PATHS = [
    "/",
    "//",
    "*",
    "/v1/%ff",
    "/v1/peers/%00",
    "/v1/peers/..%2f..%2fetc",
    "/v1/peers/" + "x" * 3_000,
    "/v1/trace/" + "9" * 300,
    "/v1/trace/-1",
    "/v1/trace/%F0%9F%92%A3",
    "http://[::1/v1/status",
    "/v1/status#\x7f",
]
RAW = [
    b"\r\n\r\n\r\n",
    b"GET\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"GET /v1/status HTTP/9.9\r\n\r\n",
    b"GET /v1/status HTTP/1.1\r\n\r\n",
    b"GET /v1/status HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
    b"GET /v1/status HTTP/1.1\r\nHost: a\r\nX: " + b"a" * 70_000 + b"\r\n\r\n",
    b"GET /v1/status HTTP/1.1\r\nHost: a\r\n" + b"X: 1\r\n" * 9_000 + b"\r\n",
    b"POST /v1/ping HTTP/1.1\r\nHost: a\r\nContent-Length: -1\r\n\r\n",
    b"POST /v1/ping HTTP/1.1\r\nHost: a\r\nContent-Length: " + LONG.encode() + b"\r\n\r\n",
    b"POST /v1/ping HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nx",
    b"POST /v1/ping HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\n",
    b"POST /v1/ping HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n-5\r\nx\r\n0\r\n\r\n",
    b"POST /v1/ping HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
    + b"f" * 30
    + b"\r\n",
    b"POST /v1/ping HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: gzip\r\n\r\n",
    b"POST /v1/ping HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\n[]",
    b"CONNECT a:1 HTTP/1.1\r\nHost: a\r\n\r\n",
    b"GET /v1/status HTTP/1.1\r\nHost: a\r\nUpgrade: websocket\r\nConnection: upgrade\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"M\xc3\xa9THOD / HTTP/1.1\r\nHost: a\r\n\r\n",
    b"\xff" * 20_000,
]


async def exchange(live: Live, data: bytes, *, ended: bool = False) -> tuple[int, bytes]:
    """The first answer to these bytes: its status and body, as far as they come.

    `ended` for bytes that are no whole request: the client says that no more will come.
    """
    received = b""
    async with await trio.open_unix_socket(str(live.socket)) as stream:
        try:
            await stream.send_all(data)
            if ended:
                await stream.send_eof()
        except trio.BrokenResourceError:
            pass  # it has seen enough
        with trio.fail_after(PATIENCE_S):
            try:
                while len(received) < 200_000 and (part := await stream.receive_some(65_536)):
                    received += part
            except trio.BrokenResourceError:
                pass
    head, _, body = received.partition(b"\r\n\r\n")
    if head.startswith(b"HTTP/1.1 100"):
        head, _, body = body.partition(b"\r\n\r\n")
    return (int(head.split()[1]) if head else 0), body


def request(method: str, target: str, body: bytes = b"") -> bytes:
    length = str(len(body))
    head = f"{method} {target} HTTP/1.1\r\nHost: a\r\nContent-Length: {length}\r\n"
    return head.encode("latin-1", "replace") + b"Connection: close\r\n\r\n" + body


async def refused(live: Live, data: bytes, *, ended: bool = False) -> int:
    """The status; what is wrong with a request is said as JSON, and is not the node's fault."""
    status, body = await exchange(live, data, ended=ended)
    assert status or ended, data[:200]
    # 501 is what RFC 9112 asks for where a body has a coding that we do not know.
    assert status < 500 or status == 501, (status, data[:200], body)
    if status >= 400:
        # What came after the body may have been answered as well.
        told: dict[str, Any] = json.loads(body.splitlines()[0])
        assert told["status"] == status
        assert told["schema"] == "bbnode/problem/1"
        assert told["type"].startswith("urn:bbnode:problem:")
    return status


ROUTES = sorted({(endpoint.method, endpoint.path) for endpoint in ENDPOINTS})
ACTS = [(method, path) for method, path in ROUTES if method != "GET"]
ASKS = [path for method, path in ROUTES if method == "GET"]


def _no_faults(live: Live, caplog: pytest.LogCaptureFixture) -> None:
    assert live.plane.server.counters().get("control.internal_errors", 0) == 0
    assert not [record for record in caplog.records if record.exc_info]
    assert live.plane.host.phase == "ready"


async def test_no_body_is_a_fault_of_the_node(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(tmp_path) as live:
        for method, path in ACTS:
            for body in BODIES:
                target = path.replace("{peer}", "nobody")
                await refused(live, request(method, target, body))
        logging.getLogger().setLevel("WARNING")
        _no_faults(live, caplog)


async def test_no_target_is_a_fault_of_the_node(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(tmp_path) as live:
        for path in ASKS:
            for query in QUERIES:
                target = path.replace("{peer}", "nobody").replace("{id}", "x") + query
                if not path.startswith(("/v1/events", "/v1/logs")) or "follow" in query:
                    await refused(live, request("GET", target))
        for path in PATHS:
            for method in ("GET", "POST", "DELETE", "HEAD", "OPTIONS", "BREW"):
                if method != "HEAD":
                    assert await refused(live, request(method, path)) >= 400
        _no_faults(live, caplog)


async def test_what_is_no_http_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with running(tmp_path) as live:
        for data in RAW:
            await refused(live, data, ended=True)
        assert (await exchange(live, request("GET", "/healthz")))[0] == 200
        _no_faults(live, caplog)


ANSWERS = [
    b"",
    b"garbage\r\n\r\n",
    b"\xff" * 100_000,
    b"HTTP/1.1 200 OK\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n{",
    b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n{}",
    b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n{}",
    b"HTTP/1.1 999999999999 OK\r\n\r\n{}",
    b"HTTP/1.1 200 OK\r\n" + b"X: 1\r\n" * 500 + b"\r\n{}",
    b"HTTP/1.1 200 OK\r\nX: " + b"a" * 100_000 + b"\r\n\r\n{}",
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    b"HTTP/1.1 200 OK\r\n\r\n\xff\xfe",
    b"HTTP/1.1 200 OK\r\n\r\n[]",
    b"HTTP/1.1 200 OK\r\n\r\n" + DEEP,
    b"HTTP/1.1 500 No\r\n\r\n{}",
    b'HTTP/1.1 404 \x1b[2J\r\n\r\n{"code": 5, "detail": [1]}',
    b"HTTP/1.1 404 No\r\n\r\nnull",
]


@pytest.mark.parametrize("number", range(len(ANSWERS)))
async def test_a_client_of_a_daemon_that_answers_garbage_has_a_typed_error(
    number: int, tmp_path: Path
) -> None:
    path = tmp_path / "s"

    async def answer(stream: trio.SocketStream) -> None:
        async with stream:
            await stream.receive_some(65_536)
            with contextlib.suppress(trio.BrokenResourceError):
                await stream.send_all(ANSWERS[number])

    def ask() -> BbnodeError:
        try:
            with ControlClient(path, timeout_s=20.0) as client:
                client.get("/v1/status")["node"]
        except BbnodeError as error:
            return error
        raise AssertionError("the answer was taken")

    def follow() -> None:
        with (
            contextlib.suppress(BbnodeError),
            ControlClient(path, timeout_s=20.0) as client,
        ):
            for line in client.stream("/v1/events"):
                assert line["event"] is None

    listener = trio.socket.socket(trio.socket.AF_UNIX)
    await listener.bind(str(path))
    listener.listen()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.serve_listeners, answer, [trio.SocketListener(listener)])
        error = await in_thread(ask)
        assert exits.code_for(error) in (exits.UNREACHABLE, exits.FAILURE, exits.USAGE)
        assert str(error)
        await in_thread(follow)
        nursery.cancel_scope.cancel()
