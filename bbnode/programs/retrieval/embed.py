"""Search for texts by texts: an encoder makes vectors of both."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, TypeAlias

from bbnode.components import ConnectedView, Model, OrtBackend
from bbnode.dsl import (
    ConcreteSpec,
    Graph,
    ModelSlot,
    Output,
    PeerSelectorSlot,
    ResultsOutput,
    types,
)
from bbnode.programs.retrieval.sharded import ShardedSearch
from bbnode.programs.training import component_of

Encodes: TypeAlias = str | type[Model] | ConcreteSpec

TEXT: Final = "text"  # the entry of an item's metadata that holds its text
_SHOWN: Final = "bbnode.TextEncoder"


class EmbedAndSearch(ShardedSearch):
    """A `ShardedSearch` of texts, which peers of the class `encoder` make vectors of.

    Input "query" (a text, or texts [Q]) at an asker gives "results" (SearchResults), "passages"
    (texts [hits]: those of all hits, row by row) and "missing". Each shard keeps texts of its own:
    its inputs "texts" (texts [] or [N]) and "metadata" (a MetadataVec: of each, or of none) add
    them, and the text itself is the entry "text" of an item's metadata; "training" takes texts,
    too. All else is as in a `ShardedSearch`: with `replicas`, texts are the asker's.

    Whoever encodes reads the texts. With `encoder=""` each node does it itself: then a text leaves
    its shard as a hit alone, and the text of a query stays at the asker. With the class of the
    askers these encode their own queries, and the shards' texts. Else it is one of the connected
    peers of that class, drawn at random for each input, who is waited for as long as for shards.

    The slot "encoder" is configured on each node that encodes: `model` is the folder of its
    encoder, which has to be the same everywhere.
    """

    encoder: str = "encoder"  # the class of those who encode; "": everybody encodes for themselves
    model: Encodes = _SHOWN  # what encodes: a Model whose forward takes texts

    def found(self, g: Graph, results: ResultsOutput) -> None:
        """Record the outputs of a search, with the texts of its hits."""
        super().found(g, results)
        g.output("passages", results.entry(TEXT))

    def vectors(self, g: Graph, name: str, home: str | None = None) -> Output:
        """Return the vectors of the texts that an input has."""
        return self._encoded(g, name, g.input(name, types.TENSOR_STRING, home=home), home)

    def arriving(self, g: Graph, home: str | None = None) -> tuple[Output, Output]:
        """Return the vectors of texts, and their metadata with the texts among it."""
        texts = g.input("texts", types.TENSOR_STRING, home=home)
        metadata = g.input("metadata", types.METADATA_VEC, home=home)
        vectors = self._encoded(g, "texts", texts, home)
        return vectors, g.with_entry(metadata, TEXT, texts)

    def _encoded(self, g: Graph, name: str, texts: Output, home: str | None) -> Output:
        given = self.model
        encoder = ModelSlot("encoder", concrete=given if isinstance(given, ConcreteSpec) else None)
        if self.encoder in ("", home or self.home):
            return encoder.forward(g, texts)
        peers = PeerSelectorSlot("encoders", peer_class=self.encoder, include_self=True)
        one = peers.sample(g, n=1, after=texts)
        asked = g.request(f"embed_{name}", one, texts, quorum=1, deadline=float(self.deadline_s))
        asked.respond(encoder.forward(g, asked.received))
        return asked.responses.concatenated()

    def bindings(self) -> Mapping[str, Any]:
        """Return the classes of the slots."""
        bound = {**super().bindings(), "compute": OrtBackend}
        if not isinstance(self.model, ConcreteSpec):
            bound["encoder"] = self._model_class
        homes = {self.asker} if self.replicas else {self.asker, self.shard}
        asks = self.encoder and homes - {self.encoder}
        return {**bound, "encoders": ConnectedView} if asks else bound

    @property
    def _model_class(self) -> type[Model]:
        found: type[Model] = component_of(self, "model", Model, _SHOWN)
        return found

    def check(self) -> None:
        """Check the arguments. Raises BadArgument."""
        super().check()
        self.require("encoder", isinstance(self.encoder, str), 'a class of peers, or ""')
        _ = self._model_class
