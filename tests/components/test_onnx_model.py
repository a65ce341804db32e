from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import helper, numpy_helper
from onnx.helper import make_node as node

from bbnode.components import errors
from bbnode.components.autodiff import (
    InvalidForwardModel,
    UnknownLoss,
    UnsupportedGradient,
    training_graphs,
)
from bbnode.components.backends.ort import OrtBackend, OrtBackendConfig
from bbnode.components.backends.reference import ReferenceBackend, ReferenceBackendConfig
from bbnode.components.contracts import ComponentError, Model, is_offloaded
from bbnode.components.data.arrays import ArrayDataSource, ArrayDataSourceConfig
from bbnode.components.errors import UnsupportedByModel
from bbnode.components.models.mlp import mlp_forward
from bbnode.components.models.onnx_model import HeldModel, OnnxModel, OnnxModelConfig
from bbnode.components.registry import component_class, concrete
from bbnode.ir.errors import AuthorError
from bbnode.ir.values import Composite
from tests.components.fakes import CTX, onnx_model
from tests.components.graphs import model_of

MLP = mlp_forward((4, 5, 3), seed=1)
CONFIG = OnnxModelConfig(model=MLP.SerializeToString(), learning_rate=0.5)
SIZE = 4 * 5 + 5 + 5 * 3 + 3
RNG = np.random.default_rng(0)
X = RNG.normal(size=(6, 4)).astype(np.float32)
LABELS = RNG.integers(0, 3, size=6)


@pytest.fixture
def source(tmp_path) -> ArrayDataSource:
    np.savez(tmp_path / "d.npz", x=np.tile(X, (10, 1)), y=np.tile(LABELS, 10))
    return ArrayDataSource(ArrayDataSourceConfig(path=str(tmp_path / "d.npz")))


def test_the_vector_is_the_initializers_in_order() -> None:
    parts = [numpy_helper.to_array(t).reshape(-1) for t in MLP.graph.initializer]
    vector = onnx_model(CONFIG).params(CTX)
    np.testing.assert_array_equal(vector, np.concatenate(parts))
    assert (vector.dtype, vector.shape) == (np.float32, (SIZE,))
    with pytest.raises(ValueError, match="read-only"):
        vector[0] = 1


def test_parameters_load_and_decide_the_forward() -> None:
    model, other = onnx_model(CONFIG), onnx_model(CONFIG)
    new = RNG.normal(size=SIZE).astype(np.float32)
    model.load_parameters(CTX, new)
    kept = new.copy()
    new[:] = 0  # the caller may use its buffer again
    np.testing.assert_array_equal(model.params(CTX), kept)
    hidden = np.maximum(X @ kept[:20].reshape(4, 5) + kept[20:25], 0)
    expected = hidden @ kept[25:40].reshape(5, 3) + kept[40:]
    np.testing.assert_allclose(model.forward(CTX, X), expected, rtol=1e-4, atol=1e-5)
    assert not np.allclose(other.forward(CTX, X), expected)


def test_parameters_off_the_wire_are_not_copied() -> None:
    model = onnx_model(CONFIG)
    received = np.arange(SIZE, dtype=np.float32)
    received.flags.writeable = False
    model.load_parameters(CTX, received)
    assert np.shares_memory(model.params(CTX), received)
    odd = np.frombuffer(b"!" + received.tobytes(), np.uint8)[1:].view(np.float32)
    model.load_parameters(CTX, odd)  # not aligned: this one has to be copied
    assert model.params(CTX).flags.aligned
    np.testing.assert_array_equal(model.params(CTX), received)


