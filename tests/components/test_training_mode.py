"""BatchNormalization and Dropout in training mode, mixed precision, and what training keeps."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper
from onnx.helper import make_node as node

from bbnode.components import errors
from bbnode.components.autodiff import InvalidForwardModel, training_graphs
from bbnode.components.autodiff.training import TrainingOptions
from bbnode.components.backends.reference import ReferenceBackend, ReferenceBackendConfig
from bbnode.components.contracts import ComponentError
from bbnode.components.data.arrays import ArrayDataSource, ArrayDataSourceConfig
from bbnode.components.models.mlp import mlp_forward
from bbnode.components.models.onnx_model import OnnxModel, OnnxModelConfig
from bbnode.components.models.weights import pack_state, unpack_state
from tests.components.fakes import CTX, onnx_model
from tests.components.graphs import check, model_of, numeric_gradient, run_ort, run_reference

RNG = np.random.default_rng(0)
X = RNG.normal(size=(8, 4)).astype(np.float32)
LABELS = np.arange(8) % 3
TRAINED = ("w", "scale", "shift")


def normalized(training: bool = False, producer: str = "") -> ModelProto:
    """A linear layer and a BatchNormalization, with running statistics that are not 0 and 1."""
    outputs = ["y", "new_mean", "new_variance"] if training else ["y"]
    mode = {"training_mode": 1} if training else {}
    model = model_of(
        [node("MatMul", ["x", "w"], ["h"]),
         node("BatchNormalization", ["h", "scale", "shift", "mean", "variance"], outputs,
              name="bn", momentum=0.75, **mode)],
        {"w": RNG.normal(size=(4, 3)), "scale": np.ones(3), "shift": np.zeros(3),
         "mean": np.array([1.0, 2.0, 3.0]), "variance": np.array([2.0, 1.0, 0.5])},
        inputs={"x": np.zeros((8, 4))}, dtype=np.float32, symbolic=True,
    )  # fmt: skip
    model.producer_name = producer
    return model


def config_of(model: ModelProto, **settings: Any) -> OnnxModelConfig:
    return OnnxModelConfig(model=model.SerializeToString(), **settings)


def dropped(ratio: float = 0.25, training: Any = False) -> ModelProto:
    constants = {"ratio": np.array(ratio)}
    inputs = ["x", "ratio"]
    if training is not None:
        constants["training"] = np.array(training)
        inputs.append("training")
    return model_of(
        [node("Dropout", inputs, ["d"], name="drop"), node("Mul", ["d", "w"], ["y"])],
        {"w": np.ones(1)}, inputs={"x": np.zeros((8, 4))}, constants=constants,
        dtype=np.float32, symbolic=True,
    )  # fmt: skip


@pytest.fixture
def source(tmp_path) -> ArrayDataSource:
    np.savez(tmp_path / "d.npz", x=np.tile(X, (3, 1)), y=np.tile(LABELS, 3))
    return ArrayDataSource(ArrayDataSourceConfig(path=str(tmp_path / "d.npz")))


# --- BatchNormalization -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variance", "producer", "factor"),
    [("auto", "", 1.0), ("auto", "pytorch", 8 / 7), ("sample", "", 8 / 7),
     ("population", "pytorch", 1.0)],
)  # fmt: skip
def test_running_statistics_move_by_the_rule_that_was_chosen(
    variance: str, producer: str, factor: float
) -> None:
    forward = normalized(producer=producer)
    model = onnx_model(
        config_of(forward, mode="train", running_variance=variance, trainable=TRAINED)
    )
    before = model.params(CTX)
    grads, _ = model.gradient(CTX, X, LABELS)
    after = model.params(CTX)
    hidden = X @ before[:12].reshape(4, 3)
    mean = 0.75 * np.array([1, 2, 3]) + 0.25 * hidden.mean(0)
    spread = 0.75 * np.array([2, 1, 0.5]) + 0.25 * factor * hidden.var(0)
    np.testing.assert_allclose(after[18:], [*mean, *spread], rtol=1e-5)
    np.testing.assert_array_equal(after[:18], before[:18])
    np.testing.assert_array_equal(grads[18:], np.zeros(6))
    assert np.abs(grads[:12]).min() > 0


@pytest.mark.parametrize("written", [False, True])
def test_the_batch_decides_in_training_and_the_running_statistics_else(written: bool) -> None:
    forward = normalized(training=written)
    settings = {} if written else {"mode": "train"}
    graphs = training_graphs(forward, "mse", TRAINED, TrainingOptions(**settings))
    for name in ("forward", "loss", "gradients", "pullback", "step", "train_step"):
        check(getattr(graphs, name))
    held = {t.name: numpy_helper.to_array(t) for t in forward.graph.initializer}
    target = RNG.normal(size=(8, 3)).astype(np.float32)
    feeds = {**held, "x": X, "labels": target, "learning_rate": np.float32(0.1)}
    hidden = X @ held["w"]
    normal = (hidden - hidden.mean(0)) / np.sqrt(hidden.var(0) + 1e-5)
    evaluated = (hidden - held["mean"]) / np.sqrt(held["variance"] + 1e-5)
    for run in (run_ort, run_reference):
        trained = run(graphs.gradients, feeds)
        np.testing.assert_allclose(trained["loss"], ((normal - target) ** 2).mean(), rtol=1e-4)
        np.testing.assert_allclose(run(graphs.forward, feeds)["y"], evaluated, rtol=1e-4, atol=1e-5)
        loss = run(graphs.loss, feeds)["loss"]
        np.testing.assert_allclose(loss, ((evaluated - target) ** 2).mean(), rtol=1e-4)
    assert graphs.variances == {"variance"}


def test_what_is_fed_is_not_written_over() -> None:
    """ONNX Runtime's kernel writes the batch's statistics over its inputs."""
    model = onnx_model(config_of(normalized(), mode="train", trainable=TRAINED))
    mine = model.params(CTX)
    kept = mine.copy()
    model.gradient(CTX, X, LABELS)
    np.testing.assert_array_equal(mine, kept)


def test_local_statistics_stay_on_this_node_and_are_saved(source) -> None:
    settings = {"mode": "train", "trainable": TRAINED}
    config = config_of(normalized(), running_statistics="local", **settings)
    model = onnx_model(config, source)
    assert model.size == 18
    assert onnx_model(config_of(normalized(), **settings)).size == 24
    model.train(CTX, epochs=1, batch=8)
    model.load_parameters(CTX, model.params(CTX))
    again = onnx_model(config)
    again.restore(model.serialize())
    np.testing.assert_array_equal(again.forward(CTX, X), model.forward(CTX, X))
    exported = {t.name: numpy_helper.to_array(t) for t in model.export().graph.initializer}
    assert not np.allclose(exported["mean"], [1, 2, 3])
    saved = OnnxModel.saved_weights(model.serialize())
    np.testing.assert_array_equal(saved["mean"], exported["mean"])
    other = onnx_model(config_of(normalized(), **settings))
    told = other.carry_over(model.serialize())
    assert (set(told.taken), told.left) == ({*TRAINED, "mean", "variance"}, {})
    np.testing.assert_array_equal(other.forward(CTX, X), model.forward(CTX, X))


def test_a_peer_that_sends_a_variance_below_0_is_refused() -> None:
    model = onnx_model(config_of(normalized(), mode="train", trainable=TRAINED))
    bad = model.params(CTX).copy()
    bad[-1] = -1
    with pytest.raises(errors.ParameterMismatch, match="variance 'variance' is below 0"):
        model.load_parameters(CTX, bad)
    with pytest.raises(errors.ParameterMismatch, match="variance 'variance' is below 0"):
        model.apply_delta(CTX, bad - model.params(CTX))


def test_steps_leave_running_statistics_alone() -> None:
    model = onnx_model(config_of(normalized(), mode="train", trainable=TRAINED, optimizer="adamw"))
    before = model.params(CTX)
    model.step(CTX, np.ones(24, np.float32))
    np.testing.assert_array_equal(model.params(CTX)[18:], before[18:])
    assert (model.params(CTX)[:18] != before[:18]).all()


def test_training_mode_where_it_cannot_be_is_refused_by_name() -> None:
    inner = helper.make_graph(
        [node("Dropout", ["x"], ["inside"], name="hidden")], "then", [],
        [helper.make_tensor_value_info("inside", TensorProto.FLOAT, None)],
    )  # fmt: skip
    other = helper.make_graph(
        [node("Identity", ["x"], ["outside"])], "else", [],
        [helper.make_tensor_value_info("outside", TensorProto.FLOAT, None)],
    )  # fmt: skip
    branched = model_of(
        [node("If", ["c"], ["h"], then_branch=inner, else_branch=other),
         node("Mul", ["h", "w"], ["y"])],
        {"w": np.ones(3)}, inputs={"x": np.ones((2, 3))}, constants={"c": np.array(True)},
        dtype=np.float32,
    )  # fmt: skip
    train = TrainingOptions(mode="train")
    with pytest.raises(InvalidForwardModel, match=r"'hidden' \(Dropout\).*inside a subgraph"):
        training_graphs(branched, "mse", ["w"], train)
    with pytest.raises(InvalidForwardModel, match="running mean 'mean' of node 'bn'"):
        training_graphs(normalized(), "mse", ["w", "mean"], train)
    read = normalized(training=True)
    read.graph.node.append(node("Identity", ["new_mean"], ["told"]))
    read.graph.output.add().CopyFrom(helper.make_tensor_value_info("told", 1, [3]))
    with pytest.raises(InvalidForwardModel, match="output 1 of node 'bn'"):
        training_graphs(read, "mse", TRAINED)
    with pytest.raises(InvalidForwardModel, match=r"the ratio 1.0 of node 'drop'"):
        training_graphs(dropped(1.0), "mse", ["w"], train)
    computed = dropped()
    computed.graph.node[0].input[1] = "computed"
    computed.graph.node.insert(0, node("Abs", ["ratio"], ["computed"]))
    with pytest.raises(InvalidForwardModel, match=r"ratio of node 'drop'.* is computed"):
        training_graphs(computed, "mse", ["w"], train)


# --- Dropout ----------------------------------------------------------------------------------

WIDE = np.ones((200, 500), np.float32)


def mask_of(model: ModelProto, draw: int, seed: int = 0, run: Any = run_ort) -> np.ndarray:
    """The factors that a Dropout multiplies ones with, as the gradient of its sum shows them."""
    graphs = training_graphs(model, "mse", ["x2"], TrainingOptions(mode="train", seed=seed))
    feeds = {"x2": WIDE, "x": WIDE, "labels": np.zeros_like(WIDE), "draw": np.int64(draw)}
    return np.asarray(run(graphs.gradients, feeds)["grad/x2"]) * WIDE.size / 2


def on_parameter(ratio: float, times: int = 1) -> ModelProto:
    nodes = [node("Dropout", ["x2" if i == 0 else f"d{i}", "ratio"], [f"d{i + 1}"])
             for i in range(times)]  # fmt: skip
    nodes.append(node("Identity", [f"d{times}"], ["y"]))
    return model_of(nodes, {"x2": WIDE}, constants={"ratio": np.array(ratio)}, dtype=np.float32)


@pytest.mark.parametrize("ratio", [0.0, 0.1, 0.5, 0.9])
def test_a_mask_keeps_the_share_and_the_mean(ratio: float) -> None:
    factors = mask_of(on_parameter(ratio), 0)
    kept = factors != 0
    # Of 100,000 places; five standard deviations of a binomial distribution.
    assert abs(kept.mean() - (1 - ratio)) <= 5 * np.sqrt(ratio * (1 - ratio) / WIDE.size)
    # d/dx of (x m)^2 with m = 1 / (1 - ratio) is 2 m^2 at x = 1.
    np.testing.assert_allclose(factors[kept], 1 / (1 - ratio) ** 2, rtol=1e-5)


def test_masks_are_the_same_bits_everywhere_and_others_for_each_draw_seed_and_node() -> None:
    model = on_parameter(0.5)
    first = mask_of(model, 3)
    assert first.tobytes() == mask_of(model, 3).tobytes()
    assert first.tobytes() == mask_of(model, 3, run=run_reference).tobytes()
    others = [mask_of(model, 4), mask_of(model, 2**20 + 3), mask_of(model, 3, seed=1)]
    twice = mask_of(on_parameter(0.5, times=2), 3) != 0
    assert abs(twice.mean() - 0.25) < 0.01
    for other in others:
        together = np.corrcoef(first.reshape(-1) != 0, other.reshape(-1) != 0)[0, 1]
        assert abs(together) < 0.02
    rows = first != 0
    neighbours = [np.corrcoef(rows[:, :-1].ravel(), rows[:, 1:].ravel())[0, 1],
                  np.corrcoef(rows[:-1].ravel(), rows[1:].ravel())[0, 1]]  # fmt: skip
    assert max(map(abs, neighbours)) < 0.02


def test_dropout_is_as_written_unless_training_mode_is_asked_for() -> None:
    target = np.zeros_like(X)
    for training, mode, draws in (
        (False, "as_written", False), (True, "as_written", True), (None, "train", True),
    ):  # fmt: skip
        model = onnx_model(config_of(dropped(0.5, training), loss="mse", mode=mode))
        np.testing.assert_array_equal(model.forward(CTX, X), X)
        plain = float(model.compute_loss(CTX, X, target))
        losses = [float(model.gradient(CTX, X, target)[1]) for _ in range(3)]
        assert len(set(losses)) == (3 if draws else 1)
        assert draws or losses[0] == pytest.approx(plain)
        assert model.progress.draws == (3 if draws else 0)


def test_masks_go_on_after_a_restart(source) -> None:
    forward = mlp_forward((4, 16, 3), seed=1)
    forward.graph.node[2].input[0] = "dropped"
    forward.graph.node.insert(2, node("Dropout", ["layer0.active"], ["dropped"]))
    config = config_of(forward, mode="train", optimizer="adam", learning_rate=0.01, seed=7)
    whole, first = onnx_model(config, source), onnx_model(config, source)
    whole.train(CTX, epochs=4, batch=5)
    source.reset(CTX)
    first.train(CTX, epochs=2, batch=5)
    second = onnx_model(config, source)
    second.restore(first.serialize())
    second.train(CTX, epochs=2, batch=5)
    assert second.params(CTX).tobytes() == whole.params(CTX).tobytes()
    assert second.progress == whole.progress


def test_the_gradient_through_a_mask_is_that_of_the_masked_function() -> None:
    graphs = training_graphs(dropped(0.5), "mse", ["w"], TrainingOptions(mode="train"))
    feeds = {"w": np.array([0.7], np.float32), "x": X, "labels": X * X, "draw": np.int64(5)}
    got = run_ort(graphs.gradients, feeds)["grad/w"]
    expected = numeric_gradient(graphs.gradients, feeds, "w", "loss", np.ones(()), 1e-2)
    np.testing.assert_allclose(got, expected, rtol=1e-3)


# --- mixed precision --------------------------------------------------------------------------


def test_mixed_precision_computes_products_in_float16_and_comes_close(source) -> None:
    forward = mlp_forward((4, 32, 3), seed=1)
    plain = onnx_model(config_of(forward), source)
    mixed = onnx_model(config_of(forward, precision="mixed"), source)
    graphs = mixed._graphs
    products = [n for n in graphs.train_step.graph.node if n.op_type in ("Gemm", "MatMul")]
    halves = {n.output[0] for n in graphs.train_step.graph.node
              if n.op_type == "Cast" and n.attribute[0].i == TensorProto.FLOAT16}  # fmt: skip
    assert any(n.input[0] in halves for n in products)
    check(graphs.train_step)
    assert "Cast" not in {n.op_type for n in graphs.forward.graph.node}
    told = [model.train(CTX, epochs=3, batch=8) for model in (plain, mixed)]
    assert told[1]["rescaled"] == 0
    assert told[1]["loss"] == pytest.approx(told[0]["loss"], rel=1e-2)
    np.testing.assert_allclose(mixed.params(CTX), plain.params(CTX), atol=2e-2)
    assert mixed.params(CTX).dtype == np.float32
    # Gradients too small for float16 come through, since the loss is scaled.
    small, _ = mixed.gradient(CTX, X * 1e-4, LABELS)
    exact, _ = plain.gradient(CTX, X * 1e-4, LABELS)
    np.testing.assert_allclose(small, mixed_close(exact, plain, mixed, small), rtol=0.1, atol=1e-6)


def mixed_close(exact: Any, plain: Any, mixed: Any, small: Any) -> Any:
    """Gradients of the plain model at the mixed model's parameters."""
    plain.load_parameters(CTX, mixed.params(CTX))
    return plain.gradient(CTX, X * 1e-4, LABELS)[0]


