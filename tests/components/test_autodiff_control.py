"""Gradients through If, Scan and Loop, against central finite differences in float64."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import GraphProto, NodeProto, TensorProto, helper
from onnx.helper import make_node as node

from bbnode.components.autodiff import GradientRuleError, UnsupportedGradient, training_graphs
from tests.components.graphs import (
    check,
    model_of,
    numeric_gradient,
    run_ort,
    run_reference,
)

DOUBLE, I64, BOOL = TensorProto.DOUBLE, TensorProto.INT64, TensorProto.BOOL


def port(name: str, *dims: int | str | None, elem: int = DOUBLE) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, elem, list(dims))


def untyped(name: str) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, DOUBLE, None)


def graph(nodes: list[NodeProto], inputs, outputs, tensors=()) -> GraphProto:
    return helper.make_graph(nodes, "body", inputs, outputs, list(tensors))


def values(rng: np.random.Generator, **shapes: tuple[int, ...]) -> dict[str, np.ndarray]:
    return {name: np.asarray(rng.uniform(0.3, 1.2, shape)) for name, shape in shapes.items()}


def agree(nodes, params, constants=None, inputs=None, ort=True, **options) -> dict:
    """Check the gradients of all `params`; returns them."""
    forward = model_of(nodes, params, constants=constants, inputs=inputs, **options)
    graphs = training_graphs(forward, "mse", wrt=list(params))
    for each in (graphs.pullback, graphs.gradients, graphs.train_step, graphs.forward):
        check(each)
    feeds = {**params, **(inputs or {})}
    y = run_reference(graphs.forward, feeds)[graphs.output_name]
    cotangent = np.random.default_rng(1).normal(size=np.shape(y))
    every = {**feeds, graphs.output_gradient_name: cotangent}
    exact = run_reference(graphs.pullback, every)
    fast = run_ort(graphs.pullback, every) if ort else exact
    for name, gradient in zip(graphs.parameter_names, graphs.gradient_names, strict=True):
        wanted = numeric_gradient(graphs.forward, feeds, name, graphs.output_name, cotangent)
        assert exact[gradient].shape == params[name].shape
        np.testing.assert_allclose(exact[gradient], wanted, rtol=1e-6, atol=1e-7)
        np.testing.assert_allclose(fast[gradient], wanted, rtol=1e-6, atol=1e-7)
    by_loss = {**feeds, graphs.labels_name: y - cotangent * y.size / 2}
    for name, found in run_ort(graphs.gradients, by_loss).items():
        if name in exact:
            np.testing.assert_allclose(found, exact[name], rtol=1e-6, atol=1e-7)
    return exact


def branches(then: GraphProto, otherwise: GraphProto, condition: str = "c", outputs=("y",)):
    return node("If", [condition], list(outputs), then_branch=then, else_branch=otherwise)


@pytest.mark.parametrize("taken", [True, False])
def test_weights_read_in_a_branch_get_their_gradient(taken: bool) -> None:
    rng = np.random.default_rng(0)
    # Both branches use names that the other has too, and one of them a constant of its own.
    then = graph(
        [node("MatMul", ["a", "w"], ["h"]), node("Mul", ["h", "two"], ["k"]),
         node("Tanh", ["k"], ["o"])],
        [], [port("o", 2, 3)], [onnx.numpy_helper.from_array(np.array(2.0), "two")],
    )  # fmt: skip
    otherwise = graph(
        [node("MatMul", ["a", "v"], ["h"]), node("Add", ["h", "a3"], ["o"])],
        [], [port("o", 2, 3)],
    )  # fmt: skip
    params = values(rng, a=(2, 4), w=(4, 3), v=(4, 3), a3=(3,))
    found = agree([branches(then, otherwise)], params, {"c": np.array(taken)})
    silent = "grad/v" if taken else "grad/w"
    assert not found[silent].any()


def test_nested_branches_and_several_outputs() -> None:
    rng = np.random.default_rng(0)
    inner = branches(
        graph([node("Mul", ["p", "w"], ["o"])], [], [port("o", 3)]),
        graph([node("Add", ["p", "v"], ["o"])], [], [port("o", 3)]),
        "d",
        ["q"],
    )
    then = graph(
        [node("Exp", ["a"], ["p"]), inner, node("Sum", ["q", "a"], ["r"])], [],
        [port("r", 3), port("q", 3)],
    )  # fmt: skip
    otherwise = graph(
        [node("Identity", ["a"], ["r"]), node("Neg", ["w"], ["q"])], [],
        [port("r", 3), port("q", 3)],
    )  # fmt: skip
    nodes = [branches(then, otherwise, outputs=["one", "two"]), node("Mul", ["one", "two"], ["y"])]
    params = values(rng, a=(3,), w=(3,), v=(3,))
    for outer in (True, False):
        for nested in (True, False):
            agree(nodes, params, {"c": np.array(outer), "d": np.array(nested)})


def test_by_default_weights_that_only_a_branch_reads_are_trained() -> None:
    then = graph([node("Mul", ["x", "w"], ["o"])], [], [port("o", 3)])
    otherwise = graph([node("Identity", ["x"], ["o"])], [], [port("o", 3)])
    forward = model_of(
        [branches(then, otherwise)], {"w": np.ones(3)}, inputs={"x": np.ones(3)},
        constants={"c": np.array(True)},
    )  # fmt: skip
    assert training_graphs(forward, "mse").parameter_names == ("w",)


def test_an_op_without_a_rule_in_a_branch_is_refused_by_its_name() -> None:
    then = graph([node("Det", ["w"], ["o"], name="inner")], [], [port("o")])
    otherwise = graph([node("ReduceSum", ["w"], ["o"], keepdims=0)], [], [port("o")])
    forward = model_of([branches(then, otherwise)], {"w": np.eye(2)},
                       constants={"c": np.array(True)})  # fmt: skip
    with pytest.raises(UnsupportedGradient, match=r"inner.*Det"):
        training_graphs(forward, "mse")


def recurrence(carried: tuple, sliced: tuple) -> GraphProto:
    """h' = tanh(h w + x v), and a value of each step that is used outside."""
    return graph(
        [node("MatMul", ["h", "w"], ["hw"]), node("MatMul", ["x", "v"], ["xv"]),
         node("Add", ["hw", "xv"], ["pre"]), node("Tanh", ["pre"], ["h2"]),
         node("Mul", ["h2", "h"], ["z"])],
        [port("h", *carried), port("x", *sliced)], [port("h2", *carried), port("z", *carried)],
    )  # fmt: skip