def test_a_gradient_is_a_value_and_a_step_with_it_is_a_step_of_training() -> None:
    model, stepped = onnx_model(CONFIG), onnx_model(CONFIG)
    before = model.params(CTX)
    grads, loss = model.gradient(CTX, X, LABELS)
    assert (grads.dtype, grads.shape, loss.dtype, loss.shape) == (np.float32, (SIZE,), "f4", ())
    np.testing.assert_array_equal(loss, model.compute_loss(CTX, X, LABELS))
    assert model.params(CTX) is before
    model.set_learning_rate(CTX, np.float32(0.25))
    model.step(CTX, grads)
    np.testing.assert_allclose(model.params(CTX), before - 0.25 * grads, rtol=1e-6, atol=1e-7)
    stepped.step(CTX, grads)  # at the rate of the configuration
    np.testing.assert_allclose(stepped.params(CTX), before - 0.5 * grads, rtol=1e-6, atol=1e-7)
    for wrong in (0.0, -1.0, np.nan, np.inf, np.ones(2), "0.1", 1e300, 1e-300):
        with pytest.raises(ComponentError, match="one positive float32"):
            model.set_learning_rate(CTX, np.asarray(wrong))


def test_a_model_of_others_without_gradients_says_so() -> None:
    class Plain(HeldModel):
        gradient, set_learning_rate = Model.gradient, Model.set_learning_rate

    plain = Plain(CONFIG)
    with pytest.raises(UnsupportedByModel, match="has no gradient; bind a model that has it"):
        plain.gradient(CTX, X, LABELS)
    with pytest.raises(AuthorError, match="has no set_learning_rate"):
        plain.set_learning_rate(CTX, np.float32(1))


def test_new_parameters_void_what_forward_and_backward_kept() -> None:
    model = onnx_model(CONFIG)
    model.forward(CTX, X)
    model.backward(CTX, np.ones((6, 3), np.float32))
    model.load_parameters(CTX, model.params(CTX))
    with pytest.raises(ComponentError, match="call backward first"):
        model.step(CTX, None)
    with pytest.raises(ComponentError, match="call forward first"):
        model.backward(CTX, np.ones((6, 3), np.float32))


def test_backward_and_step_are_compute_loss_going_down() -> None:
    model = onnx_model(CONFIG)
    before = model.params(CTX)
    losses = []
    for _ in range(20):
        logits = model.forward(CTX, X)
        losses.append(float(model.compute_loss(CTX, X, LABELS)))
        p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
        p[np.arange(6), LABELS] -= 1
        model.backward(CTX, (p / 6).astype(np.float32))
        model.step(CTX, None)
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0] / 2
    assert model.params(CTX) is not before


def test_a_step_with_given_gradients_and_a_delta() -> None:
    model = onnx_model(CONFIG)
    start = model.params(CTX)
    grads = RNG.normal(size=SIZE).astype(np.float32)
    model.step(CTX, grads)
    np.testing.assert_allclose(model.params(CTX), start - np.float32(0.5) * grads, rtol=1e-6)
    stepped = model.params(CTX)
    model.apply_delta(CTX, grads)
    np.testing.assert_array_equal(model.params(CTX), stepped + grads)


def test_training_is_repeatable_and_reports(source) -> None:
    assert is_offloaded(OnnxModel.train)
    model, again = onnx_model(CONFIG, source), onnx_model(CONFIG, source)
    stats = model.train(CTX, epochs=3, batch=16)
    assert (stats["num_samples"], stats["steps"]) == (60, 12)
    source.reset(CTX)
    assert again.train(CTX, epochs=3, batch=16) == stats
    assert again.params(CTX).tobytes() == model.params(CTX).tobytes()
    later = model.train(CTX, epochs=20, batch=16)
    assert later["loss"] < stats["loss"] / 2


def test_the_reported_loss_is_the_mean_of_the_last_epoch(source) -> None:
    # With one batch per epoch, the loss of epoch 2 is the loss after the first step.
    one, two = onnx_model(CONFIG, source), onnx_model(CONFIG, source)
    one.train(CTX, epochs=1, batch=60)
    x, y = source.next_batch(CTX)
    expected = float(one.compute_loss(CTX, x, y))
    source.reset(CTX)
    assert two.train(CTX, epochs=2, batch=60)["loss"] == pytest.approx(expected, rel=1e-5)


def test_the_reference_backend_trains_to_the_same(source) -> None:
    fast = onnx_model(CONFIG, source)
    slow = onnx_model(CONFIG, source, ReferenceBackend(ReferenceBackendConfig()))
    fast.train(CTX, epochs=2, batch=16)
    source.reset(CTX)
    slow.train(CTX, epochs=2, batch=16)
    np.testing.assert_allclose(fast.params(CTX), slow.params(CTX), rtol=1e-4, atol=1e-5)


