"""HTTP/1.1 over one trio stream: h11 is the protocol, this file is the I/O and the bounds.

Rule: whatever a client does, it costs this one task and no more: heads and bodies are bounded,
every wait for its bytes and every write to it has a deadline, and a client that goes away ends
what was being done for it. A half-closed connection counts as gone once the handler waits.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Protocol
from urllib.parse import parse_qs, unquote, urlsplit

import h11
import trio

from bbnode.daemon.control.errors import PROBLEM_TYPE, Problem
from bbnode.daemon.control.json_lines import encode
from bbnode.ir.caps import MAX_QUERY_FIELDS

READ_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpLimits:
    """Bounds of one connection; beyond each stands what happens."""

    # Request line and headers; more is 431 and the end of the connection.
    head_bytes: int = 16 * 1024
    # An invoke's inputs are at most 10 MiB (FACTS, `invoke_bytes`): 14 MiB as base64.
    body_bytes: int = 16 * 1024 * 1024
    # A connection on which nothing is asked for so long is closed.
    idle_s: float = 60.0
    # From the first byte of a request to its last; only this machine can be the client.
    request_s: float = 30.0
    # A client that takes nothing of what we write for so long is given up.
    write_s: float = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request, its body read. Names of `headers` are in lower case."""

    method: str
    path: str
    query: Mapping[str, list[str]] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """An answer that is there in one piece."""

    status: int = 200
    body: bytes = b""
    content_type: str = "application/json"
    headers: Mapping[str, str] = field(default_factory=dict)


