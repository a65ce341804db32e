"""Sizes that ONNX's inference names anew, though they equal one that has a name.

Rule: only what holds whatever the sizes are. A reshape keeps the number of elements, so (batch, 65,
128) as (?, 65, 4, 32) has the batch in front; broadcasting of equal sizes gives that size. A sum
over axes that may have been stretched is then left out of gradients where none was.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

from onnx import NodeProto

from bbnode.components.autodiff.builder import Dim, Dims, InferredType

# A symbol, and how many times it is taken.
_Multiple: TypeAlias = tuple[str, int]

_KEEP_COUNT = frozenset({"Flatten", "Reshape", "Squeeze", "Unsqueeze"})
_BROADCAST = frozenset(
    {"Add", "Div", "Max", "Mean", "Min", "Mul", "PRelu", "Pow", "Sub", "Sum", "Where"}
)


def with_equal_sizes(
    nodes: Iterable[NodeProto], types: Mapping[str, InferredType]
) -> dict[str, InferredType]:
    """Return the types of values with one symbol for sizes that are equal by the nodes, in order.

    A symbol stands for one size wherever it stands.
    """
    known: dict[str, _Multiple] = {}
    for node in nodes:
        if node.domain not in ("", "ai.onnx") or not node.output:
            continue
        found = [types[name].dims if name in types else None for name in node.input if name]
        out = types[node.output[0]].dims if node.output[0] in types else None
        if out is None or not found:
            continue
        if node.op_type in _KEEP_COUNT:
            _by_count(found[0], out, known)
        elif node.op_type in _BROADCAST:
            _by_broadcasting(found, out, known)
        elif node.op_type == "MatMul" and all(dims and len(dims) > 1 for dims in found):
            _by_broadcasting([dims[:-2] for dims in found if dims], out[:-2], known)
    equal = {symbol: base for symbol, (base, count) in known.items() if count == 1}
    return {name: _renamed(kind, equal) for name, kind in types.items()}


def _renamed(kind: InferredType, equal: Mapping[str, str]) -> InferredType:
    if kind.dims is None or not any(dim in equal for dim in kind.dims):
        return kind
    dims = (equal.get(dim, dim) if isinstance(dim, str) else dim for dim in kind.dims)
    return InferredType(kind.elem_type, tuple(dims))


def _by_count(dims: Dims | None, out: Dims, known: dict[str, _Multiple]) -> None:
    """Find the one open size of `out`, which has as many elements as `dims` with one open size."""
    one, other = (None if each is None else _open_size(each) for each in (dims, out))
    if one is None or other is None or one[0] == other[0] or other[0] in known:
        return
    (symbol, total), (new, rest) = one, other
    base, count = known.get(symbol, (symbol, 1))
    if base != new and total * count % rest == 0:
        known[new] = base, total * count // rest


def _open_size(dims: Dims) -> tuple[str, int] | None:
    """Return the one symbol of `dims`, and the product of the rest; None where it is not so."""
    symbols = [dim for dim in dims if isinstance(dim, str)]
    sizes = [dim for dim in dims if isinstance(dim, int)]
    if len(symbols) != 1 or len(sizes) != len(dims) - 1 or not all(sizes):
        return None
    return symbols[0], math.prod(sizes)


def _by_broadcasting(inputs: Sequence[Dims | None], out: Dims, known: dict[str, _Multiple]) -> None:
    """Find the sizes of `out` at which all inputs that are not of size 1 have the same."""
    for axis, new in enumerate(reversed(out), start=1):
        if not isinstance(new, str) or new in known:
            continue
        there: set[Dim | _Multiple] = set()
        for dims in inputs:
            dim: Dim = None if dims is None else 1 if axis > len(dims) else dims[-axis]
            if dim != 1:
                there.add(known.get(dim, (dim, 1)) if isinstance(dim, str) else dim)
        each = there.pop() if len(there) == 1 else None
        if isinstance(each, tuple) and each[0] != new:
            known[new] = each
