"""Ops that a backend runs: fused subgraphs and single `ai.onnx` ops.

Rule: a graph is prepared once per node and run by position. An op outside a fused graph is a
graph of one node. Where the compiler knows every input type, graphs are prepared at install,
so that what a backend can't run is told before anything runs; else by the dtypes that come.

Fusing is not seen when something fails either. A graph fails as a whole; then its ops run one by
one, as far as they don't need what failed: so a failure has the name of its op, and the outputs
that do not depend on it come.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import numpy as np
from onnx import ModelProto

from bbnode.components.contracts import Backend, PreparedGraph
from bbnode.engine.cells import ComponentCell
from bbnode.engine.errors import InvalidOperand, WrongResultType
from bbnode.engine.frame import MISSING, Frame, Marker, Op
from bbnode.engine.ops.build import Fire, OpBuild
from bbnode.engine.ops.declared import Declared, narrower
from bbnode.engine.places import OpPlace, SourcePlace, blamed_node, number_of
from bbnode.ir import keys
from bbnode.ir.errors import AuthorError
from bbnode.ir.graph import (
    Function,
    OpNode,
    Program,
    Subgraph,
    Tensor,
    ValueType,
    is_onnx_domain,
    sorted_opsets,
)
from bbnode.ir.interrupts import let_stop
from bbnode.ir.onnx_file import model_of
from bbnode.ir.types import OPTIONAL, SEQUENCE, TENSOR, TypeKind, TypeNode, is_onnx
from bbnode.ir.values import Value, type_of

# Dtype combinations kept for one graph whose types the compiler left open.
MAX_VARIANTS = 16
# Ops of one graph that are kept prepared alone, once it has failed.
MAX_SINGLES = 64


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GraphSpec:
    """One graph, before a backend has seen it.

    Attributes:
        place: where the author wrote it, or its ops.
        graph: its nodes and ports, with no types.
        opsets: versions by domain; upstream ONNX is "".
        types: the known types of its values.
    """

    slot: str
    where: str
    place: OpPlace
    graph: Subgraph
    opsets: Mapping[str, int]
    types: Mapping[str, TypeNode]

    def told(self, place: SourcePlace) -> str:
        """Return `where`, and of a fused graph the place of the op in it that is to blame."""
        return f"{self.where}: {place}" if place.inner else self.where

    def single(self, node: OpNode) -> GraphSpec:
        """Return the graph of one of its nodes; inputs and outputs keep their names."""
        graph = _graph(node.op_type, read_by(node), filter(None, node.outputs), [node])
        return replace(self, graph=graph)

    def input_types(self) -> tuple[TypeNode, ...] | None:
        """Return the leaf types of all inputs, or None when one is open."""
        known = tuple(self.types.get(name) for name in self.graph.inputs)
        leaves = tuple(t for t in known if t is not None and is_onnx(t))
        return leaves if len(leaves) == len(known) else None

    def model(self, inputs: Sequence[TypeNode]) -> ModelProto:
        """Return the graph as a model, for inputs of these types and of any sizes."""
        graph = self.graph.copy()
        for name, kind in zip(graph.inputs, inputs, strict=True):
            rank = input_rank(graph, name) if kind.kind is TypeKind.TENSOR else None
            axes = None if rank is None else [f"{name}.{axis}" for axis in range(rank)]
            graph.types[name] = ValueType.of(kind, axes)
        for name in graph.outputs:  # where none is known, the backend infers it
            known = self.types.get(name)
            if known is not None and is_onnx(known):
                graph.types[name] = ValueType.of(known)
        return model_of(
            Program(
                producer_name=keys.PRODUCER_NAME,
                name=graph.name,
                graph=graph,
                opset_imports=sorted_opsets(self.opsets.items()),
            )
        )


class GraphRunner:
    """A graph on one node's backend."""

    __slots__ = ("_backend", "_singles", "_spec", "_variants", "run")

    def __init__(self, spec: GraphSpec, backend: Backend) -> None:
        """Prepare the graph when its types are known; raises the backend's error."""
        self._spec = spec
        self._backend = backend
        self._variants: dict[tuple[int, ...], PreparedGraph] = {}
        self._singles: dict[int, GraphRunner] = {}
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
        wrong = [n.name for n in nodes if not is_onnx(n)]
        if wrong:
            raise InvalidOperand(f"{self._spec.where}: got {wrong[0]} where a tensor is needed")
        key = tuple(node.wire_hash for node in nodes)
        prepared = self._variants.get(key)
        if prepared is None:
            if len(self._variants) >= MAX_VARIANTS:
                self._variants.clear()
            prepared = self._variants[key] = self._backend.prepare(self._spec.model(nodes))
        return prepared.run(inputs)

    def lost_outputs(self, inputs: Sequence[Value]) -> list[bool]:
        """Return for each output if it needs an input that is MISSING."""
        graph = self._spec.graph
        pairs = zip(graph.inputs, inputs, strict=True)
        there = [name for name, value in pairs if value is not MISSING]
        lost = {name for at in _needing(graph, there) for name in graph.nodes[at].outputs}
        return [name in lost for name in graph.outputs]

    def run_singly(
        self, inputs: Sequence[Value], error: BaseException | None = None
    ) -> tuple[list[Value], list[tuple[int, BaseException]]]:
        """Run the ops one by one, but those that need what is not there, or what fails.

        Args:
            inputs: of the graph; MISSING for what is not there.
            error: with which the graph has failed, if it has. Where it names an op, that one is
                not run again, nor is what came before it for its sake alone.

        Returns the outputs, MISSING where they need what is not there, and the ops that failed, by
        their numbers.
        """
        graph = self._spec.graph
        nodes = graph.nodes
        pairs = zip(graph.inputs, inputs, strict=True)
        known = {name: value for name, value in pairs if value is not MISSING}
        blamed = None if error is None else _blamed(graph, error)
        due = _due(graph, known, blamed)
        failures: list[tuple[int, BaseException]] = []
        for number, node in enumerate(nodes):
            if number == blamed and error is not None:
                failures.append((number, error))
            if number not in due or not known.keys() >= set(read_by(node)):
                continue
            try:
                made = self._single(number).run([known[name] for name in read_by(node)])
            except BaseException as raised:  # noqa: BLE001 - the boundary to components
                let_stop(raised)
                failures.append((number, raised))
            else:
                known.update(zip(filter(None, node.outputs), made, strict=False))
        return [known.get(name, MISSING) for name in graph.outputs], failures

    def _single(self, number: int) -> GraphRunner:
        found = self._singles.get(number)
        if found is None:
            if len(self._singles) >= MAX_SINGLES:
                self._singles.clear()
            spec = self._spec.single(self._spec.graph.nodes[number])
            found = self._singles[number] = GraphRunner(spec, self._backend)
        return found


