"""A program between two passes as text: one line per op.

Rule: for reading and for `diff`: the same program gives the same text, and what did not change
keeps its line. It is no format that anything reads back.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import onnx
from onnx import FunctionProto, NodeProto

from bbnode.compiler import all_pass_names
from bbnode.daemon.artifacts.artifact import serialize
from bbnode.daemon.artifacts.attributes import show
from bbnode.daemon.paths import StorageError, write_atomically
from bbnode.ir import keys, protos
from bbnode.ir.types import TypeNode

# Shown at their own places, or true of nearly every op.
_SHOWN_APART = frozenset({keys.SLOT_KEY, keys.HOME_CLASS_KEY, keys.SOURCE_LINE_KEY})


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
