"""Every way in which a compile can fail, provoked from an author's source.

Rule: each variant has a case, and a variant without one fails the suite. A case is a function
that raises the error; the line that is to blame carries `# here`. Where no Module can be
written that provokes a variant, `how` says what it takes instead, and the case's docstring why.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import PurePath
from typing import Any

import pytest
from onnx import ModelProto, TensorProto, helper

from bbnode.compiler import CompilationUnit, CompileOptions, Compiler, Pass, errors
from bbnode.compiler.analysis.gate_contracts import (
    GateContract,
    PartitionView,
    register_gate_contract,
    unregister_gate_contract,
)
from bbnode.compiler.errors import CompileError
from bbnode.components.contracts import Model
from bbnode.components.registry import register_component
from bbnode.dsl import (
    AggregatorSlot,
    BackendSlot,
    ConcreteSpec,
    Graph,
    ModelSlot,
    Module,
    PeerSelectorSlot,
    syscalls,
    types,
)
from bbnode.ir import keys
from tests import protos
from tests.compiler.programs import (
    DoubleModel,
    FakeAggregator,
    FakeBackend,
    FakeModel,
    FakeSelector,
)

SOURCE = "source"  # from the lines of a Module, or of the bind chain
MODEL = "hand-made model"
STAGE = "code of the caller's own that runs inside of the compile"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One variant and what its error has to say."""

    variant: type[CompileError]
    provoke: Callable[[], object]
    fields: Mapping[str, Any]
    says: tuple[str, ...]
    how: str
    module: str

    @property
    def line(self) -> str:
        """`<file>:<line>` of the line to blame, or "" when no line is."""
        lines, first = inspect.getsourcelines(self.provoke)
        marked = [first + i for i, text in enumerate(lines) if text.rstrip().endswith("# here")]
        file_name = PurePath(inspect.getsourcefile(self.provoke) or "").name
        return f"{file_name}:{marked[0]}" if marked else ""


CASES: list[Case] = []


def case(
    variant: type[CompileError],
    *says: str,
    how: str = SOURCE,
    module: str = "Program",
    **fields: Any,
) -> Callable[[Callable[[], object]], Callable[[], object]]:
    """Register the decorated function as a case.

    `fields` are all fields of the error; a compiled pattern is searched for, anything else has
    to be equal. `says` are pieces of the text. `module` is the Module that the text names.
    """

    def add(provoke: Callable[[], object]) -> Callable[[], object]:
        CASES.append(
            Case(variant=variant, provoke=provoke, fields=fields, says=says, how=how,
                 module=module)
        )  # fmt: skip
        return provoke

    return add


class Program(Module):
    """A Module made of functions; its home is `server`."""

    name = "Program"
    home = "server"

    def __init__(
        self,
        body: Callable[[Graph], object],
        bootstrap: Callable[[Graph], object] | None = None,
        *,
        name: str = "Program",
        home: str = "server",
    ) -> None:
        self.name = name
        self.home = home
        self._body = body
        self._bootstrap = bootstrap

    def body(self, g: Graph) -> None:
        self._body(g)

    def bootstrap(self, g: Graph) -> None:
        if self._bootstrap is not None:
            self._bootstrap(g)


def bound() -> Compiler:
    """A compiler with the slots bound that the cases use."""
    return (
        Compiler()
        .bind_backend("compute", FakeBackend)
        .bind_model("net", FakeModel)
        .bind_aggregator("mean", FakeAggregator)
        .bind_peer_selector("pick", FakeSelector)
        .bind_peer_selector("watch", FakeSelector)
    )


def compile_body(
    body: Callable[[Graph], object], bootstrap: Callable[[Graph], object] | None = None
) -> ModelProto:
    return bound().compile(Program(body, bootstrap).build())


COMPUTE = BackendSlot("compute")
NET = ModelSlot("net")
CLIENTS = PeerSelectorSlot("pick", peer_class="client")


def relay(g: Graph) -> None:
    """A valid program of two classes."""
    value = g.input("value", types.TENSOR_FLOAT)
    received = g.net_out("there", CLIENTS.sample(g, n=2), value)
    g.output("result", g.net_out("back", received.sender, received))


# --- validate -------------------------------------------------------------------------------


@case(errors.UnknownOp, "com.example::Fuse", "import the package",
      node_name="Fuse_0", op_type="Fuse", domain="com.example")  # fmt: skip
