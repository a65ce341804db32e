"""Attributes of an op as text.

Rule: a reader gets what fits a line: numbers and short texts as they are, tensors and graphs by
their shape and size.
"""

from __future__ import annotations

import onnx
from onnx import AttributeProto

from bbnode.ir import keys

MAX_CHARS = 160


def show(attribute: AttributeProto) -> str:
    """An attribute's value, at most `MAX_CHARS` long."""
    return cut(_value(attribute))


def cut(value: str) -> str:
    """A text, cut with an ellipsis where it is longer than `MAX_CHARS`."""
    return value if len(value) <= MAX_CHARS else value[: MAX_CHARS - 1] + "…"


def _value(attribute: AttributeProto) -> str:
    match attribute.type:
        case AttributeProto.TENSOR:
            tensor = attribute.t
            kind = onnx.TensorProto.DataType.Name(tensor.data_type).lower()
            return f"{kind}[{', '.join(map(str, tensor.dims))}]"
        case AttributeProto.GRAPH:
            return f"graph of {len(attribute.g.node)} ops"
        case AttributeProto.TYPE_PROTO:
            return attribute.tp.denotation.removeprefix(keys.PREFIX) or "type"
        case AttributeProto.STRING:
            return _text(attribute.s)
        case AttributeProto.STRINGS:
            return ", ".join(_text(text) for text in attribute.strings[:MAX_CHARS])
        case AttributeProto.FLOAT:
            return f"{attribute.f:g}"
        case AttributeProto.FLOATS:
            return ", ".join(f"{number:g}" for number in attribute.floats[:MAX_CHARS])
        case AttributeProto.INT:
            return str(attribute.i)
        case AttributeProto.INTS:
            return ", ".join(str(number) for number in attribute.ints[:MAX_CHARS])
        case _:
            return AttributeProto.AttributeType.Name(attribute.type).lower()


def _text(data: bytes) -> str:
    """Text as it stands, a BB constant by its type, anything else in hex."""
    head = data[:MAX_CHARS]
    if b"\0" in head and head.startswith(keys.PREFIX.encode()):
        return head.partition(b"\0")[0].decode(errors="replace").removeprefix(keys.PREFIX)
    text = head.decode(errors="replace")
    if "\N{REPLACEMENT CHARACTER}" in text[:-1] or not all(c.isprintable() for c in text[:-1]):
        return f"0x{head.hex()}"
    return text
