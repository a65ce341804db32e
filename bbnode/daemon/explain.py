"""What a value of a program is, where it lives, and which pass made it so.

Rule: it says what the compiler noted (`CompileReport.values` and `.history`) and what stands
in the compiled model; a value that no compiled partition has is told by its end.
"""

from __future__ import annotations

from collections.abc import Iterator
from difflib import get_close_matches
from typing import Any

import onnx
from onnx import FunctionProto, NodeProto

from bbnode.compiler import CompileReport
from bbnode.ir import keys, protos
from bbnode.ir.errors import DeploymentError
from bbnode.ir.onnx_file import function_of

RECORDED = "recorded"


class UnknownValue(DeploymentError):
    """The program never had a value of that name."""


def explain(value: str, model: onnx.ModelProto, report: CompileReport) -> dict[str, Any]:
    """All that is known of a value.

    Args:
        value: its name: `LoadParameters_0.cmd`, `<function>::<name>` in a function that a
            partition calls, `<call>/<name>` for what inlining took out of a Module.
        model: the compiled model.
        report: of its compile, with `explain=True`.

    Raises:
        UnknownValue: no pass ever saw that name; names ones like it.
    """
    events = report.values.get(value)
    if events is None:
        near = get_close_matches(value, report.values, n=3, cutoff=0.5)
        ports = [name for name in report.values if name.partition(".")[0] == value]
        hint = f"; did you mean {' or '.join(ports[:3] or near)}?" if ports or near else ""
        raise UnknownValue(f"the program has no value {value!r}{hint}")
    places = [_place(f, name, report) for f, name in _scopes(model, value) if _has(f, name)]
    return {
        "value": value,
        "places": places,
        "events": [{"pass": e.pass_name or RECORDED, "what": e.what} for e in events],
    }


def _scopes(model: onnx.ModelProto, value: str) -> Iterator[tuple[FunctionProto, str]]:
    """Functions that may hold the value, with its name there."""
    for function in model.functions:
        if protos.get_meta(function, keys.TARGET_KEY) is not None:
            yield function, value
        elif value.startswith(f"{function.name}::"):
            yield function, value.removeprefix(f"{function.name}::")


def _has(function: FunctionProto, name: str) -> bool:
    return name in function.input or any(name in node.output for node in function.node)


def _place(function: FunctionProto, name: str, report: CompileReport) -> dict[str, Any]:
    maker = next((node for node in function.node if name in node.output), None)
    known = protos.value_types(function).get(name)
    home = protos.get_meta(maker, keys.HOME_CLASS_KEY) if maker is not None else None
    return {
        "target": function.name,
        "type": known.name if known is not None else "",
        "class": home or protos.get_meta(function, keys.HOME_KEY) or "",
        "made_by": _maker(maker, function, report) if maker is not None else None,
        "read_by": [n.name for n in function_of(function).nodes if name in n.reads],
        "output": name in function.output,
    }


def _maker(node: NodeProto, function: FunctionProto, report: CompileReport) -> dict[str, Any]:
    is_main = protos.get_meta(function, keys.TARGET_KEY) is not None
    known = report.history.get(node.name if is_main else f"{function.name}::{node.name}")
    return {
        "name": node.name,
        "op": node.op_type,
        "slot": protos.get_meta(node, keys.SLOT_KEY),
        "source_line": protos.get_meta(node, keys.SOURCE_LINE_KEY),
        "made_in": (known.made_by or RECORDED) if known is not None else "",
        "changed_in": list(known.changed_by) if known is not None else [],
    }
