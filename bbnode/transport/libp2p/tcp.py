"""TCP for py-libp2p with exclusive listeners, bounded dials and detection of dead links.

Rule: libp2p's own TCP transport binds with SO_REUSEPORT, so that two nodes may silently share a
port, and a dial has no time-out. A subclass fixes both, and every socket of either direction gets
the options below before its first byte.
"""

from __future__ import annotations

import errno
import ipaddress
import logging
import os
import socket
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final, TypeAlias, cast

import trio
from libp2p.abc import IRawConnection
from libp2p.custom_types import THandler
from libp2p.io.exceptions import ConnectionClosedError
from libp2p.io.trio import TrioTCPStream
from libp2p.transport.exceptions import OpenConnectionError
from libp2p.transport.tcp.tcp import TCP, TCPListener
from multiaddr import Multiaddr
from multiaddr.exceptions import Error as MultiaddrError

from bbnode.ir.caps import MAX_UNSECURED_BYTES
from bbnode.transport.errors import ListenError
from bbnode.transport.libp2p.wire import ByteWire, SocketWire
from bbnode.transport.links.admission import Place

log = logging.getLogger(__name__)

# A SYN is repeated after 1 s and 3 s; a host that has not answered by now is not there.
CONNECT_TIMEOUT_S: Final = 5.0

# Idle links: a probe after 10 s and every 5 s, dead after three without answer. Links with
# data under way: dead when nothing was acknowledged for 20 s. (libp2p notices neither, S6.)
_KEEPALIVE_IDLE_S: Final = 10
_KEEPALIVE_INTERVAL_S: Final = 5
_KEEPALIVE_PROBES: Final = 3
_USER_TIMEOUT_MS: Final = 20_000
# Unsent bytes that the kernel buffers: a small envelope waits behind no more than this of a large
# one.
_NOTSENT_LOWAT_BYTES: Final = 128 * 1024

_BACKLOG: Final = 128
# The most that is read at once until the muxer takes over: messages have some hundred bytes.
_READ_AHEAD_BYTES: Final = 4 * 1024
_NOTHING: Final = memoryview(b"")

_OPTIONS: Final[tuple[tuple[int, str, int], ...]] = (
    (socket.SOL_SOCKET, "SO_KEEPALIVE", 1),
    (socket.IPPROTO_TCP, "TCP_KEEPIDLE", _KEEPALIVE_IDLE_S),
    (socket.IPPROTO_TCP, "TCP_KEEPINTVL", _KEEPALIVE_INTERVAL_S),
    (socket.IPPROTO_TCP, "TCP_KEEPCNT", _KEEPALIVE_PROBES),
    (socket.IPPROTO_TCP, "TCP_USER_TIMEOUT", _USER_TIMEOUT_MS),
    (socket.IPPROTO_TCP, "TCP_NOTSENT_LOWAT", _NOTSENT_LOWAT_BYTES),
    (socket.IPPROTO_TCP, "TCP_NODELAY", 1),
)


def set_link_options(stream: trio.SocketStream) -> None:
    """Set the options that detect a dead link, as far as the platform has them."""
    for level, name, value in _OPTIONS:
        option = getattr(socket, name, None)
        if option is None:
            continue
        try:
            stream.setsockopt(level, option, value)
        except OSError as error:
            # The other side may be gone already; the first read will tell.
            if error.errno not in (errno.EINVAL, errno.ENOTCONN, errno.EBADF):
                raise


def listen_endpoint(address: Multiaddr) -> tuple[str, int]:
    """Return the IP address and port of a listen address; raises ListenError for other kinds."""
    names = [protocol.name for protocol in address.protocols()]
    if names not in (["ip4", "tcp"], ["ip6", "tcp"]):
        raise ListenError(
            f"cannot listen on {address}: expected /ip4/<address>/tcp/<port> or /ip6/…"
        )
    try:
        host = address.value_for_protocol(names[0])
        port = address.value_for_protocol("tcp")
    except MultiaddrError as error:
        raise ListenError(f"cannot listen on {address}: {error}") from error
    return str(host), int(str(port))


def remote_endpoint(stream: trio.SocketStream) -> tuple[str, int] | None:
    """Return IP address and port of the other side, None if it is gone.

    libp2p's own version drops IPv6.
    """
    try:
        host, port = stream.socket.getpeername()[:2]
    except OSError:
        return None
    # A scope id (fe80::1%eth0) has no place in a multiaddr.
    return str(ipaddress.ip_address(str(host).split("%")[0])), int(port)


