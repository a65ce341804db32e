"""Plugins of installed packages, discovered by their entry points.

Rule: a plugin is imported only when it is requested, and the error of a broken one names its
package. The installed packages are read once per process.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from functools import cache
from importlib.metadata import Distribution, EntryPoint, entry_points

from bbnode.ir.errors import DeploymentError
from bbnode.ir.interrupts import let_stop


class BrokenPlugin(DeploymentError):
    """A plugin of an installed package cannot be loaded."""

    def __init__(self, group: str, name: str, package: str, problem: str) -> None:
        self.group = group
        self.name = name
        self.package = package
        super().__init__(
            f"{name!r} of the entry points {group!r}, which the package {package} brings, can't be "
            f"loaded: {problem}"
        )


class UnknownPlugin(DeploymentError):
    """No installed package has an entry point of this name."""


def names(group: str) -> dict[str, str]:
    """Return the package of each plugin of a group, by the plugin's name, sorted."""
    return {name: _package(found[0]) for name, found in _installed(group).items()}


def load(group: str, name: str) -> object:
    """Import a plugin and return the module or object that its entry point names.

    Raises:
        UnknownPlugin: no installed package has a plugin of this name.
        BrokenPlugin: it cannot be imported, or two packages have one of this name.
    """
    entry_points_ = _installed(group).get(name)
    if entry_points_ is None:
        near = difflib.get_close_matches(name, _installed(group), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise UnknownPlugin(
            f"no installed package brings {name!r} of the entry points {group!r}{hint}"
        )
    packages = sorted({_package(entry) for entry in entry_points_})
    if len(packages) > 1:
        raise BrokenPlugin(
            group, name, " and ".join(packages), "both bring it; remove all but one of them"
        )
    try:
        return entry_points_[0].load()
    except BaseException as error:
        let_stop(error)
        raise BrokenPlugin(
            group, name, packages[0], f"{type(error).__name__}: {error}; mend or remove the package"
        ) from error


def rescan() -> None:
    """Read the installed packages again, for processes that install some themselves."""
    _read.cache_clear()
    _installed.cache_clear()
    _name_of.cache_clear()


@cache
def _installed(group: str) -> Mapping[str, tuple[EntryPoint, ...]]:
    found: dict[str, tuple[EntryPoint, ...]] = {}
    for entry in sorted(_read().select(group=group), key=lambda entry: entry.name):
        found[entry.name] = (*found.get(entry.name, ()), entry)
    return found


# Cached for all groups, since a read takes tens of milliseconds.
_read = cache(entry_points)


def _package(entry: EntryPoint) -> str:
    return _name_of(entry.dist) if entry.dist is not None else "(unknown)"


# Cached, since each access parses the package's metadata, including the README.
@cache
def _name_of(package: Distribution) -> str:
    return package.name