@pytest.mark.parametrize(
    ("axis", "way", "out_axis", "out_way"), [(0, 0, 0, 0), (1, 1, 0, 1), (-1, 0, 2, 1)]
)
def test_scan_with_its_axes_and_directions(axis, way, out_axis, out_way) -> None:
    rng = np.random.default_rng(0)
    params = values(rng, h0=(2, 3), w=(3, 3), v=(4, 3), s=(2, 3))
    params["xs"] = np.moveaxis(rng.normal(size=(5, 2, 4)), 0, axis)
    scan = node(
        "Scan", ["h0", "xs"], ["hT", "zs"], body=recurrence((2, 3), (2, 4)), num_scan_inputs=1,
        scan_input_axes=[axis], scan_input_directions=[way], scan_output_axes=[out_axis],
        scan_output_directions=[out_way],
    )  # fmt: skip
    steps = {"where": np.array([out_axis], np.int64)}
    both = [
        scan, node("Mul", ["zs", "zs"], ["zz"]),
        node("ReduceSum", ["zz", "where"], ["z2"], keepdims=0), node("Add", ["z2", "hT"], ["y"]),
    ]  # fmt: skip
    agree(both, {name: params[name] for name in ("h0", "w", "v", "xs")}, steps)
    agree([scan, node("Mul", ["hT", "s"], ["y"])], params)  # only the final state
    agree([scan, node("Exp", ["zs"], ["y"])], params)  # only the steps