def test_a_step_beyond_float16_is_made_again_with_a_smaller_scale(source) -> None:
    config = config_of(mlp_forward((4, 8, 3), seed=1), precision="mixed", optimizer="adam")
    # ONNX Runtime computes in float32 where its CPU has no kernel for float16.
    model = onnx_model(config, source, ReferenceBackend(ReferenceBackendConfig()))
    before = model.params(CTX)
    model._progress = replace(model.progress, loss_scale=2.0**24)
    with np.errstate(all="ignore"):
        told = model.train(CTX, epochs=1, batch=8)
        grads, loss = model.gradient(CTX, X * 50, LABELS)  # as often as it takes
    assert told["steps"] == 3
    assert told["rescaled"] > 3
    assert model.progress.loss_scale < 2.0**24
    assert np.isfinite(model.params(CTX)).all()
    assert (model.params(CTX) != before).any()
    assert np.isfinite(grads).all()
    assert np.isfinite(loss)


def test_mixed_precision_that_is_always_beyond_float16_fails_and_leaves_the_model(source) -> None:
    config = config_of(mlp_forward((4, 8, 3), seed=1), precision="mixed")
    model = onnx_model(config, source, ReferenceBackend(ReferenceBackendConfig()))
    huge = np.full_like(model.params(CTX), 1e5)  # its float16 is infinite
    model.load_parameters(CTX, huge)
    with np.errstate(all="ignore"):
        with pytest.raises(errors.TrainingFailed):
            model.train(CTX, epochs=1, batch=8)
        with pytest.raises(errors.ParameterMismatch, match="NaN or infinity"):
            model.gradient(CTX, X, LABELS)
    np.testing.assert_array_equal(model.params(CTX), huge)


