"""Broken programs: a typed error that names the fault, or a valid result, and nothing else."""

from __future__ import annotations

from collections.abc import Callable

import onnx
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import FunctionProto, ModelProto, NodeProto

from bbnode.compiler import Compiler
from bbnode.compiler.errors import CompileError, Internal, PassInvariantBroken
from bbnode.ir import keys
from tests.compiler import programs
from tests.compiler.programs import BINDINGS, model_of

Pick = Callable[[int], int]


def drop_node(function: FunctionProto, node: int, pick: Pick) -> None:
    del function.node[node]


def repeat_node(function: FunctionProto, node: int, pick: Pick) -> None:
    function.node.add().CopyFrom(function.node[node])


def swap_nodes(function: FunctionProto, node: int, pick: Pick) -> None:
    other, copy = function.node[pick(len(function.node))], NodeProto()
    copy.CopyFrom(other)
    other.CopyFrom(function.node[node])
    function.node[node].CopyFrom(copy)


def drop_input(function: FunctionProto, node: int, pick: Pick) -> None:
    del function.node[node].input[:1]


def drop_outputs(function: FunctionProto, node: int, pick: Pick) -> None:
    del function.node[node].output[pick(2) :]


def empty_input(function: FunctionProto, node: int, pick: Pick) -> None:
    for index in range(len(function.node[node].input)):
        function.node[node].input[index] = ""


def rewire(function: FunctionProto, node: int, pick: Pick) -> None:
    values = [name for other in function.node for name in other.output] + ["nothing"]
    inputs = function.node[node].input
    inputs.append(values[pick(len(values))])
    inputs[0] = values[pick(len(values))]


def retype(function: FunctionProto, node: int, pick: Pick) -> None:
    infos = function.value_info
    if infos:
        infos[pick(len(infos))].type.CopyFrom(infos[pick(len(infos))].type)


def untype(function: FunctionProto, node: int, pick: Pick) -> None:
    if function.value_info:
        del function.value_info[pick(len(function.value_info))]


def other_op(function: FunctionProto, node: int, pick: Pick) -> None:
    source = function.node[pick(len(function.node))]
    function.node[node].op_type = source.op_type
    if pick(2):
        function.node[node].domain = source.domain


def lose_metadata(function: FunctionProto, node: int, pick: Pick) -> None:
    entries = function.node[node].metadata_props
    if entries:
        del entries[pick(len(entries))]


def scramble_metadata(function: FunctionProto, node: int, pick: Pick) -> None:
    entries = function.node[node].metadata_props
    if entries:
        entries[pick(len(entries))].value = ("", "-1", ",,", "a,b", "9" * 40, "é\x00")[pick(6)]


def lose_attribute(function: FunctionProto, node: int, pick: Pick) -> None:
    del function.node[node].attribute[:1]


def odd_attribute(function: FunctionProto, node: int, pick: Pick) -> None:
    for attribute in function.node[node].attribute:
        attribute.type = pick(14)


def lose_opsets(function: FunctionProto, node: int, pick: Pick) -> None:
    del function.opset_import[pick(2) :]


def call_itself(function: FunctionProto, node: int, pick: Pick) -> None:
    function.node[node].domain = function.domain
    function.node[node].op_type = function.name


def lose_slot_lists(function: FunctionProto, node: int, pick: Pick) -> None:
    del function.attribute[:]
    del function.attribute_proto[:]
    kept = [entry for entry in function.metadata_props if entry.key != keys.HOME_KEY]
    del function.metadata_props[:]
    function.metadata_props.extend(kept)


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
    steps: list[tuple[Callable[[FunctionProto, int, Pick], None], int, int, int]],
    permissive: bool,
) -> None:
    model = ModelProto()
    model.CopyFrom(RECORDED[name])
    for action, at, first, second in steps:
        function = model.functions[at % len(model.functions)]
        if function.node:
            draws = iter([first, second] * 4)
            action(function, at % len(function.node), lambda n, d=draws: next(d) % n)
    made = BOUND.with_permissive_types() if permissive else BOUND
    try:
        compiled = made.compile(model)
    except (Internal, PassInvariantBroken):
        raise  # those would be our own fault
    except CompileError:
        return
    onnx.checker.check_model(compiled)