def unknown_op() -> object:
    def body(g: Graph) -> None:
        g.emit("com.example", "Fuse", inputs=[g.input("x", types.TENSOR_FLOAT)])  # here

    return compile_body(body)


@case(errors.DanglingInput, "'ghost'", "`g.input`", node_name="If_0", input_name="ghost")
def dangling_input() -> object:
    def body(g: Graph) -> None:
        made = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
        nodes = [helper.make_node("Neg", ["ghost"], ["y"])]
        branch = helper.make_graph(nodes, "branch", [], [made])
        flag = g.input("flag", types.TENSOR_BOOL)
        chosen = COMPUTE.op(g, "If", flag, then_branch=branch, else_branch=branch)  # here
        g.output("y", chosen)

    return compile_body(body)


@case(errors.DuplicateOutput, "written by", "name of its own", how=MODEL,
      value_name="y", node_a="PassThrough_0", node_b="PassThrough_1")  # fmt: skip
def duplicate_output() -> object:
    """The recorder gives each value a name of its own."""

    def body(g: Graph) -> None:
        x = g.input("x", types.TENSOR_FLOAT)
        g.output("y", x)
        g.output("z", x)  # here

    model = Program(body).build()
    model.functions[0].node[1].output[0] = "y"
    return bound().compile(model)


@case(errors.DuplicateNodeName, "more than one op called 'PassThrough_0'", "name of its own",
      how=MODEL, node_name="PassThrough_0", function="Program")  # fmt: skip
def duplicate_node_name() -> object:
    """The recorder counts the ops of each type."""

    def body(g: Graph) -> None:
        x = g.input("x", types.TENSOR_FLOAT)
        g.output("y", x)
        g.output("z", x)  # here

    model = Program(body).build()
    model.functions[0].node[1].name = "PassThrough_0"
    return bound().compile(model)


@case(errors.MissingTypeInfo, "'x'", "'Program'", "value_info", how=MODEL,
      module="", input_name="x", function="Program")  # fmt: skip
def missing_type_info() -> object:
    """The recorder declares a type for every input, and be it Any."""
    model = Program(lambda g: g.output("y", g.input("x", types.TENSOR_FLOAT))).build()
    del model.functions[0].value_info[:]
    return bound().compile(model)


@case(errors.MalformedSlotMetadata, "it names no slot", "through a slot class",
      node_name="Params_0", detail="it names no slot")  # fmt: skip
def malformed_slot_metadata() -> object:
    def body(g: Graph) -> None:
        g.emit(keys.role_domain("Model"), "Params", outputs=[("params", types.TENSOR)])  # here

    return compile_body(body)


@case(errors.CyclicGraph, "wait for each other", "'PassThrough_0'", "'Relu_0'", "new execution",
      how=MODEL, module="", involves=("PassThrough_0", "Relu_0"))  # fmt: skip
def cyclic_graph() -> object:
    """A value can be read only after it was recorded, so that the recorder closes no ring."""

    def body(g: Graph) -> None:
        g.output("y", COMPUTE.relu(g, g.input("x", types.TENSOR_FLOAT)))

    model = Program(body).build()
    protos.set_meta(model.functions[0].node[0], keys.AFTER_KEY, "y")
    return bound().compile(model)


@case(errors.OpsetNotImported, "version 11", "opset_import",
      domain="", version_used=11, version_imported=None, node_name="Old_0")  # fmt: skip
def opset_not_imported() -> object:
    def old(g: Graph) -> None:
        x = g.input("x", types.TENSOR_FLOAT)
        made = [("y", types.TENSOR_FLOAT)]
        (y,) = g.emit("", "Squeeze", inputs=[x], outputs=made, opset_version=11)
        g.net_out("there", CLIENTS.sample(g, n=1, after=y), y)

    def body(g: Graph) -> None:
        x = COMPUTE.relu(g, g.input("x", types.TENSOR_FLOAT))
        Program(old, name="Old").call().input("x", x).build(g)  # here

    return compile_body(body)


@case(errors.SiteCollision, "port 'same'", "a name of its own", how=MODEL, port="same",
      receiver="client", node_name="Send_1/Recv", other="Send_0/Recv")  # fmt: skip
