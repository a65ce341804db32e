"""Texts, sequences and optionals between ops, on both backends, and over the wire."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import ModelProto, TensorProto, helper

from bbnode.compiler import Compiler
from bbnode.components import ConnectedView, OrtBackend, ReferenceBackend
from bbnode.dsl import BackendSlot, Graph, Module, OnnxModule, PeerSelectorSlot, syscalls, types
from bbnode.engine import Node, errors, install
from bbnode.engine.steps import AppEvent, OpFailed
from bbnode.ir import keys
from bbnode.ir.graph import ValueType
from bbnode.ir.onnx_file import program_of
from bbnode.ir.parts import extract_part, part_names
from bbnode.ir.peer import PeerId
from bbnode.ir.values import (
    TRIGGER,
    Composite,
    OptionalValue,
    ResponseBatch,
    TensorSequence,
    Value,
)
from bbnode.sim import Network
from tests.engine.builder import Partition, model
from tests.engine.support import bring_up

STRINGS = types.SEQUENCE_OF[types.TENSOR_STRING]
FLOATS = types.SEQUENCE_OF[types.TENSOR_FLOAT]
MAYBE = types.OPTIONAL_OF[types.TENSOR_FLOAT]
WORDS = np.array(["one", "zwei", "trés"], object)
BACKENDS = pytest.mark.parametrize("backend", [OrtBackend, ReferenceBackend])


def compiled(module: Module, backend: Any = OrtBackend) -> ModelProto:
    compiler = Compiler().bind_backend("compute", backend)
    if isinstance(module, Crossing):
        compiler = compiler.bind_peer_selector("to", ConnectedView)
    return compiler.compile(module.build())


def node_of(artifact: ModelProto) -> Node:
    return install(artifact, ["@self"], peer_id=PeerId.from_seed(1))


def outputs(node: Node, **inputs: Value) -> dict[str, Value]:
    node.invoke("@self", inputs)
    made = node.poll(0)
    assert not [step for step in made if isinstance(step, OpFailed)]
    return {step.topic: step.value for step in made if isinstance(step, AppEvent)}


class Words(Module):
    """Ops on texts, sequences and optionals, in graphs and between them."""

    def body(self, g: Graph) -> None:
        compute = BackendSlot("compute")
        words = g.input("words", types.TENSOR_STRING)
        numbers = g.input("numbers", types.TENSOR_FLOAT)
        listed = compute.sequence_construct(g, numbers, compute.neg(g, numbers))
        g.output("loud", compute.string_concat(g, words, g.constant(["!"])))
        g.output("listed", listed)
        g.output("second", compute.sequence_at(g, listed, compute.constant(g, np.int64(1))))
        g.output("maybe", compute.optional(g, numbers))


class Takes(Module):
    """Graphs whose inputs are a sequence and an optional."""

    def body(self, g: Graph) -> None:
        compute = BackendSlot("compute")
        listed = g.input("listed", FLOATS)
        g.output("length", compute.sequence_length(g, listed))
        g.output("there", compute.optional_has_element(g, g.input("maybe", MAYBE)))


class Crossing(Module):
    """Sends a value of any type to a client, which hands it out."""

    def __init__(self, kind: types.TypeNode) -> None:
        self._kind = kind

    def body(self, g: Graph) -> None:
        value = g.input("value", self._kind)
        peers = PeerSelectorSlot("to", peer_class="client").current_view(g, after=value)
        g.output("arrived", g.net_out("way", peers, value))


@BACKENDS
def test_ops_make_and_read_them(backend: Any) -> None:
    artifact = compiled(Words(), backend)
    onnx.checker.check_model(artifact)
    kinds = program_of(artifact).functions[0].kinds()
    assert (kinds["loud"], kinds["listed"], kinds["maybe"]) == (types.TENSOR_STRING, FLOATS, MAYBE)
    numbers = np.array([1, 2], np.float32)
    made = outputs(node_of(artifact), words=WORDS, numbers=numbers)
    assert made["loud"].tolist() == ["one!", "zwei!", "trés!"]
    assert made["listed"] == TensorSequence([numbers, -numbers])
    assert made["second"].tolist() == [-1, -2]
    assert made["maybe"] == OptionalValue(numbers)


@BACKENDS
@pytest.mark.parametrize("held", [None, np.zeros(2, np.float32)])
def test_graphs_take_them(backend: Any, held: Any) -> None:
    node = node_of(compiled(Takes(), backend))
    tensors = [np.zeros(n, np.float32) for n in range(3)]
    made = outputs(
        node,
        listed=TensorSequence(tensors, types.TENSOR_FLOAT),
        maybe=OptionalValue(held, types.TENSOR_FLOAT),
    )
    assert made["length"] == 3
    assert bool(made["there"]) is (held is not None)


@pytest.mark.parametrize(
    "value",
    [
        WORDS,
        WORDS.reshape(3, 1),
        np.array("alone", object),
        TensorSequence([WORDS, WORDS[:1]]),
        TensorSequence([], types.TENSOR_STRING),
        TensorSequence([np.zeros((2, 2), np.float32)]),
        OptionalValue(np.ones(3, np.float32)),
        OptionalValue(None, types.TENSOR_FLOAT),
        OptionalValue(TensorSequence([WORDS])),
    ],
    ids=str,
)
def test_they_travel(value: Value) -> None:
    kind = types.TENSOR_STRING if isinstance(value, np.ndarray) else value.type
    artifact = compiled(Crossing(kind))
    network = Network(seed=1)
    sender = network.add("sender", artifact, ["@self"])
    client = network.add("client", artifact, ["client"])
    network.run_until_idle()
    sender.invoke("@self", {"value": value})
    network.run_until_idle()
    (event,) = client.seen(AppEvent)
    if isinstance(value, np.ndarray):
        assert event.value.tolist() == value.tolist()
        assert not event.value.flags.writeable
    else:
        assert event.value == value


def test_a_value_of_another_type_is_refused_at_the_door() -> None:
    node = node_of(compiled(Takes()))
    wrong = TensorSequence([], types.TENSOR_STRING)
    with pytest.raises(errors.InputTypeMismatch):
        node.invoke("@self", {"listed": wrong, "maybe": OptionalValue(None, types.TENSOR_FLOAT)})
    with pytest.raises(errors.EntryError):
        node.invoke("@self", {"listed": np.array(["a", 1], object), "maybe": wrong})


def test_they_stay_in_a_snapshot() -> None:
    class Held(Module):
        def body(self, g: Graph) -> None:
            value, tick = g.input("value", STRINGS), g.input("tick", types.TRIGGER)
            later = syscalls.sleep(g, tick, duration_ns=1_000_000_000)
            g.output("out", syscalls.gate(g, value, later))

    artifact = compiled(Held())
    node = node_of(artifact)
    value = TensorSequence([WORDS])
    node.invoke("@self", {"value": value, "tick": TRIGGER})
    node.poll(0)
    again = node_of(artifact)
    again.restore(node.snapshot(0), 0)
    made = [step for at in (0, 2_000_000_000) for step in again.poll(at)]
    assert [step.value for step in made if isinstance(step, AppEvent)] == [value]


def test_an_onnx_model_may_have_them_as_ports() -> None:
    graph = helper.make_graph(
        [
            helper.make_node(
                "StringNormalizer", ["words"], ["upper"], case_change_action="UPPER", locale="C"
            ),
            helper.make_node("SequenceConstruct", ["upper", "words"], ["both"]),
        ],
        "texts",
        [helper.make_tensor_value_info("words", TensorProto.STRING, [None])],
        [helper.make_tensor_sequence_value_info("both", TensorProto.STRING, None)],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    artifact = compiled(OnnxModule(model))
    made = outputs(node_of(artifact), words=np.array(["a", "b"], object))
    assert [part.tolist() for part in made["both"]] == [["A", "B"], ["a", "b"]]
    (name,) = part_names(program_of(artifact))
    part = extract_part(artifact, name)
    assert ValueType.of(STRINGS).kind is STRINGS
    assert part.graph.output[0].type.WhichOneof("value") == "sequence_type"


def opens_answers(kind: types.TypeNode | None) -> Node:
    p = Partition("server", inputs=["answers"])
    p.op(keys.RESPONSES_DOMAIN, "Values", ["answers"], ["listed"])
    if kind is not None:
        p.type("listed", kind)
    p.output("out", "listed")
    return bring_up(model(p), "server")


def test_answers_are_looked_at_before_they_are_a_sequence() -> None:
    node = opens_answers(FLOATS)
    one, two = sorted(PeerId.from_seed(seed) for seed in (1, 2))
    fine = np.ones(2, np.float32)
    for odd in (np.ones(2), WORDS, TRIGGER, Composite((fine,)), TensorSequence([fine])):
        batch = ResponseBatch(responses=((one, fine), (two, odd)), missing=())
        node.invoke("server", {"answers": batch})
        (failed,) = [step for step in node.poll(0) if isinstance(step, OpFailed)]
        assert failed.kind == "AnswersDiffer"
        assert str(two) in failed.detail
        assert str(one) not in failed.detail
    node.invoke("server", {"answers": ResponseBatch(responses=((one, fine),), missing=(two,))})
    made = [step.value for step in node.poll(0) if isinstance(step, AppEvent)]
    assert made == [TensorSequence([fine])]
    node.invoke("server", {"answers": np.ones(1)})
    assert [step.kind for step in node.poll(0) if isinstance(step, OpFailed)] == ["InvalidOperand"]


@pytest.mark.parametrize("kind", [None, types.TENSOR_FLOAT, types.PEER_ID_VEC, MAYBE], ids=str)
def test_answers_as_anything_but_a_sequence_of_tensors_are_refused_at_install(kind: Any) -> None:
    with pytest.raises(errors.InvalidArtifact, match="no sequence of tensors"):
        opens_answers(kind)
