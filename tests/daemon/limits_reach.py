"""Reaching limits: ways in which many tests come to a bound, and beyond it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from bbnode.components.errors import InvalidComponentConfig
from bbnode.components.registry import component_class


@dataclass(frozen=True)
class Place:
    """A folder of a test, and what it changes for its time."""

    folder: Path
    patch: pytest.MonkeyPatch

    def sparse(self, size: int, name: str = "large") -> Path:
        """Return a file of that many zero bytes, which take no room on the disk."""
        path = self.folder / name
        with path.open("wb") as file:
            file.truncate(size)
        return path


# Takes the value of a bound, and a Place where it wants one; may be asynchronous.
Reach: TypeAlias = Callable[..., Any]


def refusing(
    error: type[BaseException], act: Callable[[Any], Any], match: str | None = None
) -> Reach:
    """Return what acts with a bound, and is refused beyond it."""

    def reach(most: Any) -> None:
        act(most)
        with pytest.raises(error, match=match):
            act(most + 1)

    return reach


def refused(
    error: type[BaseException], act: Callable[[Any], Any], match: str | None = None
) -> Reach:
    """Return what acts beyond a bound alone, where the bound itself takes too much."""

    def reach(most: Any) -> None:
        with pytest.raises(error, match=match):
            act(most + 1)

    return reach


def refused_for(
    error: type[BaseException], act: Callable[[Any], Any], words: str
) -> Callable[[Any], None]:
    """Return what is refused at a bound for something else, and beyond it with these words."""

    def reach(most: Any) -> None:
        with pytest.raises(error) as within:
            act(most)
        assert words not in str(within.value)
        with pytest.raises(error, match=words):
            act(most + 1)

    return reach


def config(type_name: str, **fixed: Any) -> Callable[[str], Reach]:
    """Return what makes a component with a setting at its bound, and beyond it."""

    def of(field: str) -> Reach:
        def reach(most: Any) -> None:
            cls = component_class(f"bbnode.{type_name}")
            for value in (most, most + 1):
                wanted = cls.Config(**{**fixed, field: value})
                if value == most:
                    cls(wanted)
                    continue
                with pytest.raises(InvalidComponentConfig, match=field.split("_")[0]):
                    cls(wanted)

        return reach

    return of