def read_by(node: OpNode) -> list[str]:
    """Return what a node of a graph computes with, each once; not what it leaves out."""
    return list(dict.fromkeys(filter(None, node.computes_with)))


def _blamed(graph: Subgraph, error: BaseException) -> int | None:
    """Return the number of the node that made a graph fail, as far as it is known."""
    number = number_of(blamed_node(error))
    if number is not None and number < len(graph.nodes):
        return number
    computing = [at for at, node in enumerate(graph.nodes) if node.op_type != "Constant"]
    return computing[0] if len(computing) == 1 else None


def _needing(graph: Subgraph, there: Collection[str], failed: int | None = None) -> set[int]:
    """Return the numbers of the nodes that need an input that is not there, or a failed node."""
    gone = set(graph.inputs).difference(there)
    found = set()
    for number, node in enumerate(graph.nodes):
        if number == failed or not gone.isdisjoint(node.computes_with):
            found.add(number)
            gone.update(filter(None, node.outputs))
    return found


def _due(graph: Subgraph, there: Collection[str], blamed: int | None) -> set[int]:
    """Return the nodes to run singly: all that can run, without what ran for `blamed` alone."""
    due = set(range(len(graph.nodes))) - _needing(graph, there, blamed)
    if blamed is None:
        return due
    ran = _before(graph, [blamed])
    outputs = set(graph.outputs)
    wanted = {at for at in due if at not in ran or outputs.intersection(graph.nodes[at].outputs)}
    return wanted | _before(graph, wanted)


