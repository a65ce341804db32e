"""The boundary around the code of a program's author: its exceptions become one typed error.

Rule: the error has the exception and its location; its `frames` are those of the author's own
files, in call order. Errors of bbnode pass unchanged, since they are more specific.
"""

from __future__ import annotations

import sys
import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from bbnode.ir.errors import AuthorError, BbnodeError
from bbnode.ir.interrupts import let_stop
from bbnode.ir.texts import printable

_MAX_TEXT: Final = 400  # characters of the exception's message
_MAX_FRAMES: Final = 8  # the innermost ones; a recursion has a thousand

_OURS: Final = Path(__file__).parent.parent
_OTHERS: Final = tuple(
    {Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
)


class AuthorsCodeFailed(AuthorError):
    """A Module or a module of components raised an exception.

    `frames`: file, line and code of each call in the author's own files, as they are shown.
    """

    def __init__(self, what: str, error: BaseException) -> None:
        frames = authors_frames(error)
        self.frames = tuple(
            f"{frame.filename}:{frame.lineno}, in {frame.name}: {(frame.line or '').strip()}"
            for frame in frames[-_MAX_FRAMES:]
        )
        text = printable(str(error).partition("\n")[0])[:_MAX_TEXT]
        place = ""
        if isinstance(error, SyntaxError) and error.filename:
            text, place = error.msg, f" ({Path(error.filename).name}:{error.lineno})"
        elif frames:
            place = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})"
        super().__init__(f"{what}: {type(error).__name__}: {text}{place}; mend the program")


@contextmanager
def authors_code(what: str) -> Iterator[None]:
    """Turn exceptions of an author's code into AuthorsCodeFailed; `what` names the code."""
    try:
        yield
    except BbnodeError:
        raise
    except BaseException as error:
        let_stop(error)
        raise AuthorsCodeFailed(what, error) from error


def authors_frames(error: BaseException) -> list[traceback.FrameSummary]:
    """Return the frames of an error that are in neither bbnode, Python nor installed packages."""
    return [f for f in traceback.extract_tb(error.__traceback__) if _is_authors(f.filename)]


def _is_authors(filename: str) -> bool:
    if filename.startswith("<") or filename == getattr(sys.modules.get("__main__"), "__file__", ""):
        return False
    path = Path(filename)
    return not any(path.is_relative_to(folder) for folder in (_OURS, *_OTHERS))