# --- what training keeps ----------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", ["adam", "rmsprop", "lion", "adagrad"])
def test_the_state_of_the_optimizer_survives_a_restart(optimizer: str, source) -> None:
    forward = mlp_forward((4, 5, 3), seed=1)
    config = config_of(
        forward, optimizer=optimizer, learning_rate=0.01, schedule="cosine", decay_steps=100
    )
    whole, first, second = (onnx_model(config, source) for _ in range(3))
    whole.train(CTX, epochs=4, batch=5)
    source.reset(CTX)
    first.train(CTX, epochs=2, batch=5)
    second.restore(first.serialize())
    second.train(CTX, epochs=2, batch=5)
    assert second.params(CTX).tobytes() == whole.params(CTX).tobytes()
    assert second.serialize() == whole.serialize()


def test_loaded_parameters_begin_the_optimizer_anew_unless_it_is_kept(source) -> None:
    forward = mlp_forward((4, 5, 3), seed=1)
    for keeps in (False, True):
        config = config_of(forward, optimizer="adam", keep_optimizer_state=keeps)
        model, fresh = onnx_model(config, source), onnx_model(config, source)
        model.train(CTX, epochs=1, batch=5)
        trained = model.params(CTX)
        for each in (model, fresh):
            each.load_parameters(CTX, trained)
            each.step(CTX, np.full(model.size, 0.1, np.float32))
        same = model.params(CTX).tobytes() == fresh.params(CTX).tobytes()
        assert same is not keeps
        assert model.progress.steps == 6  # a schedule goes on