def site_collision() -> object:
    """The recorder lets sends of one port arrive as one."""

    def body(g: Graph) -> None:
        tick = g.input("tick", types.TRIGGER)
        clients = CLIENTS.sample(g, n=2, after=tick)
        g.output("a", g.net_out("same", clients, tick))
        g.output("b", g.net_out("other", clients, tick))  # here

    model = Program(body).build()
    for node in model.functions[0].node:
        if node.op_type == "Send":
            protos.set_meta(node, keys.PORT_KEY, "same")
    return bound().compile(model)


@case(errors.UnpairedWireRequest, "nothing answers", "exactly one",
      node_name="SendReqBatched_0", detail="nothing answers the request")  # fmt: skip
def unpaired_wire_request() -> object:
    def body(g: Graph) -> None:
        tick = g.input("tick", types.TRIGGER)
        r = g.request("ask", CLIENTS.sample(g, n=2, after=tick), tick)  # here
        AggregatorSlot("mean").contribute_all(g, r.responses)

    return compile_body(body)


# --- placement ------------------------------------------------------------------------------


@case(errors.UnresolvedPeerClass, "whose class is unknown", "peer_class=",
      node_name="Send_0", peer_input="Sample_0.peers", classes=())  # fmt: skip
def unresolved_peer_class() -> object:
    def body(g: Graph) -> None:
        value = g.input("value", types.TENSOR_FLOAT)
        g.net_out("out", PeerSelectorSlot("pick").sample(g, n=2), value)  # here

    return compile_body(body)


@case(errors.UnresolvedPeerClass, "of several classes: 'client', 'watcher'", "of its own",
      node_name="Send_4", peer_input="Send_1.sender",
      classes=("client", "watcher"))  # fmt: skip
def senders_of_two_classes() -> object:
    def body(g: Graph) -> None:
        value = g.input("value", types.TENSOR_FLOAT)
        watchers = PeerSelectorSlot("watch", peer_class="watcher").sample(g, n=1)
        for peers in (CLIENTS.sample(g, n=2), watchers):
            received = g.net_out("there", peers, value)
            g.net_out("report", received.sender, received)
        report = g.lookup_output("report")
        g.net_out("thanks", report.sender, report)  # here

    return compile_body(body)


@case(errors.CrossClassDataflow, "'server'", "'client'", "`g.net_out(",
      node_name="Add_0", home_a="server", home_b="client",
      value_a="value", value_b="Send_0.received",
      producer_a="function input", producer_b="Send_0", port="out",
      brought_by="net_out", is_answer=False, is_later=False)  # fmt: skip
def cross_class_dataflow() -> object:
    def body(g: Graph) -> None:
        value = g.input("value", types.TENSOR_FLOAT)
        received = g.net_out("out", CLIENTS.sample(g, n=2), value)
        g.output("sum", COMPUTE.add(g, value, received))  # here

    return compile_body(body)


@case(errors.HomeContradicted, "'Homed'", "'server'", "'client'", "`g.net_out(",
      called="Homed", home="server", value="Send_0.received", lives_on="client")  # fmt: skip
def home_contradicted() -> object:
    class Homed(Module):
        home = "server"

        def body(self, g: Graph) -> None:
            x = g.input("x", types.TENSOR_FLOAT)
            g.output("y", COMPUTE.add(g, x, x))

    def body(g: Graph) -> None:
        value = g.input("value", types.TENSOR_FLOAT)
        received = g.net_out("out", CLIENTS.sample(g, n=2), value)
        g.output("sum", Homed().call().input("x", received).build(g).output("y"))  # here

    return compile_body(body)


@case(errors.AmbiguousHome, "'net'", "'client', 'server'", "after=",
      node_name="Params_0", slot="net", homes=("client", "server"))  # fmt: skip
def ambiguous_home() -> object:
    def body(g: Graph) -> None:
        value = g.input("value", types.TENSOR_FLOAT)
        NET.load_parameters(g, value)
        NET.load_parameters(g, g.net_out("out", CLIENTS.sample(g, n=2), value))
        g.output("params", NET.params(g))  # here

    return compile_body(body)


# --- types ----------------------------------------------------------------------------------


@case(errors.TypeConstraintFailed, "do not fit", "Tensor.DOUBLE", "Cast",
      op="Add_0",
      detail="Tensor.FLOAT meets Tensor.DOUBLE at Add; see the input 'a' and the input "
             "'b'",
      wanted="Tensor.DOUBLE")  # fmt: skip