def test_a_diverging_run_leaves_the_parameters_alone(source, tmp_path) -> None:
    x, _ = source.next_batch(CTX)
    np.savez(tmp_path / "values.npz", x=x, y=np.ones((60, 3), np.float32))
    model = onnx_model(
        OnnxModelConfig(model=CONFIG.model, loss="mse", learning_rate=1e30),
        ArrayDataSource(ArrayDataSourceConfig(path=str(tmp_path / "values.npz"))),
    )
    before = model.params(CTX)
    with pytest.raises(errors.TrainingFailed, match="lower learning_rate"):
        model.train(CTX, epochs=5, batch=16)
    assert model.params(CTX) is before


BAD_VECTORS = {
    "size": (np.ones(SIZE + 1, np.float32), f"{SIZE} parameters"),
    "rank": (np.ones((SIZE, 1), np.float32), "shape"),
    "dtype": (np.ones(SIZE), "float64"),
    "nan": (np.full(SIZE, np.nan, np.float32), "NaN"),
    "type": ([1.0] * SIZE, "list"),
}


@pytest.mark.parametrize("kind", BAD_VECTORS)
def test_vectors_that_do_not_fit_are_refused(kind: str) -> None:
    vector, message = BAD_VECTORS[kind]
    model = onnx_model(CONFIG)
    before = model.params(CTX)
    for method in (model.load_parameters, model.apply_delta, model.step):
        with pytest.raises(errors.ParameterMismatch, match=message):
            method(CTX, vector)
    assert model.params(CTX) is before


@pytest.mark.parametrize(("method", "sign"), [("apply_delta", 1), ("step", -1)])
def test_what_would_not_be_finite_is_not_taken(method: str, sign: int) -> None:
    model = onnx_model(CONFIG)  # its learning rate is 0.5
    huge = np.full(SIZE, 3e38, np.float32)
    model.load_parameters(CTX, huge)
    with pytest.raises(errors.ParameterMismatch, match="NaN or infinity"):
        getattr(model, method)(CTX, sign * huge)
    np.testing.assert_array_equal(model.params(CTX), huge)


@pytest.mark.parametrize("optimizer", ["adam", "adagrad", "rmsprop"])
def test_a_step_that_would_ruin_the_state_of_the_optimizer_is_not_taken(optimizer: str) -> None:
    config = OnnxModelConfig(model=CONFIG.model, optimizer=optimizer, learning_rate=1e-3)
    model = onnx_model(config)
    model.step(CTX, np.ones(SIZE, np.float32))
    before = model.serialize()
    with pytest.raises(errors.ParameterMismatch, match=r"state after this step.*set clip_norm"):
        model.step(CTX, np.full(SIZE, 1e30, np.float32))  # its square is infinite
    assert model.serialize() == before
    clipped = onnx_model(replace(config, clip_norm=1.0))
    clipped.step(CTX, np.full(SIZE, 1e30, np.float32))
    again = onnx_model(replace(config, clip_norm=1.0))
    again.restore(clipped.serialize())
    assert again.serialize() == clipped.serialize()


def test_calls_out_of_order_and_bad_batches_are_refused(source) -> None:
    model = onnx_model(CONFIG, source)
    with pytest.raises(ComponentError, match="call forward first"):
        model.backward(CTX, np.ones((6, 3), np.float32))
    with pytest.raises(ComponentError, match="call backward first"):
        model.step(CTX, None)
    with pytest.raises(errors.BackendError, match=r"mlp\.forward"):
        model.forward(CTX, X[:, :3])
    with pytest.raises(ComponentError, match="tells 3 classes apart, 0 to 2"):
        model.compute_loss(CTX, X, LABELS + 3)
    with pytest.raises(ComponentError, match=r"labels have the shape \[5\].*classes of \[6\]"):
        model.compute_loss(CTX, X, LABELS[:5])
    with pytest.raises(ComponentError, match="label -1"):
        model.compute_loss(CTX, X, LABELS - 1 - LABELS)
    with pytest.raises(ComponentError, match="labels are float32"):
        model.compute_loss(CTX, X, LABELS.astype(np.float32))
    for kwargs in ({"epochs": 0, "batch": 1}, {"epochs": 1, "batch": 0}):
        with pytest.raises(errors.TrainingFailed):
            model.train(CTX, **kwargs)


