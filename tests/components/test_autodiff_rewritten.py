"""Forward nodes that are written in another way for their gradients: results stay the same."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import ModelProto, helper, numpy_helper
from onnx.helper import make_node as node

from bbnode.components.autodiff import TrainingGraphs, training, training_graphs
from tests.components.graphs import numeric_gradient, run_ort, run_reference

BATCH = 3


def model_of(
    forward: list[object],
    tensors: dict[str, np.ndarray],
    shape: list[object],
    dtype: type,
) -> ModelProto:
    """A model whose nodes `forward` make h of x, and its classes of that by a product."""
    elem = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    ends = [node("Flatten", ["h"], ["rows"]), node("MatMul", ["rows", "head"], ["y"])]
    graph = helper.make_graph(
        [*forward, *ends],
        "rewritten",
        [helper.make_tensor_value_info("x", elem, shape)],
        [helper.make_tensor_value_info("y", elem, ["batch", 3])],
        [numpy_helper.from_array(array.astype(dtype), name) for name, array in tensors.items()],
    )  # fmt: skip
    return helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 21)])


def convolution(side: int, stride: int, dtype: type, *, bias: bool = True) -> ModelProto:
    rng = np.random.default_rng(0)
    out = (side - 1) // stride + 1
    tensors = {
        "first": rng.normal(0, 0.3, (4, 4, 1, 1)),
        "kernel": rng.normal(0, 0.3, (5, 4, 3, 3)),
        "head": rng.normal(0, 0.3, (5 * out * out, 3)),
    }
    names = ["a", "kernel"]
    if bias:
        tensors["bias"] = rng.normal(0, 0.3, 5)
        names.append("bias")
    forward = [
        node("Conv", ["x", "first"], ["a"]),
        node("Conv", names, ["h"], pads=[1, 1, 1, 1], strides=[stride, stride]),
    ]
    return model_of(forward, tensors, ["batch", 4, side, side], dtype)


def layer_norm(dtype: type) -> ModelProto:
    rng = np.random.default_rng(0)
    tensors = {
        "first": rng.normal(0, 0.3, (6, 6)),
        "scale": rng.normal(1, 0.3, 6),
        "bias": rng.normal(0, 0.3, 6),
        "head": rng.normal(0, 0.3, (6, 3)),
    }
    forward = [
        node("MatMul", ["x", "first"], ["a"]),
        node("LayerNormalization", ["a", "scale", "bias"], ["h"]),
    ]
    return model_of(forward, tensors, ["batch", 6], dtype)


def feeds_of(graphs: TrainingGraphs, shape: tuple[int, ...], dtype: type) -> dict[str, np.ndarray]:
    feeds = {tensor.name: numpy_helper.to_array(tensor) for tensor in graphs.initial}
    x = np.random.default_rng(1).normal(size=(BATCH, *shape)).astype(dtype)
    return feeds | {"x": x, "labels": np.array([1, 0, 2])}


def gradients_in(graphs: TrainingGraphs, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    made = run_ort(graphs.gradients, feeds)
    return [made[name] for name in graphs.gradient_names]


@pytest.mark.parametrize(("side", "stride"), [(2, 1), (4, 2), (3, 2)])
@pytest.mark.parametrize("bias", [True, False])
def test_few_windows_are_one_convolution_of_the_batch(side: int, stride: int, bias: bool) -> None:
    exact = training_graphs(
        convolution(side, stride, np.float64, bias=bias), "softmax_cross_entropy"
    )
    own = exact.gradients.graph.node
    kernels = [n for n in own if n.op_type == "Conv" and len(n.attribute) > 0]
    assert any(list(a.ints) == [1, 3, 3] for n in kernels for a in n.attribute)
    # The forward pass alone has no gradient to share with, and stays as it is.
    assert all(len(a.ints) < 5 for n in exact.forward.graph.node for a in n.attribute)
    feeds = feeds_of(exact, (4, side, side), np.float64)
    found = run_reference(exact.gradients, feeds)
    expected = [
        numeric_gradient(exact.loss, feeds, name, exact.loss_name, np.ones(()))
        for name in exact.parameter_names
    ]
    for name, gradient in zip(exact.gradient_names, expected, strict=True):
        np.testing.assert_allclose(found[name], gradient, rtol=1e-5, atol=1e-7)
    single = training_graphs(
        convolution(side, stride, np.float32, bias=bias), "softmax_cross_entropy"
    )
    made = gradients_in(single, feeds_of(single, (4, side, side), np.float32))
    for one, gradient in zip(made, expected, strict=True):
        np.testing.assert_allclose(one, gradient, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("channels", "sizes", "kernel", "settings"),
    [
        (1, (7, 6), (3, 2), {"pads": [1, 0, 2, 1]}),  # of one channel
        (1, (7, 6), (3, 2), {"strides": [2, 1]}),  # a convolution
        (5, (7, 6), (3, 2), {"pads": [1, 0, 2, 1], "strides": [2, 3]}),  # thin
        (3, (7, 6), (3, 2), {"pads": [1, 0, 2, 1], "dilations": [1, 2]}),
        (5, (9, 8), (2, 3), {"dilations": [3, 2], "pads": [0, 1, 0, 2]}),
        (5, (11,), (3,), {"pads": [1, 1], "strides": [1]}),
        (5, (4, 3, 5), (2, 2, 3), {"pads": [0, 1, 1, 1, 0, 1], "strides": [1, 2, 1]}),
        (17, (9, 8), (2, 3), {"pads": [1, 0, 0, 2]}),  # many windows
        (17, (9, 14), (3, 2), {"dilations": [2, 1], "strides": [1, 2]}),
        (17, (5, 6), (3, 3), {"pads": [1, 1, 1, 1], "strides": [1, 2]}),  # few
        (17, (4, 3, 3), (2, 1, 2), {"strides": [1, 2, 1]}),
        (17, (4, 4), (3, 3), {"pads": [1, 1, 1, 1], "strides": [2, 2]}),  # turned forward too
        (17, (6, 7), (1, 1), {}),  # one position
        (17, (6, 7), (1, 1), {"strides": [2, 2]}),
        (5, (6, 7), (1, 1), {"strides": [2, 1], "pads": [0, 1, 0, 0]}),
        (5, (6, 7), (2, 2), {"auto_pad": "SAME_LOWER", "strides": [2, 2]}),
    ],
)
def test_a_convolution_of_any_form_has_exact_gradients(
    channels: int, sizes: tuple[int, ...], kernel: tuple[int, ...], settings: dict[str, object]
) -> None:
    """Of whole numbers, whose sums float32 holds exactly: outputs are linear in each parameter."""
    rng = np.random.default_rng(0)

    def whole(*shape: int) -> np.ndarray:
        return rng.integers(-3, 4, shape).astype(np.float32)

    tensors = {
        "first": whole(channels, channels, *(1 for _ in sizes)),
        "kernel": whole(3, channels, *kernel),
    }
    forward = [
        node("Conv", ["x", "first"], ["a"]),
        node("Conv", ["a", "kernel"], ["y"], **settings),
    ]
    graph = helper.make_graph(
        forward,
        "of_any_form",
        [helper.make_tensor_value_info("x", 1, ["batch", channels, *sizes])],
        [helper.make_tensor_value_info("y", 1, None)],
        [numpy_helper.from_array(array, name) for name, array in tensors.items()],
    )
    model = helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 21)])
    graphs = training_graphs(model, "mse")
    feeds: dict[str, np.ndarray] = dict(tensors)
    feeds["x"] = whole(BATCH, channels, *sizes)
    output = run_ort(graphs.forward, feeds)["y"]
    towards = whole(*output.shape)
    found = run_ort(graphs.pullback, {**feeds, graphs.output_gradient_name: towards})
    for name, gradient in zip(graphs.parameter_names, graphs.gradient_names, strict=True):
        base, flat = feeds[name], found[gradient].reshape(-1)
        for at in rng.choice(base.size, min(base.size, 6), replace=False):
            moved = base.copy()
            moved.reshape(-1)[at] += 1.0
            change = run_ort(graphs.forward, {**feeds, name: moved})["y"] - output
            assert flat[at] == (change * towards).sum()


@pytest.mark.parametrize("offset", [0.0, 1000.0])
def test_a_layer_normalization_gives_its_statistics(offset: float) -> None:
    single = training_graphs(layer_norm(np.float32), "softmax_cross_entropy")
    (normal,) = (n for n in single.gradients.graph.node if n.op_type == "LayerNormalization")
    assert len(normal.output) == 3
    assert not any(n.op_type == "Sqrt" for n in single.gradients.graph.node)
    (alone,) = (n for n in single.forward.graph.node if n.op_type == "LayerNormalization")
    assert len(alone.output) == 1
    exact = training_graphs(layer_norm(np.float64), "softmax_cross_entropy")
    # In float64 the statistics would be float32: they are computed again.
    assert any(n.op_type == "Sqrt" for n in exact.gradients.graph.node)
    feeds = feeds_of(single, (6,), np.float32)
    feeds["x"] = feeds["x"] * (1 + np.float32(offset))
    wide = {n: v.astype(np.float64) if v.dtype == np.float32 else v for n, v in feeds.items()}
    expected = run_reference(exact.gradients, wide)
    for one, name in zip(gradients_in(single, feeds), exact.gradient_names, strict=True):
        np.testing.assert_allclose(one, expected[name], rtol=2e-3, atol=1e-5)


def test_statistics_that_the_model_takes_itself_are_read_where_they_are() -> None:
    model = layer_norm(np.float32)
    model.graph.node[1].output.extend(["mean", "inverse"])
    graphs = training_graphs(model, "softmax_cross_entropy")
    (normal,) = (n for n in graphs.gradients.graph.node if n.op_type == "LayerNormalization")
    assert list(normal.output) == ["h", "mean", "inverse"]
    same = training_graphs(layer_norm(np.float32), "softmax_cross_entropy")
    feeds = feeds_of(graphs, (6,), np.float32)
    for one, other in zip(gradients_in(graphs, feeds), gradients_in(same, feeds), strict=True):
        np.testing.assert_array_equal(one, other)


STEPS, UNITS = 4, 3
WAYS: dict[str, list[object]] = {  # from Y to [batch, STEPS, UNITS], as exporters write it
    "squeeze": [
        node("Squeeze", ["Y", "one"], ["s"]),
        node("Transpose", ["s"], ["states"], perm=[1, 0, 2]),
    ],
    "reshape": [
        node("Transpose", ["Y"], ["t"], perm=[2, 0, 1, 3]),
        node("Reshape", ["t", "shape"], ["states"]),
    ],
}


def classifier(
    kind: str = "LSTM",
    way: str = "squeeze",
    index: int = -1,
    *,
    axis: int = 1,
    outputs: tuple[str, ...] = ("y",),
    lens: bool = False,
    **attributes: object,
) -> ModelProto:
    """A recurrent layer over [STEPS, batch, 2], and classes from one step of its states."""
    rng = np.random.default_rng(0)
    count = 2 if attributes.get("direction") == "bidirectional" else 1
    wide = UNITS * {"LSTM": 4, "GRU": 3, "RNN": 1}[kind]
    weights = {
        "w": rng.normal(0, 0.7, (count, wide, 2)),
        "r": rng.normal(0, 0.7, (count, wide, UNITS)),
        "b": rng.normal(0, 0.7, (count, 2 * wide)),
        "head": rng.normal(0, 0.7, (count * UNITS, 3)),
    }
    shape = [0, STEPS, count * UNITS]
    whole = {"one": [1], "shape": shape, "index": index, "lens": [STEPS, 2, 1]}
    tensors = {name: array.astype(np.float32) for name, array in weights.items()} | {
        name: np.array(value, np.int32 if name == "lens" else np.int64)
        for name, value in whole.items()
    }
    nodes = [
        node("Transpose", ["x"], ["first"], perm=[1, 0, 2]),
        node(kind, ["first", "w", "r", "b", *(["lens"] if lens else [])], ["Y"],
             hidden_size=UNITS, **attributes),
        *WAYS[way],
        node("Gather", ["states", "index"], ["picked"], axis=axis),
        node("MatMul", ["picked", "head"], ["y"]),
    ]  # fmt: skip
    graph = helper.make_graph(
        nodes,
        "classifier",
        [helper.make_tensor_value_info("x", 1, ["batch", STEPS, 2])],
        [helper.make_tensor_value_info(name, 1, None) for name in outputs],
        [numpy_helper.from_array(array, name) for name, array in tensors.items()],
    )
    return helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 21)])


def picks_a_step(graphs: TrainingGraphs, model: ModelProto | None = None) -> bool:
    nodes = (model or graphs.gradients).graph.node
    return any(n.op_type == "Gather" and n.input[0] == "states" for n in nodes)


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
@pytest.mark.parametrize(
    ("way", "index", "outputs"), [("squeeze", -1, ("y", "Y")), ("reshape", STEPS - 1, ("y",))]
)
def test_the_last_step_of_a_recurrent_layer_is_its_last_state(
    kind: str,
    way: str,
    index: int,
    outputs: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = classifier(kind, way, index, outputs=outputs)
    made = training_graphs(model, "softmax_cross_entropy", ["w", "r", "b", "head"])
    monkeypatch.setattr(training, "last_states", lambda *given: given[1])
    plain = training_graphs(model, "softmax_cross_entropy", ["w", "r", "b", "head"])
    assert not picks_a_step(made)
    assert picks_a_step(plain)
    assert picks_a_step(made, made.forward)
    assert not any("Y" in n.output for n in made.gradients.graph.node)
    feeds = feeds_of(made, (STEPS, 2), np.float32)
    expected = gradients_in(plain, feeds)
    for one, other in zip(gradients_in(made, feeds), expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7)
    assert all(np.abs(each).max() > 1e-3 for each in expected)


@pytest.mark.parametrize(
    "settings",
    [
        {"index": 1},
        {"axis": 0},
        {"lens": True},
        {"direction": "reverse"},
        {"direction": "bidirectional", "way": "reshape"},
    ],
    ids=str,
)
def test_what_is_no_last_state_is_picked(settings: dict[str, object]) -> None:
    model = classifier(**settings)  # type: ignore[arg-type]
    graphs = training_graphs(model, "softmax_cross_entropy", ["w", "r", "b", "head"])
    assert picks_a_step(graphs)


def gelus(dtype: type, *, bias: bool, twice: bool) -> ModelProto:
    """Gelu of a product, alone or with a bias; `twice`: another one of the same, which is added."""
    rng = np.random.default_rng(0)
    tensors = {"first": rng.normal(size=(4, 6)), "head": rng.normal(0, 0.3, (12, 3))}
    forward = [node("MatMul", ["x", "first"], ["p"])]
    if bias:
        tensors["bias"] = rng.normal(size=6)
        forward.append(node("Add", ["bias", "p"], ["a"]))
    into = "a" if bias else "p"
    forward.append(node("Gelu", [into], ["g" if twice else "h"]))
    if twice:
        # With an attribute of its own: of equal nodes one would be left before.
        forward += [
            node("Gelu", [into], ["g2"], approximate="none"),
            node("Sum", ["g", "g2", into], ["h"]),
        ]
    return model_of(forward, tensors, ["batch", 2, 4], dtype)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("twice", [True, False])
@pytest.mark.parametrize("scale", [1.0, 20.0])
def test_a_gelu_shares_what_it_computes_with_its_gradient(
    bias: bool, twice: bool, scale: float
) -> None:
    exact, single = (
        training_graphs(gelus(dtype, bias=bias, twice=twice), "softmax_cross_entropy")
        for dtype in (np.float64, np.float32)
    )
    ops = [n.op_type for n in single.gradients.graph.node]
    assert "Gelu" not in ops
    assert ops.count("Erf") == 1  # equal nodes are one in what is written
    assert [n.op_type for n in single.forward.graph.node].count("Gelu") == 1 + twice
    feeds = feeds_of(exact, (2, 4), np.float64)
    feeds["x"] *= scale  # Gelu is then linear, or nothing; e^(x^2/2) is beyond float32
    feeds["x"][0] = 0.0
    small = {n: v.astype(np.float32) if v.dtype == np.float64 else v for n, v in feeds.items()}
    with np.errstate(over="ignore"):  # as in ReferenceBackend
        # Which the rule's own tests compare with differences.
        expected = run_reference(exact.gradients, feeds)
        results = [run(single.gradients, small) for run in (run_ort, run_reference)]
    for made in results:
        assert made[single.loss_name] == pytest.approx(
            float(run_ort(single.loss, small)[single.loss_name]), rel=1e-5
        )
        for name in exact.gradient_names:
            np.testing.assert_allclose(made[name], expected[name], rtol=1e-4, atol=scale * 1e-6)


def test_a_pool_comes_before_relu_where_it_alone_reads_it() -> None:
    rng = np.random.default_rng(0)
    shift = rng.integers(-2, 3, (2, 6, 6)).astype(np.float32)  # windows of ties, and of negatives
    pool = node("MaxPool", ["r"], ["y"], kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 0, 0])

    def graphs_of(*more: object) -> TrainingGraphs:
        graph = helper.make_graph(
            [node("Add", ["x", "shift"], ["a"]), node("Relu", ["a"], ["r"]), *more],
            "pooled",
            [helper.make_tensor_value_info("x", 1, ["batch", 2, 6, 6])],
            [helper.make_tensor_value_info("y", 1, ["batch", 2, 3, 3])],
            [numpy_helper.from_array(shift, "shift")],
        )
        opset = helper.make_opsetid("", 21)
        return training_graphs(
            helper.make_model(graph, ir_version=10, opset_imports=[opset]), "mse"
        )

    graphs = graphs_of(pool)
    trained = {n.op_type: n for n in graphs.gradients.graph.node}
    assert trained["Relu"].input[0] == trained["MaxPool"].output[0]
    assert len(trained["MaxPool"].output) == 2  # the one whose indices the gradient reads
    evaluated = {n.op_type: n for n in graphs.forward.graph.node}
    assert evaluated["MaxPool"].input[0] == "r"
    assert len(evaluated["MaxPool"].output) == 1

    x = rng.integers(-3, 4, (BATCH, 2, 6, 6)).astype(np.float32)
    labels = rng.normal(size=(BATCH, 2, 3, 3)).astype(np.float32)
    feeds = {"x": x, "shift": shift}
    found = run_ort(graphs.gradients, {**feeds, "labels": labels})
    y = run_ort(graphs.forward, feeds)["y"]
    towards = ((y - labels) * np.float32(2)) / np.float32(y.size)
    as_written = run_ort(graphs.pullback, {**feeds, graphs.output_gradient_name: towards})
    np.testing.assert_allclose(found["grad/shift"], as_written["grad/shift"], rtol=1e-6, atol=1e-9)

    for more in (
        [pool, node("Identity", ["r"], ["other"])],  # used beside it by nothing that counts
        [node("MaxPool", ["r"], ["y", "at"], kernel_shape=[2, 2], strides=[2, 2])],
        [node("MaxPool", ["r"], ["y"], kernel_shape=[2, 2], strides=[2, 2], ceil_mode=1)],
    ):
        kept = {n.op_type: n for n in graphs_of(*more).gradients.graph.node}
        assert kept["MaxPool"].input[0] == "r"


def test_relus_mask_multiplies_only_what_products_made() -> None:
    def graphs_of(*nodes: object) -> TrainingGraphs:
        weight = np.array([[1.0, -1.0], [0.5, 2.0]], np.float32)
        graph = helper.make_graph(
            [node("MatMul", ["x", "w"], ["a"]), node("Relu", ["a"], ["r"]), *nodes],
            "masked",
            [helper.make_tensor_value_info("x", 1, ["batch", 2])],
            [helper.make_tensor_value_info("y", 1, ["batch", 2])],
            [numpy_helper.from_array(weight, "w"), numpy_helper.from_array(weight, "v")],
        )
        opset = helper.make_opsetid("", 21)
        return training_graphs(
            helper.make_model(graph, ir_version=10, opset_imports=[opset]), "mse"
        )

    product = graphs_of(node("MatMul", ["r", "v"], ["y"]))
    assert not any(n.op_type == "Where" for n in product.gradients.graph.node)
    # The root's slope at 0 is infinite, and nothing of it comes through.
    root = graphs_of(node("Mul", ["r", "r"], ["s"]), node("Sqrt", ["s"], ["q"]),
                     node("MatMul", ["q", "v"], ["y"]))  # fmt: skip
    assert any(n.op_type == "Where" for n in root.gradients.graph.node)
    alone = graphs_of(node("Sqrt", ["r"], ["q"]), node("MatMul", ["q", "v"], ["y"]))
    feeds = {t.name: numpy_helper.to_array(t) for t in alone.initial}
    feeds |= {"x": np.array([[-1.0, 0.0]], np.float32), "labels": np.zeros((1, 2), np.float32)}
    found = run_ort(alone.gradients, feeds)["grad/w"]
    np.testing.assert_array_equal(found[:, 0], 0.0)  # of the unit that is off


def test_a_rate_comes_first_but_not_in_halves() -> None:
    def graphs_of(*nodes: object) -> TrainingGraphs:
        graph = helper.make_graph(
            list(nodes),
            "rate",
            [helper.make_tensor_value_info("x", 1, ["batch", 4])],
            [helper.make_tensor_value_info("y", 1, ["batch", 3])],
            [numpy_helper.from_array(np.zeros((4, 3), np.float32), "w")],
        )
        opset = helper.make_opsetid("", 21)
        return training_graphs(
            helper.make_model(graph, ir_version=10, opset_imports=[opset]), "mse"
        )

    (product,) = (
        n
        for n in graphs_of(node("MatMul", ["x", "w"], ["y"])).train_step.graph.node
        if n.output[0] == "updated/w"
    )
    assert product.op_type == "Gemm"
    assert product.input[2] == "w"

    halves = graphs_of(
        node("Cast", ["x"], ["x16"], to=10), node("Cast", ["w"], ["w16"], to=10),
        node("MatMul", ["x16", "w16"], ["y16"]), node("Cast", ["y16"], ["y"], to=1),
    )  # fmt: skip
    rng = np.random.default_rng(1)
    feeds = {t.name: numpy_helper.to_array(t) for t in halves.initial}
    feeds |= {
        "x": rng.normal(size=(BATCH, 4)).astype(np.float32),
        "labels": rng.normal(size=(BATCH, 3)).astype(np.float32),
    }
    rate = np.asarray(1e-8, np.float32)  # a gradient times it is 0 in float16
    one = run_ort(halves.train_step, {**feeds, "learning_rate": rate})["updated/w"]
    found = run_ort(halves.gradients, feeds)
    assert found["grad/w"].all()
    np.testing.assert_array_equal(one, -(found["grad/w"] * rate))


def keys(rows: int, dtype: type, perm: list[int]) -> ModelProto:
    """A product with transposed keys, as torch's exporter writes these."""
    tensors = {
        "first": np.random.default_rng(0).normal(size=(4, 4)),
        "head": np.random.default_rng(1).normal(size=(2 * rows * rows, 3)),
    }
    start, middle, end = (
        node("Constant", [], [name], value_ints=ints)
        for name, ints in (("three", [-1, rows, 4]), ("two", [2]), ("last", [4, rows]))
    )
    forward = [
        start, middle, end,
        node("MatMul", ["x", "first"], ["q"]),
        node("Reshape", ["q", "three"], ["flat"]),
        node("Transpose", ["flat"], ["turned"], perm=perm),
        node("Shape", ["q"], ["batch"], end=1),
        node("Concat", ["batch", "two", "last"], ["shape"], axis=0),
        node("Reshape", ["turned", "shape"], ["k"]),
        node("MatMul", ["q", "k"], ["h"]),
    ]  # fmt: skip
    return model_of(forward, tensors, ["batch", 2, rows, 4], dtype)


