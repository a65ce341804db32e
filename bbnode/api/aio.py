"""`bbnode.aio`: nodes for programs that run on asyncio.

Rule: a node lives on the thread of `bbnode.api.thread`; what is awaited here waits for it there.
Cancelling a task cancels its wait and nothing else; a loop that is closed leaves the node usable
from another one.
"""

from __future__ import annotations

import asyncio
import os
import weakref
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from typing import Any, Generic, ParamSpec, Self, TypeVar

from bbnode.api import thread
from bbnode.api.facts import Facts
from bbnode.api.methods import AsyncMethods
from bbnode.api.outcome import InvokeResult, OutputValue
from bbnode.api.remote import TrioRemoteNode
from bbnode.api.settings import HasAddresses, OpenRequest, Program
from bbnode.daemon.control.client import DEFAULT_TIMEOUT_S, Query

P = ParamSpec("P")
T = TypeVar("T")
N = TypeVar("N", bound="AioNode | AioRemoteNode")


def open(  # noqa: A001 - as in bbnode.open
    program: Program,
    *,
    targets: str | Sequence[str] | None = None,
    args: Mapping[str, Any] | None = None,
    name: str | None = None,
    state_dir: str | os.PathLike[str] | None = None,
    peers: str | Sequence[str | HasAddresses] = (),
    listen: str | Sequence[str] | None = None,
    transport: str | None = None,
    slots: Mapping[str, Mapping[str, Any]] | None = None,
    settings: Mapping[str, Any] | None = None,
) -> Opening[AioNode]:
    """Run a node: `async with bbnode.aio.open("node.toml") as node`, or `node = await …`.

    Arguments and errors are those of `bbnode.open`. Without `async with`, call `await node.stop()`
    at the end; a node without a reference is stopped as well.
    """
    asked = OpenRequest(
        program=program,
        targets=targets,
        args=args or {},
        name=name,
        state_dir=state_dir,
        peers=peers,
        listen=listen,
        transport=transport,
        slots=slots or {},
        settings=settings or {},
    )

    async def start() -> AioNode:
        on, held = thread.get(), thread.Held(asked)
        try:
            await on.call_from_asyncio(on.open, held)
        except BaseException:
            on.release(held)
            raise
        return AioNode(on, held)

    return Opening(start)