def test_the_state_comes_back() -> None:
    first, second = onnx_model(CONFIG), onnx_model(CONFIG)
    first.apply_delta(CTX, np.ones(SIZE, np.float32))
    first.forward(CTX, X)
    first.backward(CTX, np.ones((6, 3), np.float32))
    second.restore(first.serialize())
    for model in (first, second):
        model.step(CTX, None)
        model.backward(CTX, np.ones((6, 3), np.float32))
        model.step(CTX, None)
    assert first.params(CTX).tobytes() == second.params(CTX).tobytes()
    smaller = onnx_model(OnnxModelConfig(model=mlp_forward((4, 3)).SerializeToString()))
    with pytest.raises(ComponentError, match="saved parameters"):
        smaller.restore(first.serialize())


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.binary(min_size=1, max_size=120))
def test_bytes_that_are_no_state_are_refused(junk: bytes) -> None:
    model = onnx_model(CONFIG)
    with pytest.raises(ComponentError):
        model.restore(junk)


def test_models_that_cannot_be_trained_are_refused_at_once() -> None:
    with pytest.raises(InvalidForwardModel, match=r"2 bytes.* not an ONNX model"):
        OnnxModel(OnnxModelConfig(model=b"\xff\xff"))
    with pytest.raises(UnknownLoss):
        OnnxModel(OnnxModelConfig(model=CONFIG.model, loss="hinge"))
    for rate in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(errors.InvalidComponentConfig, match="learning_rate"):
            OnnxModel(OnnxModelConfig(model=CONFIG.model, learning_rate=rate))
    double = model_of([node("Mul", ["x", "w"], ["y"])], {"w": np.ones(2)}, inputs={"x": np.ones(2)})
    with pytest.raises(InvalidForwardModel, match="float64"):
        OnnxModel(OnnxModelConfig(model=double.SerializeToString(), loss="mse"))


def test_frozen_layers_stay_out_of_the_vector() -> None:
    config = OnnxModelConfig(model=CONFIG.model, trainable=("layer1.weight", "layer1.bias"))
    assert onnx_model(config).size == 5 * 3 + 3


def test_it_is_registered_and_makes_a_concrete_slot() -> None:
    assert component_class("bbnode.OnnxModel") is OnnxModel
    spec = concrete(OnnxModel, CONFIG)
    assert (spec.role, spec.type_name) == ("Model", "bbnode.OnnxModel")


class Counting(OrtBackend):
    TYPE_NAME = "test.Counting"

    def __init__(self) -> None:
        super().__init__(OrtBackendConfig())
        self.built: list[str] = []

    def build_graph(self, model):
        self.built.append(model.graph.name.split(".")[-1])
        return super().build_graph(model)


def test_the_bootstrap_prepares_what_a_round_needs(source) -> None:
    for data, needed in ((None, ["forward", "loss"]), (source, ["forward", "loss", "train_step"])):
        backend = Counting()
        model = onnx_model(CONFIG, data, backend)
        model.bootstrap(CTX)
        assert sorted(backend.built) == needed
        model.forward(CTX, np.ones((2, 4), np.float32))
        assert len(backend.built) == len(needed)