def test_another_optimizer_in_the_next_version_begins_with_no_state(source) -> None:
    forward = mlp_forward((4, 5, 3), seed=1)
    model = onnx_model(config_of(forward, optimizer="adam"), source)
    model.train(CTX, epochs=1, batch=5)
    other = onnx_model(config_of(forward, momentum=0.9), source)
    told = other.carry_over(model.serialize())
    assert "of 'adam', and this model has 'sgd'" in told.left["the optimizer's state"]
    np.testing.assert_array_equal(other.params(CTX), model.params(CTX))
    other.train(CTX, epochs=1, batch=5)


def test_accumulated_batches_make_the_step_of_one_large_batch(source) -> None:
    forward = mlp_forward((4, 5, 3), "Tanh", seed=1)
    together = onnx_model(config_of(forward, momentum=0.9), source)
    apart = onnx_model(config_of(forward, momentum=0.9, accumulate=3), source)
    big = together.train(CTX, epochs=2, batch=15)  # of 24: 15 and 9
    source.reset(CTX)
    small = apart.train(CTX, epochs=2, batch=5)  # 5, 5, 5 and 5, 4
    assert small["steps"] == big["steps"] == 4
    np.testing.assert_allclose(apart.params(CTX), together.params(CTX), rtol=1e-4, atol=1e-6)
    assert small["loss"] == pytest.approx(big["loss"], rel=1e-4)