class Source(Protocol):
    """Where the parts of a streamed answer come from."""

    async def next(self) -> bytes | None:
        """The next part; None at the end."""
        ...

    def close(self) -> None:
        """Called once, whatever ended the stream."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Streamed:
    """An answer that goes on until its source ends or its client goes."""

    source: Source
    content_type: str = "application/x-ndjson"


Answer = Response | Streamed
Handler = Callable[[Request], Awaitable[Answer]]


class ClientGone(Exception):
    """The client went away, or did not take what it asked for."""


class HttpConnection:
    """Serves the requests of one client, one after the other."""

    def __init__(self, stream: trio.abc.Stream, handler: Handler, limits: HttpLimits) -> None:
        """`handler` answers, and never raises but for cancellation."""
        self._stream = stream
        self._handler = handler
        self._limits = limits
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=limits.head_bytes)
        self._unread = 0

    async def run(self) -> int:
        """Serve until the connection ends; returns how many requests were bad.

        Raises ClientGone for a client that left in the middle of something.
        """
        try:
            while True:
                try:
                    request = await self._read_request()
                except Problem as problem:
                    await self._refuse(problem)
                    return 1
                if request is None:
                    return 0
                await self._answer(request)
                if self._http.our_state is not h11.DONE or self._http.their_state is not h11.DONE:
                    return 0
                self._http.start_next_cycle()
        except (trio.BrokenResourceError, trio.ClosedResourceError, trio.TooSlowError) as error:
            raise ClientGone(str(error)) from error

    # -- reading ---------------------------------------------------------------------------

    async def _read_request(self) -> Request | None:
        """The next request, or None when there will be none."""
        try:
            with trio.move_on_after(self._limits.idle_s) as idle:
                head = self._http.next_event()
                if head is h11.NEED_DATA and await self._receive():
                    head = self._http.next_event()
            if idle.cancelled_caught:
                return None
            with trio.move_on_after(self._limits.request_s):
                while head is h11.NEED_DATA:
                    await self._receive()
                    head = self._http.next_event()
                if not isinstance(head, h11.Request):
                    return None
                return _request(head, await self._read_body())
            raise Problem(408, "RequestTooSlow", "the request did not arrive in time")
        except h11.RemoteProtocolError as error:
            raise Problem(error.error_status_hint, "BadRequest", f"not HTTP: {error}") from error

    async def _read_body(self) -> bytes:
        if self._http.they_are_waiting_for_100_continue:
            await self._write(
                self._http.send(h11.InformationalResponse(status_code=100, headers=[]))
            )
        body = bytearray()
        while True:
            event = self._http.next_event()
            if event is h11.NEED_DATA:
                await self._receive()
            elif isinstance(event, h11.Data):
                body += event.data
                if len(body) > self._limits.body_bytes:
                    raise Problem(
                        413, "BodyTooLarge", f"a body has at most {self._limits.body_bytes} bytes"
                    )
            else:
                return bytes(body)

    async def _receive(self) -> bool:
        """Take in what comes; False at the end."""
        data = await self._stream.receive_some(READ_BYTES)
        self._http.receive_data(bytes(data))
        return bool(data)

    # -- answering -------------------------------------------------------------------------

    async def _answer(self, request: Request) -> None:
        gone = trio.Event()
        complete = False
        self._unread = 0
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch, gone, nursery.cancel_scope)
            try:
                answer = await self._handler(request)
                if isinstance(answer, Response):
                    await self._send(request, answer)
                else:
                    await self._stream_out(request, answer)
                complete = True
            except (trio.BrokenResourceError, trio.ClosedResourceError, trio.TooSlowError):
                gone.set()
            nursery.cancel_scope.cancel()
        if gone.is_set() and not complete:
            raise ClientGone("the client closed its connection")

    async def _watch(self, gone: trio.Event, scope: trio.CancelScope) -> None:
        """End what is done for a client that goes; keep what it says meanwhile, within bounds."""
        while self._unread < self._limits.head_bytes:
            try:
                data = await self._stream.receive_some(READ_BYTES)
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                data = b""
            if not data:
                gone.set()
                scope.cancel()
                return
            self._unread += len(data)
            self._http.receive_data(bytes(data))

    async def _send(self, request: Request, response: Response) -> None:
        head = self._http.send(
            _head(
                response.status,
                [
                    ("Content-Type", response.content_type),
                    ("Content-Length", str(len(response.body))),
                    *response.headers.items(),
                ],
            )
        )
        body = b"" if request.method == "HEAD" else response.body
        sent = self._http.send(h11.Data(data=body)) if body else b""
        end = self._http.send(h11.EndOfMessage())
        await self._write(b"".join(part or b"" for part in (head, sent, end)))

    async def _stream_out(self, request: Request, answer: Streamed) -> None:
        try:
            await self._write(self._http.send(_head(200, [("Content-Type", answer.content_type)])))
            while request.method != "HEAD" and (part := await answer.source.next()) is not None:
                await self._write(self._http.send(h11.Data(data=part)))
            await self._write(self._http.send(h11.EndOfMessage()))
        finally:
            answer.source.close()

    async def _refuse(self, problem: Problem) -> None:
        """Answer what could not be read, and close: where the next request begins is lost."""
        if self._http.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            return
        response = problem_response(problem)
        headers = [
            ("Content-Type", response.content_type),
            ("Content-Length", str(len(response.body))),
            ("Connection", "close"),
        ]
        await self._write(
            b"".join(
                self._http.send(event) or b""
                for event in (
                    _head(problem.status, headers),
                    h11.Data(data=response.body),
                    h11.EndOfMessage(),
                )
            )
        )

    async def _write(self, data: bytes | None) -> None:
        if data:
            with trio.fail_after(self._limits.write_s):
                await self._stream.send_all(data)


def problem_response(problem: Problem) -> Response:
    """A refusal as an answer."""
    return Response(
        status=problem.status,
        body=encode(problem.as_json()),
        content_type=PROBLEM_TYPE,
        headers=problem.headers,
    )


def _head(status: int, headers: list[tuple[str, str]]) -> h11.Response:
    # No Server or Date: this is no public server, and the answer is for this moment.
    return h11.Response(
        status_code=status,
        headers=[*headers, ("Cache-Control", "no-store")],
        reason=HTTPStatus(status).phrase.encode("ascii"),
    )


def _request(head: h11.Request, body: bytes) -> Request:
    try:
        target = head.target.decode("ascii")
        parts = urlsplit(target)
        query = parse_qs(
            parts.query,
            keep_blank_values=True,
            errors="strict",
            max_num_fields=MAX_QUERY_FIELDS,
        )
        path = unquote(parts.path, errors="strict")
    except ValueError as error:
        raise Problem(400, "BadRequest", f"the request's target can't be read: {error}") from error
    return Request(
        method=head.method.decode("ascii", "replace").upper(),
        path=path,
        query=query,
        headers={
            name.decode("ascii", "replace"): value.decode("latin-1") for name, value in head.headers
        },
        body=body,
    )
