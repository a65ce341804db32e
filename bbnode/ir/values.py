"""Run-time values of a program, and the Python classes that carry them.

Rule: every carrier class belongs to exactly one leaf type, which `type_of` returns (sequences and
optionals of ONNX say theirs themselves), and values are immutable. Tensors are numpy arrays
(read-only if they came over the wire); a component with a tensor class of its own registers it
here. A tensor of texts is an array of dtype object that holds `str` alone, or of a fixed width
(`<U8`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, overload

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


class TensorSequence(Sequence[Any]):
    """A sequence of tensors of one element type, as ONNX's sequence ops make and read it."""

    __slots__ = ("tensors", "type")

    def __init__(self, tensors: Iterable[Any], element: TypeNode | None = None) -> None:
        """Return the sequence of these tensors.

        Args:
            tensors: arrays.
            element: their type; that of the first one, if it is left out.

        Raises AuthorError when they are not all tensors of that type, or there is none to tell it.
        """
        self.tensors = tuple(tensors)
        kinds = {type_of(tensor): None for tensor in self.tensors}
        if element is None:
            if not kinds:
                raise AuthorError("an empty TensorSequence needs its element type: element=…")
            element = next(iter(kinds))
        if element not in types.SEQUENCE_OF or any(kind is not element for kind in kinds):
            found = ", ".join(kind.name for kind in kinds) or "none"
            raise AuthorError(
                f"a TensorSequence of {element.name} can't hold {found}; its tensors are of one "
                "element type"
            )
        self.type = types.SEQUENCE_OF[element]

    def __len__(self) -> int:
        return len(self.tensors)

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Any, ...]: ...
    def __getitem__(self, index: int | slice) -> Any:
        return self.tensors[index]

    def __repr__(self) -> str:
        return f"TensorSequence({len(self.tensors)} x {self.type.name})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TensorSequence):
            return NotImplemented
        pairs = zip(self.tensors, other.tensors, strict=False)
        return (
            self.type is other.type
            and len(self) == len(other)
            and all(np.array_equal(mine, theirs) for mine, theirs in pairs)
        )

    def __hash__(self) -> int:
        return hash((self.type.id, len(self.tensors)))


class OptionalValue:
    """An optional of ONNX's: a tensor or a sequence of tensors, or nothing."""

    __slots__ = ("type", "value")

    def __init__(self, value: Any = None, element: TypeNode | None = None) -> None:
        """Return the optional that holds `value`, or nothing when it is None.

        Args:
            value: an array, a TensorSequence, or None.
            element: its type; that of the value, if it is left out.

        Raises AuthorError when the value is of another type, or there is nothing to tell it.
        """
        found = None if value is None else type_of(value)
        element = found if element is None else element
        if element is None:
            raise AuthorError("an empty OptionalValue needs the type of its value: element=…")
        if element not in types.OPTIONAL_OF or found not in (None, element):
            raise AuthorError(
                f"an OptionalValue of {element.name} can't hold "
                f"{'nothing' if found is None else found.name}; it holds a tensor or a sequence"
            )
        self.value = value
        self.type = types.OPTIONAL_OF[element]

    def __repr__(self) -> str:
        return f"OptionalValue({self.value!r}, {self.type.name})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, OptionalValue):
            return NotImplemented
        if self.value is None or other.value is None:
            return self.value is other.value and self.type is other.type
        if self.type is not other.type:
            return False
        if isinstance(self.value, TensorSequence):
            return bool(self.value == other.value)
        return np.array_equal(self.value, other.value)

    def __hash__(self) -> int:
        return hash((self.type.id, self.value is None))


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
    if node is not types.TENSOR_STRING  # an array of objects may hold anything
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
        if is_text(value):
            return types.TENSOR_STRING
        raise AuthorError(
            f"a tensor of dtype {value.dtype} can't be a value; "
            f"use one of {', '.join(sorted(str(d) for d in _DTYPE_TO_TYPE))}, or object with "
            "nothing but str in it"
        )
    if cls is TensorSequence or cls is OptionalValue:
        return value.type  # type: ignore[no-any-return]
    raise AuthorError(
        f"{cls.__module__}.{cls.__qualname__} is not a bbnode value; use a numpy array or a "
        "class of bbnode.components.values (a backend registers its tensors: register_carrier)"
    )


_TYPE_TO_DTYPE = {node.elem_type: dtype for dtype, node in _DTYPE_TO_TYPE.items()}
_TYPE_TO_DTYPE[types.TENSOR_STRING.elem_type] = np.dtype(object)


def is_text(array: np.ndarray[Any, Any] | np.generic) -> bool:
    """Return True if an array is a tensor of texts; all of an object array is looked at."""
    kind = array.dtype.kind
    is_object = kind == "O"
    return kind == "U" or (is_object and all(isinstance(e, str) for e in np.asarray(array).flat))


def dtype_of(node: TypeNode) -> np.dtype[Any]:
    """Return the numpy dtype of a tensor leaf."""
    return _TYPE_TO_DTYPE[node.elem_type]


def size_of(value: Value) -> int:
    """Return the approximate bytes that a value holds, for the byte budgets."""
    if isinstance(value, np.ndarray):
        if value.dtype.kind == "O":
            return value.nbytes + sum(len(e) if isinstance(e, str) else 64 for e in value.flat)
        return value.nbytes
    if isinstance(value, bytes):
        return len(value)
    if isinstance(value, Composite):
        return sum(size_of(child) for child in value) + 16
    if isinstance(value, TensorSequence):
        return sum(size_of(tensor) for tensor in value.tensors) + 64
    if isinstance(value, OptionalValue):
        return 64 + (0 if value.value is None else size_of(value.value))
    if isinstance(value, ResponseBatch):
        return sum(size_of(child) for _, child in value.responses) + 64
    return 64
