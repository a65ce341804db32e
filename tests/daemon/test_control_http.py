"""HTTP itself: bounds, bad input, and clients that vanish, over an in-memory stream."""

from __future__ import annotations

from typing import Any

import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

from bbnode.daemon.control.asgi import Receive, Response, Scope, Send, header
from bbnode.daemon.control.feed import Feed
from bbnode.daemon.control.http import Lines, read_query
from bbnode.daemon.control.server import HttpConnection, HttpLimits

SMALL = HttpLimits(head_bytes=1024, body_bytes=64, idle_s=5.0, request_s=5.0, write_s=5.0)
OK = b"HTTP/1.1 200 "


class Served:
    """One connection with an application that remembers what it was asked."""

    def __init__(self, answer: Any = None, limits: HttpLimits = SMALL) -> None:
        self.asked: list[tuple[Scope, bytes]] = []
        self._answer = answer if answer is not None else Response(b"{}\n")
        self.cancelled = False
        self.client, self._stream = trio.testing.memory_stream_pair()
        self.connection = HttpConnection(self._stream, self._app, limits)
        self.ended = False

    async def _app(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.asked.append((scope, (await receive())["body"]))
        if self._answer == "never":
            try:
                await trio.sleep_forever()
            except trio.Cancelled:
                self.cancelled = True
                raise
        await self._answer(scope, receive, send)

    async def run(self) -> None:
        await self.connection.run()
        self.ended = True

    async def answers(self, data: bytes, *, end: bool = True) -> bytes:
        """Everything that comes back for these bytes."""
        received = b""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.run)
            await self.client.send_all(data)
            await trio.testing.wait_all_tasks_blocked()
            if end:
                await self.client.send_stream.aclose()
            while some := await self.client.receive_some(65536):
                received += some
        return received


def get(target: str, *headers: str) -> bytes:
    lines = [f"GET {target} HTTP/1.1", "Host: x", *headers, "", ""]
    return "\r\n".join(lines).encode()


async def test_a_request_is_read_and_answered(autojump_clock: Any) -> None:
    served = Served()
    body = b'{"a": 1}'
    head = b"POST /v1/x%20y?q=1&q=2&e= HTTP/1.1\r\nHost: x\r\nContent-Length: 8\r\n\r\n"
    got = await served.answers(head + body)
    assert got.startswith(OK)
    assert got.endswith(b"\r\n\r\n{}\n")
    ((scope, sent),) = served.asked
    assert (scope["method"], scope["path"], sent) == ("POST", "/v1/x y", body)
    assert read_query(scope) == {"q": ["1", "2"]}
    assert header(scope, b"content-length") == "8"
    assert (served.ended, served.connection.refused, served.connection.lost) == (True, 0, False)


async def test_one_connection_serves_many_requests_also_sent_at_once(autojump_clock: Any) -> None:
    served = Served()
    got = await served.answers(get("/1") + get("/2") + get("/3", "Connection: close"))
    assert got.count(OK) == 3
    assert [scope["path"] for scope, _ in served.asked] == ["/1", "/2", "/3"]


async def test_head_has_no_body(autojump_clock: Any) -> None:
    served = Served()
    got = await served.answers(b"HEAD / HTTP/1.1\r\nHost: x\r\n\r\n")
    assert got.lower().count(b"content-length: 3") == 1
    assert got.endswith(b"\r\n\r\n")


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"garbage\r\n\r\n", 400),
        (b"\x00\xff\x16\x03\x01 TLS hello\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\n\r\n", 400),  # no Host
        (b"GET /" + b"x" * 2000, 431),
        (b"GET / HTTP/1.1\r\nHost: x\r\nA: " + b"y" * 2000, 431),
        (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 65\r\n\r\n" + b"z" * 65, 413),
        (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: nine\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\nhalf", 400),
    ],
)
async def test_what_is_not_a_request_is_refused_and_closed(
    autojump_clock: Any, data: bytes, status: int
) -> None:
    served = Served()
    got = await served.answers(data)
    assert got.startswith(f"HTTP/1.1 {status} ".encode())
    assert b"application/problem+json" in got
    assert served.connection.refused == 1
    assert served.asked == []


async def test_a_body_of_unknown_length_is_bounded_too(autojump_clock: Any) -> None:
    served = Served()
    chunks = b"".join(b"20\r\n" + b"c" * 32 + b"\r\n" for _ in range(4))
    got = await served.answers(
        b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks
    )
    assert got.startswith(b"HTTP/1.1 413 ")


async def test_a_client_that_asks_first_is_told_to_go_on(autojump_clock: Any) -> None:
    served = Served()
    head = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nExpect: 100-continue\r\n\r\n"
    async with trio.open_nursery() as nursery:
        nursery.start_soon(served.run)
        await served.client.send_all(head)
        assert (await served.client.receive_some(4096)).startswith(b"HTTP/1.1 100 ")
        await served.client.send_all(b"{}")
        assert (await served.client.receive_some(4096)).startswith(OK)
        nursery.cancel_scope.cancel()
    assert served.asked[0][1] == b"{}"


