"""Data that fit the model they are to train, and data that do not."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper
from onnx.helper import make_node as node

from bbnode.components.data.arrays import ArrayDataSource, ArrayDataSourceConfig
from bbnode.components.data.text import TextDataSource, TextDataSourceConfig
from bbnode.components.errors import DataDoesNotFit, DataUnavailable, InvalidComponentConfig
from bbnode.components.models.mlp import mlp_forward
from bbnode.components.models.onnx_model import OnnxModelConfig
from tests.components.fakes import CTX, onnx_model
from tests.components.graphs import model_of

RNG = np.random.default_rng(0)


def source(folder: Path, x, y) -> ArrayDataSource:
    np.savez(folder / "d.npz", x=x, y=y)
    return ArrayDataSource(ArrayDataSourceConfig(path=str(folder / "d.npz")))


def model(data, layers=(4, 5, 3), loss: str = "softmax_cross_entropy"):
    content = mlp_forward(layers, seed=1).SerializeToString()
    return onnx_model(OnnxModelConfig(model=content, loss=loss), data)


def examples(n: int = 12, width: int = 4) -> np.ndarray:
    return RNG.normal(size=(n, width)).astype(np.float32)


def test_data_that_fit_are_prepared_and_trained_on(tmp_path) -> None:
    made = model(source(tmp_path, examples(), np.arange(12) % 3))
    made.bootstrap(CTX)
    assert made.train(CTX, epochs=1, batch=5)["num_samples"] == 12


@pytest.mark.parametrize(
    ("x", "y", "told"),
    [
        (
            examples(width=7),
            np.zeros(12, np.int64),
            "takes examples of float32[4], the data have float32[7]",
        ),
        (np.zeros((12, 2, 2)), np.zeros(12, np.int64), "the data have float32[2, 2]"),
        (
            examples(),
            np.arange(12) % 3 + 1,
            "tells 3 classes apart, 0 to 2, and the data have labels from 1 to 3",
        ),
        (examples(), np.arange(12) - 1, "have the label -1 in 'y'; classes are numbered from 0"),
        (examples(), np.zeros(12), "takes labels of int64[], class numbers from 0 to 2; the data"),
        (
            examples(),
            np.eye(12, 3, dtype=np.int64),
            "the data have int64[3] in 'y'; store the number",
        ),
    ],
)
def test_data_that_do_not_fit_are_refused_before_the_first_round(tmp_path, x, y, told) -> None:
    with pytest.raises(DataDoesNotFit) as caught:
        model(source(tmp_path, x, y)).bootstrap(CTX)
    text = str(caught.value)
    assert told in text
    assert text.startswith("bbnode.ArrayDataSource of slot 'data' does not fit bbnode.OnnxModel: ")
    assert "\n" not in text


@pytest.mark.parametrize("y", [np.arange(12), np.arange(12.0), np.arange(12.0).reshape(12, 1)])
def test_a_regression_takes_one_number_an_example_in_every_form(tmp_path, y) -> None:
    made = model(source(tmp_path, examples(), y), (4, 5, 1), "mse")
    made.bootstrap(CTX)
    made.train(CTX, epochs=1, batch=12)
    batch, labels = made.dependency("data_source").next_batch(CTX)
    wanted = np.mean((made.forward(CTX, batch)[:, 0] - np.asarray(labels).reshape(-1)) ** 2)
    assert float(made.compute_loss(CTX, batch, labels)) == pytest.approx(float(wanted), rel=1e-4)


def test_a_regression_of_other_sizes_is_refused(tmp_path) -> None:
    with pytest.raises(DataDoesNotFit, match=r"takes labels of float32\[2\].*have float32\[3\]"):
        model(source(tmp_path, examples(), np.ones((12, 3))), (4, 5, 2), "mse").bootstrap(CTX)


def test_data_that_are_missing_are_named_by_their_source(tmp_path) -> None:
    missing = ArrayDataSource(ArrayDataSourceConfig(path=str(tmp_path / "none.npz")))
    with pytest.raises(DataUnavailable, match=r"none\.npz"):
        model(missing).bootstrap(CTX)


def test_a_model_that_never_trains_looks_at_no_data() -> None:
    model(None).bootstrap(CTX)


@settings(max_examples=25, deadline=None)
@given(width=st.integers(1, 6), classes=st.integers(1, 5), least=st.integers(-2, 2))
def test_what_is_accepted_can_be_trained_on(tmp_path_factory, width, classes, least) -> None:
    folder = tmp_path_factory.mktemp("fit")
    labels = least + np.arange(8) % classes
    made = model(source(folder, examples(8, width), labels), (4, 3))
    try:
        made.bootstrap(CTX)
    except DataDoesNotFit:
        assert width != 4 or least < 0 or labels.max() > 2
        return
    made.train(CTX, epochs=1, batch=4)


@pytest.mark.parametrize(("rows", "fits"), [(257, True), (300, True), (256, False)])
def test_tokens_have_a_row_in_the_table(tmp_path, rows: int, fits: bool) -> None:
    (tmp_path / "t.txt").write_text("0\tred\n1\tblue\n")
    text = TextDataSource(TextDataSourceConfig(path=str(tmp_path / "t.txt"), length=6))
    graph = helper.make_graph(
        [
            helper.make_node("Gather", ["table", "x"], ["words"]),
            helper.make_node("ReduceMean", ["words", "axis"], ["y"], keepdims=0),
        ],
        "bag",
        [helper.make_tensor_value_info("x", TensorProto.INT64, ["n", 6])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 2])],
        [
            numpy_helper.from_array(np.ones((rows, 2), np.float32), "table"),
            numpy_helper.from_array(np.array([1]), "axis"),
        ],
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    bag = onnx_model(OnnxModelConfig(model=made.SerializeToString()), text)
    if fits:
        bag.bootstrap(CTX)
    else:
        with pytest.raises(
            DataDoesNotFit, match=r"ids 0 to 256, and the table 'table' .* 256 rows"
        ):
            bag.bootstrap(CTX)


def two_inputs() -> OnnxModelConfig:
    forward = model_of(
        [node("Gather", ["table", "ids"], ["rows"]), node("ReduceMean", ["rows", "places"], ["m"],
                                                         keepdims=0),
         node("Concat", ["m", "more"], ["h"], axis=1), node("MatMul", ["h", "w"], ["y"])],
        {"table": RNG.normal(size=(10, 3)), "w": RNG.normal(size=(5, 3))},
        inputs={"ids": np.zeros((4, 6)), "more": np.zeros((4, 2))},
        constants={"places": np.array([1])}, dtype=np.float32, symbolic=True,
    )  # fmt: skip
    ids = forward.graph.input[0].type.tensor_type
    ids.elem_type = TensorProto.INT64
    ids.shape.dim[1].dim_value = 6
    forward.graph.input[1].type.tensor_type.shape.dim[1].dim_value = 2
    return OnnxModelConfig(model=forward.SerializeToString(), loss="softmax_cross_entropy")


def several(folder: Path, **arrays) -> ArrayDataSource:
    y = np.arange(12) % 3
    np.savez(folder / "d.npz", y=y, **arrays)
    config = ArrayDataSourceConfig(path=str(folder / "d.npz"), inputs=tuple(arrays), batch_size=5)
    return ArrayDataSource(config)


def test_a_model_of_two_inputs_trains_on_two_arrays(tmp_path) -> None:
    data = several(tmp_path, tokens=RNG.integers(0, 10, size=(12, 6)), more=examples(width=2))
    made = onnx_model(two_inputs(), data)
    made.bootstrap(CTX)
    told = [made.train(CTX, epochs=4, batch=5)["loss"] for _ in range(3)]
    assert told == sorted(told, reverse=True)
    batch, labels = data.next_batch(CTX)
    assert [(part.dtype.name, part.shape) for part in batch] == [
        ("int64", (5, 6)), ("float32", (5, 2)),
    ]  # fmt: skip
    assert made.forward(CTX, batch).shape == (5, 3)
    assert np.isfinite(made.compute_loss(CTX, batch, labels))
    assert "12 examples: tokens int64[6], more float32[2], labels int64[]" in str(data.schema())


def test_inputs_that_do_not_fit_are_named(tmp_path) -> None:
    tokens, more = RNG.integers(0, 10, size=(12, 6)), examples(width=2)
    cases = (
        ({"more": more, "tokens": tokens}, "int64[6] as input 'ids', the data have float32[2] as"),
        ({"tokens": tokens, "more": examples(width=3)}, "float32[2] as input 'more', the data"),
        ({"tokens": tokens}, "takes 2 inputs (ids int64[6], more float32[2]), the data have 1"),
    )
    for arrays, told in cases:
        with pytest.raises(DataDoesNotFit, match=re.escape(told)):
            onnx_model(two_inputs(), several(tmp_path, **arrays)).bootstrap(CTX)
    for more_settings in ({"features": "more"}, {"standardize": "federated"}):
        with pytest.raises(InvalidComponentConfig, match="tensors of their own"):
            ArrayDataSource(ArrayDataSourceConfig(path="d", inputs=("a", "b"), **more_settings))
    short = several(tmp_path, tokens=tokens, more=more[:5])
    with pytest.raises(DataUnavailable, match="12, 5 rows"):
        short.schema()


def test_labels_that_are_ignored_are_no_classes(tmp_path) -> None:
    content = mlp_forward((4, 3), seed=1).SerializeToString()
    data = source(tmp_path, examples(), np.where(np.arange(12) % 2, -100, 1))
    config = OnnxModelConfig(model=content, ignore_index=-100)
    made = onnx_model(config, data)
    made.bootstrap(CTX)
    assert made.train(CTX, epochs=1, batch=6)["steps"] == 2
    with pytest.raises(DataDoesNotFit, match="the label -100"):
        onnx_model(OnnxModelConfig(model=content), data).bootstrap(CTX)
