"""`bbnode.on_trio`: nodes for programs that run on trio, and the core of the other two faces.

Rule: a node lives in the `async with` that opened it. A caller that waits on a node that dies gets
`NodeStopped`, with the error that ended it as its cause; if nobody waited, the end of the block
raises it.
"""

from __future__ import annotations

import os
import threading
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, ParamSpec, Self, TypeVar
from urllib.parse import unquote

import trio

from bbnode.api.errors import NodeNotReady, NodeStopped, WaitTimeout
from bbnode.api.inputs import deadline, named, seconds, to_value, to_values
from bbnode.api.methods import AsyncMethods
from bbnode.api.outcome import InvokeResult, OutputValue, checked_outcome, shown_value
from bbnode.api.remote import TrioRemoteNode
from bbnode.api.settings import HasAddresses, OpenPlan, OpenRequest, Program, prepared
from bbnode.daemon import paths
from bbnode.daemon.control.client import DEFAULT_TIMEOUT_S, Query, parse_answer, target
from bbnode.daemon.control.errors import ControlError, Problem
from bbnode.daemon.control.feed import Subscription
from bbnode.daemon.control.host import Host
from bbnode.daemon.control.http import Lines, application, checked
from bbnode.daemon.control.inputs import nanoseconds
from bbnode.daemon.control.json_lines import encode, parse_object
from bbnode.daemon.control.routes import ENDPOINTS
from bbnode.daemon.control.server import ControlLimits
from bbnode.daemon.lifecycle import assembly
from bbnode.daemon.lifecycle.app import Daemon
from bbnode.engine import steps
from bbnode.engine.readiness import reasons_text
from bbnode.ir.errors import BbnodeError
from bbnode.ir.texts import failure_text
from bbnode.ir.values import size_of

if TYPE_CHECKING:
    from bbnode.daemon.control.asgi import ASGIApp, Message, Scope

P = ParamSpec("P")
T = TypeVar("T")

# Bounds of the outputs that wait for `next_output` or for a slow reader of `outputs`; beyond them
# the oldest are dropped.
MAX_WAITING_OUTPUTS: Final = 256
MAX_WAITING_BYTES: Final = 64 * 1024 * 1024
# Beyond the time that a stop may take by itself, for a busy machine.
STOP_SLACK_S: Final = 5.0

# Compiling and installing keep state in their modules, so nodes are created one at a time.
_making = threading.Lock()


