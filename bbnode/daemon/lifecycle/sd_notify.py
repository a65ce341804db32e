"""Notifications to a supervisor, by systemd's protocol.

Rule: a datagram of `KEY=value` lines to the socket that NOTIFY_SOCKET names (sd_notify(3));
without that variable nothing is sent, and a supervisor that does not answer is only logged.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable

import trio

from bbnode.ir.texts import printable

logger = logging.getLogger(__name__)

READY = "READY=1"
STOPPING = "STOPPING=1"
WATCHDOG = "WATCHDOG=1"

# sd_watchdog_enabled(3) advises to report at half of the allowed time.
_REPORTS_PER_WATCHDOG = 2
# The shortest period of changes of the STATUS line, which people look at now and then.
STATUS_EVERY_S = 5.0


def notify(*lines: str) -> bool:
    """Send lines such as READY or "STATUS=…"; return False if there is no supervisor."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return False
    if address.startswith("@"):
        address = "\0" + address[1:]  # the abstract namespace
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as out:
            out.setblocking(False)
            # A line break in a status, which has names of the artifact, would begin another line.
            out.sendto("\n".join(map(printable, lines)).encode(), address)
    except OSError as error:
        logger.debug("supervisor not reached", extra={"reason": str(error)})
        return False
    return True


def reloading() -> bool:
    """Announce that a reload begins; READY announces its end."""
    # systemd (253 on) uses the time to distinguish this reload from an older one.
    now_us = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
    return notify("RELOADING=1", f"MONOTONIC_USEC={now_us}")


def watchdog_period_s() -> float | None:
    """Return the period in which WATCHDOG has to be sent, in seconds; None without a watchdog."""
    try:
        allowed_us = int(os.environ.get("WATCHDOG_USEC", ""))
        watched = int(os.environ.get("WATCHDOG_PID", os.getpid()))
    except ValueError:
        return None
    if allowed_us <= 0 or watched != os.getpid():
        return None
    return allowed_us / 1e6 / _REPORTS_PER_WATCHDOG


async def report(status: Callable[[], str], alive: Callable[[], bool] = lambda: True) -> None:
    """Keep the supervisor informed: WATCHDOG in time while `alive`, and STATUS when it changes.

    It runs on the daemon's own loop: a stuck loop sends nothing, and the daemon is restarted.
    """
    period_s = watchdog_period_s()
    reported = ""
    while True:
        lines = [WATCHDOG] if period_s is not None and alive() else []
        line = status()
        if line != reported:
            lines.append(f"STATUS={line}")
            reported = line
        if lines and not notify(*lines) and period_s is None:
            return  # no supervisor
        await trio.sleep(min(period_s or STATUS_EVERY_S, STATUS_EVERY_S))