@pytest.mark.parametrize("op", [("QuickGelu", "com.microsoft"), ("Det", "")])
def test_an_op_that_gradients_do_not_pass_is_run_and_refused_by_name_for_training(
    op: tuple[str, str], source
) -> None:
    name, domain = op
    shape = ["n", 2, 2] if name == "Det" else ["n", 4]
    nodes = [node("Mul", ["x", "w"], ["h"]), node(name, ["h"], ["d"], name="odd", domain=domain)]
    nodes.append(node("Unsqueeze", ["d", "axis"], ["y"]))
    graph = helper.make_graph(
        nodes, "odd",
        [helper.make_tensor_value_info("x", 1, shape)],
        [helper.make_tensor_value_info("y", 1, ["n", 1] if name == "Det" else ["n", 1, 4])],
        [numpy_helper.from_array(np.full(shape[1:], 2.0, np.float32), "w"),
         numpy_helper.from_array(np.asarray([1]), "axis")],
    )  # fmt: skip
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    made = helper.make_model(graph, ir_version=10, opset_imports=opsets)
    config = OnnxModelConfig(model=made.SerializeToString(), loss="mse")
    model = onnx_model(config)
    model.bootstrap(CTX)
    batch = np.arange(12, dtype=np.float32).reshape(3, *shape[1:])
    out = np.asarray(model.forward(CTX, batch))
    wanted = np.linalg.det(2 * batch) if name == "Det" else 2 * batch / (1 + np.exp(-3.404 * batch))
    np.testing.assert_allclose(out, wanted[:, None], rtol=1e-3, atol=1e-4)
    assert model.compute_loss(CTX, batch, out) == 0
    named = rf"'odd'.*{domain or 'ai.onnx'}\.{name}"
    for refused in (
        lambda: model.gradient(CTX, batch, out),
        lambda: model.backward(CTX, out),
        lambda: onnx_model(config, source),
        lambda: training_graphs(made, "mse"),
    ):
        with pytest.raises(UnsupportedGradient, match=named):
            refused()


def test_a_frozen_state_is_the_one_of_then_and_costs_nothing(source) -> None:
    model = onnx_model(CONFIG, source)
    before = model.serialize()
    frozen = model.freeze()
    (cell,) = frozen.__closure__ or ()
    assert cell.cell_contents.params is model.params(CTX)
    model.train(CTX, epochs=1, batch=16)
    assert model.serialize() != before
    assert frozen() == before


@pytest.mark.parametrize(
    ("labels", "said"),
    [
        (np.zeros(6, np.float32), None),
        (np.zeros(6, np.int64), None),
        (np.zeros((6, 1), np.float64), None),
        (
            np.zeros((6, 2), np.float32),
            r"labels have the shape \[6, 2\].*takes numbers of \[6, 1\]",
        ),
        (np.zeros((), np.float32), r"labels have the shape \[\]"),
        (np.zeros((6, 1, 1), np.float32), r"the shape \[6, 1, 1\]"),
        (np.array(["a"] * 6), "mse takes numbers"),
    ],
)
def test_mse_compares_one_by_one(labels: Any, said: str | None) -> None:
    """Labels [N] beside an output [N, 1]: a broadcast to [N, N] would train nonsense."""
    config = OnnxModelConfig(model=mlp_forward((3, 1)).SerializeToString(), loss="mse")
    model = OnnxModel(config)
    model.bind({"backend": ReferenceBackend(ReferenceBackend.Config())})
    features = np.random.default_rng(0).normal(size=(6, 3)).astype(np.float32)
    if said is None:
        made = model.forward(None, features)
        expected = float(np.mean((made - np.reshape(labels, (6, 1))) ** 2))
        assert float(model.compute_loss(None, features, labels)) == pytest.approx(expected)
    else:
        with pytest.raises(ComponentError, match=said):
            model.compute_loss(None, features, labels)


def test_a_held_model_asks_for_no_data_and_does_not_train() -> None:
    model = HeldModel(OnnxModelConfig(model=mlp_forward((3, 2)).SerializeToString()))
    assert set(HeldModel.depends) == {"backend"}
    with pytest.raises(ComponentError, match="no data to train on"):
        model.train(None, epochs=1, batch=1)


def two_in_two_out(config: dict[str, Any] | None = None) -> OnnxModel:
    forward = model_of(
        [node("MatMul", ["x", "w"], ["h"]), node("Add", ["h", "z"], ["y"]),
         node("Mul", ["h", "h"], ["square"])],
        {"w": np.ones((3, 2))}, inputs={"x": np.ones((4, 3)), "z": np.ones((4, 2))},
        dtype=np.float32, symbolic=True,
    )  # fmt: skip
    forward.graph.output.add().CopyFrom(forward.graph.output[0])
    forward.graph.output[1].name = "square"
    return onnx_model(
        OnnxModelConfig(model=forward.SerializeToString(), loss="mse", **config or {})
    )