@asynccontextmanager
async def open(  # noqa: A001 - as in bbnode.open
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
) -> AsyncIterator[TrioNode]:
    """Run a node while the block does: `async with bbnode.on_trio.open("node.toml") as node`.

    Arguments and errors are those of `bbnode.open`.
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
    async with opened(asked) as node:
        yield node


@asynccontextmanager
async def connect(
    node: str | os.PathLike[str],
    *,
    token: str | os.PathLike[str] | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> AsyncIterator[TrioRemoteNode]:
    """Ask a running daemon: `async with bbnode.on_trio.connect("node.toml") as node`.

    Arguments and errors are those of `bbnode.connect`.
    """
    remote = TrioRemoteNode(node, token=token, timeout_s=timeout_s)
    await remote.check()
    yield remote


@asynccontextmanager
async def opened(asked: OpenRequest) -> AsyncIterator[TrioNode]:
    """Run the node of a request for the length of the block."""
    failed: Exception | None = None
    # In a thread: compiling and loading take seconds, during which other nodes of this loop
    # continue.
    context = prepared(asked)
    ready = await trio.to_thread.run_sync(_in_turn, context.__enter__)
    try:
        daemon = await trio.to_thread.run_sync(_in_turn, _made, ready)
        node = TrioNode(daemon, ready)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(node._serve)
            try:
                await node._until_ready()
                yield node
            except Exception as error:  # noqa: BLE001 - raised below, outside of the nursery
                failed = error
            finally:
                with trio.CancelScope(shield=True):
                    await node.stop()
    finally:
        with trio.CancelScope(shield=True):
            await trio.to_thread.run_sync(context.__exit__, None, None, None)
    if failed is not None:
        raise failed
    node._raise_untold()


def _in_turn(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    with _making:
        return function(*args, **kwargs)


def _made(ready: OpenPlan) -> Daemon:
    assembly.import_components(ready.resolved)
    return Daemon(ready.resolved, artifact=ready.artifact)


class TrioNode(AsyncMethods):
    """A node of this process, on trio. All methods are for the loop that opened it."""

    def __init__(self, daemon: Daemon, ready: OpenPlan) -> None:
        """Wrap a daemon that does not run yet; made by `open`."""
        self._daemon = daemon
        self._host = daemon.host
        self._resolved = ready.resolved
        self._app: ASGIApp = application(
            ENDPOINTS, self._host, request_s=ControlLimits().request_s, counts=Counter()
        )
        # Shielded: cancelling the block that the node lives in still stops it cleanly.
        self._run_scope = trio.CancelScope(shield=True)
        self._waiting: set[trio.CancelScope] = set()
        self._ready = trio.Event()
        self._ended = trio.Event()
        self._error: Exception | None = None
        self._told = False
        self._outputs = OutputQueue()
        self._readers: set[TrioOutputs] = set()
        daemon.observers.append(self._observe)

    # -- the node itself -----------------------------------------------------------------------

    @property
    def name(self) -> str:
        """Its name in logs and status."""
        return self._resolved.config.node.name

    @property
    def peer_id(self) -> str:
        """Its PeerId."""
        return str(self._host.node.peer_id)

    @property
    def targets(self) -> tuple[str, ...]:
        """The installed targets, each as `class#hash`."""
        return self._host.node.targets

    @property
    def addresses(self) -> tuple[str, ...]:
        """The multiaddrs at which other nodes reach it, for their `peers`."""
        suffix = f"/p2p/{self.peer_id}"
        listening = (str(address) for address in self._host.backend.listen_addresses())
        return tuple(text if text.endswith(suffix) else f"{text}{suffix}" for text in listening)

    @property
    def state_dir(self) -> Path:
        """Its state directory; commands find the node there, as in `bbnode status`."""
        return self._resolved.state_dir

    @property
    def socket(self) -> Path:
        """The path of its control socket, for `bbnode.connect`."""
        return paths.control_socket(self.state_dir)

    @property
    def libp2p_host(self) -> Any:
        """Its host of py-libp2p, a `BasicHost`, for the loop that it runs on.

        Raises NotSupportedError where `network.transport` is not "libp2p".
        """
        return self._host.backend.libp2p_host

    @property
    def grace_s(self) -> float:
        """Seconds that its stop may take (`node.stop_grace_s`)."""
        return self._host.resolved.config.node.stop_grace_s

    @property
    def running(self) -> bool:
        """True until it has stopped or died."""
        return not self._ended.is_set()

    # -- what it is asked ----------------------------------------------------------------------

    async def with_libp2p(self, function: Callable[..., Awaitable[T]], *args: Any) -> T:
        """Call an asynchronous function with `libp2p_host` first; return its result."""
        return await self._alive(function, self.libp2p_host, *args)

    async def fetch(
        self, method: str, wanted: str, body: Mapping[str, Any] | None = None
    ) -> tuple[int, bytes]:
        """Send one request of the control plane; return the status and bytes of its answer."""
        return await self._alive(_answer, self._app, method, wanted, body)

    async def stream(self, path: str, query: Query) -> TrioLines:
        """Subscribe to the lines of an endpoint, now."""
        return await self._alive(self._subscribe, path, query)

    async def download(self, path: str) -> bytes:
        """Return the bytes of a file that an endpoint sends."""
        status, data = await self.fetch("GET", target(path))
        if status >= 400:
            parse_answer(status, data)
        return data

    async def invoke(
        self,
        target: str,
        inputs: Mapping[str, Any] | None = None,
        *,
        timeout_s: float = 60.0,
        deadline_s: float | None = None,
    ) -> InvokeResult:
        """Run one execution of a target, and return it with its outputs once it has ended."""
        self._check_running()
        wait_s, node = seconds(timeout_s), self._host.node
        values = to_values(named(inputs), node.inputs(target))
        later = self._host.later(target, None)
        execution = node.invoke(target, values, deadline_ns=nanoseconds(deadline(deadline_s)))
        return await self._alive(self._finish, execution, later, target, wait_s)

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
        self._check_running()
        wait_s, node = seconds(timeout_s), self._host.node
        sent = to_value(input, value, node.inputs(target).get(input))
        later = self._host.later(target, input)
        execution = node.deliver_event(
            target, input, sent, deadline_ns=nanoseconds(deadline(deadline_s))
        )
        return await self._alive(self._finish, execution, later, target, wait_s)

    async def outputs(self) -> TrioOutputs:
        """Subscribe to all outputs from now on, whichever execution or message they come from.

        An iterator of `OutputValue`, to be closed, or used as `async with`. A reader that is
        slower than the program loses the oldest; `lost` counts them.
        """
        await trio.lowlevel.checkpoint()
        self._check_running()
        return TrioOutputs(self, self._readers)

    async def next_output(self, name: str, *, timeout_s: float = 60.0) -> Any:
        """Return the next output of this name that no `invoke` returns, also one that was before.

        For outputs that another node caused, or that come after an `invoke` has given up. The
        oldest comes first; a bounded number waits. Raises WaitTimeout.
        """
        output = await self._alive(self._outputs.next, name, timeout_s)
        if output is None:
            raise WaitTimeout(f"{self.name} gave no output {name!r} within {timeout_s:g} s")
        return output.value

    async def stop(self) -> None:
        """Stop the node cleanly and wait for it. Idempotent."""
        self._daemon.stop()
        with trio.move_on_after(self.grace_s + STOP_SLACK_S):
            await self._ended.wait()
            return
        # The daemon waits for nothing without a deadline, but a component's code may.
        self._run_scope.cancel()
        await self._ended.wait()

    async def _sleep(self, seconds: float) -> None:
        await self._alive(trio.sleep, seconds)

    # -- its life ------------------------------------------------------------------------------

    async def _serve(self) -> None:
        """Run the daemon to its end, and keep the error that ended it."""
        try:
            with self._run_scope:
                await self._daemon.run(task_status=_Started(self._ready))
        except Exception as error:  # noqa: BLE001 - whoever waits gets it
            self._error = _first_of(error)
        finally:
            self._ended.set()
            self._ready.set()
            self._host.events.close()
            self._host.logs.close()
            for scope in self._waiting:
                scope.cancel()
            for reader in list(self._readers):
                reader.end()

    async def _until_ready(self) -> None:
        await self._ready.wait()
        if self._error is not None:
            self._told = True
            raise self._error
        # `bbnode run` would try again, since a file may still arrive; here a caller waits.
        if not_ready := self._host.node.not_ready():
            raise NodeNotReady(f"the node {self.name!r} is not ready: {reasons_text(not_ready)}")

    def _raise_untold(self) -> None:
        """Raise the error that ended the node, unless a caller has already got it."""
        if self._error is not None and not self._told:
            raise self._stopped()

    def _check_running(self) -> None:
        if self._ended.is_set():
            raise self._stopped()

    def _stopped(self) -> NodeStopped:
        if self._error is None:
            return NodeStopped(f"the node {self.name!r} has stopped; open it again")
        self._told = True
        kind = "" if isinstance(self._error, BbnodeError) else f"{type(self._error).__name__}: "
        stopped = NodeStopped(f"the node {self.name!r} has died: {kind}{self._error}")
        stopped.__cause__ = self._error
        return stopped

    async def _alive(
        self, function: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Await a function of the running node; raises NodeStopped if the node ends meanwhile."""
        self._check_running()
        with trio.CancelScope() as scope:
            self._waiting.add(scope)
            try:
                return await function(*args, **kwargs)
            finally:
                self._waiting.discard(scope)
        raise self._stopped()

    async def _finish(
        self, execution: int, later: frozenset[str], target: str, timeout_s: float
    ) -> InvokeResult:
        with self._host.outcomes.collect(execution, later) as outcome:
            self._host.driver.wake()
            await outcome.wait(timeout_s)
        result = InvokeResult(
            execution=execution,
            ok=outcome.ok,
            outputs={name: shown_value(value) for name, value in outcome.outputs.items()},
            more={
                name: tuple((peer, shown_value(value)) for peer, value in values)
                for name, values in outcome.more.items()
            },
            skipped=dict(outcome.skipped),
            failures=tuple(failure_text(failure) for failure in outcome.failures),
            refused=dict(outcome.refused),
            missing=tuple(outcome.missing),
            left_out=outcome.left_out,
        )
        return checked_outcome(result, target, timeout_s)

    async def _subscribe(self, path: str, query: Query) -> TrioLines:
        return TrioLines(self, await _subscription(self._host, path, query))

    def _observe(self, step: steps.Step) -> None:
        if isinstance(step, steps.AppEvent):
            output = OutputValue(
                name=step.topic,
                value=shown_value(step.value),
                target=step.target,
                execution=step.execution,
            )
            size = size_of(step.value)
            if not self._host.outcomes.waits_for(step):
                self._outputs.push(output, size)
            for reader in self._readers:
                reader.push(output, size)


