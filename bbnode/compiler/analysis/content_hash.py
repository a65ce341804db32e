"""Names made of content: of partitions and of backend subgraphs.

Rule: equal content gives an equal name on every machine. The author's source line is not part of
the content. 64 bits of SHA-256 are enough: names are compared within one model, and a peer
checks the whole artifact's digest. The bytes of an attribute, which may be all weights of a
model, are hashed once per compile.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain, islice

from bbnode.ir import keys
from bbnode.ir.graph import Attribute, Function, OpNode
from bbnode.ir.onnx_file import attribute_content

HEX_DIGITS = 16
# Shorter attributes enter a hash verbatim.
_LONGEST_INLINE_BYTES = 64
_PIECE_ITEMS = 64  # list items that are encoded as JSON at once
_encode = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode


@dataclass(frozen=True, slots=True)
class AttributePrint:
    """The size of an attribute in bytes, and a text that identifies its content."""

    attribute: Attribute  # kept alive, so that its id is not reused
    size: int
    content: str


@dataclass(slots=True)
class AttributePrints:
    """A cache of the sizes and contents of attributes, for one compile.

    It goes by identity: attributes are immutable, and nodes with equal ones mostly share them.
    """

    _known: dict[int, AttributePrint] = field(default_factory=dict)

    def of(self, attribute: Attribute) -> AttributePrint:
        """Return the size and content of an attribute, computed once."""
        print_ = self._known.get(id(attribute))
        if print_ is None:
            data = attribute_content(attribute)
            is_long = len(data) > _LONGEST_INLINE_BYTES
            content = "#" + hashlib.sha256(data).hexdigest() if is_long else "=" + _text(data)
            print_ = AttributePrint(attribute, len(data), content)
            self._known[id(attribute)] = print_
        return print_

    def content(self, attributes: Mapping[str, Attribute]) -> list[tuple[str, str]]:
        """Return names and contents of all attributes."""
        names = sorted(attributes) if len(attributes) > 1 else attributes
        return [(name, self.of(attributes[name]).content) for name in names]

    def __len__(self) -> int:
        return len(self._known)


def _text(data: bytes) -> str:
    """Return bytes as text, one character per byte."""
    return data.decode("latin-1")


def _framed(data: bytes) -> bytes:
    """Return the data behind its length, so that the concatenation of pieces is unambiguous."""
    return len(data).to_bytes(8, "big") + data


def _said_by(node: OpNode, prints: AttributePrints) -> tuple[object, ...]:
    """Return the content of a node without its source line and its inferred crossing shape."""
    metadata = sorted(node.metadata.items())
    if keys.CROSSING_SHAPE_KEY in node.metadata:
        metadata = [entry for entry in metadata if entry[0] != keys.CROSSING_SHAPE_KEY]
    return (
        *(node.op_type, node.domain, node.overload, node.name, node.doc_string),
        *(node.inputs, node.outputs, node.after, metadata),
        prints.content(node.attributes) if node.attributes else (),
        _text(node.extras) if node.extras else "",
    )


def function_digest(function: Function, prints: AttributePrints) -> bytes:
    """Return SHA-256 over a body: ports, slots and configs, opsets, nodes, types; not its name."""
    ports = (
        sorted((entry.domain, entry.version) for entry in function.opset_imports),
        function.inputs,
        function.outputs,
        function.attributes,
        prints.content(function.defaults),
    )
    nodes = (_said_by(node, prints) for node in function.nodes)
    kinds = sorted([(name, _text(kind.content)) for name, kind in function.types.items()])
    # JSON keeps texts, numbers and lists apart, and each position always holds one kind.
    digest = hashlib.sha256(_encode(ports)[:-1].encode())
    for text in chain(_listed(nodes), _listed(kinds), "]"):
        digest.update(text.encode())
    return digest.digest()


def _listed(items: Iterable[object]) -> Iterator[str]:
    """Yield the JSON of a list of these items in pieces, with a comma before it.

    The JSON of a whole program at once would not fit the processor's cache.
    """
    rest = iter(items)
    before = ",["
    while piece := list(islice(rest, _PIECE_ITEMS)):
        yield before + _encode(piece)[1:-1]
        before = ","
    yield "]" if before == "," else ",[]"


def content_name(
    function: Function,
    callees: Iterable[Function],
    known: Mapping[str, bytes],
    prints: AttributePrints,
) -> str:
    """Return 16 hex digits over a body and the bodies that it calls.

    Args:
        function: the body.
        callees: all functions that it reaches, in the model's order.
        known: digests computed before, by `digest_key`.
        prints: cache of attribute contents.
    """
    digest = hashlib.sha256(function_digest(function, prints))
    for callee in callees:
        key = digest_key(callee)
        digest.update(_framed(key.encode()))
        digest.update(known[key] if key in known else function_digest(callee, prints))
    return digest.hexdigest()[:HEX_DIGITS]


def digest_key(function: Function) -> str:
    """Return the key by which `content_name` finds a known digest."""
    return f"{function.domain}\0{function.name}\0{function.overload}"


def same(a: Function, b: Function, prints: AttributePrints) -> bool:
    """Return True if two functions of one name are equal, source lines included."""
    lines_a, lines_b = ([node.source_line for node in function.nodes] for function in (a, b))
    return (
        lines_a == lines_b
        and a.metadata == b.metadata
        and a.doc_string == b.doc_string
        and function_digest(a, prints) == function_digest(b, prints)
    )
