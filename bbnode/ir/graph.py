"""The graph of a program: what the DSL records, what passes change, what the planner reads.

Rule: names are the identity of values within one body (a function, or a graph nested in an op),
as they are in ONNX. A body keeps a table of who makes and who reads each name; it is built when
somebody asks and then follows every edit. No protobuf is reachable from here but inside a
`Tensor`; `onnx_file.py` is the way from and to protobuf.

Attributes are shared by nodes, functions and programs, weights among them, and never changed:
whoever wants another one sets another one. A graph inside of an attribute is changed on a copy.
"""

from __future__ import annotations

import ctypes
import enum
import json
import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from typing import Any, NamedTuple, TypeVar

import numpy as np
import onnx
from onnx import SparseTensorProto, TensorProto, TypeProto, numpy_helper

from bbnode.ir import keys, types
from bbnode.ir.errors import AuthorError
from bbnode.ir.shapes import Dim
from bbnode.ir.types import TypeNode

FunctionKey = tuple[str, str, str]

# Defaults and stamps that a compile writes again and again; a few hundred bytes each.
_SHARED_ATTRIBUTES = 4096
_SHARED_TYPES = 4096


class AttributeKind(enum.IntEnum):
    """The kinds of attributes, with ONNX's numbers. UNDEFINED: malformed, kept as its bytes."""

    UNDEFINED = 0
    FLOAT = 1
    INT = 2
    STRING = 3
    TENSOR = 4
    GRAPH = 5
    FLOATS = 6
    INTS = 7
    STRINGS = 8
    TENSORS = 9
    GRAPHS = 10
    SPARSE_TENSOR = 11
    SPARSE_TENSORS = 12
    TYPE_PROTO = 13
    TYPE_PROTOS = 14


_GRAPH, _GRAPHS = AttributeKind.GRAPH, AttributeKind.GRAPHS


class Tensor:
    """Weights, as the file or their maker holds them; wrapped, never copied and never changed."""

    __slots__ = ("__weakref__", "proto")

    def __init__(self, proto: TensorProto | SparseTensorProto) -> None:
        self.proto = proto

    @classmethod
    def of(cls, array: np.ndarray[Any, Any], name: str = "") -> Tensor:
        """Return the tensor of an array."""
        return cls(numpy_helper.from_array(array, name or None))

    @property
    def is_sparse(self) -> bool:
        """True if only the values that are not zero are listed."""
        return isinstance(self.proto, SparseTensorProto)

    @property
    def name(self) -> str:
        """The name under which the file holds it."""
        return self._dense.name

    @property
    def dtype(self) -> np.dtype[Any]:
        """The type of an element."""
        return np.dtype(onnx.helper.tensor_dtype_to_np_dtype(self._dense.data_type))

    @property
    def elem_type(self) -> int:
        """ONNX's number of the type of an element."""
        return int(self._dense.data_type)

    @property
    def shape(self) -> tuple[int, ...]:
        """The length of each axis."""
        return tuple(self.proto.dims)

    @property
    def nbytes(self) -> int:
        """Its size in the file."""
        return int(self.proto.ByteSize())

    def numpy(self) -> np.ndarray[Any, Any]:
        """Return the values as an array; a sparse one filled up with zeros.

        Raises AuthorError for a dtype that is none, and where values do not fill the shape.
        """
        try:
            if any(dim < 0 for dim in self.shape):
                raise ValueError("a size is negative")
            return self._values()
        # Whatever numpy and ONNX raise for what a file may hold.
        except (
            LookupError,
            ValueError,
            TypeError,
            MemoryError,
            onnx.checker.ValidationError,
        ) as error:
            raise AuthorError(
                f"the tensor {self.name!r:.80} of element type {self.elem_type} and shape "
                f"{list(self.shape)!s:.80} can't be read ({type(error).__name__}: "
                f"{str(error).strip():.160}); export it again"
            ) from error

    def _values(self) -> np.ndarray[Any, Any]:
        if not isinstance(self.proto, SparseTensorProto):
            return numpy_helper.to_array(self.proto)
        dense = np.zeros(self.shape, self.dtype)
        values, indices = map(numpy_helper.to_array, (self.proto.values, self.proto.indices))
        if indices.ndim == 1:
            dense.reshape(-1)[indices] = values
        else:
            dense[tuple(indices.T)] = values
        return dense

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Tensor):
            return NotImplemented
        return self.proto is other.proto or self.proto == other.proto

    def __hash__(self) -> int:
        return hash((self.shape, self._dense.data_type))

    @property
    def _dense(self) -> TensorProto:
        proto = self.proto
        return proto.values if isinstance(proto, SparseTensorProto) else proto


