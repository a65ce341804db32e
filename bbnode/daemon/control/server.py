"""An HTTP server for an ASGI application over unix sockets and TCP, within bounds.

h11 reads and writes HTTP/1.1. This module adds what h11 leaves to its user: bounds on connections,
bodies and times, refusals as JSON, and isolation, so that a fault in one connection ends only that
connection.

Rule: whatever a client does, it costs only its own task. Each socket is a door with its own bounds,
so that scrapers of metrics never keep an operator out. On TCP a request is admitted by its head
alone (token, Host, Origin, length): of any other request no byte of the body is read, and a client
without an admitted request has few places, little time, and is the first to go when places are
short.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import h11
import trio

from bbnode.daemon.control import token as tokens
from bbnode.daemon.control.asgi import ASGIApp, Message, Scope, header
from bbnode.daemon.control.errors import Problem
from bbnode.daemon.control.http import problem_response
from bbnode.daemon.control.json_lines import short
from bbnode.daemon.control.listen import is_loopback, is_own_host, tcp_listener, unix_listener

logger = logging.getLogger(__name__)

# The only paths of the metrics' address, for GET and HEAD.
SCRAPED = ("/metrics", "/healthz", "/readyz")
# Bytes that are read from a socket at once.
MAX_RECV = 64 * 1024
# A client that has finished sending may still read: an answer that is ready within this time is
# sent.
HALF_CLOSED_S = 0.5
# A client that is refused with its body half sent gets this time, and these bytes, to read why.
LINGER_S = 1.0
LINGER_BYTES = 256 * 1024
# A client that has been idle for this long may lose its place to a new one.
EVICTED_AFTER_S = 1.0
# The pause after an accept that failed, for example for lack of descriptors.
ACCEPT_AGAIN_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpLimits:
    """Bounds of one connection; the comments state the consequence of exceeding each."""

    # Request line and headers; more is 431 and the end of the connection.
    head_bytes: int = 16 * 1024
    # An invoke's inputs are at most 10 MiB: 14 MiB as base64. More is 413.
    body_bytes: int = 16 * 1024 * 1024
    # A connection on which no request begins within this time is closed, with 408 if half a head
    # has arrived.
    idle_s: float = 60.0
    # The same for a client on TCP without an admitted request.
    unproved_s: float = 10.0
    # From the head of a request to the end of its body; later is 408.
    request_s: float = 30.0
    # A client that reads nothing for this long is cut off.
    write_s: float = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlLimits:
    """Bounds of the control plane; the comments state the consequence of exceeding each."""

    # More at once are answered with 503: an operator has a few terminals, not hundreds.
    connections: int = 64
    # Clients on TCP without an admitted request, among those; the oldest goes for another one.
    unproved: int = 16
    # Clients beyond `connections` that are answered with 503; more are closed at once.
    told_busy: int = 16
    # Bodies of all requests at once; more is 503.
    bodies_bytes: int = 64 * 1024 * 1024
    # A request without an answer by then is 504; the time that an invoke asks for (`wait_s`) comes
    # on top.
    request_s: float = 600.0
    http: HttpLimits = field(default_factory=HttpLimits)
    # Bounds of the metrics' address, where anybody may connect: a few scrapers, and requests
    # without a body.
    scrapers: int = 16
    scraped: HttpLimits = field(
        default_factory=lambda: HttpLimits(head_bytes=8 * 1024, body_bytes=0, request_s=10.0)
    )


class _ClientGone(Exception):
    """The client went away, or did not read its answer in time."""


@dataclass(slots=True)
class Bodies:
    """The bytes of all requests that are being read or answered."""

    most_bytes: int
    held_bytes: int = 0

    def add(self, more: int) -> None:
        """Count bytes of a body; raises `Problem` (503) beyond the bound."""
        if self.held_bytes + more > self.most_bytes:
            raise Problem(
                503,
                "Busy",
                f"the bodies of all requests take {self.most_bytes} bytes; try again later",
                headers={"Retry-After": "1"},
            )
        self.held_bytes += more


class HttpConnection:
    """The connection of one client, whose requests are served one after the other."""

    def __init__(
        self,
        stream: trio.abc.HalfCloseableStream,
        app: ASGIApp,
        limits: HttpLimits,
        *,
        check: Callable[[Scope], None] = lambda _scope: None,
        proved: bool = True,
        bodies: Bodies | None = None,
    ) -> None:
        """Serve `app`, which answers every request and raises nothing of its own.

        `check` raises `Problem` for a request that is not admitted, before its body is read; a
        client that is not `proved` becomes so by an admitted request. `bodies` counts the bytes of
        all clients' bodies.
        """
        self._stream = stream
        self._app = app
        self._limits = limits
        self._check = check
        self._bodies = Bodies(limits.body_bytes) if bodies is None else bodies
        # True once a request was admitted.
        self.is_proved = proved
        # The time since which no request is open; None while one is.
        self.idle_since_s: float | None = trio.current_time()
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=limits.head_bytes)
        self._send, self._arrived = trio.open_memory_channel[bytes](1)
        self._writing = trio.Lock()
        # From the head of a request to the end of its answer.
        self._busy = False
        # True once the client went away, or did not read its answer in time.
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
                self._busy, self.idle_since_s = True, None
                scope = _scope_of(head)
                self._check_length(head)
                try:
                    self._check(scope)
                except Problem as problem:
                    await self._refuse(problem)
                    return
                self.is_proved = True
                if not await self._serve_one(head, scope):
                    return
                self._http.start_next_cycle()
                self._busy, self.idle_since_s = False, trio.current_time()
        except h11.RemoteProtocolError as error:
            text = "what came is not an HTTP/1.1 request"
            self.refused += 1
            await self._refuse(Problem(error.error_status_hint, "BadRequest", text))
        except Problem as problem:
            self.refused += 1
            await self._refuse(problem)

    async def _serve_one(self, head: h11.Request, scope: Scope) -> bool:
        """Read a body and answer; return False if the connection ends with that."""
        body = bytearray()
        try:
            await self._read_body(body)
            await self._answer(head, scope, bytes(body))
        finally:
            self._bodies.held_bytes -= len(body)
        return self._http.our_state is h11.DONE and self._http.their_state is h11.DONE

    async def _head(self) -> h11.Request | None:
        """Return the next request; None if none came. Raises Problem, RemoteProtocolError."""
        limits = self._limits
        idle_s = limits.idle_s if self.is_proved else min(limits.idle_s, limits.unproved_s)
        with trio.move_on_after(idle_s):
            event = await self._event()
            return event if isinstance(event, h11.Request) else None
        if not self._http.trailing_data[0]:
            return None
        raise _too_slow()

    def _check_length(self, head: h11.Request) -> None:
        """Raise Problem for a body whose declared length is too large, before it is read."""
        most = self._limits.body_bytes
        for name, value in head.headers:
            # Numbers of more digits are no length, and int() has a bound of its own.
            if name == b"content-length" and (len(value) > 20 or int(value) > most):
                raise _too_large(most)

    async def _read_body(self, body: bytearray) -> None:
        """Read a body and count its bytes. Raises Problem, RemoteProtocolError."""
        most = self._limits.body_bytes
        with trio.move_on_after(self._limits.request_s):
            while isinstance(event := await self._event(), h11.Data):
                if len(body) + len(event.data) > most:
                    raise _too_large(most)
                self._bodies.add(len(event.data))
                body += event.data
            return
        raise _too_slow()

    async def _event(self) -> Any:
        """Return the next event: a request, a part of its body, the end of the body, or of the
        connection.
        """
        while (event := self._http.next_event()) is h11.NEED_DATA:
            if self._http.they_are_waiting_for_100_continue:
                go_on = h11.InformationalResponse(status_code=100, headers=[])
                await self._write(self._http.send(go_on))
            try:
                self._http.receive_data(await self._arrived.receive())
            except trio.EndOfChannel:
                self._http.receive_data(b"")
        return event

    async def _answer(self, request: h11.Request, scope: Scope, body: bytes) -> None:
        """Answer a request; raises _ClientGone if the application did not finish."""

        async def receive() -> Message:
            # Called once; a cancellation reports that the client has gone.
            return {"type": "http.request", "body": body, "more_body": False}

        # The head of an answer of known length leaves with the first part of its body, so that no
        # client sees one without the other.
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
        """Answer a request that is not read or not admitted, and end the connection."""
        if self._http.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            return
        answer = problem_response(problem)
        headers = [*answer.raw_headers, (b"connection", b"close")]
        parts = (
            h11.Response(status_code=answer.status, headers=headers),
            h11.Data(data=answer.body),
            h11.EndOfMessage(),
        )
        half_sent = self._http.their_state is h11.SEND_BODY
        await self._write(b"".join(self._http.send(part) or b"" for part in parts))
        if half_sent:
            await self._linger()

    async def _linger(self) -> None:
        """Let a client that still sends read its answer: a close would reset the connection."""
        gone = (trio.EndOfChannel, trio.BrokenResourceError, trio.ClosedResourceError)
        with trio.move_on_after(LINGER_S), contextlib.suppress(*gone):
            await self._stream.send_eof()
            left = LINGER_BYTES
            while left > 0:
                left -= len(await self._arrived.receive())

    async def _write(self, data: bytes | None) -> None:
        """Write within the client's time to read. Raises _ClientGone."""
        if not data:
            return
        try:
            async with self._writing:
                with trio.fail_after(self._limits.write_s):
                    await self._stream.send_all(data)
        except (trio.TooSlowError, trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise _ClientGone from error


def _scope_of(request: h11.Request) -> Scope:
    """Return the ASGI scope of a request."""
    path, _, query = request.target.partition(b"?")
    return {
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


def _too_large(most_bytes: int) -> Problem:
    return Problem(413, "BodyTooLarge", f"a body has at most {most_bytes} bytes")


def _too_slow() -> Problem:
    return Problem(408, "RequestTooSlow", "the request did not arrive in time")


@dataclass(slots=True)
class _Door:
    """One socket: the check of its requests, its bounds, and its clients."""

    listener: trio.SocketListener
    most: int
    limits: HttpLimits
    # Raises `Problem` for a request that this door does not admit; None admits all.
    check: Callable[[Scope], None] | None
    # True if a client may lose its place although it had an admitted request.
    evicts_idle: bool = False
    # The clients, oldest first, each with the scope that ends it.
    clients: dict[HttpConnection, trio.CancelScope] = field(default_factory=dict)

    def unproved(self) -> list[HttpConnection]:
        """Return the clients without an admitted request, the oldest first."""
        return [client for client in self.clients if not client.is_proved]

    def make_room(self, now_s: float) -> bool:
        """End the client that has been idle for longest, if it may; return False otherwise."""
        idle = [
            client
            for client in self.clients
            if (self.evicts_idle or not client.is_proved)
            and client.idle_since_s is not None
            and now_s - client.idle_since_s >= EVICTED_AFTER_S
        ]
        if not idle:
            return False
        self.end(min(idle, key=lambda client: client.idle_since_s or 0.0))
        return True

    def end(self, client: HttpConnection) -> None:
        """End a client, whose place is free at once."""
        self.clients.pop(client).cancel()


class ControlServer:
    """The server of an application on a unix socket, and on TCP if configured."""

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
        hosts: Collection[str] = (),
        limits: ControlLimits | None = None,
    ) -> None:
        """Create a server; `path` is `paths.control_socket(state_dir)`, which `run` opens.

        `counts` is shared with `app`.

        `tcp` and `metrics` are an IP address and a port each; a request on TCP needs the `token`,
        except for metrics on loopback. `hosts` are names of this machine in the Host of a request,
        beside its addresses and localhost.
        """
        self.path = path
        self._app = app
        self._group = group
        self._tcp = tcp
        self._metrics = metrics
        self._token = token
        self._hosts = frozenset(host.lower() for host in hosts)
        self._limits = limits if limits is not None else ControlLimits()
        self._bodies = Bodies(self._limits.bodies_bytes)
        self._doors: list[_Door] = []
        self.counts = counts
        self.tcp_port: int | None = None
        self.metrics_port: int | None = None

    def counters(self) -> dict[str, int]:
        """Return the counters since the start, and the number of connections."""
        return {**self.counts, "control.connections": sum(len(d.clients) for d in self._doors)}

    async def run(self, *, task_status: trio.TaskStatus[Path] = trio.TASK_STATUS_IGNORED) -> None:
        """Listen until cancelled, then remove the socket.

        Raises `AlreadyRunning` if another daemon answers there, `UnknownGroup`, and
        `EnvironmentFault` if a socket is not available.
        """
        limits = self._limits
        most, http = limits.connections, limits.http
        with contextlib.ExitStack() as stack:
            doors = []
            if self._tcp is not None:
                listener = stack.enter_context(tcp_listener(*self._tcp, key="control.tcp"))
                self.tcp_port = _port(listener)
                doors.append(_Door(listener, most=most, limits=http, check=self._check_control))
            if self._metrics is not None:
                listener = stack.enter_context(tcp_listener(*self._metrics, key="control.metrics"))
                self.metrics_port = _port(listener)
                few, small = limits.scrapers, limits.scraped
                check = self._check_scrape
                door = _Door(listener, most=few, limits=small, check=check, evicts_idle=True)
                doors.append(door)
            listener = stack.enter_context(unix_listener(self.path, group=self._group))
            # The mode of the socket decides who may connect.
            doors.append(_Door(listener, most=most, limits=http, check=None))
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
        """Serve one client, from its connection to its end; no error leaves this task."""
        unproved = door.unproved()
        if len(unproved) >= self._limits.unproved:
            door.end(unproved[0])
        full = len(door.clients) >= door.most and not door.make_room(trio.current_time())
        if len(door.clients) >= door.most + self._limits.told_busy:
            self.counts["control.not_accepted"] += 1
            await trio.aclose_forcefully(stream)
            return

        def check(scope: Scope) -> None:
            self.counts["control.requests"] += 1
            try:
                if full:
                    raise Problem(
                        503,
                        "Busy",
                        "too many control clients; close one",
                        headers={"Retry-After": "1"},
                    )
                if door.check is not None:
                    door.check(scope)
            except Problem:
                self.counts["control.refused"] += 1
                raise

        proved = door.check is None and not full
        connection = HttpConnection(
            stream, self._app, door.limits, check=check, proved=proved, bodies=self._bodies
        )
        try:
            with trio.move_on_after(door.limits.write_s if full else math.inf) as scope:
                door.clients[connection] = scope
                await connection.run()
        except Exception:
            # The boundary of one connection: a fault in it costs only this client.
            logger.exception("control connection failed")
            self.counts["control.internal_errors"] += 1
        finally:
            door.clients.pop(connection, None)
            self.counts["control.bad_requests"] += connection.refused
            self.counts["control.clients_lost"] += connection.lost

    def _check_control(self, scope: Scope) -> None:
        """Admit a request that has the token, and is meant for this machine."""
        self._check_token(scope)
        self._check_names(scope)

    def _check_token(self, scope: Scope) -> None:
        """Refuse a request without the token: on TCP any user of this machine can connect."""
        sent = header(scope, b"authorization")
        if self._token is None or not tokens.accepts(self._token, sent):
            self.counts["control.unauthorized"] += 1
            raise Problem(
                401,
                "Unauthorized",
                "send the content of the daemon's control.token as `Authorization: Bearer …`",
                headers={"WWW-Authenticate": "Bearer"},
            )

    def _check_names(self, scope: Scope) -> None:
        """Refuse a request of a web page whose name resolves to us (DNS rebinding), or of another
        page.

        No page is at an address, and none has the name localhost.
        """
        for name, value in scope["headers"]:
            if name not in (b"host", b"origin"):
                continue
            text = value.decode("latin-1")
            if name == b"origin":
                text = text.partition("://")[2]
            if not is_own_host(text, self._hosts):
                self.counts["control.wrong_host"] += 1
                raise Problem(
                    421 if name == b"host" else 403,
                    "WrongHost" if name == b"host" else "WrongOrigin",
                    f"this is not {short(text) or 'a request for this machine'}; ask for an "
                    "address or localhost, or add the name to control.hosts",
                )

    def _check_scrape(self, scope: Scope) -> None:
        """Allow only the three paths of SCRAPED, from other machines only with the token."""
        if self._metrics is None or not is_loopback(self._metrics[0]):
            self._check_token(scope)
            # A client with the token is no web page, and machines have many names.
            if self._hosts:
                self._check_names(scope)
        else:
            self._check_names(scope)
        if scope["path"] not in SCRAPED or scope["method"] not in ("GET", "HEAD"):
            raise Problem(404, "UnknownPath", f"here is only GET of: {', '.join(SCRAPED)}")


def _port(listener: trio.SocketListener) -> int:
    return int(listener.socket.getsockname()[1])