class _Started:
    """A trio task status that sets an event when the task has started."""

    def __init__(self, event: trio.Event) -> None:
        self._event = event

    def started(self, _value: None = None) -> None:
        self._event.set()


class OutputQueue:
    """A bounded queue of unread outputs that drops the oldest."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[OutputValue, int]] = deque()
        self._bytes = 0
        self._more = trio.Event()
        self.lost = 0

    def push(self, output: OutputValue, size: int) -> None:
        """Add an output of `size` bytes."""
        self._waiting.append((output, size))
        self._bytes += size
        while len(self._waiting) > MAX_WAITING_OUTPUTS or (
            self._bytes > MAX_WAITING_BYTES and len(self._waiting) > 1
        ):
            self._bytes -= self._waiting.popleft()[1]
            self.lost += 1
        self.changed()

    def changed(self) -> None:
        """Wake the tasks that wait for a change."""
        self._more.set()
        self._more = trio.Event()

    def take(self, name: str | None = None) -> OutputValue | None:
        """Remove and return the oldest output, of a name if given; None if there is none."""
        for index, (output, size) in enumerate(self._waiting):
            if name is None or output.name == name:
                del self._waiting[index]
                self._bytes -= size
                return output
        return None

    async def next(self, name: str, timeout_s: float) -> OutputValue | None:
        """Return the next output of a name; None when there is none in time."""
        with trio.move_on_after(seconds(timeout_s)):
            while (output := self.take(name)) is None:
                await self._more.wait()
            return output
        return self.take(name)

    async def more(self) -> None:
        """Wait until something changes."""
        await self._more.wait()


class TrioOutputs:
    """A stream of `OutputValue`; it ends with the node, and raises NodeStopped if that died."""

    def __init__(self, node: TrioNode, readers: set[TrioOutputs]) -> None:
        """Register a reader of outputs; made by `TrioNode.outputs`."""
        self._node = node
        self._readers = readers
        self._queue = OutputQueue()
        self._over = False
        readers.add(self)

    @property
    def lost(self) -> int:
        """Outputs that were dropped because the reader was slow."""
        return self._queue.lost

    def push(self, output: OutputValue, size: int) -> None:
        """Add an output."""
        self._queue.push(output, size)

    def end(self) -> None:
        """End the stream once the queued outputs are read."""
        self._over = True
        self._queue.changed()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> OutputValue:
        while (output := self._queue.take()) is None:
            if self._over:
                self._node._raise_untold()
                raise StopAsyncIteration
            await self._queue.more()
        return output

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """End the stream."""
        self._readers.discard(self)
        self.end()


class TrioLines:
    """The lines of a subscription. They end with the node; NodeStopped if it died."""

    def __init__(self, node: TrioNode, subscription: Subscription) -> None:
        """Wrap a subscription; made by `TrioNode.stream`."""
        self._node = node
        self._subscription = subscription

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> dict[str, Any]:
        line = await self._subscription.next()
        if line is None:
            self._node._raise_untold()
            raise StopAsyncIteration
        return parse_object(line)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """End the stream."""
        self._subscription.close()
        self._subscription.end()


def _first_of(error: Exception) -> Exception:
    """Return the error of a group: the only one, the first if all are bbnode's, else the group."""
    errors = list(_leaves(error))
    alike = all(isinstance(each, BbnodeError) for each in errors)
    return errors[0] if len(errors) == 1 or alike else error


