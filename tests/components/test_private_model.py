"""PrivateModel: DP-SGD by its formula, its noise and its ledger, attacks on it, and refusals."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper
from scipy import stats

from bbnode.components import (
    ArrayDataSource,
    ArrayDataSourceConfig,
    ComponentError,
    InvalidComponentConfig,
    OnnxModel,
    OrtBackend,
    OrtBackendConfig,
    PrivateModel,
    PrivateModelConfig,
    ReferenceBackend,
    ReferenceBackendConfig,
    TrainingFailed,
    mlp_forward,
)
from bbnode.components.privacy.accounting import epsilon_of, library
from bbnode.components.privacy.errors import (
    AccountantUnavailable,
    BudgetSpent,
    LedgerUnavailable,
    NotPrivate,
)
from bbnode.components.secure_aggregation import noise as discrete
from tests.programs.strategies.federation import normalised

MLP = mlp_forward((6, 5, 3), activation="Tanh", seed=1)
QUIET: dict[str, Any] = {"noise": 1e-6, "epsilon": 1e30}
COUNT = 24


class Context:
    """The parts of an OpContext that the component uses."""

    def __init__(self, seed: int = 0) -> None:
        self._rng = np.random.default_rng(seed)

    def random_bytes(self, count: int) -> bytes:
        return self._rng.bytes(count)


def data(count: int = COUNT, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.normal(size=(count, 6)).astype(np.float32), rng.integers(0, 3, count)


def made(
    folder: Path,
    x: np.ndarray,
    y: np.ndarray,
    cls: type[OnnxModel] = PrivateModel,
    forward: ModelProto = MLP,
    backend: Any = None,
    **given: Any,
) -> Any:
    path = folder / f"examples{len(list(folder.iterdir()))}.npz"
    np.savez(path, x=x, y=y)
    source = ArrayDataSource(ArrayDataSourceConfig(path=str(path)))
    source.bind({})
    model = cls(cls.Config(model=forward.SerializeToString(), **given))
    model.bind({"backend": backend or OrtBackend(OrtBackendConfig()), "data_source": source})
    return model


def trained(model: Any, batch: int, epochs: int = 1, seed: int = 0) -> Any:
    return model.train(Context(seed), epochs=epochs, batch=batch)


def weights(model: Any) -> np.ndarray:
    return np.asarray(model.params(None)).astype(np.float64)


class Numpy:
    """DP-SGD of a tanh network with cross-entropy, by hand and in float64."""

    def __init__(self, flat: np.ndarray) -> None:
        self.flat = flat

    def gradient(self, x: np.ndarray, label: int) -> np.ndarray:
        w1, b1 = self.flat[:30].reshape(6, 5), self.flat[30:35]
        w2, b2 = self.flat[35:50].reshape(5, 3), self.flat[50:]
        x = x.astype(np.float64)
        hidden = np.tanh(x @ w1 + b1)
        scores = hidden @ w2 + b2
        wrong = np.exp(scores - scores.max())
        wrong /= wrong.sum()
        wrong[label] -= 1
        back = (w2 @ wrong) * (1 - hidden**2)
        return np.concatenate(
            [np.outer(x, back).ravel(), back, np.outer(hidden, wrong).ravel(), wrong]
        )

    def step(self, rows: Sequence[tuple[np.ndarray, int]], clip: float, expected: float) -> None:
        total = np.zeros_like(self.flat)
        for x, label in rows:
            g = self.gradient(x, label)
            total += g * min(1.0, clip / float(np.linalg.norm(g)))
        self.flat = self.flat - 0.1 * total / expected


def drawn(count: int, rate: float, steps: int, seed: int = 0) -> list[np.ndarray]:
    """Return the batches that a context of this seed leads to."""
    ctx, found = Context(seed), []
    for _ in range(steps):
        words = np.zeros(count, np.uint64)
        discrete.add_mask(words, ctx.random_bytes(16))
        found.append(np.flatnonzero(words < np.uint64(int(rate * 2.0**64))))
        ctx.random_bytes(16)
    return found


@pytest.mark.parametrize("ignore_index", [None, -1])  # rows at once, and one after the other
@pytest.mark.parametrize("backend", ["ort", "reference"])
def test_steps_are_those_of_the_formula(
    tmp_path: Path, ignore_index: int | None, backend: str
) -> None:
    x, y = data()
    by = ReferenceBackend(ReferenceBackendConfig()) if backend == "reference" else None
    model = made(tmp_path, x, y, clip=2.0, ignore_index=ignore_index, backend=by, **QUIET)
    own = Numpy(weights(model))
    lengths = [np.linalg.norm(own.gradient(each, label)) for each, label in zip(x, y, strict=True)]
    assert min(lengths) < 2.0 < max(lengths)
    told = trained(model, batch=8, epochs=2)
    # The source hands its examples out in the order of its epochs; a whole one is the second.
    source = ArrayDataSource(model.dependency("data_source").config)
    source.bind({})
    source.epoch_batches(1)
    ((features, labels),) = source.epoch_batches(COUNT)
    batches = drawn(COUNT, 8 / COUNT, 6)
    assert len({len(each) for each in batches}) > 1
    for batch in batches:
        own.step([(features[i], int(labels[i])) for i in batch], 2.0, 8)
    np.testing.assert_allclose(weights(model), own.flat, rtol=0, atol=1e-6)
    assert (told["steps"], told["num_samples"], told["sampling"]) == (6, COUNT, 8 / COUNT)
    assert "loss" not in told


def test_both_graphs_of_sums_agree_on_other_losses_and_layers(tmp_path: Path) -> None:
    """Rows at once and a loop: the same sums, of relu and elementwise layers, mse and bce."""
    x, _ = data()
    targets = np.random.default_rng(1).uniform(size=(COUNT, 3)).astype(np.float32)
    for loss in ("mse", "mae", "huber", "bce_with_logits", "cosine"):
        found = []
        for at_once in (True, False):
            model = made(tmp_path, x, targets, forward=mlp_forward((6, 4, 3), seed=2), loss=loss,
                         clip=0.05, **QUIET)  # fmt: skip
            if not at_once:
                from bbnode.components.privacy.gradients import clipped_sums

                graph = clipped_sums(model._graphs, frozenset(), at_once=False)
                assert [node.op_type for node in graph.graph.node].count("Scan") == 1
                model._sum_graphs[frozenset()] = graph
            else:
                assert not any(
                    node.op_type == "Scan" for node in model._sums_of(frozenset()).graph.node
                )
            trained(model, batch=8)
            found.append(weights(model))
        np.testing.assert_allclose(found[0], found[1], rtol=0, atol=2e-7, err_msg=loss)


def conv() -> ModelProto:
    rng = np.random.default_rng(0)
    tensors = {"w": rng.normal(size=(2, 1, 2, 2)), "head": rng.normal(size=(4, 3)) / 2}
    nodes = [
        helper.make_node("Reshape", ["x", "shape"], ["image"]),
        helper.make_node("Conv", ["image", "w"], ["c"]),
        helper.make_node("Relu", ["c"], ["r"]),
        helper.make_node("Flatten", ["r"], ["f"]),
        helper.make_node("MatMul", ["f", "head"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes,
        "conv",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 6])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 3])],
        [
            *(numpy_helper.from_array(t.astype(np.float32), n) for n, t in tensors.items()),
            numpy_helper.from_array(np.array([-1, 1, 2, 3]), "shape"),
        ],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_any_model_and_optimizer_by_gradients_of_single_examples(
    tmp_path: Path, optimizer: str
) -> None:
    x, y = data()
    model = made(tmp_path, x, y, forward=conv(), clip=0.3, optimizer=optimizer, **QUIET)
    plain = made(tmp_path, x, y, OnnxModel, forward=conv(), optimizer=optimizer)
    for _ in range(3):
        grads = [
            np.asarray(plain.gradient(None, x[i : i + 1], y[i : i + 1])[0]) for i in range(COUNT)
        ]
        wide = [g.astype(np.float64) for g in grads]
        mean = sum(g * min(1, 0.3 / max(float(np.linalg.norm(g)), 1e-30)) for g in wide) / COUNT
        plain.step(None, mean.astype(np.float32))
    trained(model, batch=COUNT, epochs=3)
    np.testing.assert_allclose(weights(model), weights(plain), rtol=0, atol=2e-6)


def test_frozen_parameters_stay_and_are_not_of_the_norm(tmp_path: Path) -> None:
    x, y = data()
    model = made(tmp_path, x, y, clip=0.2, **QUIET)
    names = [name for name in model.trained if name.startswith("layer0")]
    before = weights(model)
    model.train_adjusted(
        Context(), None, None, epochs=1, batch=COUNT, proximal=0.0, frozen="\n".join(names)
    )
    own = Numpy(before)
    moves = [own.gradient(each, label)[35:] for each, label in zip(x, y, strict=True)]
    mean = sum(g * min(1, 0.2 / np.linalg.norm(g)) for g in moves) / COUNT
    np.testing.assert_array_equal(weights(model)[:35], before[:35])
    np.testing.assert_allclose(weights(model)[35:], before[35:] - 0.1 * mean, atol=1e-6)


def test_an_example_of_any_size_moves_the_sum_by_the_norm_at_most(tmp_path: Path) -> None:
    x, y = data()
    for huge in (1e6, 1e30, 3e38):
        attacked = x.copy()
        attacked[3] = huge
        found = []
        for features in (attacked, np.delete(attacked, 3, axis=0)):
            labels = y if len(features) == COUNT else np.delete(y, 3)
            model = made(tmp_path, features, labels, clip=0.5, learning_rate=1.0, **QUIET)
            before = weights(model)
            trained(model, batch=COUNT)
            found.append((before - weights(model)) * len(features))
        assert np.linalg.norm(found[0] - found[1]) <= 0.5 * (1 + 1e-4), huge


def test_a_batch_of_nobody_is_a_step_of_noise(tmp_path: Path) -> None:
    x, y = data(400)
    model = made(tmp_path, x, y, clip=2.0, noise=1.5, epsilon=1e6, learning_rate=1.0)
    assert [len(each) for each in drawn(400, 1 / 400, 2, seed=1)] == [0, 0]
    before = weights(model)
    model.config = type(model.config)(**{**vars(model.config), "max_steps": 2})
    told = trained(model, batch=1, seed=1)
    move = weights(model) - before
    assert told["steps"] == 2
    assert told["work"] == pytest.approx(2 / 400)
    assert 0.5 < move.std() / (2.0 * 1.5 * np.sqrt(2)) < 1.5


def test_the_noise_is_gaussian_of_the_deviation_that_is_charged() -> None:
    drawn = discrete.drawn_finely(200_000, b"a key of 16 byte") / discrete.FINE_DEVIATION
    assert abs(drawn.mean()) < 0.01
    assert drawn.std() == pytest.approx(1, rel=0.01)
    assert stats.kstest(drawn, "norm").pvalue > 0.01
    assert drawn[:1000].tolist() != discrete.drawn_finely(1000, b"another16bytekey").tolist()


def test_noise_reaches_every_parameter_at_its_deviation(tmp_path: Path) -> None:
    x, y = data()
    model = made(
        tmp_path, x, y, forward=mlp_forward((6, 200, 3), seed=0), clip=0.25, noise=2.0,
        epsilon=1e6, learning_rate=1.0,
    )  # fmt: skip
    quiet = made(tmp_path, x, y, forward=mlp_forward((6, 200, 3), seed=0), clip=0.25,
                 learning_rate=1.0, **QUIET)  # fmt: skip
    trained(model, batch=COUNT)
    trained(quiet, batch=COUNT)
    noise = (weights(model) - weights(quiet)) * COUNT
    assert noise.std() == pytest.approx(0.25 * 2.0, rel=0.05)
    assert stats.kstest(noise / 0.5, "norm").pvalue > 0.01


def test_each_example_is_drawn_by_itself_at_the_rate(tmp_path: Path) -> None:
    x, y = data()
    model = made(tmp_path, x, y)
    ctx = Context(3)
    held = np.zeros((4000, COUNT))
    for row in held:
        row[model._drawn(ctx, 0.25, COUNT)] = 1
    assert np.abs(held.mean(axis=0) - 0.25).max() < 0.04
    shared = np.corrcoef(held.T) - np.eye(COUNT)
    assert np.abs(shared).max() < 0.08


# -- the ledger -----------------------------------------------------------------------------


def test_epsilon_is_that_of_the_library(tmp_path: Path) -> None:
    dp = library()
    x, y = data()
    model = made(tmp_path, x, y, noise=1.3, epsilon=1e3)
    for epochs in (1, 2):
        told = trained(model, batch=6, epochs=epochs)
    event = dp.PoissonSampledDpEvent(6 / COUNT, dp.GaussianDpEvent(1.3))
    reference = dp.rdp.RdpAccountant().compose(event, 4).compose(event, 8).get_epsilon(1e-5)
    assert told["epsilon"] == pytest.approx(reference, rel=1e-9)
    assert model.charges == {(0.25, 1.3): 12}
    assert told["delta"] == 1e-5
    told = trained(model, batch=COUNT)
    full = dp.rdp.RdpAccountant().compose(event, 12).compose(dp.GaussianDpEvent(1.3))
    assert told["epsilon"] == pytest.approx(full.get_epsilon(1e-5), rel=1e-9)


def test_training_beyond_the_budget_does_not_begin(tmp_path: Path) -> None:
    x, y = data()
    model = made(tmp_path, x, y, noise=1.0, epsilon=9.0)
    spent = 0.0
    while (after := epsilon_of(model._ledger.charged(0.25, 1.0, 4), 1e-5)) <= 9:
        spent = trained(model, batch=6)["epsilon"]
        assert spent == after
    last = weights(model)
    with pytest.raises(BudgetSpent, match="beyond the budget of 9"):
        trained(model, batch=6)
    assert 5 < spent <= 9
    np.testing.assert_array_equal(weights(model), last)
    assert epsilon_of(model.charges, 1e-5) == spent  # nothing is charged for what did not begin


def test_a_restart_keeps_what_was_spent_and_a_file_what_a_snapshot_forgot(tmp_path: Path) -> None:
    x, y = data()
    settings = {"noise": 1.0, "epsilon": 9.0}
    model = made(tmp_path, x, y, **settings)
    old = model.serialize()
    trained(model, batch=6)
    again = made(tmp_path, x, y, **settings)
    again.restore(model.serialize())
    assert again.charges == model.charges
    np.testing.assert_array_equal(weights(again), weights(model))
    # Other weights or not: what was spent is carried over.
    wider = made(tmp_path, x, y, forward=mlp_forward((6, 9, 3), seed=0), **settings)
    wider.carry_over(model.serialize())
    assert wider.charges == model.charges
    assert set(PrivateModel.saved_weights(model.serialize())) == set(model.trained)

    file = tmp_path / "ledger.json"
    first = made(tmp_path, x, y, ledger=str(file), **settings)
    trained(first, batch=6)
    crashed = made(tmp_path, x, y, ledger=str(file), **settings)
    crashed.restore(old)
    assert crashed.charges == first.charges == {(0.25, 1.0): 4}
    assert json.loads(file.read_text()) == [[0.25, 1.0, 4]]


def test_steps_are_charged_before_they_are_made(tmp_path: Path) -> None:
    x, y = data()
    model = made(tmp_path, x, y, noise=1.0, epsilon=9.0, learning_rate=3e37, clip=1e12)
    with pytest.raises(TrainingFailed):
        trained(model, batch=6)
    assert model.charges == {(0.25, 1.0): 4}
    broken = made(tmp_path, x, y, ledger=str(tmp_path / "none" / "ledger.json"))
    before = weights(broken)
    with pytest.raises(LedgerUnavailable):
        trained(broken, batch=6)
    np.testing.assert_array_equal(weights(broken), before)


@pytest.mark.parametrize("state", [b"\x00", b"\x80", b"\x82\xa7charges\x01\xa5model\x01"])
def test_a_state_of_anything_else_is_refused(tmp_path: Path, state: bytes) -> None:
    model = made(tmp_path, *data())
    for take in (model.restore, model.carry_over, PrivateModel.saved_weights):
        with pytest.raises(ComponentError):
            take(state)


# -- refusals -------------------------------------------------------------------------------


def test_gradients_without_noise_are_refused(tmp_path: Path) -> None:
    x, y = data()
    model = made(tmp_path, x, y)
    calls = {
        "gradient": lambda: model.gradient(Context(), x, y),
        "gradient_with_input": lambda: model.gradient_with_input(Context(), x, y),
        "pull_back": lambda: model.pull_back(Context(), x, np.zeros((COUNT, 3)), to_input=1),
        "backward": lambda: model.backward(Context(), np.zeros((COUNT, 3))),
    }
    for name, call in calls.items():
        with pytest.raises(NotPrivate, match=f"{name} would give out"):
            call()


@pytest.mark.parametrize(
    "given",
    [
        {"accumulate": 2}, {"clip_norm": 1.0}, {"clip_value": 1.0}, {"precision": "mixed"},
        {"class_weights": (1.0, 2.0, 1.0)}, {"max_train_s": 1.0}, {"clip": 0.0},
        {"clip": float("nan")}, {"noise": 0.0}, {"noise": float("nan")}, {"noise": float("inf")},
        {"epsilon": 0.0}, {"epsilon": float("inf")}, {"delta": 0.0}, {"delta": 1.0},
        {"accountant": "moments"},
    ],
    ids=str,
)  # fmt: skip
def test_settings_that_break_privacy_or_meaning_are_refused(given: dict[str, Any]) -> None:
    (name,) = given
    with pytest.raises(InvalidComponentConfig, match=name):
        PrivateModel(PrivateModelConfig(model=MLP.SerializeToString(), **given))


def test_running_statistics_are_refused() -> None:
    with pytest.raises(InvalidComponentConfig, match="BatchNormalization"):
        PrivateModel(PrivateModelConfig(model=normalised().SerializeToString(), mode="train"))
    PrivateModel(PrivateModelConfig(model=normalised().SerializeToString()))


def test_no_epochs_and_no_batch_are_refused(tmp_path: Path) -> None:
    x, y = data()
    model = made(tmp_path, x, y)
    for epochs, batch in ((0, 1), (1, 0)):
        with pytest.raises(TrainingFailed):
            trained(model, batch=batch, epochs=epochs)


def test_without_the_library_a_node_does_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bbnode.components.libraries.find_spec", lambda _: None)
    with pytest.raises(AccountantUnavailable, match="pip install 'dp-accounting"):
        made(tmp_path, *data())


def test_masks_of_dropout_are_each_example_s_own(tmp_path: Path) -> None:
    """Half of the inputs are dropped for each example anew: two equal ones get other gradients."""
    nodes = [
        helper.make_node("Dropout", ["x", "ratio"], ["d"]),
        helper.make_node("MatMul", ["d", "w"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes,
        "dropped",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 6])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 3])],
        [
            numpy_helper.from_array(np.ones((6, 3), np.float32), "w"),
            numpy_helper.from_array(np.array(0.5, np.float32), "ratio"),
        ],
    )
    forward = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    x, y = np.ones((8, 6), np.float32), np.zeros(8, np.int64)
    model = made(
        tmp_path, x, y, forward=forward, mode="train", trainable=("w",), learning_rate=1.0,
        clip=100.0, **QUIET,
    )  # fmt: skip
    before = weights(model)
    trained(model, batch=8)
    rows = (before - weights(model)).reshape(6, 3)[:, 0] * 8
    assert len(np.unique(rows.round(3))) > 1  # one mask for all would give 0 or one number
    assert model.progress.draws == 8
