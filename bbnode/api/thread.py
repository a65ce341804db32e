"""The thread with trio's loop that the asyncio and the blocking face share.

Rule: there is one per process, started when it is first needed. Nodes are tasks on it; other
threads only send it calls and wait. It never keeps the interpreter from its exit: once all other
threads have ended, the nodes are stopped cleanly, within a bound, and then the loop is abandoned.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final, Generic, ParamSpec, Protocol, TypeVar

import trio

from bbnode.api.errors import ForkedProcess, LoopBlocked, NodeStopped
from bbnode.api.on_trio import STOP_SLACK_S, TrioNode, opened
from bbnode.api.settings import OpenRequest

P = ParamSpec("P")
T = TypeVar("T")

# Beyond the longest time that one node may take to stop, for the stop of all at the interpreter's
# exit.
EXIT_SLACK_S: Final = 2.0
START_S: Final = 30.0
# A signal that arrives just before a thread begins to wait does not end the wait (CPython notes it,
# and then sleeps): it is handled after this time.
LOOK_S: Final = 0.5


class LoopCall(Generic[T]):
    """A function that runs on the loop, and its result for another thread."""

    def __init__(self, function: Callable[[], Awaitable[T]]) -> None:
        self.result: concurrent.futures.Future[T] = concurrent.futures.Future()
        self._function = function
        self._scope = trio.CancelScope()

    async def run(self) -> None:
        """Run the function on the loop; raises nothing here."""
        try:
            with self._scope:
                result = await self._function()
                self.result.set_result(result)
                return
        except Exception as error:  # noqa: BLE001 - the caller gets it
            self.result.set_exception(error)
            return
        finally:
            if not self.result.done():  # cancelled, by the caller or with the loop
                self.result.set_exception(NodeStopped("the call was cancelled"))

    def cancel(self) -> None:
        """Cancel the call, on the loop's thread."""
        self._scope.cancel()


class LoopStream(Protocol):
    """A stream on the loop."""

    async def __anext__(self) -> Any: ...

    async def aclose(self) -> None:
        """End it."""
        ...


async def next_of(stream: LoopStream) -> Any:
    """Return the next item of a stream on the loop; None at the end."""
    try:
        return await stream.__anext__()
    except StopAsyncIteration:
        return None


class Held:
    """A node on the loop, which lives until it is released."""

    def __init__(self, asked: OpenRequest) -> None:
        self._asked = asked
        self._released = trio.Event()
        self._done = trio.Event()
        self._error: Exception | None = None
        self.node: TrioNode

    async def run(self, *, task_status: trio.TaskStatus[None]) -> None:
        """Open the node, and keep it until it is released; raises only what opening it raises."""
        started = False
        try:
            async with opened(self._asked) as self.node:
                started = True
                task_status.started()
                await self._released.wait()
        except Exception as error:
            if not started:
                raise
            self._error = error
        finally:
            self._done.set()

    def frees(self, other: Held) -> bool:
        """Return True if this node is stopping, and `other` wants its state directory."""
        own, wanted = self._asked.state_dir, other._asked.state_dir
        return (
            self._released.is_set()
            and own is not None
            and wanted is not None
            and (Path(own).absolute() == Path(wanted).absolute())
        )

    def release(self) -> None:
        """Tell the node to stop."""
        self._released.set()

    async def stopped(self) -> None:
        """Wait until the node has stopped. Raises the error that it died of, once."""
        await self._done.wait()
        error, self._error = self._error, None
        if error is not None:
            raise error

    async def close(self) -> None:
        """Stop the node and wait for it. Raises as `stopped`."""
        self.release()
        await self.stopped()