def _leaves(error: Exception) -> Iterator[Exception]:
    if isinstance(error, ExceptionGroup):
        for inner in error.exceptions:
            yield from _leaves(inner)
    else:
        yield error


async def _answer(
    app: ASGIApp, method: str, wanted: str, body: Mapping[str, Any] | None
) -> tuple[int, bytes]:
    """Answer one request as the control plane does, without a connection."""
    path, _, query = wanted.partition("?")
    status, data = 500, bytearray()
    scope: Scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": unquote(path),
        "raw_path": path.encode("ascii"),
        "query_string": query.encode("ascii"),
        "root_path": "",
        "headers": [],
        "client": None,
        "server": None,
    }

    async def receive() -> Message:
        await trio.lowlevel.checkpoint()
        return {"type": "http.request", "body": b"" if body is None else encode(body)}

    async def send(message: Message) -> None:
        nonlocal status
        await trio.lowlevel.checkpoint()
        status = message.get("status", status)
        data.extend(message.get("body", b""))

    await app(scope, receive, send)
    return status, bytes(data)


async def _subscription(host: Host, path: str, query: Query) -> Subscription:
    """Subscribe to the lines of an endpoint. Raises ControlError."""
    endpoint = next(each for each in ENDPOINTS if each.path == path)
    try:
        lines: Lines = await endpoint.act(  # type: ignore[assignment]
            host=host, query=checked(endpoint.parameters["query"], query)
        )
    except Problem as error:
        raise ControlError(error.code, str(error), error.status) from error
    return lines.subscription
