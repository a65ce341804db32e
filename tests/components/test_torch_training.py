"""Losses, optimizers, schedules and training mode against torch's own, step by step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import ModelProto, numpy_helper
from onnx.helper import make_node as node

from bbnode.components.autodiff import training_graphs
from bbnode.components.autodiff.losses import LossSettings
from bbnode.components.autodiff.training import TrainingOptions
from bbnode.components.models.mlp import mlp_forward
from bbnode.components.models.onnx_model import OnnxModelConfig
from tests.components.fakes import CTX, onnx_model
from tests.components.graphs import model_of, run_ort

torch = pytest.importorskip("torch")
F = torch.nn.functional

CLASSES = 5
RNG = np.random.default_rng(3)
LOGITS = RNG.normal(size=(7, CLASSES)) * 3
NAMES = RNG.integers(0, CLASSES, size=7)
SOME = np.where(np.arange(7) % 3 == 0, -100, NAMES)
WEIGHTS = (0.2, 1.0, 3.0, 0.0, 1.5)
VALUES = RNG.normal(size=(7, CLASSES)) * 2
SHARES = RNG.uniform(size=(7, CLASSES))
SHARES[0, 0], SHARES[1] = 0.0, 1.0
ROWS = SHARES / SHARES.sum(1, keepdims=True)


def tensor(values: Any) -> Any:
    return torch.tensor(np.asarray(values))


def cross_entropy(**settings: Any) -> Any:
    return lambda x, t: F.cross_entropy(x, t, **settings)


LOSSES = {
    "ce": ("softmax_cross_entropy", {}, NAMES, cross_entropy()),
    "ce_smooth": (
        "softmax_cross_entropy", {"label_smoothing": 0.1}, NAMES, cross_entropy(label_smoothing=0.1)
    ),
    "ce_weights": (
        "softmax_cross_entropy", {"class_weights": WEIGHTS}, NAMES,
        cross_entropy(weight=tensor(WEIGHTS)),
    ),
    "ce_ignore": ("softmax_cross_entropy", {"ignore_index": -100}, SOME, cross_entropy()),
    "ce_smooth_ignore": (
        "softmax_cross_entropy", {"ignore_index": -100, "label_smoothing": 0.3}, SOME,
        cross_entropy(label_smoothing=0.3),
    ),
    "ce_all": (
        "softmax_cross_entropy",
        {"ignore_index": -100, "label_smoothing": 0.2, "class_weights": WEIGHTS}, SOME,
        cross_entropy(label_smoothing=0.2, weight=tensor(WEIGHTS)),
    ),
    "nll": ("nll", {}, NAMES, lambda x, t: F.nll_loss(x, t)),
    "nll_weights": (
        "nll", {"class_weights": WEIGHTS, "ignore_index": 2}, NAMES,
        lambda x, t: F.nll_loss(x, t, weight=tensor(WEIGHTS), ignore_index=2),
    ),
    "bce": ("bce_with_logits", {}, SHARES, lambda x, t: F.binary_cross_entropy_with_logits(x, t)),
    "bce_weights": (
        "bce_with_logits", {"pos_weight": WEIGHTS}, SHARES,
        lambda x, t: F.binary_cross_entropy_with_logits(x, t, pos_weight=tensor(WEIGHTS)),
    ),
    "mse": ("mse", {}, VALUES, lambda x, t: F.mse_loss(x, t)),
    "mae": ("mae", {}, VALUES, lambda x, t: F.l1_loss(x, t)),
    "huber": ("huber", {}, VALUES, lambda x, t: F.huber_loss(x, t)),
    "huber_delta": (
        "huber", {"huber_delta": 2.5}, VALUES, lambda x, t: F.huber_loss(x, t, delta=2.5)
    ),
    "kl": ("kl", {}, ROWS, lambda x, t: F.kl_div(x, t, reduction="batchmean")),
    "cosine": ("cosine", {}, VALUES, lambda x, t: 1 - F.cosine_similarity(x, t, dim=-1).mean()),
}  # fmt: skip


@pytest.mark.parametrize("case", LOSSES)
@pytest.mark.parametrize("extreme", [False, True])
def test_a_loss_and_its_gradient_are_torchs(case: str, extreme: bool) -> None:
    name, settings, labels, theirs = LOSSES[case]
    at = LOGITS.copy()
    if extreme:  # where formulas that are not stable overflow, or have a corner
        at[0], at[1, :3] = [90.0, -90.0, 0.0, 30.0, 700.0], 0.0
    model = model_of([node("Identity", ["w"], ["y"])], {"w": at})
    options = TrainingOptions(loss=LossSettings(**settings))
    graphs = training_graphs(model, name, ["w"], options)
    got = run_ort(graphs.gradients, {"w": at, "labels": labels})
    x = torch.tensor(at, requires_grad=True)
    loss = theirs(x, tensor(labels))
    loss.backward()
    np.testing.assert_allclose(got["loss"], loss.detach().numpy(), rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(got["grad/w"], x.grad.numpy(), rtol=1e-6, atol=1e-9)


def test_classes_may_be_another_axis() -> None:
    at, labels = RNG.normal(size=(2, 3, 4, 4)), RNG.integers(0, 3, size=(2, 4, 4))
    labels[0, 0, 0] = 255
    model = model_of([node("Identity", ["w"], ["y"])], {"w": at})
    weights = (1.0, 2.0, 0.5)
    options = TrainingOptions(
        loss=LossSettings(
            class_axis=1, ignore_index=255, class_weights=weights, label_smoothing=0.1
        )
    )
    graphs = training_graphs(model, "softmax_cross_entropy", ["w"], options)
    got = run_ort(graphs.gradients, {"w": at, "labels": labels})
    x = torch.tensor(at, requires_grad=True)
    loss = F.cross_entropy(
        x, tensor(labels), weight=tensor(weights), ignore_index=255, label_smoothing=0.1
    )
    loss.backward()
    np.testing.assert_allclose(got["loss"], loss.detach().numpy(), rtol=1e-9)
    np.testing.assert_allclose(got["grad/w"], x.grad.numpy(), rtol=1e-6, atol=1e-12)


OPTIMIZERS: dict[str, tuple[dict[str, Any], Any]] = {
    "sgd": ({}, lambda p: torch.optim.SGD(p, lr=0.05)),
    "sgd_decay": ({"weight_decay": 0.1}, lambda p: torch.optim.SGD(p, lr=0.05, weight_decay=0.1)),
    "momentum": ({"momentum": 0.9}, lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9)),
    "nesterov": (
        {"momentum": 0.8, "nesterov": True, "weight_decay": 0.01},
        lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.8, nesterov=True, weight_decay=0.01),
    ),
    "adam": ({"optimizer": "adam"}, lambda p: torch.optim.Adam(p, lr=0.05)),
    "adam_decay": (
        {"optimizer": "adam", "weight_decay": 0.1, "betas": (0.8, 0.95), "eps": 1e-4},
        lambda p: torch.optim.Adam(p, lr=0.05, weight_decay=0.1, betas=(0.8, 0.95), eps=1e-4),
    ),
    "adamw": ({"optimizer": "adamw"}, lambda p: torch.optim.AdamW(p, lr=0.05)),
    "adagrad": (
        {"optimizer": "adagrad", "weight_decay": 0.01},
        lambda p: torch.optim.Adagrad(p, lr=0.05, weight_decay=0.01),
    ),
    "rmsprop": ({"optimizer": "rmsprop"}, lambda p: torch.optim.RMSprop(p, lr=0.05)),
    "rmsprop_all": (
        {"optimizer": "rmsprop", "momentum": 0.9, "centered": True, "smoothing": 0.9},
        lambda p: torch.optim.RMSprop(p, lr=0.05, momentum=0.9, centered=True, alpha=0.9),
    ),
}


def torch_mlp(forward: ModelProto) -> Any:
    """Return the same MLP in torch, and its parameters in the order of the vector."""
    values = [torch.tensor(numpy_helper.to_array(t)) for t in forward.graph.initializer]
    params = [torch.nn.Parameter(value) for value in values]

    def run(x: Any) -> Any:
        hidden = torch.tanh(x @ params[0] + params[1])
        return hidden @ params[2] + params[3]

    return run, params


def flat(params: Any) -> np.ndarray:
    return np.concatenate([p.detach().numpy().reshape(-1) for p in params])


@pytest.mark.parametrize("case", OPTIMIZERS)
@pytest.mark.parametrize("clip", [{}, {"clip_norm": 0.3}, {"clip_value": 0.02}])
def test_an_optimizer_makes_torchs_steps(case: str, clip: dict[str, float]) -> None:
    settings, theirs = OPTIMIZERS[case]
    forward = mlp_forward((6, 8, 3), "Tanh", seed=2)
    config = OnnxModelConfig(
        model=forward.SerializeToString(), learning_rate=0.05, **settings, **clip
    )
    model = onnx_model(config)
    run, params = torch_mlp(forward)
    optimizer = theirs(params)
    rng = np.random.default_rng(0)
    for _ in range(20):
        x = rng.normal(size=(9, 6)).astype(np.float32)
        y = rng.integers(0, 3, size=9)
        # The gradients are given, so that the step alone is compared.
        loss = F.cross_entropy(run(torch.tensor(x)), torch.tensor(y))
        optimizer.zero_grad()
        loss.backward()
        model.step(CTX, flat([p.grad for p in params]))
        if "clip_norm" in clip:
            torch.nn.utils.clip_grad_norm_(params, clip["clip_norm"])
        if "clip_value" in clip:
            torch.nn.utils.clip_grad_value_(params, clip["clip_value"])
        optimizer.step()
    start = np.concatenate(
        [numpy_helper.to_array(t).reshape(-1) for t in forward.graph.initializer]
    )
    moved = np.abs(flat(params) - start).max()
    assert moved > 1e-3
    np.testing.assert_allclose(model.params(CTX), flat(params), rtol=2e-6, atol=2e-6 * moved)


# --- training mode ----------------------------------------------------------------------------


def normalized(seed: int = 0, producer: str = "pytorch") -> ModelProto:
    """Conv, BatchNormalization as it is evaluated, Relu, mean over places, and a Gemm."""
    rng = np.random.default_rng(seed)
    model = model_of(
        [node("Conv", ["x", "conv"], ["c"]),
         node("BatchNormalization", ["c", "scale", "shift", "mean", "variance"], ["n"], name="bn",
              epsilon=1e-3, momentum=0.8),
         node("Relu", ["n"], ["r"]),
         node("ReduceMean", ["r", "places"], ["m"], keepdims=0),
         node("Gemm", ["m", "head", "bias"], ["y"])],
        {"conv": rng.normal(size=(4, 2, 3, 3)), "scale": rng.uniform(0.5, 2, size=4),
         "shift": rng.normal(size=4), "head": rng.normal(size=(4, 3)), "bias": np.zeros(3),
         "mean": rng.normal(size=4), "variance": rng.uniform(0.5, 2, size=4)},
        inputs={"x": np.zeros((5, 2, 6, 6))}, constants={"places": np.array([2, 3])},
        dtype=np.float32, symbolic=True,
    )  # fmt: skip
    model.producer_name = producer
    return model


def initial(model: ModelProto) -> dict[str, Any]:
    return {
        t.name: torch.nn.Parameter(torch.tensor(numpy_helper.to_array(t).copy()))
        for t in model.graph.initializer
        if t.name not in ("mean", "variance", "places")
    }


def statistics(model: ModelProto) -> tuple[Any, Any]:
    held = {t.name: numpy_helper.to_array(t).copy() for t in model.graph.initializer}
    return torch.tensor(held["mean"]), torch.tensor(held["variance"])


def run_normalized(x: Any, p: dict[str, Any], mean: Any, variance: Any, training: bool) -> Any:
    hidden = F.conv2d(x, p["conv"])
    hidden = F.batch_norm(
        hidden, mean, variance, p["scale"], p["shift"], training, momentum=0.2, eps=1e-3
    )
    return F.relu(hidden).mean((2, 3)) @ p["head"] + p["bias"]


TRAINED = ("conv", "scale", "shift", "head", "bias")


@pytest.mark.parametrize("where", ["federated", "local"])
def test_batch_normalization_trains_as_in_torch_with_its_running_statistics(where: str) -> None:
    forward = normalized()
    config = OnnxModelConfig(
        model=forward.SerializeToString(), learning_rate=0.05, momentum=0.9, mode="train",
        running_statistics=where, trainable=TRAINED,
    )  # fmt: skip
    model = onnx_model(config)
    p, (mean, variance) = initial(forward), statistics(forward)
    optimizer = torch.optim.SGD(p.values(), lr=0.05, momentum=0.9)
    rng = np.random.default_rng(1)
    for _ in range(20):
        x = rng.normal(size=(6, 2, 6, 6)).astype(np.float32)
        y = rng.integers(0, 3, size=6)
        grads, loss = model.gradient(CTX, x, y)
        model.step(CTX, grads)
        theirs = F.cross_entropy(
            run_normalized(torch.tensor(x), p, mean, variance, True), torch.tensor(y)
        )
        optimizer.zero_grad()
        theirs.backward()
        optimizer.step()
        assert float(loss) == pytest.approx(theirs.item(), rel=1e-4)
    exported = {t.name: numpy_helper.to_array(t) for t in model.export().graph.initializer}
    for name, value in {**p, "mean": mean, "variance": variance}.items():
        np.testing.assert_allclose(exported[name], value.detach().numpy(), rtol=1e-4, atol=1e-5)
    tail = 8 if where == "federated" else 0
    assert model.size == sum(v.numel() for v in p.values()) + tail
    evaluated = run_normalized(torch.tensor(x), p, mean, variance, False).detach().numpy()
    np.testing.assert_allclose(model.forward(CTX, x), evaluated, rtol=1e-4, atol=1e-5)