async def test_an_idle_connection_is_closed(autojump_clock: Any) -> None:
    served = Served()
    assert await served.answers(b"", end=False) == b""
    assert served.ended
    assert trio.current_time() == pytest.approx(SMALL.idle_s, abs=0.1)


async def test_half_a_request_is_not_waited_for_for_ever(autojump_clock: Any) -> None:
    served = Served()
    got = await served.answers(b"GET / HT", end=False)
    assert got.startswith(b"HTTP/1.1 408 ")


async def test_a_client_that_goes_ends_what_was_done_for_it(autojump_clock: Any) -> None:
    served = Served(answer="never")
    assert await served.answers(get("/")) == b""
    assert served.cancelled
    assert served.connection.lost


def flooded() -> tuple[Feed, Lines]:
    """A stream of more lines than a socket takes, and its feed."""
    feed = Feed("event")
    lines = Lines(feed.subscribe())
    for _ in range(64):
        feed.publish({"x": "x" * 65536})
    return feed, lines


async def test_a_client_that_does_not_read_is_given_up(autojump_clock: Any) -> None:
    feed, lines = flooded()
    client, stream = trio.testing.lockstep_stream_pair()
    connection = HttpConnection(stream, lines, SMALL)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(connection.run)
        await client.send_all(get("/v1/events"))
    assert connection.lost
    assert feed.subscribers == 0
    assert trio.current_time() == pytest.approx(SMALL.write_s, abs=0.1)


async def test_a_client_that_does_not_read_can_be_left(autojump_clock: Any) -> None:
    feed, lines = flooded()
    client, stream = trio.testing.lockstep_stream_pair()
    connection = HttpConnection(stream, lines, SMALL)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(connection.run)
        await client.send_all(get("/v1/events"))
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    assert feed.subscribers == 0
    assert trio.current_time() == pytest.approx(0.0, abs=0.1)


async def test_a_stream_that_ends_leaves_the_connection_usable(autojump_clock: Any) -> None:
    feed = Feed("event", clock=lambda: 1.0)
    for number in (1, 2):
        feed.publish({"n": number})

    async def stream(scope: Scope, receive: Receive, send: Send) -> None:
        await Lines(feed.subscribe(last=2), follow=False)(scope, receive, send)

    served = Served(answer=stream)
    got = await served.answers(get("/a") + get("/b"))
    assert got.count(OK) == 2
    assert got.count(b'"n": 1}}') == got.count(b'"n": 2}}') == 2
    assert got.endswith(b"\r\n0\r\n\r\n")
    assert feed.subscribers == 0


@pytest.mark.parametrize(
    "head",
    [
        get("/", "Connection: Upgrade", "Upgrade: h2c", "HTTP2-Settings: AAMAAABk"),
        get("/", "Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Key: eA=="),
    ],
)
async def test_no_other_protocol_is_spoken(autojump_clock: Any, head: bytes) -> None:
    served = Served()
    assert (await served.answers(head)).startswith(OK)


async def test_half_an_answer_is_not_cut_by_a_half_closed_client(autojump_clock: Any) -> None:
    async def slow(scope: Scope, receive: Receive, send: Send) -> None:
        await trio.sleep(0.1)
        await Response(b"{}\n")(scope, receive, send)

    assert (await Served(answer=slow).answers(get("/"))).endswith(b"\r\n\r\n{}\n")


async def test_an_answer_of_known_length_is_sent_whole_or_not_at_all(autojump_clock: Any) -> None:
    async def slow(scope: Scope, receive: Receive, send: Send) -> None:
        answer = Response(b"{}\n")
        await send(
            {"type": "http.response.start", "status": 200, "headers": list(answer.raw_headers)}
        )
        await trio.sleep(5.0)
        await send({"type": "http.response.body", "body": answer.body})

    assert await Served(answer=slow).answers(get("/")) == b""


async def test_a_client_that_asks_more_and_goes_is_seen_to_be_gone(autojump_clock: Any) -> None:
    feed = Feed("event")
    served = Served(answer=Lines(feed.subscribe()))
    assert (await served.answers(get("/v1/events") + get("/v1/events") * 20)).startswith(OK)
    assert served.connection.lost
    assert feed.subscribers == 0
    assert trio.current_time() < 1.0


async def test_a_client_that_floods_a_waiting_answer_is_cut_off(autojump_clock: Any) -> None:
    feed = Feed("event")
    served = Served(answer=Lines(feed.subscribe()))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(served.run)
        with pytest.raises(trio.BrokenResourceError):  # noqa: PT012 - until it is cut off
            while True:
                await served.client.send_all(get("/v1/events") * 1000)
                await trio.sleep(1.0)
    assert trio.current_time() == pytest.approx(SMALL.request_s, abs=3.0)
    assert feed.subscribers == 0


async def test_a_client_that_goes_at_rest_leaves_at_once(autojump_clock: Any) -> None:
    served = Served()
    assert (await served.answers(get("/"))).startswith(OK)
    assert served.ended
    assert trio.current_time() == 0.0


@given(data=st.binary(max_size=300))
def test_any_bytes_end_a_connection_or_wait_for_more(data: bytes) -> None:
    async def one() -> None:
        served = Served()
        await served.answers(data)
        assert served.ended

    trio.run(one, clock=trio.testing.MockClock(autojump_threshold=0))
