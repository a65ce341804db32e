"""A compiled program can be opened, edited and compiled again, whatever passes did to it."""

from __future__ import annotations

import base64
import contextlib
import importlib
import json
import pkgutil
from functools import cache
from typing import Any, NoReturn

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import ModelProto, TensorProto, helper

import bbnode.examples
from bbnode.compiler import Compiler
from bbnode.compiler.driver import pipeline
from bbnode.compiler.driver.admission import admit
from bbnode.compiler.errors import AlreadyCompiled
from bbnode.components import ConnectedView, ConstantView, OrtBackend
from bbnode.ir import keys
from bbnode.ir.bounds import check_bounds
from bbnode.ir.errors import BbnodeError
from bbnode.ir.graph import Function, OpNode, Program
from bbnode.ir.onnx_file import model_of, program_of
from bbnode.ir.reopen import NotReopenable, reopen
from tests.compiler import programs
from tests.sim.versions import version

EXAMPLES = tuple(info.name for info in pkgutil.iter_modules(bbnode.examples.__path__))


class _Caught(Exception):
    pass


@cache
def recorded(name: str) -> tuple[Compiler, ModelProto]:
    """What an example compiles first, and with which compiler; or a program of the tests."""
    if name in programs.PROGRAMS:
        model = programs.model_of(*programs.PROGRAMS[name]())
        return programs.bound(model), model
    found: list[tuple[Compiler, ModelProto]] = []

    def catch(self: Compiler, model: ModelProto, **_: Any) -> NoReturn:
        found.append((self, model))
        raise _Caught

    module = importlib.import_module(f"bbnode.examples.{name}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Compiler, "compile_with_report", catch)
        with pytest.raises(_Caught):
            module.main()
    return found[0]


def has_main(name: str) -> bool:
    return hasattr(importlib.import_module(f"bbnode.examples.{name}"), "main")


PROGRAMS = (*sorted(programs.PROGRAMS), *filter(has_main, EXAMPLES))


@cache
def compiled(name: str) -> bytes:
    compiler, model = recorded(name)
    return compiler.compile(model).SerializeToString(deterministic=True)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_compiled_program_compiles_to_itself(name: str) -> None:
    compiler, _ = recorded(name)
    again = compiler.compile(ModelProto.FromString(compiled(name)))
    assert again.SerializeToString(deterministic=True) == compiled(name)


@pytest.mark.parametrize("last", pipeline.all_pass_names())
@pytest.mark.parametrize("name", PROGRAMS)
def test_what_a_pass_did_is_taken_back(name: str, last: str) -> None:
    compiler, model = recorded(name)
    unit = admit(model, compiler.options)
    for each in compiler.passes:
        made = pipeline.load_pass(each) if isinstance(each, str) else each
        made.run(unit, compiler.options)
        if made.name == last:
            break
    unit.program.functions, unit.partitions = unit.bodies(), {}
    unit.recording.finish(unit.program)
    unit.program.metadata[keys.COMPILED_KEY] = keys.COMPILED_CURRENT_VERSION
    again = compiler.compile(model_of(unit.program))
    assert again.SerializeToString(deterministic=True) == compiled(name)


def opened(name: str) -> tuple[Compiler, Program]:
    return recorded(name)[0], program_of(ModelProto.FromString(compiled(name)))


def main_of(program: Program, home: str) -> Function:
    return next(f for f in program.functions if f.metadata.get(keys.HOME_KEY) == home)


def the(program: Program, op_type: str) -> OpNode:
    (node,) = (n for f in program.functions for n in f.nodes if n.op_type == op_type)
    return node


def test_a_changed_attribute_is_in_the_program_that_is_compiled_again() -> None:
    compiler, program = opened("federated")
    the(program, "Sample").set_attr("n", 7)
    the(program, keys.OP_SEND_REQ_BATCHED).set_attr(keys.ATTR_QUORUM, 5)  # as recorded: 1
    again = program_of(compiler.compile(program))
    assert the(again, "Sample").attr("n") == 7
    assert the(again, keys.OP_SEND_REQ_BATCHED).attr(keys.ATTR_QUORUM) == 5
    assert the(again, keys.OP_RECV_RESP_BATCHED).attr(keys.ATTR_COHORT_SIZE) == 7


def test_a_default_that_was_written_down_may_be_changed() -> None:
    compiler, program = opened("federated")
    request = the(program, keys.OP_SEND_REQ_BATCHED)
    request.set_attr(keys.ATTR_DEADLINE_NS, 5_000_000_000)  # as recorded: none
    again = program_of(compiler.compile(program))
    assert the(again, keys.OP_RECV_REQ).metadata[keys.DEADLINE_NS_KEY] == "5000000000"


def test_an_op_that_was_put_in_stays_and_reads_past_what_passes_made() -> None:
    compiler, program = opened("ring")
    main = main_of(program, "b")
    gate = next(n for n in main.nodes if n.op_type == keys.OP_BACKOFF_GATE_RX)
    added = OpNode("Record", keys.SYSCALL_DOMAIN, "spy", gate.outputs, (), {"name": "seen"})
    main.insert(main.nodes.index(gate) + 1, added)
    again = main_of(program_of(compiler.compile(program)), "b")
    (spy,) = (node for node in again.nodes if node.name == "spy")
    assert spy.inputs == gate.outputs
    assert len(again.nodes) == len(main.nodes)


def test_an_op_that_was_taken_out_stays_out() -> None:
    compiler, program = opened("nested")
    spy = the(program, "Record")
    next(f for f in program.functions if spy in f.nodes).remove(spy)
    again = program_of(compiler.compile(program))
    assert not any(node.op_type == "Record" for f in again.functions for node in f.nodes)


def test_an_op_inside_of_a_subgraph_may_be_changed() -> None:
    compiler, program = opened("local")
    the(program, "Add").op_type = "Sub"
    again = program_of(compiler.compile(program))
    assert the(again, "Sub").inputs == ("bb_in_0", "bb_in_1")


def test_recorded_nodes_and_names_come_back() -> None:
    _, model = recorded("federated")
    before = program_of(model).functions[0]
    after = reopen(opened("federated")[1]).functions[0]
    assert [n.name for n in after.nodes] == [n.name for n in before.nodes]
    for old, new in zip(before.nodes, after.nodes, strict=True):
        assert new.content() == (*old.content()[:5], *new.content()[5:])  # all but attributes
        assert (new.after, new.source_line, new.metadata) == (
            old.after,
            old.source_line,
            old.metadata,
        )
    assert (after.name, after.inputs, after.outputs) == (before.name, before.inputs, before.outputs)
    assert after.metadata == before.metadata


def test_a_target_alone_is_refused_when_it_talks_to_others() -> None:
    compiler, _ = recorded("federated")
    parts = compiler.compile_partitions(recorded("federated")[1])
    for part in parts.values():
        with pytest.raises(AlreadyCompiled, match="open the whole program"):
            compiler.compile(part)


def test_a_program_without_marks_is_refused() -> None:
    compiler, program = opened("local")
    program.metadata[keys.RECORDED_KEY] = "{"
    with pytest.raises(NotReopenable, match="broken"):
        reopen(program)
    del program.metadata[keys.RECORDED_KEY]
    with pytest.raises(AlreadyCompiled, match="keeps nothing"):
        compiler.compile(model_of(program))


def test_what_another_pass_put_in_is_signed_and_goes() -> None:
    compiler, model = recorded("ring")
    unit = admit(model, compiler.options)
    for name in pipeline.all_pass_names():
        pipeline.load_pass(name).run(unit, compiler.options)
        if name == "sequence_slot_effects":
            main = unit.partitions["b"]
            send = next(node for node in main.nodes if node.op_type == keys.OP_SEND)
            data = send.inputs[0]
            put_in = OpNode("PassThrough", keys.SYSCALL_DOMAIN, "mine", (data,), ("past",))
            main.insert(main.nodes.index(send), put_in)
            send.inputs = ("past", *send.inputs[1:])
            unit.recording.sign(unit.bodies(), "a_pass")
            assert put_in.made_by == "a_pass"
            assert not any(node.made_by == "a_pass" for node in main.nodes if node is not put_in)
    unit.recording.finish(unit.program)
    again = compiler.compile(model_of(unit.program))
    assert again.SerializeToString(deterministic=True) == compiled("ring")


# --- marks that somebody wrote ----------------------------------------------------------------


def marked(program: Program) -> list[tuple[dict[str, str], str]]:
    """Every text that a compile wrote to open the program again: whose metadata, and which key."""
    owners = [program.metadata]
    for function in program.functions:
        owners += [function.metadata, *(node.metadata for node in function.nodes)]
    return [
        (owner, key)
        for owner in owners
        for key in owner
        if key in (keys.RECORDED_KEY, keys.MEMBERS_KEY)
    ]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=6,
)


