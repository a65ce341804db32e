"""`python -m bbnode`, and the `bbnode` command.

Rule: nothing is imported before Ctrl-C is quiet but what Python has built in. Python answers an
interrupt with a traceback, and half of the time of a short command are imports. What Python does
before this file, it does before any program: an interrupt there is its own.
"""

from __future__ import annotations

# What `signal` is made of, without its import of `enum`, which takes as long as Python's start.
import _signal as signal  # type: ignore[import-not-found]
import sys


def run() -> int:
    """Run the command line; returns the exit code."""
    on_interrupt = signal.getsignal(signal.SIGINT)
    if on_interrupt is signal.default_int_handler:
        # The system's own: the process ends as by SIGINT, without a word.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from bbnode.cli import output
    from bbnode.cli.main import main

    if on_interrupt is signal.default_int_handler:
        signal.signal(signal.SIGINT, on_interrupt)
    sys.excepthook = output.show_uncaught
    return main()


if __name__ == "__main__":
    sys.exit(run())
