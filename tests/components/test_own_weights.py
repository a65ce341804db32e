"""Weights that a file keeps in Constant nodes, behind an Identity, sparse, or once for several."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.helper import make_node as node

from bbnode.components.autodiff import InvalidForwardModel
from bbnode.components.autodiff.forward import read_forward
from bbnode.components.autodiff.own_weights import with_own_weights
from bbnode.components.models import onnx_model as onnx_models
from tests.components.fakes import CTX
from tests.components.slopes import assert_slope, forward_of, model_with

RNG = np.random.default_rng(0)
X, Y = [("x", ["b", 4])], [("y", ["b", 4])]
BATCH = RNG.normal(size=(3, 4)).astype(np.float32)
NORM = ("scale", "shift", "mean", "variance")


def normal(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape).astype(np.float32)


def two_norms(producer: str, *, fresh: bool = True):
    """Two BatchNormalizations, as PyTorch's older exporter writes equal ones: once."""
    first = {"scale": np.ones(4), "shift": np.zeros(4), "mean": np.zeros(4), "variance": np.ones(4)}
    if not fresh:
        first = {name: np.abs(normal(4)) for name in first}
    nodes = [node("Identity", [f"1.{name}"], [f"2.{name}"]) for name in NORM]
    nodes += [
        node("MatMul", ["x", "w"], ["h"]),
        node("BatchNormalization", ["h", *(f"1.{name}" for name in NORM)], ["n"]),
        node("MatMul", ["n", "v"], ["g"]),
        node("BatchNormalization", ["g", *(f"2.{name}" for name in NORM)], ["y"]),
    ]
    tensors = {"w": normal(4, 4), "v": normal(4, 4), **{f"1.{n}": v for n, v in first.items()}}
    return forward_of(nodes, X, Y, tensors, producer=producer)


def test_equal_norms_of_a_fresh_net_are_trained_each_by_itself_and_exported() -> None:
    forward = two_norms("pytorch")
    model = model_with(forward, mode="train")
    assert model.trained == ("w", "v", "1.scale", "1.shift", "2.scale", "2.shift")
    assert set(model.layout) - {*model.trained} == {
        "1.mean", "1.variance", "2.mean", "2.variance",
    }  # fmt: skip
    before = np.array(model.params(CTX))
    grads, _ = model.gradient(CTX, BATCH, BATCH)
    model.step(CTX, grads)
    made = model.export()
    onnx.checker.check_model(made)
    held = {tensor.name: numpy_helper.to_array(tensor) for tensor in made.graph.initializer}
    assert not np.array_equal(held["2.mean"], held["1.mean"])  # each moved by its own batches
    assert not np.array_equal(before, model.params(CTX))
    assert not any(each.op_type == "Identity" for each in made.graph.node)


@pytest.mark.parametrize(("producer", "fresh"), [("tf2onnx", True), ("pytorch", False)])
def test_an_identity_of_a_weight_is_that_weight(producer: str, fresh: bool) -> None:
    model = model_with(two_norms(producer, fresh=fresh))
    norms = ("2.scale", "2.shift") if producer == "pytorch" else ()
    assert model.trained == ("w", "v", "1.scale", "1.shift", *norms)
    assert onnx.checker.check_model(model.export()) is None
    assert_slope(model, BATCH, BATCH)


def test_layers_that_were_copied_are_their_own_and_warned_of() -> None:
    """As torch.nn.TransformerEncoder makes them of one layer: equal, and not all one number."""
    nodes = [
        node("Identity", ["one.w"], ["two.w"]),
        node("Gemm", ["x", "one.w"], ["h"], transB=1),
        node("Gemm", ["h", "two.w"], ["y"], transB=1),
    ]
    forward = forward_of(nodes, X, Y, {"one.w": normal(4, 4)}, producer="pytorch")
    choice = read_forward(forward).choice
    assert choice.trained == ("one.w", "two.w")
    (line,) = choice.warned()
    assert line.endswith("they are trained by themselves: two.w")


def test_a_weight_that_an_embedding_shares_with_a_product_stays_shared() -> None:
    nodes = [
        node("Identity", ["embed.w"], ["head.w"]),
        node("Gather", ["embed.w", "ids"], ["h"]),
        node("Transpose", ["head.w"], ["turned"], perm=[1, 0]),
        node("MatMul", ["h", "turned"], ["y"]),
    ]
    ids = [("ids", ["b"], TensorProto.INT64)]
    forward = forward_of(nodes, ids, [("y", ["b", 9])], {"embed.w": normal(9, 4)},
                         producer="pytorch")  # fmt: skip
    model = model_with(forward)
    assert model.trained == ("embed.w",)
    assert_slope(model, np.asarray([1, 8, 1]), normal(3, 9))


def constants(**tensors: np.ndarray) -> list:
    return [
        node("Constant", [], [name], value=numpy_helper.from_array(np.asarray(value), name))
        for name, value in tensors.items()
    ]


