"""Classes that a command line names: `package.module:Class`.

Rule: the module is somebody else's code, which may raise anything when it is imported; whatever it
is becomes one typed error that says where.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import sys
import traceback
from pathlib import Path
from typing import TypeVar

from bbnode.ir.errors import DeploymentError

Named = TypeVar("Named")

_MAX_TEXT = 400  # characters of what a module raised


class ClassNotLoaded(DeploymentError):
    """A module can't be imported, or has no such class."""


def load_class(module: str, name: str, base: type[Named]) -> type[Named]:
    """Import a module and return its class of that name, one that derives from `base`.

    The current directory is searched as well, as `python -m` would. Raises ClassNotLoaded.
    """
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        found = importlib.import_module(module)
    except Exception as error:
        raise ClassNotLoaded(
            f"{module} can't be imported: {type(error).__name__}: {error!s:.{_MAX_TEXT}}"
            f"{_place(error)}; install it, start bbnode in the directory that holds it, or mend it"
        ) from error
    cls = getattr(found, name, None)
    if inspect.isclass(cls) and issubclass(cls, base):
        return cls
    known = sorted(
        each
        for each, value in vars(found).items()
        if inspect.isclass(value) and issubclass(value, base) and value is not base
    )
    near = difflib.get_close_matches(name, known, n=1)
    kind = "class" if base is object else f"{base.__name__} class"
    hint = f"; did you mean {near[0]!r}?" if near else f"; it has: {', '.join(known) or 'none'}"
    raise ClassNotLoaded(f"{module} has no {kind} {name!r}{hint}")


def _place(error: Exception) -> str:
    """Return ` (<file>:<line>)` of the line that raised, "" where it was Python's import itself."""
    if isinstance(error, SyntaxError) and error.filename:
        return f" ({Path(error.filename).name}:{error.lineno})"
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)[1:]  # the first one is ours
        if not frame.filename.startswith("<") and frame.filename != importlib.__file__
    ]
    return f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
