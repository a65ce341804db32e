"""Making instances of frozen dataclasses quickly.

Rule: only for classes without `__post_init__` that are made with every envelope; everything
else calls the class.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def maker(cls: type, *names: str) -> Callable[..., Any]:
    """Return a constructor by position for a frozen class with slots that is made all the time.

    The generated `__init__` sets each field through `object.__setattr__`, which takes five times
    as long as an assignment. So the instance is made as one of a twin, a class with the same slots
    that is not frozen, and becomes one of `cls` at the end, before anybody else has seen it. As
    dataclasses do, it is written out as source: a loop over the fields would take twice as long.
    """
    twin = type(f"_{cls.__name__}", (), {"__slots__": names})
    lines = [
        f"def make({', '.join(names)}):",
        "    made = twin()",
        *(f"    made.{name} = {name}" for name in names),
        "    made.__class__ = cls",
        "    return made",
    ]
    scope: dict[str, Any] = {"cls": cls, "twin": twin}
    exec("\n".join(lines), scope)  # names of fields, and nothing from outside
    make: Callable[..., Any] = scope["make"]
    return make
