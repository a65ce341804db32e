"""`FlatIndex`: exact search."""

from __future__ import annotations

from typing import ClassVar

from bbnode.components.indexes.base import VectorIndex
from bbnode.components.indexes.exact import FlatSearcher
from bbnode.components.indexes.searchers import Searcher
from bbnode.components.registry import register_component


@register_component
class FlatIndex(VectorIndex):
    """Compares a query with every item; its settings are those of every index.

    Takes no training, and no memory but the vectors. A search takes time with the number of items.
    """

    TYPE_NAME: ClassVar[str] = "bbnode.FlatIndex"

    def make_searcher(self) -> Searcher:
        """Return an exact searcher."""
        return FlatSearcher()