def test_weights_in_constant_nodes_are_trained_and_come_out_as_initializers() -> None:
    """As exporters of Paddle write all of their models."""
    held = {
        "k": normal(3, 1, 3, 3), "kb": normal(3), "scale": np.ones(3, np.float32),
        "shift": np.zeros(3, np.float32), "mean": np.zeros(3, np.float32),
        "variance": np.ones(3, np.float32), "w": normal(3, 2), "b": normal(2),
        "three": np.float32(3.0),
    }  # fmt: skip
    nodes = [
        *constants(**held),
        node("Conv", ["x", "k", "kb"], ["c"]),
        node("BatchNormalization", ["c", "scale", "shift", "mean", "variance"], ["n"]),
        node("Add", ["n", "three"], ["a"]),
        node("GlobalAveragePool", ["a"], ["p"]),
        node("Flatten", ["p"], ["f"]),
        node("MatMul", ["f", "w"], ["m"]),
        node("Add", ["m", "b"], ["y"]),
    ]
    # Sizes as Paddle's exporter writes them: -1, and one "?" for several sizes.
    forward = forward_of(nodes, [("x", [-1, 1, "?", "?"])], [("y", [-1, 2])], {}, opset=11)
    model = model_with(forward, mode="train")
    assert model.trained == ("k", "kb", "scale", "shift", "w", "b")
    images = RNG.normal(size=(4, 1, 6, 8)).astype(np.float32)
    target = np.zeros((4, 2), np.float32)
    model.step(CTX, model.gradient(CTX, images, target)[0])
    made = model.export()
    onnx.checker.check_model(made)
    names = {tensor.name for tensor in made.graph.initializer}
    assert names == {*held}
    assert_slope(model_with(forward), images, target)


def test_constants_beside_initializers_are_trained_where_they_are_named() -> None:
    nodes = [
        *constants(m=normal(4, 4)),
        node("MatMul", ["x", "w"], ["h"]),
        node("MatMul", ["h", "m"], ["y"]),
    ]
    forward = forward_of(nodes, X, Y, {"w": normal(4, 4)})
    assert with_own_weights(forward) is forward
    assert read_forward(forward).choice.trained == ("w",)
    named = model_with(forward, trainable=("w", "m"))
    assert named.trained == ("w", "m")
    assert_slope(named, BATCH, BATCH)


def sparse_forward(dims, indices):
    values = numpy_helper.from_array(np.asarray([2.0, 3.0], np.float32), "W")
    where = numpy_helper.from_array(np.asarray(indices), "at")
    sparse = helper.make_sparse_tensor(values, where, dims)
    return forward_of(
        [node("MatMul", ["x", "W"], ["h"]), node("Add", ["h", "b"], ["y"])],
        X, [("y", ["b", 3])], {"b": normal(3)}, sparse_initializer=[sparse],
    )  # fmt: skip


@pytest.mark.parametrize("indices", [[1, 11], [[0, 1], [3, 2]]])
def test_a_sparse_weight_stays_unless_it_is_named(indices) -> None:
    forward = sparse_forward([4, 3], indices)
    target = np.zeros((3, 3), np.float32)
    model = model_with(forward)
    assert model.trained == ("b",)
    dense = np.zeros((4, 3), np.float32)
    dense[0, 1], dense[3, 2] = 2, 3
    bias = numpy_helper.to_array(forward.graph.initializer[0])
    np.testing.assert_allclose(
        np.asarray(model.forward(CTX, BATCH)), BATCH @ dense + bias, rtol=1e-5
    )
    assert_slope(model, BATCH, target)
    named = model_with(forward, trainable=("W",))
    assert_slope(named, BATCH, target)
    onnx.checker.check_model(named.export())


def test_a_sparse_tensor_that_is_too_large_to_fill_is_refused() -> None:
    with pytest.raises(InvalidForwardModel, match="'W' has 4000000000 elements"):
        model_with(sparse_forward([4, 1_000_000_000], [1, 11]))


def test_the_training_form_of_an_old_batch_normalization_comes_up() -> None:
    """Before opset 14 it is told by outputs alone, and ONNX's converter refuses them."""
    tensors = {"w": normal(4, 4), "s": np.ones(4), "t": np.zeros(4), "m": np.zeros(4),
               "v": np.ones(4)}  # fmt: skip
    nodes = [
        node("MatMul", ["x", "w"], ["h"]),
        node("BatchNormalization", ["h", "s", "t", "m", "v"], ["y", "m1", "v1", "m2", "v2"]),
    ]
    model = model_with(forward_of(nodes, X, Y, tensors, opset=13))
    assert model.trained == ("w", "s", "t")
    assert set(model.layout) == {"w", "s", "t", "m", "v"}
    before = np.array(model.params(CTX))
    model.gradient(CTX, BATCH, BATCH)
    assert not np.array_equal(before[-8:], np.array(model.params(CTX))[-8:])
    read = [*nodes, node("Add", ["m1", "m2"], ["z"])]
    both = forward_of(read, X, [*Y, ("z", [4])], tensors, opset=13)
    with pytest.raises(InvalidForwardModel, match="do not hand out the statistics of the batch"):
        model_with(both)


def test_a_module_reads_a_file_with_such_weights_from_its_path(tmp_path) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(two_norms("pytorch"), path)
    config = onnx_models.OnnxModelConfig(model=path, loss="mse")
    assert "2.scale" in onnx_models.OnnxModel(config).trained
