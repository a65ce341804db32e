"""Stopping a daemon: the signals that ask for it, and the last resort when it takes too long.

Rule: SIGTERM and SIGINT stop it, a second one ends the process at once; SIGHUP reloads. The end of
standard input stops it too, with `bbnode run --stop-at-eof`. After such a request the process ends
in time, whatever its loop does: the last resort waits neither for the loop, nor for another thread,
nor for a lock that one of them may hold. A separate thread ends the process at the deadline. If
native code holds the interpreter's lock, so that this thread can't run, the kernel ends the process
with SIGALRM soon after.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Final

import trio

logger = logging.getLogger(__name__)

# The exit code of a stop whose state could not be saved in time.
NOT_SAVED: Final = 1
# Seconds for the last lines of the log, whose reader may be stuck.
SAY_S: Final = 0.5
_READ_BYTES: Final = 4096
# Seconds from the deadline of the thread to that of the kernel.
ALARM_SLACK_S: Final = 2.0


async def watch(
    stop: Callable[[], None], reload: Callable[[], None], stop_begins: Callable[[], None]
) -> None:
    """Call `stop` or `reload` when signals arrive, for ever.

    `stop_begins` is called in the signal handler itself, even if the loop is stuck.
    """
    stopping = False
    handled = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    with trio.open_signal_receiver(*handled) as signals:
        for ends in (signal.SIGTERM, signal.SIGINT):
            _before(ends, stop_begins)
        async for signum in signals:
            logger.info("signal", extra={"signal": signal.Signals(signum).name})
            if signum == signal.SIGHUP:
                reload()
            elif stopping:
                logger.warning("second signal: leaving at once")
                logging.shutdown()
                os._exit(128 + signum)
            else:
                stopping = True
                stop()


async def watch_input(stop: Callable[[], None], stop_begins: Callable[[], None]) -> None:
    """Call both when standard input ends, and return. Its content is read and dropped."""
    descriptor = sys.stdin.fileno()
    data = b"-"
    while data:
        # A file, or /dev/null, is always readable, and the kernel refuses to wait for it.
        with contextlib.suppress(PermissionError):
            await trio.lowlevel.wait_readable(descriptor)
        data = os.read(descriptor, _READ_BYTES)
    logger.info("standard input ended")
    stop_begins()
    stop()


def _before(signum: signal.Signals, first: Callable[[], None]) -> None:
    """Call `first` for each signal, before its present handler."""
    handler = signal.getsignal(signum)

    def both(number: int, frame: FrameType | None) -> None:
        first()
        if callable(handler):
            handler(number, frame)

    signal.signal(signum, both)


class LastResort:
    """Ends this process when a stop takes too long."""

    def __init__(self, leave: Callable[[int], None] = os._exit) -> None:
        """Create a disarmed last resort; `leave` ends the process with a code."""
        self._leave = leave
        self._timer: threading.Timer | None = None
        # True once the node's state is on disk: then the exit code is 0.
        self.saved = False

    def arm(self, within_s: float) -> None:
        """End the process after `within_s`; only the first call counts. On the main thread."""
        if self._timer is not None:
            return
        self._timer = threading.Timer(within_s, self._end, [within_s])
        self._timer.daemon = True
        self._timer.start()
        signal.setitimer(signal.ITIMER_REAL, within_s + ALARM_SLACK_S)

    def disarm(self) -> None:
        """Cancel the deadline: the stop is over."""
        if self._timer is not None:
            signal.setitimer(signal.ITIMER_REAL, 0)
            self._timer.cancel()
            self._timer.join()
            self._timer = None

    def _end(self, within_s: float) -> None:
        # A stuck thread may hold the log's lock, or the log's reader may be stuck.
        writer = threading.Thread(target=self._say, args=[within_s], daemon=True)
        with contextlib.suppress(RuntimeError):  # no more threads can be started
            writer.start()
            writer.join(SAY_S)
        self._leave(0 if self.saved else NOT_SAVED)

    def _say(self, within_s: float) -> None:
        state = "saved" if self.saved else "not saved: the last checkpoint counts"
        logger.warning("stop took too long, leaving", extra={"after_s": within_s, "state": state})
        # Not logging.shutdown, which also closes handlers: one of a library may close our files.
        for handler in logging.getLogger().handlers:
            with contextlib.suppress(OSError, ValueError):  # gone or closed: the others still count
                handler.flush()
