"""Weights by name: how a saved state says them, and which of two sides agree.

Rule: a weight is taken if name, shape and dtype agree, and is never bent to fit. What was left is
told with the reason.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import msgpack
import numpy as np
import numpy.typing as npt

from bbnode.components.contracts import CarriedOver, Weights
from bbnode.ir import codec, decoding, types
from bbnode.ir.caps import MAX_DIMENSIONS, MAX_FUNCTION_PARTS, MAX_NAME_CHARS
from bbnode.ir.errors import DecodeError
from bbnode.ir.values import Composite, Value

Vector: TypeAlias = npt.NDArray[np.float32]

# Names and shapes of parameters, in the order of the flat vector.
Layout = Mapping[str, tuple[int, ...]]

STATE_VERSION = 3
_READ_VERSIONS = (2, STATE_VERSION)  # 2 had neither optimizer, nor statistics, nor counters
_MAX_LAYOUT_BYTES = 1 << 24
_LAYOUT_DEPTH = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedState:
    """The state of a trained model.

    Attributes:
        params: the flat vector.
        layout: names and shapes of what it holds; None: a release that kept no names saved it.
        last_input, grads: what forward and backward keep, if anything.
        local: running statistics that are not in the flat vector, and their `local_layout`.
        optimizer: the name of the optimizer whose state follows, "" where there is none.
        state: one flat vector for each of `kinds`, in the order of the parameters.
        progress: the counters of training; those that are left out are as at the start.
    """

    params: Vector
    layout: Layout | None
    last_input: Value | None = None
    grads: Value | None = None
    local: Vector = field(default_factory=lambda: np.zeros(0, np.float32))
    local_layout: Layout = field(default_factory=dict)
    optimizer: str = ""
    kinds: tuple[str, ...] = ()
    state: tuple[Vector, ...] = ()
    progress: Mapping[str, float | None] = field(default_factory=dict)


def pack_state(saved: SavedState) -> bytes:
    """Return a state as bytes.

    It is a composite of the flat vector, the input and the gradients that are kept (each in a
    composite of none or one), a msgpack map with the rest, and a composite of the local statistics
    and the optimizer's vectors; readers ignore what else is in the map.
    """
    rest = {
        "version": STATE_VERSION,
        "parameters": _packed(saved.layout or {}),
        "statistics": _packed(saved.local_layout),
        "optimizer": saved.optimizer,
        "kinds": list(saved.kinds),
        "progress": dict(saved.progress),
    }
    packed = np.frombuffer(msgpack.packb(rest), np.uint8)
    kept = [Composite(() if v is None else (v,)) for v in (saved.last_input, saved.grads)]
    vectors = Composite((saved.local, *saved.state))
    return codec.encode_value(Composite((saved.params, *kept, packed, vectors)))


def unpack_state(data: bytes) -> SavedState:
    """Read what `pack_state` wrote, now or in an earlier release; DecodeError for anything else."""
    with decoding.Boundary("a model's state"):
        found = codec.decode_value(types.COMPOSITE, data)
        params, last_input, grads, *more = found
        _check_vector(params, "parameters")
        saved = SavedState(
            params=params,
            layout=None,
            last_input=last_input[0] if last_input else None,
            grads=grads[0] if grads else None,
        )
        if not more:
            return saved
        rest = _rest(more[0])
        saved = replace(saved, layout=_layout(rest["parameters"], params.size))
        return saved if rest["version"] == 2 else _with_training(saved, rest, more[1])


def _with_training(saved: SavedState, rest: dict[str, Any], vectors: Composite) -> SavedState:
    local, *state = vectors
    _check_vector(local, "statistics")
    for vector in state:
        _check_vector(vector, "optimizer's state")
    kinds, optimizer, progress = rest["kinds"], rest["optimizer"], rest["progress"]
    named_right = isinstance(optimizer, str) and all(isinstance(kind, str) for kind in kinds)
    if not named_right or len(kinds) != len(state) or not isinstance(progress, dict):
        raise DecodeError("its optimizer is malformed")
    if any(value is not None and type(value) not in (int, float) for value in progress.values()):
        raise DecodeError("its counters are no numbers")
    return replace(
        saved,
        local=local,
        local_layout=_layout(rest["statistics"], local.size),
        optimizer=optimizer,
        kinds=tuple(kinds),
        state=tuple(state),
        progress=progress,
    )


def _check_vector(vector: Value, what: str) -> None:
    if not isinstance(vector, np.ndarray) or vector.dtype != np.float32 or vector.ndim != 1:
        raise DecodeError(f"its {what} are not a float32 vector")


def _packed(layout: Layout) -> list[list[Any]]:
    return [[name, list(shape)] for name, shape in layout.items()]


def _rest(packed: Weights) -> dict[str, Any]:
    rest = decoding.unpack(
        packed.tobytes(),
        max_bytes=_MAX_LAYOUT_BYTES,
        max_values=MAX_FUNCTION_PARTS * (MAX_DIMENSIONS + 4),
        max_depth=_LAYOUT_DEPTH,
    )
    version = rest.get("version") if isinstance(rest, dict) else None
    if version not in _READ_VERSIONS or type(version) is not int:
        raise DecodeError(f"version {decoding.shown(version)}, this bbnode reads {STATE_VERSION}")
    return dict(rest)


def _layout(entries: Any, size: int) -> Layout:
    layout: dict[str, tuple[int, ...]] = {}
    for name, shape in entries:
        good = isinstance(name, str) and len(name) <= MAX_NAME_CHARS and name not in layout
        if not good or not all(type(each) is int and each >= 0 for each in shape):
            raise DecodeError(f"malformed parameter {decoding.shown(name)}")
        layout[name] = tuple(shape)
    if sum(map(math.prod, layout.values())) != size:
        raise DecodeError(f"its names are not of {size} parameters")
    return layout


def named(params: Vector, layout: Layout) -> dict[str, Vector]:
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
