"""Where in the author's source a recording call stands.

Rule: no directories, so that the same source records to the same bytes on every machine.
"""

from __future__ import annotations

import sys
from pathlib import PurePath

# A custom op records itself when its author calls it.
_PACKAGES = ("bbnode.dsl.", "bbnode.ops.")


def author_line() -> str:
    """`<file name>:<line>` of the innermost frame outside of these packages."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        module = frame.f_globals.get("__name__", "")
        if not f"{module}.".startswith(_PACKAGES):
            break
        frame = frame.f_back
    return f"{PurePath(frame.f_code.co_filename).name}:{frame.f_lineno}"
