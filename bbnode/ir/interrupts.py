"""The distinction of real interrupts from like exceptions that third-party code raises.

Rule: code of an author (of a component, an op or a program) can't end the process: `sys.exit`,
`raise KeyboardInterrupt` and all its other exceptions are ordinary failures. Ctrl-C, and exceptions
of the host's signal handlers, pass through it.
"""

from __future__ import annotations

import dis
import signal
import threading
from types import CodeType, TracebackType
from typing import Final

_STOPS: Final = (KeyboardInterrupt, SystemExit)
_RAISE: Final = dis.opmap["RAISE_VARARGS"]


def let_stop(error: BaseException) -> None:
    """Reraise an exception with which a person or the system stops the process."""
    if isinstance(error, _STOPS) and _is_from_outside(error):
        raise error


def _is_from_outside(error: BaseException) -> bool:
    if threading.current_thread() is not threading.main_thread():
        return False  # Python delivers signals in the main thread alone
    handlers = _handlers()
    last: TracebackType | None = None
    link = error.__traceback__
    while link is not None:
        if link.tb_frame.f_code in handlers:
            return True
        last, link = link, link.tb_next
    if isinstance(error, SystemExit):
        return False
    # Python's own handler of Ctrl-C raises at an arbitrary instruction of the thread, an
    # author's code at a `raise` statement.
    return last is None or last.tb_frame.f_code.co_code[last.tb_lasti] != _RAISE


def _handlers() -> set[CodeType]:
    """Return the code of the signal handlers that are written in Python."""
    handlers = set()
    for number in signal.valid_signals():
        handler = signal.getsignal(number)
        for function in (handler, getattr(handler, "__wrapped__", None)):
            code = getattr(getattr(function, "__func__", function), "__code__", None)
            if isinstance(code, CodeType):
                handlers.add(code)
    return handlers
