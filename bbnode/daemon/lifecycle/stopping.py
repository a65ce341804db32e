"""Signals of the daemon: stop, stop at once, reload.

Rule: SIGTERM and SIGINT stop it, a second one ends the process where it stands; SIGHUP reloads.
Nothing else of the process's signals is touched.
"""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable
from types import FrameType

import trio

logger = logging.getLogger(__name__)


async def watch(
    stop: Callable[[], None], reload: Callable[[], None], stop_begins: Callable[[], None]
) -> None:
    """Call `stop` or `reload` as signals come, for ever.

    `stop_begins` is called where the signal strikes, even when the loop does not turn.
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


def _before(signum: signal.Signals, first: Callable[[], None]) -> None:
    """Call `first` whenever a signal comes, then what handles it now."""
    handler = signal.getsignal(signum)

    def both(number: int, frame: FrameType | None) -> None:
        first()
        if callable(handler):
            handler(number, frame)

    signal.signal(signum, both)
