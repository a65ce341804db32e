"""The client of the control plane for trio: a `ControlClient` in worker threads.

Rule: cancelling a task ends its connection, and with it the thread that waits on the connection.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, ParamSpec, Self, TypeVar

import trio

from bbnode.daemon.control.client import (
    DEFAULT_TIMEOUT_S,
    ControlClient,
    Query,
    TcpAddress,
    target,
)

P = ParamSpec("P")
T = TypeVar("T")


class AsyncControlClient:
    """An async context manager that queries a daemon; raises as `ControlClient` does."""

    def __init__(self, path: Path | TcpAddress, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """Create a client with the arguments of `ControlClient`."""
        self._client = ControlClient(path, timeout_s=timeout_s)

    async def __aenter__(self) -> Self:
        await self.in_thread(self._client.__enter__)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._client.abort()
        # Closing waits for nothing once the connection has ended.
        self._client.__exit__()

    async def get(self, path: str, query: Query | None = None) -> dict[str, Any]:
        """Send a GET request and return its JSON."""
        return await self.request("GET", target(path, query))

    async def post(self, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Send a POST request and return its JSON."""
        return await self.request("POST", target(path), {} if body is None else body)

    async def request(
        self, method: str, wanted: str, body: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Send one request and return its JSON; `wanted` is the target of the request line."""
        return await self.in_thread(self._client.request, method, wanted, body)

    async def fetch(
        self, method: str, wanted: str, body: Mapping[str, Any] | None = None
    ) -> tuple[int, bytes]:
        """Send one request; return the status and bytes of its answer, whatever they are."""
        return await self.in_thread(self._client.fetch, method, wanted, body)

    async def download(self, path: str) -> list[bytes]:
        """Return the bytes of a file, in pieces."""
        return await self.in_thread(lambda: list(self._client.download(path)))

    async def stream(self, path: str, query: Query | None = None) -> LineStream:
        """Subscribe to a stream of lines; the client takes no more requests after that."""
        return LineStream(self, await self.in_thread(self._client.stream, path, query))

    async def in_thread(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a function that blocks on the connection."""
        try:
            return await trio.to_thread.run_sync(
                partial(function, *args, **kwargs), abandon_on_cancel=True
            )
        except trio.Cancelled:
            self._client.abort()
            raise


class LineStream:
    """The lines of a stream. An iterator, since an async generator would need closing."""

    def __init__(self, client: AsyncControlClient, lines: Iterator[dict[str, Any]]) -> None:
        """Wrap the lines of a client; made by `AsyncControlClient.stream`."""
        self._client = client
        self._lines = lines

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> dict[str, Any]:
        line = await self._client.in_thread(next, self._lines, None)
        if line is None:
            raise StopAsyncIteration
        return line
