"""Passes of the caller's: where they run, what they are told, and what they may not do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from onnx import ModelProto

from bbnode.compiler import CompilationUnit, CompileOptions, Compiler, Counters, Pass
from bbnode.compiler.driver import pipeline
from bbnode.compiler.errors import (
    AmbiguousRole,
    PassInvariantBroken,
    RuntimeIncomplete,
    StageFailed,
    UnknownStage,
)
from bbnode.components import OrtBackend
from bbnode.dsl import BackendSlot, Graph, ModelSlot, types
from bbnode.ir import keys, plugins
from bbnode.ir.bounds import OutOfBounds
from bbnode.ir.caps import MAX_NAME_CHARS
from bbnode.ir.graph import OpNode
from bbnode.ir.onnx_file import program_of
from tests.compiler.programs import FakeModel, FakeSelector
from tests.compiler.test_full_chains import Written, peers

Action = Callable[[CompilationUnit], object]


class Added(Pass):
    """A pass made of a function."""

    def __init__(self, name: str, action: Action = lambda _: None) -> None:
        self.name = name
        self._action = action

    def run(self, unit: CompilationUnit, options: CompileOptions) -> Counters | None:
        self._action(unit)
        return None


def program(g: Graph) -> None:
    compute = BackendSlot("compute")
    x = g.input("x", types.TENSOR_FLOAT)
    received = g.net_out("there", peers(g, "b", after=x), compute.add(g, x, x))
    model = ModelSlot("m")
    model.load_parameters(g, received)
    g.output("params", model.params(g))


def compiler() -> Compiler:
    return (
        Compiler()
        .bind_backend("compute", OrtBackend)
        .bind_model("m", FakeModel)
        .bind_peer_selector("pick_b", FakeSelector)
    )


def compiled(*added: Pass, base: Compiler | None = None) -> ModelProto:
    made = base or compiler()
    for one in added:
        made = made.with_pass(one)
    return made.compile(Written(program).build())


# --- places ---------------------------------------------------------------------------------


def test_a_pass_runs_at_the_place_that_a_name_says() -> None:
    seen: dict[str, list[str]] = {}

    def note(name: str) -> Added:
        return Added(name, lambda unit: seen.update({name: list(unit.partitions)}))

    made = (
        compiler()
        .with_pass(note("first"), before="refine_polymorphic_value_info")
        .with_pass(note("cut"), after="partition_by_wire_ops")
        .with_pass(note("beside"), before="cut")
        .with_pass(note("late"))
        .with_pass(note("last"), after="merge_partitions_into_one")
    )
    _, report = made.compile_with_report(Written(program).build())
    names = [one.name for one in report.passes]
    assert tuple(names) == made.pass_names
    assert names[0] == "first"
    assert names[names.index("partition_by_wire_ops") + 1 :][:2] == ["beside", "cut"]
    assert names.index("late") == names.index("resolve_component_dependencies") - 1
    assert names[-1] == "last"
    assert seen["first"] == []
    assert sorted(seen["cut"]) == ["a", "b"]


def test_order_is_that_of_push_back_push_front_and_insert() -> None:
    made = compiler().push_back_stage(Added("two")).push_front_stage(Added("one"))
    made = made.insert_stage(1, Added("middle")).insert_stage(-5, Added("zero"))
    made = made.push_back_stage(Added("gone")).without_stage("gone").insert_stage(99, Added("end"))
    at = made.pass_names.index("validate_runtime_complete")
    assert made.pass_names[at + 1 : at + 6] == ("zero", "one", "middle", "two", "end")


def test_passes_are_removed_by_name() -> None:
    made = compiler().with_pass(Added("mine")).without_stage("mine")
    assert made.passes == compiler().passes
    made = made.without_stage("insert_dedup_gate_rx").without_stage("validate_runtime_complete")
    _, report = made.compile_with_report(Written(program).build())
    assert "insert_dedup_gate_rx" not in [one.name for one in report.passes]
    for name in ("mine", "merge_partitions_into_one", "insert_dedup_gate_rx"):
        with pytest.raises(UnknownStage):
            made.without_stage(name)


@pytest.mark.parametrize(
    ("place", "says"),
    [
        ({"before": "valdiate"}, "did you mean 'validate'"),
        ({"before": "validate", "after": "validate"}, "not both"),
    ],
)
def test_a_place_that_is_none(place: dict[str, str], says: str) -> None:
    with pytest.raises(UnknownStage, match=says):
        compiler().with_pass(Added("mine"), **place)


@pytest.mark.parametrize("name", ["validate", "", "twice", None])
def test_a_pass_needs_a_name_of_its_own(name: Any) -> None:
    with pytest.raises(UnknownStage):
        compiler().with_pass(Added("twice")).with_pass(Added(name))


def test_a_name_of_a_pass_that_was_left_out_stays_taken() -> None:
    with pytest.raises(UnknownStage, match="taken"):
        compiler().without_stage("sequence_slot_effects").with_pass(Added("sequence_slot_effects"))


# --- what is added --------------------------------------------------------------------------


class StampOps(Pass):
    """Writes a key into every op's metadata."""

    def __init__(self, text: str = "on") -> None:
        self.text = text

    def run(self, unit: CompilationUnit, options: CompileOptions) -> Counters:
        count = 0
        for body in unit.bodies():
            for node in body.nodes:
                node.metadata["example.trace"] = self.text
                count += 1
        unit.program.metadata["example.stamped"] = "yes"
        return {"ops_stamped": count}


