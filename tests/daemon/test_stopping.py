"""A process that was told to stop ends, whatever stands still in it."""

from __future__ import annotations

import io
import logging
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from bbnode.daemon.lifecycle.stopping import NOT_SAVED, LastResort
from tests.patience import PATIENCE_S


class Left:
    """Stands for the end of the process."""

    def __init__(self) -> None:
        self.code: int | None = None
        self.event = threading.Event()

    def __call__(self, code: int) -> None:
        self.code = code
        self.event.set()


@pytest.fixture
def left() -> Left:
    return Left()


@pytest.fixture
def armed(left: Left) -> Iterator[LastResort]:
    made = LastResort(left)
    yield made
    made.disarm()
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0


@pytest.fixture
def unwritable() -> logging.Handler:
    """Stands for a handler of the root logger whose stream its maker has closed."""

    stream = io.TextIOWrapper(io.BytesIO())
    stream.close()
    return logging.StreamHandler(stream)


@pytest.mark.parametrize(("saved", "code"), [(True, 0), (False, NOT_SAVED)])
def test_it_leaves_when_its_time_has_come(
    armed: LastResort, left: Left, caplog: pytest.LogCaptureFixture, saved: bool, code: int
) -> None:
    armed.saved = saved
    armed.arm(0)
    assert left.event.wait(PATIENCE_S)
    assert left.code == code
    assert "stop took too long, leaving" in caplog.text


def test_a_log_that_takes_nothing_does_not_keep_it(armed: LastResort, left: Left) -> None:
    class Stuck(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            stuck.wait(PATIENCE_S)

    stuck, handler = threading.Event(), Stuck()
    logging.getLogger().addHandler(handler)
    try:
        armed.arm(0)
        assert left.event.wait(PATIENCE_S)
    finally:
        stuck.set()
        logging.getLogger().removeHandler(handler)


def test_its_last_words_are_written_and_close_no_library_s_stream(
    armed: LastResort, left: Left, unwritable: logging.Handler
) -> None:
    class Buffered(logging.StreamHandler[io.StringIO]):
        """Stands for the handler of a library, which closes what it writes to."""

        flushed = False

        def flush(self) -> None:
            self.flushed = True

        def close(self) -> None:
            super().close()
            self.stream.close()

    handlers = [Buffered(io.StringIO()), Buffered(io.StringIO())]
    logging.getLogger().addHandler(unwritable)
    logging.getLogger().addHandler(handlers[0])
    logging.getLogger("some.library").addHandler(handlers[1])
    try:
        armed.arm(0)
        assert left.event.wait(PATIENCE_S)
        assert handlers[0].flushed
        assert not any(each.stream.closed for each in handlers)
    finally:
        logging.getLogger().removeHandler(handlers[0])
        logging.getLogger().removeHandler(unwritable)
        logging.getLogger("some.library").removeHandler(handlers[1])


def test_the_first_deadline_counts(armed: LastResort, left: Left) -> None:
    armed.arm(PATIENCE_S)
    armed.arm(0)
    armed.disarm()
    assert left.code is None


# The loop stands still in Python, so that only the handler of the signal can act; and in native
# code that keeps the interpreter's lock, so that not even that can.
STANDS = {
    "while True: pass": 0,
    "import re; re.match('(a+)+b', 'a' * 64)": -signal.SIGALRM,
}


@pytest.mark.parametrize("stands", STANDS)
def test_a_loop_that_does_not_turn(stands: str) -> None:
    program = f"""
import trio
from bbnode.daemon.lifecycle.stopping import LastResort, watch

async def main():
    last_resort = LastResort()
    last_resort.saved = True
    async with trio.open_nursery() as nursery:
        nursery.start_soon(watch, print, print, lambda: last_resort.arm(0.1))
        await trio.testing.wait_all_tasks_blocked()
        if {STANDS[stands]} < 0:
            last_resort.arm(0.1)
        print("stands", flush=True)
        {stands}

import trio.testing
trio.run(main)
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"stands\n"
            process.terminate()
            assert process.wait(PATIENCE_S) == STANDS[stands]
        finally:
            process.kill()