@dataclass(frozen=True, slots=True)
class Attribute:
    """One attribute of an op: its value, or the function's parameter that it stands for.

    Attributes:
        kind: which kind of value it holds.
        value: an int, float, bytes, Tensor, Subgraph or ValueType, or a tuple of such; None when
            there is only a reference; of a malformed one its bytes in the file.
        reference: the parameter of the function that it stands for, or "".
    """

    kind: AttributeKind
    value: Any
    reference: str = ""
    doc_string: str = ""

    @classmethod
    def of(cls, value: Any) -> Attribute:
        """Return the attribute of a Python value; equal ints and texts are one object.

        A TypeNode, an array and a TensorProto are taken as well. Raises TypeError for what has
        no kind, an empty list among it.
        """
        made = _MAKERS.get(type(value))
        if made is not None:
            return made(value)  # type: ignore[no-any-return]
        if isinstance(value, list | tuple | np.ndarray) and len(value):
            return _list_attribute(value)
        for bases, plain in _SUBCLASSES:
            if isinstance(value, bases):
                return _MAKERS[plain](plain(value))  # type: ignore[no-any-return]
        raise TypeError(f"{value!r:.80} is nothing that an attribute holds")

    @property
    def graphs(self) -> tuple[Subgraph, ...]:
        """The graphs in it."""
        if self.value is None:
            return ()
        if self.kind is _GRAPH:
            return (self.value,)
        return self.value if self.kind is _GRAPHS else ()


@lru_cache(maxsize=_SHARED_ATTRIBUTES)
def _int_attribute(value: int) -> Attribute:
    return Attribute(AttributeKind.INT, value)


@lru_cache(maxsize=_SHARED_ATTRIBUTES)
def _bytes_attribute(value: bytes) -> Attribute:
    return Attribute(AttributeKind.STRING, value)


def _single(value: float) -> float:
    """The nearest number that the file can hold."""
    return ctypes.c_float(value).value


def _float_attribute(value: float) -> Attribute:
    return Attribute(AttributeKind.FLOAT, _single(value))


def _list_attribute(values: Sequence[Any] | np.ndarray[Any, Any]) -> Attribute:
    parts = [Attribute.of(value) for value in values]
    kinds = {part.kind for part in parts}
    if kinds == {AttributeKind.INT, AttributeKind.FLOAT}:
        return Attribute(AttributeKind.FLOATS, tuple(_single(float(p.value)) for p in parts))
    listed = _LIST_OF.get(parts[0].kind)
    if len(kinds) > 1 or listed is None:
        raise TypeError("a list of values of several kinds is nothing that an attribute holds")
    return Attribute(listed, tuple(part.value for part in parts))


_LIST_OF = {
    AttributeKind.INT: AttributeKind.INTS,
    AttributeKind.FLOAT: AttributeKind.FLOATS,
    AttributeKind.STRING: AttributeKind.STRINGS,
    AttributeKind.TENSOR: AttributeKind.TENSORS,
    AttributeKind.GRAPH: AttributeKind.GRAPHS,
    AttributeKind.TYPE_PROTO: AttributeKind.TYPE_PROTOS,
}


@dataclass(frozen=True, slots=True)
class ValueType:
    """The declared type of a value; equal ones are mostly one object.

    Attributes:
        content: the declaration's deterministic bytes, which say all; equal ones are equal types.
        kind: the type of our lattice, or None when it holds no such.
        shape: the axes of a tensor (None: nobody knows that axis); None where no shape is declared.
        is_foreign: True if it is a type of ONNX's that our lattice does not hold.
    """

    content: bytes
    kind: TypeNode | None = field(compare=False)
    shape: tuple[Dim, ...] | None = field(compare=False)
    is_foreign: bool = field(compare=False)

    @classmethod
    def of(
        cls,
        kind: TypeNode,
        shape: Iterable[Dim] | None = None,
        *,
        denotation: str = "",
        axes: Sequence[str] = (),
    ) -> ValueType:
        """Return a type of the lattice; all but the type is for tensors.

        Args:
            kind: the type.
            shape: axes, as `bbnode.ir.shapes` says.
            denotation: ONNX's word for what the tensor is, such as IMAGE. It takes the place of the
                lattice's id in the file: a tensor's type is known by its elements as well.
            axes: ONNX's word for each axis, such as DATA_BATCH, or "".
        """
        if shape is None and not denotation:
            return _type_of(kind)
        return _shaped(kind, None if shape is None else tuple(shape), denotation, tuple(axes))

    @property
    def denotation(self) -> str:
        """ONNX's word for what a tensor is, such as IMAGE, or ""."""
        given = self.proto().denotation
        return "" if types.type_by_id(given) is not None else given

    @property
    def axes(self) -> tuple[str, ...]:
        """ONNX's word for each axis of the shape, such as DATA_BATCH, or ""."""
        return tuple(dim.denotation for dim in self.proto().tensor_type.shape.dim)

    def narrowed(
        self, kind: TypeNode | None = None, shape: Sequence[Dim] | None = None
    ) -> ValueType:
        """Return this type with another type of the lattice, or another shape, in its place."""
        return _narrowed(
            self, kind or self.kind or types.ANY, None if shape is None else tuple(shape)
        )

    @classmethod
    def of_content(cls, content: bytes) -> ValueType:
        """Return the type that a serialized TypeProto declares."""
        return _type_of_content(content)

    @property
    def elem_type(self) -> int:
        """ONNX's number of the type of a tensor's elements; 0 when it is no tensor, or unknown."""
        return int(self.proto().tensor_type.elem_type)

    def proto(self) -> TypeProto:
        """Return the declaration as a TypeProto of the caller's own."""
        return TypeProto.FromString(self.content)


