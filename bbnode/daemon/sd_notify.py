"""Telling a supervisor how we are: systemd's notification protocol.

Rule: a datagram of `KEY=value` lines to the socket that NOTIFY_SOCKET names (sd_notify(3));
without that variable nothing is sent, and a supervisor that went away is no fault of ours.
"""

from __future__ import annotations

import logging
import os
import socket

logger = logging.getLogger(__name__)

READY = "READY=1"
STOPPING = "STOPPING=1"


def notify(*lines: str) -> bool:
    """Send lines such as READY or "STATUS=…"; whether there was somebody to send them to."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return False
    if address.startswith("@"):
        address = "\0" + address[1:]  # the abstract namespace
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as out:
            out.setblocking(False)
            out.sendto("\n".join(lines).encode(), address)
    except OSError as error:
        logger.debug("supervisor not reached", extra={"reason": str(error)})
        return False
    return True
