"""Arguments and steps that all programs of search share: the index, and what is asked of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeAlias

from bbnode.components import Index, concrete
from bbnode.components.indexes.searchers import METRICS
from bbnode.dsl import ConcreteSpec, Graph, IndexSlot, Output, types
from bbnode.programs.arguments import ReadyProgram
from bbnode.programs.training import component_of

Searches: TypeAlias = str | type[Index] | ConcreteSpec

SHOWN_INDEX = "bbnode.FlatIndex"


class RetrievalProgram(ReadyProgram):
    """Base of programs with an index in their slot "index".

    Its settings beside those of the program (`path`, who may search what) are each node's own.
    """

    index: Searches = SHOWN_INDEX  # an Index: a class, its TYPE_NAME, or `concrete(…)`
    metric: str = "l2"  # of the index: "l2", "ip" or "cosine"; of a `concrete(…)` it is its own
    k: int = 10  # hits of a search, for each query
    filtered: bool = False  # a search takes "where" too, a filter over the items' metadata

    @property
    def items(self) -> IndexSlot:
        """The slot of the index."""
        return IndexSlot("index", concrete=self._concrete_index)

    @property
    def _concrete_index(self) -> ConcreteSpec | None:
        """The index with its settings, where the program says some."""
        if isinstance(self.index, ConcreteSpec):
            return self.index
        if self.metric == "l2":
            return None
        kind = self._index_class
        has_one = any(each.name == "metric" for each in fields(kind.Config))
        self.require("metric", has_one, f"left out: {kind.TYPE_NAME} has no such setting")
        return concrete(kind, metric=self.metric)

    def question(self, g: Graph, home: str | None = None) -> tuple[Output, Output | None]:
        """Return the inputs of a search: "query", and "where" or None."""
        query = self.vectors(g, "query", home)
        where = g.input("where", types.METADATA, home=home) if self.filtered else None
        return query, where

    def vectors(self, g: Graph, name: str, home: str | None = None) -> Output:
        """Return the vectors that an input has, float32 [D] or [N, D]."""
        return g.input(name, types.TENSOR_FLOAT, home=home)

    def arriving(self, g: Graph, home: str | None = None) -> tuple[Output, Output]:
        """Return what is to be added: vectors, and their metadata, a MetadataVec."""
        vectors = self.vectors(g, "vectors", home)
        return vectors, g.input("metadata", types.METADATA_VEC, home=home)

    def filled_here(self, g: Graph, home: str | None = None, *, numbered: bool) -> None:
        """Record what the owner of an index does with it.

        Inputs "vectors" (float32 [D] or [N, D]), "metadata" (of each, a MetadataVec, or an empty
        one) and, if `numbered`, "ids" give the output "added", their ids; "remove" (ids) gives
        "removed", the same ids; "training" (float32 [N, D]) gives "trained" (CommandId).
        """
        vectors, metadata = self.arriving(g, home)
        ids = g.input("ids", types.TENSOR_INT64, home=home) if numbered else None
        g.output("added", self.items.add(g, vectors, metadata, ids))
        gone = g.input("remove", types.TENSOR_INT64, home=home)
        g.output("removed", gone, after=self.items.remove(g, gone))
        training = self.vectors(g, "training", home)
        g.output("trained", self.items.train(g, training))

    def bindings(self) -> Mapping[str, Any]:
        """Return the classes of the slots."""
        if self._concrete_index is not None:
            return super().bindings()
        return {**super().bindings(), "index": self._index_class}

    def check(self) -> None:
        """Check the arguments. Raises BadArgument."""
        self.require_counts(k=1)
        self.require_flags("filtered")
        self.require_one_of("metric", METRICS)
        _ = self._concrete_index, self._index_class

    def require_flags(self, *names: str) -> None:
        """Check that arguments are True or False."""
        for name in names:
            self.require(name, type(getattr(self, name)) is bool, "True or False")

    @property
    def _index_class(self) -> type[Index]:
        found: type[Index] = component_of(self, "index", Index, SHOWN_INDEX)
        return found
