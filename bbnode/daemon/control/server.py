"""Serves an ASGI application over unix sockets and TCP, within bounds.

Hypercorn reads and writes HTTP/1.1 (its `TCPServer` is one connection). This module adds what it
has no setting for: a bound on connections, deadlines for writes and for bodies, refusals as JSON,
and isolation, so that a fault in one connection ends that connection alone.

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

import h11
import trio
from hypercorn.app_wrappers import ASGIWrapper
from hypercorn.config import Config
from hypercorn.events import Closed, Event, RawData, Updated
from hypercorn.protocol.h11 import H11Protocol
from hypercorn.trio.task_group import TaskGroup
from hypercorn.trio.tcp_server import MAX_RECV, TCPServer
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import ConnectionState
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from bbnode.daemon.control import token as tokens
from bbnode.daemon.control.errors import Problem
from bbnode.daemon.control.http import problem_response
from bbnode.daemon.control.listen import is_loopback, tcp_listener, unix_listener

logger = logging.getLogger(__name__)

# All that the metrics' address answers, to GET and HEAD.
SCRAPED = ("/metrics", "/healthz", "/readyz")
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
    # A request that is not answered by then is 504. An invoke may ask for less, never for more.
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


class _Http1(H11Protocol):
    """An HTTP/1.1 connection; what is not HTTP is refused in JSON, like any other request."""

    refused = 0
    # The head of an answer whose length is known; it leaves with the first part of its body, so
    # that no client sees the one without the other.
    _head = b""

    async def _send_h11_event(self, event: Any) -> None:
        try:
            data = self._head + (self.connection.send(event) or b"")
        except h11.LocalProtocolError:
            if self.connection.their_state != h11.ERROR:
                raise
            return
        self._head = b""
        if isinstance(event, h11.Response) and any(
            name == b"content-length" for name, _ in event.headers
        ):
            self._head = data
        elif data:
            await self.send(RawData(data=data))

    async def _check_protocol(self, event: h11.Request) -> None:
        """Accept no upgrade: neither HTTP/2 nor WebSocket is spoken here."""

    async def _create_stream(self, request: h11.Request) -> None:
        headers = [(name, value) for name, value in request.headers if name != b"upgrade"]
        await super()._create_stream(
            h11.Request(
                method=request.method,
                target=request.target,
                headers=headers,
                http_version=request.http_version,
            )
        )

    async def _send_error_response(self, status_code: int) -> None:
        self.refused += 1
        problem = (
            Problem(408, "RequestTooSlow", "the request did not arrive in time")
            if status_code == 408
            else Problem(status_code, "BadRequest", "what came is not an HTTP/1.1 request")
        )
        answer = problem_response(problem)
        headers = [*answer.raw_headers, (b"connection", b"close")]
        await self._send_h11_event(h11.Response(status_code=status_code, headers=headers))
        await self._send_h11_event(h11.Data(data=bytes(answer.body)))
        await self._send_h11_event(h11.EndOfMessage())


class HttpConnection(TCPServer):
    """Serves the requests of one client, one after the other."""

    def __init__(self, stream: Any, app: ASGIApp, limits: HttpLimits) -> None:
        """Serve `app`, which answers every request and raises nothing."""
        config = Config()
        config.errorlog = logger
        config.include_date_header = config.include_server_header = False
        config.h11_max_incomplete_size = limits.head_bytes
        config.keep_alive_timeout = limits.idle_s
        config.keep_alive_max_requests = 2**63
        context = WorkerContext(None)
        super().__init__(ASGIWrapper(self._answer), config, context, ConnectionState({}), stream)  # type: ignore[arg-type]
        self._app = app
        self._limits = limits
        self._at_rest = trio.Event()
        self._at_rest.set()
        self._http1: _Http1
        # The client went away, or did not take what it asked for.
        self.lost = False
        # Number of requests that could not be read.
        self.refused = 0

    async def run(self) -> None:
        """Serve until the connection ends."""
        async with self.stream, TaskGroup() as tasks:
            self._task_group = tasks
            http1 = _Http1(
                self.app,
                self.config,
                self.context,
                tasks,
                ConnectionState({}),
                False,
                None,
                None,
                self.protocol_send,
            )
            self._http1 = self.protocol = http1  # type: ignore[assignment]
            await self.idle_task.restart(tasks, self._idle_timeout)
            await self._read_data()
            self.refused += http1.refused
            await self.idle_task.stop()

    async def protocol_send(self, event: Event) -> None:
        """Write what Hypercorn has for the client, within the time it has to take it."""
        if not isinstance(event, RawData):
            if isinstance(event, Updated) and not event.idle:
                self._at_rest = trio.Event()
            else:
                self._at_rest.set()
            await super().protocol_send(event)
            return
        async with self.send_lock:
            try:
                with trio.fail_after(self._limits.write_s):
                    await self.stream.send_all(event.data)
                return
            except trio.TooSlowError:
                self.lost = True
                await self.stream.aclose()
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                pass
        await self.protocol.handle(Closed())

    async def _read_data(self) -> None:
        """Read until the client is gone, even while its requests have to wait."""
        send, received = trio.open_memory_channel[bytes](1)
        handled = trio.Event()

        async def handle() -> None:
            async for data in received:
                await self.protocol.handle(RawData(data))
            await self.protocol.handle(RawData(b""))
            handled.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(handle)
            try:
                while data := await self.stream.receive_some(MAX_RECV):
                    with trio.fail_after(self._limits.request_s):
                        await send.send(bytes(data))
                send.close()
                with trio.move_on_after(HALF_CLOSED_S):
                    await handled.wait()
                    await self._at_rest.wait()
                async with self.send_lock:
                    pass  # a part that is being written is written to its end
            except (trio.ClosedResourceError, trio.BrokenResourceError, trio.TooSlowError):
                pass
            await self.protocol.handle(Closed())
            nursery.cancel_scope.cancel()

    async def _initiate_server_close(self) -> None:
        if self._http1.connection.trailing_data[0]:
            await self._http1._send_error_response(408)
        await super()._initiate_server_close()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, for as long as the client is there."""
        app, complete = self._app, False
        try:
            body = await self._body(receive)
        except Problem as problem:
            self.refused += 1
            app, body = problem_response(problem), b""
        if body is None:
            self.lost = True
            return

        async def read() -> Message:
            # Starlette asks once; a disconnect is noticed here.
            return {"type": "http.request", "body": body, "more_body": False}

        async def write(message: Message) -> None:
            nonlocal complete
            complete = message["type"] == "http.response.body" and not message.get("more_body")
            await send(message)

        async with trio.open_nursery() as nursery:

            async def watch() -> None:
                while (await receive())["type"] != "http.disconnect":
                    pass
                # It comes after the end of an answer as well, which then closes the connection.
                if not complete:
                    nursery.cancel_scope.cancel()

            nursery.start_soon(watch)
            await app(scope, read, write)
            nursery.cancel_scope.cancel()
        self.lost = self.lost or not complete

    async def _body(self, receive: Receive) -> bytes | None:
        """Return the body of a request; None if the client disconnected before its end."""
        body = bytearray()
        with trio.move_on_after(self._limits.request_s):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    return None
                body += message["body"]
                if len(body) > self._limits.body_bytes:
                    most = self._limits.body_bytes
                    raise Problem(413, "BodyTooLarge", f"a body has at most {most} bytes")
                if not message["more_body"]:
                    return bytes(body)
        raise Problem(408, "RequestTooSlow", "the request did not arrive in time")


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
        header = Headers(scope=scope).get("authorization")
        if self._token is None or not tokens.accepts(self._token, header):
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