class NeedsMore(StampOps):
    """Cannot be made without an argument."""

    def __init__(self, text: str) -> None:
        super().__init__(text)


def test_what_a_pass_changes_is_in_the_result_with_its_counters() -> None:
    assert StampOps.name == "stamp_ops"
    made = compiler().with_pass(StampOps)
    model, report = made.compile_with_report(Written(program).build())
    found = program_of(model)
    assert found.metadata["example.stamped"] == "yes"
    traced = {n.metadata.get("example.trace") for f in found.functions for n in f.nodes}
    assert traced == {"on"}
    assert report.counters()["compiler.ops_stamped"] > 0


def test_a_pass_takes_arguments() -> None:
    found = program_of(compiled(StampOps("off")))
    assert found.functions[0].nodes[0].metadata["example.trace"] == "off"
    with pytest.raises(UnknownStage, match="give an instance"):
        compiler().with_pass(NeedsMore)


def drop_all(unit: CompilationUnit) -> None:
    unit.program.functions.clear()


@pytest.mark.parametrize("thing", [object(), OpNode, drop_all])
def test_what_is_no_pass(thing: Any) -> None:
    with pytest.raises(UnknownStage, match=r"derives from bbnode\.compiler\.Pass"):
        compiler().with_pass(thing)


def test_an_installed_package_brings_a_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = tmp_path / "example_passes-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: example-passes\nVersion: 1.0\n")
    here = "tests.compiler.test_added_passes"
    lines = (f"stamp_ops = {here}:StampOps", f"no_pass = {here}:program", "gone = nowhere:Pass")
    (info / "entry_points.txt").write_text("\n".join((f"[{pipeline.PLUGIN_GROUP}]", *lines, "")))
    monkeypatch.syspath_prepend(tmp_path)
    plugins.rescan()
    try:
        made = compiler().with_pass("stamp_ops", after="type_solver")
        assert "stamp_ops" in made.pass_names
        with pytest.raises(UnknownStage, match="no class derived from Pass"):
            compiler().with_pass("no_pass")
        with pytest.raises(plugins.BrokenPlugin, match="example-passes"):
            compiler().with_pass("gone")
        with pytest.raises(UnknownStage, match="did you mean 'stamp_ops'"):
            compiler().with_pass("stamp_op")
    finally:
        monkeypatch.undo()
        plugins.rescan()


# --- faults ---------------------------------------------------------------------------------


def test_a_pass_that_raises_is_named() -> None:
    def fail(unit: CompilationUnit) -> None:
        raise KeyError("gone")

    with pytest.raises(StageFailed, match="KeyError") as caught:
        compiled(Added("flaky", fail))
    assert caught.value.stage == "flaky"
    assert isinstance(caught.value.__cause__, KeyError)


def ops(unit: CompilationUnit, op_type: str) -> list[OpNode]:
    return [n for main in unit.partitions.values() for n in main.nodes if n.op_type == op_type]


def drop_gate(unit: CompilationUnit) -> None:
    """Takes the dedup gate out, and rewires so that nothing dangles."""
    for main in unit.partitions.values():
        for gate in [n for n in main.nodes if n.op_type == keys.OP_DEDUP_GATE_RX]:
            for node in main.readers(gate.outputs[0]):
                node.rename({gate.outputs[0]: gate.inputs[0]})
            main.remove(gate)


def mistype(unit: CompilationUnit) -> None:
    for send in ops(unit, keys.OP_SEND):
        send.metadata[keys.WIRE_TRANSPORT_KEY] = "pigeon"


def misdirect(unit: CompilationUnit) -> None:
    for recv in ops(unit, keys.OP_RECV):
        recv.metadata[keys.SITE_ID_KEY] = "12345"


def unknown(unit: CompilationUnit) -> None:
    unit.partitions["a"].append(OpNode("Fuse", "com.example", "fuse"))