def test_a_round_sets_the_learning_rate(source) -> None:
    config = config_of(mlp_forward((4, 3), seed=1), schedule="step", decay_steps=2)
    model = onnx_model(config)
    before = model.params(CTX)
    model.set_learning_rate(CTX, np.float32(0.25))
    model.step(CTX, np.ones(15, np.float32))
    np.testing.assert_allclose(before - model.params(CTX), 0.25, rtol=1e-5)
    again = onnx_model(config)
    again.restore(model.serialize())
    again.step(CTX, np.ones(15, np.float32))
    np.testing.assert_allclose(model.params(CTX) - again.params(CTX), 0.25, rtol=1e-5)
    for rate in (0.0, -1.0, np.nan, np.inf):
        with pytest.raises(ComponentError, match="one positive float32"):
            model.set_learning_rate(CTX, np.float32(rate))


@pytest.mark.parametrize(
    "counters",
    [{"steps": -1}, {"draws": 1.5}, {"age": 1 << 63}, {"loss_scale": 1e300}, {"rate": -1.0},
     {"loss_scale": None}, {"rate": float("nan")}, {"good": True}],
)  # fmt: skip
def test_saved_counters_that_can_not_be_are_refused(counters: dict[str, Any]) -> None:
    model = onnx_model(config_of(mlp_forward((4, 3))))
    good = unpack_state(model.serialize())
    state = pack_state(replace(good, progress={**good.progress, **counters}))
    before = model.serialize()
    with pytest.raises(ComponentError):
        model.restore(state)
    assert model.serialize() == before


