"""Runs a graph node by node, on nothing but the primitives of a backend.

Rule: everything that can be refused is refused when the graph is prepared, all of it at once;
a run only calls methods, by position.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from bbnode.components.errors import BackendError
from bbnode.ir.errors import BbnodeError
from bbnode.ir.values import Value

# From here on all primitives take their axes as inputs, as those of `Primitives` do.
FIRST_OPSET = 18

# What tensor libraries raise for inputs that do not fit an op.
_FAILURES = (ArithmeticError, LookupError, NotImplementedError, RuntimeError, TypeError, ValueError)

Method = Callable[..., Any]


class InterpretedGraph:
    """A graph, and the methods that run it."""

    def __init__(self, label: str, model: ModelProto, methods: Mapping[str, Method]) -> None:
        """`methods` are the primitives that there are, by op type.

        Raises:
            BackendError: the graph has an op beyond them, an opset before 18, functions, or a
                value that nothing makes.
        """
        self._label = f"{label}: graph {model.graph.name!r}"
        self._check(model, methods)
        graph = model.graph
        slots: dict[str, int] = {}
        for port in graph.input:
            slots.setdefault(port.name, len(slots))
        self._inputs = tuple(slots)
        self._start: list[Value] = [None] * len(slots)
        for tensor in graph.initializer:
            if tensor.name not in slots:  # an input of the same name is fed, and wins
                slots[tensor.name] = len(slots)
                self._start.append(methods["Constant"](tensor))
        self._calls = []
        for node in graph.node:
            taken = tuple(self._slot(slots, n, node) if n else None for n in node.input)
            made = tuple(slots.setdefault(n, len(slots)) if n else -1 for n in node.output)
            method, name = methods[node.op_type], node.name or node.op_type
            several = node.op_type == "Split"
            self._calls.append((name, method, taken, _keywords(node), made, several))
            self._start += [None] * (len(slots) - len(self._start))
        self._outputs = tuple(self._slot(slots, port.name, None) for port in graph.output)

    def run(self, inputs: Sequence[Value]) -> list[Value]:
        """Outputs in graph order for inputs in graph order."""
        if len(inputs) != len(self._inputs):
            raise BackendError(
                f"{self._label}: {len(inputs)} input(s) for {len(self._inputs)} "
                f"({', '.join(self._inputs)})"
            )
        values = [*inputs, *self._start[len(inputs) :]]
        for name, method, taken, keywords, made, several in self._calls:
            arguments = [None if index is None else values[index] for index in taken]
            try:
                result = method(*arguments, **keywords)
            except BbnodeError:
                raise
            except _FAILURES as error:
                raise BackendError(
                    f"{self._label}, node {name!r}: {type(error).__name__}: {error}"
                ) from error
            results = result if several else (result,)
            if len(results) < len(made):
                raise BackendError(
                    f"{self._label}, node {name!r}: {len(results)} output(s) for {len(made)}"
                )
            for index, value in zip(made, results, strict=False):
                if index >= 0:
                    values[index] = value
        return [values[index] for index in self._outputs]

    def _check(self, model: ModelProto, methods: Mapping[str, Method]) -> None:
        beyond = sorted(
            {
                f"{node.domain or 'ai.onnx'}::{node.op_type}"
                for node in model.graph.node
                if node.domain not in ("", "ai.onnx") or node.op_type not in methods
            }
        )
        if model.graph.initializer and "Constant" not in methods:
            beyond.append("ai.onnx::Constant (of its initializers)")
        if beyond:
            raise BackendError(
                f"{self._label} has ops beyond the primitives of this backend: "
                f"{', '.join(beyond)}; it has {', '.join(sorted(methods)) or 'none'}. Bind a "
                "backend that runs graphs"
            )
        versions = [o.version for o in model.opset_import if o.domain in ("", "ai.onnx")]
        if not versions or versions[0] < FIRST_OPSET:
            raise BackendError(
                f"{self._label} is of opset {versions[0] if versions else 'none'}; primitives "
                f"mean those of {FIRST_OPSET} and later. Convert it with "
                "onnx.version_converter.convert_version"
            )
        if model.functions or model.graph.sparse_initializer:
            raise BackendError(
                f"{self._label} has functions or sparse initializers, which primitives do not "
                "know; inline or expand them"
            )

    def _slot(self, slots: Mapping[str, int], name: str, node: NodeProto | None) -> int:
        if name not in slots:
            reader = "its output" if node is None else f"node {node.name or node.op_type!r}"
            raise BackendError(
                f"{self._label}: {reader} needs {name!r}, which nothing before makes; check the "
                "graph with onnx.checker.check_model"
            )
        return slots[name]


def _keywords(node: NodeProto) -> dict[str, Any]:
    """The attributes of a node as keywords; a Constant has one, its tensor."""
    found = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    if node.op_type == "Constant":
        return {"value": _constant(node, found)}
    return {k: v.decode() if isinstance(v, bytes) else v for k, v in found.items()}


def _constant(node: NodeProto, attributes: Mapping[str, Any]) -> TensorProto:
    value = attributes.get("value")
    if isinstance(value, TensorProto):
        return value
    for name, dtype in (("float", np.float32), ("int", np.int64)):
        for spelling in (f"value_{name}", f"value_{name}s"):
            if spelling in attributes:
                return numpy_helper.from_array(np.asarray(attributes[spelling], dtype))
    raise BackendError(
        f"node {node.name or node.op_type!r}: a constant of "
        f"{', '.join(attributes) or 'nothing'}; primitives know dense numbers"
    )
