"""Projects to begin with: what `bbnode new` writes.

Rule: a project is written whole or not at all, never over something that is there; its name can
be a Python package on every system, and hides no module.
"""

from __future__ import annotations

import importlib.util
import keyword
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path

from bbnode.ir.errors import DeploymentError, EnvironmentFault

TEMPLATES = {
    "federated": "a server, and clients that train on data that they keep",
    "pipeline": "a model in stages, each on a class of peer of its own",
    "gossip": "peers without a server that train and average with each other",
}

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,63}")
_SUFFIX = ".in"  # of all files of a template, which are no Python before their names are set
_PACKAGE_FOLDER = "package_name"
_HIDDEN = {"gitignore": ".gitignore"}  # not hidden among our own files
# Files that Windows can't have, with whatever suffix.
_DEVICES = frozenset({"con", "prn", "aux", "nul"}) | {
    f"{device}{number}" for device in ("com", "lpt") for number in range(10)
}
# Folders of a project.
_TAKEN = frozenset({"tests", "test", "data"})


class ProjectNameRefused(DeploymentError):
    """A project can't have this name."""


class FolderTaken(DeploymentError):
    """There is something where the project would be."""


class FolderNotWritten(EnvironmentFault):
    """This machine denied the folder."""


def package_name(name: str) -> str:
    """Return the Python package of a project. Raises ProjectNameRefused."""
    if not _NAME.fullmatch(name):
        raise ProjectNameRefused(
            f"{name!r:.80} can't be the name of a project; use up to 64 letters (a-z), digits, "
            "'-' and '_', a letter first, as in my-training"
        )
    package = name.lower().replace("-", "_")
    why = ""
    if keyword.iskeyword(package) or keyword.issoftkeyword(package):
        why = "is a word of Python"
    elif package in _DEVICES:
        why = "is a device on Windows"
    elif package in _TAKEN:
        why = "is the name of a folder of every project"
    elif package in sys.stdlib_module_names:
        why = "is a module of Python, which it would hide"
    elif (found := importlib.util.find_spec(package)) is not None and found.origin is not None:
        why = "is a module that is installed here, which it would hide"
    if why:
        raise ProjectNameRefused(f"the name {name!r} {why}; take another, my-{name} say")
    return package


def write_project(folder: Path, template: str) -> list[Path]:
    """Write a project and return its files, relative to the folder, sorted.

    The last part of the path is the project's name; the folder may be there if it is empty.
    Raises ProjectNameRefused, FolderTaken, FolderNotWritten.
    """
    # Not resolved: a link that leads nowhere is something that is there.
    place = Path(os.path.abspath(folder.expanduser()))  # noqa: PTH100
    try:
        _check_free(place)
        package = package_name(place.name)
        texts = dict(_files(template, place.name, package))
        place.parent.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix=".bbnode-new-", dir=place.parent))
        try:
            for path, text in texts.items():
                (made / path).parent.mkdir(parents=True, exist_ok=True)
                (made / path).write_text(text, encoding="utf-8")
            made.chmod(0o777 & ~_umask())
            made.rename(place)
        finally:
            shutil.rmtree(made, ignore_errors=True)
    except OSError as error:
        raise FolderNotWritten(
            f"{str(place)!r} can't be written: {error.strerror or error}"
        ) from error
    return sorted(texts)


def _check_free(place: Path) -> None:
    if place.is_symlink() or (place.exists() and not place.is_dir()):
        raise FolderTaken(f"{str(place)!r} is there and is no folder; take another name")
    if place.is_dir() and any(place.iterdir()):
        raise FolderTaken(
            f"{str(place)!r} is there and is not empty; take another name, or empty it"
        )


def _files(template: str, name: str, package: str) -> Iterator[tuple[Path, str]]:
    from bbnode import __version__

    names = {
        "@package@": package,
        "@name@": name,
        "@title@": name.replace("-", " ").replace("_", " ").capitalize(),
        "@version@": __version__,
    }
    for path, entry in _walked(resources.files(__package__) / template, Path()):
        text = entry.read_text(encoding="utf-8")
        for mark, value in names.items():
            text = text.replace(mark, value)
        yield Path(*(package if part == _PACKAGE_FOLDER else part for part in path.parts)), text


def _walked(folder: Traversable, at: Path) -> Iterator[tuple[Path, Traversable]]:
    for entry in sorted(folder.iterdir(), key=lambda each: each.name):
        if entry.is_dir():
            yield from _walked(entry, at / entry.name)
        elif entry.name.endswith(_SUFFIX):
            name = entry.name.removesuffix(_SUFFIX)
            yield at / _HIDDEN.get(name, name), entry


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