class TrioThread:
    """trio's loop, in a thread."""

    def __init__(self) -> None:
        """Start the thread; raises NodeStopped if it does not start."""
        self._up = threading.Event()
        self._token: trio.lowlevel.TrioToken
        self._nursery: trio.Nursery
        self._held: set[Held] = set()
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="bbnode", daemon=True)
        self._thread.start()
        if not self._up.wait(START_S):
            raise NodeStopped(f"the thread for nodes did not start within {START_S:g} s")
        # Not a daemon, so that the interpreter waits for it, and with it for the nodes' stop.
        threading.Thread(target=self._at_exit, name="bbnode-exit", daemon=False).start()

    def _run(self) -> None:
        try:
            trio.run(self._main)
        finally:
            self._ended = True

    async def _main(self) -> None:
        async with trio.open_nursery() as self._nursery:
            self._token = trio.lowlevel.current_trio_token()
            self._up.set()
            await trio.sleep_forever()

    # -- from other threads ---------------------------------------------------------------------

    def submit(
        self, function: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs
    ) -> LoopCall[T]:
        """Start a function on the loop. Raises NodeStopped."""
        call = LoopCall(lambda: function(*args, **kwargs))
        self._soon(self._nursery.start_soon, call.run)
        return call

    def call(self, function: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a function on the loop, and wait; an interrupt of the wait cancels it.

        Raises LoopBlocked on the loop's own thread.
        """
        if threading.get_ident() == self._thread.ident:
            raise LoopBlocked(
                "a blocking call on the thread that runs the nodes would wait for itself: make it "
                "on another thread (a component's method that is marked @offload has one)"
            )
        call = self.submit(function, *args, **kwargs)
        try:
            while not concurrent.futures.wait([call.result], LOOK_S).done:
                pass
            return call.result.result()
        finally:
            if not call.result.done():  # KeyboardInterrupt, or whatever a signal handler raised
                self.cancel(call)

    async def call_from_asyncio(
        self, function: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Run a function on the loop; cancelling the task that waits cancels it."""
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[T] = loop.create_future()

        def settle(done: concurrent.futures.Future[T]) -> None:
            if waiter.done():
                return
            error = done.exception()
            if error is None:
                waiter.set_result(done.result())
            else:
                waiter.set_exception(error)

        def ended(done: concurrent.futures.Future[T]) -> None:
            # The loop may be closed, and with it the task that waited.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(settle, done)

        call = self.submit(function, *args, **kwargs)
        call.result.add_done_callback(ended)
        try:
            return await waiter
        finally:
            if not call.result.done():
                self.cancel(call)

    def cancel(self, call: LoopCall[Any]) -> None:
        """Cancel a call, and return at once."""
        with contextlib.suppress(NodeStopped):
            self._soon(call.cancel)

    def release(self, held: Held) -> None:
        """Stop a node, and return at once; in any thread."""
        with contextlib.suppress(NodeStopped, ForkedProcess):
            self._soon(held.release)

    def start(self, function: Callable[[], Awaitable[object]]) -> None:
        """Start a function on the loop, and return at once; for garbage collection, in any thread.

        Does nothing if the loop has ended.
        """
        with contextlib.suppress(NodeStopped, ForkedProcess):
            self.submit(function)

    def _soon(self, function: Callable[..., object], *args: Any) -> None:
        if _forked:
            raise _fork_error()
        try:
            self._token.run_sync_soon(function, *args)
        except trio.RunFinishedError:
            raise NodeStopped("the thread for nodes has ended") from None

    # -- on the loop ----------------------------------------------------------------------------

    async def open(self, held: Held) -> None:
        """Open a node, once one that is about to free the same state directory has stopped.

        A caller that is interrupted or cancelled meanwhile has to release it.
        """
        for other in [each for each in self._held if each.frees(held)]:
            await other.stopped()
        await self._nursery.start(self._hold, held)

    async def _hold(self, held: Held, *, task_status: trio.TaskStatus[None]) -> None:
        self._held.add(held)
        try:
            await held.run(task_status=task_status)
        finally:
            self._held.discard(held)

    # -- at the interpreter's exit --------------------------------------------------------------

    def _at_exit(self) -> None:
        own = threading.current_thread()
        # The main thread as well: it has ended once only other threads are left to wait for.
        while others := [t for t in threading.enumerate() if _is_work(t) and t is not own]:
            others[0].join()
        stopped = threading.Event()
        with contextlib.suppress(NodeStopped, ForkedProcess):
            self._soon(self._stop_all, stopped)
            # An interpreter without nodes ends at once.
            stopped.wait(max(self._grace_s(), default=0.0) + EXIT_SLACK_S)

    def _grace_s(self) -> list[float]:
        return [held.node.grace_s + STOP_SLACK_S for held in list(self._held)]

    def _stop_all(self, stopped: threading.Event) -> None:
        async def stop() -> None:
            for held in list(self._held):
                held.release()
            for held in list(self._held):
                with contextlib.suppress(Exception):
                    await held.stopped()
            stopped.set()

        self._nursery.start_soon(stop)


def _is_work(thread: threading.Thread) -> bool:
    """Return True for a thread that the interpreter waits for before its exit."""
    return thread.is_alive() and not thread.daemon


_lock = threading.Lock()
_thread: TrioThread | None = None
_forked = False


def get() -> TrioThread:
    """Return the thread of this process, started if there is none. Raises ForkedProcess."""
    global _thread
    if _forked:
        raise _fork_error()
    with _lock:
        if _thread is None:
            _thread = TrioThread()
        return _thread


def is_forked() -> bool:
    """Return True in a fork of a process that ran nodes, which belong to the parent."""
    return _forked


def _fork_error() -> ForkedProcess:
    return ForkedProcess(
        "this process is a fork of one that ran bbnode nodes, which threads can't follow: start "
        'it with the method "spawn" (multiprocessing.get_context("spawn")), and open nodes there'
    )


def _note_fork() -> None:
    global _forked, _lock
    _forked = _thread is not None
    # Another thread of the parent may have held the lock at the fork.
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_note_fork)