@lru_cache(maxsize=_SHARED_TYPES)
def _type_of_content(content: bytes) -> ValueType:
    proto = TypeProto.FromString(content)
    kind = types.type_from_proto(proto)
    shape = None
    if proto.HasField("tensor_type") and proto.tensor_type.HasField("shape"):
        shape = tuple(
            getattr(dim, which) if (which := dim.WhichOneof("value")) else None
            for dim in proto.tensor_type.shape.dim
        )
    return ValueType(content, kind, shape, _is_foreign(proto, kind))


@cache
def _type_of(kind: TypeNode) -> ValueType:
    return _from_proto(types.type_to_proto(kind))


def _from_proto(proto: TypeProto) -> ValueType:
    return _type_of_content(proto.SerializeToString(deterministic=True))


@lru_cache(maxsize=_SHARED_TYPES)
def _shaped(
    kind: TypeNode, shape: tuple[Dim, ...] | None, denotation: str, axes: tuple[str, ...]
) -> ValueType:
    proto = types.type_to_proto(kind)
    if not proto.HasField("tensor_type"):
        return _type_of(kind)
    if denotation:
        proto.denotation = denotation
    if shape is not None:
        proto.tensor_type.shape.SetInParent()
        for index, axis in enumerate(shape):
            dim = proto.tensor_type.shape.dim.add()
            if isinstance(axis, str):
                dim.dim_param = axis
            elif axis is not None:
                dim.dim_value = axis
            if index < len(axes) and axes[index]:
                dim.denotation = axes[index]
    return _from_proto(proto)


@lru_cache(maxsize=_SHARED_TYPES)
def _narrowed(before: ValueType, kind: TypeNode, shape: tuple[Dim, ...] | None) -> ValueType:
    shape = before.shape if shape is None else shape
    return ValueType.of(kind, shape, denotation=before.denotation, axes=before.axes)


def _is_foreign(proto: TypeProto, kind: TypeNode | None) -> bool:
    which = proto.WhichOneof("value")
    if which == "tensor_type":
        element = proto.tensor_type.elem_type
        return element not in types.TENSOR_BY_ELEM and element != TensorProto.UNDEFINED
    return which is not None and kind is None


_MAKERS: dict[type, Any] = {
    int: _int_attribute,
    bool: lambda value: _int_attribute(int(value)),
    str: lambda value: _bytes_attribute(value.encode()),
    bytes: _bytes_attribute,
    float: _float_attribute,
    Attribute: lambda value: value,
    Tensor: lambda value: Attribute(
        AttributeKind.SPARSE_TENSOR if value.is_sparse else AttributeKind.TENSOR, value
    ),
    TensorProto: lambda value: Attribute(AttributeKind.TENSOR, Tensor(value)),
    SparseTensorProto: lambda value: Attribute(AttributeKind.SPARSE_TENSOR, Tensor(value)),
    ValueType: lambda value: Attribute(AttributeKind.TYPE_PROTO, value),
    TypeNode: lambda value: Attribute(AttributeKind.TYPE_PROTO, ValueType.of(value)),
}

_SUBCLASSES: tuple[tuple[Any, Any], ...] = (
    ((int, np.integer, np.bool_), int),
    ((float, np.floating), float),
    (str, str),
    (bytes, bytes),
)


# --- nodes --------------------------------------------------------------------------------