@pytest.mark.parametrize(("rows", "perm"), [(3, [0, 2, 1]), (4, [0, 2, 1]), (4, [0, 1, 2])])
def test_three_nodes_that_swap_two_axes_are_one(rows: int, perm: list[int]) -> None:
    graphs = training_graphs(keys(rows, np.float64, perm), "softmax_cross_entropy")
    swaps = [
        list(a.ints) for n in graphs.gradients.graph.node for a in n.attribute if a.name == "perm"
    ]
    assert (perm in swaps) == (perm == [0, 1, 2])
    assert not any(n.op_type == "Concat" for n in graphs.gradients.graph.node if perm[1] == 2)
    feeds = feeds_of(graphs, (2, rows, 4), np.float64)
    found = run_reference(graphs.gradients, feeds)
    for name, gradient in zip(graphs.parameter_names, graphs.gradient_names, strict=True):
        expected = numeric_gradient(graphs.loss, feeds, name, graphs.loss_name, np.ones(()))
        np.testing.assert_allclose(found[gradient], expected, rtol=1e-5, atol=1e-6)


def attention(dtype: type, *, rank: int, causal: bool, present: bool) -> ModelProto:
    """Self-attention of two heads; `present`: its keys are read too."""
    rng = np.random.default_rng(0)
    tensors = {name: rng.normal(size=(4, 4)) for name in ("q", "k", "v")}
    tensors["head"] = rng.normal(0, 0.3, (24, 3))
    ends = ["a", "", "", "scores"] if present else ["a"]
    forward = [node("MatMul", ["x", name], [f"{name}x"]) for name in ("q", "k", "v")]
    heads = {} if rank == 4 else {"q_num_heads": 2, "kv_num_heads": 2}
    forward.append(node("Attention", ["qx", "kx", "vx"], ends, is_causal=int(causal), **heads))
    if present:
        forward += [node("ReduceMean", ["scores"], ["mean"], keepdims=0),
                    node("Add", ["a", "mean"], ["h"])]  # fmt: skip
    else:
        forward.append(node("Identity", ["a"], ["h"]))
    model = model_of(forward, tensors, ["batch", 6, 4] if rank == 3 else ["batch", 2, 3, 4], dtype)
    model.opset_import[0].version = 23
    return model