def type_constraint_failed() -> object:
    def body(g: Graph) -> None:
        a, b = g.input("a", types.TENSOR_FLOAT), g.input("b", types.TENSOR_DOUBLE)
        g.output("sum", COMPUTE.add(g, a, b))  # here

    return compile_body(body)


@case(errors.UnresolvedType, "'Unbundle_0.parts_0'", "`g.input(name, type)`",
      value="Unbundle_0.parts_0", known="Tensor", op="Unbundle_0")  # fmt: skip
def unresolved_type() -> object:
    def body(g: Graph) -> None:
        (part,) = g.unbundle(g.input("both", types.COMPOSITE), [types.TENSOR])  # here
        syscalls.app_emit(g, part, name="seen")

    return compile_body(body)


@case(errors.ShapeContradiction, "[4, 3]", "[2, 2]", "`shape=`",
      op="PassThrough_0",
      detail=re.compile(r"'y' is declared \[2, 2\].* \(at .*variant\.py:\d+\)"))  # fmt: skip
def shape_contradiction() -> object:
    def body(g: Graph) -> None:
        x = g.input("x", types.TENSOR_FLOAT, shape=[4, 3])
        g.output("y", COMPUTE.relu(g, x), shape=[2, 2])  # here

    return compile_body(body)


@case(errors.StoredTypesDiffer, "'buffer'", "test_errors_every_variant.py:", "a name of its own",
      op="Hold.Stash_1", kind="Tensor.INT64", name="buffer",
      other_op="Hold.Stash_0", other_kind="Tensor.FLOAT",
      other_line=re.compile(r"variant.py:\d+$"))  # fmt: skip
def stored_types_differ() -> object:
    def body(g: Graph) -> None:
        syscalls.hold_stash(g, g.input("x", types.TENSOR_FLOAT), slot="buffer")
        syscalls.hold_stash(g, g.input("n", types.TENSOR_INT64), slot="buffer")  # here

    return compile_body(body)


@case(errors.NothingStored, "'bufer'", "Hold.Stash",
      op="Hold.Flush_0", op_type="Hold.Flush", name="bufer", puts="Hold.Stash")  # fmt: skip
def nothing_stored() -> object:
    def body(g: Graph) -> None:
        syscalls.hold_stash(g, g.input("x", types.TENSOR_FLOAT), slot="buffer")
        held = syscalls.hold_flush(g, g.input("tick", types.TRIGGER), slot="bufer")  # here
        syscalls.app_emit(g, held, name="seen")

    return compile_body(body)


@case(errors.IncompatibleStorageOnEdge, "'Send_0' sends", "Codec",
      send_node="Send_0", recv_node="LoadParameters_0",
      sent="Tensor.FLOAT", received="Tensor.DOUBLE", port="")  # fmt: skip
def incompatible_storage_on_edge() -> object:
    def body(g: Graph) -> None:
        weights = g.input("weights", types.TENSOR_FLOAT)
        received = g.net_out("out", CLIENTS.sample(g, n=2), weights)  # here
        ModelSlot("precise").load_parameters(g, received)

    return bound().bind_model("precise", DoubleModel).compile(Program(body).build())


# --- slots and bindings ---------------------------------------------------------------------


@case(errors.UnboundSlot, "slot 'net' (Model)", "`.bind_model('net', ", module="",
      slot="net", role="Model", target=re.compile("^server#"))  # fmt: skip
def unbound_slot() -> object:
    return (
        Compiler()
        .with_permissive_types()
        .compile(Program(lambda g: g.output("params", NET.params(g))).build())
    )


Leaning: Any = register_component(
    type(
        "Leaning",
        (FakeModel,),
        {"TYPE_NAME": "test.Leaning", "depends": {"data_source": "shelf"}},
    )
)


@case(errors.UnboundDependency, "DataSource", "'shelf'", "`.bind_data_source('shelf', ",
      module="", component="test.Leaning", bound_at_slot="net", required_role="DataSource",
      required_slot="shelf", for_op="", others=())  # fmt: skip
def unbound_dependency() -> object:
    model = Program(lambda g: g.output("params", NET.params(g))).build()
    return Compiler().bind_model("net", Leaning).compile(model)


