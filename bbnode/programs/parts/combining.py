"""Rules of the server against clients that lie."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import bbnode.components as components
from bbnode.components import Aggregator, FLTrust, concrete
from bbnode.dsl import BackendSlot, ConcreteSpec, Graph, Output, Request
from bbnode.programs.composing import ArgumentChecks, Inner
from bbnode.programs.parts.plain import Aggregated, Combine, Combines
from bbnode.programs.training import TRAIN_SLOT

if TYPE_CHECKING:
    from bbnode.programs.federated import FederatedTraining


class _Rule(Combine):
    """An aggregator whose settings are those of the part."""

    of: ClassVar[type[Aggregator]]

    @property
    def rule(self) -> ConcreteSpec:
        """The aggregator, with the settings that are not its defaults."""
        own = self.settings().keys() - Combine.settings().keys()
        given = {each: getattr(self, each) for each in sorted(own)}
        plain = type(self).settings()
        return concrete(self.of, **{n: v for n, v in given.items() if v != plain[n]} or {})


def _rule(of: type[Aggregator]) -> Any:
    """Return the part of an aggregator, which has its settings but for sizes and room."""
    needed = {"shape", "max_contributors"}
    settings = [
        (each.name, each.type, dataclasses.field(default=each.default))
        for each in dataclasses.fields(of.Config)
        if each.name not in needed
    ]
    moves = {"wishes": {"deltas": True}} if getattr(of, "of_deltas", False) else {}
    named = {"__module__": __name__, "__doc__": of.__doc__, "of": of, **moves}
    return dataclasses.make_dataclass(
        of.__name__, settings, bases=(_Rule,), namespace=named, frozen=True
    )


Bulyan, GeometricMedian, Krum, Median, MultiKrum, NormClipping, TrimmedMean = (
    _rule(each)
    for each in (
        components.Bulyan, components.GeometricMedian, components.Krum, components.Median,
        components.MultiKrum, components.NormClipping, components.TrimmedMean,
    )
)  # fmt: skip


@dataclass(frozen=True)
class Trusted(Aggregated):
    """FLTrust (Cao et al., 2021, arXiv:2012.13995, algorithm 2): any number of clients may lie.

    The server trains as clients do, on a few examples that it trusts, in its own slot "data"; each
    client's change of the weights counts as far as it points the way of the server's own, and has
    its length. "stats" says how many were `trusted`.
    """

    changes: ClassVar[frozenset[str]] = frozenset({"rule", "root"})
    claims: ClassVar[tuple[str, ...]] = ("combined", "gathered")
    wishes: ClassVar[Mapping[str, Any]] = {"deltas": True}

    aggregator: Combines = FLTrust

    @property
    def refuses(self) -> Mapping[str, str]:  # type: ignore[override]
        """Return answers that are no moves of all weights."""
        other = "the server's own training is a move of all weights, to which no other compares"
        return {**super().refuses, "answer": other}

    def combined(
        self, p: FederatedTraining, _: Inner, g: Graph, asked: Request
    ) -> tuple[Output, Output]:
        """Train on the server, and combine what the clients answered with that."""
        slot, model = p.aggregator_slot(), p.trained_model("root")
        weights = p.server_model.params(g)
        model.load_parameters(g, weights)
        trained = model.train(g, epochs=p.epochs, batch=p.batch)
        own = BackendSlot("compute").sub(g, model.params(g), weights)
        slot.contribute(g, own, trained)
        slot.contribute_all(g, asked.responses)
        return slot.aggregate(g)

    def bindings(self, p: FederatedTraining, inner: Inner) -> Mapping[str, Any]:
        """Return the classes of the slots; the server has "data" too."""
        return {**inner(), TRAIN_SLOT: p.source}

    def check(self, program: Any, own: ArgumentChecks) -> None:
        """Check the settings. Raises BadArgument."""
        super().check(program, own)
        program.require("evaluate", not program.holds_out, "'server' or 'none'")
        good = issubclass(self.taken(program), FLTrust)
        own.require("aggregator", good, "FLTrust, or concrete(FLTrust, …)")
