"""Slots and syscalls against the op table: op by op, argument by argument."""

from __future__ import annotations

import inspect

import pytest

from bbnode.dsl import (
    AggregatorSlot,
    CodecSlot,
    ConcreteSpec,
    DataSourceSlot,
    Graph,
    IndexSlot,
    ModelSlot,
    NoSuchOp,
    PeerSelectorSlot,
    ProtocolSlot,
    Slot,
    SlotConflict,
    syscalls,
    types,
)
from bbnode.dsl.core.graph import Output
from bbnode.ir import keys, opset
from bbnode.ir.opset import OpSpec
from tests import protos
from tests.dsl.programs import build, meta, root

ROLE_SLOTS: dict[str, type[Slot]] = {
    cls.ROLE: cls
    for cls in (ModelSlot, AggregatorSlot, DataSourceSlot, CodecSlot, IndexSlot, PeerSelectorSlot)
}
ROLE_OPS = [spec for role in ROLE_SLOTS for spec in opset.ops_of_role(role)]

# What the compiler puts in, and an author never records.
COMPILER_MADE = {*keys.GATE_OPS, keys.OP_DEADLINE_CHECK}
# Ops whose helper can't have the name of the op, because Python has it.
RENAMED = {"Any": "any_of"}
SYSCALLS = [s for s in opset.ops_of(keys.SYSCALL_DOMAIN) if s.op_type not in COMPILER_MADE]
BOOK_OPS = opset.ops_of(keys.ADDRESS_BOOK_DOMAIN)

# Values of attributes that have no default.
SAMPLES = {
    "n": 2, "period_ns": 10, "kind": 3, "delay_ns": 5, "duration_ns": 6, "name": "a", "queue": "q",
    "slot": "s", "phase": syscalls.SHUTDOWN, "fanout": 3, "value": 1.5, "to": "x",
    "key": "num_samples",
}  # fmt: skip


def spec_id(spec: OpSpec) -> str:
    return f"{spec.domain.rpartition('.')[2]}.{spec.op_type}"


def inputs_for(g: Graph, spec: OpSpec) -> list[Output]:
    """One fresh graph input per port; two for a variadic one."""
    made = []
    for port in spec.inputs:
        kind = port.type if isinstance(port.type, types.TypeNode) else types.TENSOR_FLOAT
        made += [g.input(f"in_{port.name}_{i}", kind) for i in range(2 if port.variadic else 1)]
    return made


def attributes_for(spec: OpSpec) -> dict[str, object]:
    given = {name: SAMPLES[name] for name, d in spec.attributes.items() if d is opset.REQUIRED}
    if spec.op_type == "Collect":  # something has to say when a batch is complete
        given["n"] = SAMPLES["n"]
    return given


def check_node(spec: OpSpec, function, node, given) -> None:
    """The node is what the row says."""
    assert (node.domain, node.op_type) == (spec.domain, spec.op_type)
    n_inputs = sum(2 if port.variadic else 1 for port in spec.inputs)
    assert len(node.input) == n_inputs
    assert {a.name for a in node.attribute} == set(spec.attributes)
    for name, default in spec.attributes.items():
        recorded = protos.get_attr(node, name)
        expected = given.get(name, default)
        if name != "value":
            assert recorded == (expected.encode() if isinstance(expected, str) else expected)
    known = protos.value_types(function)
    ports = [port for port in spec.outputs if not port.variadic]
    assert [o.rpartition(".")[2] for o in node.output[: len(ports)]] == [p.name for p in ports]
    for port, name in zip(ports, node.output, strict=False):
        if isinstance(port.type, types.TypeNode) and spec.op_type != "Constant":
            assert known[name] is port.type
        elif spec.op_type != "Constant":
            fixed = {p.type for p in spec.inputs}
            assert known[name] is (types.TENSOR_FLOAT if port.type in fixed else types.ANY)


