"""Random damage to random programs: a typed error or a valid result, and nothing else.

Rule: recorded models are damaged before the compiler sees them, compiled ones before a node
installs them; the seal is made anew, as who damages on purpose would.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import onnx
import pytest
from google.protobuf.message import DecodeError, EncodeError
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import AttributeProto, FunctionProto, ModelProto, NodeProto

from bbnode.compiler import Compiler
from bbnode.compiler.errors import CompileError, Internal, PassInvariantBroken
from bbnode.daemon.artifacts.artifact import ArtifactRejected, parse_artifact
from bbnode.dsl import Graph, Module
from bbnode.dsl import types as dsl_types
from bbnode.engine import install
from bbnode.ir import keys
from bbnode.ir.errors import BbnodeError
from bbnode.ir.peer import PeerId
from bbnode.ir.seal import seal
from tests import protos
from tests.compiler.fuzz import world
from tests.compiler.fuzz.random_programs import RandomProgram, Recording
from tests.compiler.fuzz.tape import Tape
from tests.compiler.fuzz.wide_programs import WideRecording

TAPES = st.lists(st.integers(0, (1 << 16) - 1), min_size=4, max_size=24)
PROGRAMS = 12
ODD_TEXTS = ("", ",", "a,b", "-1", "9" * 30, "\0", "é", "true", "Model|x", "x" * 20_000)


@functools.cache
def recorded(number: int) -> ModelProto:
    numbers = [(number * 7919 + i * 104_729) ** 2 % 65_521 for i in range(90)]
    return RandomProgram(numbers, recording=(Recording, WideRecording)[number % 2]).build()


@functools.cache
def compiled(number: int) -> ModelProto:
    return world.compiler_for(recorded(number)).compile(recorded(number))


def damage(model: ModelProto, tape: Tape) -> None:
    """One change, at a place that the tape chooses."""
    function = tape.choose(model.functions)
    if not function.node:
        return
    node = tape.choose(function.node)
    tape.choose(_DAMAGES)(model, function, node, tape)


def drop_node(model: ModelProto, function: FunctionProto, node: NodeProto, tape: Tape) -> None:
    function.node.remove(node)


def repeat_node(model: ModelProto, function: FunctionProto, node: NodeProto, tape: Tape) -> None:
    function.node.add().CopyFrom(node)


def rename_node(model: ModelProto, function: FunctionProto, node: NodeProto, tape: Tape) -> None:
    node.name = tape.choose((tape.choose(function.node).name, *ODD_TEXTS))


def rewire(model: ModelProto, function: FunctionProto, node: NodeProto, tape: Tape) -> None:
    values = [name for other in function.node for name in other.output]
    ports = tape.choose((node.input, node.output, function.input, function.output))
    change = tape.pick(3)
    if change == 0 and ports:
        ports[tape.pick(len(ports))] = tape.choose((*values, *ODD_TEXTS))
    elif change == 1:
        ports.append(tape.choose((*values, *ODD_TEXTS)))
    elif ports:
        del ports[tape.pick(len(ports))]


def other_op(model: ModelProto, function: FunctionProto, node: NodeProto, tape: Tape) -> None:
    source = tape.choose(tape.choose(model.functions).node or [node])
    node.op_type = source.op_type
    if tape.pick(2):
        node.domain = source.domain


def metadata(model: ModelProto, function: FunctionProto, node: NodeProto, tape: Tape) -> None:
    entries = tape.choose((node, function, model)).metadata_props
    if not entries:
        return
    entry = entries[tape.pick(len(entries))]
    change = tape.pick(3)
    if change == 0:
        entries.remove(entry)
    elif change == 1:
        entry.value = tape.choose(ODD_TEXTS)
    else:
        entries.add(key=entry.key, value=tape.choose(ODD_TEXTS))


def attribute(model: ModelProto, function: FunctionProto, node: NodeProto, tape: Tape) -> None:
    if not node.attribute:
        return
    one = tape.choose(node.attribute)
    change = tape.pick(5)
    if change == 0:
        node.attribute.remove(one)
    elif change == 1:
        node.attribute.add().CopyFrom(one)
    elif change == 2:
        one.type = tape.pick(15)  # type: ignore[assignment]
    elif change == 3:
        one.type, one.i, one.s = AttributeProto.INT, (1 << 62) - tape.pick(3), b""
    else:
        one.s = tape.choose(ODD_TEXTS).encode()


def types(model: ModelProto, function: FunctionProto, node: NodeProto, tape: Tape) -> None:
    infos = function.value_info
    if not infos:
        return
    info = tape.choose(infos)
    change = tape.pick(4)
    if change == 0:
        infos.remove(info)
    elif change == 1:
        info.type.CopyFrom(tape.choose(infos).type)
    elif change == 2:
        info.type.denotation = tape.choose(ODD_TEXTS)
    else:
        info.type.ClearField("value")  # type: ignore[arg-type]


def functions(model: ModelProto, function: FunctionProto, node: NodeProto, tape: Tape) -> None:
    change = tape.pick(5)
    if change == 0:
        model.functions.remove(function)
    elif change == 1:
        model.functions.add().CopyFrom(function)
    elif change == 2:
        function.name = tape.choose((tape.choose(model.functions).name, *ODD_TEXTS))
    elif change == 3:
        node.domain, node.op_type = function.domain, function.name  # calls itself
    else:
        del tape.choose((function, model)).opset_import[tape.pick(3) :]


_DAMAGES = (
    drop_node, repeat_node, rename_node, rewire, rewire, other_op, metadata, metadata,
    attribute, types, functions,
)  # fmt: skip


def damaged(model: ModelProto, numbers: list[int]) -> ModelProto:
    copy = ModelProto()
    copy.CopyFrom(model)
    tape = Tape(numbers)
    while tape and copy.functions:
        damage(copy, tape)
    return copy


def flipped(model: ModelProto, numbers: list[int]) -> bytes:
    data = bytearray(model.SerializeToString(deterministic=True))
    tape = Tape(numbers)
    while tape and data:
        at = (tape.pick(1 << 16) << 16 | tape.pick(1 << 16)) % len(data)
        change = tape.pick(3)
        if change == 0:
            data[at] ^= 1 << tape.pick(8)
        elif change == 1:
            data[at] = tape.pick(256)
        else:
            del data[at : at + 1 + tape.pick(4)]
    return bytes(data)


def compile_it(model: ModelProto, number: int) -> None:
    try:
        made = world.compiler_for(recorded(number)).compile(model)
    except (Internal, PassInvariantBroken):
        raise  # those would be our own fault
    except CompileError:
        return
    onnx.checker.check_model(made)


def install_it(model: ModelProto) -> None:
    """As a peer takes up an artifact: from its bytes, all targets that it can find."""
    try:
        seal(model)
        data = model.SerializeToString(deterministic=True)
    except (EncodeError, ValueError, UnicodeError):
        return  # no file can hold it
    try:
        artifact = parse_artifact(data, "damaged")
    except ArtifactRejected:
        return
    for function in artifact.model.functions:
        try:
            node = install(artifact.model, [function.name], peer_id=PeerId.from_seed("a"))
        except BbnodeError:
            continue
        node.poll(0)


def check_recorded(number: int, numbers: list[int]) -> None:
    compile_it(damaged(recorded(number), numbers), number)


def check_recorded_bytes(number: int, numbers: list[int]) -> None:
    model = ModelProto()
    try:
        model.ParseFromString(flipped(recorded(number), numbers))
    except DecodeError:
        return
    compile_it(model, number)


def check_compiled(number: int, numbers: list[int]) -> None:
    install_it(damaged(compiled(number), numbers))


def check_compiled_bytes(number: int, numbers: list[int]) -> None:
    data = flipped(compiled(number), numbers)
    try:
        model = parse_artifact(data, "damaged").model
        assert not numbers or data == compiled(number).SerializeToString(deterministic=True)
    except ArtifactRejected:
        model = ModelProto()
        try:
            model.ParseFromString(data)
        except DecodeError:
            return
    if model.metadata_props:
        install_it(model)


CHECKS = (check_recorded, check_recorded_bytes, check_compiled, check_compiled_bytes)


@pytest.mark.parametrize("check", CHECKS)
@settings(max_examples=150)
@given(number=st.integers(0, PROGRAMS - 1), numbers=TAPES)
def test_damage_gives_a_typed_error_or_a_valid_result(check, number, numbers) -> None:
    check(number, numbers)


@pytest.mark.slow
@pytest.mark.parametrize("check", CHECKS)
@settings(max_examples=5000)
@given(number=st.integers(0, PROGRAMS - 1), numbers=TAPES)
def test_damage_long(check, number, numbers) -> None:
    check(number, numbers)


def test_every_op_without_what_it_may_have() -> None:
    """Each kind of op once more, with outputs, inputs or the value of an attribute left out."""
    seen = set()
    for number in range(PROGRAMS):
        for at, function in enumerate(recorded(number).functions):
            for node in function.node:
                for name, leave_out in _leavings(node):
                    if (node.domain, node.op_type, name) in seen:
                        continue
                    seen.add((node.domain, node.op_type, name))
                    model = ModelProto()
                    model.CopyFrom(recorded(number))
                    more = model.functions[at].node.add()
                    more.CopyFrom(node)
                    more.name = "more"
                    more.output[:] = [f"more{i}" for i in range(len(node.output))]
                    leave_out(more)
                    compile_it(model, number)
    assert len(seen) > 100


def _leavings(node: NodeProto) -> Iterator[tuple[str, Callable[[NodeProto], None]]]:
    """What may be left out of an op, by name, and how."""

    def outputs(made: NodeProto) -> None:
        made.ClearField("output")

    def names(made: NodeProto) -> None:
        made.output[:] = [""] * len(made.output)

    def inputs(made: NodeProto) -> None:
        made.ClearField("input")

    yield from ((each.__name__, each) for each in (outputs, names, inputs))
    for at, attribute in enumerate(node.attribute):

        def kind(made: NodeProto, at: int = at) -> None:
            made.attribute[at].type = AttributeProto.TENSORS

        def value(made: NodeProto, at: int = at) -> None:
            name, kind = made.attribute[at].name, made.attribute[at].type
            made.attribute[at].CopyFrom(
                AttributeProto(name=name, type=kind, ref_attr_name="nowhere")
            )

        def dtype(made: NodeProto, at: int = at) -> None:
            made.attribute[at].t.data_type = 99

        yield f"the kind of {attribute.name}", kind
        yield f"the value of {attribute.name}", value
        if attribute.type == AttributeProto.TENSOR:
            yield f"the dtype of {attribute.name}", dtype


@pytest.mark.parametrize(("number", "numbers"), [(7, [725, 1529, 0, 5])])
def test_a_constant_of_no_dtype_is_refused_at_install(number: int, numbers: list[int]) -> None:
    check_compiled_bytes(number, numbers)


def test_a_site_beyond_64_bits_is_refused() -> None:
    class Sends(Module):
        home = "a"

        def body(self, g: Graph) -> None:
            x, peers = g.input("x", dsl_types.TENSOR_FLOAT), g.input("b", dsl_types.PEER_ID_VEC)
            g.output("y", g.net_out("there", peers, x))

    model = Compiler().compile(Sends().build())
    main = next(f for f in model.functions if f.name.startswith("b#"))
    (recv,) = (node for node in main.node if node.op_type == keys.OP_RECV)
    protos.set_meta(recv, keys.SITE_ID_KEY, "9" * 20)
    seal(model)
    with pytest.raises(BbnodeError, match="64 bits"):
        install(model, [main.name], peer_id=PeerId.from_seed("a"))


def test_a_damaged_artifact_is_refused_by_its_seal() -> None:
    model = ModelProto()
    model.CopyFrom(compiled(0))
    model.functions[0].node[0].metadata_props.add(key=keys.PREFIX + "note", value="changed")
    with pytest.raises(ArtifactRejected, match="changed after it was compiled"):
        parse_artifact(model.SerializeToString(), "changed")
