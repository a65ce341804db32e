"""Every rule of the table against central finite differences.

The gradient graph runs in float64 in ONNX's reference evaluator (tight bound), and in float32
in ONNX Runtime (what the node uses), which has to agree.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import mutually_broadcastable_shapes
from onnx import NodeProto
from onnx.helper import make_node as node

from bbnode.components.autodiff import supported_ops, training_graphs
from tests.components.graphs import check, model_of, numeric_gradient, run_ort, run_reference

I64 = np.int64


def ints(*values: int) -> np.ndarray:
    return np.array(values, dtype=I64)


@dataclass(frozen=True)
class Case:
    op: str
    nodes: list[NodeProto]
    params: Mapping[str, tuple[int, ...]]
    constants: Mapping[str, np.ndarray] = field(default_factory=dict)
    positive: bool = False
    inputs: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    symbolic: bool = False

    @property
    def coarse(self) -> bool:
        """ONNX's reference Erf computes in float32 whatever it is given."""
        return any(
            n.op_type == "Erf" or (n.op_type == "Gelu" and not n.attribute) for n in self.nodes
        )


def unary(op: str, positive: bool = False, **attributes: object) -> Case:
    return Case(op, [node(op, ["a"], ["y"], **attributes)], {"a": (2, 3)}, positive=positive)


def binary(op: str, left: tuple[int, ...], right: tuple[int, ...], **attributes: object) -> Case:
    nodes = [node(op, ["a", "b"], ["y"], **attributes)]
    return Case(op, nodes, {"a": left, "b": right}, positive=op == "Div")


def shaped(op: str, shape: tuple[int, ...], *consts: np.ndarray, **attributes: object) -> Case:
    names = [f"c{i}" for i in range(len(consts))]
    nodes = [node(op, ["a", *names], ["y"], **attributes)]
    return Case(op, nodes, {"a": shape}, dict(zip(names, consts, strict=True)))


def gemm(trans_a: int, trans_b: int, bias: tuple[int, ...] | None) -> Case:
    params = {"a": (4, 2) if trans_a else (2, 4), "b": (3, 4) if trans_b else (4, 3)}
    if bias is not None:
        params["c"] = bias
    nodes = [node("Gemm", list(params), ["y"], alpha=0.7, beta=1.3, transA=trans_a, transB=trans_b)]
    return Case("Gemm", nodes, params)


CASES = [
    *(binary("MatMul", *s) for s in [
        ((2, 3), (3, 4)), ((3,), (3, 4)), ((2, 3), (3,)), ((3,), (3,)),
        ((5, 2, 3), (3, 4)), ((2, 3), (5, 3, 4)), ((1, 2, 3), (5, 3, 4)),
        ((4, 1, 2, 3), (5, 3, 2)), ((3,), (5, 3, 4)), ((5, 2, 3), (3,)),
    ]),
    Case("MatMul", [node("MatMul", ["a", "a"], ["y"])], {"a": (3,)}),
    Case("MatMul", [node("MatMul", ["x", "a"], ["y"])], {"a": (3, 2)}, inputs={"x": (4, 3)},
         symbolic=True),
    *(gemm(ta, tb, bias) for ta in (0, 1) for tb in (0, 1)
      for bias in (None, (3,), (2, 1), (2, 3), ())),
    *(binary(op, *s) for op in ("Add", "Sub", "Mul", "Div")
      for s in [((2, 3), (2, 3)), ((2, 3), (3,)), ((3,), (2, 3)), ((2, 1), (1, 3)), ((), (2, 2))]),
    Case("Mul", [node("Mul", ["a", "a"], ["y"])], {"a": (3,)}),
    *(Case(op, [node(op, ["x", "a"], ["y"])], {"a": (3,)}, inputs={"x": (2, 3)}, symbolic=True,
           positive=True) for op in ("Add", "Sub", "Mul", "Div")),
    Case("Add", [node("Add", ["x", "a"], ["y"])], {"a": (2, 1)}, inputs={"x": (4, 1, 3)},
         symbolic=True),
    # The gradient goes through a value whose symbolic dimension turns out to be 1.
    Case("Add", [node("MatMul", ["x", "a"], ["h"]), node("Add", ["h", "z"], ["y"])], {"a": (3, 2)},
         inputs={"x": (1, 3), "z": (4, 2)}, symbolic=True),
    *(unary(op) for op in ("Relu", "Sigmoid", "Tanh", "Identity", "Neg", "Exp", "Softmax",
                           "LogSoftmax", "LeakyRelu", "Erf", "Softplus", "Abs", "Gelu")),
    *(unary(op, positive=True) for op in ("Log", "Sqrt")),
    unary("LeakyRelu", alpha=0.3), unary("Gelu", approximate="tanh"),
    unary("Softmax", axis=0), unary("LogSoftmax", axis=0), unary("Flatten", axis=0),
    unary("Transpose"), unary("Cast", to=11),
    *(shaped("Pow", (2, 3), np.array(p)) for p in (1.0, 2.0, 3.0)),
    Case("Pow", [node("Pow", ["a", "p"], ["y"])], {"a": (3,)}, {"p": np.array([[0.5], [-1.5]])},
         positive=True),
    Case("Pow", [node("Pow", ["a", "p"], ["y"])], {"a": (3,)}, {"p": np.array(2, I64)}),
    shaped("Reshape", (2, 6), ints(3, -1)), shaped("Flatten", (2, 3, 2), axis=2),
    shaped("Squeeze", (2, 1, 3), ints(1)), shaped("Unsqueeze", (2, 3), ints(0, 3)),
    shaped("Transpose", (2, 3, 4), perm=[2, 0, 1]), shaped("Expand", (3, 1), ints(2, 1, 4)),
    *(shaped(op, (2, 3, 2), ints(*axes), keepdims=k) for op in ("ReduceSum", "ReduceMean")
      for axes in ((1,), (0, -1)) for k in (0, 1)),
    *(shaped(op, (2, 3), keepdims=k) for op in ("ReduceSum", "ReduceMean") for k in (0, 1)),
    shaped("ReduceSum", (2, 3), np.array([], I64), noop_with_empty_axes=1, keepdims=0),
    Case("Concat", [node("Concat", ["a", "b", "a"], ["y"], axis=1)], {"a": (2, 2), "b": (2, 3)}),
    Case("Concat", [node("Concat", ["x", "a"], ["y"], axis=-1)], {"a": (2, 3)},
         inputs={"x": (2, 2)}, symbolic=True),
    Case("Split", [node("Split", ["a", "s"], ["p", "q"], axis=1),
                   node("Exp", ["q"], ["y"])], {"a": (2, 5)}, {"s": ints(2, 3)}),
    Case("Sum", [node("Sum", ["a", "b", "c"], ["y"])], {"a": (2, 3), "b": (3,), "c": ()}),
    Case("Where", [node("Where", ["m", "a", "b"], ["y"])], {"a": (2, 3), "b": (3,)},
         {"m": np.array([[True], [False]])}),
    Case("GatherElements", [node("GatherElements", ["a", "i"], ["y"], axis=1)], {"a": (2, 3)},
         {"i": np.array([[0, 0, 2, 1], [1, 1, 1, 0]], I64)}),
]  # fmt: skip