@case(errors.MissingBinding, "'not.installed'", "concrete component",
      slot="net", site=re.compile("Params_0.*not.installed"))  # fmt: skip
def missing_binding() -> object:
    def body(g: Graph) -> None:
        foreign = ConcreteSpec(role="Model", type_name="not.installed", config=b"\x80")
        g.output("params", ModelSlot("net", concrete=foreign).params(g))  # here

    return Compiler().with_permissive_types().compile(Program(body).build())


@case(errors.BindingMismatch, "can't be bound as Aggregator", "Aggregator contract", module="",
      slot="net", role="Aggregator",
      detail=re.compile("function 'Program' uses it as a Model slot"))  # fmt: skip
def binding_mismatch() -> object:
    model = Program(lambda g: g.output("params", NET.params(g))).build()
    return Compiler().bind_aggregator("net", FakeAggregator).compile(model)


@case(errors.AmbiguousRole, "concrete ('test.FakeModel')", "different names",
      role="Model", concrete_type="test.FakeModel", generic_slot_id=0, slot="net")  # fmt: skip
def ambiguous_role() -> object:
    def body(g: Graph) -> None:
        mine = ConcreteSpec(role="Model", type_name="test.FakeModel", config=b"\x80")
        g.output("a", ModelSlot("net", concrete=mine).params(g))
        g.output("b", NET.params(g))  # here

    return compile_body(body)


Untrainable: Any = register_component(
    type("Untrainable", (FakeModel,), {"TYPE_NAME": "test.Untrainable", "train": None})
)


@case(errors.RoleMethodFailed, "'test.Untrainable' has no method 'train'", "has the method",
      slot="net", op_type="Train",
      source="'test.Untrainable' has no method 'train'")  # fmt: skip
def role_method_failed() -> object:
    def body(g: Graph) -> None:
        g.output("stats", NET.train(g))  # here

    return Compiler().bind_model("net", Untrainable).compile(Program(body).build())


# --- ops and functions ----------------------------------------------------------------------


@case(errors.ExpansionFailed, "quorum is 3, but only 2 peers are asked", "`quorum=` of 2 at most",
      op_type="SendReqBatched", domain=keys.WIRE_DOMAIN, node_name="SendReqBatched_0",
      reason="quorum is 3, but only 2 peers are asked",
      remedy="Ask more peers, or give a `quorum=` of 2 at most")  # fmt: skip
def expansion_failed() -> object:
    def body(g: Graph) -> None:
        weights = g.input("weights", types.TENSOR_FLOAT)
        r = g.request("ask", CLIENTS.sample(g, n=2), weights, quorum=3)  # here
        r.respond(r.received)

    return compile_body(body)


@case(errors.EmptyFunctionTable, "holds no functions", "Module.build()", how=MODEL, module="")
def empty_function_table() -> object:
    """A Module always has a body; a file of plain ONNX has none and goes into OnnxModule."""
    graph = helper.make_graph([], "plain", [], [])
    return Compiler().compile(helper.make_model(graph, ir_version=keys.FRAMEWORK_IR_VERSION))


@case(errors.ModelOutOfBounds, "can't be compiled", "Module.build()", how=MODEL, module="",
      detail=re.compile("name|long|characters"))  # fmt: skip
def model_out_of_bounds() -> object:
    """The recorder bounds names and depths itself."""
    model = Program(relay).build()
    model.functions[0].node[0].name = "x" * 10_000_000
    return bound().compile(model)


@case(errors.AlreadyCompiled, "compiled already", "Install it", module="",
      detail=re.compile("keeps nothing of its recorded form"))  # fmt: skip
def already_compiled() -> object:
    compiled = compile_body(relay)
    protos.del_meta(compiled, keys.RECORDED_KEY)
    return bound().compile(compiled)


@case(errors.DuplicateFunction, "::Program", "another name", how=MODEL, module="",
      domain=keys.MODULE_DOMAIN, function="Program")  # fmt: skip
def duplicate_function() -> object:
    """The recorder calls a second body of one name `<name>_2`."""
    model = Program(relay).build()
    model.functions.append(model.functions[0])
    return bound().compile(model)


@case(errors.WireOpInBootstrap, "'Program__bootstrap'", "Send from the Module's body",
      node_name="Send_0", function="Program__bootstrap")  # fmt: skip
