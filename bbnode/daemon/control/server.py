"""Serves an ASGI application over unix sockets and TCP, within bounds.

h11 reads and writes HTTP/1.1. This module adds what it leaves to its user: bounds on connections,
bodies and times, refusals as JSON, and isolation, so that a fault in one connection ends that
connection alone.

Rule: whatever a client does, it costs its own task and no more. Each socket is a door with a
bound of its own, so that scrapers of metrics never keep an operator out.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import h11
import trio

from bbnode.daemon.control import token as tokens
from bbnode.daemon.control.asgi import ASGIApp, Message, Receive, Scope, Send, header
from bbnode.daemon.control.errors import Problem
from bbnode.daemon.control.http import problem_response
from bbnode.daemon.control.listen import is_loopback, tcp_listener, unix_listener

logger = logging.getLogger(__name__)

# All that the metrics' address answers, to GET and HEAD.
SCRAPED = ("/metrics", "/healthz", "/readyz")
# Of a socket at once.
MAX_RECV = 64 * 1024
# A client that has finished sending may still read: an answer that is ready soon is sent.
HALF_CLOSED_S = 0.5
# After an accept that failed, as for want of descriptors.
ACCEPT_AGAIN_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpLimits:
    """Bounds of one connection; comments say what happens beyond each."""

    # Request line and headers; more is 431 and the end of the connection.
    head_bytes: int = 16 * 1024
    # An invoke's inputs are at most 10 MiB: 14 MiB as base64. More is 413.
    body_bytes: int = 16 * 1024 * 1024
    # A connection on which no request has begun for so long is closed, with 408 if half a head
    # has come.
    idle_s: float = 60.0
    # From a request's head to the end of its body; later is 408.
    request_s: float = 30.0
    # A client that reads nothing for so long is cut off.
    write_s: float = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlLimits:
    """Bounds of the control plane; comments say what happens beyond each."""

    # More at once are answered with 503: an operator has a few terminals, not hundreds.
    connections: int = 64
    # A request that is not answered by then is 504; the time that an invoke asks for (`wait_s`)
    # comes on top.
    request_s: float = 600.0
    http: HttpLimits = field(default_factory=HttpLimits)
    # At the metrics' address, where anybody may connect: a few scrapers, and requests without
    # a body.
    scrapers: int = 16
    scraped: HttpLimits = field(
        default_factory=lambda: HttpLimits(head_bytes=8 * 1024, body_bytes=0, request_s=10.0)
    )


@dataclass(slots=True)
class _Door:
    """One socket: the check of its requests, its bounds, and its number of clients."""

    listener: trio.SocketListener
    most: int
    limits: HttpLimits
    # Raises `Problem` for a request that this door does not let through.
    check: Callable[[Scope], None]
    connections: int = 0


class _ClientGone(Exception):
    """The client went away, or did not take what it asked for."""


class HttpConnection:
    """Serves the requests of one client, one after the other."""

    def __init__(
        self, stream: trio.abc.HalfCloseableStream, app: ASGIApp, limits: HttpLimits
    ) -> None:
        """Serve `app`, which answers every request and raises nothing of its own."""
        self._stream = stream
        self._app = app
        self._limits = limits
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=limits.head_bytes)
        self._send, self._arrived = trio.open_memory_channel[bytes](1)
        self._writing = trio.Lock()
        # From the head of a request to the end of its answer.
        self._busy = False
        # The client went away, or did not take what it asked for.
        self.lost = False
        # Number of requests that could not be read.
        self.refused = 0

    async def run(self) -> None:
        """Serve until the connection ends."""
        async with self._stream:
            try:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._read, nursery.cancel_scope)
                    await self._serve()
                    nursery.cancel_scope.cancel()
            except* _ClientGone:
                self.lost = True

    async def _read(self, scope: trio.CancelScope) -> None:
        """Read until the client is gone, even while its requests have to wait; then end all."""
        with contextlib.suppress(
            trio.ClosedResourceError, trio.BrokenResourceError, trio.TooSlowError
        ):
            async with self._send:
                while data := await self._stream.receive_some(MAX_RECV):
                    with trio.fail_after(self._limits.request_s):
                        await self._send.send(bytes(data))
            await trio.sleep(HALF_CLOSED_S)
            async with self._writing:
                pass  # a part that is being written is written to its end
        self.lost = self.lost or self._busy
        scope.cancel()

    async def _serve(self) -> None:
        try:
            while (head := await self._head()) is not None:
                self._busy = True
                await self._answer(head, await self._body())
                if self._http.our_state is not h11.DONE or self._http.their_state is not h11.DONE:
                    return
                self._http.start_next_cycle()
                self._busy = False
        except h11.RemoteProtocolError as error:
            text = "what came is not an HTTP/1.1 request"
            await self._refuse(Problem(error.error_status_hint, "BadRequest", text))
        except Problem as problem:
            await self._refuse(problem)

    async def _head(self) -> h11.Request | None:
        """Return the next request; None when none came. Raises Problem, RemoteProtocolError."""
        with trio.move_on_after(self._limits.idle_s):
            event = await self._event()
            return event if isinstance(event, h11.Request) else None
        if not self._http.trailing_data[0]:
            return None
        raise _too_slow()

    async def _body(self) -> bytes:
        """Return the body of a request. Raises Problem, RemoteProtocolError."""
        body = bytearray()
        most = self._limits.body_bytes
        with trio.move_on_after(self._limits.request_s):
            while isinstance(event := await self._event(), h11.Data):
                body += event.data
                if len(body) > most:
                    raise Problem(413, "BodyTooLarge", f"a body has at most {most} bytes")
            return bytes(body)
        raise _too_slow()

    async def _event(self) -> Any:
        """Return what comes next: a request, a part of its body or the end of it, or the end."""
        while (event := self._http.next_event()) is h11.NEED_DATA:
            if self._http.they_are_waiting_for_100_continue:
                go_on = h11.InformationalResponse(status_code=100, headers=[])
                await self._write(self._http.send(go_on))
            try:
                self._http.receive_data(await self._arrived.receive())
            except trio.EndOfChannel:
                self._http.receive_data(b"")
        return event

    async def _answer(self, request: h11.Request, body: bytes) -> None:
        """Answer a request; raises _ClientGone where the application did not finish."""
        path, _, query = request.target.partition(b"?")
        scope: Scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": request.http_version.decode("ascii"),
            "method": request.method.decode("ascii"),
            "scheme": "http",
            "path": unquote(path.decode("ascii")),
            "raw_path": path,
            "query_string": query,
            "root_path": "",
            "headers": list(request.headers),
            "client": None,
            "server": None,
        }

        async def receive() -> Message:
            # Once; that the client has gone, a cancellation tells.
            return {"type": "http.request", "body": body, "more_body": False}

        # Of an answer whose length is known, the head leaves with the first part of the body, so
        # that no client sees the one without the other.
        held = b""

        async def send(message: Message) -> None:
            nonlocal held
            if message["type"] == "http.response.start":
                headers = message["headers"]
                start = h11.Response(status_code=message["status"], headers=headers)
                data = self._http.send(start) or b""
                if any(name == b"content-length" for name, _ in headers):
                    held = data
                    return
            else:
                part = b"" if request.method == b"HEAD" else message.get("body", b"")
                data, held = held + (self._http.send(h11.Data(data=part)) or b""), b""
                if not message.get("more_body"):
                    data += self._http.send(h11.EndOfMessage()) or b""
            await self._write(data)

        await self._app(scope, receive, send)
        if self._http.our_state not in (h11.DONE, h11.MUST_CLOSE):
            raise _ClientGone

    async def _refuse(self, problem: Problem) -> None:
        """Answer what could not be read, and end the connection."""
        self.refused += 1
        if self._http.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            return
        answer = problem_response(problem)
        headers = [*answer.raw_headers, (b"connection", b"close")]
        parts = (
            h11.Response(status_code=answer.status, headers=headers),
            h11.Data(data=answer.body),
            h11.EndOfMessage(),
        )
        await self._write(b"".join(self._http.send(part) or b"" for part in parts))

    async def _write(self, data: bytes | None) -> None:
        """Write within the time that the client has to take it. Raises _ClientGone."""
        if not data:
            return
        try:
            async with self._writing:
                with trio.fail_after(self._limits.write_s):
                    await self._stream.send_all(data)
        except (trio.TooSlowError, trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise _ClientGone from error


def _too_slow() -> Problem:
    return Problem(408, "RequestTooSlow", "the request did not arrive in time")


class ControlServer:
    """Serves an application on a unix socket, and on TCP where that is asked for."""

    def __init__(
        self,
        path: Path,
        *,
        app: ASGIApp,
        counts: Counter[str],
        group: str | None = None,
        tcp: tuple[str, int] | None = None,
        metrics: tuple[str, int] | None = None,
        token: str | None = None,
        limits: ControlLimits | None = None,
    ) -> None:
        """`path` is `paths.control_socket(state_dir)`; nothing is opened before `run`.

        `counts` is shared with `app`.

        `tcp` and `metrics` are an IP address and a port each; what listens on TCP answers nobody
        without `token`, but for metrics on loopback.
        """
        self.path = path
        self._app = app
        self._group = group
        self._tcp = tcp
        self._metrics = metrics
        self._token = token
        self._limits = limits if limits is not None else ControlLimits()
        self._doors: list[_Door] = []
        self.counts = counts
        self.tcp_port: int | None = None
        self.metrics_port: int | None = None

    def counters(self) -> dict[str, int]:
        """Return what was counted since the start, and the number of connections."""
        return {**self.counts, "control.connections": sum(d.connections for d in self._doors)}

    async def run(self, *, task_status: trio.TaskStatus[Path] = trio.TASK_STATUS_IGNORED) -> None:
        """Listen until cancelled, then remove the socket.

        Raises `AlreadyRunning` when another daemon answers there, `UnknownGroup`, and
        `EnvironmentFault` when a socket cannot be had.
        """
        limits = self._limits
        most, http = limits.connections, limits.http
        with contextlib.ExitStack() as stack:
            doors = []
            if self._tcp is not None:
                listener = stack.enter_context(tcp_listener(*self._tcp, key="control.tcp"))
                self.tcp_port = _port(listener)
                doors.append(_Door(listener, most=most, limits=http, check=self._check_token))
            if self._metrics is not None:
                listener = stack.enter_context(tcp_listener(*self._metrics, key="control.metrics"))
                self.metrics_port = _port(listener)
                few, small = limits.scrapers, limits.scraped
                doors.append(_Door(listener, most=few, limits=small, check=self._check_scrape))
            listener = stack.enter_context(unix_listener(self.path, group=self._group))
            # The mode of the socket says who may ask there.
            doors.append(_Door(listener, most=most, limits=http, check=lambda _scope: None))
            self._doors = doors
            async with trio.open_nursery() as nursery:
                for door in doors:
                    nursery.start_soon(self._accept, door, nursery)
                task_status.started(self.path)

    async def _accept(self, door: _Door, nursery: trio.Nursery) -> None:
        while True:
            try:
                stream = await door.listener.accept()
            except OSError as error:
                # Out of descriptors, for instance: that must not end the node's own work.
                logger.warning("control client not accepted", extra={"reason": str(error)})
                self.counts["control.not_accepted"] += 1
                await trio.sleep(ACCEPT_AGAIN_S)
                continue
            nursery.start_soon(self._serve, stream, door)

    async def _serve(self, stream: trio.SocketStream, door: _Door) -> None:
        """Serve one client, from its connection to its end; nothing it does leaves this task."""
        busy = door.connections >= door.most
        door.connections += 1

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            self.counts["control.requests"] += 1
            try:
                if busy:
                    raise Problem(
                        503,
                        "Busy",
                        "too many control clients; close one",
                        headers={"Retry-After": "1"},
                    )
                door.check(scope)
            except Problem as problem:
                self.counts["control.refused"] += 1
                await problem_response(problem)(scope, receive, send)
            else:
                await self._app(scope, receive, send)

        connection = HttpConnection(stream, app, door.limits)
        try:
            with trio.move_on_after(door.limits.write_s if busy else math.inf):
                await connection.run()
        except Exception:
            # The boundary of one connection: a fault in it costs this client alone.
            logger.exception("control connection failed")
            self.counts["control.internal_errors"] += 1
        finally:
            door.connections -= 1
            self.counts["control.bad_requests"] += connection.refused
            self.counts["control.clients_lost"] += connection.lost

    def _check_token(self, scope: Scope) -> None:
        """Refuse a request without the token: on TCP any user of this machine can connect."""
        given = header(scope, b"authorization")
        if self._token is None or not tokens.accepts(self._token, given):
            self.counts["control.unauthorized"] += 1
            raise Problem(
                401,
                "Unauthorized",
                "send the content of the daemon's control.token as `Authorization: Bearer …`",
                headers={"WWW-Authenticate": "Bearer"},
            )

    def _check_scrape(self, scope: Scope) -> None:
        """Allow only the three paths of SCRAPED, from other machines only with the token."""
        if self._metrics is None or not is_loopback(self._metrics[0]):
            self._check_token(scope)
        if scope["path"] not in SCRAPED or scope["method"] not in ("GET", "HEAD"):
            raise Problem(404, "UnknownPath", f"here is only GET of: {', '.join(SCRAPED)}")


def _port(listener: trio.SocketListener) -> int:
    return int(listener.socket.getsockname()[1])
