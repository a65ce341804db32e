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
from typing import Any, Final, NamedTuple, get_args, overload

import numpy as np
import numpy.typing as npt
import onnx.helper
from multiaddr import Multiaddr

from bbnode.ir import types
from bbnode.ir.errors import AuthorError
from bbnode.ir.peer import PeerId
from bbnode.ir.refusal import WireRefusal
from bbnode.ir.types import TypeNode

Value = Any  # one of the carriers below, a numpy array, or a registered class

# The types of Metadata entries; flat, so that they are cheap to bound and to print.
Scalar = bool | int | float | str | bytes
SCALARS: Final = get_args(Scalar)

# Ids of items in an index are from 0 to this.
MAX_INT64: Final = (1 << 63) - 1
_SHOWN_HITS = 10


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
            element: their type; by default that of the first one.

            Raises AuthorError if not all are tensors of that type, or the type is unknown.
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
            element: its type; by default that of the value.

            Raises AuthorError if the value is of another type, or the type is unknown.
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


class Metadata(Mapping[str, Scalar]):
    """Small named scalars that travel with a tensor, e.g. `num_samples`, `loss`."""

    __slots__ = ("_items",)

    def __init__(self, items: Mapping[str, Scalar] | None = None, /, **more: Scalar) -> None:
        merged = {**(items or {}), **more}
        for name, value in merged.items():
            if not isinstance(value, SCALARS):
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


class MetadataVec(tuple[Metadata, ...]):
    """Metadata of several items, in their order."""

    __slots__ = ()


def metadata_of(given: Any, node: TypeNode | None) -> Metadata | MetadataVec | None:
    """Return a mapping as Metadata, or a list of them as a MetadataVec, if `node` is that type.

    None for anything else. Raises AuthorError for an entry that is no scalar.
    """
    if node is types.METADATA and isinstance(given, Mapping):
        return given if isinstance(given, Metadata) else Metadata(_named(given))
    is_list = node is types.METADATA_VEC and isinstance(given, list | tuple)
    if is_list and all(isinstance(each, Mapping) for each in given):
        return MetadataVec(Metadata(_named(each)) for each in given)
    return None


def _named(given: Mapping[Any, Any]) -> dict[str, Any]:
    wrong = next((name for name in given if not isinstance(name, str)), None)
    if wrong is not None:
        raise AuthorError(f"a name of Metadata is {wrong!r}; names are texts")
    return dict(given)


def _as_float32(given: Any) -> npt.NDArray[np.float32]:
    """Return a copy as float32; distances beyond its range become infinite."""
    if isinstance(given, np.ndarray) and given.dtype == np.float32:
        return np.array(given, np.float32)
    with np.errstate(over="ignore"):
        return np.array(given, np.float32)


class Hit(NamedTuple):
    """One item that a search found.

    Attributes:
        id: of the item in the index that found it.
        distance: of the item to the query, in the index's metric.
        metadata: of the item; empty if it has none.
        sender: the peer whose index found it; None for an index of this node.
    """

    id: int
    distance: float
    metadata: Metadata
    sender: PeerId | None


