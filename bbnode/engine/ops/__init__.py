"""Binders of all ops that the engine has, one file per family.

Rule: importing this package registers them; nothing else has to be told of a new family
than the import below.
"""

from __future__ import annotations

from bbnode.engine.ops import (
    books,
    casts,
    gates,
    joins,
    responses,
    searches,
    stores,
    syscalls,
    timing,
    wire,
)

__all__ = [
    "books",
    "casts",
    "gates",
    "joins",
    "responses",
    "searches",
    "stores",
    "syscalls",
    "timing",
    "wire",
]