def test_scan_over_symbolic_sizes() -> None:
    rng = np.random.default_rng(0)
    params = values(rng, w=(3, 3), v=(4, 3), b=(1, 3))
    body = graph(
        [node("MatMul", ["h", "w"], ["hw"]), node("MatMul", ["x", "v"], ["xv"]),
         node("Sum", ["hw", "xv", "b"], ["pre"]), node("Sigmoid", ["pre"], ["h2"]),
         node("Identity", ["h2"], ["z"])],
        [port("h", "n", 3), port("x", "n", 4)], [port("h2", "n", 3), port("z", "n", 3)],
    )  # fmt: skip
    scan = node("Scan", ["h0", "xs"], ["hT", "zs"], body=body, num_scan_inputs=1)
    nodes = [scan, node("Add", ["hT", "zs"], ["y"])]
    for batch in (1, 2):  # no axis is stretched, and one may be
        inputs = {"h0": rng.normal(size=(batch, 3)), "xs": rng.normal(size=(3, batch, 4))}
        agree(nodes, params, inputs=inputs, symbolic=True)


def counted(nodes: list[NodeProto], outputs, condition="go", tensors=(), state=("h", 3)):
    """The body of a Loop over one state."""
    return graph(
        nodes,
        [port("i", elem=I64), port("go", elem=BOOL), port(*state)],
        [port(condition, elem=BOOL), *outputs],
        tensors,
    )


@pytest.mark.parametrize("trips", [0, 1, 4])
def test_loop_of_so_many_trips(trips: int) -> None:
    rng = np.random.default_rng(0)
    body = counted(
        [node("Cast", ["i"], ["f"], to=DOUBLE), node("Mul", ["h", "w"], ["k"]),
         node("Add", ["k", "f"], ["l"]), node("Sin", ["l"], ["h2"]),
         node("Mul", ["h2", "v"], ["z"]), node("Identity", ["go"], ["go2"])],
        [port("h2", 3), port("z", 3)], "go2",
    )  # fmt: skip
    loop = node("Loop", ["m", "", "h0"], ["hT", "zs"], body=body)
    nodes = [loop, node("ReduceSum", ["zs", "first"], ["s"], keepdims=0),
             node("Mul", ["s", "hT"], ["p"]), node("Add", ["p", "hT"], ["y"])]  # fmt: skip
    constants = {"m": np.array(trips, np.int64), "first": np.array([0], np.int64)}
    agree(nodes, values(rng, h0=(3,), w=(3,), v=(3,)), constants, dims=[3])


def test_loop_that_ends_when_its_condition_says() -> None:
    rng = np.random.default_rng(0)
    body = counted(
        [node("Mul", ["h", "w"], ["h2"]), node("ReduceSum", ["h2"], ["all"], keepdims=0),
         node("Less", ["all", "limit"], ["more"])],
        [port("h2", 3)], "more",
    )  # fmt: skip
    params = {"h0": rng.uniform(0.5, 1, 3), "w": rng.uniform(1.2, 1.5, 3)}
    nodes = [node("Loop", ["", "yes", "h0"], ["y"], body=body)]
    for limit in (0.1, 5.0, 40.0):
        constants = {"yes": np.array(True), "limit": np.array(limit)}
        found = agree(nodes, params, constants, dims=[3])
        steps, h = 1, params["h0"] * params["w"]
        while h.sum() < limit:
            steps, h = steps + 1, h * params["w"]
        cotangent = np.random.default_rng(1).normal(size=3)
        np.testing.assert_allclose(found["grad/h0"], cotangent * params["w"] ** steps)
    never = {"yes": np.array(False), "limit": np.array(1.0)}
    assert not agree(nodes, params, never, dims=[3])["grad/w"].any()


