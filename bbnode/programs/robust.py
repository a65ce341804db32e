"""Federated training in which the server trusts clients by a training of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bbnode.components import FLTrust
from bbnode.dsl import BackendSlot, Graph, Output, Request
from bbnode.programs.federated import Combines, FederatedTraining
from bbnode.programs.strategies.topologies import HierarchicalTraining
from bbnode.programs.training import TRAIN_SLOT


@dataclass(kw_only=True, eq=False)
class FLTrustTraining(FederatedTraining):
    """FLTrust (Cao et al., 2021, arXiv:2012.13995, algorithm 2): any number of clients may lie.

    The server trains as clients do, on a few examples that it trusts, in its own slot "data"; each
    client's change of the weights counts as far as it points the way of the server's own, and has
    its length. "stats" says how many were `trusted`.
    """

    aggregator: Combines = FLTrust
    deltas: bool = True

    def combined(self, g: Graph, asked: Request) -> tuple[Output, Output]:
        """Train on the server, and combine what the clients answered with that."""
        slot, model = self.aggregator_slot(), self.trained_model("root")
        weights = self.server_model.params(g)
        model.load_parameters(g, weights)
        trained = model.train(g, epochs=self.epochs, batch=self.batch)
        own = BackendSlot("compute").sub(g, model.params(g), weights)
        slot.contribute(g, own, trained)
        slot.contribute_all(g, asked.responses)
        return slot.aggregate(g)

    def bindings(self) -> Mapping[str, Any]:
        """Return the classes of the slots; the server has "data" too."""
        return {**super().bindings(), TRAIN_SLOT: self.source}

    def check(self) -> None:
        """Check the arguments. Raises BadArgument."""
        super().check()
        self.require("evaluate", not self.holds_out, "'server' or 'none'")
        good = issubclass(self._aggregator_class, FLTrust)
        self.require("aggregator", good, "FLTrust, or concrete(FLTrust, …)")
        if self.answer_size != self.size:
            raise self.bad(
                f"clients answer {self.answer_size} numbers, and the server's own training is a "
                f"move of all {self.size} weights, to which no such answer compares; leave FLTrust "
                "or the other strategy out"
            )
        if isinstance(self, HierarchicalTraining):
            raise self.bad("edges train nothing of their own to trust others by; leave one out")
