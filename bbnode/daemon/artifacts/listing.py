"""A program between two passes as text: one line per op.

Rule: for reading and for `diff`: the same program gives the same text, and what did not change
keeps its line. It is no format that anything reads back.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import onnx
from onnx import AttributeProto, FunctionProto, NodeProto

from bbnode.compiler import all_pass_names
from bbnode.daemon.artifacts.artifact import serialize
from bbnode.daemon.paths import StorageError, write_atomically
from bbnode.ir import keys, protos
from bbnode.ir.types import TypeNode

# Shown at their own places, or true of nearly every op.
_SHOWN_APART = frozenset({keys.SLOT_KEY, keys.HOME_CLASS_KEY, keys.SOURCE_LINE_KEY})

# The longest text of one attribute: weights are shown by their shape.
MAX_CHARS = 160


def listing(model: onnx.ModelProto) -> str:
    """All functions of a model."""
    return "\n".join(_model(model)) + "\n"


def write_listings(snapshots: Mapping[str, onnx.ModelProto], folder: Path) -> list[str]:
    """Write each program as `<nn>_<pass>.txt` and `.onnx`; the numbers are the passes' order.

    Args:
        snapshots: programs by the name of the pass that left them so.
        folder: made when it is missing.

    Returns:
        The paths written.

    Raises:
        StorageError: naming the path that can't be written.
    """
    if not snapshots:
        return []
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(f"{folder}: cannot be made: {error.strerror}") from error
    order = all_pass_names()
    written = []
    for name, model in snapshots.items():
        # A stage of the user's own comes after all passes.
        place = order.index(name) + 1 if name in order else len(order) + 1
        for suffix, data in (("txt", listing(model).encode()), ("onnx", serialize(model))):
            path = folder / f"{place:02d}_{name}.{suffix}"
            write_atomically(path.absolute(), data, mode=0o644)
            written.append(str(path))
    return written


def _model(model: onnx.ModelProto) -> Iterator[str]:
    yield f"program {model.graph.name}"
    for entry in model.metadata_props:
        yield f"  {_short(entry.key)} = {entry.value}"
    for function in model.functions:
        yield ""
        yield from _function(function)


def _function(function: FunctionProto) -> Iterator[str]:
    types = protos.value_types(function)
    inputs = ", ".join(_typed(name, types) for name in function.input)
    outputs = ", ".join(function.output)
    yield f"function {function.domain}::{function.name}({inputs}) -> ({outputs})"
    for key, value in protos.all_meta(function).items():
        yield f"  # {_short(key)} = {value}"
    for node in function.node:
        yield f"  {_node(node, types)}"


def _node(node: NodeProto, types: dict[str, TypeNode]) -> str:
    outputs = ", ".join(_typed(name, types) for name in node.output)
    meta = protos.all_meta(node)
    slot = f"[{meta[keys.SLOT_KEY]}]" if keys.SLOT_KEY in meta else ""
    arguments = [*node.input, *(f"{_short(a.name)}={show(a)}" for a in node.attribute)]
    line = f"{outputs} = {node.op_type}{slot}({', '.join(arguments)})"
    home = meta.get(keys.HOME_CLASS_KEY)
    if home is not None:
        line += f" @ {home}"
    line += f"  # {node.name}"
    if keys.SOURCE_LINE_KEY in meta:
        line += f" at {meta[keys.SOURCE_LINE_KEY]}"
    said = [f"{_short(k)}={v}" for k, v in sorted(meta.items()) if k not in _SHOWN_APART]
    return "; ".join([line, *said])


def _typed(name: str, types: dict[str, TypeNode]) -> str:
    known = types.get(name)
    return f"{name or '_'}: {known.name}" if known is not None else name or "_"


def _short(key: str) -> str:
    return key.removeprefix(keys.PREFIX)


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