class OpNode:
    """One op of a body.

    Inputs, outputs, `after` and attributes are changed by assigning new ones (`set_attr` does so
    for one attribute), which the body's table follows; metadata is changed in place.

    Attributes:
        after: values that have to exist before the op fires, beside its inputs.
        graphs: those in its attributes.
        computes_with: names of its inputs, and of what its graphs read from outside.
        reads: names of all that has to exist before the op fires: the same, and `after`.
        source_line: "<file>:<line>" of the author's that it stands for, or "".
        made_by: the compiler pass that made it; "" when it is the author's.
        extras: fields of the file that nothing here knows, as bytes of a NodeProto.
    """

    __slots__ = (
        *("op_type", "domain", "name", "inputs", "outputs", "attributes", "after", "metadata"),
        *("source_line", "made_by", "overload", "doc_string", "extras", "_table"),
        *("graphs", "computes_with", "reads"),
    )

    op_type: str
    domain: str
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Attribute]
    after: tuple[str, ...]
    metadata: dict[str, str]
    source_line: str
    made_by: str
    overload: str
    doc_string: str
    extras: bytes
    _table: weakref.ref[_Table] | None
    graphs: tuple[Subgraph, ...]
    computes_with: tuple[str, ...]
    reads: tuple[str, ...]

    def __new__(
        cls,
        op_type: str,
        domain: str = "",
        name: str = "",
        inputs: Iterable[str] = (),
        outputs: Iterable[str] = (),
        attributes: Mapping[str, Any] | None = None,
        *,
        after: Iterable[str] = (),
        metadata: Mapping[str, str] | None = None,
        source_line: str = "",
        made_by: str = "",
        overload: str = "",
        doc_string: str = "",
    ) -> OpNode:
        """Return a node that is in no body yet; plain Python values may stand for attributes."""
        return make_node(
            *(op_type, domain, name, tuple(inputs), tuple(outputs)),
            {k: Attribute.of(v) for k, v in attributes.items()} if attributes else {},
            *(tuple(after), dict(metadata or ()), source_line, made_by, overload, doc_string),
            b"",
        )

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _PORTS:
            if name == "after":
                value = tuple(dict.fromkeys(filter(None, value)))
            elif name != "attributes":
                value = tuple(value)
            table = self._table and self._table()
            if table:
                table.change(self, name, value)
            else:
                _set_port(self, name, value)
            return
        object.__setattr__(self, name, value)

    def copy(self) -> OpNode:
        """Return a node that is in no body; attributes are shared."""
        return make_node(
            *(self.op_type, self.domain, self.name, self.inputs, self.outputs, self.attributes),
            *(self.after, self.metadata.copy(), self.source_line, self.made_by),
            *(self.overload, self.doc_string, self.extras),
        )

    def content(self) -> tuple[object, ...]:
        """Return everything that the node says; equal tuples mean equal nodes."""
        return (
            *(self.op_type, self.domain, self.name, self.inputs, self.outputs),
            *(tuple(self.attributes.items()), self.after, tuple(self.metadata.items())),
            *(self.source_line, self.made_by, self.overload, self.doc_string, self.extras),
        )

    def attr(self, name: str, default: Any = None) -> Any:
        """Return the Python value of an attribute (texts are bytes, lists tuples), or `default`.

        Raises AuthorError for one without a value: malformed, or standing for a parameter.
        """
        found = self.attributes.get(name)
        if found is None:
            return default
        if found.value is None or not found.kind:
            raise AuthorError(
                f"op {self.name!r:.80}: attribute {name!r} has no value; compile it again"
            )
        return found.value

    def set_attr(self, name: str, value: Any) -> None:
        """Set one attribute to a Python value or an Attribute; the new one is the last."""
        changed = dict(self.attributes)
        changed.pop(name, None)
        changed[name] = Attribute.of(value)
        self.attributes = changed

    @property
    def captured(self) -> tuple[str, ...]:
        """Names that the node's graphs read from outside, in the order of their first use."""
        return captured_by(self.attributes) if self.graphs else ()

    def rename(self, names: Mapping[str, str]) -> None:
        """Rename the values that the op reads, waits for and makes; others keep their names."""
        for port in ("inputs", "outputs", "after"):
            before = getattr(self, port)
            if not names.keys().isdisjoint(before):
                setattr(self, port, [names.get(name, name) for name in before])
        annotation = self.metadata.get(keys.QUANTIZATION_KEY)
        if annotation is not None:
            self.metadata[keys.QUANTIZATION_KEY] = renamed_annotation(annotation, names)
        self.rename_captured(names)

    def rename_captured(self, names: Mapping[str, str]) -> None:
        """Rename what the op's graphs read from outside."""
        if self.graphs:
            self._map_graphs(lambda graph: graph.renamed(names))

    def change_graphs(
        self, wanted: Callable[[OpNode], bool], change: Callable[[OpNode], None]
    ) -> None:
        """Change nodes of the graphs in the attributes, at any depth, on copies of those graphs.

        Args:
            wanted: says of a node that it has to change.
            change: changes the copy of such a node.
        """

        def changed(graph: Subgraph) -> Subgraph:
            if not any(map(wanted, graph.all_nodes())):
                return graph
            copy = graph.copy()
            for node in copy.nodes:
                if wanted(node):
                    change(node)
                node.change_graphs(wanted, change)
            return copy

        self._map_graphs(changed)

    def _map_graphs(self, change: Callable[[Subgraph], Subgraph]) -> None:
        if not self.graphs:
            return
        for name, attribute in self.attributes.items():
            if attribute.kind is not _GRAPH and attribute.kind is not _GRAPHS:
                continue
            graphs = attribute.graphs
            made = tuple(map(change, graphs))
            if any(new is not old for new, old in zip(made, graphs, strict=True)):
                value = made[0] if attribute.kind is _GRAPH else made
                fresh = Attribute(attribute.kind, value, attribute.reference, attribute.doc_string)
                self.attributes = {**self.attributes, name: fresh}

    def __repr__(self) -> str:
        return f"OpNode({self.domain}::{self.op_type} {self.name!r})"


