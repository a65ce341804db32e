"""The control plane of a daemon: a unix socket that only its owner can open.

Rule: whatever comes in, the daemon goes on. A request is bounded, a command has a deadline,
a subscriber that reads too slowly loses events and is told how many. The words are in
`control_wire`, the clients in `control_client`.

Run `ControlServer.run` in the daemon's nursery; register commands before that; call
`publish` from the trio thread whenever there is an event to show.
"""

from __future__ import annotations

import logging
import os
import socket
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import trio

from bbnode.daemon import control_wire as wire
from bbnode.daemon import paths
from bbnode.daemon.control_client import AsyncControlClient, ControlClient
from bbnode.ir.errors import BbnodeError, EnvironmentFault

__all__ = [
    "AsyncControlClient",
    "Command",
    "ControlClient",
    "ControlLimits",
    "ControlServer",
]

logger = logging.getLogger(__name__)

Command = Callable[[Mapping[str, Any]], Awaitable[Mapping[str, Any]]]

READ_BYTES = 16 * 1024

# Connections that the kernel holds until the loop accepts them.
BACKLOG = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlLimits:
    """Bounds of the control plane; beyond each stands what happens."""

    # More at once are told "Busy" and closed: an operator has a few terminals, not hundreds.
    connections: int = 32
    # A command that is not done by then is cancelled and answered with "Timeout".
    command_s: float = 30.0
    # A client that neither asks nor reads for so long is closed.
    idle_s: float = 300.0
    write_s: float = 10.0
    # Events that wait for one subscriber; the oldest goes and is counted.
    queued_events: int = 1024


class _Subscriber:
    """The events that wait for one client."""

    def __init__(self, limit: int) -> None:
        self._waiting: deque[Mapping[str, Any]] = deque()
        self._limit = limit
        self._dropped = 0
        self._more = trio.Event()

    def push(self, event: Mapping[str, Any]) -> bool:
        """Queue an event; False when an older one had to go for it."""
        fits = len(self._waiting) < self._limit
        if not fits:
            self._waiting.popleft()
            self._dropped += 1
        self._waiting.append(event)
        self._more.set()
        return fits

    async def next(self) -> tuple[Mapping[str, Any], int]:
        """The next event, and how many were lost before it."""
        while not self._waiting:
            self._more = trio.Event()
            await self._more.wait()
        dropped, self._dropped = self._dropped, 0
        return self._waiting.popleft(), dropped


