"""Making instances of frozen dataclasses quickly.

Rule: only for classes without `__post_init__` that are made with every envelope; everything
else calls the class.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def maker(cls: type, *names: str) -> Callable[..., Any]:
    """A constructor by position for a frozen class, for what is made with every envelope.

    The generated `__init__` sets each field through `object.__setattr__`, which takes four times
    as long as the slots' own descriptors.
    """
    setters = tuple(getattr(cls, name).__set__ for name in names)
    new: Callable[[type], Any] = object.__new__

    def make(*values: Any) -> Any:
        made = new(cls)
        for setter, value in zip(setters, values, strict=True):
            setter(made, value)
        return made

    return make
