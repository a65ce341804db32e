"""One node that keeps vectors, and searches them."""

from __future__ import annotations

from bbnode.dsl import Graph, types
from bbnode.programs.retrieval.base import RetrievalProgram


class VectorStore(RetrievalProgram):
    """An index on one node, of class "store".

    Input "query" (float32 [D], or [Q, D]) gives the output "results" (SearchResults): the `k`
    nearest to each query. With `filtered`, "where" (a Metadata) says which items count.

    Inputs "vectors" (float32 [D] or [N, D]) and "metadata" (a MetadataVec: of each one, or of none)
    add items, with `numbered` under "ids" (int64 [] or [N]) of one's own; output "added" is their
    ids. "remove" (ids) forgets items; output "removed". "training" (float32 [N, D]) fits an index
    that has to be trained before it is filled, and so does the bootstrap's input "seed_corpus".
    """

    home = "store"

    numbered: bool = False  # who adds items gives their ids

    def bootstrap(self, g: Graph) -> None:
        """Record the training of the index on "seed_corpus", float32 [N, D]."""
        self.items.train(g, g.input("seed_corpus", types.TENSOR_FLOAT))

    def body(self, g: Graph) -> None:
        """Record search, addition and removal."""
        self.check()
        query, where = self.question(g)
        g.output("results", self.items.search(g, query, where, k=self.k))
        self.filled_here(g, numbered=self.numbered)

    def check(self) -> None:
        """Check the arguments. Raises BadArgument."""
        super().check()
        self.require_flags("numbered")
