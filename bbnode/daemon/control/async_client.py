"""The client of the control plane on trio: the same requests, the same errors.

Rule: h11 is the protocol; a connection does one request after the other, and a stream uses it
up.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import h11
import trio

from bbnode.daemon.control import errors
from bbnode.daemon.control.client import (
    DEFAULT_TIMEOUT_S,
    Query,
    cannot_connect,
    gone,
    parse_answer,
    target,
    too_slow,
)
from bbnode.daemon.control.json_lines import Answered, parse_object
from bbnode.ir.caps import MAX_CONTROL_ANSWER_BYTES

READ_BYTES = 64 * 1024


class AsyncControlClient:
    """Asks a daemon. An async context manager; raises as `ControlClient` does."""

    def __init__(self, path: Path, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """As `ControlClient`."""
        self._path = path
        self._timeout_s = timeout_s
        self._http = h11.Connection(h11.CLIENT)
        self._stream: trio.SocketStream | None = None

    async def __aenter__(self) -> Self:
        try:
            with trio.fail_after(self._timeout_s):
                self._stream = await trio.open_unix_socket(os.fspath(self._path))
        except trio.TooSlowError as error:
            raise too_slow("a connection", self._timeout_s) from error
        except OSError as error:
            raise cannot_connect(self._path, error) from error
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._stream is not None:
            await self._stream.aclose()
            self._stream = None

    async def get(self, path: str, query: Query | None = None) -> dict[str, Any]:
        """Ask for something."""
        return await self.request("GET", target(path, query))

    async def post(self, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Have something done."""
        return await self.request("POST", target(path, None), {} if body is None else body)

    async def request(
        self, method: str, wanted: str, body: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """One request and its JSON answer; `wanted` is the target of the request line."""
        try:
            with trio.fail_after(self._timeout_s):
                response = await self._ask(method, wanted, body)
                data = bytearray()
                while (part := await self._part()) is not None:
                    data += part
                    if len(data) > MAX_CONTROL_ANSWER_BYTES:
                        raise errors.ControlProtocolError(f"the answer to {wanted} is too long")
        except trio.TooSlowError as error:
            raise too_slow(wanted, self._timeout_s) from error
        if self._http.our_state is h11.DONE and self._http.their_state is h11.DONE:
            self._http.start_next_cycle()
        else:
            await self.__aexit__()  # it was the last answer on this connection
        return parse_answer(response.status_code, bytes(data))

    async def stream(self, path: str, query: Query | None = None) -> Lines:
        """Subscribe: from then on the daemon keeps lines for this client. No more requests."""
        wanted = target(path, query)
        try:
            with trio.fail_after(self._timeout_s):
                response = await self._ask("GET", wanted, None)
                if response.status_code != 200:
                    parse_answer(response.status_code, await self._part() or b"{}")
        except trio.TooSlowError as error:
            raise too_slow(wanted, self._timeout_s) from error
        return Lines(self)

    async def next_part(self) -> bytes | None:
        """The next bytes of a stream; None at its end, or when the daemon went away."""
        try:
            return await self._part()
        except errors.NotRunning:
            return None

    async def _ask(self, method: str, wanted: str, body: Mapping[str, Any] | None) -> h11.Response:
        data = b"" if body is None else json.dumps(body).encode("utf-8")
        headers = [("Host", "localhost"), ("Content-Length", str(len(data)))]
        head = self._http.send(h11.Request(method=method, target=wanted, headers=headers))
        sent = self._http.send(h11.Data(data=data)) if data else b""
        end = self._http.send(h11.EndOfMessage())
        try:
            await self._open().send_all(b"".join(part or b"" for part in (head, sent, end)))
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise gone(self._path) from error
        event = await self._event()
        if not isinstance(event, h11.Response):
            raise gone(self._path)
        return event

    async def _part(self) -> bytes | None:
        event = await self._event()
        if isinstance(event, h11.Data):
            return bytes(event.data)
        return None

    async def _event(self) -> Any:
        while True:
            try:
                event = self._http.next_event()
            except h11.RemoteProtocolError as error:
                raise gone(self._path) from error
            if event is not h11.NEED_DATA:
                return event
            try:
                self._http.receive_data(await self._open().receive_some(READ_BYTES))
            except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
                raise gone(self._path) from error

    def _open(self) -> trio.SocketStream:
        if self._stream is None:
            raise errors.NotRunning(f"the connection to {self._path} is not open: `async with` it")
        return self._stream


class Lines:
    """The lines of a stream; an iterator and not an async generator: those need closing."""

    def __init__(self, client: AsyncControlClient) -> None:
        """Made by `AsyncControlClient.stream`."""
        self._client = client
        self._buffer = bytearray()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> dict[str, Any]:
        while (end := self._buffer.find(b"\n")) < 0:
            if len(self._buffer) > MAX_CONTROL_ANSWER_BYTES:
                raise errors.ControlProtocolError("a line of the stream is too long")
            part = await self._client.next_part()
            if part is None:
                raise StopAsyncIteration
            self._buffer += part
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        return parse_object(line, Answered)
