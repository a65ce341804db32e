"""`Compiler`: the bind chain, options, stages, seams and reports, and the whole way through."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import ModelProto

from bbnode.compiler import CANONICAL_PASS_NAMES, Compiler, errors
from bbnode.compiler.driver import pipeline, telemetry
from bbnode.compiler.errors import (
    AlreadyCompiled,
    BindingMismatch,
    CompileError,
    DuplicateFunction,
    EmptyFunctionTable,
    Internal,
    IrVersionMismatch,
    PassInvariantBroken,
    UnboundSlot,
    UnknownStage,
)
from bbnode.compiler.unit import CompilationUnit, CompileOptions
from bbnode.components.contracts import Model
from bbnode.ir import keys, types
from bbnode.ir.errors import AuthorError, DeploymentError
from bbnode.ir.graph import OpNode
from tests import protos
from tests.compiler import programs
from tests.compiler.programs import BINDINGS, Body, model_of


def compiler() -> Compiler:
    made = Compiler()
    for binding in BINDINGS:
        made = made.bind(binding.role, binding.slot, binding.component)
    return made


# --- the whole way --------------------------------------------------------------------------


def test_a_round_becomes_one_model_with_a_target_per_class(federated: ModelProto) -> None:
    before = federated.SerializeToString()
    model, report = compiler().compile_with_report(federated)
    assert federated.SerializeToString() == before
    assert [t.partition("#")[0] for t in report.targets] == ["client", "server"]
    assert all(len(t.partition("#")[2]) == 16 for t in report.targets)
    assert protos.get_meta(model, keys.COMPILED_KEY) == keys.COMPILED_CURRENT_VERSION
    server = report.targets[1]
    assert (protos.get_meta(model, keys.binding_key(server, "global")) or "").startswith("Model|")
    assert not model.graph.node
    onnx.checker.check_model(model)


def test_every_program_compiles_to_the_same_bytes_each_time(program: ModelProto) -> None:
    made = compiler()
    for slot in ("pick_a", "pick_b", "pick_c"):
        made = made.bind_peer_selector(slot, programs.FakeSelector)
    made = made.bind_backend("compute", programs.FakeBackend)
    first = made.compile(program).SerializeToString(deterministic=True)
    assert made.compile(program).SerializeToString(deterministic=True) == first


def test_a_compile_leaves_nothing_to_the_collector_of_rings(federated: ModelProto) -> None:
    def nodes() -> int:
        return sum(type(found) is OpNode for found in gc.get_objects())

    compiler().compile(federated)  # what is kept for the next compile is there now
    gc.collect()
    gc.disable()
    try:
        before = nodes()
        compiler().compile(federated)
        assert nodes() == before
    finally:
        gc.enable()


def test_each_partition_is_a_compiled_model_of_its_own(federated: ModelProto) -> None:
    parts = compiler().compile_partitions(federated)
    assert sorted(name.partition("#")[0] for name in parts) == ["client", "server"]
    for name, part in parts.items():
        assert part.functions[0].name == name
        assert protos.get_meta(part, keys.COMPILED_KEY) == "v1"
        bound = [e.key for e in part.metadata_props if e.key.startswith(keys.BINDING_PREFIX)]
        assert bound
        assert all(key.startswith(keys.BINDING_PREFIX + name) for key in bound)


def test_the_report_times_and_counts_every_pass(federated: ModelProto) -> None:
    _, report = compiler().compile_with_report(federated)
    assert tuple(one.name for one in report.passes) == pipeline.all_pass_names()
    assert set(CANONICAL_PASS_NAMES) <= {one.name for one in report.passes}
    assert all(one.ms >= 0 for one in report.passes)
    assert report.counters()["compiler.wire_recvs_synthesized"] == 2
    assert report.history == {}


class _Spans:
    """What the compiler knows of OpenTelemetry: a provider, and its tracers."""

    class ProxyTracerProvider:
        """What stands there until somebody configures another one."""

    def __init__(self) -> None:
        self.provider: object = self.ProxyTracerProvider()
        self.names: list[str] = []

    def get_tracer_provider(self) -> object:
        return self.provider

    def get_tracer(self, _: str) -> _Spans:
        return self

    @contextmanager
    def start_as_current_span(self, name: str) -> Iterator[_Spans]:
        self.names.append(name)
        yield self

    def set_attribute(self, key: str, value: int) -> None:
        pass


def test_passes_are_spans_once_somebody_takes_them(
    federated: ModelProto, monkeypatch: pytest.MonkeyPatch
) -> None:
    spans = _Spans()
    monkeypatch.setattr(telemetry, "_api", lambda: spans)
    compiler().compile(federated)
    assert not spans.names
    spans.provider = object()
    compiler().compile(federated)
    assert spans.names == [f"compiler.{name}" for name in pipeline.all_pass_names()]


def test_explaining_says_which_pass_made_and_changed_a_node(federated: ModelProto) -> None:
    _, report = compiler().compile_with_report(federated, explain=True)
    recv = next(n for n in report.history if n.endswith("/RecvReq"))
    assert report.history[recv].made_by == "synthesize_wire_recvs"
    recorded = next(n.name for n in federated.functions[0].node if n.op_type == "Train")
    assert report.history[recorded].made_by == ""
    assert "infer_peer_classes" in report.history[recorded].changed_by
    gates = [h for n, h in report.history.items() if h.made_by == "insert_dedup_gate_rx"]
    assert gates


def test_snapshots_show_the_program_between_passes(federated: ModelProto) -> None:
    _, report = compiler().compile_with_report(
        federated, snapshot_after=("validate", "partition_by_wire_ops")
    )
    assert [f.name for f in report.snapshots["validate"].functions] == ["Round"]
    cut = report.snapshots["partition_by_wire_ops"].functions
    assert [f.name.partition("#")[0] for f in cut] == ["client", "server"]
    with pytest.raises(UnknownStage):
        compiler().compile_with_report(federated, snapshot_after=("valdiate",))


# --- bindings -------------------------------------------------------------------------------


def test_a_compiler_is_immutable() -> None:
    base = Compiler()
    bound = base.bind_model("m", programs.FakeModel)
    assert base.options.bindings == ()
    assert len(bound.options.bindings) == 1
    assert bound.bind_model("m", programs.FakeModel) is bound


@pytest.mark.parametrize("role", ["backend", "model", "index", "aggregator", "codec",
                                  "data_source", "peer_selector", "protocol"])  # fmt: skip
def test_every_role_checks_its_contract(role: str) -> None:
    bind = getattr(Compiler(), f"bind_{role}")
    with pytest.raises(BindingMismatch, match="does not implement") as caught:
        bind("slot", int)
    assert caught.value.slot == "slot"
    assert keys.snake_case(caught.value.role) == role


def unregistered() -> Any:
    methods = dict.fromkeys(Model.__abstractmethods__, lambda *_: None)
    return type("Unregistered", (Model,), {**methods, "TYPE_NAME": "test.Unregistered"})


@pytest.mark.parametrize(
    ("component", "why"),
    [
        (Model, "lacks the methods apply_delta"),
        (programs.FakeData, "does not implement Model"),
        ("a.B", "is no class"),
        (unregistered(), "is not registered"),
        (type("Heir", (programs.FakeModel,), {}), "no TYPE_NAME of its own"),
        (type("Thief", (programs.FakeModel,), {"TYPE_NAME": "test.FakeModel"}), "other class"),
    ],
)
def test_a_class_that_can_not_fill_the_slot_is_refused(component: Any, why: str) -> None:
    with pytest.raises(BindingMismatch, match=why) as caught:
        Compiler().bind_model("m", component)
    assert isinstance(caught.value, DeploymentError)


def test_a_slot_is_bound_once_and_under_a_role_that_exists() -> None:
    bound = Compiler().bind_model("m", programs.FakeModel)
    with pytest.raises(BindingMismatch, match="already"):
        bound.bind_model("m", programs.DoubleModel)
    with pytest.raises(BindingMismatch, match="no such role"):
        bound.bind("Oracle", "o", programs.FakeModel)
    with pytest.raises(BindingMismatch, match="no slot name"):
        bound.bind_model("", programs.FakeModel)


def test_an_unbound_slot_names_the_call_that_mends_it(federated: ModelProto) -> None:
    with pytest.raises(UnboundSlot, match=r"bind_") as caught:
        Compiler().with_permissive_types().compile(federated)
    assert isinstance(caught.value, DeploymentError)


# --- what is no program ---------------------------------------------------------------------


def without_marks(compiled: ModelProto) -> ModelProto:
    protos.del_meta(compiled, keys.RECORDED_KEY)
    return compiled


def test_what_is_no_recorded_model_is_refused(federated: ModelProto) -> None:
    with pytest.raises(EmptyFunctionTable):
        Compiler().compile(ModelProto(ir_version=keys.FRAMEWORK_IR_VERSION))
    with pytest.raises(IrVersionMismatch) as caught:
        Compiler().with_target_version(9).compile(federated)
    assert (caught.value.newest, caught.value.got) == (9, keys.FRAMEWORK_IR_VERSION)
    with pytest.raises(AlreadyCompiled):
        compiler().compile(without_marks(compiler().compile(federated)))
    federated.functions.append(federated.functions[0])
    with pytest.raises(DuplicateFunction) as twice:
        Compiler().compile(federated)
    assert twice.value.function == "Round"
    with pytest.raises(TypeError, match=r"takes what Module\.build"):
        Compiler().compile(b"")  # type: ignore[arg-type]


@pytest.mark.parametrize("budget", [0, -1, 86_401 * 1_000_000_000])
def test_a_budget_is_between_a_nanosecond_and_a_day(budget: int) -> None:
    with pytest.raises(ValueError, match="per-hop"):
        Compiler().with_per_hop_budget_ns(budget)


def test_options_reach_the_passes(federated: ModelProto) -> None:
    model = compiler().with_per_hop_budget_ns(77).compile(federated)
    deadlines = {
        protos.get_meta(n, keys.DEADLINE_NS_KEY)
        for f in model.functions
        for n in f.node
        if n.op_type == keys.OP_SEND_REQ_BATCHED
    }
    assert deadlines == {"154"}  # there, and back again


def open_type() -> ModelProto:
    body = Body("Open", root=True)
    body.syscall("Record", [body.input("x")], [], name="R")
    body.function.nodes[-1].set_attr("name", "x")
    return model_of(body)


def test_permissive_types_are_opt_in() -> None:
    with pytest.raises(errors.UnresolvedType):
        Compiler().compile(open_type())
    Compiler().with_permissive_types().compile(open_type())


# --- seams ----------------------------------------------------------------------------------


def test_an_authors_error_at_the_end_is_found_in_one_run(
    federated: ModelProto, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []
    load = pipeline.load_pass

    def counted(name: str) -> pipeline.Pass:
        ran.append(name)
        return load(name)

    monkeypatch.setattr(pipeline, "load_pass", counted)
    with pytest.raises(errors.UnboundSlot):
        Compiler().with_permissive_types().compile(federated)
    assert len(ran) == len(set(ran))
    assert ran[-1] == "validate_all_slots_bound"


class _Breaking:
    name = "analyze_wire_edges"

    def __init__(self, action: Callable[[CompilationUnit], None]) -> None:
        self._action = action

    def run(self, unit: CompilationUnit, _: CompileOptions) -> dict[str, int]:
        self._action(unit)
        return {}


def dangle(unit: CompilationUnit) -> None:
    node = unit.partitions["server"].nodes[0]
    node.inputs = (*node.inputs, "from_nowhere")


def twice(unit: CompilationUnit) -> None:
    server = unit.partitions["server"]
    server.append(server.nodes[0].copy())


def lose_key(unit: CompilationUnit) -> None:
    raise KeyError("x")


@pytest.mark.parametrize(
    ("action", "kind"),
    [(dangle, PassInvariantBroken), (twice, PassInvariantBroken), (lose_key, Internal)],
)
def test_the_pass_that_breaks_the_program_is_named(
    action: Callable[[CompilationUnit], None],
    kind: type[CompileError],
    federated: ModelProto,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = pipeline.load_pass

    def load(name: str) -> Any:
        return _Breaking(action) if name == _Breaking.name else real(name)

    monkeypatch.setattr(pipeline, "load_pass", load)
    with pytest.raises(kind, match="analyze_wire_edges"):
        compiler().compile(federated)


def test_every_pass_of_the_table_loads() -> None:
    for name in pipeline.all_pass_names():
        assert pipeline.load_pass(name).name == name
    assert set(pipeline.shipped_passes()) >= set(pipeline.all_pass_names())


# --- errors ---------------------------------------------------------------------------------


ERRORS = [n for n, e in vars(errors).items() if isinstance(e, type) and issubclass(e, CompileError)]


@pytest.mark.parametrize("name", ERRORS)
def test_every_error_is_somebodys_fault_and_says_how_to_mend(name: str) -> None:
    kind = getattr(errors, name)
    if name == "CompileError":
        return
    assert issubclass(kind, CompileError)
    assert issubclass(kind, AuthorError) != issubclass(kind, DeploymentError)
    if name == "ValidationError":
        return
    assert kind.MESSAGE or kind.message is not CompileError.message
    assert kind.MEND != CompileError.MEND or kind.mend is not CompileError.mend


def test_an_errors_fields_are_fixed() -> None:
    error = UnboundSlot(slot="s", role="DataSource", target="t")
    with pytest.raises(AttributeError):
        error.slot = "other"  # type: ignore[misc]
    assert "bind_data_source('s'" in str(error)
    error.__traceback__ = None  # contextlib and trio do this


# --- chance ---------------------------------------------------------------------------------

OPS = ("Neg", "Abs", "Add", "Send", "Constant")


@given(
    st.lists(st.tuples(st.sampled_from(OPS), st.integers(0, 99), st.integers(0, 99)), max_size=12)
)
def test_random_programs_compile_twice_to_one_result_or_one_error(
    steps: list[tuple[str, int, int]],
) -> None:
    body = Body("Random", home="a", root=True)
    values = [body.input("x", types.TENSOR_FLOAT)]
    for number, (op_type, first, second) in enumerate(steps):
        left, right = values[first % len(values)], values[second % len(values)]
        out = f"v{number}"
        if op_type == "Send":
            peers = body.sample("b" if second % 2 else "a", f"p{number}",
                                slot=f"pick{number}", after=[left])  # fmt: skip
            body.send(left, peers, out)
        elif op_type == "Constant":
            tensor = onnx.helper.make_tensor(out, onnx.TensorProto.FLOAT, [1], [float(number)])
            body.syscall("Constant", [], [out], value=tensor, kinds=[types.TENSOR_FLOAT])
        else:
            body.onnx(op_type, [left, right] if op_type == "Add" else [left], [out])
        values.append(out)
    model = model_of(body)
    made = Compiler().bind_backend("compute", programs.FakeBackend)
    for number in range(len(steps)):
        made = made.bind_peer_selector(f"pick{number}", programs.FakeSelector)
    results = []
    for _ in range(2):
        try:
            results.append(made.compile(model).SerializeToString(deterministic=True))
        except (errors.CrossClassDataflow, errors.NeverFires) as error:
            results.append(str(error).encode())
    assert results[0] == results[1]
