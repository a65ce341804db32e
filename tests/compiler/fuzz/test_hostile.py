"""Hostile model files: refused with a typed, short error, within a second per MB.

Rule: each case is one model that no program needs. It goes to the compiler as it is, and to
the loading of artifacts with the passport and the seal of a compiled one.
"""

# ruff: noqa: ARG005 - changes have one signature

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from google.protobuf.message import EncodeError
from onnx import AttributeProto, FunctionProto, GraphProto, ModelProto, NodeProto

from bbnode.compiler import Compiler
from bbnode.compiler.errors import CompileError, Internal, ModelOutOfBounds, UnboundSlot
from bbnode.daemon.artifacts.artifact import ArtifactRejected, parse_artifact
from bbnode.engine import plan_program
from bbnode.ir import keys, types
from bbnode.ir.errors import BbnodeError
from bbnode.ir.seal import seal
from tests import protos
from tests.compiler import programs

MB = 1 << 20
MAX_MESSAGE_CHARS = 100_000
# The rule is 1 s per MB; small models have the interpreter's own start-up costs.
LEAST_SECONDS = 3.0
Change = Callable[[ModelProto, FunctionProto, NodeProto], object]


def _nested(depth: int) -> Change:
    def change(model: ModelProto, function: FunctionProto, node: NodeProto) -> None:
        at = node
        for _ in range(depth):
            graph = at.attribute.add(name="then_branch", type=AttributeProto.GRAPH).g
            at = graph.node.add(op_type="If", name="If")

    return change


def _ring(model: ModelProto, function: FunctionProto, node: NodeProto) -> None:
    for number in range(3_000):
        other = model.functions.add(name=f"F{number}", domain=keys.MODULE_DOMAIN)
        other.opset_import.extend(function.opset_import)
        callee = f"F{(number + 1) % 3_000}"
        other.node.add(op_type=callee, domain=keys.MODULE_DOMAIN, name="call")
    function.node.add(op_type="F0", domain=keys.MODULE_DOMAIN, name="call")


def _wide_graph(model: ModelProto, function: FunctionProto, node: NodeProto) -> None:
    for name in ("then_branch", "else_branch"):
        graph = node.attribute.add(name=name, type=AttributeProto.GRAPH).g
        for number in range(2_000):
            inner = graph.node.add(op_type="If", name=f"If{number}", output=[f"made{number}"])
            inner.attribute.add(name=name, type=AttributeProto.GRAPH).g.name = "g"


TEXT = "A" * (4 * MB)
ATTRIBUTE = AttributeProto(name="a", type=AttributeProto.INT, i=1)

REFUSED: dict[str, Change] = {
    "node name": lambda m, f, n: setattr(n, "name", TEXT),
    "op type": lambda m, f, n: setattr(n, "op_type", TEXT),
    "domain": lambda m, f, n: setattr(n, "domain", TEXT),
    "input": lambda m, f, n: n.input.append(TEXT),
    "output": lambda m, f, n: n.output.append(TEXT),
    "function name": lambda m, f, n: setattr(f, "name", TEXT),
    "function input": lambda m, f, n: f.input.append(TEXT),
    "after": lambda m, f, n: protos.set_meta(n, keys.AFTER_KEY, "A," * (2 * MB)),
    "slot": lambda m, f, n: protos.set_meta(n, keys.SLOT_KEY, TEXT),
    "slot id": lambda m, f, n: protos.set_meta(n, keys.SLOT_ID_KEY, "9" * (4 * MB)),
    "deadline": lambda m, f, n: protos.set_meta(n, keys.DEADLINE_NS_KEY, "9" * (4 * MB)),
    "home": lambda m, f, n: protos.set_meta(f, keys.HOME_KEY, TEXT),
    "metadata key": lambda m, f, n: protos.set_meta(n, TEXT, ""),
    "attribute name": lambda m, f, n: n.attribute.add(name=TEXT, type=AttributeProto.INT, i=1),
    "type": lambda m, f, n: setattr(f.value_info[0].type, "denotation", TEXT),
    "opset domain": lambda m, f, n: m.opset_import.add(domain=TEXT, version=1),
    "inputs": lambda m, f, n: n.input.extend(["a"] * 500_000),
    "outputs": lambda m, f, n: n.output.extend(["o"] * 500_000),
    "function inputs": lambda m, f, n: f.input.extend(["i"] * 500_000),
    "attributes": lambda m, f, n: n.attribute.extend([ATTRIBUTE] * 100_000),
    "graphs": lambda m, f, n: n.attribute.add(
        name="b", type=AttributeProto.GRAPHS
    ).graphs.extend([GraphProto()] * 100_000),
    "opsets": lambda m, f, n: f.opset_import.extend([m.opset_import[0]] * 100_000),
    "slots": lambda m, f, n: f.attribute.extend(["s"] * 100_000),
    "metadata": lambda m, f, n: f.metadata_props.extend([f.metadata_props[0]] * 100_000),
    "node metadata": lambda m, f, n: n.metadata_props.extend([n.metadata_props[0]] * 100_000),
    "nested 40": _nested(40),
    "nested 10,000": _nested(10_000),
    "not UTF-8": lambda m, f, n: None,  # see `model_of`
}  # fmt: skip