def of_a_file() -> str:
    """A node whose weights stand in a file of whoever runs it, as a mark keeps nodes."""
    weights = TensorProto(data_type=TensorProto.FLOAT, dims=[1])
    weights.data_location = TensorProto.EXTERNAL
    weights.external_data.add(key="location", value="/etc/passwd")
    node = helper.make_node("Constant", [], ["stolen"], "thief", value=weights)
    node.metadata_props.add(key=keys.RECORDED_KEY, value="0||")
    return base64.b64encode(node.SerializeToString()).decode()


def changed(draw: st.DrawFn, text: str) -> str:
    head, bar, body = text.rpartition("|") if "|" in text[:200] else ("", "", text)
    how = draw(st.sampled_from(["any", "cut", "deep", "huge", "part", "gone", "swap"]))
    if how == "any":
        return draw(st.text(max_size=30))
    if how == "cut":
        return text[: draw(st.integers(0, len(text)))]
    if how == "deep":
        return head + bar + "[" * 100_000
    if how == "huge":
        return draw(st.sampled_from(["1e999||", "9" * 5000 + "||", "inf||{}", "nan||"]))
    if how == "swap":
        at = draw(st.integers(0, max(0, len(text) - 1)))
        return text[:at] + draw(st.text(max_size=3)) + text[at + 1 :]
    try:
        said = json.loads(body)
    except (ValueError, RecursionError):  # changed before
        said = {}
    if not isinstance(said, dict):
        said = {}
    if how == "gone":
        junk = base64.b64encode(draw(st.binary(max_size=20))).decode()
        said["gone"] = [draw(st.sampled_from([of_a_file(), junk, "?"]))]
    else:
        known = [*said, "inputs", "outputs", "after", "attributes", "metadata", "captured", "added"]
        said[draw(st.sampled_from(known))] = draw(JSON)
    return head + bar + json.dumps(said)


