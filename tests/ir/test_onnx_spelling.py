"""Models that ONNX Runtime takes and ONNX does not know, and ops that came after our opset."""

from __future__ import annotations

import logging

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper
from onnx.helper import make_node as node

from bbnode.compiler import Compiler
from bbnode.components import OrtBackend
from bbnode.components.autodiff import UnsupportedGradient
from bbnode.dsl import BackendSlot, Module, OnnxModule
from bbnode.dsl.errors import BrokenModel
from bbnode.ir import types
from bbnode.ir.intake import brought_up
from bbnode.sim import Network
from tests.components.slopes import assert_slope, forward_of, model_with

RNG = np.random.default_rng(0)


def normal(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape).astype(np.float32)


def outputs_of(module: Module, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return what a program gives on one node."""
    recorded, compiler = module.build(), Compiler()
    for slot in {name for function in recorded.functions for name in function.attribute}:
        compiler = compiler.bind_backend(slot, OrtBackend)
    network = Network(0)
    alone = network.add("n", compiler.compile(recorded), ["@self"])
    execution = alone.invoke("@self", feeds)
    network.run_until_idle()
    assert not alone.failures()
    return alone.outputs(execution)


def in_runtime(model: ModelProto, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    return session.run(None, feeds)


@pytest.mark.parametrize("opset", [11, 16, 21, 26])
@pytest.mark.parametrize("op", ["SimplifiedLayerNormalization", "LayerNormalization"])
def test_normalizations_of_the_runtime_are_onnx_ops(op: str, opset: int) -> None:
    model = forward_of(
        [node("MatMul", ["x", "w"], ["h"]), node(op, ["h", "s"], ["y"], axis=-1, epsilon=1e-6)],
        [("x", ["b", 4])], [("y", ["b", 6])], {"w": normal(4, 6), "s": 1 + normal(6)}, opset=opset,
    )  # fmt: skip
    x = normal(3, 4)
    made = outputs_of(OnnxModule(model), {"x": x})["y"]
    np.testing.assert_allclose(made, in_runtime(model, {"x": x})[0], rtol=1e-5, atol=1e-6)
    assert_slope(model_with(model), x, np.zeros((3, 6), np.float32))
    ops = {each.op_type: each.domain for each in brought_up(model).graph.node}
    assert ops == {"MatMul": "", op.replace("SimplifiedLayer", "RMS"): ""}


def test_a_normalization_that_hands_out_its_factor_is_refused_by_name() -> None:
    model = forward_of(
        [node("SimplifiedLayerNormalization", ["x", "s"], ["y", "f"], "rms")],
        [("x", ["b", 4])], [("y", ["b", 4]), ("f", ["b", 1])], {"s": normal(4)},
    )  # fmt: skip
    with pytest.raises(BrokenModel, match="SimplifiedLayerNormalization 'rms' hands out its fact"):
        OnnxModule(model)
    unknown = forward_of(
        [node("SkipSimplifiedLayerNormalization", ["x", "x", "s"], ["y"])],
        [("x", ["b", 4])], [("y", ["b", 4])], {"s": normal(4)},
    )  # fmt: skip
    with pytest.raises(BrokenModel, match="SkipSimplifiedLayerNormalization"):
        OnnxModule(unknown)


def classifier(labels: dict[str, list]) -> ModelProto:
    """What skl2onnx writes of a classifier unless it is asked not to."""
    kind = TensorProto.INT64 if "classlabels_int64s" in labels else TensorProto.STRING
    own = {name.replace("int64s", "ints"): value for name, value in labels.items()}
    nodes = [
        node("LinearClassifier", ["x"], ["label", "scores"], domain="ai.onnx.ml",
             coefficients=[1.0, 2.0, -1.0, -2.0], intercepts=[0.0, 0.0], multi_class=0,
             post_transform="SOFTMAX", **own),
        node("Normalizer", ["scores"], ["probabilities"], domain="ai.onnx.ml", norm="L1"),
        node("ZipMap", ["probabilities"], ["output_probability"], domain="ai.onnx.ml", **labels),
    ]  # fmt: skip
    maps = onnx.TypeProto()
    maps.sequence_type.elem_type.map_type.key_type = kind
    values = maps.sequence_type.elem_type.map_type.value_type.tensor_type
    values.elem_type = TensorProto.FLOAT
    graph = helper.make_graph(
        nodes, "g", [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 2])],
        [helper.make_tensor_value_info("label", kind, ["n"]),
         helper.make_value_info("output_probability", maps)],
    )  # fmt: skip
    opsets = [helper.make_opsetid("", 15), helper.make_opsetid("ai.onnx.ml", 1)]
    return helper.make_model(graph, ir_version=8, opset_imports=opsets)


@pytest.mark.parametrize(
    "labels", [{"classlabels_int64s": [3, 5]}, {"classlabels_strings": ["cat", "dog"]}]
)
def test_maps_of_probabilities_are_the_tensor_in_them(labels, caplog) -> None:
    model, x = classifier(labels), normal(3, 2)
    with caplog.at_level(logging.WARNING, logger="bbnode"):
        made = outputs_of(OnnxModule(model), {"x": x})
    (first, second), *_ = [*labels.values()]
    (record,) = caplog.records
    assert record.getMessage() == (
        "output 'output_probability' is a map in the file, and a tensor [rows, 2] here; its "
        f"columns are {first}, {second}"
    )
    wanted = [[row[first], row[second]] for row in in_runtime(model, {"x": x})[1]]
    np.testing.assert_allclose(made["output_probability"], wanted, rtol=1e-5)


@pytest.mark.parametrize("mode", ["constant", "reflect"])
def test_int32_axes_of_a_pad_hide_no_type(mode: str) -> None:
    model = forward_of(
        [node("MatMul", ["x", "w"], ["h"]), node("Pad", ["h", "p", "", "a"], ["y"], mode=mode)],
        [("x", ["b", 4])], [("y", ["b", 9])],
        {"w": normal(4, 6), "p": np.asarray([1, 2]), "a": np.asarray([1], np.int32)},
    )  # fmt: skip
    x = normal(2, 4)
    wanted = np.pad(x @ numpy_helper.to_array(model.graph.initializer[0]), [(0, 0), (1, 2)], mode)
    made = outputs_of(OnnxModule(model), {"x": x})["y"]
    np.testing.assert_allclose(made, wanted, rtol=1e-5, atol=1e-6)
    assert_slope(model_with(model), x, np.zeros((2, 9), np.float32))


# --- ops of opset 26 and later ------------------------------------------------------------------

BATCH, STEPS, HEADS, WIDTH = 2, 3, 2, 4
SEQUENCE = [BATCH, STEPS, HEADS * WIDTH]
STATE = [BATCH, HEADS, WIDTH, WIDTH]


def linear_attention(rule: str, *more: str) -> ModelProto:
    ports = [(name, SEQUENCE) for name in "qkv"]
    ports += [("decay", [BATCH, STEPS, HEADS])] if "decay" in more else []
    ports += [("beta", [BATCH, STEPS, HEADS])] if "beta" in more else []
    further = [name if name in more else "" for name in ("past", "decay", "beta")]
    while further and not further[-1]:
        further.pop()
    heads = {"q_num_heads": HEADS, "kv_num_heads": HEADS}
    made = node("LinearAttention", [*"qkv", *further], ["y", "s"], update_rule=rule, **heads)
    return forward_of([made], ports, [("y", SEQUENCE), ("s", STATE)], {}, opset=27)


NEW = {
    "CumProd": forward_of(
        [node("CumProd", ["x", "a"], ["y"])], [("x", [2, 3])], [("y", [2, 3])],
        {"a": np.asarray(1)}, opset=26,
    ),
    "BitCast": forward_of(
        [node("BitCast", ["x"], ["y"], to=TensorProto.INT32)], [("x", [2, 3])],
        [("y", [2, 3], TensorProto.INT32)], {}, opset=26,
    ),
    "CausalConvWithState": forward_of(
        [node("CausalConvWithState", ["x", "w", "b"], ["y", "s"], activation="silu")],
        [("x", [2, 4, 5])], [("y", [2, 4, 5]), ("s", [2, 4, 2])],
        {"w": normal(4, 1, 3), "b": normal(4)}, opset=27,
    ),
    "LinearAttention": linear_attention("linear"),
    "LinearAttention, gated": linear_attention("gated", "decay"),
    "LinearAttention, delta": linear_attention("delta", "beta"),
}  # fmt: skip


def feeds_of(model: ModelProto) -> dict[str, np.ndarray]:
    return {
        port.name: normal(*(dim.dim_value for dim in port.type.tensor_type.shape.dim))
        for port in model.graph.input
    }


@pytest.mark.parametrize("name", NEW)
def test_ops_of_later_opsets_run_as_in_the_runtime(name: str) -> None:
    model = NEW[name]
    feeds = feeds_of(model)
    made = outputs_of(OnnxModule(model), feeds)
    for port, wanted in zip(model.graph.output, in_runtime(model, feeds), strict=True):
        np.testing.assert_allclose(made[port.name], wanted, rtol=1e-4, atol=1e-5)


def test_a_model_is_recorded_at_the_first_opset_that_has_its_ops() -> None:
    def version(model: ModelProto) -> int:
        return next(e.version for e in brought_up(model).opset_import if not e.domain)

    assert version(NEW["CumProd"]) == 26
    assert version(NEW["LinearAttention"]) == 25  # what it stands for
    plain = forward_of([node("Celu", ["x"], ["y"])], [("x", [2])], [("y", [2])], {}, opset=28)
    assert version(plain) == 25


def test_a_swish_gate_of_opset_28_is_what_it_stands_for() -> None:
    model = forward_of(
        [node("MatMul", ["x", "w"], ["h"]), node("MatMul", ["x", "v"], ["g"]),
         node("SwiGLU", ["h", "g"], ["y"])],
        [("x", ["b", 4])], [("y", ["b", 3])], {"w": normal(4, 3), "v": normal(4, 3)}, opset=28,
    )  # fmt: skip
    x = normal(2, 4)
    held = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    a, b = x @ held["w"], x @ held["v"]
    made = outputs_of(OnnxModule(model), {"x": x})["y"]
    np.testing.assert_allclose(made, a / (1 + np.exp(-a)) * b, rtol=1e-4, atol=1e-6)
    assert_slope(model_with(model), x, np.zeros((2, 3), np.float32))


class Chain(Module):
    """Models of several opsets in one program, with recorded ops around."""

    name, home = "Chain", "@self"

    def __init__(self, *models: ModelProto) -> None:
        self.models = models

    def body(self, g) -> None:
        compute = BackendSlot("compute")
        x = g.input("x", types.TENSOR_FLOAT)
        y = compute.add(g, x, x)
        for at, model in enumerate(self.models):
            y = OnnxModule(model, name=f"m{at}").call().input("x", y).build(g).output("y")
        g.output("y", compute.mul(g, y, y))


def test_models_of_several_opsets_are_one_program() -> None:
    old = forward_of([node("Relu", ["x"], ["y"])], [("x", [2, 3])], [("y", [2, 3])], {}, opset=17)
    x = normal(2, 3)
    made = outputs_of(Chain(old, NEW["CumProd"], old), {"x": x})["y"]
    wanted = np.cumprod(np.maximum(2 * x, 0), axis=1) ** 2
    np.testing.assert_allclose(made, wanted, rtol=1e-5, atol=1e-6)


def test_an_op_without_a_gradient_is_refused_by_its_name_and_runs_beside_one() -> None:
    nodes = [node("MatMul", ["x", "w"], ["h"]), node("CumProd", ["h", "a"], ["y"])]
    tensors = {"w": normal(4, 3), "a": np.asarray(1)}
    model = forward_of(nodes, [("x", ["b", 4])], [("y", ["b", 3])], tensors, opset=26)
    with pytest.raises(UnsupportedGradient, match=r"no gradient rule for ai.onnx.CumProd"):
        model_with(model).check_trains()
    beside = [node("MatMul", ["x", "w"], ["y"]), node("CumProd", ["x", "a"], ["z"])]
    both = forward_of(
        beside, [("x", ["b", 4])], [("y", ["b", 3]), ("z", ["b", 4])], tensors, opset=26
    )
    assert_slope(model_with(both), normal(2, 4), np.zeros((2, 3), np.float32))


@pytest.mark.parametrize("opset", [17, 21, 25])
def test_sparse_initializers_run(opset: int) -> None:
    values = numpy_helper.from_array(np.asarray([2.0], np.float32), "W")
    sparse = helper.make_sparse_tensor(values, numpy_helper.from_array(np.asarray([1]), "i"), [3])
    model = forward_of([node("Mul", ["x", "W"], ["y"])], [("x", [3])], [("y", [3])], {},
                       opset=opset, sparse_initializer=[sparse])  # fmt: skip
    made = outputs_of(OnnxModule(model), {"x": np.ones(3, np.float32)})["y"]
    np.testing.assert_array_equal(made, [0, 2, 0])
