"""The sockets that the control plane listens on.

Rule: the unix socket has its mode from the first moment and is never taken from a daemon that
answers on it; TCP for the control plane is the loopback interface only, whatever the
configuration says. Only metrics may listen on other interfaces.
"""

from __future__ import annotations

import contextlib
import grp
import ipaddress
import os
import socket
import sys
from collections.abc import Collection, Iterator
from pathlib import Path

import trio

from bbnode.daemon import paths
from bbnode.daemon.control.errors import AlreadyRunning, TcpRefused
from bbnode.ir.errors import DeploymentError, EnvironmentFault

# Connections that the kernel holds until the loop accepts them.
BACKLOG = 16
# A live daemon takes a connection at once; this is for a machine that swaps.
PROBE_TIMEOUT_S = 1.0


class UnknownGroup(DeploymentError):
    """`control.group` names a group that this machine does not have."""


@contextlib.contextmanager
def unix_listener(path: Path, *, group: str | None = None) -> Iterator[trio.SocketListener]:
    """Listen on a unix socket while the block runs, then remove it.

    Mode 0600, or 0660 for a group, which may then also enter the socket's directory. Raises
    `AlreadyRunning` if another daemon answers there, `UnknownGroup`, `EnvironmentFault` if the
    socket cannot be created.
    """
    gid = _group_id(group) if group is not None else None
    paths.make_socket_dir(path)
    _remove_stale(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with listener:
        _bind(listener, path, gid)
        identity = path.lstat()
        listener.listen(BACKLOG)
        try:
            yield trio.SocketListener(trio.socket.from_stdlib_socket(listener))
        finally:
            _remove_own(path, identity)


@contextlib.contextmanager
def tcp_listener(host: str, port: int, *, key: str) -> Iterator[trio.SocketListener]:
    """Listen on an IP address and a port while the block runs; 0 takes a free port.

    `key` is the key of the configuration that the `EnvironmentFault` names if the address is not
    available.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
            listener.listen(BACKLOG)
        except OSError as error:
            raise EnvironmentFault(
                f"{key} {host}, port {port}: {error.strerror}; name another port, or 0 for a free "
                "one, and an address that this machine has"
            ) from error
        yield trio.SocketListener(trio.socket.from_stdlib_socket(listener))


def parse_tcp(address: str) -> tuple[str, int]:
    """Return host and port of `control.tcp`; raises `TcpRefused` unless it is loopback."""
    endpoint = _ip_and_port(address)
    if endpoint is None or not is_loopback(endpoint[0]):
        raise TcpRefused(
            f"control.tcp is {address!r}; write it as 127.0.0.1:PORT or [::1]:PORT: the control "
            "plane listens to this machine alone (use an ssh tunnel from elsewhere)"
        )
    return endpoint


def parse_metrics(address: str) -> tuple[str, int]:
    """Return host and port of `control.metrics`; raises `TcpRefused` unless it is an IP address."""
    endpoint = _ip_and_port(address)
    if endpoint is None:
        raise TcpRefused(
            f"control.metrics is {address!r}; write it as ADDRESS:PORT with an IP address of this "
            "machine, as 127.0.0.1:9470, 0.0.0.0:9470 or [::]:9470"
        )
    return endpoint


def is_loopback(host: str) -> bool:
    """Return True for an IP address that only this machine reaches."""
    return ipaddress.ip_address(host).is_loopback


def is_own_host(text: str, names: Collection[str]) -> bool:
    """Return True for the host of a URL, with or without a port, that means this machine.

    These are IP addresses, localhost, and `names` in small letters.
    """
    host = text.strip()
    if host.startswith("["):
        host, closing, rest = host[1:].partition("]")
        if not closing or (rest and not rest.startswith(":")):
            return False
    else:
        host = host.partition(":")[0]
    host = host.lower().removesuffix(".")
    if host in names or host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _ip_and_port(address: str) -> tuple[str, int] | None:
    host, _, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    # Five digits: more are no port, and int() has a bound of its own.
    if not (port.isascii() and port.isdigit() and len(port) <= 5 and int(port) < 65536):
        return None
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return None
    return host, int(port)


def _group_id(group: str) -> int:
    try:
        return grp.getgrnam(group).gr_gid
    except KeyError as error:
        raise UnknownGroup(f"control.group: this machine has no group {group!r}") from error


def _bind(listener: socket.socket, path: Path, gid: int | None) -> None:
    # The mode has to be right from the first moment, since a chmod after bind leaves a gap. Only a
    # group gets its rights later.
    try:
        if sys.platform.startswith("linux"):
            # The file gets the socket's own mode (unix(7)), minus the umask.
            os.fchmod(listener.fileno(), 0o600)
            listener.bind(os.fspath(path))
        else:
            _bind_under_mask(listener, path)
    except OSError as error:
        raise EnvironmentFault(f"control socket {path}: {error.strerror}") from error
    if gid is None:
        return
    try:
        os.chown(path, -1, gid)
        path.chmod(0o660)
        # Without the right to enter the directory, the socket's own mode has no effect.
        os.chown(path.parent, -1, gid)
        path.parent.chmod(0o710)
    except OSError as error:
        raise EnvironmentFault(
            f"control socket {path} can't be given to control.group: {error.strerror}; run the "
            "daemon as a member of that group"
        ) from error


def _bind_under_mask(listener: socket.socket, path: Path) -> None:
    # No await between the two calls: the mask belongs to the whole process, other threads included.
    old_mask = os.umask(0o177)
    try:
        listener.bind(os.fspath(path))
    finally:
        os.umask(old_mask)


def _remove_stale(path: Path) -> None:
    """Remove the socket of a killed daemon; raises `AlreadyRunning` for a live one."""
    if not path.is_socket():
        if path.exists() or path.is_symlink():
            raise EnvironmentFault(f"control socket {path}: something else has that name")
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(PROBE_TIMEOUT_S)
        try:
            probe.connect(os.fspath(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
            return
        except FileNotFoundError:
            return
        except OSError as error:
            raise EnvironmentFault(f"control socket {path}: {error}") from error
    raise AlreadyRunning(f"a daemon is running already: it answers on {path}")


def _remove_own(path: Path, identity: os.stat_result) -> None:
    """Remove the socket, unless a later daemon has put its own there."""
    try:
        present = path.lstat()
    except FileNotFoundError:
        return
    if (present.st_dev, present.st_ino) == (identity.st_dev, identity.st_ino):
        path.unlink(missing_ok=True)
