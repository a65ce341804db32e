"""Serves the control plane: accepts clients, bounds their number, answers their requests.

Rule: whatever comes in, the daemon goes on. Too many clients are told so and closed; a fault in
one handler is logged and answered with 500; a client that vanishes ends its own task alone. Each
socket is a door with a bound of its own, so those who scrape never keep an operator out.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import trio

from bbnode.daemon.control import token as tokens
from bbnode.daemon.control.errors import Problem
from bbnode.daemon.control.http import (
    Answer,
    ClientGone,
    HttpConnection,
    HttpLimits,
    Request,
    problem_response,
)
from bbnode.daemon.control.listen import is_loopback, tcp_listener, unix_listener

logger = logging.getLogger(__name__)

Handle = Callable[[Request], Awaitable[Answer]]

# All that the metrics' address answers, to GET and HEAD.
SCRAPED = ("/metrics", "/healthz", "/readyz")


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlLimits:
    """Bounds of the control plane; beyond each stands what happens."""

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


@dataclass(slots=True, kw_only=True)
class _Door:
    """One socket: who answers there, within which bounds, and how many clients there are."""

    handle: Handle
    most: int
    http: HttpLimits
    connections: int = 0


class ControlServer:
    """Answers HTTP on a unix socket, and on TCP where that is asked for."""

    def __init__(
        self,
        path: Path,
        *,
        handle: Handle,
        group: str | None = None,
        tcp: tuple[str, int] | None = None,
        metrics: tuple[str, int] | None = None,
        token: str | None = None,
        limits: ControlLimits | None = None,
    ) -> None:
        """`path` is `paths.control_socket(state_dir)`; nothing is opened before `run`.

        `handle` answers a request and raises `Problem` for what it refuses. `tcp` and `metrics`
        are an IP address and a port each; what listens on TCP answers nobody without `token`,
        but for metrics on loopback.
        """
        self._path = path
        self._handle = handle
        self._group = group
        self._tcp = tcp
        self._metrics = metrics
        self._token = token
        self._limits = limits if limits is not None else ControlLimits()
        self._doors: list[_Door] = []
        self._counts: Counter[str] = Counter()
        self.tcp_port: int | None = None
        self.metrics_port: int | None = None

    @property
    def path(self) -> Path:
        """Where the server listens."""
        return self._path

    def counters(self) -> dict[str, int]:
        """What was counted since the start, and the connections there are."""
        return {**self._counts, "control.connections": sum(d.connections for d in self._doors)}

    async def run(self, *, task_status: trio.TaskStatus[Path] = trio.TASK_STATUS_IGNORED) -> None:
        """Listen until cancelled, then remove the socket.

        Raises `AlreadyRunning` when another daemon answers there, `UnknownGroup`, and
        `EnvironmentFault` when a socket cannot be had.
        """
        with contextlib.ExitStack() as stack:
            tcp = self._open(stack, self._tcp, "control.tcp")
            metrics = self._open(stack, self._metrics, "control.metrics")
            unix = stack.enter_context(unix_listener(self._path, group=self._group))
            async with trio.open_nursery() as nursery:
                most, http = self._limits.connections, self._limits.http
                self._attend(nursery, unix, _Door(handle=self._handle, most=most, http=http))
                if tcp is not None:
                    self.tcp_port = _port(tcp)
                    self._attend(nursery, tcp, _Door(handle=self._guarded, most=most, http=http))
                if metrics is not None:
                    self.metrics_port = _port(metrics)
                    few, http = self._limits.scrapers, self._limits.scraped
                    self._attend(nursery, metrics, _Door(handle=self._scraped, most=few, http=http))
                task_status.started(self._path)

    def _open(
        self, stack: contextlib.ExitStack, address: tuple[str, int] | None, key: str
    ) -> trio.SocketListener | None:
        if address is None:
            return None
        return stack.enter_context(tcp_listener(*address, key=key))

    def _attend(self, nursery: trio.Nursery, listener: trio.SocketListener, door: _Door) -> None:
        self._doors.append(door)
        nursery.start_soon(self._accept, listener, nursery, door)

    async def _accept(
        self, listener: trio.SocketListener, nursery: trio.Nursery, door: _Door
    ) -> None:
        while True:
            try:
                stream = await listener.accept()
            except OSError as error:
                # Out of descriptors, for instance: that must not end the node's own work.
                logger.warning("control client not accepted", extra={"reason": str(error)})
                self._counts["control.not_accepted"] += 1
                await trio.sleep(1.0)
                continue
            nursery.start_soon(self._serve, stream, door)

    async def _serve(self, stream: trio.SocketStream, door: _Door) -> None:
        """One client, from its connection to its end; nothing it does leaves this task."""
        busy = door.connections >= door.most
        door.connections += 1

        async def answer(request: Request) -> Answer:
            if busy:
                problem = Problem(
                    503, "Busy", "too many control clients; close one", headers={"Retry-After": "1"}
                )
                return self._refused(problem)
            return await self._answer(request, door.handle)

        async with stream:
            try:
                connection = HttpConnection(stream, answer, door.http)
                with trio.move_on_after(door.http.write_s if busy else float("inf")):
                    self._counts["control.bad_requests"] += await connection.run()
            except ClientGone:
                self._counts["control.clients_lost"] += 1
            except Exception:
                # The same boundary for a fault in our own HTTP: it costs this client alone.
                logger.exception("control connection failed")
                self._counts["control.internal_errors"] += 1
            finally:
                door.connections -= 1

    async def _answer(self, request: Request, handle: Handle) -> Answer:
        self._counts["control.requests"] += 1
        try:
            with trio.fail_after(self._limits.request_s):
                return await handle(request)
        except Problem as problem:
            return self._refused(problem)
        except trio.TooSlowError:
            text = f"{request.path} was not answered within {self._limits.request_s:g} s"
            return self._refused(Problem(504, "Timeout", text))
        except Exception:
            # The declared boundary of the control plane: a fault in one handler must not end
            # the daemon's work. The log has the traceback; the client learns that it failed.
            logger.exception("control request failed", extra={"path": request.path})
            self._counts["control.internal_errors"] += 1
            text = f"{request.path} failed inside the daemon; its log says where"
            return self._refused(Problem(500, "InternalError", text))

    def _refused(self, problem: Problem) -> Answer:
        self._counts["control.refused"] += 1
        return problem_response(problem)

    async def _guarded(self, request: Request) -> Answer:
        """On TCP any user of this machine can connect: the token says who may."""
        self._check_token(request)
        return await self._handle(request)

    async def _scraped(self, request: Request) -> Answer:
        """For those who scrape: three paths; from other machines with the token."""
        if self._metrics is None or not is_loopback(self._metrics[0]):
            self._check_token(request)
        if request.path not in SCRAPED or request.method not in ("GET", "HEAD"):
            raise Problem(404, "UnknownPath", f"here is only GET of: {', '.join(SCRAPED)}")
        return await self._handle(request)

    def _check_token(self, request: Request) -> None:
        if self._token is None or not tokens.accepts(
            self._token, request.headers.get("authorization")
        ):
            self._counts["control.unauthorized"] += 1
            raise Problem(
                401,
                "Unauthorized",
                "send the content of the daemon's control.token as `Authorization: Bearer …`",
                headers={"WWW-Authenticate": "Bearer"},
            )


def _port(listener: trio.SocketListener) -> int:
    return int(listener.socket.getsockname()[1])
