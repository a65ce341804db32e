"""Ops that a backend runs: fused subgraphs and single `ai.onnx` ops.

Rule: a graph is prepared once per node and run by position. An op outside a fused graph is a
graph of one node. Where the compiler knows every input type, graphs are prepared at install,
so that what a backend can't run is told before anything runs; else by the dtypes that come.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import onnx
from onnx import FunctionProto, ModelProto, NodeProto, helper

from bbnode.components.contracts import Backend, PreparedGraph
from bbnode.engine.errors import InvalidOperand
from bbnode.engine.frame import Frame, Op
from bbnode.engine.ops.build import Fire, OpBuild
from bbnode.engine.ops.ranks import input_rank
from bbnode.ir import keys, protos
from bbnode.ir.errors import AuthorError
from bbnode.ir.types import TENSOR, TypeKind, TypeNode
from bbnode.ir.values import Value, type_of

# Dtype combinations kept for one graph whose types the compiler left open.
MAX_VARIANTS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphSpec:
    """One graph, before a backend has seen it. `types` holds what is known of its values."""

    name: str
    slot: str
    where: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    nodes: tuple[NodeProto, ...]
    opsets: tuple[tuple[str, int], ...]  # (domain, version); upstream ONNX is ""
    types: Mapping[str, TypeNode] = field(hash=False)

    def ops(self) -> list[NodeProto]:
        """All nodes, those of If and Loop bodies included."""
        return walk(self.nodes)

    def input_types(self) -> tuple[TypeNode, ...] | None:
        """The leaf types of all inputs, or None when one is open."""
        known = tuple(self.types.get(name) for name in self.inputs)
        leaves = tuple(t for t in known if t is not None and t.kind is TypeKind.TENSOR)
        return leaves if len(leaves) == len(known) else None

    def model(self, inputs: Sequence[TypeNode]) -> ModelProto:
        """The graph as a model, for inputs of these types and of any sizes."""
        nodes = []
        for node in self.nodes:
            clean = NodeProto()
            clean.CopyFrom(node)
            clean.domain = "" if protos.is_onnx_domain(node.domain) else node.domain
            del clean.metadata_props[:]
            nodes.append(clean)
        graph = helper.make_graph(
            nodes,
            self.name,
            [
                _input_info(name, node, input_rank(self.nodes, name))
                for name, node in zip(self.inputs, inputs, strict=True)
            ],
            [_output_info(name, self.types.get(name)) for name in self.outputs],
        )
        return helper.make_model(
            graph,
            ir_version=keys.FRAMEWORK_IR_VERSION,
            opset_imports=[helper.make_opsetid(*opset) for opset in self.opsets],
            producer_name=keys.PRODUCER_NAME,
        )


def _input_info(name: str, node: TypeNode, rank: int | None) -> onnx.ValueInfoProto:
    dims = None if rank is None else [f"{name}.{axis}" for axis in range(rank)]
    return helper.make_tensor_value_info(name, node.elem_type, dims)


def _output_info(name: str, node: TypeNode | None) -> onnx.ValueInfoProto:
    if node is not None and node.kind is TypeKind.TENSOR:
        return helper.make_tensor_value_info(name, node.elem_type, None)
    info = onnx.ValueInfoProto()
    info.name = name  # the backend infers the type
    return info


class GraphRunner:
    """A graph on one node's backend."""

    __slots__ = ("_backend", "_spec", "_variants", "run")

    def __init__(self, spec: GraphSpec, backend: Backend) -> None:
        """Prepares the graph when its types are known; raises the backend's error."""
        self._spec = spec
        self._backend = backend
        self._variants: dict[tuple[int, ...], PreparedGraph] = {}
        # Outputs by position; raises InvalidOperand or the backend's error.
        self.run: Callable[[Sequence[Value]], Sequence[Value]] = self._run_by_types
        known = spec.input_types()
        if known is not None:
            self.run = backend.prepare(spec.model(known)).run

    def _run_by_types(self, inputs: Sequence[Value]) -> Sequence[Value]:
        try:
            nodes = [type_of(value) for value in inputs]
        except AuthorError as error:
            raise InvalidOperand(f"{self._spec.where}: {error}") from error
        wrong = [n.name for n in nodes if n.kind is not TypeKind.TENSOR]
        if wrong:
            raise InvalidOperand(f"{self._spec.where}: got {wrong[0]} where a tensor is needed")
        key = tuple(node.elem_type for node in nodes)
        prepared = self._variants.get(key)
        if prepared is None:
            if len(self._variants) >= MAX_VARIANTS:
                self._variants.clear()
            prepared = self._variants[key] = self._backend.prepare(self._spec.model(nodes))
        return prepared.run(inputs)


