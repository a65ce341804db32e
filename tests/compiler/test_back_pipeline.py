"""What every pass of the back half has in common, and the artifact at the end."""

from __future__ import annotations

import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import ModelProto

from bbnode.compiler import target_names
from bbnode.compiler.analysis import order
from bbnode.compiler.driver.admission import admit
from bbnode.compiler.driver.compiler import Compiler, seams
from bbnode.compiler.driver.pipeline import all_pass_names, load_pass
from bbnode.compiler.errors import Internal, NeverFires
from bbnode.compiler.unit import CompileOptions, SlotBinding
from bbnode.components.contracts import Backend
from bbnode.engine.planning.program import plan_program
from bbnode.ir import keys, types
from bbnode.ir.onnx_file import program_of
from tests.compiler import programs
from tests.compiler.back_units import BACK, snapshot, unit_until
from tests.compiler.programs import BINDINGS, Body, FakeSelector, _fake, federated_program, model_of

FakeBackend = _fake(Backend, "BackFakeBackend")
ALL = CompileOptions(
    bindings=(
        *BINDINGS,
        SlotBinding(slot="compute", role="Backend", component=FakeBackend),
        *(
            SlotBinding(slot=f"pick_{c}", role="PeerSelector", component=FakeSelector)
            for c in "abc"
        ),
    )
)


@pytest.mark.parametrize("name", BACK)
def test_a_pass_is_found_by_its_name_and_states_its_rules(name: str) -> None:
    one = load_pass(name)
    assert type(one).name == name
    assert "1." in (type(one).__doc__ or "")


@pytest.mark.parametrize("name", BACK)
def test_running_a_pass_twice_changes_nothing_more(name: str, program: ModelProto) -> None:
    unit = admit(program, ALL)
    for before in all_pass_names()[: all_pass_names().index(name) + 1]:
        load_pass(before).run(unit, ALL)
    once = snapshot(unit)
    load_pass(name).run(unit, ALL)
    assert snapshot(unit) == once


@pytest.mark.parametrize("name", BACK[:-1])
def test_a_pass_can_run_again_when_all_up_to_the_merge_have(name: str, program: ModelProto) -> None:
    unit = admit(program, ALL)
    for one in all_pass_names()[:-1]:
        load_pass(one).run(unit, ALL)
    done = snapshot(unit)
    load_pass(name).run(unit, ALL)
    assert snapshot(unit) == done


def test_each_pass_leaves_a_well_formed_program_in_program_order(program: ModelProto) -> None:
    unit = admit(program, ALL)
    for name in all_pass_names():
        load_pass(name).run(unit, ALL)
        seams.check(unit, name)
        if name in BACK:
            for main in unit.partitions.values():
                assert order.topological(main) == range(len(main.nodes)), name


def test_the_artifact_is_plain_onnx_and_always_the_same_bytes(program: ModelProto) -> None:
    compiler = Compiler(options=ALL)
    compiled = compiler.compile(program)
    onnx.checker.check_model(compiled, full_check=True)
    assert compiled.SerializeToString() == compiler.compile(program).SerializeToString()
    assert not compiled.graph.node
    assert compiled.graph.name == program.graph.name
    compiled = program_of(compiled)
    assert compiled.metadata.get(keys.COMPILED_KEY) == "v1"
    for function in compiled.functions:
        used = {node.domain for node in function.nodes}
        assert used == {entry.domain for entry in function.opset_imports}
        assert keys.ONNX_DOMAIN not in used
    imported = {entry.domain for entry in compiled.opset_imports}
    assert imported >= {e.domain for f in compiled.functions for e in f.opset_imports}


def test_mains_come_first_in_class_order_and_every_value_is_typed(program: ModelProto) -> None:
    compiled = program_of(Compiler(options=ALL).compile(program))
    is_main = [f.metadata.get(keys.TARGET_KEY) == "true" for f in compiled.functions]
    assert is_main == sorted(is_main, reverse=True)
    mains = compiled.functions[: sum(is_main)]
    homes = [main.metadata.get(keys.HOME_KEY) for main in mains]
    assert homes == sorted(homes)
    for main in mains:
        declared = set(main.types)
        made = {name for node in main.nodes for name in node.outputs if name}
        assert made | set(main.inputs) <= declared


def test_two_functions_of_one_key_that_differ_are_refused() -> None:
    unit = unit_until("stamp_compilation_metadata", federated_program(), options=ALL)
    other = Body("Other")
    other.syscall("Pulse", [], ["t"])
    main = next(iter(unit.partitions.values()))
    clash = other.build()
    clash.name = main.name
    unit.program.functions.append(clash)
    with pytest.raises(Internal, match="differ"):
        load_pass("merge_partitions_into_one").run(unit, ALL)


# --- random programs ------------------------------------------------------------------------


@st.composite
def random_programs(draw: st.DrawFn) -> ModelProto:
    """Two classes, two backend slots, a stateful slot and sends in both directions."""
    body = Body("Random", home="a", root=True)
    at: dict[str, list[str]] = {
        "a": [body.input("x", types.TENSOR_FLOAT), body.input("y", types.TENSOR_FLOAT)]
    }
    senders: dict[str, str] = {}
    for step in range(draw(st.integers(3, 14))):
        home = draw(st.sampled_from(sorted(at)))
        value, other = draw(st.sampled_from(at[home])), draw(st.sampled_from(at[home]))
        kind = draw(st.sampled_from(["onnx", "onnx", "onnx", "state", "send", "alias"]))
        out = f"v{step}"
        if kind == "onnx":
            slot = f"compute_{draw(st.sampled_from('12'))}_{home}"
            body.onnx("Add", [value, other], [out], slot=slot)
        elif kind == "alias":
            body.syscall("PassThrough", [value], [out], kinds=[types.TENSOR_FLOAT])
        elif kind == "state":
            slot = f"model_{home}"
            body.role("Model", "LoadParameters", slot, [value], [f"{out}.cmd"])
            body.role("Model", "Params", slot, [], [out], after=[f"{out}.cmd"])
        else:
            there = "b" if home == "a" else "a"
            peers = senders.get(home) or body.sample(
                there, f"peers{step}", slot=f"pick{step}", after=[value]
            )
            body.send(value, peers, out, kinds=[types.TENSOR_FLOAT, types.PEER_ID])
            senders[there] = f"{out}.sender"
            home = there
        at.setdefault(home, []).append(out)
    for index, value in enumerate(at["a"]):
        if draw(st.booleans()):
            body.output(f"out{index}", value)
    return model_of(body)


@given(random_programs())
def test_random_programs_compile_without_cycles_and_to_the_same_bytes(program: ModelProto) -> None:
    # Some of their ops need values of two executions.
    compiler = programs.bound(program).without_stage("validate_deliveries")
    compiled = compiler.compile(program)  # the seams look for cycles behind every pass
    onnx.checker.check_model(compiled)
    assert compiled.SerializeToString() == compiler.compile(program).SerializeToString()
    for function in program_of(compiled).functions:
        if function.metadata.get(keys.TARGET_KEY):
            left = [node for node in function.nodes if node.domain == ""]
            assert not left  # every backend op is in a subgraph


@given(random_programs())
def test_what_is_compiled_is_what_can_be_installed(program: ModelProto) -> None:
    """The compiler looks before ops are fused and gated, install afterwards: both see the same."""
    compiler = programs.bound(program)
    model = compiler.without_stage("validate_deliveries").compile(program)
    unreachable = plan_program(model, target_names(model)).unreachable
    try:
        compiler.compile(program)
    except NeverFires:
        assert unreachable
    else:
        assert not unreachable
