"""The process that a daemon runs in: its own (`bbnode run`), or another program's.

Rule: a daemon changes its process only through this module. A `SharedProcess` belongs to another
program: its signals, its log, its limits, its supervisor and its end are left alone.
"""

from __future__ import annotations

import gc
import logging
import os
import resource
import sys
from collections.abc import Callable, Sequence
from typing import Final

import trio

from bbnode.daemon.lifecycle import sd_notify, stopping
from bbnode.daemon.lifecycle.stopping import LastResort
from bbnode.daemon.observing import logs
from bbnode.ir.caps import OPEN_FILES

# Python's garbage collection: new objects before a collection of the youngest generation, and
# collections of each generation before one of the next. A round with a thousand peers creates some
# hundred thousand objects and drops them; with Python's own numbers, the collector traversed the
# state of all peers, which took half of the round's time. A peer leaves behind garbage in cycles,
# so these numbers must not be much larger.
COLLECT_AFTER: Final = (10_000, 10, 10)


class SharedProcess:
    """A process that has other work too: nothing of it is changed."""

    # The logger whose lines the control plane shows, and whose level it changes.
    logger_name = "bbnode"

    async def handle_signals(
        self,
        stop: Callable[[], None],
        reload: Callable[[], None],
        stop_begins: Callable[[], None],
    ) -> None:
        """Return at once."""

    def started(self) -> None:
        """Note that the node is ready."""

    def stop_begins(self, within_s: float) -> None:
        """Note that the node has to stop within `within_s`."""

    def saved(self) -> None:
        """Note that the node's last state is on disk."""

    def configure_logs(self, level: str, form: str) -> None:
        """Apply `node.log_level` and `node.log_format`."""

    def notify(self, *lines: str) -> None:
        """Inform the supervisor of the process."""

    def reloading(self) -> None:
        """Inform the supervisor that a reload begins."""

    async def report(self, status: Callable[[], str], alive: Callable[[], bool]) -> None:
        """Keep the supervisor informed."""


class OwnProcess(SharedProcess):
    """The process of `bbnode run`, which exists only for the node."""

    logger_name = ""

    def __init__(self, *, stop_at_eof: bool = False) -> None:
        """Raise the limit of open files; signals are handled once the daemon runs.

        With `stop_at_eof`, the end of standard input stops the node as SIGTERM does.
        """
        raise_file_limit()
        self._stop_at_eof = stop_at_eof
        self._last_resort = LastResort()

    async def handle_signals(
        self, stop: Callable[[], None], reload: Callable[[], None], stop_begins: Callable[[], None]
    ) -> None:
        """Handle signals for ever, as `stopping.watch` does."""
        async with trio.open_nursery() as nursery:
            if self._stop_at_eof:
                nursery.start_soon(stopping.watch_input, stop, stop_begins)
            await stopping.watch(stop, reload, stop_begins)

    def started(self) -> None:
        """Enable garbage collection, rarely, and only for objects created from now on.

        The imports and objects of a start live as long as the process; `bbnode run` does not
        collect garbage before, and afterwards they are frozen.
        """
        gc.freeze()
        gc.set_threshold(*COLLECT_AFTER)
        gc.enable()

    def stop_begins(self, within_s: float) -> None:
        """Make sure that the process ends in time, whatever happens from now on."""
        self._last_resort.arm(within_s)

    def saved(self) -> None:
        """Note that the node's last state is on disk: the exit code is 0 from now on."""
        self._last_resort.saved = True

    def configure_logs(self, level: str, form: str) -> None:
        """Apply `node.log_level` and `node.log_format`."""
        logs.configure(level, form)

    def notify(self, *lines: str) -> None:
        """Inform the supervisor of the process, if there is one."""
        sd_notify.notify(*lines)

    def reloading(self) -> None:
        """Inform the supervisor that a reload begins."""
        sd_notify.reloading()

    async def report(self, status: Callable[[], str], alive: Callable[[], bool]) -> None:
        """Keep the supervisor informed, as `sd_notify.report` does."""
        await sd_notify.report(status, alive)

    def ends(self, *, at_once: bool) -> None:
        """End the process now, or cancel the last resort."""
        if at_once:
            # A component may still compute in a worker thread, which can't be interrupted, and
            # Python is slow to free a heap of models. All state is on disk, so wait for neither.
            logging.shutdown()
            sys.stdout.flush()
            os._exit(0)
        self._last_resort.disarm()

    def starts_anew(self, arguments: Sequence[str]) -> None:
        """Replace this process by a new one of the same number, which runs `bbnode` with these
        arguments.
        """
        self._last_resort.disarm()
        logging.shutdown()
        sys.stdout.flush()
        os.execv(sys.executable, [sys.executable, "-m", "bbnode", *arguments])


def raise_file_limit() -> None:
    """Raise the limit of open files to what connections and state need, if the system allows it.

    Many systems begin with 1,024, which the connections alone may use.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