def _before(graph: Subgraph, numbers: Collection[int]) -> set[int]:
    """Return the nodes that some nodes need, directly or not."""
    names: set[str] = set()
    found = set()
    for number in range(len(graph.nodes) - 1, -1, -1):
        node = graph.nodes[number]
        is_needed = not names.isdisjoint(filter(None, node.outputs))
        if is_needed:
            found.add(number)
        if is_needed or number in numbers:
            names.update(node.computes_with)
    return found


def function_spec(build: OpBuild, function: Function, slot: str) -> GraphSpec:
    """Return the graph of a backend subgraph function."""
    if len(build.inputs) != len(function.inputs) or len(build.outputs) > len(function.outputs):
        raise build.wrong(
            f"calls a graph of {len(function.inputs)} inputs and {len(function.outputs)} outputs "
            f"with {len(build.inputs)} and {len(build.outputs)}"
        )
    known = function.kinds()
    for names, given in (
        (function.inputs, build.flat.inputs),
        (function.outputs, build.flat.outputs),
    ):
        for inner, outer in zip(names, given, strict=False):
            if outer in build.types and not is_onnx(known.get(inner, TENSOR)):
                known[inner] = build.types[outer]
    graph = _graph(function.name, function.inputs, function.outputs, function.nodes)
    imported = {_short(entry.domain): entry.version for entry in function.opset_imports}
    used = {"", *(_short(node.domain) for node in graph.all_nodes())}
    return GraphSpec(
        slot=slot,
        where=build.where,
        place=build.place,
        graph=graph,
        opsets={d: v for d, v in {"": keys.ONNX_OPSET_VERSION, **imported}.items() if d in used},
        types=known,
    )


def single_spec(build: OpBuild, slot: str, opset_version: int) -> GraphSpec:
    """Return a graph that holds nothing but one `ai.onnx` op."""
    flat = build.flat
    ports: list[list[str]] = []
    known: dict[str, TypeNode] = {}
    for kind, names in (("in", flat.inputs), ("out", flat.outputs)):
        ports.append([f"{kind}{at}" if name else "" for at, name in enumerate(names)])
        known.update(
            (port, build.types[name])
            for port, name in zip(ports[-1], names, strict=True)
            if name in build.types
        )
    node = build.node.copy()
    node.inputs, node.outputs = tuple(ports[0]), tuple(ports[1])
    return GraphSpec(
        slot=slot,
        where=build.where,
        place=build.place,
        graph=_graph(flat.op_type, filter(None, ports[0]), filter(None, ports[1]), [node]),
        opsets={"": opset_version},
        types=known,
    )


def _graph(
    name: str, inputs: Iterable[str], outputs: Iterable[str], nodes: Iterable[OpNode]
) -> Subgraph:
    graph = Subgraph(name=name, inputs=list(inputs), outputs=list(outputs))
    for node in nodes:  # what it says to us is of no concern to a backend
        made = OpNode(
            node.op_type, _short(node.domain), node.name, node.inputs, node.outputs, node.attributes
        )
        graph.append(made)
    return graph


def _short(domain: str) -> str:
    return "" if is_onnx_domain(domain) else domain


Rescue: TypeAlias = Callable[[Frame, Sequence[Value], BaseException], Any]


