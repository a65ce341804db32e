"""Classes and functions that a setting names: `package.module:Name`, or `folder/file.py:Name`.

Rule: the module is somebody else's code, which may raise anything when it is imported; whatever it
is becomes one typed error that says where.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar, cast

from bbnode.ir.errors import DeploymentError

Named = TypeVar("Named")

_MAX_TEXT = 400  # characters of what a module raised


class ClassNotLoaded(DeploymentError):
    """A module can't be imported, or has no such class or function."""


def load_class(module: str, name: str, base: type[Named]) -> type[Named]:
    """Import a module and return its class of that name, one that derives from `base`.

    The current directory is searched as well, as `python -m` would. Raises ClassNotLoaded.
    """
    return _class_in(load_module_named(module), name, base)


def load_module_named(module: str) -> ModuleType:
    """Import a module, that of a file in the current directory too. Raises ClassNotLoaded."""
    search(Path.cwd())
    return _imported(module)


def load_from_file(path: Path, name: str, base: type[Named]) -> type[Named]:
    """Import a Python file as the module that it is, and return its class, as `load_class` does.

    A file of a package keeps its dotted name. `name` may be "" where the file defines exactly one
    class that derives from `base`. Raises ClassNotLoaded.
    """
    found = _imported_file(path)
    if name:
        return _class_in(found, name, base)
    own = [n for n in _classes(found, base) if getattr(found, n).__module__ == found.__name__]
    if len(own) != 1:
        known = ", ".join(own) or "none"
        raise ClassNotLoaded(
            f"{path} does not define exactly one {base.__name__} class (it has: {known}); say "
            f"which, as {path}:Class"
        )
    return _class_in(found, own[0], base)


def load_function(target: str) -> Callable[..., Any]:
    """Return the function that `package.module:name` or `folder/file.py:name` names.

    The current directory is searched as well. Raises ClassNotLoaded.
    """
    where, _, name = target.rpartition(":")
    if where.endswith(".py"):
        module = _imported_file(Path(where))
    else:
        search(Path.cwd())
        module = _imported(where)
    found = getattr(module, name, None)
    if not callable(found):
        known = sorted(key for key, value in vars(module).items() if callable(value))
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ClassNotLoaded(f"{where} has no function {name!r}{hint}")
    return cast(Callable[..., Any], found)


def _imported_file(path: Path) -> ModuleType:
    file = path.expanduser().absolute()
    if not file.is_file():
        raise ClassNotLoaded(f"{path}: no such file; the directory is {Path.cwd()}")
    folder, module = file.parent, file.stem
    while (folder / "__init__.py").exists():
        folder, module = folder.parent, f"{folder.name}.{module}"
    if not all(part.isidentifier() for part in module.split(".")):
        raise ClassNotLoaded(f"{path}: {module!r} is no name of a Python module; rename the file")
    search(folder)
    found = _imported(module)
    origin = getattr(found, "__file__", None)
    if origin is None or not file.samefile(origin):
        raise ClassNotLoaded(
            f"{path}: the name {module!r} belongs to another module"
            f"{f' ({origin})' if origin else ''}; rename the file"
        )
    return found


def _imported(module: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except Exception as error:
        raise ClassNotLoaded(
            f"{module} can't be imported: {type(error).__name__}: {error!s:.{_MAX_TEXT}}"
            f"{_place(error)}; install it, start bbnode in the directory that holds it, or mend it"
        ) from error


def _class_in(module: ModuleType, name: str, base: type[Named]) -> type[Named]:
    cls = getattr(module, name, None)
    if inspect.isclass(cls) and issubclass(cls, base):
        return cls
    known = sorted(_classes(module, base))
    near = difflib.get_close_matches(name, known, n=1)
    kind = "class" if base is object else f"{base.__name__} class"
    hint = f"; did you mean {near[0]!r}?" if near else f"; it has: {', '.join(known) or 'none'}"
    raise ClassNotLoaded(f"{module.__name__} has no {kind} {name!r}{hint}")


def _classes(module: ModuleType, base: type[object]) -> list[str]:
    return [
        each
        for each, value in vars(module).items()
        if inspect.isclass(value) and issubclass(value, base) and value is not base
    ]


def search(folder: Path) -> None:
    """Make the modules of a folder importable."""
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


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
