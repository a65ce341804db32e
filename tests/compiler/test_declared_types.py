"""Strict and permissive types over everything that can be recorded: all of `ai.onnx`, all shipped
components, and what a node keeps under a name."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from onnx import GraphProto, ModelProto, TensorProto, helper
from onnx.defs import OpSchema

from bbnode.compiler import Compiler
from bbnode.compiler.errors import (
    CompileError,
    NothingStored,
    StoredTypesDiffer,
    TypeConstraintFailed,
    UnresolvedType,
)
from bbnode.components import ArrayDataSource, ConnectedView, OrtBackend
from bbnode.components.contracts import Component
from bbnode.components.registry import ENTRY_POINT_GROUP, component_class, roles_of
from bbnode.dsl import (
    BackendSlot,
    DataSourceSlot,
    Graph,
    LoopStep,
    Module,
    Output,
    PeerSelectorSlot,
    syscalls,
    types,
)
from bbnode.dsl.backend.catalogue import catalogue
from bbnode.dsl.core.recorder import SlotUse
from bbnode.ir import keys, opset, plugins
from bbnode.ir.onnx_file import program_of
from bbnode.ir.opset import OpSpec
from bbnode.ir.types import TypeNode

_Kind = OpSchema.AttrType
# Attributes that no default can stand for.
GIVEN: dict[str, dict[str, Any]] = {
    "Cast": {"to": TensorProto.FLOAT},
    "Constant": {"value_float": 1.0},
    "Einsum": {"equation": "i->i"},
    "Split": {"num_outputs": 2},
}
ANY_VALUE: dict[Any, Any] = {
    _Kind.INT: 1, _Kind.FLOAT: 1.0, _Kind.STRING: "x", _Kind.INTS: [1], _Kind.FLOATS: [1.0],
    _Kind.STRINGS: ["x"], _Kind.TENSOR: np.zeros(1, np.float32),
}  # fmt: skip


class Recorded(Module):
    """A Module made of a function."""

    def __init__(self, body: Callable[[Graph], object], bootstrap: Any = None) -> None:
        self._body, self._bootstrap = body, bootstrap

    def body(self, g: Graph) -> None:
        self._body(g)

    def bootstrap(self, g: Graph) -> None:
        if self._bootstrap is not None:
            self._bootstrap(g)


def target_types(model: ModelProto) -> dict[str, TypeNode]:
    """Types of all values of all targets."""
    return {
        name: kind
        for function in program_of(model).functions
        if keys.TARGET_KEY in function.metadata
        for name, kind in function.kinds().items()
    }


def identity_graph() -> GraphProto:
    made = [helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in ("i", "o")]
    return helper.make_graph([helper.make_node("Identity", ["i"], ["o"])], "g", made[:1], made[1:])


def record_op(g: Graph, op_type: str, inputs: list[Output]) -> object:
    compute = BackendSlot("compute")
    if op_type == "If":
        return compute.if_(g, inputs[0], lambda b: b.constant(1.0), lambda b: b.constant(0.0))
    if op_type == "Loop":
        return compute.loop(
            g, lambda b, _, x: LoopStep(carried=[compute.add(b, x, x)]), inputs[0], trip_count=2
        ).carried
    schema = catalogue()[op_type]
    attributes = {
        name: ANY_VALUE.get(formal.type) or identity_graph()
        if formal.type is not _Kind.TENSOR
        else ANY_VALUE[_Kind.TENSOR]
        for name, formal in schema.attributes.items()
        if formal.required
    }
    if op_type == "SequenceMap":
        attributes["outputs"] = 1
    if op_type == "Scan":
        attributes["num_scan_inputs"] = 1
    return compute.op(g, op_type, *inputs, **attributes | GIVEN.get(op_type, {}))


def arity(op_type: str, every: bool) -> int:
    schema = catalogue()[op_type]
    variadic = schema.inputs and schema.inputs[-1].option == OpSchema.FormalParameterOption.Variadic
    if every and not variadic and op_type not in ("Resize", "ConstantOfShape"):
        return len(schema.inputs)
    return max(schema.min_input, 1 if schema.inputs else 0)


def refusal(compiler: Compiler, model: ModelProto) -> CompileError | None:
    """The typed error about types; whatever else is raised fails the test."""
    try:
        compiler.compile(model)
    except (UnresolvedType, TypeConstraintFailed) as error:
        return error
    return None


@pytest.mark.parametrize("op_type", sorted(catalogue()))
def test_an_op_of_inputs_of_undeclared_types_compiles_or_says_what_to_declare(op_type: str) -> None:
    for count in sorted({arity(op_type, every) for every in (False, True)}):
        for kinds in (
            [types.TENSOR] * count,
            [types.ANY] * count,
            [types.TENSOR_FLOAT, *[types.TENSOR] * (count - 1)][:count],
        ):

            def body(g: Graph, kinds: list[TypeNode] = kinds) -> None:
                inputs = [g.input(f"x{i}", kind) for i, kind in enumerate(kinds)]
                made = record_op(g, op_type, inputs)
                for i, value in enumerate(made if isinstance(made, tuple | list) else [made]):
                    g.output(f"y{i}", value)

            model = Recorded(body).build()
            compiler = Compiler().bind_backend("compute", OrtBackend)
            for chosen in (compiler, compiler.with_permissive_types()):
                refused = refusal(chosen, model)
                if refused is None or kinds[:1] == [types.TENSOR_FLOAT]:
                    continue
                assert chosen is compiler, f"permissive types refuse it: {refused}"
                assert "Declare it" in str(refused)
                assert refused.source_line.startswith("test_declared_types.py:")


def test_cast_says_the_type_of_what_it_makes_and_no_more() -> None:
    def body(g: Graph) -> None:
        compute = BackendSlot("compute")
        g.output("y", compute.cast(g, g.input("x", types.TENSOR), to=types.TENSOR_DOUBLE))

    model = Recorded(body).build()
    compiler = Compiler().bind_backend("compute", OrtBackend)
    with pytest.raises(UnresolvedType, match=r"input 'x'.*g\.input\('x', types\.TENSOR_FLOAT\)"):
        compiler.compile(model)
    made = compiler.with_permissive_types().compile(model)
    assert target_types(made)["y"] is types.TENSOR_DOUBLE


# --- shipped components -------------------------------------------------------------------

SHIPPED = sorted(n for n in plugins.names(ENTRY_POINT_GROUP) if n.startswith("bbnode."))


SUPPLIERS: dict[str, tuple[str, type[Component]]] = {
    "backend": ("Backend", OrtBackend),
    "data_source": ("DataSource", ArrayDataSource),
    "protocol": ("Protocol", component_class("bbnode.GlobalRegistryClient")),
}


def ops_of(component: type[Component]) -> list[tuple[str, OpSpec]]:
    found = []
    for role in roles_of(component):
        domain = keys.role_domain(role)
        if role == "Protocol":
            name = importlib.import_module(component.__module__).__dict__.get("DOMAIN")
            domain = name or f"{keys.PROTOCOL_DOMAIN_PREFIX}global_registry"
        found += [
            (role, spec)
            for spec in opset.ops_of(domain)
            if callable(getattr(component, spec.method, None))
        ]
    return found


@pytest.mark.parametrize("type_name", SHIPPED)
def test_every_op_of_every_shipped_component_compiles_strictly(type_name: str) -> None:
    component = component_class(type_name)
    for role, spec in ops_of(component):

        def body(g: Graph, role: str = role, spec: OpSpec = spec) -> None:
            inputs = []
            for port in spec.inputs:
                kind = port.type if isinstance(port.type, TypeNode) else types.ANY
                if port.batch:
                    stored = component.storage.get(f"{spec.op_type}.{port.name}")
                    texts = stored is types.TENSOR_STRING
                    kind = types.TENSOR_STRING if texts else types.TENSOR_FLOAT
                if port.name == "target":  # class numbers or values: the author's to say
                    kind = types.TENSOR_INT64
                inputs.append(g.input(port.name, types.PEER_ID if kind is types.ANY else kind))
            required = {n: 2 for n, d in spec.attributes.items() if d is opset.REQUIRED}
            cls = "peer" if role == "PeerSelector" else None
            use = SlotUse(name="slot", role=role, peer_class=cls)
            made = g.record(spec, inputs, required, slot=use)
            for i, value in enumerate(made):
                g.output(f"y{i}", value)

        compiler = Compiler().bind(role, "slot", component)
        for needed, slot in component.depends.items():
            compiler = compiler.bind(SUPPLIERS[needed][0], slot, SUPPLIERS[needed][1])
        compiler.compile(Recorded(body).build())


def test_labels_are_whole_numbers_unless_the_program_says_otherwise() -> None:
    def labels(use: Callable[[Graph, Output], Output]) -> TypeNode:
        def body(g: Graph) -> None:
            go = g.input("go", types.TRIGGER)
            _, found = DataSourceSlot("data").next_batch(g, after=go)
            g.output("labels", use(g, found))

        compiler = Compiler().bind_data_source("data", ArrayDataSource)
        made = compiler.bind_backend("compute", OrtBackend).compile(Recorded(body).build())
        return target_types(made)["labels"]

    compute = BackendSlot("compute")
    assert labels(lambda _, found: found) is types.TENSOR_INT64
    as_floats = labels(lambda g, found: compute.mul(g, found, g.constant(2.0)))
    assert as_floats is types.TENSOR_FLOAT
    with pytest.raises(TypeConstraintFailed, match=r"gives Tensor\.INT64 or Tensor\.FLOAT"):
        labels(lambda g, found: compute.op(g, "Not", found))


def test_labels_that_nobody_reads_are_whatever_they_are() -> None:
    def body(g: Graph) -> None:
        go = g.input("go", types.TRIGGER)
        batch, labels = DataSourceSlot("data").next_batch(g, after=go)
        g.output("batch", batch, after=labels)

    compiler = Compiler().bind_data_source("data", ArrayDataSource)
    found = target_types(compiler.compile(Recorded(body).build()))
    assert found["NextBatch_0.labels"] is types.TENSOR


# --- what a node keeps under a name ---------------------------------------------------------

PUTS_AND_TAKES = [
    (syscalls.hold_stash, syscalls.hold_flush, "slot"),
    (syscalls.serialize_enqueue, syscalls.serialize_dequeue, "queue"),
]


class Inner(Module):
    """Takes a value out, in a function of its own."""

    def __init__(self, take: Any, name: str) -> None:
        self._take, self._name = take, name

    def body(self, g: Graph) -> None:
        syscalls.app_notify(g, g.input("go", types.TRIGGER), name="going")
        held = self._take(g, g.input("tick", types.TRIGGER), **{self._name: "kept"})
        g.output("held", held)


@pytest.mark.parametrize(("put", "take", "name"), PUTS_AND_TAKES)
def test_what_is_taken_has_the_type_of_what_is_put(put: Any, take: Any, name: str) -> None:
    def fill(g: Graph) -> None:
        put(g, g.input("first", types.TENSOR_DOUBLE), **{name: "kept"})

    def body(g: Graph) -> None:
        tick = g.input("tick", types.TRIGGER)
        for i in range(2):
            call = Inner(take, name).call().input("go", tick).input("tick", tick).build(g)
            g.output(f"y{i}", call.output("held"))
        peers = PeerSelectorSlot("peers", peer_class="far").sample(g, n=1, after=tick)
        there = g.net_out("tick", peers, tick)
        syscalls.app_emit(g, take(g, there, **{name: "kept"}), name="there")

    compiler = Compiler().bind_peer_selector("peers", ConnectedView)
    found = target_types(compiler.compile(Recorded(body, fill).build()))
    assert found["y0"] is found["y1"] is types.TENSOR_DOUBLE


@pytest.mark.parametrize(("put", "take", "name"), PUTS_AND_TAKES)
def test_two_types_under_one_name_name_both_lines(put: Any, take: Any, name: str) -> None:
    def body(g: Graph) -> None:
        put(g, g.input("x", types.TENSOR_FLOAT), **{name: "kept"})
        taken = take(g, g.input("tick", types.TRIGGER), **{name: "kept"})
        compute = BackendSlot("compute")
        g.output("y", compute.add(g, taken, g.constant(1)))

    compiler = Compiler().bind_backend("compute", OrtBackend)
    with pytest.raises(CompileError) as refused:
        compiler.compile(Recorded(body).build())
    assert isinstance(refused.value, StoredTypesDiffer | TypeConstraintFailed)
    assert "Tensor.FLOAT" in str(refused.value)
    assert "Tensor.INT64" in str(refused.value)


@pytest.mark.parametrize(("put", "take", "name"), PUTS_AND_TAKES)
def test_what_nothing_ever_puts_there_is_refused_with_any_types(
    put: Any, take: Any, name: str
) -> None:
    def body(g: Graph) -> None:
        put(g, g.input("x", types.TENSOR_FLOAT), **{name: "other"})
        g.output("y", take(g, g.input("tick", types.TRIGGER), **{name: "kept"}))

    for compiler in (Compiler(), Compiler().with_permissive_types()):
        with pytest.raises(NothingStored, match=r"'kept'.*test_declared_types"):
            compiler.compile(Recorded(body).build())