def test_several_inputs_and_outputs_are_composites_in_the_order_of_the_graph() -> None:
    model = two_in_two_out()
    x, z = RNG.normal(size=(4, 3)).astype(np.float32), RNG.normal(size=(4, 2)).astype(np.float32)
    made = model.forward(CTX, Composite((x, z)))
    assert type(made) is Composite
    np.testing.assert_allclose(made[0], x @ np.ones((3, 2)) + z, rtol=1e-5)
    np.testing.assert_allclose(made[1], (x @ np.ones((3, 2))) ** 2, rtol=1e-5)
    target = np.zeros((4, 2), np.float32)
    grads, loss = model.gradient(CTX, Composite((x, z)), target)
    assert float(loss) == pytest.approx(float(np.mean(made[0] ** 2)), rel=1e-6)
    np.testing.assert_allclose(grads.reshape(3, 2), x.T @ (2 * made[0] / 8), rtol=1e-5)
    model.backward(CTX, 2 * made[0] / 8)
    before = model.params(CTX)
    model.step(CTX, None)
    np.testing.assert_allclose(model.params(CTX), before - 0.1 * grads, rtol=1e-5)
    for batch in (x, Composite((x,)), Composite((x, z, z))):
        with pytest.raises(ComponentError, match=r"2 input\(s\): x, z; give a composite"):
            model.forward(CTX, batch)
    with pytest.raises(errors.BackendError):
        model.forward(CTX, Composite((z, x)))


def test_an_empty_batch_is_refused_wherever_it_comes_in(source) -> None:
    model = onnx_model(CONFIG, source)
    none, no_labels = np.zeros((0, 4), np.float32), np.zeros(0, np.int64)
    assert model.forward(CTX, none).shape == (0, 3)  # of an MLP that is safe
    for call in (
        lambda: model.compute_loss(CTX, none, no_labels),
        lambda: model.evaluate(CTX, none, no_labels),
        lambda: model.gradient(CTX, none, no_labels),
        lambda: model.backward(CTX, np.zeros((0, 3), np.float32)),
    ):
        with pytest.raises(ComponentError, match=r"input 'x' has the shape \[0, 4\]: an empty"):
            call()
    convolved = model_of(
        [node("Conv", ["x", "w"], ["y"])], {"w": np.ones((2, 1, 2, 2))},
        inputs={"x": np.ones((2, 1, 3, 3))}, symbolic=True, dtype=np.float32,
    )  # fmt: skip
    config = OnnxModelConfig(model=convolved.SerializeToString(), loss="mse")
    with pytest.raises(ComponentError, match="an empty batch"):
        onnx_model(config).forward(CTX, np.zeros((0, 1, 3, 3), np.float32))


HEAVY = ("forward", "backward", "step", "gradient", "compute_loss", "evaluate", "apply_delta",
         "load_parameters", "train")  # fmt: skip


@pytest.mark.parametrize("name", HEAVY)
def test_what_computes_is_kept_off_the_poll_unless_it_is_quick(name: str) -> None:
    assert is_offloaded(getattr(OnnxModel, name))
    small = onnx_model(CONFIG)
    big = onnx_model(OnnxModelConfig(model=mlp_forward((600, 600, 3)).SerializeToString()))
    for model, offloaded in ((small, name == "train"), (big, True)):
        width = 4 if model is small else 600
        batch = np.zeros((32, width), np.float32)
        if name == "backward":
            model.forward(CTX, batch)
        inputs = {
            "forward": (batch,), "backward": (np.zeros((32, 3), np.float32),),
            "step": (None,), "train": (),
            **dict.fromkeys(("apply_delta", "load_parameters"), (model.params(CTX),)),
        }.get(name, (batch, np.zeros(32, np.int64)))  # fmt: skip
        assert is_offloaded(getattr(model, name), inputs) is offloaded


def test_a_huge_batch_of_a_small_model_is_kept_off_the_poll() -> None:
    model = onnx_model(CONFIG)
    assert is_offloaded(model.forward, (np.zeros((1 << 20, 4), np.float32),))
    assert not is_offloaded(model.forward, ("junk",))