def bind_graph(build: OpBuild, graph_at: int, cell_at: int) -> Fire:
    """Return the `fire` of a backend call; only inputs and outputs that are there take part."""
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
    named = [name for name in build.flat.outputs if name or outputs is build.outputs]
    known = tuple(Declared(_made_by_graphs(build.types.get(name))) for name in named)
    rescue = None
    if build.flat.domain == keys.BACKEND_SUBGRAPH_DOMAIN:
        salvage = _Salvage(build, graph_at, cell_at, inputs, known)
        op.salvage, rescue = salvage.lacking, salvage.failed
    if only and len(inputs) == 1:
        return _one_to_one(op, inputs[0], graph_at, cell_at, known[0], rescue)

    def fire(frame: Frame) -> Any:
        rt = frame.rt
        cell = rt.cells[cell_at]
        if cell.refuses(frame):
            return rt.suspensions.wait_for_component(cell, frame, op)
        values = frame.values
        given = [values[i] for i in inputs]
        try:
            results = rt.graphs[graph_at].run(given)
        except BaseException as error:
            let_stop(error)
            if rescue is None:
                raise
            return rescue(frame, given, error)
        if len(results) != len(known):
            raise _wrong_result(cell, op, f"returned {len(results)} outputs for {len(known)}")
        for made, declared in zip(results, known, strict=False):
            if type(made) is not np.ndarray or made.dtype is not declared.dtype:
                _check_result(cell, op, made, declared)
        return results[0] if only else results

    return fire


class _Salvage:
    """Runs the rest of a fused graph that fails, or that lacks some of its inputs."""

    __slots__ = ("_build", "_cell_at", "_graph_at", "_inputs", "_known", "_prefix")

    def __init__(
        self,
        build: OpBuild,
        graph_at: int,
        cell_at: int,
        inputs: tuple[int, ...],
        known: tuple[Declared, ...],
    ) -> None:
        self._build = build
        self._graph_at, self._cell_at = graph_at, cell_at
        self._inputs, self._known = inputs, known
        # Calls of Modules that stayed put their names before those of the author's ops.
        self._prefix = build.flat.name.removesuffix(build.node.name)

    def failed(
        self, frame: Frame, given: Sequence[Value], error: BaseException | None = None
    ) -> Literal[Marker.PARKED]:
        """Run what can run; returns what `fire` returns.

        Args:
            frame: the execution.
            given: the inputs, MISSING where they are lost.
            error: with which the graph has failed, if it has been tried.
        """
        rt, op, place = frame.rt, self._build.op, self._build.place
        results, failures = rt.graphs[self._graph_at].run_singly(given, error)
        if error is not None and not failures:
            raise error  # of the backend, and of no op
        cell = rt.cells[self._cell_at]
        for made, declared in zip(results, self._known, strict=True):
            if made is not MISSING:
                _check_result(cell, op, made, declared)
        blamed = [(place.at_number(number), raised) for number, raised in failures]
        done: Literal[Marker.PARKED] = rt.executor.emit_part(
            frame,
            op,
            results,
            [(f"{self._prefix}{at.inner}" if at.inner else op.name, e, at) for at, e in blamed],
        )
        return done

    def lacking(self, frame: Frame, lost: Set[int], reason: str | None) -> None:
        """End a call of which needed values are lost; `reason`: why it is skipped too, if it is.

        All of its ops need whatever else can be skipped, and whatever the call waits for that is no
        input of the graph: so the compiler groups them.
        """
        rt, op = frame.rt, self._build.op
        cell = rt.cells[self._cell_at]
        given = [MISSING if at in lost else frame.values[at] for at in self._inputs]
        if any(at in lost and at not in self._inputs for at in op.needs):
            rt.executor.emit_part(frame, op, [MISSING for _ in self._known], ())
        elif reason is not None:
            gone = rt.graphs[self._graph_at].lost_outputs(given)
            pairs = zip(self._build.outputs, gone, strict=True)
            rt.executor.take_away(frame, [at for at, is_gone in pairs if is_gone])
            rt.executor.skip(frame, op, reason)
        elif cell.refuses(frame):
            rt.suspensions.wait_for_component(cell, frame, op)
        else:
            self.failed(frame, given)


def _made_by_graphs(declared: TypeNode | None) -> TypeNode:
    """Return what a graph may make of a value: a tensor, where no sequence or optional is said."""
    if declared is not None and (declared.is_a(SEQUENCE) or declared.is_a(OPTIONAL)):
        return declared
    return narrower(TENSOR, declared)


