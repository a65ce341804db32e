"""Mixed precision: matrix products and convolutions in float16, all else as it is.

Rule: what is added up over many elements (normalization, softmax, the loss, the step) stays in
float32, and so do parameters; the casts are nodes of the graph, and their gradients casts back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from onnx import NodeProto, TensorProto, helper

from bbnode.components.autodiff.builder import GraphBuilder, InferredType
from bbnode.ir.graph import is_onnx_domain

# Ops whose time is that of products, which accelerators have units for.
_PRODUCTS = frozenset({"MatMul", "Gemm", "Conv", "ConvTranspose"})
_FLOAT, _HALF = int(TensorProto.FLOAT), int(TensorProto.FLOAT16)


def in_half_precision(
    nodes: Sequence[NodeProto], types: Mapping[str, InferredType], b: GraphBuilder
) -> list[NodeProto]:
    """Return the nodes with every float32 product between casts to float16 and back."""
    made: list[NodeProto] = []
    for node in nodes:
        names = [name for name in node.input if name]
        known = all(name in types and types[name].elem_type == _FLOAT for name in names)
        if not (known and is_onnx_domain(node.domain) and node.op_type in _PRODUCTS):
            made.append(node)
            continue
        halved = [b.op("Cast", name, to=_HALF) if name else "" for name in node.input]
        made += b.take()
        product = NodeProto()
        product.CopyFrom(node)
        output = b.fresh(f"{node.output[0]}/half")
        product.input[:], product.output[:] = halved, [output]
        made += [product, helper.make_node("Cast", [output], [node.output[0]], to=_FLOAT)]
    return made
