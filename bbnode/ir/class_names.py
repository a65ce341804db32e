"""The lookup of classes and functions named in settings: `package.module:Name`, `file.py:Name`.

Rule: a missing module is a wrong name; an exception during its import is the fault of the module,
and the error gives the location.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar, cast

from bbnode.ir.authors_code import AuthorsCodeFailed
from bbnode.ir.errors import BbnodeError, DeploymentError

Named = TypeVar("Named")


class ClassNotLoaded(DeploymentError):
    """A module can't be imported, or has no such class or function."""


def load_class(module: str, name: str, base: type[Named]) -> type[Named]:
    """Import a module and return a class derived from `base`, by name.

    The current directory is searched as well, as by `python -m`. Raises ClassNotLoaded, and
    AuthorsCodeFailed for an exception of the module.
    """
    return _class_in(load_module_named(module), name, base)


def load_module_named(module: str) -> ModuleType:
    """Import a module, also from the current directory. Raises ClassNotLoaded."""
    search(Path.cwd())
    return _imported(module)


def load_from_file(path: Path, name: str, base: type[Named]) -> type[Named]:
    """Import a Python file under its module name, and return its class, as `load_class` does.

    A file of a package keeps its dotted name. `name` may be "" if the file defines exactly one
    class derived from `base`. Raises ClassNotLoaded, AuthorsCodeFailed.
    """
    module = _imported_file(path)
    if name:
        return _class_in(module, name, base)
    own = [n for n in _classes(module, base) if getattr(module, n).__module__ == module.__name__]
    if len(own) != 1:
        known = ", ".join(own) or "none"
        raise ClassNotLoaded(
            f"{path} does not define exactly one {base.__name__} class (it has: {known}); say "
            f"which, as {path}:Class"
        )
    return _class_in(module, own[0], base)


def load_function(target: str) -> Callable[..., Any]:
    """Return the function with the name `package.module:name` or `folder/file.py:name`.

    The current directory is searched as well. Raises ClassNotLoaded.
    """
    where, _, name = target.rpartition(":")
    if where.endswith(".py"):
        module = _imported_file(Path(where))
    else:
        search(Path.cwd())
        module = _imported(where)
    candidate = getattr(module, name, None)
    if not callable(candidate):
        known = sorted(key for key, value in vars(module).items() if callable(value))
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ClassNotLoaded(f"{where} has no function {name!r}{hint}")
    return cast(Callable[..., Any], candidate)


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
    loaded = _imported(module)
    origin = getattr(loaded, "__file__", None)
    if origin is None or not file.samefile(origin):
        raise ClassNotLoaded(
            f"{path}: the name {module!r} belongs to another module"
            f"{f' ({origin})' if origin else ''}; rename the file"
        )
    return loaded


def _imported(module: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise AuthorsCodeFailed(f"{module} can't be imported", error) from error
        raise ClassNotLoaded(
            f"{module} can't be imported: there is no module {error.name!r}; install it, or start "
            "bbnode in the directory that holds it"
        ) from error
    except BbnodeError:
        raise
    except Exception as error:
        raise AuthorsCodeFailed(f"{module} can't be imported", error) from error


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
