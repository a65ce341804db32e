"""Gradients where formulas divide by zero, where an op is a setting's, and in half precision."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import NodeProto, helper, numpy_helper
from onnx.helper import make_node as node

from bbnode.components.autodiff import GradientRuleError, training_graphs
from bbnode.components.backends.reference import ReferenceBackend, ReferenceBackendConfig
from bbnode.ir.errors import AuthorError
from tests.components.gradient_checks import (
    NodeCase,
    check_node_case,
    gradient_of,
    model_in,
)
from tests.components.graphs import model_of, run_ort, run_reference

I64 = np.int64


def gradients(
    nodes: list[NodeProto], params: dict[str, np.ndarray], cotangent: object = 1.0,
    constants: dict[str, np.ndarray] | None = None, dtype: type = np.float32,
) -> list[np.ndarray]:  # fmt: skip
    """Return the gradients of all `params` by ONNX Runtime, and see that the evaluator agrees."""
    forward = model_of(nodes, params, constants=constants, dtype=dtype)
    graphs = training_graphs(forward, "mse", wrt=list(params))
    feeds = {name: array.astype(dtype) for name, array in params.items()}
    y = run_ort(graphs.forward, feeds)[graphs.output_name]
    feeds[graphs.output_gradient_name] = np.broadcast_to(np.asarray(cotangent, dtype), y.shape)
    found = run_ort(graphs.pullback, feeds)
    with np.errstate(divide="ignore", invalid="ignore"):  # of values that a Where leaves out
        same = run_reference(graphs.pullback, feeds)
    for name in graphs.gradient_names:
        np.testing.assert_allclose(found[name], same[name], rtol=1e-5, atol=1e-6)
    return [found[name] for name in graphs.gradient_names]


def test_powers_of_zero_and_of_negative_bases() -> None:
    base = np.array([0.0, 0.0, 0.0, -2.0, -2.0])
    powers = np.array([0.0, 1.0, 2.0, 3.0, 0.0])
    (by_base,) = gradients([node("Pow", ["a", "p"], ["y"])], {"a": base}, constants={"p": powers})
    np.testing.assert_array_equal(by_base, [0, 1, 0, 12, 0])
    (by_power,) = gradients(
        [node("Pow", ["x", "b"], ["y"])], {"b": powers[:3]}, constants={"x": base[:3]}
    )
    np.testing.assert_array_equal(by_power, [0, 0, 0])  # 0^p is flat for p > 0
    (undefined,) = gradients(
        [node("Pow", ["x", "b"], ["y"])], {"b": np.array([3.0])}, constants={"x": np.array([-2.0])}
    )
    assert np.isnan(undefined).all()  # (-2)^p is real at whole numbers alone


@pytest.mark.parametrize("op", ["Max", "Min", "Sum", "Mean", "Prod", "L2", "SumSquare"])
@pytest.mark.parametrize("axes", [None, np.zeros(0, I64)])
def test_a_reduction_over_no_axes(op: str, axes: np.ndarray | None) -> None:
    x = np.array([[1.0, -2.0], [3.0, 0.5]])
    inputs, constants = (["a"], {}) if axes is None else (["a", "x"], {"x": axes})
    made = node(f"Reduce{op}", inputs, ["y"], noop_with_empty_axes=1, keepdims=0)
    (found,) = gradients([made], {"a": x}, x, constants)
    slope = {"L2": np.sign(x), "SumSquare": 2 * x}.get(op, np.ones_like(x))
    np.testing.assert_allclose(found, slope * x, rtol=1e-6)


def test_products_with_zeros() -> None:
    x = np.array([[2.0, 3.0, 4.0], [2.0, 0.0, 4.0], [0.0, 0.0, 4.0]])
    made = node("ReduceProd", ["a", "x"], ["y"], keepdims=0)
    (found,) = gradients([made], {"a": x}, constants={"x": np.array([1])})
    np.testing.assert_array_equal(found, [[12, 8, 6], [0, 8, 0], [0, 0, 0]])
    scatter = node("ScatterElements", ["a", "i", "u"], ["y"], reduction="mul")
    by_data, by_updates = gradients(
        [scatter],
        {"a": np.array([5.0, 7.0, 9.0]), "u": np.array([0.0, 3.0, 0.0, 0.0, 2.0])},
        constants={"i": np.array([0, 0, 1, 1, 2])},
    )
    np.testing.assert_array_equal(by_data, [0, 0, 2])
    np.testing.assert_array_equal(by_updates, [15, 0, 0, 0, 9])


def test_norms_at_their_kink() -> None:
    zero = np.zeros((2, 3))
    (found,) = gradients([node("ReduceL2", ["a"], ["y"])], {"a": zero})
    np.testing.assert_array_equal(found, zero)
    for p in (1, 2):
        (found,) = gradients([node("LpNormalization", ["a"], ["y"], p=p)], {"a": zero})
        np.testing.assert_array_equal(found, zero)


def test_of_updates_that_meet_only_the_one_that_is_left_gets_a_gradient() -> None:
    made = node("ScatterND", ["a", "i", "u"], ["y"])
    by_data, by_updates = gradients(
        [made], {"a": np.ones(3), "u": np.array([1.0, 2.0, 3.0])}, [1.0, 2.0, 4.0],
        {"i": np.array([[1], [1], [2]])},
    )  # fmt: skip
    np.testing.assert_array_equal(by_data, [1, 0, 0])
    np.testing.assert_array_equal(by_updates, [0, 2, 4])
    share = gradients(
        [node("ScatterND", ["a", "i", "u"], ["y"], reduction="max")],
        {"a": np.array([5.0, 0.0]), "u": np.array([5.0, 5.0, 1.0])}, 3.0,
        {"i": np.array([[0], [0], [1]])},
    )  # fmt: skip
    np.testing.assert_array_equal(share[0], [1, 0])
    np.testing.assert_array_equal(share[1], [1, 1, 3])


def test_bounds_of_a_clip() -> None:
    x = np.array([-2.0, -1.0, 0.0, 1.0, 3.0])
    made = node("Clip", ["a", "b", "c"], ["y"])
    by_x, low, high = gradients(
        [made], {"a": x, "b": np.array(-1.0), "c": np.array(1.0)}, [1, 2, 4, 8, 16]
    )
    np.testing.assert_array_equal(by_x, [0, 2, 4, 8, 0])
    assert (low, high) == (1, 16)
    # Where the bounds are the wrong way round, all is the upper one.
    by_x, low, high = gradients([made], {"a": x, "b": np.array(1.0), "c": np.array(-1.0)})
    assert not by_x.any()
    assert (low, high) == (0, 5)


def test_levels_of_one_hot_and_steps_of_a_range() -> None:
    made = node("OneHot", ["i", "d", "a"], ["y"])
    (found,) = gradients(
        [made], {"a": np.array([0.5, 2.0])}, [[1, 2, 4], [8, 16, 32]],
        {"i": np.array([1, 7]), "d": np.array(3)},
    )  # fmt: skip
    np.testing.assert_array_equal(found, [61, 2])  # 7 is beyond the depth: all are off


@pytest.mark.parametrize(("steps", "joined"), [
    ((0, 1, 2, 3), True), ((3, -2, 1, 0), True), ((0, 1, 2, 3, 1), True), ((0, 2, 3), False),
    ((2,), False),
])  # fmt: skip
@pytest.mark.parametrize("axes", [0, 1])
def test_steps_that_are_picked_one_by_one(steps: Sequence[int], joined: bool, axes: int) -> None:
    """As loops over time are written out: `axes` of the index, and every step in one gradient."""
    nodes, constants = [], {}
    for at, step in enumerate(steps):
        constants[f"i{at}"] = np.full((1,) * axes, step)
        nodes += [
            node("Gather", ["a", f"i{at}"], [f"p{at}"], axis=1),
            node("Mul", [f"p{at}", f"f{at}"], [f"m{at}"]),
            node("ReduceSum", [f"m{at}"], [f"s{at}"], keepdims=0),
        ]
        constants[f"f{at}"] = np.array(float(at + 2))
    nodes.append(node("Sum", [f"s{at}" for at in range(len(steps))], ["y"]))
    params = {"a": np.ones((3, 4, 2))}
    expected = np.zeros((3, 4, 2))
    for at, step in enumerate(steps):
        expected[:, step] += at + 2
    (found,) = gradients(nodes, params, constants=constants)
    np.testing.assert_array_equal(found, expected)
    graphs = training_graphs(model_of(nodes, params, constants=constants), "mse", wrt=["a"])
    ops = {n.op_type for n in graphs.pullback.graph.node}
    assert "ScatterND" not in ops
    assert joined != ("Pad" in ops)


def test_an_axis_that_is_none_is_refused_before_anything_counts_up_to_it() -> None:
    nodes = [node("Gather", ["a", "i"], ["y"], axis=-(1 << 63))]
    model = model_of([node("Identity", ["a"], ["y"])], {"a": np.ones((3, 2))})
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    model.graph.initializer.append(numpy_helper.from_array(np.array([0, 1, 0]), "i"))
    with pytest.raises(AuthorError, match=r"its axis -9223372036854775808 is none of the 2 axes"):
        training_graphs(model, "mse", wrt=["a"])


CUTS = [  # of 6 rows; True: what is cut out are all rows, in pieces that do not overlap
    (((0, 2), (4, 6), (2, 4)), True),
    (((3, 9), (-6, 3)), True),
    (((0, 6),), False),
    (((0, 2), (2, 5)), False),
    (((0, 4), (2, 6)), False),
    (((0, 3), (3, 6), (0, 3)), True),
    (((0, 3), (3, 3), (3, 6)), False),
]


@pytest.mark.parametrize(("cuts", "once"), CUTS)
def test_slices_that_make_up_a_value(cuts: tuple[tuple[int, int], ...], once: bool) -> None:
    nodes, constants = [], {"axis": np.array([0])}
    factors = np.random.default_rng(0).integers(1, 9, (len(cuts), 6, 2)).astype(float)
    expected = np.full((6, 2), 0.5)
    for at, (first, last) in enumerate(cuts):
        own = slice(first, last)
        expected[own] += factors[at][own]
        constants |= {f"i{at}": np.array([first]), f"j{at}": np.array([last])}
        constants[f"f{at}"] = factors[at][own]
        nodes += [
            node("Slice", ["a", f"i{at}", f"j{at}", "axis"], [f"p{at}"]),
            node("Mul", [f"p{at}", f"f{at}"], [f"m{at}"]),
        ]
    nodes += [
        node("Concat", [f"m{at}" for at in range(len(cuts))], ["all"], axis=0),
        node("ReduceSum", ["all"], ["picked"], keepdims=0),
        node("Mul", ["a", "half"], ["halves"]),  # another contribution to the gradient
        node("ReduceSum", ["halves"], ["rest"], keepdims=0),
        node("Add", ["picked", "rest"], ["y"]),
    ]
    constants["half"] = np.array(0.5)
    params = {"a": np.ones((6, 2))}
    (found,) = gradients(nodes, params, constants=constants)
    np.testing.assert_array_equal(found, expected)
    graphs = training_graphs(model_of(nodes, params, constants=constants), "mse", wrt=["a"])
    pads = [n for n in graphs.pullback.graph.node if n.op_type == "Pad"]
    assert once != bool(pads)
    # ONNX Runtime moves a Transpose past a Pad of named axes, and mixes these up.
    assert all(len(n.input) == 3 for n in pads)


HALVES = [
    (node("Gather", ["a", "i"], ["y"]), {"i": np.array([1, 1, 0])}),
    (node("GatherElements", ["a", "i"], ["y"]), {"i": np.array([[1, 0], [1, 1]])}),
    (node("GatherND", ["a", "i"], ["y"]), {"i": np.array([[1], [1]])}),
    (node("Slice", ["a", "i", "j"], ["y"]), {"i": np.array([1]), "j": np.array([3])}),
    (node("Slice", ["a", "i", "j", "x", "s"], ["y"]),
     {"i": np.array([-1]), "j": np.array([-9]), "x": np.array([0]), "s": np.array([-2])}),
    (node("Tile", ["a", "i"], ["y"]), {"i": np.array([2, 1])}),
    (node("Pad", ["a", "i"], ["y"]), {"i": np.array([1, 0, 0, 1])}),
    (node("Pad", ["a", "i"], ["y"], mode="edge"), {"i": np.array([1, 0, 0, 1])}),
    (node("Expand", ["a", "i"], ["y"]), {"i": np.array([2, 3, 4])}),
    (node("TopK", ["a", "i"], ["y", "k"]), {"i": np.array([2])}),
    (node("CumSum", ["a", "i"], ["y"]), {"i": np.array(1)}),
    (node("Trilu", ["a"], ["y"]), {}),
    (node("ReduceMax", ["a", "i"], ["y"]), {"i": np.array([1])}),
    (node("ReduceProd", ["a", "i"], ["y"]), {"i": np.array([1])}),
    (node("ScatterND", ["a", "i", "u"], ["y"], reduction="none"),
     {"i": np.array([[2]]), "u": np.ones((1, 4), np.float32)}),
    (node("Max", ["a", "u"], ["y"]), {"u": np.full((3, 4), 0.8, np.float32)}),
    (node("Softmax", ["a"], ["y"]), {}),
    (node("LayerNormalization", ["a", "s"], ["y"]), {"s": np.ones(4, np.float32)}),
    (node("Mish", ["a"], ["y"]), {}),
    (node("HardSwish", ["a"], ["y"]), {}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("made", "constants"), HALVES, ids=[f"{i}-{made.op_type}" for i, (made, _) in enumerate(HALVES)]
)
def test_half_precision_between_float32(made: NodeProto, constants: dict[str, np.ndarray]) -> None:
    """Parameters are float32; the op runs in float16, as in a model with mixed precision."""
    inner = NodeProto()
    inner.CopyFrom(made)
    inner.input[0] = "h"
    inner.output[0] = "z"
    cast = [node("Cast", ["a"], ["h"], to=10), node("Cast", ["z"], ["y"], to=1)]
    halves = {name: array for name, array in constants.items() if array.dtype == np.float32}
    cast[1:1] = [node("Cast", [name], [f"{name}16"], to=10) for name in halves]
    for at, name in enumerate(inner.input):
        if name in halves:
            inner.input[at] = f"{name}16"
    x = np.random.default_rng(0).permutation(12).reshape(3, 4) / 8 + 0.25
    if made.op_type == "GatherElements":
        x = x[:2, :2]
    found = []
    for nodes in ([*cast[:-1], inner, cast[-1]], [made]):
        forward = model_of(nodes, {"a": x}, constants=constants, dtype=np.float32)
        graphs = training_graphs(forward, "mse", wrt=["a"])
        y = run_ort(graphs.forward, {"a": x.astype(np.float32)})["y"]
        seed = np.random.default_rng(1).integers(-4, 5, y.shape).astype(np.float32) / 4
        feeds = {"a": x.astype(np.float32), graphs.output_gradient_name: seed}
        found.append(run_ort(graphs.pullback, feeds)[graphs.gradient_names[0]])
    np.testing.assert_allclose(found[0], found[1], rtol=2e-2, atol=2e-2)


def test_the_reference_backend_picks_among_many_classes() -> None:
    forward = model_of(
        [node("MatMul", ["x", "w"], ["y"])], {"w": np.ones((3, 200))},
        inputs={"x": np.ones((4, 5, 3))}, dtype=np.float32,
    )  # fmt: skip
    graphs = training_graphs(forward, "softmax_cross_entropy")
    rng = np.random.default_rng(0)
    feeds = {
        "x": rng.normal(size=(4, 5, 3)).astype(np.float32),
        "w": rng.normal(size=(3, 200)).astype(np.float32),
        "labels": rng.integers(0, 200, (4, 5)),
    }
    backend = ReferenceBackend(ReferenceBackendConfig())
    found, expected = backend.execute(graphs.gradients, feeds), run_ort(graphs.gradients, feeds)
    for name in ("loss", *graphs.gradient_names):
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-4, atol=1e-6)


def test_types_go_on_behind_ops_that_onnx_does_not_infer() -> None:
    """A Conv's gradient wants sizes, which ONNX does not infer behind GroupNormalization."""
    rng = np.random.default_rng(0)
    params = {
        "k": rng.normal(size=(4, 2, 3, 3)), "s": np.ones(4), "b": np.zeros(4),
        "k2": rng.normal(size=(2, 4, 2, 2)), "w": rng.normal(size=(8, 3)),
    }  # fmt: skip
    nodes = [
        node("Conv", ["x", "k"], ["h1"]),
        node("GroupNormalization", ["h1", "s", "b"], ["h2"], num_groups=2),
        node("MeanVarianceNormalization", ["h2"], ["h3"]),
        node("Conv", ["h3", "k2"], ["h4"], strides=[2, 2]),
        node("Flatten", ["h4"], ["h5"]),
        node("MatMul", ["h5", "w"], ["y"]),
    ]
    x = rng.normal(size=(5, 2, 6, 6))
    forward = model_of(nodes, params, inputs={"x": x}, dtype=np.float32, dims=["batch", 3])
    forward.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "batch"
    graphs = training_graphs(forward, "mse")
    labels = rng.normal(size=(5, 3))
    feeds = {n: a.astype(np.float32) for n, a in {**params, "x": x, "labels": labels}.items()}
    found = run_ort(graphs.gradients, feeds)
    for name, grad in zip(graphs.parameter_names, graphs.gradient_names, strict=True):
        along = rng.normal(size=params[name].shape).astype(np.float32)
        step = np.float32(1e-3 / np.sqrt(along.size))
        up, down = (
            run_ort(graphs.loss, {**feeds, name: feeds[name] + sign * step * along})["loss"]
            for sign in (np.float32(1), np.float32(-1))
        )
        expected = (np.float64(up) - np.float64(down)) / (2 * step)
        assert np.sum(found[grad] * along) == pytest.approx(expected, rel=3e-2, abs=3e-2)


