"""The blocking face of the API: `bbnode.open` and `bbnode.connect`, for scripts and notebooks.

Rule: a node lives on the thread of `bbnode.api.thread`; a call waits for it there, in any thread,
also in one where asyncio or trio runs. An interrupt ends the wait and leaves the node as it was.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Generic, Self, TypeVar

from bbnode.api import thread
from bbnode.api.blocking_methods import BlockingMethods
from bbnode.api.blocking_remote import RemoteNode
from bbnode.api.facts import Facts
from bbnode.api.outcome import InvokeResult, OutputValue
from bbnode.api.settings import HasAddresses, OpenRequest, Program
from bbnode.daemon.control.client import DEFAULT_TIMEOUT_S, Query

T = TypeVar("T")


def open(  # noqa: A001 - opens a node as Python opens a file
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
) -> BlockingNode:
    """Run a node in this process, and return it once it is ready.

    Use it as a context manager, or call `stop()`; a node without a reference is stopped as well,
    and so are all nodes at the exit of the interpreter. It is the node of `bbnode run`, and
    commands such as `bbnode status` find it by its state directory; but signals, logging and limits
    of this process stay unchanged.

    Args:
        program: a `node.toml` or its folder; or what the node runs: a compiled `.onnx` file, a
            Module class as "package.module:Class", a Module or its class, or a compiled ModelProto.
            Arguments below go on top of a `node.toml`.
        targets: the parts of the program to install, each as class or class#hash; optional where
            there is one.
        args: keyword arguments of the Module class.
        name: the node's name in logs and status.
        state_dir: of identity, lock, control socket and checkpoints; without one, a temporary
            folder that goes with the node, and with it the node's identity and state.
        peers: to stay connected with: multiaddrs ending in /p2p/ID, or other open nodes.
        listen: multiaddrs to listen on; by default a free port of the loopback interface.
        transport: "libp2p", "lean" (without py-libp2p), "memory" (nodes of this process that were
            opened by `bbnode.open` or `bbnode.aio.open`), or the name of one that an installed
            package brings.
        slots: settings of components by slot.
        settings: any key of `node.toml` by its dotted name, as {"limits.preset": "edge"}.

    Raises:
        ConfigError: an argument, a key or a value of the configuration is wrong.
        StateDirInUse: another node runs on the state directory.
        ArtifactUnreadable, ArtifactRejected, InstallError and AuthorError: of the program.
        NodeNotReady: the data of a slot are missing or do not fit the program.
        EnvironmentFault: this machine denied something, such as a port.
        ForkedProcess: this process is a fork of one that ran nodes.
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
    on, held = thread.get(), thread.Held(asked)
    try:
        on.call(on.open, held)
        return BlockingNode(on, held)
    except BaseException:
        on.release(held)
        raise


def connect(
    node: str | os.PathLike[str],
    *,
    token: str | os.PathLike[str] | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> RemoteNode:
    """Return a client of a running daemon, once the daemon has answered a request.

    Args:
        node: its `node.toml`, the folder of that, its state directory, its control socket, or the
            URL of `control.tcp`, as "http://127.0.0.1:9000".
        token: for a URL: the content of `control.token`, or its path as a `Path`.
        timeout_s: bound of each answer.

    Raises:
        ConfigError: `node` names no daemon, or the token is none.
        NotRunning: nobody listens there.
        ControlError: the token is refused; `kind` is "Unauthorized".
    """
    remote = RemoteNode(node, token=token, timeout_s=timeout_s)
    remote.check()
    return remote


class BlockingStream(Generic[T]):
    """A stream for `for`; it ends with the node. Close it, or leave its `with`."""

    def __init__(self, on: thread.TrioThread, source: thread.LoopStream) -> None:
        """Wrap a stream of the loop; made by a method of a node."""
        self._on = on
        self._source = source
        # A stream that is dropped without `close` costs a bounded queue until it is collected.
        self._closed = weakref.finalize(self, on.start, source.aclose)
        self._closed.atexit = False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> T:
        item: T | None = self._on.call(thread.next_of, self._source)
        if item is None:
            raise StopIteration
        return item

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the stream, also for a thread that waits for its next item."""
        self._closed()


class BlockingNode(BlockingMethods, Facts):
    """A node of this process; all threads may use it."""

    def __init__(self, on: thread.TrioThread, held: thread.Held) -> None:
        """Wrap a held node; made by `bbnode.open`."""
        self._on = on
        self._held = held
        self._node = held.node
        self._release = weakref.finalize(self, on.release, held)
        # At the interpreter's exit the thread itself stops its nodes.
        self._release.atexit = False

    def with_libp2p(self, function: Callable[..., Awaitable[T]], *args: Any) -> T:
        """Call an asynchronous function with `libp2p_host` as first argument; return its result.

        It runs on the node's own loop, which is trio's, as all of py-libp2p must.
        """
        return self._on.call(self._node.with_libp2p, function, *args)

    def fetch(
        self, method: str, wanted: str, body: Mapping[str, Any] | None = None
    ) -> tuple[int, bytes]:
        """Send one request of the control plane; return the status and bytes of its answer."""
        return self._on.call(self._node.fetch, method, wanted, body)

    def stream(self, path: str, query: Query) -> BlockingStream[dict[str, Any]]:
        """Subscribe to the lines of an endpoint, now."""
        return BlockingStream(self._on, self._on.call(self._node.stream, path, query))

    def download(self, path: str) -> bytes:
        """Return the bytes of a file that an endpoint sends."""
        return self._on.call(self._node.download, path)

    def invoke(
        self,
        target: str,
        inputs: Mapping[str, Any] | None = None,
        *,
        timeout_s: float = 60.0,
        deadline_s: float | None = None,
    ) -> InvokeResult:
        """Run one execution of a target, and return it with its outputs once it has ended."""
        return self._on.call(
            self._node.invoke, target, inputs, timeout_s=timeout_s, deadline_s=deadline_s
        )

    def emit(
        self,
        target: str,
        input: str,  # noqa: A002 - as the endpoint calls it
        value: Any,
        *,
        timeout_s: float = 60.0,
        deadline_s: float | None = None,
    ) -> InvokeResult:
        """Send a target one input, which starts an execution; otherwise as `invoke`."""
        return self._on.call(
            self._node.emit, target, input, value, timeout_s=timeout_s, deadline_s=deadline_s
        )

    def outputs(self) -> BlockingStream[OutputValue]:
        """Subscribe to all outputs from now on, whichever execution or message they come from.

        An iterator of `OutputValue`, to be closed, or used as `with`. A reader that is slower than
        the program loses the oldest.
        """
        return BlockingStream(self._on, self._on.call(self._node.outputs))

    def next_output(self, name: str, *, timeout_s: float = 60.0) -> Any:
        """Return the next output of this name that no `invoke` returns, also one that was before.

        For outputs that another node caused, or that come after an `invoke` has given up. The
        oldest comes first; a bounded number waits. Raises WaitTimeout.
        """
        return self._on.call(self._node.next_output, name, timeout_s=timeout_s)

    def stop(self) -> None:
        """Stop the node cleanly and wait for it. Idempotent.

        Raises NodeStopped if it had died and nobody has been told yet.
        """
        self._on.call(self._held.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if not thread.is_forked():  # in a fork the node is the parent's
            self.stop()

    def _sleep(self, seconds: float) -> None:
        self._on.call(self._node._sleep, seconds)
