"""Graphs and the three ways in which a backend that has one can have the others.

Rule: a graph of one node is how a backend that runs graphs runs a single op; it is made for dtypes
and ranks, never for sizes, so that one prepared graph serves all tensors of a kind. A backend that
only has `execute` runs a prepared graph by names. A backend of primitives runs it node by node:
everything that can be refused is refused when the graph is prepared, all of it at once; a run only
calls methods, by position.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import onnx
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from bbnode.components.errors import BackendError
from bbnode.ir import types
from bbnode.ir.errors import BbnodeError
from bbnode.ir.keys import FRAMEWORK_IR_VERSION, ONNX_OPSET_VERSION
from bbnode.ir.types import TypeKind, TypeNode
from bbnode.ir.values import OptionalValue, TensorSequence, Value

# From here on all primitives take their axes as inputs, as those of `Primitives` do.
FIRST_OPSET = 18

# What tensor libraries raise for inputs that do not fit an op.
_FAILURES = (ArithmeticError, LookupError, NotImplementedError, RuntimeError, TypeError, ValueError)

Method = Callable[..., Any]


class PreparedGraph(Protocol):
    """A graph that a backend made ready to run."""

    def run(self, inputs: Sequence[Value]) -> list[Value]:
        """Return the outputs in graph order for inputs in graph order."""


@runtime_checkable
class WritingGraph(PreparedGraph, Protocol):
    """A prepared graph that can write outputs to where its caller wants them."""

    def run_into(
        self, inputs: Sequence[Value], places: Mapping[int, npt.NDArray[Any]]
    ) -> list[Value]:
        """Return the outputs as `run` does; those with a place are written there and are it.

        Args:
            inputs: in graph order; no place may share memory with any of them.
            places: by position of the output: a writeable array in C order, of its shape and dtype.
                After a failure, anything may stand in it.
        """


def check_count(label: str, names: Sequence[str], inputs: Sequence[Value]) -> None:
    """Raise BackendError when a graph gets more or fewer inputs than it has."""
    if len(inputs) != len(names):
        raise BackendError(f"{label}: {len(inputs)} input(s) for {len(names)} ({', '.join(names)})")


_TYPE_TEXT = re.compile(r"(optional\()?(seq\()?tensor\((\w+)\)+")


def type_of_text(text: str) -> TypeNode | None:
    """Return the type that ONNX calls so, such as `seq(tensor(float))`, or None."""
    found = _TYPE_TEXT.fullmatch(text)
    node = found and types.type_by_id(f"{types.TENSOR.id}.{found[3].upper()}")
    if not found or node is None:
        return None
    node = types.SEQUENCE_OF[node] if found[2] else node
    return types.OPTIONAL_OF[node] if found[1] else node


def to_onnx(value: Value) -> Any:
    """Return a value as runtimes take it: a sequence as a list, an empty optional as None."""
    if type(value) is OptionalValue:
        return None if value.value is None else to_onnx(value.value)
    return list(value.tensors) if type(value) is TensorSequence else value


def from_onnx(made: Any, node: TypeNode) -> Value:
    """Return what a runtime made as a value of a type; raises AuthorError if it is none."""
    if node.element is None or type(made) in (TensorSequence, OptionalValue):
        return made
    if node.kind is TypeKind.OPTIONAL:
        if type(made) is list and node.element.element is None:  # ONNX's evaluator makes one of it
            made = made[0] if made else None
        return OptionalValue(None if made is None else from_onnx(made, node.element), node.element)
    return TensorSequence(map(np.asarray, made), node.element)


def one_op_model(
    op_type: str, inputs: Sequence[Value | None], outputs: int = 1, **attributes: Any
) -> ModelProto:
    """Return a graph of one node for tensors of these dtypes and ranks, whatever their sizes.

    An input that is None is left out of the node, and is not an input of the graph.

    Raises:
        BackendError: ONNX knows no such op, or refuses these dtypes or ranks for it.
    """
    names = ["" if value is None else f"in{i}" for i, value in enumerate(inputs)]
    results = [f"out{i}" for i in range(outputs)]
    infos = []
    for name, value in zip(names, inputs, strict=True):
        if value is None:
            continue
        array = np.asarray(value)
        dims = [f"{name}.{axis}" for axis in range(array.ndim)]
        elem_type = helper.np_dtype_to_tensor_dtype(array.dtype)
        infos.append(helper.make_tensor_value_info(name, elem_type, dims))
    try:
        node = helper.make_node(op_type, names, results, name=op_type, **attributes)
        types = onnx.shape_inference.infer_node_outputs(
            onnx.defs.get_schema(op_type, ONNX_OPSET_VERSION, ""),
            node,
            {info.name: info.type for info in infos},
            opset_imports=[helper.make_opsetid("", ONNX_OPSET_VERSION)],
            ir_version=FRAMEWORK_IR_VERSION,
        )
    except (
        onnx.checker.ValidationError,
        onnx.defs.SchemaError,
        onnx.shape_inference.InferenceError,
        TypeError,
        ValueError,
    ) as error:
        given = [str(np.asarray(v).dtype) for v in inputs if v is not None]
        raise BackendError(
            f"{op_type} of {given}: {error}; see the op's page in the ONNX operator list "
            f"(opset {ONNX_OPSET_VERSION})"
        ) from error
    graph = helper.make_graph(
        [node], op_type, infos, [helper.make_value_info(name, types[name]) for name in results]
    )
    return _model(graph)


def scaled_sum_model() -> ModelProto:
    """Return `acc [n] + weight [] * x [n] -> total [n]`, float32, for averages and deltas."""
    nodes = [
        helper.make_node("Mul", ["x", "weight"], ["scaled"], name="scale"),
        helper.make_node("Add", ["acc", "scaled"], ["total"], name="add"),
    ]
    return _vector_model("scaled_sum", nodes, {"acc": ["n"], "x": ["n"], "weight": []}, "total")


def running_mean_model(count: int) -> ModelProto:
    """Return `mean [n]` after steps to each of `count` vectors, float32.

    Each is `mean + share [] * (x [n] - mean)`; inputs are the mean, then each x and its share.
    """
    nodes, shapes, mean = [], {"mean": ["n"]}, "mean"
    for at in range(count):
        x, share, apart, step = f"x{at}", f"share{at}", f"apart{at}", f"step{at}"
        shapes |= {x: ["n"], share: []}
        made = "result" if at == count - 1 else f"mean{at}"
        nodes += [
            helper.make_node("Sub", [x, mean], [apart], name=f"subtract{at}"),
            helper.make_node("Mul", [apart, share], [step], name=f"scale{at}"),
            helper.make_node("Add", [mean, step], [made], name=f"add{at}"),
        ]
        mean = made
    return _vector_model("running_mean", nodes, shapes, mean)


def quotient_model() -> ModelProto:
    """Return `x [n] / by [] -> quotient [n]`, float32."""
    nodes = [helper.make_node("Div", ["x", "by"], ["quotient"], name="divide")]
    return _vector_model("quotient", nodes, {"x": ["n"], "by": []}, "quotient")


def _vector_model(
    name: str, nodes: Sequence[NodeProto], inputs: Mapping[str, list[str]], output: str
) -> ModelProto:
    """Return a model of float32 inputs of these dimensions, and one output [n]."""
    make = partial(helper.make_tensor_value_info, elem_type=TensorProto.FLOAT)
    graph = helper.make_graph(
        nodes,
        name,
        [make(name=each, shape=dims) for each, dims in inputs.items()],
        [make(name=output, shape=["n"])],
    )
    return _model(graph)


def _model(graph: onnx.GraphProto) -> ModelProto:
    return helper.make_model(
        graph,
        ir_version=FRAMEWORK_IR_VERSION,
        opset_imports=[helper.make_opsetid("", ONNX_OPSET_VERSION)],
    )


class ExecutedGraph:
    """A graph of a backend that only has `execute`."""

    def __init__(self, label: str, model: ModelProto, execute: Method) -> None:
        self._label = f"{label}: graph {model.graph.name!r}"
        self._execute = execute
        self._model = ModelProto()
        self._model.CopyFrom(model)  # the caller may change its own
        self._inputs = [port.name for port in model.graph.input]
        self._outputs = [port.name for port in model.graph.output]

    def run(self, inputs: Sequence[Value]) -> list[Value]:
        """Return the outputs in graph order for inputs in graph order."""
        check_count(self._label, self._inputs, inputs)
        made = self._execute(self._model, dict(zip(self._inputs, inputs, strict=True)))
        lacking = [name for name in self._outputs if name not in made]
        if lacking:
            raise BackendError(
                f"{self._label}: execute returned no {', '.join(lacking)}; return all outputs of "
                "the graph by name"
            )
        return [made[name] for name in self._outputs]


class InterpretedGraph:
    """A graph that the methods of a backend run node by node."""

    def __init__(self, label: str, model: ModelProto, methods: Mapping[str, Method]) -> None:
        """Prepare `model` for a backend with these primitives: `methods` by op type.

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
        """Return the outputs in graph order for inputs in graph order."""
        check_count(self._label, self._inputs, inputs)
        values = [*inputs, *self._start[len(inputs) :]]
        for name, method, taken, keywords, made, several in self._calls:
            arguments = [None if index is None else values[index] for index in taken]
            try:
                result = method(*arguments, **keywords)
            except BbnodeError:
                raise
            except _FAILURES as error:
                raise BackendError(
                    f"{self._label}, node {name!r}: {type(error).__name__}: {error}", node=name
                ) from error
            results = result if several else (result,)
            if len(results) < len(made):
                raise BackendError(
                    f"{self._label}, node {name!r}: {len(results)} output(s) for {len(made)}",
                    node=name,
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
    """Return the attributes of a node as keywords; a Constant has one, its tensor."""
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