def _one_to_one(
    op: Op, source: int, graph_at: int, cell_at: int, declared: Declared, rescue: Rescue | None
) -> Fire:
    """Return the same for one input and one output, as whole models have: less to do per call."""
    dtype = declared.dtype
    ndarray = np.ndarray  # a local name is quicker than one of a module

    def fire(frame: Frame) -> Any:
        rt = frame.rt
        cell = rt.cells[cell_at]
        if cell.refuses(frame):
            return rt.suspensions.wait_for_component(cell, frame, op)
        given = [frame.values[source]]
        try:
            results = rt.graphs[graph_at].run(given)
        except BaseException as error:
            let_stop(error)
            if rescue is None:
                raise
            return rescue(frame, given, error)
        try:
            (made,) = results  # quicker than to count
        except ValueError as error:
            raise _wrong_result(cell, op, f"returned {len(results)} outputs for 1") from error
        if type(made) is not ndarray or made.dtype is not dtype:
            _check_result(cell, op, made, declared)
        return made

    return fire


def _check_result(cell: ComponentCell, op: Op, made: Value, declared: Declared) -> None:
    misfit = declared.misfit(made)
    if misfit:
        raise _wrong_result(cell, op, f"made a wrong value: {misfit}")


def _wrong_result(cell: ComponentCell, op: Op, what: str) -> WrongResultType:
    name = cell.binding.type_name
    return WrongResultType(f"slot {cell.slot!r} ({name}), op {op.name}: the backend {what}")


# --- ranks of inputs -------------------------------------------------------------------
#
# A backend that knows the rank of an input can lay tensors out for its convolutions (ONNX Runtime
# then runs a small CNN a sixth faster); the sizes stay open. Nothing is guessed: what is not
# certain is None, and an op without the ports that it needs says nothing (the backend refuses it).

# Ops whose output 0 has the rank of their only data input.
_SAME = frozenset(
    {"Abs", "Cast", "Clip", "Dropout", "Elu", "Identity", "LeakyRelu", "Neg", "Relu", "Sigmoid",
     "Softplus", "Sqrt", "Tanh"}
)  # fmt: skip
# Ops of two tensors, one of which may be a constant that broadcasts.
_BROADCAST = frozenset({"Add", "Div", "Mul", "Sub"})
_WEIGHTED = frozenset({"Conv", "ConvTranspose"})
_BINARY = _BROADCAST | _WEIGHTED
_POOLS = frozenset({"AveragePool", "LpPool", "MaxPool"})

_MAX_STEPS = 32  # ops that are looked through on the way to one that says it


def input_rank(graph: Subgraph, value: str) -> int | None:
    """Return the rank of an input of a graph, or None where its readers leave it open."""
    least = 0  # constants that it met on the way have lower ranks than the answer
    for _ in range(_MAX_STEPS):
        onward = None
        for node in graph.readers(value):
            inputs = node.inputs
            if not node.outputs or len(inputs) < (2 if node.op_type in _BINARY else 1):
                continue
            rank = _told(graph, node, value)
            if rank is not None:
                return rank if rank > least else None
            if node.op_type in _SAME and inputs[0] == value:
                onward = node.outputs[0]
            elif node.op_type in _BROADCAST and value in inputs[:2]:
                constant = _constant_rank(graph, inputs[1] if inputs[0] == value else inputs[0])
                if constant is not None:
                    least = max(least, constant)
                    onward = node.outputs[0]
        if onward is None:
            return None
        value = onward
    return None


def _told(graph: Subgraph, node: OpNode, value: str) -> int | None:
    """Return the rank of `value` by an op that takes no other."""
    if node.inputs[0] != value:
        return None
    if node.op_type in _WEIGHTED:
        return _constant_rank(graph, node.inputs[1])
    if node.op_type in _POOLS:
        kernel = node.attr("kernel_shape")
        return len(kernel) + 2 if isinstance(kernel, tuple) else None
    return 2 if node.op_type == "Gemm" else None


def _constant_rank(graph: Subgraph, value: str) -> int | None:
    node = graph.producer(value)
    tensor = node.attr("value") if node is not None and node.op_type == "Constant" else None
    return len(tensor.shape) if isinstance(tensor, Tensor) else None