def connect(
    node: str | os.PathLike[str],
    *,
    token: str | os.PathLike[str] | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> Opening[AioRemoteNode]:
    """Ask a running daemon: `async with bbnode.aio.connect("node.toml") as node`, or `await`.

    Arguments and errors are those of `bbnode.connect`.
    """

    async def start() -> AioRemoteNode:
        on = thread.get()
        remote = TrioRemoteNode(node, token=token, timeout_s=timeout_s)
        await on.call_from_asyncio(remote.check)
        return AioRemoteNode(on, remote)

    return Opening(start)


class Opening(Generic[N]):
    """Something that is opened by `await` or by `async with`."""

    def __init__(self, start: Callable[[], Awaitable[N]]) -> None:
        self._start = start
        self._node: N

    def __await__(self) -> Generator[Any, None, N]:
        return self._start().__await__()

    async def __aenter__(self) -> N:
        self._node = await self._start()
        return self._node

    async def __aexit__(self, *_: object) -> None:
        await self._node.__aexit__()


class AioStream(Generic[T]):
    """A stream for `async for`; it ends with the node. Close it, or leave its `async with`."""

    def __init__(self, on: thread.TrioThread, source: thread.LoopStream) -> None:
        self._on = on
        self._source = source
        # A stream that is dropped without `aclose` costs a bounded queue until it is collected.
        self._closed = weakref.finalize(self, on.start, source.aclose)
        self._closed.atexit = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        item: T | None = await self._on.call_from_asyncio(thread.next_of, self._source)
        if item is None:
            raise StopAsyncIteration
        return item

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """End the stream."""
        self._closed()


class _AioMethods(AsyncMethods):
    """The methods of a node on the loop, for asyncio."""

    def __init__(self, on: thread.TrioThread, there: AsyncMethods) -> None:
        self._on = on
        self._there = there

    async def fetch(
        self, method: str, wanted: str, body: Mapping[str, Any] | None = None
    ) -> tuple[int, bytes]:
        """Send one request of the control plane; return the status and bytes of its answer."""
        return await self._on.call_from_asyncio(self._there.fetch, method, wanted, body)

    async def stream(self, path: str, query: Query) -> AioStream[dict[str, Any]]:
        """Subscribe to the lines of an endpoint, now."""
        source = await self._on.call_from_asyncio(self._there.stream, path, query)
        return AioStream(self._on, source)

    async def download(self, path: str) -> bytes:
        """Return the bytes of a file that an endpoint sends."""
        return await self._on.call_from_asyncio(self._there.download, path)

    async def invoke(
        self,
        target: str,
        inputs: Mapping[str, Any] | None = None,
        *,
        timeout_s: float = 60.0,
        deadline_s: float | None = None,
    ) -> InvokeResult:
        """Run one execution of a target, and return it with its outputs once it has ended."""
        return await self._on.call_from_asyncio(
            self._there.invoke, target, inputs, timeout_s=timeout_s, deadline_s=deadline_s
        )

    async def emit(
        self,
        target: str,
        input: str,  # noqa: A002 - as the endpoint calls it
        value: Any,
        *,
        timeout_s: float = 60.0,
        deadline_s: float | None = None,
    ) -> InvokeResult:
        """Send a target one input, which starts an execution; otherwise as `invoke`."""
        return await self._on.call_from_asyncio(
            self._there.emit, target, input, value, timeout_s=timeout_s, deadline_s=deadline_s
        )

    async def _sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class AioNode(_AioMethods, Facts):
    """A node of this process, for asyncio."""

    def __init__(self, on: thread.TrioThread, held: thread.Held) -> None:
        """Wrap a held node; made by `open`."""
        super().__init__(on, held.node)
        self._held = held
        self._node = held.node
        self._release = weakref.finalize(self, on.release, held)
        # At the interpreter's exit the thread itself stops its nodes.
        self._release.atexit = False

    async def with_libp2p(self, function: Callable[..., Awaitable[T]], *args: Any) -> T:
        """Call an asynchronous function with `libp2p_host` as first argument; return its result.

        It runs on the node's own loop, which is trio's, as all of py-libp2p must.
        """
        return await self._on.call_from_asyncio(self._node.with_libp2p, function, *args)

    async def outputs(self) -> AioStream[OutputValue]:
        """Subscribe to all outputs from now on, whichever execution or message they come from.

        An iterator of `OutputValue`, to be closed, or used as `async with`. A reader that is
        slower than the program loses the oldest.
        """
        return AioStream(self._on, await self._on.call_from_asyncio(self._node.outputs))

    async def next_output(self, name: str, *, timeout_s: float = 60.0) -> Any:
        """Return the next output of this name that no `invoke` returns, also one that was before.

        For outputs that another node caused, or that come after an `invoke` has given up. The
        oldest comes first; a bounded number waits. Raises WaitTimeout.
        """
        return await self._on.call_from_asyncio(self._node.next_output, name, timeout_s=timeout_s)

    async def stop(self) -> None:
        """Stop the node cleanly and wait for it. Idempotent.

        Raises NodeStopped if it had died and nobody has been told yet.
        """
        await self._on.call_from_asyncio(self._held.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        if not thread.is_forked():
            await self.stop()


class AioRemoteNode(_AioMethods):
    """A running daemon, asked over its control plane, for asyncio."""

    async def stop(self) -> None:
        """Stop the daemon cleanly and wait for it."""
        await self._on.call_from_asyncio(self._there.stop)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        """Leave the daemon as it is."""