def check_signature(spec: OpSpec, method, *, skip: int) -> None:
    """Ports are positional, attributes and `after` keywords, defaults those of the table."""
    parameters = list(inspect.signature(method).parameters.values())[skip:]
    positional = [p for p in parameters if p.kind is not p.KEYWORD_ONLY]
    keyword = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
    assert len(positional) == len(spec.inputs)
    for parameter, port in zip(positional, spec.inputs, strict=True):
        assert (parameter.kind is parameter.VAR_POSITIONAL) == port.variadic
        assert (parameter.default is None) == port.optional
    assert keyword.pop("after") is None
    if spec.suspends:  # its own time, which the op table has as an attribute where it has it
        assert keyword.pop("deadline", 0.0) == 0.0
        assert "deadline_ns" in spec.attributes or keyword.pop("deadline_ns", 0) == 0
    assert keyword == {
        name: inspect.Parameter.empty if default is opset.REQUIRED else default
        for name, default in spec.attributes.items()
    }
    assert method.__doc__


@pytest.mark.parametrize("spec", ROLE_OPS, ids=spec_id)
def test_every_role_op_is_a_typed_method_that_records_its_row(spec: OpSpec) -> None:
    slot_class = ROLE_SLOTS[spec.role]
    assert spec.method in vars(slot_class), "a row without its typed method"
    check_signature(spec, vars(slot_class)[spec.method], skip=2)
    given = attributes_for(spec)

    def body(g: Graph) -> None:
        made = getattr(slot_class("part"), spec.method)(g, *inputs_for(g, spec), **given)
        assert len(made if isinstance(made, tuple) else [made]) == len(spec.outputs)

    function = root(body)
    (node,) = function.node
    check_node(spec, function, node, given)
    assert meta(node, "slot") == "part"
    assert meta(node, "required_trait") == f"{spec.role}Runtime"
    assert meta(function, "slot_role.part") == f"{spec.role}|0"


@pytest.mark.parametrize("spec", SYSCALLS, ids=spec_id)
def test_every_syscall_is_a_helper_that_records_its_row(spec: OpSpec) -> None:
    helper = getattr(syscalls, RENAMED.get(spec.op_type, spec.method))
    given = attributes_for(spec)
    if spec.op_type == "Constant":  # its attribute is its argument
        function = root(lambda g: helper(g, given["value"]))
    else:
        check_signature(spec, helper, skip=1)
        function = root(lambda g: helper(g, *inputs_for(g, spec), **given))
    (node,) = function.node
    check_node(spec, function, node, given)
    if spec.op_type == "Tee":
        assert len(node.output) == given["fanout"]
    assert meta(node, "slot") is None


@pytest.mark.parametrize("spec", BOOK_OPS, ids=spec_id)
def test_every_address_book_op_is_a_helper(spec: OpSpec) -> None:
    helper = getattr(syscalls, f"address_book_{spec.method}")
    check_signature(spec, helper, skip=1)
    function = root(lambda g: helper(g, *inputs_for(g, spec)))
    check_node(spec, function, function.node[0], {})


def test_every_helper_has_an_op() -> None:
    ops = {RENAMED.get(s.op_type, s.method) for s in SYSCALLS}
    ops |= {f"address_book_{s.method}" for s in BOOK_OPS} | {"type_cast"}
    public = {
        name
        for name, f in inspect.getmembers(syscalls, inspect.isfunction)
        if not name.startswith("_") and f.__module__ == syscalls.__name__
    }
    assert public == ops


def test_the_older_names_of_a_codec_record_the_same_ops() -> None:
    def body(g: Graph) -> None:
        codec, x = CodecSlot("codec"), g.input("x", types.TENSOR_FLOAT)
        codec.train_codebook(g, x)
        codec.decompress(g, codec.compress(g, x))

    assert [n.op_type for n in root(body).node] == ["Train", "Encode", "Decode"]


