"""Types of values in models with ONNX Runtime's own ops, where ONNX's inference stops.

Rule: an op is typed only if its outputs are known to have the type of its first input; the values
of others stay untyped, and the compiler refuses them where it needs a type.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping, Sequence

from bbnode.ir import keys, types
from bbnode.ir.graph import OpNode, is_onnx_domain
from bbnode.ir.onnx_file import onnx_schema
from bbnode.ir.types import TypeNode

# Ops of `com.microsoft` whose outputs have the element type of the first input.
_AS_READ = frozenset(
    {"Attention", "BiasAdd", "BiasGelu", "BiasSplitGelu", "FastGelu", "FusedConv", "FusedGemm",
     "FusedMatMul", "Gelu", "GemmFastGelu", "GroupNorm", "GroupQueryAttention", "MatMulBnb4",
     "MatMulFpQ4", "MatMulNBits", "MultiHeadAttention", "NhwcFusedConv", "NhwcMaxPool",
     "PackedMultiHeadAttention", "QuickGelu", "RotaryEmbedding", "SkipGroupNorm",
     "SkipLayerNormalization", "SkipSimplifiedLayerNormalization", "TransposeMatMul", "Trilu"}
)  # fmt: skip


def completed_kinds(
    kinds: Mapping[str, TypeNode],
    weights: Mapping[str, TypeNode],
    nodes: Sequence[OpNode],
    opsets: Mapping[str, int],
) -> dict[str, TypeNode]:
    """Return the types of values, extended through ops that ONNX does not know.

    Args:
        kinds: the types that ONNX inferred.
        weights: types of the initializers.
        nodes: in topological order.
        opsets: version by domain.
    """
    completed = dict(kinds)
    if all(node.domain != keys.RUNTIME_DOMAIN for node in nodes):
        return completed
    for node in nodes:
        for index, name in enumerate(node.outputs):
            known = ChainMap(completed, weights)  # type: ignore[arg-type]  # the second is only read
            kind = None if name in completed else _made(node, index, known, opsets)
            if kind is not None:
                completed[name] = kind
    return completed


def _made(
    node: OpNode, index: int, known: Mapping[str, TypeNode], opsets: Mapping[str, int]
) -> TypeNode | None:
    if node.domain == keys.RUNTIME_DOMAIN:
        return known.get(node.inputs[0]) if node.op_type in _AS_READ and node.inputs else None
    to = node.attr("to")
    if isinstance(to, int):
        return types.TENSOR_BY_ELEM.get(to)
    domain = "" if is_onnx_domain(node.domain) else node.domain
    schema = onnx_schema(node.op_type, opsets.get(domain, 0), domain)
    if schema is None or not schema.outputs:
        return None
    type_text = schema.outputs[min(index, len(schema.outputs) - 1)].type_str
    for at, name in enumerate(node.inputs):
        formal = schema.inputs[min(at, len(schema.inputs) - 1)]
        if formal.type_str == type_text and name in known:
            return known[name]
    elem = type_text.removeprefix("tensor(").removesuffix(")").upper()
    return types.type_by_id(f"{types.TENSOR.id}.{elem}")
