"""A small program for tests of commands: the server asks, a client echoes, or answers from data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bbnode.components import ArrayDataSource, ConnectedView
from bbnode.dsl import DataSourceSlot, Graph, Module, PeerSelectorSlot, types


@dataclass(kw_only=True, eq=False)
class Ask(Module):
    """`data`: the clients answer with a batch of their own."""

    home = "server"
    data: bool = False

    def body(self, g: Graph) -> None:
        question = g.input("question", types.TENSOR_FLOAT)
        peers = PeerSelectorSlot("who", peer_class="client").sample(g, n=1, after=question)
        r = g.request("ask", peers, question, deadline=60.0)
        answer = r.received
        if self.data:
            answer, _ = DataSourceSlot("data").next_batch(g, after=r.received)
            answer = g.expect(answer, types.TENSOR_FLOAT)
        r.respond(answer)
        g.output("answers", r.responses)

    def bindings(self) -> Mapping[str, Any]:
        found: dict[str, Any] = {"who": ConnectedView}
        return {**found, "data": ArrayDataSource} if self.data else found