@settings(max_examples=150, deadline=None)
@given(data=st.data(), name=st.sampled_from(("federated", "local")))
def test_marks_of_strangers_are_opened_or_refused(data: st.DataObject, name: str) -> None:
    compiler, _ = recorded(name)
    program = program_of(ModelProto.FromString(compiled(name)))

    @st.composite
    def draws(draw: st.DrawFn) -> None:
        for owner, key in draw(st.lists(st.sampled_from(marked(program)), min_size=1, max_size=3)):
            owner[key] = changed(draw, owner[key])

    data.draw(draws())
    try:
        opened = reopen(program)
    except NotReopenable:
        return
    check_bounds(model_of(opened))
    with contextlib.suppress(BbnodeError):
        compiler.compile(program)


@pytest.mark.parametrize("part", ["model", "function"])
def test_a_node_out_of_a_mark_names_no_file(part: str) -> None:
    program = program_of(ModelProto.FromString(compiled("federated")))
    owner = program.metadata if part == "model" else program.functions[0].metadata
    said = json.loads(owner.get(keys.RECORDED_KEY, "{}"))
    said["gone"] = [*said.get("gone", ()), of_a_file()]
    owner[keys.RECORDED_KEY] = json.dumps(said)
    with pytest.raises(NotReopenable, match="to be read from a file"):
        reopen(program)


# --- names of targets -------------------------------------------------------------------------


def _names_and_sites(model: ModelProto) -> tuple[list[str], list[str]]:
    mains = [f for f in program_of(model).functions if keys.TARGET_KEY in f.metadata]
    sites = [node.metadata.get(keys.SITE_ID_KEY, "") for main in mains for node in main.nodes]
    return [main.name for main in mains], list(filter(None, sites))


def test_compiling_again_with_other_components_keeps_the_names_of_targets() -> None:
    model = version()
    compiler = Compiler().bind_backend("compute", OrtBackend)
    again = compiler.bind_peer_selector("clients", ConstantView).compile(model)
    assert _names_and_sites(again) == _names_and_sites(model)
    bound = [entry.value for entry in again.metadata_props if "binding" in entry.key]
    assert any(ConstantView.TYPE_NAME in value for value in bound)
    same = compiler.with_target_version(model.ir_version)
    same = same.bind_peer_selector("clients", ConnectedView)
    assert same.compile(again) == model


def test_another_time_budget_changes_what_it_must_and_no_site() -> None:
    model = version()
    compiler = Compiler().bind_backend("compute", OrtBackend)
    compiler = compiler.bind_peer_selector("clients", ConnectedView)
    again = compiler.with_per_hop_budget_ns(10**9).compile(model)
    (names, sites), (names_again, sites_again) = map(_names_and_sites, (model, again))
    assert sites_again == sites
    assert not set(names_again) & set(names)
    assert compiler.compile(again) == model


def test_a_function_that_is_called_in_itself_is_refused() -> None:
    program, caller, call = next(
        (program, function, node)
        for program in (program_of(ModelProto.FromString(compiled(name))) for name in PROGRAMS)
        for function in program.functions
        for node in function.nodes
        if keys.MEMBERS_KEY in node.metadata
    )
    call.domain, call.op_type = caller.domain, caller.name
    with pytest.raises(NotReopenable, match=r"called in itself|broken"):
        reopen(program)