def wire_op_in_bootstrap() -> object:
    def bootstrap(g: Graph) -> None:
        corpus = g.input("corpus", types.TENSOR_FLOAT)
        g.net_out("early", CLIENTS.sample(g, n=1), corpus)  # here

    return compile_body(relay, bootstrap)


@case(errors.SourceInBootstrap, "'Program__bootstrap'", "Record it in the Module's body",
      node_name="Interval_0", op_type="Interval", function="Program__bootstrap")  # fmt: skip
def source_in_bootstrap() -> object:
    def bootstrap(g: Graph) -> None:
        tick = syscalls.interval(g, period_ns=1_000)  # here
        syscalls.app_emit(g, tick, name="tick")

    return compile_body(relay, bootstrap)


@case(errors.NeverFires, "each of these is an execution of its own", "Ask with `g.request`",
      node_name="Add_0", op_type="Add",
      value_a="x", execution_a="the invoke of 'server' (input 'x')",
      value_b="Send_1.received",
      execution_b="the delivery of port 'update' on 'server'")  # fmt: skip
def never_fires() -> object:
    def body(g: Graph) -> None:
        x = g.input("x", types.TENSOR_FLOAT)
        there = g.net_out("x", CLIENTS.sample(g, n=1, after=x), x)
        back = g.net_out("update", there.sender, there)
        g.output("y", COMPUTE.add(g, back, x))  # here

    return compile_body(body)


@case(errors.CollectNotReceived, "which no peer has sent", "Collect what `g.net_out`",
      node_name="Collect_0", value="x", execution="the invoke of 'server' (input 'x')")  # fmt: skip
def collect_not_received() -> object:
    def body(g: Graph) -> None:
        x = g.input("x", types.TENSOR_FLOAT)
        g.output("y", g.collect(x, n=2))  # here

    return compile_body(body)


@case(errors.DanglingCall, "which is not in the model", "Keep the functions", how=MODEL,
      node_name="Twice_0", domain=keys.MODULE_DOMAIN, function="Twice")  # fmt: skip
def dangling_call() -> object:
    """The recorder keeps what is called."""

    def twice(g: Graph) -> None:
        x = g.input("x", types.TENSOR_FLOAT)
        g.output("y", COMPUTE.add(g, x, x))

    def body(g: Graph) -> None:
        x = g.input("x", types.TENSOR_FLOAT)
        made = Program(twice, name="Twice").call().input("x", x).build(g)  # here
        g.output("y", made.output("y"))

    model = Program(body).build()
    del model.functions[1]
    return bound().compile(model)


@case(errors.BootstrapCompositionGap, "'Child__bootstrap'", "`bootstrap` body",
      parent="Program__bootstrap", child="Child__bootstrap")  # fmt: skip
def bootstrap_composition_gap() -> object:
    child = Program(relay, name="Child")

    def bootstrap(g: Graph) -> None:
        child.call_bootstrap(g)  # here

    return compile_body(relay, bootstrap)


@case(errors.BootstrapCompositionCycle, "in a ring", "Break the ring", module="",
      path=("Program__bootstrap", "Child__bootstrap"))  # fmt: skip
def bootstrap_composition_cycle() -> object:
    program = Program(relay, lambda g: child.call_bootstrap(g))
    child = Program(relay, lambda g: program.call_bootstrap(g), name="Child")
    return bound().compile(program.build())


@case(errors.IrVersionMismatch, "ir_version 13", "takes 9 to 9", "with_target_version", module="",
      oldest=9, newest=9, got=13)  # fmt: skip
def ir_version_mismatch() -> object:
    return bound().with_target_version(9).compile(Program(relay).build())


def test_the_version_that_was_expected_has_the_specifications_name() -> None:
    with pytest.raises(errors.IrVersionMismatch) as caught:
        ir_version_mismatch()
    assert (caught.value.expected, caught.value.got) == (9, 13)


# --- the pipeline ---------------------------------------------------------------------------


@case(errors.RuntimeIncomplete, "has no DedupGateRx", "Leave the passes", module="",
      missing=re.compile("Recv .* has no DedupGateRx"), target=re.compile("^client#"))  # fmt: skip
def runtime_incomplete() -> object:
    return bound().without_stage("insert_dedup_gate_rx").compile(Program(relay).build())


