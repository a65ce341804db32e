"""Values that are known before a graph runs: the bits that ONNX Runtime computes, or left alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import NodeProto, TensorProto, helper, numpy_helper
from onnx.helper import make_node as node

from bbnode.components.autodiff import training_graphs
from bbnode.components.autodiff.builder import InferredType
from bbnode.components.autodiff.folding import folded, shared
from tests.components.fakes import ort
from tests.components.graphs import model_of

RNG = np.random.default_rng(0)
ROW = RNG.normal(size=(1, 5)).astype(np.float32)
INTS = np.asarray([3, 4, 5, -7])
WIDE = {"x": InferredType(TensorProto.FLOAT, ("batch", 3, 5))}

# What is folded, with what it reads.
KNOWN: dict[str, tuple[NodeProto, list[Any]]] = {
    "constant": (node("Constant", [], ["y"], value_ints=[1, 2]), []),
    "one constant": (node("Constant", [], ["y"], value_float=0.1), []),
    "tensor": (node("Constant", [], ["y"], value=numpy_helper.from_array(ROW)), []),
    "shape": (node("Shape", ["a"], ["y"]), [ROW]),
    "end of a shape": (node("Shape", ["a"], ["y"], start=-1), [ROW]),
    "middle of a shape": (node("Shape", ["a"], ["y"], start=1, end=9), [ROW]),
    "size": (node("Size", ["a"], ["y"]), [ROW]),
    "cast": (node("Cast", ["a"], ["y"], to=TensorProto.FLOAT), [INTS]),
    "cast of doubles": (node("Cast", ["a"], ["y"], to=TensorProto.FLOAT), [RNG.normal(size=50)]),
    "cast like": (node("CastLike", ["a", "b"], ["y"]), [INTS, ROW]),
    "expand": (node("Expand", ["a", "b"], ["y"]), [ROW, np.asarray([2, 3, 1])]),
    "reshape": (node("Reshape", ["a", "b"], ["y"]), [ROW, np.asarray([5, -1])]),
    "squeeze": (node("Squeeze", ["a", "b"], ["y"]), [ROW, np.asarray([0])]),
    "unsqueeze": (node("Unsqueeze", ["a", "b"], ["y"]), [ROW, np.asarray([-1, 0])]),
    "concat": (node("Concat", ["a", "a"], ["y"], axis=-1), [ROW]),
    "gather": (node("Gather", ["a", "b"], ["y"]), [INTS, np.asarray([[0, -1]])]),
    "add": (node("Add", ["a", "b"], ["y"]), [ROW, ROW.T]),
    "sub": (node("Sub", ["a", "b"], ["y"]), [INTS, INTS[::-1].copy()]),
    "mul": (node("Mul", ["a", "b"], ["y"]), [ROW, ROW.T]),
    "div": (node("Div", ["a", "b"], ["y"]), [ROW, np.zeros((2, 1), np.float32)]),
    "neg": (node("Neg", ["a"], ["y"]), [ROW * 0]),
    "sqrt": (node("Sqrt", ["a"], ["y"]), [ROW]),
    "identity": (node("Identity", ["a"], ["y"]), [np.asarray([True])]),
}  # fmt: skip

# What is left alone.
LEFT: dict[str, tuple[NodeProto, list[Any]]] = {
    "whole numbers divided": (node("Div", ["a", "a"], ["y"]), [INTS]),
    "half": (node("Add", ["a", "a"], ["y"]), [ROW.astype(np.float16)]),
    "cast to whole numbers": (node("Cast", ["a"], ["y"], to=TensorProto.INT64), [ROW]),
    "a copied size": (node("Reshape", ["a", "b"], ["y"]), [ROW, np.asarray([0, 5])]),
    "shapes that do not fit": (node("Add", ["a", "b"], ["y"]), [ROW, INTS.astype(np.float32)]),
    "a shape that does not fit": (node("Expand", ["a", "b"], ["y"]), [ROW, np.asarray([4])]),
    "an index beyond": (node("Gather", ["a", "b"], ["y"]), [INTS, np.asarray([4])]),
    "much": (node("Expand", ["a", "b"], ["y"]), [ROW, np.asarray([4000, 5])]),
    "an open size": (node("Shape", ["x"], ["y"]), []),
    "all sizes of an open shape": (node("Size", ["x"], ["y"]), []),
    "the values of an input": (node("Add", ["x", "a"], ["y"]), [ROW]),
    "any other op": (node("Cos", ["a"], ["y"]), [ROW]),
    "another domain": (node("Add", ["a", "a"], ["y"], domain="com.example"), [ROW]),
}  # fmt: skip


def fold(made: NodeProto, values: list[Any], outputs: tuple[str, ...] = ("z",)) -> Any:
    tensors = [numpy_helper.from_array(v, n) for n, v in zip("ab", values, strict=False)]
    end = node("Identity", ["y"], ["z"])
    nodes, kept = folded([made, end], tensors, outputs, WIDE)
    return nodes, {tensor.name: numpy_helper.to_array(tensor) for tensor in kept}


@pytest.mark.parametrize("name", KNOWN)
def test_what_is_known_has_the_bits_of_the_runtime(name: str) -> None:
    made, values = KNOWN[name]
    nodes, kept = fold(made, values)
    assert [each.op_type for each in nodes] == ["Identity"]
    assert list(kept) == ["y"]
    names = "ab"[: len(values)]
    graph = helper.make_graph(
        [made], "g",
        [helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(v.dtype), v.shape)
         for n, v in zip(names, values, strict=True)],
        [helper.make_tensor_value_info(
            "y", helper.np_dtype_to_tensor_dtype(kept["y"].dtype), None)],
    )  # fmt: skip
    model = helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 21)])
    (expected,) = map(np.asarray, ort().prepare(model).run(values))
    assert (kept["y"].dtype, kept["y"].shape) == (expected.dtype, expected.shape)
    nans = np.isnan(expected) if expected.dtype.kind == "f" else np.zeros(expected.shape, bool)
    assert kept["y"][~nans].tobytes() == expected[~nans].tobytes()  # a NaN may have any sign
    assert nans.tolist() == (kept["y"] != kept["y"]).tolist()


@pytest.mark.parametrize("name", LEFT)
def test_what_a_runtime_may_do_otherwise_is_left_alone(name: str) -> None:
    made, values = LEFT[name]
    nodes, kept = fold(made, values)
    assert nodes[0] == made
    assert "y" not in kept


def test_sizes_that_are_known_of_an_open_shape_are_read() -> None:
    nodes, kept = fold(node("Shape", ["x"], ["y"], start=1), [])
    assert len(nodes) == 1
    np.testing.assert_array_equal(kept["y"], [3, 5])


def test_an_output_is_made_by_a_node() -> None:
    made, values = KNOWN["add"]
    nodes, _ = fold(made, values, ("y",))
    assert nodes[0] == made


def test_a_bias_of_zeros_that_an_exporter_computes_goes_and_nothing_else_changes() -> None:
    tensors = {"w": RNG.normal(size=(4, 3, 3, 3)), "v": RNG.normal(size=(4,))}

    def graphs(bias: float) -> Any:
        nodes = [
            node("Shape", ["w"], ["count"], start=0, end=1),
            node("Constant", [], ["zero"], value_float=bias),
            node("CastLike", ["zero", "x"], ["cast"]),
            node("Expand", ["cast", "count"], ["bias"]),
            node("Conv", ["x", "w", "bias"], ["h"], pads=[1, 1, 1, 1]),
            node("ReduceSum", ["h", "axes"], ["s"], keepdims=0),
            node("Mul", ["s", "v"], ["y"]),
        ]
        inputs = {"x": np.zeros((2, 3, 5, 5), np.float32)}
        model = model_of(nodes, tensors, inputs=inputs, dtype=np.float32, symbolic=True,
                         constants={"axes": np.asarray([2, 3])})  # fmt: skip
        return training_graphs(model, "mse")

    x, target = (RNG.normal(size=s).astype(np.float32) for s in ((2, 3, 5, 5), (2, 4)))
    feeds = [tensors["w"].astype(np.float32), tensors["v"].astype(np.float32), x]
    without, with_one = graphs(0.0), graphs(1.0)
    assert [n.op_type for n in without.forward.graph.node] == ["Conv", "ReduceSum", "Mul"]
    assert len(without.forward.graph.node[0].input) == 2
    assert len(with_one.forward.graph.node[0].input) == 3
    zero, one = (np.asarray(ort().prepare(g.forward).run(feeds)[0]) for g in (without, with_one))
    np.testing.assert_allclose(one - zero, np.broadcast_to(25 * feeds[1], (2, 4)), atol=1e-4)
    loss, *grads = ort().prepare(without.gradients).run([*feeds, target])
    np.testing.assert_allclose(loss, np.mean((zero - target) ** 2), rtol=1e-5)
    assert all(np.abs(np.asarray(grad)).max() > 0 for grad in grads)


def test_nothing_is_there_twice_and_nothing_is_a_mere_copy() -> None:
    inner = helper.make_graph(
        [node("Add", ["seen", "x"], ["t"])],
        "then",
        [],
        [helper.make_tensor_value_info("t", 1, None)],
    )
    nodes = [
        node("Identity", ["x"], ["x2"]),
        node("Relu", ["x2"], ["one"]),
        node("Relu", ["x"], ["two"]),
        node("Cos", ["x"], ["seen"]),
        node("Cos", ["x"], ["other"]),
        node("If", ["c"], ["branch"], then_branch=inner, else_branch=inner),
        node("Elu", ["x"], ["a"], alpha=1.0),
        node("Elu", ["x"], ["b"], alpha=2.0),
        node("RandomNormalLike", ["x"], ["r1"]),
        node("RandomNormalLike", ["x"], ["r2"]),
        node("Add", ["one", "c1"], ["p"]),
        node("Add", ["two", "c2"], ["q"]),
        node("Sum", ["p", "q", "other", "branch", "a", "b", "r1", "r2"], ["s"]),
        node("Identity", ["s"], ["y"]),
        node("Identity", ["s"], ["z"]),
        node("Identity", ["x"], ["again"]),
    ]
    tensors = [numpy_helper.from_array(ROW, name) for name in ("c1", "c2")]
    found, kept = shared(nodes, tensors, ["y", "z", "again"])
    assert [each.op_type for each in found] == [
        "Relu", "Cos", "Cos", "If", "Elu", "Elu", "RandomNormalLike", "RandomNormalLike",
        "Add", "Sum", "Identity", "Identity",
    ]  # fmt: skip
    assert [tensor.name for tensor in kept] == ["c1"]
    assert [*found[9].input] == ["p", "p", "other", "branch", "a", "b", "r1", "r2"]
    assert [*found[9].output] == ["y"]
    assert [(*each.input, *each.output) for each in found[10:]] == [("y", "z"), ("x", "again")]
    assert nodes[-3].input[0] == "s"  # what was given is as it was