class ControlServer:
    """Answers requests on a unix socket; see the module for its rule."""

    def __init__(self, path: Path, *, limits: ControlLimits | None = None) -> None:
        """`path` is `paths.control_socket(state_dir)`; nothing is opened before `run`."""
        self._path = path
        self._limits = limits if limits is not None else ControlLimits()
        self._commands: dict[str, Command] = {}
        self._subscribers: set[_Subscriber] = set()
        self._connections = 0
        self._counts: Counter[str] = Counter()

    @property
    def path(self) -> Path:
        """Where the server listens."""
        return self._path

    def register(self, name: str, command: Command) -> None:
        """Answer `name` with what `command(args)` returns, a JSON object.

        A `BbnodeError` that it raises goes to the client as its class name and message.
        """
        if name in self._commands or name == "events":
            raise ValueError(f"control command {name!r} is registered already")
        self._commands[name] = command

    def publish(self, event: Mapping[str, Any]) -> None:
        """Hand an event to every subscriber; never waits."""
        for subscriber in self._subscribers:
            if not subscriber.push(event):
                self._counts["control.events_dropped"] += 1

    def counters(self) -> dict[str, int]:
        """What was counted since the start."""
        return {
            **self._counts,
            "control.connections": self._connections,
            "control.subscribers": len(self._subscribers),
        }

    async def run(self, *, task_status: trio.TaskStatus[Path] = trio.TASK_STATUS_IGNORED) -> None:
        """Listen until cancelled, then remove the socket.

        Raises `AlreadyRunning` when another daemon answers there, `EnvironmentFault` when the
        socket cannot be made.
        """
        listener = _listen(self._path)
        identity = self._path.lstat()
        try:
            async with trio.open_nursery() as nursery:
                with listener:
                    task_status.started(self._path)
                    while True:
                        client, _ = await listener.accept()
                        nursery.start_soon(self._serve, trio.SocketStream(client))
        finally:
            _remove_own(self._path, identity)

    async def _serve(self, stream: trio.SocketStream) -> None:
        """One client, from its connection to its end; nothing it does leaves this task."""
        async with stream:
            if self._connections >= self._limits.connections:
                self._counts["control.refused_busy"] += 1
                await self._answer(stream, wire.failure(None, "Busy", "too many control clients"))
                return
            self._connections += 1
            try:
                await self._serve_requests(stream)
            except (trio.BrokenResourceError, trio.ClosedResourceError, trio.TooSlowError):
                self._counts["control.clients_lost"] += 1
            finally:
                self._connections -= 1

    async def _serve_requests(self, stream: trio.SocketStream) -> None:
        lines = wire.LineBuffer(wire.MAX_REQUEST_BYTES)
        while True:
            line = await self._read_line(stream, lines)
            if line is None:
                return
            try:
                request = wire.parse_request(line)
            except wire.ControlProtocolError as error:
                self._counts["control.bad_requests"] += 1
                await self._answer(stream, wire.failure(None, "BadRequest", str(error)))
                continue
            if request.cmd == "events":
                await self._stream_events(stream, request)
                return
            await self._answer(stream, await self._execute(request))

    async def _read_line(self, stream: trio.SocketStream, lines: wire.LineBuffer) -> bytes | None:
        """The next line without its end, or None when there will be none."""
        with trio.fail_after(self._limits.idle_s):
            while True:
                try:
                    if (line := lines.take()) is not None:
                        return line
                except wire.ControlProtocolError as error:
                    # Where the next request begins is lost: answer and close.
                    self._counts["control.bad_requests"] += 1
                    await self._answer(stream, wire.failure(None, "BadRequest", str(error)))
                    return None
                received = await stream.receive_some(READ_BYTES)
                if not received:
                    return None
                lines.add(received)

    async def _answer(self, stream: trio.SocketStream, line: bytes) -> None:
        """Send a line; a client that does not read it is given up (`TooSlowError`)."""
        with trio.fail_after(self._limits.write_s):
            await stream.send_all(line)

    async def _execute(self, request: wire.Request) -> bytes:
        command = self._commands.get(request.cmd)
        if command is None:
            known = ", ".join(sorted([*self._commands, "events"]))
            message = f"unknown command {request.cmd!r}; there is: {known}"
            return wire.failure(request.id, "UnknownCommand", message)
        self._counts["control.requests"] += 1
        try:
            with trio.fail_after(self._limits.command_s):
                return wire.success(request.id, await command(request.args))
        except BbnodeError as error:
            return wire.failure(request.id, type(error).__name__, str(error))
        except trio.TooSlowError:
            message = f"{request.cmd} was not done within {self._limits.command_s:g} s"
            return wire.failure(request.id, "Timeout", message)
        except Exception:
            # The declared boundary of the control plane: a fault in one command must not end
            # the daemon's work. The log has the traceback; the client learns that it failed.
            logger.exception("control command failed", extra={"command": request.cmd})
            self._counts["control.internal_errors"] += 1
            message = f"{request.cmd} failed inside the daemon; its log says where"
            return wire.failure(request.id, "InternalError", message)

    async def _stream_events(self, stream: trio.SocketStream, request: wire.Request) -> None:
        """Send events until the client goes; what it sends meanwhile is not read as requests."""
        subscriber = _Subscriber(self._limits.queued_events)
        self._subscribers.add(subscriber)
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._until_closed, stream, nursery.cancel_scope)
                await self._answer(stream, wire.success(request.id, {"streaming": True}))
                while True:
                    data, dropped = await subscriber.next()
                    await self._answer(stream, self._event_line(request, data, dropped))
        except* (trio.BrokenResourceError, trio.ClosedResourceError, trio.TooSlowError):
            self._counts["control.clients_lost"] += 1
        finally:
            self._subscribers.discard(subscriber)

    def _event_line(self, request: wire.Request, data: Mapping[str, Any], dropped: int) -> bytes:
        try:
            return wire.event(request.id, data, dropped)
        except wire.ControlProtocolError as error:
            self._counts["control.events_dropped"] += 1
            return wire.event(request.id, {"type": "unprintable", "reason": str(error)}, dropped)

    @staticmethod
    async def _until_closed(stream: trio.SocketStream, scope: trio.CancelScope) -> None:
        while await stream.receive_some(READ_BYTES):
            pass
        scope.cancel()


def _listen(path: Path) -> trio.socket.SocketType:
    paths.make_socket_dir(path)
    _remove_stale(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    # The mode has to be right from the first moment: a chmod after bind leaves a gap.
    old_mask = os.umask(0o177)
    try:
        # No await between the two calls of umask: it holds for the whole process.
        listener.bind(os.fspath(path))
    except OSError as error:
        listener.close()
        raise EnvironmentFault(f"control socket {path}: {error.strerror}") from error
    finally:
        os.umask(old_mask)
    listener.listen(BACKLOG)
    return trio.socket.from_stdlib_socket(listener)


def _remove_stale(path: Path) -> None:
    """Remove the socket that a killed daemon left; raises `AlreadyRunning` for a live one."""
    if not path.is_socket():
        if path.exists() or path.is_symlink():
            raise EnvironmentFault(f"control socket {path}: something else has that name")
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(os.fspath(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
            return
        except FileNotFoundError:
            return
        except OSError as error:
            raise EnvironmentFault(f"control socket {path}: {error}") from error
    raise wire.AlreadyRunning(f"a daemon is running already: it answers on {path}")


def _remove_own(path: Path, identity: os.stat_result) -> None:
    """Remove the socket, unless a later daemon has put its own there."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return
    if (found.st_dev, found.st_ino) == (identity.st_dev, identity.st_ino):
        path.unlink(missing_ok=True)
