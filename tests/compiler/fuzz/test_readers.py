"""Everything that reads an artifact, given damaged ones: a typed error or an answer, nothing else.

Rule: any field of any message of a compiled model may be lost, doubled, emptied, or hold
something odd; it is sealed again, as somebody who damages on purpose would.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from google.protobuf.message import DecodeError, EncodeError
from hypothesis import example, given, settings
from hypothesis import strategies as st
from onnx import AttributeProto, ModelProto

from bbnode.compiler.errors import Internal, PassInvariantBroken
from bbnode.daemon.artifacts.artifact import Artifact, parse_artifact, serialize
from bbnode.daemon.artifacts.inspect import describe
from bbnode.daemon.artifacts.picture import to_html, to_svg
from bbnode.daemon.config import sources
from bbnode.daemon.join.plan import choose_target, make_plan, with_absolute_paths
from bbnode.dsl import CompiledModule
from bbnode.ir import keys
from bbnode.ir.errors import BbnodeError
from bbnode.ir.seal import seal
from tests import protos
from tests.compiler.fuzz.tape import Tape
from tests.compiler.fuzz.test_corruptions import PROGRAMS, compiled, damage, install_it

ODD_TEXTS = ("", ",", "|", "a|b", "a|b|c", "-1", "9" * 30, "é", "true", "x" * 300, "\x1b[2J", "#")
ODD_NUMBERS = (0, 1, -1, 7, (1 << 31) - 1, (1 << 62))
TAPES = st.lists(st.integers(0, (1 << 16) - 1), min_size=8, max_size=40)


def spoil(model: ModelProto, tape: Tape) -> None:
    """Change one field, at a depth that the tape chooses."""
    message: Any = model
    for _ in range(1 + tape.pick(6)):
        fields = message.ListFields()
        if not fields:
            break
        field, value = tape.choose(fields)
        inner = list(value) if hasattr(value, "__len__") and not isinstance(value, str) else [value]
        if field.message_type is not None and inner and tape.pick(4):
            message = tape.choose(inner)
            continue
        _change(message, field, tape)
        return
    _change(message, tape.choose(list(message.DESCRIPTOR.fields)), tape)


def _change(message: Any, field: Any, tape: Tape) -> None:
    is_list = hasattr(getattr(message, field.name), "append")
    if field.message_type is not None:
        if not is_list:
            if tape.pick(2):
                message.ClearField(field.name)
            else:
                getattr(message, field.name).SetInParent()
            return
        listed = getattr(message, field.name)
        choice = tape.pick(3)
        if listed and choice == 0:
            del listed[tape.pick(len(listed))]
        elif listed and choice == 1:
            listed.add().CopyFrom(listed[tape.pick(len(listed))])
        else:
            listed.add()
        return
    odd: Any = tape.choose(ODD_TEXTS)
    if field.cpp_type != field.CPPTYPE_STRING:
        odd = tape.choose(ODD_NUMBERS)
    elif field.type == field.TYPE_BYTES:
        odd = odd.encode()
    try:
        if not is_list:
            if tape.pick(3):
                setattr(message, field.name, odd)
            else:
                message.ClearField(field.name)
        elif getattr(message, field.name) and tape.pick(2):
            listed = getattr(message, field.name)
            listed[tape.pick(len(listed))] = odd
        else:
            getattr(message, field.name).append(odd)
    except (ValueError, TypeError, OverflowError):
        message.ClearField(field.name)  # the field holds no such number


def _join(found: Artifact) -> object:
    resolved = sources.resolve(
        None,
        environ={},
        flags={"artifact.path": "a", "artifact.targets": [choose_target(found, found.targets[0])]},
    )
    plan = make_plan(found, resolved.config)
    plan.check()
    return plan.as_json(), with_absolute_paths(resolved.config, plan, sources.paths.Path())


READERS: dict[str, Callable[[Artifact], object]] = {
    "inspect": lambda found: describe(found.model),
    "svg": lambda found: to_svg(found.model),
    "html": lambda found: to_html(found.model),
    "join": lambda found: _join(found) if found.targets else None,
    "module": lambda found: CompiledModule(found.model).build(),
}


def spoilt(number: int, tape: Tape) -> bytes:
    model = ModelProto()
    model.CopyFrom(compiled(number % PROGRAMS))
    for _ in range(1 + tape.pick(3)):
        (damage if tape.pick(3) == 0 else spoil)(model, tape)
    try:
        seal(model)
        return serialize(model)
    except (EncodeError, ValueError, DecodeError):
        return b""


@settings(max_examples=60)
@given(number=st.integers(0, PROGRAMS - 1), numbers=TAPES)
def test_every_reader_answers_or_refuses(number: int, numbers: list[int]) -> None:
    read_it(number, numbers)


@pytest.mark.slow
@settings(max_examples=5000)
@given(number=st.integers(0, PROGRAMS - 1), numbers=TAPES)
def test_every_reader_long(number: int, numbers: list[int]) -> None:
    read_it(number, numbers)


def read_it(number: int, numbers: list[int]) -> None:
    _read_all(spoilt(number, Tape(numbers)))


def _read_all(data: bytes) -> None:
    try:
        found = parse_artifact(data, "it")
    except BbnodeError:
        return
    for name, read in READERS.items():
        try:
            read(found)
        except (Internal, PassInvariantBroken) as error:
            pytest.fail(f"{name}: {error}")
        except BbnodeError:
            continue


@settings(max_examples=150)
@given(number=st.integers(0, PROGRAMS - 1), at=st.floats(0, 1), cut=st.binary(max_size=4))
@example(number=0, at=0.0, cut=b"")
def test_bytes_that_are_cut_or_changed_are_refused(number: int, at: float, cut: bytes) -> None:
    data = serialize(compiled(number))
    place = int(at * (len(data) - 1))
    for changed in (data[:place] + cut + data[place + 1 :], data[:place]):
        try:
            assert parse_artifact(changed, "it").model == compiled(number)
        except BbnodeError:
            continue


# What damage found before: a program, and a change of it.
def _no_outputs(model: ModelProto) -> None:
    for function in model.functions:
        for node in function.node:
            if node.op_type in (*keys.GATE_OPS, keys.OP_DEADLINE_CHECK, *keys.RECV_OPS):
                del node.output[:]


def _odd_deadline(model: ModelProto) -> None:
    for function in model.functions:
        for node in function.node:
            if node.domain == keys.WIRE_DOMAIN:
                protos.set_meta(node, keys.DEADLINE_NS_KEY, "soon")
                kept = [a for a in node.attribute if a.name != keys.ATTR_DEADLINE_NS]
                del node.attribute[:]
                node.attribute.extend(kept)


def _untyped(model: ModelProto) -> None:
    for function in model.functions:
        for node in function.node:
            for attribute in node.attribute:
                attribute.type = AttributeProto.UNDEFINED


def _odd_slot_id(model: ModelProto) -> None:
    for entry in model.metadata_props:
        if entry.key.startswith(keys.BINDING_PREFIX):
            entry.value = entry.value.rpartition("|")[0] + "|--\N{SUPERSCRIPT TWO}"


def _far_opset(model: ModelProto) -> None:
    for holder in (model, *model.functions):
        for entry in holder.opset_import:
            entry.version = 1 << 40


def _twice(model: ModelProto) -> None:
    for function in list(model.functions):
        model.functions.add().CopyFrom(function)
        model.functions[-1].node[0].name = "another"


FOUND = (_no_outputs, _odd_deadline, _untyped, _odd_slot_id, _far_opset, _twice)


@pytest.mark.parametrize("change", FOUND)
def test_damage_that_was_none_of_ours(change: Callable[[ModelProto], None]) -> None:
    for number in range(4):
        model = ModelProto()
        model.CopyFrom(compiled(number))
        change(model)
        install_it(model)
        seal(model)
        _read_all(serialize(model))