class ReadAheadStream(TrioTCPStream):
    """A connection up to the end of its negotiations, after which `detach` hands it to the muxer.

    A read of the system has a fixed bound, whatever length a peer announced (S19), and all of them
    together have one until the connection is secured.
    """

    def __init__(self, stream: trio.SocketStream) -> None:
        super().__init__(stream)
        self._ahead = _NOTHING
        # Bytes that may still be read before the connection is secured.
        self._left: int | None = MAX_UNSECURED_BYTES
        # The place that it got when it was accepted, and a callback for its first bytes.
        self.place: Place | None = None
        self.on_heard: Callable[[], None] | None = None

    def has_come(self) -> bool:
        """Return True if the kernel has unread bytes of this connection."""
        try:
            # From the system's socket: trio's would wait.
            with socket.socket(fileno=os.dup(self.stream.socket.fileno())) as peeked:
                return bool(peeked.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
        except OSError:
            return False

    def secured(self) -> None:
        """Lift the bound that holds until the handshake is done."""
        self._left = None

    def detach(self) -> tuple[ByteWire, bytes]:
        """Return the wire for all further bytes, and those that were read already."""
        ahead, self._ahead = bytes(self._ahead), _NOTHING
        return SocketWire(self.stream), ahead

    async def read(self, n: int | None = None) -> bytes:
        """Return up to `n` bytes, in order; b"" at the end. Raises what libp2p's own does."""
        if n == 0:
            return b""
        if not self._ahead:
            self._ahead = memoryview(await super().read(_READ_AHEAD_BYTES))
            if self.on_heard is not None:
                self.on_heard()
                self.on_heard = None
        if self._left is not None:
            n = self._left if n is None else min(n, self._left)
            if n == 0:
                raise ConnectionClosedError("too much was sent before the handshake was done")
            self._left -= min(n, len(self._ahead))
        given = self._ahead[:n]
        # Nothing left: release the block.
        self._ahead = self._ahead[len(given) :] if len(given) < len(self._ahead) else _NOTHING
        return bytes(given)


# Enters with True if an accepted connection may go on; its place is held while the context is open.
Admit: TypeAlias = Callable[[ReadAheadStream], AbstractContextManager[bool]]


class ExclusiveListener(TCPListener):
    """A listener that has its port to itself and records why it failed."""

    def __init__(self, handler: THandler, failures: dict[str, OSError], admit: Admit) -> None:
        super().__init__(handler)
        self._failures = failures
        self._admit = admit
        self._accepting: list[trio.CancelScope] = []

    async def listen(self, maddr: Multiaddr) -> None:
        """Bind and serve; raises OpenConnectionError, which the swarm swallows."""
        host, port = listen_endpoint(maddr)
        try:
            listeners = await trio.open_tcp_listeners(port, host=host, backlog=_BACKLOG)
        except OSError as error:
            self._failures[str(maddr)] = error
            raise OpenConnectionError(f"cannot listen on {maddr}: {error}") from error
        async with self._lifecycle_lock:
            if self._nursery is None:
                await self._spawn_background_task()
            # From here on a system task of the listener owns the sockets.
            nursery = cast(trio.Nursery, self._nursery)
            await nursery.start(self._accept, listeners, nursery)
            self.listeners.extend(listeners)

    async def _accept(
        self,
        listeners: list[trio.SocketListener],
        nursery: trio.Nursery,
        *,
        task_status: Any = trio.TASK_STATUS_IGNORED,
    ) -> None:
        with trio.CancelScope() as scope:
            self._accepting.append(scope)
            # The connections' tasks are not the acceptor's: it ends first.
            await trio.serve_listeners(
                self._accepted, listeners, handler_nursery=nursery, task_status=task_status
            )

    def stop_accepting(self) -> None:
        """Close the listening sockets; accepted connections live on (`close` ends them too)."""
        for scope in self._accepting:
            scope.cancel()

    async def _accepted(self, stream: trio.SocketStream) -> None:
        try:
            ahead = ReadAheadStream(stream)
            with self._admit(ahead) as admitted:
                if admitted:
                    set_link_options(stream)
                    await self.handler(ahead)
        except Exception as error:  # noqa: BLE001 - one bad connection must not end the listener
            log.debug("an accepted connection failed: %r", error)
        finally:
            stream.socket.close()


class BoundedTcp(TCP):
    """libp2p's TCP transport with exclusive listeners and a time-out inside each dial."""

    def __init__(self, connect_timeout_s: float = CONNECT_TIMEOUT_S) -> None:
        super().__init__()
        # Asked for each accepted connection; its context is open until the connection ends.
        self.admit: Admit = lambda _stream: nullcontext(True)
        self._connect_timeout_s = connect_timeout_s
        # The errors of listen addresses that could not be used.
        self.listen_failures: dict[str, OSError] = {}

    async def dial(self, maddr: Multiaddr) -> IRawConnection:
        """Connect, within a time-out of its own; raises OpenConnectionError.

        A dial that is cancelled from outside leaks in libp2p (S7).
        """
        with trio.move_on_after(self._connect_timeout_s):
            raw = await super().dial(maddr)
            stream = cast(Any, raw).stream.stream
            set_link_options(stream)
            cast(Any, raw).stream = ReadAheadStream(stream)
            return raw
        raise OpenConnectionError(f"no answer from {maddr} within {self._connect_timeout_s:g} s")

    def create_listener(self, handler_function: THandler) -> TCPListener:
        """Return an ExclusiveListener."""
        return ExclusiveListener(
            handler_function, self.listen_failures, lambda stream: self.admit(stream)
        )

    def failure_text(self, address: Multiaddr) -> str:
        """Return why `address` could not be listened on, for a message."""
        error = self.listen_failures.get(str(address))
        if error is None:
            return "libp2p gave no reason"
        if error.errno is None:
            return str(error)
        return os.strerror(error.errno).lower()
