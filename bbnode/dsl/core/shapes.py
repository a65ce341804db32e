"""Shapes and denotations, as an author declares them.

Rule: denotations are spelled as in ONNX's DimensionDenotation.md and TypeDenotation.md.
"""

from __future__ import annotations

from collections.abc import Sequence

from bbnode.dsl.core.names import check_name, hint
from bbnode.dsl.errors import BadArgument
from bbnode.ir import types
from bbnode.ir.graph import ValueType
from bbnode.ir.shapes import MAX_AXES, Dim
from bbnode.ir.types import TypeKind, TypeNode

MAX_LENGTH = (1 << 63) - 1  # ONNX's dim_value is an int64

TYPE_DENOTATIONS = ("TENSOR", "IMAGE", "AUDIO", "TEXT")
AXIS_DENOTATIONS = (
    "DATA_BATCH", "DATA_CHANNEL", "DATA_TIME", "DATA_FEATURE", "FILTER_IN_CHANNEL",
    "FILTER_OUT_CHANNEL", "FILTER_SPATIAL",
)  # fmt: skip

# The argument `shape=`: a length, a name, or None for each axis.
Shape = Sequence[Dim]


def declared_type(
    what: str,
    kind: TypeNode,
    shape: Shape | None,
    denotation: str = "",
    axes: Sequence[str | None] | None = None,
) -> ValueType:
    """Return the type of a value with its shape; a value of unknown type becomes a tensor.

    Raises BadArgument, and BadName for an axis. `what` begins the message.
    """
    if shape is None and not denotation and not axes:
        return ValueType.of(kind)
    kind = types.TENSOR if kind is types.ANY else kind
    if kind is not types.TENSOR and kind.kind is not TypeKind.TENSOR:
        raise BadArgument(f"{what} is {kind.name}; only a tensor has a shape or a denotation")
    dims = None if shape is None else _checked(what, shape)
    words = _words(what, dims, axes)
    if denotation:
        if denotation not in TYPE_DENOTATIONS:
            raise BadArgument(
                f"denotation={denotation!r:.60} of {what} is none of ONNX's"
                f"{hint(str(denotation), TYPE_DENOTATIONS)}"
            )
        if kind is not types.TENSOR and types.TENSOR_BY_ELEM.get(kind.elem_type) is not kind:
            raise BadArgument(f"{what} is {kind.name}, which takes no denotation")
    return ValueType.of(kind, dims, denotation=denotation, axes=words)


def _checked(what: str, shape: object) -> tuple[Dim, ...]:
    if not isinstance(shape, Sequence) or isinstance(shape, str) or len(shape) > MAX_AXES:
        raise BadArgument(
            f"shape={shape!r:.60} of {what} is no list of at most {MAX_AXES} axes: a length, a "
            "name, or None for each"
        )
    for axis in shape:
        if isinstance(axis, str):
            check_name("name of an axis", axis)
        elif axis is not None and not (type(axis) is int and 0 <= axis <= MAX_LENGTH):
            raise BadArgument(
                f"axis {axis!r:.40} of {what} has to be a length (a whole number, not negative), "
                "a name, or None"
            )
    return tuple(shape)


def _words(
    what: str, shape: tuple[Dim, ...] | None, axes: Sequence[str | None] | None
) -> tuple[str, ...]:
    if not axes:
        return ()
    if shape is None or isinstance(axes, str) or len(axes) != len(shape):
        raise BadArgument(f"axes={axes!r:.60} of {what} needs one word, or None, for each axis")
    for word in axes:
        if word is not None and word not in AXIS_DENOTATIONS:
            raise BadArgument(
                f"{word!r:.60} of {what} is no denotation of ONNX's"
                f"{hint(str(word), AXIS_DENOTATIONS)}"
            )
    return tuple(word or "" for word in axes)