def node_case(made: NodeProto, inputs: dict[str, np.ndarray], **outputs: np.ndarray) -> NodeCase:
    floats = {n: a.astype(np.float32) if a.dtype == np.float64 else a for n, a in inputs.items()}
    return NodeCase(made.op_type, made, 21, floats, outputs)


@pytest.mark.parametrize("shape", [(5, 3), (2, 3, 2, 2)])
def test_batch_normalization_by_the_statistics_of_the_batch(shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    made = node("BatchNormalization", [*"asbmv"], ["y", "m1", "v1"], training_mode=1)
    channel = dict.fromkeys("sbmv", rng.uniform(0.5, 1.5, 3))
    x = rng.normal(size=shape)
    case = node_case(made, {"a": x, **channel}, y=x, m1=np.ones(3), v1=np.ones(3))
    assert check_node_case(case) == {"float64", "float32", "float16"}
    model = model_in(case, np.float32, symbolic=False)
    with pytest.raises(GradientRuleError, match="running statistics have no gradient"):
        gradient_of(model, {"m1": "seed"}, ["a"], case)


def test_dropout_goes_by_its_mask() -> None:
    x = np.linspace(-1, 1, 40).astype(np.float32)
    for training in (True, False):
        made = node("Dropout", ["a", "r", "t"], ["y", "k"], seed=7)
        inputs = {"a": x, "r": np.array(0.25), "t": np.array(training)}
        case = node_case(made, inputs, y=x, k=np.zeros(40, bool))
        model, (grad,) = gradient_of(model_in(case, np.float32, False), {"y": "g"}, ["a"], case)
        for name in ("y", "k"):
            kind = 1 if name == "y" else 9
            model.graph.output.append(helper.make_tensor_value_info(name, kind, [40]))
        got = run_ort(model, {**case.inputs, "g": np.ones(40, np.float32)})
        np.testing.assert_allclose(got["y"], x * got[grad], rtol=1e-6)
        np.testing.assert_allclose(got[grad], got["k"] / (0.75 if training else 1), rtol=1e-6)
        assert got["k"].all() != training
    bare = node_case(node("Dropout", ["a", "", "t"], ["y"]), {"a": x, "t": np.array(True)}, y=x)
    with pytest.raises(GradientRuleError, match="the mask"):
        gradient_of(model_in(bare, np.float32, False), {"y": "g"}, ["a"], bare)


@pytest.mark.parametrize("op", ["InstanceNormalization", "BatchNormalization"])
def test_an_empty_batch_gives_zeros(op: str) -> None:
    channel = {name: np.ones(4) for name in ("sb" if op[0] == "I" else "sbmv")}
    x = np.ones((0, 4, 3))
    case = node_case(node(op, ["a", *channel], ["y"]), {"a": x, **channel}, y=x)
    wrt = ["a", "s", "b"]
    model, names = gradient_of(model_in(case, np.float32, True), {"y": "g"}, wrt, case)
    got = run_ort(model, {**case.inputs, "g": x.astype(np.float32)})
    assert got[names[0]].shape == (0, 4, 3)
    for name in names[1:]:
        np.testing.assert_array_equal(got[name], np.zeros(4))


REDUCTIONS = ("L1", "L2", "LogSumExp", "Max", "Mean", "Min", "Prod", "Sum", "SumSquare")


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.data())
def test_reductions_of_any_shape_and_axes(data) -> None:
    shape = data.draw(st.lists(st.integers(1, 3), max_size=4).map(tuple))
    axes = data.draw(st.none() | st.sets(st.integers(0, len(shape) - 1) if shape else st.nothing()))
    settings_ = {
        "keepdims": data.draw(st.integers(0, 1)),
        "noop_with_empty_axes": data.draw(st.integers(0, 1)),
    }
    inputs = {"a": np.random.default_rng(0).normal(size=shape)}
    if axes is not None:
        from_end = data.draw(st.booleans())
        inputs["x"] = np.array([a - len(shape) * from_end for a in sorted(axes)], I64)
    made = node(f"Reduce{data.draw(st.sampled_from(REDUCTIONS))}", [*inputs], ["y"], **settings_)
    case = node_case(made, inputs, y=np.ones(1))
    y = run_ort(model_in(case, np.float32, False), case.inputs)["y"]
    case.outputs["y"] = y
    assert "float32" in check_node_case(case, symbolic=data.draw(st.booleans()))


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    reduction=st.sampled_from(["none", "add", "mul", "min", "max"]), batch=st.integers(0, 2),
    rows=st.integers(1, 4), width=st.integers(1, 3), depth=st.integers(1, 2),
    symbolic=st.booleans(), seed=st.integers(0, 99),
)  # fmt: skip
def test_scatters_of_any_shape(reduction, batch, rows, width, depth, symbolic, seed) -> None:
    rng = np.random.default_rng(seed)
    shape = (rows, width, 2)
    which = rng.integers(-shape[0], shape[0], (batch, 3, 1))
    if depth == 2:
        which = np.concatenate([which, rng.integers(0, width, (batch, 3, 1))], axis=2)
    updates = rng.normal(size=(batch, 3, *shape[depth:]))
    made = node("ScatterND", ["a", "i", "u"], ["y"], reduction=reduction)
    inputs = {"a": rng.normal(size=shape), "i": which, "u": updates}
    check_node_case(node_case(made, inputs, y=inputs["a"]), symbolic)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    op=st.sampled_from(["InstanceNormalization", "BatchNormalization", "LpNormalization"]),
    shape=st.tuples(st.integers(2, 3), st.integers(1, 3), st.integers(2, 4), st.integers(1, 2)),
    symbolic=st.booleans(), training=st.booleans(),
)  # fmt: skip
def test_normalizations_of_any_shape(op, shape, symbolic, training) -> None:
    rng = np.random.default_rng(0)
    names = {"I": "sb", "B": "sbmv", "L": ""}[op[0]]
    inputs = {"a": rng.normal(size=shape), **{n: rng.uniform(0.5, 2, shape[1]) for n in names}}
    outputs = {"y": inputs["a"]}
    more = {}
    if op == "BatchNormalization" and training:
        outputs |= {"m1": inputs["m"], "v1": inputs["v"]}
        more["training_mode"] = 1
    case = node_case(node(op, [*inputs], [*outputs], **more), inputs, **outputs)
    assert "float64" in check_node_case(case, symbolic)