class SearchResults:
    """The results of a search: for each query its nearest items, nearest first.

    Attributes:
        ids: int64 [k], or [Q, k] for a batch of Q queries; -1 fills the end of a row.
        distances: float32 of the same shape; +inf beside an id of -1.
        metadata: of each hit, row by row; empty where no item has any.
        senders: the peer that found each hit, row by row; empty where this node found all.
    """

    __slots__ = ("distances", "ids", "metadata", "senders")

    def __init__(
        self,
        ids: Any,
        distances: Any,
        metadata: Iterable[Metadata] = (),
        senders: Iterable[PeerId] = (),
    ) -> None:
        """Create results from these arrays. Raises AuthorError if they do not match."""
        found = np.asarray(ids)
        least = 0
        if found.size:
            if found.dtype.kind not in "iu":
                raise AuthorError(f"ids of search results are integers, not {found.dtype}")
            least = int(found.min())
            if least < -1 or (found.dtype.kind == "u" and found.max() > MAX_INT64):
                raise AuthorError("ids of search results are from 0 to 2**63 - 1, or -1 for none")
        self.ids: npt.NDArray[np.int64] = found.astype(np.int64)
        self.distances = _as_float32(distances)
        self.metadata = MetadataVec(metadata)
        self.senders = PeerIdVec(senders)
        if self.ids.ndim not in (1, 2) or self.ids.shape != self.distances.shape:
            raise AuthorError(
                f"search results have ids {list(self.ids.shape)} and distances "
                f"{list(self.distances.shape)}; both are [k], or [Q, k]"
            )
        hits = self.ids.size
        if least < 0:
            is_hit = self.ids >= 0
            if (is_hit[..., 1:] & ~is_hit[..., :-1]).any():
                raise AuthorError("a search result with the id -1 comes before one that was found")
            hits = int(np.count_nonzero(is_hit))
            self.distances[~is_hit] = np.inf
        for name, items in (("metadata", self.metadata), ("senders", self.senders)):
            if items and len(items) != hits:
                raise AuthorError(f"{hits} search results with {name} of {len(items)}")
        self.ids.flags.writeable = self.distances.flags.writeable = False

    @classmethod
    def of_pairs(cls, pairs: Iterable[tuple[int, float]]) -> SearchResults:
        """Return the results of one query from its (id, distance) pairs, nearest first."""
        listed = list(pairs)
        return cls([number for number, _ in listed], [far for _, far in listed])

    @property
    def queries(self) -> int:
        """The number of queries."""
        return len(self.ids) if self.ids.ndim == 2 else 1

    def hits(self, query: int = 0) -> list[Hit]:
        """Return the hits of one query of the batch, nearest first."""
        ids, distances = np.atleast_2d(self.ids), np.atleast_2d(self.distances)
        first = int(np.count_nonzero(ids[:query] >= 0))
        return [
            Hit(
                id=int(number),
                distance=float(distances[query, place]),
                metadata=self.metadata[first + place] if self.metadata else Metadata(),
                sender=self.senders[first + place] if self.senders else None,
            )
            for place, number in enumerate(ids[query])
            if number >= 0
        ]

    def __len__(self) -> int:
        """Return the number of hits of all queries."""
        return int(np.count_nonzero(self.ids >= 0))

    def __repr__(self) -> str:
        if self.ids.ndim == 2:
            return f"SearchResults({len(self)} hits of {self.queries} queries)"
        told = [f"{hit.id} at {hit.distance:.6g}" for hit in self.hits()[:_SHOWN_HITS]]
        return f"SearchResults({', '.join(told)}{', …' if len(self) > _SHOWN_HITS else ''})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SearchResults):
            return NotImplemented
        return (
            np.array_equal(self.ids, other.ids)
            and np.array_equal(self.distances, other.distances, equal_nan=True)
            and self.metadata == other.metadata
            and self.senders == other.senders
        )

    def __hash__(self) -> int:
        return hash((self.ids.tobytes(), self.senders))


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseBatch:
    """Answers of a cohort, in PeerId order, and the peers that are missing.

    Attributes:
        reasons: reason for each missing peer, except for peers that were only late.
        took_ns: for each peer that answered, nanoseconds from the request to the answer, as
            measured by the requester. They stay on this node: a batch that is sent has none.
    """

    responses: tuple[tuple[PeerId, Value], ...]
    missing: tuple[PeerId, ...] = ()
    reasons: tuple[tuple[PeerId, WireRefusal], ...] = ()
    took_ns: tuple[tuple[PeerId, int], ...] = ()

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
    MetadataVec: types.METADATA_VEC,
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


# A tuple, since an isinstance check of a union is three times as slow, and each send needs one.
_ARRAYS = (np.ndarray, np.generic)


def type_of(value: Value) -> TypeNode:
    """Return the leaf type of a run-time value; raises AuthorError for anything else."""
    cls = type(value)
    node = _DTYPE_TO_TYPE.get(value.dtype) if cls is np.ndarray else _TYPE_OF_CLASS.get(cls)
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
    """Return True if an array is a tensor of texts; an object array is checked completely."""
    kind = array.dtype.kind
    is_object = kind == "O"
    return kind == "U" or (is_object and all(isinstance(e, str) for e in np.asarray(array).flat))


def dtype_of(node: TypeNode) -> np.dtype[Any]:
    """Return the numpy dtype of a tensor leaf."""
    return _TYPE_TO_DTYPE[node.elem_type]


def size_of(value: Value) -> int:
    """Return the approximate size of a value in bytes, for the byte budgets."""
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
    if isinstance(value, SearchResults):
        return value.ids.nbytes + value.distances.nbytes + size_of(value.metadata) + 64
    if isinstance(value, MetadataVec):
        return sum(map(_size_of_metadata, value)) + 64
    return 64


def _size_of_metadata(value: Metadata) -> int:
    texts = sum(len(item) for item in value.values() if isinstance(item, str | bytes))
    return 64 * (1 + len(value)) + texts
