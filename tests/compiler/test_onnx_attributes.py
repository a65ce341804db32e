"""Attributes of ONNX's ops are checked against ONNX's own schemas before anything is compiled."""

from __future__ import annotations

import pytest
from onnx import AttributeProto, NodeProto, helper

from bbnode.compiler import Compiler
from bbnode.compiler.errors import ExpansionFailed
from bbnode.components import OrtBackend
from bbnode.dsl import BackendSlot, Graph, Module, types


class Sum(Module):
    def body(self, g: Graph) -> None:
        x = g.input("x", types.TENSOR_FLOAT)
        g.output("y", BackendSlot("compute").op(g, "ReduceSum", x, keepdims=0))


def damaged(attribute: AttributeProto) -> NodeProto:
    model = Sum().build()
    (node,) = [n for n in model.functions[0].node if n.op_type == "ReduceSum"]
    del node.attribute[:]
    node.attribute.append(attribute)
    Compiler().bind_backend("compute", OrtBackend).compile(model)
    return node


def test_a_sound_attribute_compiles() -> None:
    assert damaged(helper.make_attribute("keepdims", 1)).op_type == "ReduceSum"


@pytest.mark.parametrize(
    ("attribute", "reason"),
    [
        (
            helper.make_attribute("jeepdims", 0),
            r"no attribute 'jeepdims'; there is: keepdims, noop",
        ),
        (helper.make_attribute("keepdims", "yes"), r"'keepdims' is STRING and has to be INT"),
        (helper.make_attribute("keepdims", [1, 2]), r"'keepdims' is INTS"),
    ],
)
def test_others_are_named(attribute: AttributeProto, reason: str) -> None:
    with pytest.raises(ExpansionFailed, match=reason) as caught:
        damaged(attribute)
    assert caught.value.op_type == "ReduceSum"