_PORTS = frozenset({"inputs", "outputs", "after", "attributes"})


class _Bare:
    """A node in the making; its fields are set without `OpNode.__setattr__`."""

    __slots__ = OpNode.__slots__


def _make_node(
    op_type: str,
    domain: str,
    name: str,
    inputs: tuple[str, ...],
    outputs: tuple[str, ...],
    attributes: Mapping[str, Attribute],
    after: tuple[str, ...],
    metadata: dict[str, str],
    source_line: str,
    made_by: str,
    overload: str,
    doc_string: str,
    extras: bytes,
) -> OpNode:
    """Return a node of these fields, as they are: for files and passes, which make many."""
    made: Any = _Bare()
    made.op_type, made.domain, made.name, made.overload = op_type, domain, name, overload
    made.inputs, made.outputs, made.after = inputs, outputs, after
    made.attributes, made.metadata, made.extras = attributes, metadata, extras
    made.source_line, made.made_by, made.doc_string = source_line, made_by, doc_string
    made._table = None
    names = tuple(filter(None, inputs)) if "" in inputs else inputs
    made.graphs = graphs = _graphs_in(attributes) if attributes else ()
    if graphs:
        names += captured_by(attributes)
    made.computes_with = names
    made.reads = names + after if after else names
    made.__class__ = OpNode
    return made  # type: ignore[no-any-return]


# Callers give most fields as parts of tuples, which a checker of types cannot follow.
make_node: Callable[..., OpNode] = _make_node


def _set_port(node: OpNode, name: str, value: Any) -> None:
    """Set one of `_PORTS`, and what follows from it."""
    object.__setattr__(node, name, value)
    if name != "outputs":
        if name == "attributes":
            object.__setattr__(node, "graphs", _graphs_in(node.attributes))
        names = tuple(filter(None, node.inputs)) if "" in node.inputs else node.inputs
        if node.graphs:
            names += captured_by(node.attributes)
        object.__setattr__(node, "computes_with", names)
        object.__setattr__(node, "reads", names + node.after)


def _graphs_in(attributes: Mapping[str, Attribute]) -> tuple[Subgraph, ...]:
    found: tuple[Subgraph, ...] = ()
    for attribute in attributes.values():
        if attribute.kind is _GRAPH or attribute.kind is _GRAPHS:
            found += attribute.graphs
    return found


def captured_by(attributes: Mapping[str, Attribute]) -> tuple[str, ...]:
    """Return names that graphs in attributes read from outside, in the order of their first use."""
    return tuple(dict.fromkeys(name for g in _graphs_in(attributes) for name in g.free))


# --- values -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Value:
    """One name of a body, with what the body says of it at the moment."""

    body: Body
    name: str

    @property
    def type(self) -> ValueType | None:
        """Its declared type, or None."""
        return self.body.types.get(self.name)

    @property
    def producer(self) -> OpNode | None:
        """The node that makes it; the first one, should there be several; None of an input."""
        return self.body.producer(self.name)

    @property
    def readers(self) -> tuple[OpNode, ...]:
        """The nodes that read it or wait for it, each once, in no certain order."""
        return self.body.readers(self.name)

    @property
    def is_input(self) -> bool:
        """True if the body takes it from its caller."""
        return self.name in self.body.inputs

    @property
    def is_output(self) -> bool:
        """True if the body gives it to its caller."""
        return self.name in self.body.outputs


