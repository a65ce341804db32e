"""Run-time values of a program, and the Python classes that carry them.

Rule: every carrier class belongs to exactly one leaf type, which `type_of` returns, and values are
immutable. Tensors are numpy arrays (read-only if they came over the wire); a component with a
tensor class of its own registers it here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import onnx.helper
from multiaddr import Multiaddr

from bbnode.ir import types
from bbnode.ir.errors import AuthorError
from bbnode.ir.peer import PeerId
from bbnode.ir.refusal import WireRefusal
from bbnode.ir.types import TypeNode

Value = Any  # one of the carriers below, a numpy array, or a registered class

# What a Metadata entry may be; kept flat so that it is cheap to bound and to print.
Scalar = bool | int | float | str | bytes


class Trigger:
    """A pure event, without payload. There is one instance, `TRIGGER`."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "TRIGGER"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Trigger)

    def __hash__(self) -> int:
        return hash(Trigger)


TRIGGER: Final = Trigger()


class U64(int):
    """An unsigned 64-bit integer (RngU64)."""


class RequestId(int):
    """Names one cohort request inside a node."""


class WireRequestId(int):
    """Names one request on the wire; globally unique with high probability."""


class CommandId(int):
    """Names one finished side effect of a component."""


class Timestamp(int):
    """Nanoseconds on the node's clock."""


class EventKind(int):
    """A kind of bus event."""


class CorrelationToken(int):
    """A token minted by CorrelateTag."""


class PeerIdVec(tuple[PeerId, ...]):
    """An ordered list of peers."""

    __slots__ = ()


class AddressVec(tuple[Multiaddr, ...]):
    """An ordered list of addresses."""

    __slots__ = ()


class Composite(tuple[Value, ...]):
    """Typed children packed by Bundle, taken apart by Unbundle."""

    __slots__ = ()


class SearchResults(tuple[tuple[int, float], ...]):
    """(id, distance) pairs, nearest first."""

    __slots__ = ()


class Metadata(Mapping[str, Scalar]):
    """Small named scalars that travel with a tensor, e.g. `num_samples`, `loss`."""

    __slots__ = ("_items",)

    def __init__(self, items: Mapping[str, Scalar] | None = None, /, **more: Scalar) -> None:
        merged = {**(items or {}), **more}
        for name, value in merged.items():
            if not isinstance(value, bool | int | float | str | bytes):
                raise AuthorError(
                    f"Metadata entry {name!r}: {type(value).__name__} is not a scalar; "
                    "use bool, int, float, str or bytes"
                )
        self._items = merged

    def __getitem__(self, name: str) -> Scalar:
        return self._items[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __repr__(self) -> str:
        return f"Metadata({self._items})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Metadata) and self._items == other._items

    def __hash__(self) -> int:
        return hash(tuple(sorted(self._items)))


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseBatch:
    """Answers of a cohort, in PeerId order, and the peers that are missing.

    `reasons`: of the missing peers, why there is no answer; none for a peer that was only late.
    """

    responses: tuple[tuple[PeerId, Value], ...]
    missing: tuple[PeerId, ...] = ()
    reasons: tuple[tuple[PeerId, WireRefusal], ...] = ()

    @property
    def peers(self) -> PeerIdVec:
        """The peers that answered, in PeerId order."""
        return PeerIdVec(peer for peer, _ in self.responses)


_TYPE_OF_CLASS: dict[type, TypeNode] = {
    Trigger: types.TRIGGER,
    PeerId: types.PEER_ID,
    Multiaddr: types.MULTIADDRESS,
    AddressVec: types.ADDRESS_VEC,
    RequestId: types.REQUEST_ID,
    WireRequestId: types.WIRE_REQUEST_ID,
    CommandId: types.COMMAND_ID,
    Timestamp: types.TIMESTAMP,
    EventKind: types.EVENT_KIND,
    CorrelationToken: types.CORRELATION_TOKEN,
    ResponseBatch: types.RESPONSE_BATCH,
    Composite: types.COMPOSITE,
    Metadata: types.METADATA,
    bytes: types.BYTES,
    U64: types.U64,
    SearchResults: types.SEARCH_RESULTS,
    PeerIdVec: types.PEER_ID_VEC,
}

_DTYPE_TO_TYPE: dict[np.dtype[Any], TypeNode] = {
    np.dtype(onnx.helper.tensor_dtype_to_np_dtype(elem)): node
    for elem, node in types.TENSOR_BY_ELEM.items()
}


def register_carrier(carrier: type, node: TypeNode) -> None:
    """Declare that instances of exactly `carrier` are values of the leaf type `node`."""
    if not node.is_leaf:
        raise AuthorError(f"{node.id} is abstract; a carrier class needs a leaf type")
    if carrier in _TYPE_OF_CLASS:
        raise AuthorError(f"{carrier.__qualname__} is registered already")
    _TYPE_OF_CLASS[carrier] = node


def type_of_class(carrier: type) -> TypeNode | None:
    """Return the type of the values that are instances of exactly `carrier`, or None."""
    return _TYPE_OF_CLASS.get(carrier)


# A tuple: a union takes three times as long to look through, and every send asks.
_ARRAYS = (np.ndarray, np.generic)


def type_of(value: Value) -> TypeNode:
    """Return the leaf type of a run-time value; raises AuthorError for anything else."""
    cls = type(value)
    node = _TYPE_OF_CLASS.get(cls)
    if node is not None:
        return node
    if isinstance(value, _ARRAYS):
        node = _DTYPE_TO_TYPE.get(value.dtype) or _DTYPE_TO_TYPE.get(value.dtype.newbyteorder("="))
        if node is not None:
            return node
        raise AuthorError(
            f"a tensor of dtype {value.dtype} can't be a value; "
            f"use one of {', '.join(sorted(str(d) for d in _DTYPE_TO_TYPE))}"
        )
    raise AuthorError(
        f"{cls.__module__}.{cls.__qualname__} is not a bbnode value; use a numpy array or a "
        "class of bbnode.components.values (a backend registers its tensors: register_carrier)"
    )


_TYPE_TO_DTYPE = {node.elem_type: dtype for dtype, node in _DTYPE_TO_TYPE.items()}


def dtype_of(node: TypeNode) -> np.dtype[Any]:
    """Return the numpy dtype of a tensor leaf."""
    return _TYPE_TO_DTYPE[node.elem_type]


def size_of(value: Value) -> int:
    """Return the approximate bytes that a value holds, for the byte budgets."""
    if isinstance(value, np.ndarray):
        return value.nbytes
    if isinstance(value, bytes):
        return len(value)
    if isinstance(value, Composite):
        return sum(size_of(child) for child in value) + 16
    if isinstance(value, ResponseBatch):
        return sum(size_of(child) for _, child in value.responses) + 64
    return 64
