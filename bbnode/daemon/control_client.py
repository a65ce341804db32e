"""Clients of the control plane: a plain one for the command line, one on trio.

Rule: a client never waits without a deadline, except for the next event of a stream; and
the plain one imports neither trio nor libp2p, so that `bbnode status` answers at once.
"""

from __future__ import annotations

import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from bbnode.daemon import control_wire as wire

if TYPE_CHECKING:
    import trio

DEFAULT_TIMEOUT_S = 5.0
READ_BYTES = 64 * 1024


class ControlClient:
    """Talks to a daemon over blocking sockets. A context manager; connects when entered.

    Raises `NotRunning`, `ControlTimeout`, `ControlProtocolError`, and `ControlError` for what
    the daemon refuses.
    """

    def __init__(self, path: Path, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """`path` is `paths.control_socket(state_dir)`; `timeout_s` bounds each answer."""
        self._path = path
        self._timeout_s = timeout_s
        self._lines = wire.LineBuffer(wire.MAX_ANSWER_BYTES)
        self._number = 0
        self._socket: socket.socket | None = None

    def __enter__(self) -> Self:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(self._timeout_s)
        try:
            connection.connect(os.fspath(self._path))
        except OSError as error:
            connection.close()
            raise _cannot_connect(self._path, error) from error
        self._socket = connection
        return self

    def __exit__(self, *_: object) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def call(self, cmd: str, **args: Any) -> dict[str, Any]:
        """Send a command and return its result."""
        self._send(cmd, args)
        return _result(wire.parse_answer(self._read_line(cmd), self._number))

    def events(self) -> Iterator[dict[str, Any]]:
        """Subscribe now; the iterator ends with the daemon, and uses the client up.

        Each is the whole line: the event under "event", the number lost under "dropped".
        """
        self.call("events")
        self._open().settimeout(None)
        return self._read_events()

    def _read_events(self) -> Iterator[dict[str, Any]]:
        while True:
            try:
                line = self._read_line("events")
            except wire.NotRunning:
                return
            yield wire.parse_answer(line, self._number)

    def _open(self) -> socket.socket:
        if self._socket is None:
            raise wire.NotRunning(f"the connection to {self._path} is not open: use `with`")
        return self._socket

    def _send(self, cmd: str, args: dict[str, Any]) -> None:
        self._number += 1
        try:
            self._open().sendall(wire.request_line(cmd, args, self._number))
        except TimeoutError as error:
            raise _too_slow(cmd, self._timeout_s) from error
        except OSError as error:
            raise _gone(self._path) from error

    def _read_line(self, cmd: str) -> bytes:
        while (line := self._lines.take()) is None:
            try:
                data = self._open().recv(READ_BYTES)
            except TimeoutError as error:
                raise _too_slow(cmd, self._timeout_s) from error
            except OSError as error:
                raise _gone(self._path) from error
            if not data:
                raise _gone(self._path)
            self._lines.add(data)
        return line


class AsyncControlClient:
    """The same on trio: an async context manager with `call` and `events`."""

    def __init__(self, path: Path, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """As `ControlClient`."""
        self._path = path
        self._timeout_s = timeout_s
        self._lines = wire.LineBuffer(wire.MAX_ANSWER_BYTES)
        self._number = 0
        self._subscribed = False
        self._stream: trio.SocketStream | None = None

    async def __aenter__(self) -> Self:
        import trio

        try:
            with trio.fail_after(self._timeout_s):
                self._stream = await trio.open_unix_socket(os.fspath(self._path))
        except trio.TooSlowError as error:
            raise _too_slow("connect", self._timeout_s) from error
        except OSError as error:
            raise _cannot_connect(self._path, error) from error
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._stream is not None:
            await self._stream.aclose()
            self._stream = None

    async def call(self, cmd: str, **args: Any) -> dict[str, Any]:
        """Send a command and return its result."""
        import trio

        self._number += 1
        try:
            with trio.fail_after(self._timeout_s):
                await self._open().send_all(wire.request_line(cmd, args, self._number))
                line = await self._read_line()
        except trio.TooSlowError as error:
            raise _too_slow(cmd, self._timeout_s) from error
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise _gone(self._path) from error
        return _result(wire.parse_answer(line, self._number))

    async def subscribe(self) -> None:
        """Ask for events; from then on the daemon keeps them for this client. No more calls."""
        await self.call("events")
        self._subscribed = True

    def events(self) -> AsyncIterator[dict[str, Any]]:
        """An iterator over events that ends with the daemon; it subscribes if need be.

        Each is the whole line, as in `ControlClient.events`.
        """
        return _Events(self._next_event)

    async def _next_event(self) -> dict[str, Any] | None:
        import trio

        try:
            if not self._subscribed:
                await self.subscribe()
            line = await self._read_line()
        except (wire.NotRunning, trio.BrokenResourceError):
            return None
        return wire.parse_answer(line, self._number)

    def _open(self) -> trio.SocketStream:
        if self._stream is None:
            raise wire.NotRunning(f"the connection to {self._path} is not open: use `async with`")
        return self._stream

    async def _read_line(self) -> bytes:
        while (line := self._lines.take()) is None:
            data = await self._open().receive_some(READ_BYTES)
            if not data:
                raise _gone(self._path)
            self._lines.add(data)
        return line


class _Events:
    """An iterator and not an async generator: those need closing by hand under trio."""

    def __init__(self, read: Callable[[], Awaitable[dict[str, Any] | None]]) -> None:
        self._read = read

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> dict[str, Any]:
        line = await self._read()
        if line is None:
            raise StopAsyncIteration
        return line


def _result(answer: dict[str, Any]) -> dict[str, Any]:
    result = answer.get("result")
    if not isinstance(result, dict):
        raise wire.ControlProtocolError("the daemon's answer has no result")
    return result


def _cannot_connect(path: Path, error: OSError) -> Exception:
    match error:
        case FileNotFoundError() | ConnectionRefusedError():
            return wire.NotRunning(f"no daemon is running on {path}; start it with `bbnode run`")
        case PermissionError():
            return wire.NotRunning(
                f"{path} belongs to another user; ask as the user that runs the daemon"
            )
        case TimeoutError():
            return wire.ControlTimeout(f"the daemon on {path} takes no connection")
        case _:
            return wire.NotRunning(f"{path}: {error}")


def _gone(path: Path) -> wire.NotRunning:
    return wire.NotRunning(f"the daemon on {path} closed the connection; it may have stopped")


def _too_slow(cmd: str, timeout_s: float) -> wire.ControlTimeout:
    return wire.ControlTimeout(
        f"the daemon did not answer {cmd!r} within {timeout_s:g} s; try a longer --timeout"
    )
