"""The type lattice: types of values in the program, in ONNX and on the wire.

Rule: a `TypeNode` is `(id, parent, kind, wire_hash)`. Everything descends from `ANY`;
abstract nodes narrow to leaves at compile time, and only leaves travel. The registry is
open: `register_type` adds a node under a parent. A type's id is its `TypeProto.denotation`; our own
types are `TypeProto.Opaque` of domain `ai.bytesandbrains`, tensors stay plain ONNX tensors.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import onnx

from bbnode.ir import ids, keys
from bbnode.ir.errors import AuthorError

OPAQUE_DOMAIN = keys.PREFIX.rstrip(".")


class TypeKind(enum.Enum):
    """The representation of a type."""

    ABSTRACT = "abstract"  # must be narrowed to a leaf before it can travel
    OPAQUE = "opaque"  # a BB scalar or carrier: TypeProto.Opaque
    SEQUENCE = "sequence"  # TypeProto.Sequence of an element: an opaque one, or a tensor
    OPTIONAL = "optional"  # TypeProto.Optional of a tensor, or of a sequence of tensors
    TENSOR = "tensor"  # TypeProto.Tensor with a fixed element type


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)  # one object per type
class TypeNode:
    """One node of the lattice. `elem_type` is onnx.TensorProto.DataType for tensors."""

    id: str
    parent: TypeNode | None
    kind: TypeKind
    wire_hash: int
    elem_type: int = 0
    element: TypeNode | None = None

    @property
    def is_leaf(self) -> bool:
        """True if values of exactly this type exist and may travel."""
        return self.kind is not TypeKind.ABSTRACT

    @property
    def name(self) -> str:
        """The id without its `ai.bytesandbrains.` prefix."""
        return self.id.removeprefix(keys.PREFIX)

    def is_a(self, other: TypeNode) -> bool:
        """Return True if this type is `other` or descends from it."""
        node: TypeNode | None = self
        while node is not None:
            if node is other:
                return True
            node = node.parent
        return False

    def __repr__(self) -> str:
        return f"TypeNode({self.name})"


_BY_ID: dict[str, TypeNode] = {}
_BY_HASH: dict[int, TypeNode] = {}


def register_type(
    name: str,
    *,
    parent: TypeNode | None,
    kind: TypeKind,
    elem_type: int = 0,
    element: TypeNode | None = None,
    opset_version: int = keys.BB_OPSET_VERSION,
) -> TypeNode:
    """Add a type under `parent`; its wire hash is FNV-1a-64 of `<name>@<opset version>`.

    Raises AuthorError if the name or its hash is taken.
    """
    node = TypeNode(
        id=keys.PREFIX + name,
        parent=parent,
        kind=kind,
        wire_hash=ids.wire_hash(name, opset_version),
        elem_type=elem_type,
        element=element,
    )
    if node.id in _BY_ID or node.wire_hash in _BY_HASH:
        raise AuthorError(f"type {node.id!r} is registered already; choose another name")
    _BY_ID[node.id] = node
    _BY_HASH[node.wire_hash] = node
    return node


def type_by_id(type_id: str) -> TypeNode | None:
    """Return the node with this id, or None."""
    return _BY_ID.get(type_id)


def type_by_hash(wire_hash: int) -> TypeNode | None:
    """Return the node with this wire hash, or None."""
    return _BY_HASH.get(wire_hash)


def registered_types() -> tuple[TypeNode, ...]:
    """Return all nodes, in registration order."""
    return tuple(_BY_ID.values())


def _opaque(name: str, parent: TypeNode) -> TypeNode:
    return register_type(name, parent=parent, kind=TypeKind.OPAQUE)


ANY = register_type("Any", parent=None, kind=TypeKind.ABSTRACT)
TENSOR = register_type("Tensor", parent=ANY, kind=TypeKind.ABSTRACT)

TRIGGER = _opaque("Trigger", ANY)
PEER_ID = _opaque("PeerId", ANY)
MULTIADDRESS = _opaque("Multiaddress", ANY)
ADDRESS_VEC = _opaque("address_vec", ANY)
REQUEST_ID = _opaque("RequestId", ANY)
WIRE_REQUEST_ID = _opaque("WireRequestId", ANY)
COMMAND_ID = _opaque("CommandId", ANY)
TIMESTAMP = _opaque("Timestamp", ANY)
EVENT_KIND = _opaque("EventKind", ANY)
CORRELATION_TOKEN = _opaque("CorrelationToken", ANY)
RESPONSE_BATCH = _opaque("ResponseBatch", ANY)
COMPOSITE = _opaque("Composite", ANY)
METADATA = _opaque("Metadata", ANY)  # small named scalars, e.g. num_samples
BYTES = _opaque("Bytes", ANY)
U64 = _opaque("U64", ANY)
SEARCH_RESULTS = _opaque("SearchResults", ANY)  # Index.Search: ids, distances, metadata
PEER_ID_VEC = register_type("PeerIdVec", parent=ANY, kind=TypeKind.SEQUENCE, element=PEER_ID)
METADATA_VEC = register_type("MetadataVec", parent=ANY, kind=TypeKind.SEQUENCE, element=METADATA)

# Element types that travel: those with a fixed-size little-endian representation, and texts;
# elements smaller than a byte are packed (`packing`).
_TENSOR_ELEMENTS = (
    "FLOAT", "DOUBLE", "FLOAT16", "BFLOAT16", "INT8", "INT16", "INT32", "INT64",
    "UINT8", "UINT16", "UINT32", "UINT64", "BOOL", "STRING",
    "FLOAT8E4M3FN", "FLOAT8E4M3FNUZ", "FLOAT8E5M2", "FLOAT8E5M2FNUZ",
    "FLOAT4E2M1", "UINT4", "INT4", "UINT2", "INT2",
)  # fmt: skip
TENSOR_BY_ELEM: dict[int, TypeNode] = {
    onnx.TensorProto.DataType.Value(element): register_type(
        f"Tensor.{element}",
        parent=TENSOR,
        kind=TypeKind.TENSOR,
        elem_type=onnx.TensorProto.DataType.Value(element),
    )
    for element in _TENSOR_ELEMENTS
}
# Bits of the element types that are smaller than a byte.
BITS_OF_ELEM: dict[int, int] = {
    onnx.TensorProto.FLOAT4E2M1: 4, onnx.TensorProto.UINT4: 4, onnx.TensorProto.INT4: 4,
    onnx.TensorProto.UINT2: 2, onnx.TensorProto.INT2: 2,
}  # fmt: skip
TENSOR_FLOAT = TENSOR_BY_ELEM[onnx.TensorProto.FLOAT]
TENSOR_DOUBLE = TENSOR_BY_ELEM[onnx.TensorProto.DOUBLE]
TENSOR_INT64 = TENSOR_BY_ELEM[onnx.TensorProto.INT64]
TENSOR_UINT64 = TENSOR_BY_ELEM[onnx.TensorProto.UINT64]
TENSOR_BOOL = TENSOR_BY_ELEM[onnx.TensorProto.BOOL]
TENSOR_STRING = TENSOR_BY_ELEM[onnx.TensorProto.STRING]
TENSOR_UINT8 = TENSOR_BY_ELEM[onnx.TensorProto.UINT8]

SEQUENCE = register_type("Sequence", parent=ANY, kind=TypeKind.ABSTRACT)
OPTIONAL = register_type("Optional", parent=ANY, kind=TypeKind.ABSTRACT)


def _of(kind: TypeKind, parent: TypeNode, element: TypeNode) -> TypeNode:
    inner = element.name.removeprefix("Tensor.")
    return register_type(f"{parent.name}.{inner}", parent=parent, kind=kind, element=element)


# Sequence types by element type.
SEQUENCE_OF: dict[TypeNode, TypeNode] = {
    tensor: _of(TypeKind.SEQUENCE, SEQUENCE, tensor) for tensor in TENSOR_BY_ELEM.values()
}
OPTIONAL_OF: dict[TypeNode, TypeNode] = {
    inner: _of(TypeKind.OPTIONAL, OPTIONAL, inner)
    for inner in (*TENSOR_BY_ELEM.values(), *SEQUENCE_OF.values())
}


def is_onnx(node: TypeNode) -> bool:
    """Return True if values of a leaf type are ONNX's own: what a backend's graph computes with."""
    inner = node
    while inner.element is not None:
        inner = inner.element
    return inner.kind is TypeKind.TENSOR


def meet(a: TypeNode, b: TypeNode) -> TypeNode | None:
    """Return the narrower of two related types, or None when neither descends from the other."""
    if a.is_a(b):
        return a
    if b.is_a(a):
        return b
    return None


def type_to_proto(node: TypeNode) -> onnx.TypeProto:
    """Return the ONNX form of a type, with its id as denotation."""
    proto = onnx.TypeProto()
    proto.denotation = node.id
    if node.kind is TypeKind.TENSOR:
        proto.tensor_type.elem_type = node.elem_type
    elif node is TENSOR:
        proto.tensor_type.elem_type = onnx.TensorProto.UNDEFINED
    elif node.kind is TypeKind.SEQUENCE and node.element is not None:
        proto.sequence_type.elem_type.CopyFrom(type_to_proto(node.element))
    elif node.kind is TypeKind.OPTIONAL and node.element is not None:
        proto.optional_type.elem_type.CopyFrom(type_to_proto(node.element))
    else:
        proto.opaque_type.domain = OPAQUE_DOMAIN
        proto.opaque_type.name = node.name
    return proto


def type_from_proto(proto: onnx.TypeProto) -> TypeNode | None:
    """Return the type a TypeProto denotes (by denotation, then by structure), or None."""
    if proto.denotation and (node := _BY_ID.get(proto.denotation)) is not None:
        return node
    which = proto.WhichOneof("value")
    if which == "tensor_type":
        return TENSOR_BY_ELEM.get(proto.tensor_type.elem_type, TENSOR)
    if which == "opaque_type" and proto.opaque_type.domain == OPAQUE_DOMAIN:
        return _BY_ID.get(keys.PREFIX + proto.opaque_type.name)
    if which == "sequence_type":
        element = type_from_proto(proto.sequence_type.elem_type)
        if element is TENSOR:
            return SEQUENCE
        if element in SEQUENCE_OF:
            return SEQUENCE_OF[element]
        for node in _BY_ID.values():
            if node.kind is TypeKind.SEQUENCE and node.element is element:
                return node
    if which == "optional_type":
        inner = type_from_proto(proto.optional_type.elem_type)
        if inner is not None:
            return OPTIONAL if inner in (TENSOR, SEQUENCE) else OPTIONAL_OF.get(inner)
    return None
