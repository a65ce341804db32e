"""TCP: exclusive listeners, bounded dials and detection of dead links.

Rule: a port belongs to one node alone, a dial has a time-out, and every socket, accepted or
dialled, gets the options below before its first byte.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
from typing import Final

import trio
from multiaddr import Multiaddr
from multiaddr.exceptions import Error as MultiaddrError

from bbnode.transport.errors import DialError, ListenError

# A SYN is repeated after 1 s and 3 s; a host without an answer by now is unreachable.
CONNECT_TIMEOUT_S: Final = 5.0

# Idle links: a probe after 10 s and every 5 s, dead after three without answer. Links with
# data in flight: dead if nothing was acknowledged for 20 s.
_KEEPALIVE_IDLE_S: Final = 10
_KEEPALIVE_INTERVAL_S: Final = 5
_KEEPALIVE_PROBES: Final = 3
_USER_TIMEOUT_MS: Final = 20_000
# Unsent bytes that the kernel buffers: a small envelope waits for no more than this of a large one.
_NOTSENT_LOWAT_BYTES: Final = 128 * 1024

# A thousand peers may reconnect at the same moment; the system bounds it too.
_BACKLOG: Final = 1024
# The codes of multiaddr's protocol table.
_IP4, _IP6, _TCP = b"\x04", b"\x29", b"\x06"
# Address families to which a name may resolve.
_FAMILIES: Final = {
    "ip4": socket.AF_INET,
    "ip6": socket.AF_INET6,
    "dns4": socket.AF_INET,
    "dns6": socket.AF_INET6,
    "dns": socket.AF_UNSPEC,
}

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
            # The other side may be gone already, which the first read will report.
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
    """Return IP address and port of the other side, None if it is gone."""
    try:
        host, port = stream.socket.getpeername()[:2]
    except OSError:
        return None
    # A multiaddr cannot hold a scope id (fe80::1%eth0).
    return str(ipaddress.ip_address(str(host).split("%")[0])), int(port)


def has_come(stream: trio.SocketStream) -> bool:
    """Return True if the kernel has unread bytes of this connection."""
    try:
        # On a plain socket, since trio's would wait.
        with socket.socket(fileno=os.dup(stream.socket.fileno())) as peeked:
            return bool(peeked.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
    except OSError:
        return False


async def listen_on(address: Multiaddr) -> list[trio.SocketListener]:
    """Return exclusive listeners on one address; raises ListenError."""
    host, port = listen_endpoint(address)
    try:
        return await trio.open_tcp_listeners(port, host=host, backlog=_BACKLOG)
    except OSError as error:
        reason = str(error) if error.errno is None else os.strerror(error.errno).lower()
        raise ListenError(
            f"cannot listen on {address}: {reason}; stop the program that has the port, or listen "
            "on another (port 0 takes any free one)"
        ) from error


async def connect(address: Multiaddr, source: int = 0) -> trio.SocketStream:
    """Return a connection with an address of TCP, by IP or by name; raises DialError.

    It comes from the port `source`, which another dialled connection may have as well; 0 is any. It
    has a time-out of its own, and may be cancelled.
    """
    family, host, port = dial_endpoint(address)
    reason = f"no answer within {CONNECT_TIMEOUT_S:g} s"
    with trio.move_on_after(CONNECT_TIMEOUT_S):
        try:
            candidates = await trio.socket.getaddrinfo(host, port, family, socket.SOCK_STREAM)
        except OSError as error:
            raise DialError(f"cannot dial {address}: {error}") from error
        for kind, _, protocol, _, endpoint in candidates:
            sock = trio.socket.socket(kind, socket.SOCK_STREAM, protocol)
            try:
                # So that another connection can be made from its port.
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if source:
                    await sock.bind(("::" if kind == socket.AF_INET6 else "0.0.0.0", source))
                await sock.connect(endpoint)
                stream = trio.SocketStream(sock)
                set_link_options(stream)
                return stream
            except OSError as error:
                sock.close()
                reason = str(error)
            except BaseException:
                sock.close()
                raise
    raise DialError(f"cannot dial {address}: {reason}")


def dial_endpoint(address: Multiaddr) -> tuple[int, str, int]:
    """Return the family, the host and the port of an address to dial; raises DialError."""
    parts = str(address).split("/")[1:]
    names = [protocol.name for protocol in address.protocols()]
    if len(names) not in (2, 3) or names[0] not in _FAMILIES or names[1] != "tcp":
        raise DialError(f"cannot dial {address}: expected /<ip4, ip6 or dns>/<host>/tcp/<port>")
    if names[2:] not in ([], ["p2p"]):
        raise DialError(f"cannot dial {address}: only TCP is spoken, not {names[2]} over it")
    return _FAMILIES[names[0]], parts[1], int(parts[3])


def tcp_address(host: str, port: int) -> Multiaddr:
    """Return the address of an IP address and a port."""
    ip = ipaddress.ip_address(host)
    family = _IP4 if ip.version == 4 else _IP6
    return Multiaddr(family + ip.packed + _TCP + port.to_bytes(2, "big"))