class _Table:
    """The makers and readers of each name of a body.

    Nodes know it weakly, so that a body and its nodes form no ring, and so that nodes whose body
    dropped its table have nothing to tell anybody.
    """

    __slots__ = ("__weakref__", "doubles", "made", "read")

    def __init__(self, nodes: Iterable[OpNode]) -> None:
        self.made: dict[str, OpNode] = {}
        self.doubles: dict[str, list[OpNode]] = {}  # names that several nodes make
        self.read: dict[str, dict[OpNode, None]] | None = None
        me = weakref.ref(self)
        made = self.made
        for node in nodes:
            _join(node, me)
            for name in node.outputs:
                if name:
                    if name in made:
                        self._add_maker(name, node)
                    else:
                        made[name] = node

    def note_readers(self, nodes: Iterable[OpNode]) -> dict[str, dict[OpNode, None]]:
        """Look through all nodes for what they read; done once, when somebody asks."""
        read = self.read = {}
        for node in nodes:
            _note_reads(read, node)
        return read

    def add(self, node: OpNode) -> None:
        """Follow a new node."""
        if node._table and node._table():
            raise ValueError(f"{node!r} is in a body already; remove it there, or take a copy")
        _join(node, weakref.ref(self))
        for name in node.outputs:
            self._add_maker(name, node)
        if self.read is not None:
            _note_reads(self.read, node)

    def drop(self, node: OpNode) -> None:
        """Forget a node."""
        for name in node.outputs:
            self._drop_maker(name, node)
        if self.read is not None:
            _forget_reads(self.read, node)
        _join(node, None)

    def change(self, node: OpNode, field_name: str, value: Any) -> None:
        """Set one field of a node, and follow."""
        if field_name == "outputs":
            for name in node.outputs:
                self._drop_maker(name, node)
            for name in value:
                self._add_maker(name, node)
            _set_port(node, field_name, value)
        elif self.read is None:
            _set_port(node, field_name, value)
        else:
            _forget_reads(self.read, node)
            _set_port(node, field_name, value)
            _note_reads(self.read, node)

    def _add_maker(self, name: str, node: OpNode) -> None:
        if not name:
            return
        first = self.made.setdefault(name, node)
        if first is not node:
            among = self.doubles.setdefault(name, [first])
            if node not in among:
                among.append(node)

    def _drop_maker(self, name: str, node: OpNode) -> None:
        among = self.doubles.get(name)
        if among is None:
            if self.made.get(name) is node:
                del self.made[name]
            return
        among[:] = [other for other in among if other is not node]
        self.made[name] = among[0]
        if len(among) == 1:
            del self.doubles[name]


_join = vars(OpNode)["_table"].__set__


def _note_reads(read: dict[str, dict[OpNode, None]], node: OpNode) -> None:
    for name in node.reads:
        known = read.get(name)
        if known is None:
            read[name] = {node: None}
        else:
            known[node] = None


def _forget_reads(read: dict[str, dict[OpNode, None]], node: OpNode) -> None:
    for name in node.reads:
        read[name].pop(node, None)


# --- bodies -------------------------------------------------------------------------------


@dataclass(slots=True)
class ValueNote:
    """A doc string and metadata of a value."""

    doc_string: str = ""
    metadata: dict[str, str] = field(default_factory=dict)


SomeBody = TypeVar("SomeBody", bound="Body")