def test_several_slots_of_one_role_are_told_apart_by_name() -> None:
    def body(g: Graph) -> None:
        x = g.input("x", types.TENSOR_FLOAT)
        for name, spec in (("teacher", NET), ("student", OTHER), ("bound", None)):
            ModelSlot(name, concrete=spec).forward(g, x)
        ModelSlot("teacher", concrete=NET).params(g)

    function = root(body)
    assert list(function.attribute) == ["bound"]
    assert {slot.name: slot.s for slot in function.attribute_proto} == {
        "teacher": b"1",
        "student": b"2",
    }
    assert meta(function, "concrete_type.student") == "my.Net"
    slots = [(meta(n, "slot"), meta(n, "slot_id"), meta(n, "instance")) for n in function.node]
    assert slots == [
        ("teacher", "0", "0"),
        ("student", "1", "1"),
        ("bound", "2", None),
        ("teacher", "0", "0"),
    ]


def test_type_cast_takes_a_type_or_its_id() -> None:
    def body(g: Graph) -> None:
        x = g.input("x")
        syscalls.type_cast(g, x, to=types.TENSOR_FLOAT)
        syscalls.type_cast(g, x, to="ai.bytesandbrains.Tensor.FLOAT")

    first, second = root(body).node
    assert protos.get_attr(first, "to") == protos.get_attr(second, "to")


def test_a_required_optional_input_may_be_left_out() -> None:
    (node,) = root(lambda g: ModelSlot("m").step(g)).node
    assert list(node.input) == []


def test_ops_that_third_parties_register_are_methods() -> None:
    domain = keys.PROTOCOL_DOMAIN_PREFIX + "dsl-test"
    if opset.lookup_op(domain, "SayHello") is None:
        opset.op(domain, "SayHello", "peer:peer", "token:token", role="Protocol", loud=0)

    def body(g: Graph) -> None:
        slot = ProtocolSlot("gossip", "dsl-test")
        assert "say_hello" in dir(slot)
        token = slot.say_hello(g, g.input("peer", types.PEER_ID), loud=1)
        assert token.type is types.CORRELATION_TOKEN

    (node,) = root(body).node
    assert (node.domain, node.op_type) == (domain, "SayHello")
    assert protos.get_attr(node, "loud") == 1
    assert meta(node, "required_trait") == "ProtocolRuntime"


def test_an_unknown_method_is_typed_and_keeps_hasattr() -> None:
    slot = ModelSlot("m")
    assert not hasattr(slot, "forwrad")
    assert not hasattr(slot, "__deepcopy__")
    with pytest.raises(NoSuchOp, match="did you mean 'forward'"):
        slot.forwrad  # noqa: B018


NET = ConcreteSpec(role="Model", type_name="my.Net", config=b"1")
OTHER = ConcreteSpec(role="Model", type_name="my.Net", config=b"2")


@pytest.mark.parametrize(
    ("first", "second", "text"),
    [
        (lambda g: ModelSlot("s").params(g), lambda g: DataSourceSlot("s").reset(g),
         "is a Model slot already; give the DataSource its own name"),
        (lambda g: ModelSlot("s", concrete=NET).params(g),
         lambda g: ModelSlot("s", concrete=OTHER).params(g), "another config"),
        (lambda g: PeerSelectorSlot("s", peer_class="a").current_view(g),
         lambda g: PeerSelectorSlot("s", peer_class="b").current_view(g), "class 'a' already"),
    ],
)  # fmt: skip
def test_one_name_is_one_slot(first, second, text) -> None:
    with pytest.raises(SlotConflict, match=text):
        build(lambda g: (first(g), second(g)))


def test_generic_and_concrete_of_one_name_is_for_the_compiler_to_refuse() -> None:
    def body(g: Graph) -> None:
        ModelSlot("s", concrete=NET).params(g)
        ModelSlot("s").params(g)

    first, second = root(body).node
    assert meta(first, "concrete_type") == "my.Net"
    assert meta(second, "required_trait") == "ModelRuntime"
    assert meta(first, "slot_id") == meta(second, "slot_id")
