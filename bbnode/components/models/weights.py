"""Weights by name: how a saved state says them, and which of two sides agree.

Rule: a weight is taken if name, shape and dtype agree, and is never bent to fit. What was left is
told with the reason.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgpack
import numpy as np
import numpy.typing as npt

from bbnode.components.contracts import CarriedOver, Weights
from bbnode.ir import codec, decoding, types
from bbnode.ir.caps import MAX_DIMENSIONS, MAX_FUNCTION_PARTS, MAX_NAME_CHARS
from bbnode.ir.errors import DecodeError
from bbnode.ir.values import Composite, Value

# Names and shapes of parameters, in the order of the flat vector.
Layout = Mapping[str, tuple[int, ...]]

STATE_VERSION = 2
_MAX_LAYOUT_BYTES = 1 << 24
_LAYOUT_DEPTH = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedState:
    """The state of a trained model; `layout` None: a release that kept no names saved it."""

    params: npt.NDArray[np.float32]
    last_input: Value | None
    grads: Value | None
    layout: Layout | None


def pack_state(
    params: Value, last_input: Value | None, grads: Value | None, layout: Layout
) -> bytes:
    """Return a state as bytes.

    It is a composite of the flat vector, the input and the gradients that are kept (each in a
    composite of none or one), and a msgpack map with the rest; readers ignore what else is in it.
    """
    rest = {"version": STATE_VERSION, "parameters": [[n, list(s)] for n, s in layout.items()]}
    packed = np.frombuffer(msgpack.packb(rest), np.uint8)
    kept = [Composite(() if value is None else (value,)) for value in (last_input, grads)]
    return codec.encode_value(Composite((params, *kept, packed)))


def unpack_state(data: bytes) -> SavedState:
    """Read what `pack_state` wrote, now or in an earlier release; DecodeError for anything else."""
    with decoding.Boundary("a model's state"):
        found = codec.decode_value(types.COMPOSITE, data)
        params, last_input, grads, *more = found
        if not isinstance(params, np.ndarray) or params.dtype != np.float32 or params.ndim != 1:
            raise DecodeError("its parameters are not a float32 vector")
        layout = _layout(more[0]) if more else None
        if layout is not None and sum(map(math.prod, layout.values())) != params.size:
            raise DecodeError(f"its names are not of {params.size} parameters")
        return SavedState(
            params=params,
            last_input=last_input[0] if last_input else None,
            grads=grads[0] if grads else None,
            layout=layout,
        )


def _layout(packed: Weights) -> Layout:
    rest = decoding.unpack(
        packed.tobytes(),
        max_bytes=_MAX_LAYOUT_BYTES,
        max_values=MAX_FUNCTION_PARTS * (MAX_DIMENSIONS + 4),
        max_depth=_LAYOUT_DEPTH,
    )
    version = rest.get("version") if isinstance(rest, dict) else None
    if version != STATE_VERSION:
        raise DecodeError(f"version {decoding.shown(version)}, this bbnode reads {STATE_VERSION}")
    layout: dict[str, tuple[int, ...]] = {}
    for name, shape in rest["parameters"]:
        good = isinstance(name, str) and len(name) <= MAX_NAME_CHARS and name not in layout
        if not good or not all(type(size) is int and size >= 0 for size in shape):
            raise DecodeError(f"malformed parameter {decoding.shown(name)}")
        layout[name] = tuple(shape)
    return layout


def named(params: npt.NDArray[np.float32], layout: Layout) -> dict[str, npt.NDArray[np.float32]]:
    """Return views of a flat vector, by name."""
    found, start = {}, 0
    for name, shape in layout.items():
        size = math.prod(shape)
        found[name] = params[start : start + size].reshape(shape)
        start += size
    return found


def agreeing(
    given: Mapping[str, Weights],
    wanted: Mapping[str, Weights],
    *,
    why_absent: str,
    why_unknown: str,
    known: Sequence[str] = (),
    why_known: str = "",
) -> CarriedOver:
    """Say which of the weights `wanted` can be taken from those `given`.

    Args:
        why_absent: the reason for a wanted one that is not given.
        why_unknown: for a given one that nobody wants; `why_known` if it is among `known`.
    """
    taken, left = [], {}
    for name, own in wanted.items():
        other = given.get(name)
        if other is None:
            left[name] = why_absent
        elif other.shape != own.shape:
            left[name] = f"its shape is {list(other.shape)} there and {list(own.shape)} here"
        elif other.dtype != own.dtype:
            left[name] = f"its dtype is {other.dtype} there and {own.dtype} here"
        else:
            taken.append(name)
    for name in given:
        if name not in wanted:
            left[name] = why_known if name in known else why_unknown
    return CarriedOver(taken=tuple(taken), left=left)