def function_spec(build: OpBuild, function: FunctionProto, slot: str) -> GraphSpec:
    """The graph of a backend subgraph function."""
    if len(build.inputs) != len(function.input) or len(build.outputs) > len(function.output):
        raise build.wrong(
            f"calls a graph of {len(function.input)} inputs and {len(function.output)} outputs "
            f"with {len(build.inputs)} and {len(build.outputs)}"
        )
    known = protos.value_types(function)
    for names, given in (
        (function.input, build.flat.inputs),
        (function.output, build.flat.outputs),
    ):
        for inner, outer in zip(names, given, strict=False):
            if outer in build.types and known.get(inner, TENSOR).kind is not TypeKind.TENSOR:
                known[inner] = build.types[outer]
    return GraphSpec(
        name=function.name,
        slot=slot,
        where=build.where,
        inputs=tuple(function.input),
        outputs=tuple(function.output),
        nodes=tuple(function.node),
        opsets=_opsets(function),
        types=known,
    )


def _opsets(function: FunctionProto) -> tuple[tuple[str, int], ...]:
    found = {"": keys.ONNX_OPSET_VERSION}
    for entry in function.opset_import:
        found["" if protos.is_onnx_domain(entry.domain) else entry.domain] = entry.version
    used = {"" if protos.is_onnx_domain(n.domain) else n.domain for n in walk(function.node)}
    return tuple(sorted((d, v) for d, v in found.items() if d in used or not d))


def walk(nodes: Iterable[NodeProto]) -> list[NodeProto]:
    """All nodes, those of If and Loop bodies included."""
    found: list[NodeProto] = []
    stack = list(nodes)
    while stack:
        node = stack.pop()
        found.append(node)
        for attribute in node.attribute:
            stack.extend(attribute.g.node)
            for graph in attribute.graphs:
                stack.extend(graph.node)
    return found


def single_spec(build: OpBuild, slot: str, opset_version: int) -> GraphSpec:
    """A graph that holds nothing but one `ai.onnx` op."""
    node = NodeProto()
    node.CopyFrom(build.node)
    present = [index for index, name in enumerate(build.flat.inputs) if name]
    known: dict[str, TypeNode] = {}
    for index in present:
        node.input[index] = f"in{index}"
        if build.flat.inputs[index] in build.types:
            known[f"in{index}"] = build.types[build.flat.inputs[index]]
    outputs = []
    for index, name in enumerate(build.flat.outputs):
        if name:
            node.output[index] = f"out{index}"
            outputs.append(f"out{index}")
            if name in build.types:
                known[f"out{index}"] = build.types[name]
    return GraphSpec(
        name=build.flat.op_type,
        slot=slot,
        where=build.where,
        inputs=tuple(f"in{index}" for index in present),
        outputs=tuple(outputs),
        nodes=(node,),
        opsets=(("", opset_version),),
        types=known,
    )


def bind_graph(build: OpBuild, graph_at: int, cell_at: int) -> Fire:
    """The `fire` of a backend call; only inputs and outputs that are there take part."""
    op = build.op
    names = build.flat.inputs
    inputs = tuple(i for i, name in zip(build.inputs, names, strict=True) if name)
    outputs = tuple(i for i, name in zip(build.outputs, build.flat.outputs, strict=True) if name)
    # A fused call lists all of its outputs, also those that nobody reads.
    if build.flat.domain == keys.BACKEND_SUBGRAPH_DOMAIN:
        outputs = build.outputs
    only = len(outputs) == 1
    op.out = outputs[0] if only else op.out
    op.outs = None if only else outputs
    if only and len(inputs) == 1:
        return _one_to_one(op, inputs[0], graph_at, cell_at)

    def fire(frame: Frame) -> Any:
        rt = frame.rt
        cell = rt.cells[cell_at]
        if cell.refuses(frame):
            return rt.suspensions.wait_for_component(cell, frame, op)
        values = frame.values
        results = rt.graphs[graph_at].run([values[i] for i in inputs])
        return results[0] if only else results

    return fire


def _one_to_one(op: Op, source: int, graph_at: int, cell_at: int) -> Fire:
    """The same for one input and one output, as whole models have: less to do per call."""

    def fire(frame: Frame) -> Any:
        rt = frame.rt
        cell = rt.cells[cell_at]
        if cell.refuses(frame):
            return rt.suspensions.wait_for_component(cell, frame, op)
        return rt.graphs[graph_at].run([frame.values[source]])[0]

    return fire
