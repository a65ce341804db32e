"""The empty table that nodes share, each until it has something to keep in its own.

Rule: many tables of a node stay empty for all of its life, and in a large simulation most nodes
rest. `EMPTY` can be read, popped from with a default and cleared as any dict; who adds the first
item puts a table of its own in the place of it.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, Final, NoReturn


class _Empty(OrderedDict[Any, Any]):
    """A table that nothing can be added to, in any way."""

    __slots__ = ()

    def __setitem__(self, key: Any, value: Any) -> NoReturn:
        raise TypeError("the empty table is shared; make one of its own before adding to it")


EMPTY: Final = _Empty()
