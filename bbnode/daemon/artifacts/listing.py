"""A program as text, one line per op, between two passes of the compiler.

Rule: it is for people and for `diff`: the same program gives the same text, and an unchanged op
keeps its line. Nothing parses it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import onnx

from bbnode.compiler import all_pass_names
from bbnode.daemon.artifacts.artifact import as_graph, serialize
from bbnode.daemon.paths import StorageError, write_atomically
from bbnode.ir import keys
from bbnode.ir.graph import Attribute, AttributeKind, Body, Function, OpNode, Program

# Metadata that is shown elsewhere, or that nearly every op has.
_SHOWN_APART = frozenset({keys.SLOT_KEY, keys.HOME_CLASS_KEY})

# The longest text of one attribute: weights are shown by their shape.
MAX_CHARS = 160


def listing(model: onnx.ModelProto) -> str:
    """Return all functions of a model as text."""
    return "\n".join(_program(as_graph(model))) + "\n"


def write_listings(snapshots: Mapping[str, onnx.ModelProto], folder: Path) -> list[str]:
    """Write each program as `<nn>_<pass>.txt` and `.onnx`; the numbers are the passes' order.

    Args:
        snapshots: the programs after each pass, by the name of the pass.
        folder: created if it is missing.

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


def _program(program: Program) -> Iterator[str]:
    yield f"program {program.name}"
    yield from (f"  {short(key)} = {value}" for key, value in program.metadata.items())
    for function in program.functions:
        yield ""
        yield from _function(function)


def _function(function: Function) -> Iterator[str]:
    inputs = ", ".join(_typed(name, function) for name in function.inputs)
    outputs = ", ".join(function.outputs)
    yield f"function {function.domain}::{function.name}({inputs}) -> ({outputs})"
    yield from (f"  # {short(key)} = {value}" for key, value in function.metadata.items())
    yield from (f"  {_node(node, function)}" for node in function.nodes)


def _node(node: OpNode, function: Function) -> str:
    meta = node.metadata
    outputs = ", ".join(_typed(name, function) for name in node.outputs)
    slot = f"[{meta[keys.SLOT_KEY]}]" if keys.SLOT_KEY in meta else ""
    arguments = [*node.inputs, *(f"{short(n)}={show(a)}" for n, a in node.attributes.items())]
    line = f"{outputs} = {node.op_type}{slot}({', '.join(arguments)})"
    if keys.HOME_CLASS_KEY in meta:
        line += f" @ {meta[keys.HOME_CLASS_KEY]}"
    line += f"  # {node.name}"
    if node.source_line:
        line += f" at {node.source_line}"
    notes = {short(key): value for key, value in meta.items() if key not in _SHOWN_APART}
    notes |= {"after": ",".join(node.after), "made_by": node.made_by}
    return "; ".join([line, *(f"{key}={notes[key]}" for key in sorted(notes) if notes[key])])


def _typed(name: str, body: Body) -> str:
    known = body.kind_of(name)
    return f"{name or '_'}: {known.name}" if known is not None else name or "_"


def short(key: str) -> str:
    """Return a name of our own without its prefix."""
    return key.removeprefix(keys.PREFIX)


def show(attribute: Attribute) -> str:
    """Return an attribute's value as text, at most `MAX_CHARS` long."""
    value = attribute.value
    match attribute.kind:
        case AttributeKind.TENSOR:
            kind = onnx.TensorProto.DataType.Name(value.elem_type).lower()
            return f"{kind}[{', '.join(map(str, value.shape))}]"
        case AttributeKind.GRAPH if value is not None:
            return f"graph of {len(value.nodes)} ops"
        case AttributeKind.TYPE_PROTO:
            return cut(short(value.proto().denotation) or "type")
        case AttributeKind.STRING | AttributeKind.FLOAT | AttributeKind.INT:
            return cut(_text(value))
        case AttributeKind.STRINGS | AttributeKind.FLOATS | AttributeKind.INTS:
            return cut(", ".join(map(_text, value[:MAX_CHARS])))
    return attribute.kind.name.lower()


def cut(value: str) -> str:
    """Return a text, cut with an ellipsis where it is longer than `MAX_CHARS`."""
    return value if len(value) <= MAX_CHARS else value[: MAX_CHARS - 1] + "…"


def _text(value: bytes | float | None) -> str:
    """Return text unchanged, one of our constants by its type, other bytes in hex."""
    if not isinstance(value, bytes):
        return f"{value:g}" if isinstance(value, float) else str(value)
    head = value[:MAX_CHARS]
    if b"\0" in head and head.startswith(keys.PREFIX.encode()):
        return short(head.partition(b"\0")[0].decode(errors="replace"))
    text = head.decode(errors="replace")
    if "\N{REPLACEMENT CHARACTER}" in text[:-1] or not all(c.isprintable() for c in text[:-1]):
        return f"0x{head.hex()}"
    return text