@pytest.mark.parametrize("rank", [3, 4])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("present", [True, False])
def test_attention_shares_its_probabilities_with_its_gradient(
    rank: int, causal: bool, present: bool
) -> None:
    made = [
        training_graphs(
            attention(dtype, rank=rank, causal=causal, present=present), "softmax_cross_entropy"
        )
        for dtype in (np.float64, np.float32)
    ]
    exact, single = made
    ops = [n.op_type for n in single.gradients.graph.node]
    assert "Attention" not in ops
    assert ops.count("Softmax") == 1
    assert any(n.op_type == "Attention" for n in single.forward.graph.node)
    feeds = feeds_of(exact, (6, 4) if rank == 3 else (2, 3, 4), np.float64)
    small = {n: v.astype(np.float32) if v.dtype == np.float64 else v for n, v in feeds.items()}
    found = run_ort(single.gradients, small)
    assert found[single.loss_name] == pytest.approx(
        float(run_ort(single.loss, small)[single.loss_name]), rel=1e-5
    )
    for name, gradient in zip(exact.parameter_names, exact.gradient_names, strict=True):
        expected = numeric_gradient(exact.loss, feeds, name, exact.loss_name, np.ones(()))
        np.testing.assert_allclose(found[gradient], expected, rtol=1e-3, atol=1e-5)