@dataclass(slots=True, eq=False)
class Body:
    """Nodes with their inputs and outputs: what functions and nested graphs share.

    Attributes:
        types: declared types of values, in the order of the file.
        notes: doc strings and metadata of values, of those few that have any.
        initializers: weights that are values of the body (graphs only), by name.
    """

    name: str = ""
    inputs: list[str] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    types: dict[str, ValueType] = field(default_factory=dict)
    initializers: dict[str, Tensor] = field(default_factory=dict)
    notes: dict[str, ValueNote] = field(default_factory=dict)
    metadata: dict[str, str] = field(default_factory=dict)
    doc_string: str = ""
    _nodes: list[OpNode] = field(default_factory=list, repr=False)
    _table: _Table | None = field(default=None, repr=False)

    # --- nodes --------------------------------------------------------------------------

    @property
    def nodes(self) -> Sequence[OpNode]:
        """The nodes in their order; assign a list, or use the methods below, to change it."""
        return self._nodes

    @nodes.setter
    def nodes(self, nodes: Iterable[OpNode]) -> None:
        self._nodes = list(nodes)
        self._table = None

    def append(self, node: OpNode) -> OpNode:
        """Add a node at the end and return it."""
        if self._table is not None:
            self._table.add(node)
        self._nodes.append(node)
        return node

    def extend(self, nodes: Iterable[OpNode]) -> None:
        """Add nodes at the end."""
        for node in nodes:
            self.append(node)

    def insert(self, index: int, *nodes: OpNode) -> None:
        """Put nodes before the one at `index`."""
        if self._table is not None:
            for node in nodes:
                self._table.add(node)
        self._nodes[index:index] = nodes

    def remove(self, *nodes: OpNode) -> None:
        """Take nodes out; ValueError when one is not there."""
        gone = set(nodes)
        kept = [node for node in self._nodes if node not in gone]
        if len(kept) != len(self._nodes) - len(gone):
            raise ValueError(f"not all of {nodes!r:.200} are nodes of {self.name!r}")
        self._nodes = kept
        if self._table is not None:
            for node in gone:
                self._table.drop(node)

    def replace(self, node: OpNode, *by: OpNode) -> None:
        """Put other nodes into the place of one; it may be among them."""
        index = self._nodes.index(node)
        if self._table is not None:
            self._table.drop(node)
            for each in by:
                self._table.add(each)
        self._nodes[index : index + 1] = by

    # --- values -------------------------------------------------------------------------

    def value(self, name: str) -> Value:
        """Return the value of that name."""
        return Value(self, name)

    @property
    def values(self) -> Iterator[Value]:
        """All values that exist in the body: inputs, weights, then what nodes make."""
        names = dict.fromkeys((*self.inputs, *self.initializers))
        names.update((name, None) for node in self._nodes for name in node.outputs if name)
        return (Value(self, name) for name in names)

    @property
    def producers(self) -> Mapping[str, OpNode]:
        """The node that makes each name; it follows edits until the nodes are assigned anew."""
        if self._table is None:
            self._table = _Table(self._nodes)
        return self._table.made

    def producer(self, name: str) -> OpNode | None:
        """Return the node that makes a value, or None."""
        found = self.producers.get(name)
        if self._table is not None and name in self._table.doubles:
            among = self._table.doubles[name]
            return next(node for node in self._nodes if node in among)
        return found

    def readers(self, name: str) -> tuple[OpNode, ...]:
        """Return the nodes that read a value or wait for it, each once, in no certain order."""
        if self._table is None:
            self._table = _Table(self._nodes)
        read = self._table.read
        if read is None:
            read = self._table.note_readers(self._nodes)
        return tuple(read.get(name, ()))

    # --- types --------------------------------------------------------------------------

    def kinds(self) -> dict[str, TypeNode]:
        """Return the lattice types of all values that declare one."""
        return {name: t.kind for name, t in self.types.items() if t.kind is not None}

    def kind_of(self, value: str) -> TypeNode | None:
        """Return the lattice type of one value, if it declares one."""
        found = self.types.get(value)
        return None if found is None else found.kind

    def declare(self, known: Mapping[str, TypeNode]) -> None:
        """Declare or replace the types of many values, new ones in the mapping's order.

        A tensor keeps the shape and the denotations that it was declared with.
        """
        for name, kind in known.items():
            before = self.types.get(name)
            if before is None or before.kind is not kind:
                self.types[name] = ValueType.of(kind) if before is None else before.narrowed(kind)

    def declare_as(self, pairs: Iterable[tuple[str, str]]) -> None:
        """Declare each new value with the type of another one: `(new, like)`, in order.

        `like` may be a new value as well. One whose type nobody knows is declared as Any.
        """
        for new, like in pairs:
            if new not in self.types:
                self.types[new] = self.types.get(like) or ValueType.of(types.ANY)

    def keep_types(self, names: Container[str]) -> None:
        """Forget the declarations of all values but `names`."""
        self.types = {name: kind for name, kind in self.types.items() if name in names}

    # --- the whole ----------------------------------------------------------------------

    def all_nodes(self) -> Iterator[OpNode]:
        """Yield the nodes, and those of the graphs nested in them."""
        todo: list[Body] = [self]
        while todo:
            for node in todo.pop()._nodes:
                yield node
                todo += node.graphs

    def copy(self: SomeBody) -> SomeBody:
        """Return a body of its own, with nodes of its own."""
        made = type(self)()
        for name in _FIELDS[type(self)]:
            value = getattr(self, name)
            setattr(made, name, value.copy() if isinstance(value, list | dict) else value)
        made._nodes = [node.copy() for node in self._nodes]
        return made


@dataclass(slots=True, eq=False)
class Function(Body):
    """One function.

    Attributes:
        attributes: names of its parameters; in a program of ours these are its slots.
        defaults: parameters with a default.
    """

    domain: str = ""
    overload: str = ""
    attributes: list[str] = field(default_factory=list)
    defaults: dict[str, Attribute] = field(default_factory=dict)
    opset_imports: list[Opset] = field(default_factory=list)

    @property
    def key(self) -> FunctionKey:
        """`(domain, name, overload)`: what a call resolves against."""
        return (self.domain, self.name, self.overload)

    def home_of_input(self, name: str) -> str | None:
        """Return the class that an input is given to, where it is not the function's own."""
        note = self.notes.get(name)
        return None if note is None else note.metadata.get(keys.INPUT_HOME_KEY)


@dataclass(slots=True, eq=False)
class Subgraph(Body):
    """A graph: nested in an attribute of If, Loop or Scan, or the main graph of an ONNX model.

    `extras` are fields of the file that nothing here knows, as bytes of a GraphProto.
    """

    extras: bytes = b""
    _free: tuple[str, ...] | None = field(default=None, repr=False)

    @property
    def free(self) -> tuple[str, ...]:
        """Names that it reads and nobody in it makes, in the order of their first use.

        Remembered, since a graph in an attribute does not change; a copy looks again.
        """
        if self._free is None:
            bound = {*self.inputs, *self.initializers}
            bound.update(name for node in self._nodes for name in node.outputs)
            found: dict[str, None] = {}
            for node in self._nodes:
                found.update((n, None) for n in (*node.inputs, *node.captured) if n not in bound)
            found.update((name, None) for name in self.outputs if name not in bound)
            found.pop("", None)
            self._free = tuple(found)
        return self._free

    def renamed(self, names: Mapping[str, str]) -> Subgraph:
        """Return a copy with other names for what it reads from outside; itself if it has none.

        ONNX is in SSA form: a name that is read from outside is not made again inside.
        """
        new = {name: names[name] for name in self.free if name in names}
        if not new:
            return self
        copy = self.copy()
        for node in copy.nodes:
            node.rename(new)
        copy.outputs = [new.get(name, name) for name in self.outputs]
        copy.types = {new.get(name, name): kind for name, kind in self.types.items()}
        return copy


