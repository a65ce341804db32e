"""The op Cast of the types domain.

Rule: a value that is of the wanted type already passes unchanged; a tensor becomes a tensor of
another element type as by ONNX's Cast (floats truncate towards zero, anything but
zero is true); there is no other conversion.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from onnx import TensorProto
from onnx.numpy_helper import saturate_cast

from bbnode.engine.errors import CastRefused
from bbnode.engine.frame import Frame
from bbnode.engine.ops.build import Fire, OpBuild, binds
from bbnode.ir import keys, types
from bbnode.ir.types import TypeKind
from bbnode.ir.values import dtype_of, type_of

# ONNX's Cast to these ends at their largest number, where numpy's gives NaN.
_SATURATE = frozenset(
    {TensorProto.FLOAT8E4M3FN, TensorProto.FLOAT8E4M3FNUZ, TensorProto.FLOAT8E5M2,
     TensorProto.FLOAT8E5M2FNUZ}
)  # fmt: skip


@binds(keys.TYPES_DOMAIN, "Cast")
def _cast(build: OpBuild) -> Fire:
    build.arity(1, 1)
    (source,) = build.inputs
    wanted = build.attr_text("to")
    node = types.type_by_id(wanted)
    if node is None:
        raise build.wrong(f"names the type {wanted!r}, which is not known here")
    is_number = node.kind is TypeKind.TENSOR and node is not types.TENSOR_STRING
    dtype = dtype_of(node) if is_number else None
    name = build.flat.name

    def fire(frame: Frame) -> Any:
        value = frame.values[source]
        actual = type_of(value)
        if actual.is_a(node):
            return value
        is_text = actual is types.TENSOR_STRING
        if dtype is None or is_text or actual.kind is not TypeKind.TENSOR:
            raise CastRefused(
                f"{name}: {actual.name} can't become {node.name}; only numbers convert to tensors "
                "of another element type"
            )
        # Out of range is whatever the machine makes of it, as in ONNX; it is no failure.
        with np.errstate(invalid="ignore", over="ignore"):
            given = np.asarray(value)
            if actual.elem_type in types.BITS_OF_ELEM:  # numpy casts none to another
                given = given.astype(np.float32)
            made = (
                saturate_cast(given, dtype) if node.elem_type in _SATURATE else given.astype(dtype)
            )
        made.flags.writeable = False
        return made

    return fire