def test_a_saved_state_of_an_optimizer_that_lies_is_refused() -> None:
    model = onnx_model(config_of(mlp_forward((4, 3)), momentum=0.9))
    model.step(CTX, np.ones(15, np.float32))
    good = unpack_state(model.serialize())
    for state in (np.full(15, np.nan, np.float32), np.zeros(15)):
        with pytest.raises(ComponentError):
            model.restore(pack_state(replace(good, state=(state,))))
    with pytest.raises(ComponentError, match="malformed"):
        model.restore(pack_state(replace(good, state=())))


def test_a_twin_has_the_settings_and_takes_the_state() -> None:
    """A model keeps no bytes of its weights beside the vector."""
    config = config_of(normalized(), mode="train", trainable=TRAINED, running_statistics="local")
    model = onnx_model(config)
    model.gradient(CTX, X, LABELS)
    model.step(CTX, np.ones(18, np.float32))
    twin = model.twin()
    twin.restore(model.serialize())
    assert twin.export() == model.export()
    assert twin.serialize() == model.serialize()


REFUSED = {
    "optimizer": ({"optimizer": "adamm"}, "no such optimizer; choose one of adagrad, adam"),
    "unknown": ({"optimizer": "adam", "momentum": 0.9}, "momentum=0.9: the optimizer 'adam' has"),
    "beta": ({"optimizer": "adam", "betas": (0.9, 1.0)}, "betas[1]=1.0"),
    "negative": ({"weight_decay": -1.0}, "weight_decay=-1.0"),
    "nan": ({"clip_norm": float("nan")}, "clip_norm=nan"),
    "nesterov": ({"nesterov": True}, "nesterov: it looks ahead by the momentum"),
    "schedule": ({"schedule": "cosin"}, "no such schedule"),
    "steps": ({"schedule": "cosine"}, "decay_steps=0"),
    "warm": ({"schedule": "warmup_cosine", "decay_steps": 5}, "warmup_steps=0"),
    "cold": ({"warmup_steps": 5}, "warmup_steps=5"),
    "final": ({"schedule": "cosine", "decay_steps": 5, "final_rate": 1.0}, "final_rate=1.0"),
    "factor": ({"decay_factor": 0.5}, "decay_factor=0.5"),
    "accumulate": ({"accumulate": 0}, "accumulate is 0"),
    "mode": ({"mode": "training"}, "'mode': Input should be 'as_written' or 'train'"),
    "smooth": ({"label_smoothing": 1.0}, "label_smoothing=1.0"),
    "mse": ({"loss": "mse", "label_smoothing": 0.1}, "the loss 'mse' has no such setting"),
    "weights": ({"class_weights": (1.0, 2.0)}, "class_weights of 2: the output tells 3"),
    "no weights": ({"class_weights": (0.0, 0.0, 0.0)}, "not all 0"),
    "pos": ({"loss": "bce_with_logits", "pos_weight": (1.0, 2.0)}, "pos_weight of 2"),
    "delta": ({"loss": "huber", "huber_delta": 0.0}, "huber_delta=0.0"),
    "axis": ({"class_axis": 2}, "class_axis=2: the output has 2 axes"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_settings_that_mean_nothing_are_refused_at_once(case: str) -> None:
    settings, message = REFUSED[case]
    with pytest.raises(Exception, match=re.escape(message)) as caught:
        OnnxModel(config_of(mlp_forward((4, 3)), **settings))
    assert "\n" not in str(caught.value)


LABELLED = {
    "ignored": ("softmax_cross_entropy", {"ignore_index": -1}, np.full(8, -1), "all 8 labels"),
    "weightless": (
        "softmax_cross_entropy", {"class_weights": (1.0, 0.0, 1.0)}, np.ones(8, np.int64),
        "of the weight 0",
    ),
    "class": ("softmax_cross_entropy", {}, np.full(8, 3), "label 3; the model tells 3 classes"),
    "share": ("bce_with_logits", {}, np.full((8, 3), 1.5), "labels from 1.5 to 1.5"),
    "nan": ("bce_with_logits", {}, np.full((8, 3), np.nan), "takes probabilities"),
    "shape": ("mae", {}, np.zeros((1, 3)), "labels have the shape [1, 3]"),
    "text": ("huber", {}, np.full((8, 3), "a"), "huber takes numbers"),
}  # fmt: skip


@pytest.mark.parametrize("case", LABELLED)
def test_labels_that_a_loss_does_not_take_are_refused(case: str) -> None:
    loss, settings, labels, message = LABELLED[case]
    model = onnx_model(config_of(mlp_forward((4, 3)), loss=loss, **settings))
    for call in (model.compute_loss, model.gradient):
        with pytest.raises(ComponentError, match=re.escape(message)):
            call(CTX, X, labels)


def test_the_reference_backend_makes_the_same_steps(source) -> None:
    config = config_of(
        normalized(), mode="train", trainable=TRAINED, optimizer="adamw", clip_norm=0.5,
        label_smoothing=0.1, schedule="warmup_linear", warmup_steps=2, decay_steps=9,
    )  # fmt: skip
    fast = onnx_model(config, source)
    slow = onnx_model(config, source, ReferenceBackend(ReferenceBackendConfig()))
    fast.train(CTX, epochs=2, batch=8)
    source.reset(CTX)
    slow.train(CTX, epochs=2, batch=8)
    np.testing.assert_allclose(fast.params(CTX), slow.params(CTX), rtol=1e-3, atol=1e-5)


def test_a_normalization_that_is_used_twice_moves_its_statistics_twice() -> None:
    x = np.random.default_rng(0).normal(size=(6, 3)).astype(np.float32) * 2 + 1
    shared = ["scale", "shift", "mean", "variance"]
    forward = model_of(
        [node("BatchNormalization", ["x", *shared], ["a"], momentum=0.75),
         node("MatMul", ["a", "w"], ["b"]),
         node("BatchNormalization", ["b", *shared], ["y"], momentum=0.75)],
        {"scale": np.array([1.0, 2, 3]), "shift": np.array([0.5, 0, 1]), "mean": np.full(3, 4.0),
         "variance": np.full(3, 2.0), "w": np.arange(9.0).reshape(3, 3) - 3},
        inputs={"x": x}, dtype=np.float32, symbolic=True,
    )  # fmt: skip
    config = OnnxModelConfig(
        model=forward.SerializeToString(), mode="train", trainable=("scale", "shift", "w")
    )
    model = onnx_model(config)
    model.gradient(CTX, x, np.array([0, 1, 2, 0, 1, 2]))
    held = {t.name: numpy_helper.to_array(t) for t in forward.graph.initializer}
    first = (x - x.mean(0)) / np.sqrt(x.var(0) + 1e-5) * held["scale"] + held["shift"]
    mean, variance = held["mean"], held["variance"]
    for batch in (x, first @ held["w"]):
        mean, variance = (
            0.75 * old + 0.25 * new
            for old, new in ((mean, batch.mean(0)), (variance, batch.var(0)))
        )
    made = {t.name: numpy_helper.to_array(t) for t in model.export().graph.initializer}
    np.testing.assert_allclose(made["mean"], mean, rtol=1e-4)
    np.testing.assert_allclose(made["variance"], variance, rtol=1e-4)
