"""A program that moves one tensor: the server makes it, a client looks at each number of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from bbnode.components import ConnectedView, OpContext, OrtBackend, register_component
from bbnode.components.contracts import Codec
from bbnode.dsl import BackendSlot, CodecSlot, Graph, Module, PeerSelectorSlot, types
from bbnode.ir.types import TypeNode


@register_component
class Least(Codec):
    """Of a tensor the smallest number; takes no memory for it, as a backend may."""

    TYPE_NAME: ClassVar[str] = "test.Least"
    storage: ClassVar[Mapping[str, TypeNode]] = {"*": types.TENSOR_FLOAT}

    def encode(self, ctx: OpContext, tensor: Any) -> Any:
        return np.array([np.min(tensor)])

    def decode(self, ctx: OpContext, code: Any) -> Any:
        return code

    def train(self, ctx: OpContext, tensor: Any) -> None:
        """There is nothing to learn."""


class OneTensor(Module):
    """`answer` is the client's: the smallest of `size` float32 ones that it was sent."""

    home = "server"

    def __init__(self, *, size: int) -> None:
        self.size = size

    def body(self, g: Graph) -> None:
        tick = g.input("tick", types.TRIGGER)
        cohort = PeerSelectorSlot("cohort", peer_class="client").sample(g, n=1, after=tick)
        ones = BackendSlot("compute").ones(g, [self.size], after=cohort)
        r = g.request("take", cohort, ones, deadline=300.0)
        r.respond(CodecSlot("look").encode(g, r.received))
        g.output("answer", r.responses)

    def bindings(self) -> Mapping[str, Any]:
        return {"cohort": ConnectedView, "compute": OrtBackend, "look": Least}
