"""Whether this machine has multicast on its loopback interface, which some sandboxes do not."""

from __future__ import annotations

import socket
import struct

import pytest


def _works() -> bool:
    """Whether a datagram to mDNS's group comes back."""
    try:
        with (
            socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as receiver,
            socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender,
        ):
            group, loopback = socket.inet_aton("224.0.0.251"), socket.inet_aton("127.0.0.1")
            receiver.bind(("", 0))
            receiver.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, group + loopback)
            # It is there at once, or never.
            receiver.settimeout(5.0)
            sender.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, loopback)
            sender.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_LOOP, struct.pack("b", 1))
            sender.sendto(b"?", ("224.0.0.251", receiver.getsockname()[1]))
            return receiver.recv(1) == b"?"
    except OSError:
        return False


needs_multicast = pytest.mark.skipif(
    not _works(), reason="no multicast on the loopback interface of this machine"
)