def test_a_scan_in_a_branch_in_a_loop() -> None:
    rng = np.random.default_rng(0)
    steps = graph(
        [node("Mul", ["s", "w"], ["sw"]), node("Add", ["sw", "x"], ["s2"]),
         node("Mul", ["s2", "h"], ["z"])],
        [port("s", 3), port("x", 3)], [port("s2", 3), port("z", 3)],
    )  # fmt: skip
    inner = node("Scan", ["h", "xs"], ["sT", "zs"], body=steps, num_scan_inputs=1)
    then = graph(
        [inner, node("ReduceMean", ["zs", "first"], ["mean"], keepdims=0),
         node("Add", ["mean", "sT"], ["o"])], [], [port("o", 3)],
    )  # fmt: skip
    otherwise = graph([node("Mul", ["h", "v"], ["o"])], [], [port("o", 3)])
    body = counted(
        [node("Mod", ["i", "two"], ["odd"]), node("Cast", ["odd"], ["c"], to=BOOL),
         branches(then, otherwise, outputs=["h2"]), node("Tanh", ["h2"], ["h3"]),
         node("Identity", ["go"], ["go2"])],
        [port("h3", 3)], "go2",
    )  # fmt: skip
    nodes = [node("Loop", ["m", "", "h0"], ["y"], body=body)]
    constants = {"m": np.array(3, np.int64), "first": np.array([0], np.int64),
                 "two": np.array(2, np.int64)}  # fmt: skip
    agree(nodes, values(rng, h0=(3,), w=(3,), v=(3,), xs=(4, 3)), constants, dims=[3])


def test_a_loop_in_a_scan() -> None:
    rng = np.random.default_rng(0)
    inner = counted(
        [node("Mul", ["h", "w"], ["k"]), node("Add", ["k", "x"], ["h2"]),
         node("Identity", ["go"], ["go2"])],
        [port("h2", 3)], "go2",
    )  # fmt: skip
    body = graph(
        [node("Loop", ["m", "", "s"], ["l"], body=inner), node("Sin", ["l"], ["s2"]),
         node("Mul", ["l", "s"], ["z"])],
        [port("s", 3), port("x", 3)], [port("s2", 3), port("z", 3)],
    )  # fmt: skip
    nodes = [node("Scan", ["h0", "xs"], ["sT", "zs"], body=body, num_scan_inputs=1),
             node("Mul", ["zs", "sT"], ["y"])]  # fmt: skip
    params = values(rng, h0=(3,), w=(3,), xs=(2, 3))
    for trips in (0, 2):
        agree(nodes, params, {"m": np.array(trips, np.int64)})


def test_a_state_that_is_handed_on_as_it_is_and_one_that_is_no_number_to_train() -> None:
    rng = np.random.default_rng(0)
    body = graph(
        [node("Mul", ["a", "b"], ["z"]), node("Add", ["n", "one"], ["n2"])],
        [port("i", elem=I64), port("go", elem=BOOL), port("a", 3), port("b", 3),
         port("n", elem=I64)],
        [port("go", elem=BOOL), port("b", 3), port("a", 3), port("n2", elem=I64), port("z", 3),
         port("z", 3)],
        [onnx.numpy_helper.from_array(np.array(1, np.int64), "one")],
    )  # fmt: skip
    loop = node("Loop", ["m", "", "a0", "b0", "n0"], ["aT", "bT", "nT", "zs", "z2"], body=body)
    nodes = [loop, node("Cast", ["nT"], ["n"], to=DOUBLE), node("Mul", ["aT", "n"], ["an"]),
             node("Sum", ["an", "zs", "z2"], ["y"])]  # fmt: skip
    constants = {"m": np.array(3, np.int64), "n0": np.array(2, np.int64)}
    agree(nodes, values(rng, a0=(3,), b0=(3,)), constants, dims=[None, 3])


def test_a_loop_that_changes_the_rank_of_its_state_is_refused() -> None:
    body = counted(
        [node("Unsqueeze", ["h", "axes"], ["u"]), node("Mul", ["u", "w"], ["h2"])],
        [untyped("h2")], state=("h", 3), tensors=[
            onnx.numpy_helper.from_array(np.array([0], np.int64), "axes")],
    )  # fmt: skip
    body.input[2].CopyFrom(untyped("h"))
    forward = model_of([node("Loop", ["m", "", "h0"], ["r"], body=body),
                        node("ReduceSum", ["r"], ["y"], keepdims=0)],
                       {"h0": np.ones(3), "w": np.ones(3)},
                       constants={"m": np.array(2, np.int64)}, dims=[])  # fmt: skip
    with pytest.raises(GradientRuleError, match="rank"):
        training_graphs(forward, "mse", wrt=["w"])
