"""ONNX models with damage, by every way in: a typed error, or a model that works.

Rule: what is changed comes from a seed. Nothing is run, as a changed model may ask for any work.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import onnx
import pytest
from google.protobuf.message import DecodeError, EncodeError
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper
from onnx.helper import make_node as node
from onnx.helper import make_tensor_value_info as info

from bbnode.compiler import Compiler
from bbnode.components import OrtBackend
from bbnode.components.autodiff import InvalidForwardModel, training_graphs
from bbnode.components.models.mlp import mlp_forward
from bbnode.components.models.onnx_model import OnnxModelConfig
from bbnode.dsl import Graph, Module, types
from bbnode.dsl.onnx.module import OnnxModule
from bbnode.ir.errors import BbnodeError
from bbnode.ir.intake import check_whole
from tests.components.fakes import onnx_model
from tests.components.test_autodiff_cnn import cnn

F, I64 = TensorProto.FLOAT, np.int64
GRAPHS = ("forward", "loss", "gradients", "pullback", "joint_gradients", "step", "train_step")
ODD_INTS = (0, 1, -1, 2, 3, 7, 64, 99, 1 << 31, -(1 << 31), 1 << 62, -(1 << 63))
ODD_TEXTS = ("", "nowhere", "Relu", "If", "Loop", "Conv", "Reshape", "GRU", "Cast", "é", "a,b")


def built(nodes: list[NodeProto], dims: list[Any], opset: int = 23, **held: Any) -> ModelProto:
    tensors = [
        numpy_helper.from_array(np.asarray(value, np.asarray(value).dtype), name)
        for name, value in held.items()
    ]
    graph = helper.make_graph(
        nodes, "g", [info("x", F, dims)], [info("y", F, ["b", None])], tensors
    )
    return helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", opset)])


def weights(*shape: int) -> np.ndarray:
    return np.linspace(-0.4, 0.5, int(np.prod(shape)), dtype=np.float32).reshape(shape)


def recurrent() -> ModelProto:
    nodes = [
        node("GRU", ["x", "w", "r"], ["", "h"], hidden_size=4),
        node("Squeeze", ["h", "zero"], ["s"]),
        node("Gemm", ["s", "d", "e"], ["y"]),
    ]
    return built(nodes, [5, "b", 3], w=weights(1, 12, 3), r=weights(1, 12, 4), d=weights(4, 2),
                 e=weights(2), zero=np.array([0], I64))  # fmt: skip


def attention() -> ModelProto:
    nodes = [
        node("MatMul", ["x", "w"], ["q"]),
        node("Attention", ["q", "x", "x"], ["a"], q_num_heads=2, kv_num_heads=2),
        node("LayerNormalization", ["a", "s", "o"], ["n"], axis=-1),
        node("Gelu", ["n"], ["u"]),
        node("Gather", ["u", "at"], ["l"], axis=1),
        node("Gemm", ["l", "d"], ["y"], transB=1),
    ]
    return built(nodes, ["b", 3, 4], w=weights(4, 4), s=weights(4), o=weights(4),
                 at=np.array(2, I64), d=weights(2, 4))  # fmt: skip


def branching() -> ModelProto:
    body = helper.make_graph(
        [node("MatMul", ["c", "w"], ["m"]), node("Tanh", ["m"], ["t"]),
         node("Identity", ["on"], ["more"])],
        "body", [info("i", TensorProto.INT64, []), info("on", TensorProto.BOOL, []),
                 info("c", F, ["b", 3])],
        [info("more", TensorProto.BOOL, []), info("t", F, ["b", 3])],
    )  # fmt: skip
    branches = {
        f"{name}_branch": helper.make_graph([made], name, [], [info(made.output[0], F, ["b", 3])])
        for name, made in (
            ("then", node("Mul", ["l", "v"], ["p"])), ("else", node("Neg", ["l"], ["q"]))
        )
    }  # fmt: skip
    nodes = [
        node("Loop", ["count", "yes", "x"], ["l"], body=body),
        node("ReduceSum", ["l"], ["total"], keepdims=0),
        node("Greater", ["total", "z"], ["large"]),
        node("If", ["large"], ["y"], **branches),
    ]
    return built(nodes, ["b", 3], count=np.array(3, I64), yes=np.array(True), w=weights(3, 3),
                 v=weights(3), z=np.array(0, np.float32))  # fmt: skip


def images() -> ModelProto:
    nodes = [
        node("ConvTranspose", ["x", "k"], ["h"], strides=[2, 2]),
        node("BatchNormalization", ["h", "s", "o", "m", "v"], ["n"]),
        node("Clip", ["n", "lower", "upper"], ["c"]),
        node("MaxPool", ["c"], ["p"], kernel_shape=[2, 2], strides=[2, 2]),
        node("Resize", ["p", "", "scales"], ["r"]),
        node("GlobalAveragePool", ["r"], ["a"]),
        node("Flatten", ["a"], ["y"]),
    ]
    lower, upper, scales = (np.array(each, np.float32) for each in (0, 6, [1, 1, 2, 2]))
    return built(
        nodes, ["b", 2, 3, 3], k=weights(2, 4, 2, 2), s=weights(4), o=weights(4), m=weights(4),
        v=weights(4) + 1, lower=lower, upper=upper, scales=scales,
    )  # fmt: skip


MODELS: tuple[Callable[[], ModelProto], ...] = (
    lambda: mlp_forward((4, 3, 2)), lambda: cnn(channels=2), recurrent, attention, branching,
    images,
)  # fmt: skip


def trained(model: ModelProto) -> None:
    graphs = training_graphs(model, "mse")
    for name in GRAPHS:
        check_whole(getattr(graphs, name))


def held(model: ModelProto) -> None:
    onnx_model(OnnxModelConfig(model=model.SerializeToString(), loss="mse"))


def imported(model: ModelProto) -> None:
    part = OnnxModule(model)

    class Whole(Module):
        home = "a"

        def body(self, g: Graph) -> None:
            part.call().input("x", g.input("x", types.TENSOR_FLOAT)).build(g)

    made = Compiler().bind_backend("compute", OrtBackend).compile(Whole().build())
    onnx.checker.check_model(made)


WAYS_IN = (trained, held, imported)


@pytest.mark.parametrize("way_in", WAYS_IN)
@pytest.mark.parametrize("model", MODELS)
def test_whole_models_get_in(way_in: Callable[[ModelProto], None], model: Any) -> None:
    way_in(model())


def messages(message: Any) -> Iterator[Any]:
    yield message
    for field, value in message.ListFields():
        if field.type == field.TYPE_MESSAGE:
            for part in [value] if hasattr(value, "DESCRIPTOR") else value:
                yield from messages(part)


def change(model: ModelProto, rng: random.Random) -> None:
    """One field of one message: left out, repeated, reordered, or with another value."""
    message = rng.choice([each for each in messages(model) if each.ListFields()])
    field, value = rng.choice(message.ListFields())
    single = hasattr(value, "DESCRIPTOR") or isinstance(value, str | bytes | int | float)
    if single:
        other = odd(field, value, rng)
        if other is None or rng.random() < 0.2:
            message.ClearField(field.name)
        else:
            setattr(message, field.name, other)
        return
    at, how = rng.randrange(len(value)), rng.randrange(4)
    is_message = field.type == field.TYPE_MESSAGE
    if how == 0:
        del value[at]
    elif how == 1 and is_message:
        value.add().CopyFrom(value[at])
    elif how == 2 or is_message:
        items = (
            [type(each).FromString(each.SerializeToString()) for each in value]
            if is_message
            else [*value]
        )
        rng.shuffle(items)
        del value[:]
        value.extend(items)
    else:
        value[at] = odd(field, value[at], rng)


def odd(field: Any, value: Any, rng: random.Random) -> Any:
    """Return another value of a scalar field; None for a message."""
    if field.type == field.TYPE_ENUM:
        return rng.randrange(22)
    if field.cpp_type == field.CPPTYPE_INT32:
        return rng.choice((0, 1, 6, 7, 9, 10, 16, 39, -1))
    if isinstance(value, bytes):
        return rng.choice((b"", value + b"x", value[: rng.randrange(len(value) + 1)], b"\xff"))
    if isinstance(value, int):
        return abs(chosen) if (chosen := rng.choice(ODD_INTS)) and "UINT" in str(field) else chosen
    if isinstance(value, float):
        return rng.choice((0.0, -1.0, float("nan"), float("inf")))
    return rng.choice(ODD_TEXTS) if isinstance(value, str) else None


def damaged(seed: int) -> tuple[ModelProto, Callable[[ModelProto], None]] | None:
    rng = random.Random(seed)
    model = MODELS[seed % len(MODELS)]()
    try:
        if rng.random() < 0.2:
            data = bytearray(model.SerializeToString())
            for _ in range(rng.randint(1, 4)):
                data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            model = ModelProto.FromString(bytes(data))
        else:
            for _ in range(rng.choice((1, 1, 1, 2, 4))):
                change(model, rng)
        model.SerializeToString()
    except (DecodeError, EncodeError, ValueError, TypeError):
        return None  # no file can hold it
    return model, rng.choice(WAYS_IN)


def check_seeds(seeds: range) -> None:
    refused = 0
    for seed in seeds:
        case = damaged(seed)
        if case is None:
            continue
        model, way_in = case
        try:
            way_in(model)
        except BbnodeError:
            refused += 1
        except Exception as error:
            raise AssertionError(f"seed {seed}, {way_in.__name__}: {error!r:.300}") from error
    assert refused > len(seeds) // 4


def test_damage_gives_a_typed_error_or_a_model_that_works() -> None:
    check_seeds(range(120))


@pytest.mark.slow
@pytest.mark.parametrize("part", range(10))
def test_damage_long(part: int) -> None:
    check_seeds(range(1000 + 500 * part, 1500 + 500 * part))


def short_weights(graph: GraphProto) -> None:
    graph.initializer[0].raw_data = graph.initializer[0].raw_data[:-1]


def other_shape(graph: GraphProto) -> None:
    graph.initializer[0].dims[:] = [3, 4, 5]


def no_dtype(graph: GraphProto) -> None:
    graph.initializer[0].data_type = 39


def no_elements(graph: GraphProto) -> None:
    graph.input[0].type.tensor_type.elem_type = -1


def out_of_order(graph: GraphProto) -> None:
    nodes = [*graph.node]
    del graph.node[:]
    graph.node.extend(reversed(nodes))


@pytest.mark.parametrize("way_in", WAYS_IN)
@pytest.mark.parametrize("harm", [short_weights, other_shape, no_dtype, no_elements, out_of_order])
def test_each_way_in_says_what_is_wrong(
    harm: Callable[[GraphProto], None], way_in: Callable[[ModelProto], None]
) -> None:
    model = mlp_forward((4, 3, 2))
    harm(model.graph)
    with pytest.raises(BbnodeError, match=r"can't be read|none of ONNX's|ONNX refuses"):
        way_in(model)


def test_shapes_that_contradict_each_other() -> None:
    model = cnn(channels=2)
    model.graph.output[0].name = "norm.mean"  # which has one axis, and the output two
    with pytest.raises(InvalidForwardModel, match="export it again"):
        training_graphs(model, "softmax_cross_entropy")
