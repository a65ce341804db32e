"""Broken programs: a typed error that names the fault, or a valid result, and nothing else."""

from __future__ import annotations

from collections.abc import Callable

import onnx
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import ModelProto

from bbnode.compiler import Compiler
from bbnode.compiler.errors import CompileError, Internal, PassInvariantBroken
from bbnode.ir import keys
from bbnode.ir.graph import Function, OpNode
from tests.compiler import programs
from tests.compiler.programs import BINDINGS, model_of

Pick = Callable[[int], int]


def drop_node(function: Function, node: int, pick: Pick) -> None:
    del function.nodes[node]


def repeat_node(function: Function, node: int, pick: Pick) -> None:
    function.nodes.add().CopyFrom(function.nodes[node])


def swap_nodes(function: Function, node: int, pick: Pick) -> None:
    other, copy = function.nodes[pick(len(function.nodes))], OpNode()
    copy.CopyFrom(other)
    other.CopyFrom(function.nodes[node])
    function.nodes[node].CopyFrom(copy)


def drop_input(function: Function, node: int, pick: Pick) -> None:
    del function.nodes[node].inputs[:1]


def drop_outputs(function: Function, node: int, pick: Pick) -> None:
    del function.nodes[node].outputs[pick(2) :]


def empty_input(function: Function, node: int, pick: Pick) -> None:
    for index in range(len(function.nodes[node].inputs)):
        function.nodes[node].inputs[index] = ""


def rewire(function: Function, node: int, pick: Pick) -> None:
    values = [name for other in function.nodes for name in other.outputs] + ["nothing"]
    inputs = function.nodes[node].inputs
    inputs.append(values[pick(len(values))])
    inputs[0] = values[pick(len(values))]


def retype(function: Function, node: int, pick: Pick) -> None:
    infos = function.value_info
    if infos:
        infos[pick(len(infos))].type.CopyFrom(infos[pick(len(infos))].type)


def untype(function: Function, node: int, pick: Pick) -> None:
    if function.value_info:
        del function.value_info[pick(len(function.value_info))]


def other_op(function: Function, node: int, pick: Pick) -> None:
    source = function.nodes[pick(len(function.nodes))]
    function.nodes[node].op_type = source.op_type
    if pick(2):
        function.nodes[node].domain = source.domain


def lose_metadata(function: Function, node: int, pick: Pick) -> None:
    entries = function.nodes[node].metadata_props
    if entries:
        del entries[pick(len(entries))]


def scramble_metadata(function: Function, node: int, pick: Pick) -> None:
    entries = function.nodes[node].metadata_props
    if entries:
        entries[pick(len(entries))].value = ("", "-1", ",,", "a,b", "9" * 40, "é\x00")[pick(6)]


def lose_attribute(function: Function, node: int, pick: Pick) -> None:
    del function.nodes[node].attributes[:1]


def odd_attribute(function: Function, node: int, pick: Pick) -> None:
    for attribute in function.nodes[node].attributes:
        attribute.type = pick(14)


def lose_opsets(function: Function, node: int, pick: Pick) -> None:
    del function.opset_imports[pick(2) :]


def call_itself(function: Function, node: int, pick: Pick) -> None:
    function.nodes[node].domain = function.domain
    function.nodes[node].op_type = function.name


def lose_slot_lists(function: Function, node: int, pick: Pick) -> None:
    del function.attributes[:]
    del function.defaults[:]
    function.metadata.pop(keys.HOME_KEY, None)


CORRUPTIONS = (
    drop_node, repeat_node, swap_nodes, drop_input, drop_outputs, empty_input, rewire, retype,
    untype, other_op, lose_metadata, scramble_metadata, lose_attribute, odd_attribute,
    lose_opsets, call_itself, lose_slot_lists,
)  # fmt: skip


def bound() -> Compiler:
    made = Compiler().bind_backend("compute", programs.FakeBackend)
    for binding in BINDINGS:
        made = made.bind(binding.role, binding.slot, binding.component)
    for slot in ("pick_a", "pick_b", "pick_c"):
        made = made.bind_peer_selector(slot, programs.FakeSelector)
    return made


BOUND = bound()
RECORDED = {name: model_of(*make()) for name, make in programs.PROGRAMS.items()}


@settings(max_examples=600)
@given(
    st.sampled_from(sorted(RECORDED)),
    st.lists(
        st.tuples(
            st.sampled_from(CORRUPTIONS),
            st.integers(0, 999),
            st.integers(0, 99),
            st.integers(0, 99),
        ),
        min_size=1,
        max_size=4,
    ),
    st.booleans(),
)
def test_a_corrupted_program_gives_a_typed_error_or_a_valid_result(
    name: str,
    steps: list[tuple[Callable[[Function, int, Pick], None], int, int, int]],
    permissive: bool,
) -> None:
    model = ModelProto()
    model.CopyFrom(RECORDED[name])
    for action, at, first, second in steps:
        function = model.functions[at % len(model.functions)]
        if function.nodes:
            draws = iter([first, second] * 4)
            action(function, at % len(function.nodes), lambda n, d=draws: next(d) % n)
    made = BOUND.with_permissive_types() if permissive else BOUND
    try:
        compiled = made.compile(model)
    except (Internal, PassInvariantBroken):
        raise  # those would be our own fault
    except CompileError:
        return
    onnx.checker.check_model(compiled)