_FIELDS: dict[type, list[str]] = {
    cls: [name for c in cls.__mro__ for name in getattr(c, "__slots__", ()) if name[0] != "_"]
    for cls in (Body, Function, Subgraph)
}


class Opset(NamedTuple):
    """One entry of a function's or a program's opset imports."""

    domain: str
    version: int


@dataclass(slots=True, eq=False)
class Program:
    """A model: its functions, and perhaps a main graph.

    Attributes:
        name: the main graph's name.
        graph: the main graph, when it holds more than a name. A recorded or compiled program has
            none: it lives in its functions.
        extras: fields of the file that nothing here knows, as bytes of a ModelProto.
    """

    ir_version: int = keys.FRAMEWORK_IR_VERSION
    producer_name: str = ""
    name: str = ""
    functions: list[Function] = field(default_factory=list)
    opset_imports: list[Opset] = field(default_factory=list)
    metadata: dict[str, str] = field(default_factory=dict)
    graph: Subgraph | None = None
    extras: bytes = b""

    def copy(self) -> Program:
        """Return a program of its own, with functions and nodes of its own."""
        return Program(
            *(self.ir_version, self.producer_name, self.name),
            [function.copy() for function in self.functions],
            *(self.opset_imports.copy(), self.metadata.copy()),
            None if self.graph is None else self.graph.copy(),
            self.extras,
        )


_MAKERS[Subgraph] = lambda value: Attribute(_GRAPH, value)


Annotations = dict[str, dict[str, str]]
"""By value: the values that hold its scale, zero point and the like, by ONNX's keys."""


def annotation_text(annotations: Annotations) -> str:
    """Return quantization annotations as the text that a node's metadata holds."""
    return json.dumps(annotations, separators=(",", ":"), sort_keys=True)


def annotations_on(node: OpNode) -> Annotations:
    """Return the quantization annotations that a node carries.

    Raises AuthorError when the text is not one that `annotation_text` wrote.
    """
    text = node.metadata.get(keys.QUANTIZATION_KEY)
    return {} if text is None else _annotations(text)


def renamed_annotation(text: str, names: Mapping[str, str]) -> str:
    """Return the text of annotations whose values have other names; AuthorError if it is none."""
    return annotation_text(
        {
            names.get(value, value): {key: names.get(name, name) for key, name in held.items()}
            for value, held in _annotations(text).items()
        }
    )


def _annotations(text: str) -> Annotations:
    try:
        found = json.loads(text)
        if all(isinstance(name, str) for held in found.values() for name in held.values()):
            return found  # type: ignore[no-any-return]
    except (ValueError, AttributeError, RecursionError):
        pass
    raise AuthorError(
        f"{keys.QUANTIZATION_KEY} is {text!r:.80}, which is no quantization annotation; take the "
        "entry out, or compile the program again"
    )


def is_wire(node: OpNode, *op_types: str) -> bool:
    """Return True if a node is a wire op, of one of `op_types` when any are given."""
    return node.domain == keys.WIRE_DOMAIN and (not op_types or node.op_type in op_types)


def is_role(node: OpNode) -> bool:
    """Return True if a node calls a component's method: an op of a role, or of a protocol."""
    return node.domain.startswith((keys.ROLE_DOMAIN_PREFIX, keys.PROTOCOL_DOMAIN_PREFIX))


def is_onnx_domain(domain: str) -> bool:
    """Return True if a domain is that of upstream ONNX (written "" or "ai.onnx")."""
    return domain in ("", keys.ONNX_DOMAIN)


def is_onnx_op(node: OpNode) -> bool:
    """Return True if an op is of what backends run: ONNX, `ai.onnx.ml`, or ONNX Runtime's own."""
    return node.domain in _ONNX_DOMAINS


_ONNX_DOMAINS = frozenset({"", keys.ONNX_DOMAIN, keys.ONNX_ML_DOMAIN, keys.RUNTIME_DOMAIN})


def call_key(node: OpNode) -> FunctionKey:
    """Return the key of the function that a node would call."""
    return (node.domain, node.op_type, node.overload)


def sorted_opsets(pairs: Iterable[tuple[str, int]]) -> list[Opset]:
    """Return opset imports, each once, sorted by domain."""
    return [Opset(domain, version) for domain, version in sorted(set(pairs))]


def inherit(node: OpNode, source: OpNode, wanted: Sequence[str]) -> None:
    """Copy those metadata entries of `source` that it has."""
    for key in wanted:
        text = source.metadata.get(key)
        if text is not None:
            node.metadata[key] = text