def arrays(shapes: Mapping[str, tuple[int, ...]], positive: bool, seed: int) -> dict:
    rng = np.random.default_rng(seed)
    made = {}
    for name, shape in shapes.items():
        # Away from 0, where Relu and Abs have their kink.
        size = rng.uniform(0.3, 1.6, size=shape)
        made[name] = np.asarray(size if positive else size * rng.choice([-1.0, 1.0], size=shape))
    return made


def check_case(case: Case, seed: int = 0) -> None:
    params = arrays(case.params, case.positive, seed)
    inputs = arrays(case.inputs, case.positive, seed + 1)
    rng = np.random.default_rng(seed + 2)

    def build(dtype: type):
        nodes = []
        for original in case.nodes:
            copy = NodeProto()
            copy.CopyFrom(original)
            for attribute in copy.attribute:
                if attribute.name == "to":
                    attribute.i = 11 if dtype is np.float64 else 1
            nodes.append(copy)
        forward = model_of(
            nodes, params, inputs=inputs, dtype=dtype, constants=case.constants,
            symbolic=case.symbolic,
        )  # fmt: skip
        return training_graphs(forward, "mse", wrt=list(params))

    graphs = build(np.float64)
    check(graphs.pullback)
    feeds = {**params, **inputs}
    y = run_reference(graphs.forward, feeds)[graphs.output_name]
    cotangent = rng.normal(size=np.shape(y))
    feeds_all = {**feeds, graphs.output_gradient_name: cotangent}
    exact = run_reference(graphs.pullback, feeds_all)
    small = build(np.float32)
    feeds_small = {name: np.asarray(v, np.float32) for name, v in feeds_all.items()}
    fast = run_ort(small.pullback, feeds_small)
    for name, gradient in zip(graphs.parameter_names, graphs.gradient_names, strict=True):
        h, tolerance = (1e-3, 1e-3) if case.coarse else (1e-6, 1e-6)
        expected = numeric_gradient(graphs.forward, feeds, name, graphs.output_name, cotangent, h)
        assert exact[gradient].shape == params[name].shape
        np.testing.assert_allclose(exact[gradient], expected, rtol=tolerance, atol=tolerance / 10)
        assert fast[gradient].shape == params[name].shape
        np.testing.assert_allclose(fast[gradient], exact[gradient], rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize(
    "case", CASES, ids=lambda c: f"{c.op}-{'-'.join(map(str, c.params.values()))}"
)
def test_rule_agrees_with_finite_differences(case: Case) -> None:
    check_case(case)


def test_every_rule_of_the_table_has_a_case() -> None:
    assert {case.op for case in CASES} == set(supported_ops())


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    shapes=mutually_broadcastable_shapes(num_shapes=2, max_dims=3, max_side=3),
    op=st.sampled_from(["Add", "Sub", "Mul", "Div"]),
    symbolic=st.booleans(),
)
def test_broadcasting_is_undone_for_any_shapes(shapes, op: str, symbolic: bool) -> None:
    left, right = shapes.input_shapes
    if symbolic:
        nodes = [node(op, ["x", "b"], ["y"])]
        check_case(Case(op, nodes, {"b": right}, {}, True, {"x": left}, True))
    else:
        check_case(binary(op, left, right))


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    batch=mutually_broadcastable_shapes(num_shapes=2, max_dims=2, max_side=2),
    m=st.integers(1, 3), k=st.integers(1, 3), n=st.integers(1, 3),
)  # fmt: skip
def test_matmul_of_any_batches(batch, m: int, k: int, n: int) -> None:
    left, right = batch.input_shapes
    check_case(binary("MatMul", (*left, m, k), (*right, k, n)))
