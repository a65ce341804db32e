"""Where in the author's source a recording call stands.

Rule: no directories, so that the same source records to the same bytes on every machine.
"""

from __future__ import annotations

import sys
from pathlib import PurePath

_PACKAGE = "bbnode.dsl"


def author_line() -> str:
    """`<file name>:<line>` of the innermost frame outside of this package."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        module = frame.f_globals.get("__name__", "")
        if module != _PACKAGE and not module.startswith(_PACKAGE + "."):
            break
        frame = frame.f_back
    return f"{PurePath(frame.f_code.co_filename).name}:{frame.f_lineno}"
