"""The history of one value of a program: its type, its classes, the passes that changed it.

Rule: it shows what the compiler recorded (`CompileReport.values` and `.history`) and what the
compiled model holds; for a value that no compiled partition has, the pass that removed it.
"""

from __future__ import annotations

from collections.abc import Iterator
from difflib import get_close_matches
from typing import Any

import onnx

from bbnode.compiler import CompileReport
from bbnode.daemon.artifacts.artifact import as_graph
from bbnode.ir import keys
from bbnode.ir.errors import DeploymentError
from bbnode.ir.graph import Function, OpNode, Program, Value

RECORDED = "recorded"


class NoSuchValue(DeploymentError):
    """The program never had a value of that name."""


def explain(value: str, model: onnx.ModelProto, report: CompileReport) -> dict[str, Any]:
    """Return all that is known of a value.

    Args:
        value: its name: `LoadParameters_0.cmd`, `<function>::<name>` in a function that a
            partition calls, `<call>/<name>` for what inlining took out of a Module.
        model: the compiled model.
        report: of its compile, with `explain=True`.

    Raises:
        NoSuchValue: no pass ever saw that name; names ones like it.
    """
    events = report.values.get(value)
    if events is None:
        near = get_close_matches(value, report.values, n=3, cutoff=0.5)
        ports = [name for name in report.values if name.partition(".")[0] == value]
        hint = f"; did you mean {' or '.join(ports[:3] or near)}?" if ports or near else ""
        raise NoSuchValue(f"the program has no value {value!r}{hint}")
    return {
        "value": value,
        "places": [_place(each, report) for each in _values(as_graph(model), value)],
        "events": [{"pass": e.pass_name or RECORDED, "what": e.what} for e in events],
    }


def _values(program: Program, name: str) -> Iterator[Value]:
    """Yield the value in each function that has it."""
    for function in program.functions:
        if keys.TARGET_KEY in function.metadata:
            value = function.value(name)
        elif name.startswith(f"{function.name}::"):
            value = function.value(name.removeprefix(f"{function.name}::"))
        else:
            continue
        if value.is_input or value.producer is not None:
            yield value


def _place(value: Value, report: CompileReport) -> dict[str, Any]:
    function, maker, readers = value.body, value.producer, value.readers
    assert isinstance(function, Function)
    known = function.kind_of(value.name)
    home = None if maker is None else maker.metadata.get(keys.HOME_CLASS_KEY)
    return {
        "target": function.name,
        "type": "" if known is None else known.name,
        "class": home or function.metadata.get(keys.HOME_KEY, ""),
        "made_by": None if maker is None else _maker(maker, function, report),
        "read_by": [node.name for node in function.nodes if node in readers],
        "output": value.is_output,
    }


def _maker(node: OpNode, function: Function, report: CompileReport) -> dict[str, Any]:
    is_main = keys.TARGET_KEY in function.metadata
    known = report.history.get(node.name if is_main else f"{function.name}::{node.name}")
    return {
        "name": node.name,
        "op": node.op_type,
        "slot": node.metadata.get(keys.SLOT_KEY),
        "source_line": node.source_line or None,
        "made_in": (known.made_by or RECORDED) if known is not None else "",
        "changed_in": list(known.changed_by) if known is not None else [],
    }