def make_concrete(unit: CompilationUnit) -> None:
    for node in ops(unit, "Params"):
        del node.metadata[keys.REQUIRED_TRAIT_KEY]
        node.metadata[keys.CONCRETE_TYPE_KEY] = "test.FakeModel"


@pytest.mark.parametrize(
    ("action", "says", "cause"),
    [
        (drop_gate, "has no DedupGateRx", RuntimeIncomplete),
        (mistype, "does not say what it transports", RuntimeIncomplete),
        (misdirect, "sends to a site that no receiver", RuntimeIncomplete),
        (unknown, "is of the unknown type com.example::Fuse", RuntimeIncomplete),
        (make_concrete, "concrete ('test.FakeModel') in one place", AmbiguousRole),
    ],
)
def test_what_a_pass_takes_from_the_run_time_is_laid_to_it(
    action: Action, says: str, cause: type[Exception]
) -> None:
    with pytest.raises(PassInvariantBroken) as caught:
        compiled(Added("fine"), Added("culprit", action), Added("later"))
    assert caught.value.pass_name == "culprit"
    assert says in caught.value.detail
    assert isinstance(caught.value.__cause__, cause)


def test_who_leaves_the_look_out_may_take_gates_out() -> None:
    base = compiler().without_stage("validate_runtime_complete")
    model = compiled(Added("bare", drop_gate), base=base)
    assert not any(n.op_type == keys.OP_DEDUP_GATE_RX for f in model.functions for n in f.node)


def drop_first(unit: CompilationUnit) -> None:
    main = unit.partitions["a"]
    main.remove(main.nodes[0])


def rename_main(unit: CompilationUnit) -> None:
    unit.partitions["b"].name = "mine"


def drop_partition(unit: CompilationUnit) -> None:
    del unit.partitions["b"]


def tangle(unit: CompilationUnit) -> None:
    nodes = unit.partitions["a"].nodes
    nodes[0].metadata[keys.CONTROL_AFTER_KEY] = nodes[-1].name
    nodes[-1].metadata[keys.CONTROL_AFTER_KEY] = nodes[0].name


def unparsable(unit: CompilationUnit) -> None:
    unit.partitions["a"].nodes[0].metadata[keys.DEADLINE_NS_KEY] = "soon"


def call_nothing(unit: CompilationUnit) -> None:
    unit.partitions["a"].append(OpNode("Gone", keys.MODULE_DOMAIN, "call"))


@pytest.mark.parametrize(
    "action", [drop_first, rename_main, drop_partition, tangle, unparsable, call_nothing]
)
def test_a_pass_that_breaks_the_program_is_named(action: Action) -> None:
    with pytest.raises(PassInvariantBroken) as caught:
        compiled(Added("breaker", action))
    assert caught.value.pass_name == "breaker"


def test_a_pass_that_breaks_the_program_before_it_is_cut_is_named() -> None:
    def dangle(unit: CompilationUnit) -> None:
        unit.root.remove(unit.root.nodes[0])

    with pytest.raises(PassInvariantBroken) as caught:
        compiler().with_pass(Added("breaker", dangle), after="validate").compile(
            Written(program).build()
        )
    assert caught.value.pass_name == "breaker"


@pytest.mark.parametrize("place", ["validate", "type_solver", "infer_peer_classes"])
def test_an_op_that_nobody_knows_is_laid_to_the_pass_that_put_it_there(place: str) -> None:
    def mistake(unit: CompilationUnit) -> None:
        for node in unit.root.nodes:
            if node.op_type == keys.OP_SEND:
                node.op_type = "Sned"

    with pytest.raises(PassInvariantBroken, match="Sned") as caught:
        compiler().with_pass(Added("typo", mistake), after=place).compile(Written(program).build())
    assert caught.value.pass_name == "typo"


def test_metadata_that_is_no_text_is_laid_to_the_pass() -> None:
    def number(unit: CompilationUnit) -> None:
        unit.partitions["a"].nodes[0].metadata["lab.owner"] = 3  # type: ignore[assignment]

    with pytest.raises(PassInvariantBroken, match=r"'lab\.owner' of op .* is 3; write text"):
        compiled(Added("numbers", number))


def test_a_pass_keeps_within_what_any_model_may_hold() -> None:
    def shout(unit: CompilationUnit) -> None:
        unit.partitions["a"].nodes[0].name = "!" * (MAX_NAME_CHARS + 1)

    with pytest.raises(PassInvariantBroken, match="characters") as caught:
        compiled(Added("loud", shout))
    assert caught.value.pass_name == "loud"
    assert isinstance(caught.value.__cause__, OutOfBounds)
