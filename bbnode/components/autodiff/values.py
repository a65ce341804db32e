"""What shape inference knows about the values of a forward graph.

Rule: unknown is a first-class answer (None); nothing here guesses.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import onnx
from onnx import ModelProto, TypeProto

# A dimension: its size, its symbol ("batch"), or None where inference could not tell.
Dim: TypeAlias = int | str | None
Dims: TypeAlias = tuple[Dim, ...]

_FLOATS = frozenset(
    {
        int(onnx.TensorProto.FLOAT),
        int(onnx.TensorProto.DOUBLE),
        int(onnx.TensorProto.FLOAT16),
        int(onnx.TensorProto.BFLOAT16),
    }
)


@dataclass(frozen=True, slots=True)
class ValueType:
    """Element type (ONNX number, 0 when unknown) and dimensions (None: rank unknown)."""

    elem_type: int
    dims: Dims | None


UNKNOWN = ValueType(0, None)


def is_float(elem_type: int) -> bool:
    """Whether values of this ONNX element type can carry a gradient."""
    return elem_type in _FLOATS


def value_types(model: ModelProto) -> dict[str, ValueType]:
    """Types of all inputs, initializers and intermediate values of `model.graph`."""
    inferred = onnx.shape_inference.infer_shapes(model, data_prop=True).graph
    types: dict[str, ValueType] = {}
    for tensor in inferred.initializer:
        types[tensor.name] = ValueType(int(tensor.data_type), tuple(tensor.dims))
    for info in (*inferred.input, *inferred.output, *inferred.value_info):
        if info.type.HasField("tensor_type"):
            types[info.name] = _from_tensor(info.type.tensor_type)
    return types


def _from_tensor(tensor: TypeProto.Tensor) -> ValueType:
    if not tensor.HasField("shape"):
        return ValueType(int(tensor.elem_type), None)
    dims: list[Dim] = []
    for dim in tensor.shape.dim:
        if dim.HasField("dim_value"):
            dims.append(int(dim.dim_value))
        elif dim.HasField("dim_param") and dim.dim_param:
            dims.append(dim.dim_param)
        else:
            dims.append(None)
    return ValueType(int(tensor.elem_type), tuple(dims))