class Spoil(Pass):
    """A pass of the caller's that does one thing."""

    def __init__(self, action: Callable[[CompilationUnit], object]) -> None:
        self._action = action

    def run(self, unit: CompilationUnit, options: CompileOptions) -> None:
        self._action(unit)


@case(errors.PassInvariantBroken, "pass 'spoil'", "nothing makes", "Mend the pass", how=STAGE,
      pass_name="spoil", detail=re.compile("reads 'nowhere', which nothing makes"))  # fmt: skip
def pass_invariant_broken() -> object:
    """Passes of ours leave the program whole; the caller's may not."""

    def dangle(unit: CompilationUnit) -> None:
        for main in unit.partitions.values():
            for node in main.nodes:
                if node.op_type == keys.OP_SEND:
                    node.inputs = (node.inputs[0], "nowhere")

    def body(g: Graph) -> None:
        value = g.input("value", types.TENSOR_FLOAT)
        g.net_out("there", CLIENTS.sample(g, n=2), value)  # here

    return bound().with_pass(Spoil(dangle)).compile(Program(body).build())


@case(errors.StageFailed, "pass 'spoil' failed", "ValueError: no", "without_stage", how=STAGE,
      module="", stage="spoil", detail="ValueError: no")  # fmt: skip
def stage_failed() -> object:
    """Only the caller's own code raises what it likes."""

    def fail(_: CompilationUnit) -> None:
        raise ValueError("no")

    return bound().with_pass(Spoil(fail)).compile(Program(relay).build())


@case(errors.UnknownStage, "'valdiate'", "pass_names", module="",
      stage="valdiate", detail=re.compile("no such pass"))  # fmt: skip
def unknown_stage() -> object:
    return Compiler().without_stage("valdiate")


@case(errors.Internal, "'validate_runtime_complete' raised KeyError", "report it", how=STAGE,
      module="", detail=re.compile("raised KeyError"))  # fmt: skip
def internal() -> object:
    """What the compiler contradicts itself about; here a third party's contract trips."""

    def trip(_: PartitionView) -> Iterator[str]:
        raise KeyError("gone")

    register_gate_contract(GateContract(name="test.trip", missing=trip))
    try:
        return bound().compile(Program(relay).build())
    finally:
        unregister_gate_contract("test.trip")


# --- the table ------------------------------------------------------------------------------


def variants(base: type[CompileError] = CompileError) -> set[type[CompileError]]:
    """All classes that stand for one way to fail."""
    found = set()
    for kind in base.__subclasses__():
        if kind.__module__.startswith("bbnode."):
            if kind is not errors.ValidationError:
                found.add(kind)
            found |= variants(kind)
    return found


def test_every_variant_has_a_case_and_can_be_imported() -> None:
    covered = {one.variant for one in CASES}
    assert {kind.__name__ for kind in variants() - covered} == set()
    assert {kind.__name__ for kind in variants()} <= vars(errors).keys()


@pytest.mark.parametrize("one", CASES, ids=lambda one: one.provoke.__name__)
def test_the_error_says_what_where_and_how_to_mend_it(one: Case) -> None:
    with pytest.raises(one.variant) as caught:
        one.provoke()
    error = caught.value
    assert type(error) is one.variant
    given = {f.name for f in dataclasses.fields(error)} - {"where"}
    assert set(one.fields) == given, "the case has to say every field"
    for name, expected in one.fields.items():
        value = getattr(error, name)
        if isinstance(expected, re.Pattern):
            assert expected.search(value), (name, value)
        else:
            assert value == expected, name
    text = str(error)
    assert error.message() in text
    assert text.endswith(f". {error.mend()}")
    for piece in one.says:
        assert piece in text
    if one.line:
        assert (error.module, error.source_line) == (one.module, one.line)
        assert f"(in Module {one.module}, at {one.line})" in text
    else:
        assert one.module == ""
        assert error.source_line == ""


@pytest.mark.parametrize("one", [one for one in CASES if one.how != SOURCE],
                         ids=lambda one: one.provoke.__name__)  # fmt: skip
def test_what_no_module_can_provoke_says_why(one: Case) -> None:
    assert one.provoke.__doc__


def test_most_variants_can_be_provoked_by_an_author() -> None:
    from_source = {one.variant for one in CASES if one.how == SOURCE}
    assert len(from_source) >= 25
    assert issubclass(Leaning, Model)
