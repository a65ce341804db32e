"""Adapters: beside products and Convs, trained alone, taken out merged or as they are."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.helper import make_node as node

from bbnode.components.autodiff import InvalidForwardModel
from bbnode.components.contracts import ComponentError
from bbnode.components.models.lora import Lora, with_adapters
from bbnode.components.models.mlp import mlp_forward
from bbnode.components.models.onnx_model import OnnxModel, OnnxModelConfig
from bbnode.components.registry import build_config, encode_config
from tests.components.fakes import CTX, onnx_model
from tests.components.graphs import model_of

RNG = np.random.default_rng(0)


def normal(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape).astype(np.float32)


X = normal(6, 8)


def product(op_type: str, **attributes):
    turned = attributes.get("transB", 0)
    weight = normal(5, 8) if turned else normal(8, 5)
    x = X.T if attributes.get("transA", 0) else X
    layer = node(op_type, ["x", "w"], ["y"], name="layer", **attributes)
    return model_of([layer], {"w": weight}, inputs={"x": x}, dtype=np.float32), x


def convolution(groups: int, kernel: tuple[int, ...], **attributes):
    weight = normal(6, 4 // groups, *kernel)
    x = normal(2, 4, 9, 8)
    layer = node("Conv", ["x", "w", "b"], ["y"], name="layer", group=groups, **attributes)
    tensors = {"w": weight, "b": normal(6)}
    return model_of([layer], tensors, inputs={"x": x}, dtype=np.float32), x


CASES = {
    "matmul": product("MatMul"),
    "gemm": product("Gemm", alpha=0.5),
    "gemm turned": product("Gemm", transB=1),
    "gemm turned twice": product("Gemm", transA=1, transB=1),
    "conv 1x1": convolution(1, (1, 1)),
    "conv 3x3": convolution(1, (3, 3), pads=[1, 1, 1, 1], strides=[2, 1]),
    "conv grouped": convolution(2, (3, 2), strides=[2, 1], auto_pad="SAME_UPPER"),
}


def config_of(model, rank: int = 2, **settings) -> OnnxModelConfig:
    lora = Lora(targets=("layer",), rank=rank, alpha=3.0, seed=4)
    return OnnxModelConfig(model=model.SerializeToString(), loss="mse", lora=lora, **settings)


def run(model: onnx.ModelProto, x: np.ndarray) -> np.ndarray:
    return onnx.reference.ReferenceEvaluator(model).run(None, {"x": x})[0]


@pytest.mark.parametrize("case", CASES)
def test_adapters_are_trained_alone_and_merge_into_the_weight(case: str) -> None:
    author, x = CASES[case]
    config = config_of(author)
    model = onnx_model(config)
    before = run(author, x)
    np.testing.assert_allclose(model.forward(CTX, x), before, rtol=1e-5, atol=1e-5)
    target = before + normal(*before.shape)
    losses = []
    for _ in range(8):
        grads, loss = model.gradient(CTX, x, target)
        model.step(CTX, grads)
        losses.append(float(loss))
    assert losses[-1] < losses[0]
    trained = model.forward(CTX, x)
    assert np.abs(trained - before).max() > 1e-3
    merged = model.export()
    assert len(merged.graph.node) == 1
    assert {t.name for t in merged.graph.initializer} == {t.name for t in author.graph.initializer}
    np.testing.assert_allclose(run(merged, x), trained, rtol=1e-4, atol=1e-4)
    beside = replace(config, lora=replace(config.lora, merge=False))
    other = onnx_model(beside)
    other.restore(model.serialize())
    kept = other.export()
    onnx.checker.check_model(kept)
    assert {"w.lora_A", "w.lora_B"} < {t.name for t in kept.graph.initializer}
    np.testing.assert_allclose(run(kept, x), trained, rtol=1e-4, atol=1e-4)


def test_what_travels_is_the_adapters_alone() -> None:
    mlp = mlp_forward((8, 16, 3), seed=1).SerializeToString()
    lora = Lora(targets=("layer*.weight",), rank=2)
    model = onnx_model(OnnxModelConfig(model=mlp, lora=lora))
    assert model.size == (8 + 16) * 2 + (16 + 3) * 2
    with_head = OnnxModelConfig(model=mlp, lora=lora, trainable=("layer1.bias",))
    assert onnx_model(with_head).size == model.size + 3
    same, other = (
        onnx_model(OnnxModelConfig(model=mlp, lora=replace(lora, seed=seed))) for seed in (0, 1)
    )
    np.testing.assert_array_equal(same.params(CTX), model.params(CTX))
    assert not np.array_equal(other.params(CTX), model.params(CTX))
    with pytest.raises(ComponentError, match="this model has"):
        model.load_parameters(CTX, np.zeros(7, np.float32))


def test_a_weight_that_others_read_is_not_changed_for_them() -> None:
    tied = model_of(
        [
            node("Gather", ["table", "x"], ["h"]),
            node("Transpose", ["table"], ["turned"], perm=[1, 0]),
            node("MatMul", ["h", "w"], ["a"], name="first"),
            node("MatMul", ["a", "w"], ["b"], name="second"),
            node("MatMul", ["b", "turned"], ["y"], name="head"),
        ],
        {"table": normal(9, 4), "w": normal(4, 4)}, inputs={"x": np.array([[1, 8]])},
        dtype=np.float32,
    )  # fmt: skip
    tied.graph.input[0].type.tensor_type.elem_type = TensorProto.INT64
    tokens = np.array([[1, 8]])
    lora = Lora(targets=("second", "head"), rank=1)
    model = onnx_model(OnnxModelConfig(model=tied.SerializeToString(), lora=lora))
    model.load_parameters(CTX, normal(model.size))
    trained = model.forward(CTX, tokens)
    merged = model.export()
    np.testing.assert_allclose(run(merged, tokens), trained, rtol=1e-4, atol=1e-4)
    values = {t.name: numpy_helper.to_array(t) for t in merged.graph.initializer}
    for tensor in tied.graph.initializer:
        np.testing.assert_array_equal(values[tensor.name], numpy_helper.to_array(tensor))


def quantized() -> onnx.ModelProto:
    codes = RNG.integers(-8, 8, (64, 32))
    weight = helper.make_tensor("q", TensorProto.INT4, codes.shape, codes.reshape(-1).tolist())
    graph = helper.make_graph(
        [
            node("DequantizeLinear", ["q", "s"], ["w"], axis=0, block_size=32),
            node("MatMul", ["x", "w"], ["y"], name="layer"),
        ],
        "quantized",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 64])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", 32])],
        [weight, numpy_helper.from_array(np.full((2, 32), 0.1, np.float32), "s")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def test_int4_weights_stay_as_they_are_beside_adapters() -> None:
    author, x = quantized(), normal(5, 64)
    model = onnx_model(config_of(author, learning_rate=0.5))
    assert model.size == (64 + 32) * 2
    target = run(author, x) + 1
    first = float(model.compute_loss(CTX, x, target))
    for _ in range(10):
        model.step(CTX, model.gradient(CTX, x, target)[0])
    assert float(model.compute_loss(CTX, x, target)) < first / 2
    exported = model.export()
    onnx.checker.check_model(exported)
    held = {t.name: t.data_type for t in exported.graph.initializer}
    assert held["q"] == TensorProto.INT4
    np.testing.assert_allclose(run(exported, x), model.forward(CTX, x), rtol=1e-4, atol=1e-4)


def test_onnxruntime_fuses_an_int4_weight_that_has_an_adapter(tmp_path: Path) -> None:
    lora = Lora(targets=("layer",), rank=2)
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    options.log_severity_level = 3
    content = with_adapters(quantized(), lora)[0].SerializeToString()
    onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    optimized = onnx.load(tmp_path / "optimized.onnx")
    assert "MatMulNBits" in {each.op_type for each in optimized.graph.node}


def test_the_settings_survive_the_artifact() -> None:
    config = config_of(CASES["matmul"][0])
    assert build_config(OnnxModel, "local", encode_config(config), {}) == config


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"targets": ("q_proj",)}, "target 'q_proj' of lora fits no MatMul.*choose among w"),
        ({"targets": ("layr",)}, "did you mean 'layer'"),
        ({"targets": ()}, "lora has no targets"),
        ({"rank": 0}, "the rank of lora is 0"),
        ({"alpha": float("nan")}, "alpha of lora is nan"),
        ({"seed": -1}, "the seed of lora is -1"),
    ],
)
def test_what_fits_nothing_is_refused(settings, problem: str) -> None:
    author, _ = CASES["matmul"]
    with pytest.raises(InvalidForwardModel, match=problem):
        with_adapters(author, Lora(**{"targets": ("layer",), **settings}))


def test_twenty_steps_are_those_of_torch() -> None:
    torch = pytest.importorskip("torch")
    torch.set_num_threads(1)
    author, x = CASES["gemm turned"]
    target = normal(6, 5)
    model = onnx_model(config_of(author, optimizer="adam", learning_rate=0.05))
    a, b = (torch.tensor(v.reshape(s), requires_grad=True) for v, s in (
        (model.params(CTX)[:16].copy(), (8, 2)), (model.params(CTX)[16:].copy(), (2, 5)))
    )  # fmt: skip
    weight = torch.tensor(numpy_helper.to_array(author.graph.initializer[0]).copy())
    optimizer = torch.optim.Adam([a, b], lr=0.05)
    given, wanted = torch.tensor(x), torch.tensor(target)
    for _ in range(20):
        optimizer.zero_grad()
        made = given @ weight.T + 3.0 / 2 * (given @ a @ b)
        torch.nn.functional.mse_loss(made, wanted).backward()
        optimizer.step()
        model.step(CTX, model.gradient(CTX, x, target)[0])
    own = np.concatenate([each.detach().numpy().reshape(-1) for each in (a, b)])
    np.testing.assert_allclose(model.params(CTX), own, rtol=1e-4, atol=1e-5)