# What the passes themselves refuse, or take, in time that is linear.
OTHERS: dict[str, Change] = {
    "nested 20": _nested(20),
    "ring of calls": _ring,
    "wide graph": _wide_graph,
    "cycle": lambda m, f, n: n.input.append(f.output[0]),
    "itself": lambda m, f, n: setattr(n, "op_type", f.name) or setattr(n, "domain", f.domain),
    "functions": lambda m, f, n: m.functions.extend([FunctionProto(name="F")] * 20_000),
    "values": lambda m, f, n: f.value_info.extend([f.value_info[0]] * 100_000),
    "nodes": lambda m, f, n: f.node.extend([n] * 20_000),
}


def model_of(case: str) -> ModelProto:
    model = programs.model_of(programs.local_program())
    function = model.functions[0]
    {**REFUSED, **OTHERS}[case](model, function, function.node[0])
    if case == "not UTF-8":
        data = model.SerializeToString().replace(b"Local", b"Loc\xffl")
        model.ParseFromString(data)
    return model


def timed(size: int, work: Callable[[], object]) -> BaseException | None:
    # The processor's time: others may have it meanwhile.
    start = time.thread_time()
    try:
        work()
    except BbnodeError as error:
        refused: BbnodeError | None = error
    else:
        refused = None
    assert time.thread_time() - start < max(LEAST_SECONDS, size / MB)
    assert not isinstance(refused, Internal)
    assert len(str(refused)) < MAX_MESSAGE_CHARS
    return refused


def size_of(model: ModelProto) -> int:
    try:
        return model.ByteSize()
    except EncodeError:
        return 0


COMPILER = Compiler().bind_backend("compute", programs.FakeBackend)


@pytest.mark.parametrize("case", [*REFUSED, *OTHERS])
def test_a_hostile_model_is_refused_by_the_compiler(case: str) -> None:
    model = model_of(case)
    error = timed(size_of(model), lambda: COMPILER.compile(model))
    assert error is None or isinstance(error, CompileError)
    assert isinstance(error, ModelOutOfBounds) == (case in REFUSED), error


@pytest.mark.parametrize("case", [*REFUSED, *OTHERS])
def test_a_hostile_model_is_refused_as_an_artifact(case: str) -> None:
    model = model_of(case)
    protos.set_meta(model, keys.COMPILED_KEY, keys.COMPILED_CURRENT_VERSION)
    protos.set_meta(model.functions[0], keys.TARGET_KEY, "true")
    try:
        seal(model)
        data = model.SerializeToString(deterministic=True)
    except (EncodeError, ValueError):
        return  # no file can hold it
    parsed: list[ModelProto] = []
    error = timed(len(data), lambda: parsed.append(parse_artifact(data, "x").model))
    # Of a recording the compiler says itself that functions share a name.
    assert isinstance(error, ArtifactRejected) == (case in REFUSED or case == "functions"), error
    if parsed:
        timed(len(data), lambda: plan_program(parsed[0], [parsed[0].functions[0].name]))


def test_bytes_that_nest_ten_thousand_deep_are_no_artifact() -> None:
    data = b""
    for _ in range(10_000):  # field 7 of a model, then 1 and 5 and 6: graph, node, attribute, g
        data = b"\x3a" + _varint(len(data)) + data
    error = timed(len(data), lambda: parse_artifact(data, "deep"))
    assert isinstance(error, ArtifactRejected)


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*out, number])


def test_a_hundred_megabytes_of_one_name_are_refused() -> None:
    model = programs.model_of(programs.local_program())
    model.functions[0].node[0].name = "A" * (100 * MB)
    error = timed(100 * MB, lambda: COMPILER.compile(model))
    assert isinstance(error, ModelOutOfBounds)
    assert "104857600 characters" in str(error)


def test_a_slot_that_thousands_of_sends_leave_unbound_is_refused() -> None:
    body = programs.Body("P", root=True)
    peers = body.sample("client", "peers")
    value = body.input("value", types.TENSOR_FLOAT)
    for number in range(2_000):
        body.send(value, peers, f"at_{number}")
    model = programs.model_of(body)
    error = timed(size_of(model), lambda: COMPILER.compile(model))
    assert isinstance(error, UnboundSlot)
