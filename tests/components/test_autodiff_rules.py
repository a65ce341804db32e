"""Every rule of the table against central finite differences.

The gradient graph runs in float64 in ONNX's reference evaluator (tight bound), and in float32
in ONNX Runtime (what the node uses), which has to agree.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import mutually_broadcastable_shapes
from onnx import NodeProto
from onnx.helper import make_node as node

from bbnode.components.autodiff import (
    GradientRuleError,
    rules,
    supported_ops,
    training_graphs,
)
from bbnode.components.autodiff.table import lookup
from tests.components.graphs import (
    OPSET,
    check,
    model_of,
    numeric_gradient,
    ort_runner,
    run_ort,
    run_reference,
)

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
    batch: bool = False  # of the inputs only the first size is a symbol
    opset: int = OPSET
    single: bool = False
    dims: list[int | str] | None = None  # of the output, where ONNX does not infer them
    distinct: bool = False  # no two elements come close, so that no step changes a maximum

    @property
    def broken_reference(self) -> bool:
        """ONNX's reference evaluator can't run ConvTranspose for several groups of several
        channels, and gives no row-major indices of a MaxPool that moves by ones; there ONNX
        Runtime is the only judge.
        """
        settings = {a.name: a for n in self.nodes for a in n.attribute}
        if self.op == "Conv":
            return "group" in settings and self.params["k"][1] > 1
        plain = settings.keys() <= {"kernel_shape", "pads"}
        return self.single or (self.op == "MaxPool" and plain)

    @property
    def coarse(self) -> bool:
        """ONNX's reference evaluator computes Gelu in float32 whatever it is given."""
        return any(n.op_type == "Gelu" and not n.attribute for n in self.nodes)


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


def conv(
    x: tuple[int, ...], kernel: tuple[int, ...], bias: bool = True, symbolic: bool = False,
    **attributes: object,
) -> Case:  # fmt: skip
    """Over a parameter `a`, or, with a symbolic batch, over an input."""
    params = {"k": kernel} | ({"c": (kernel[0],)} if bias else {})
    nodes = [node("Conv", ["a", *params], ["y"], **attributes)]
    if symbolic:
        return Case("Conv", nodes, params, inputs={"a": x}, batch=True)
    return Case("Conv", nodes, {"a": x, **params})


def pool(op: str, shape: tuple[int, ...], **attributes: object) -> Case:
    return Case(op, [node(op, ["a"], ["y"], **attributes)], {"a": shape}, distinct=True)


def scatter(op: str, indices: np.ndarray, updates: tuple[int, ...], **attributes: object) -> Case:
    nodes = [node(op, ["a", "i", "u"], ["y"], **attributes)]
    return Case(op, nodes, {"a": (3, 4), "u": updates}, {"i": indices})


def normal(op: str, shape: tuple[int, ...], **attributes: object) -> Case:
    """Normalization with scale and bias per channel."""
    nodes = [node(op, ["a", "s", "b"], ["y"], **attributes)]
    return Case(op, nodes, {"a": shape} | dict.fromkeys("sb", (shape[1],)), dims=[*shape])


def single(made: Case) -> Case:
    """The case of an op that ONNX or its reference evaluator has in float32 only."""
    return replace(made, single=True)


def batch_norm(shape: tuple[int, ...], **attributes: object) -> Case:
    channels = shape[1]
    return Case(
        "BatchNormalization",
        [node("BatchNormalization", ["a", "s", "b", "m", "v"], ["y"], **attributes)],
        {"a": shape, "s": (channels,), "b": (channels,)},
        {"m": np.linspace(-1, 1, channels), "v": np.linspace(0.5, 2, channels)},
    )


REDUCTIONS = ("L1", "L2", "SumSquare", "LogSumExp", "Prod")
CASES = [
    conv((2, 2, 5, 4), (3, 2, 3, 2)), conv((2, 2, 5, 4), (3, 2, 3, 2), bias=False),
    conv((1, 2, 6, 5), (2, 2, 2, 3), strides=[2, 2]),
    conv((1, 2, 7, 5), (2, 2, 3, 2), strides=[3, 2], pads=[1, 0, 0, 2]),
    conv((2, 1, 7, 6), (2, 1, 3, 2), dilations=[2, 3]),
    conv((1, 1, 9, 8), (2, 1, 2, 2), dilations=[3, 2], strides=[2, 3], pads=[1, 2, 2, 1]),
    conv((2, 4, 5, 4), (6, 2, 3, 2), group=2), conv((1, 3, 5, 5), (3, 1, 2, 2), group=3),
    conv((2, 4, 6, 5), (2, 2, 3, 2), group=2, strides=[2, 2], pads=[1, 1, 1, 1]),
    conv((1, 2, 6, 5), (2, 2, 3, 2), auto_pad="SAME_UPPER", strides=[2, 1]),
    conv((1, 2, 6, 5), (2, 2, 3, 2), auto_pad="SAME_LOWER"),
    conv((1, 2, 6, 5), (2, 2, 3, 2), auto_pad="VALID"),
    # A kernel for each channel, over many windows and few.
    conv((2, 3, 8, 7), (3, 1, 3, 2), group=3, pads=[1, 0, 1, 1]),
    conv((1, 2, 13, 12), (2, 1, 3, 3), group=2, strides=[2, 2], pads=[1, 1, 1, 1]),
    conv((1, 2, 12, 13), (2, 1, 2, 2), group=2, strides=[2, 1], dilations=[1, 3]),
    conv((2, 3, 35), (3, 1, 4), group=3, strides=[1], pads=[3, 0]),
    conv((1, 2, 5, 4, 4), (2, 1, 2, 1, 2), group=2), conv((1, 3, 6, 7), (3, 1, 1, 1), group=3),
    conv((3, 2, 7, 8), (2, 1, 3, 2), symbolic=True, group=2, pads=[1, 1, 1, 1]),
    conv((3, 2, 5, 4), (3, 2, 3, 2), symbolic=True),
    conv((3, 4, 5, 4), (2, 2, 3, 2), symbolic=True, group=2, strides=[2, 1]),
    conv((1, 2, 9, 10), (2, 2, 2, 2)), conv((1, 4, 17, 6), (2, 4, 1, 2), strides=[2, 1]),
    conv((1, 1, 17, 17), (2, 1, 2, 2), strides=[2, 2]),
    conv((2, 2, 6), (3, 2, 3), strides=[2], pads=[1, 1]), conv((1, 1, 3, 4, 3), (2, 1, 2, 2, 2)),
    pool("MaxPool", (2, 2, 5, 4), kernel_shape=[2, 2]),
    pool("MaxPool", (2, 2, 5, 4), kernel_shape=[3, 2], strides=[2, 1], pads=[1, 0, 1, 1]),
    pool("MaxPool", (1, 2, 5, 5), kernel_shape=[2, 2], strides=[2, 2], ceil_mode=1),
    pool("MaxPool", (1, 1, 6, 5), kernel_shape=[2, 2], dilations=[2, 2]),
    pool("MaxPool", (1, 1, 6, 5), kernel_shape=[3, 3], auto_pad="SAME_UPPER", strides=[2, 2]),
    pool("MaxPool", (2, 2, 6), kernel_shape=[2], strides=[2]),
    pool("AveragePool", (2, 2, 5, 4), kernel_shape=[2, 2]),
    pool("AveragePool", (1, 2, 5, 4), kernel_shape=[3, 2], strides=[2, 1], pads=[1, 0, 1, 1]),
    pool("AveragePool", (1, 2, 5, 4), kernel_shape=[3, 2], pads=[1, 0, 1, 1], count_include_pad=1),
    pool("AveragePool", (1, 1, 6, 5), kernel_shape=[3, 3], auto_pad="SAME_LOWER", strides=[2, 2]),
    pool("AveragePool", (1, 1, 7, 6), kernel_shape=[2, 2], dilations=[2, 3], strides=[2, 1]),
    pool("AveragePool", (1, 1, 4, 4), kernel_shape=[2, 2], strides=[2, 2], ceil_mode=1),
    pool("GlobalAveragePool", (2, 3, 3, 2)), pool("GlobalMaxPool", (2, 3, 3, 2)),
    batch_norm((3, 2)), batch_norm((2, 3, 2, 2), epsilon=0.1),
    Case("BatchNormalization", [node("BatchNormalization", [*"asbmv"], ["y"])],
         {"a": (2, 3, 2)} | dict.fromkeys("sbmv", (3,)), positive=True),
    normal("InstanceNormalization", (2, 3, 4)), normal("InstanceNormalization", (2, 2, 2, 3)),
    single(normal("GroupNormalization", (2, 4, 3), num_groups=2)),
    single(normal("GroupNormalization", (1, 6, 2, 2), num_groups=3, epsilon=0.1)),
    *(Case("RMSNormalization", [node("RMSNormalization", ["a", "s"], ["y"], axis=axis)],
           {"a": (2, 3, 4), "s": shape}, opset=23)
      for axis, shape in ((-1, (4,)), (1, (3, 4)), (2, (1,)))),
    *(unary("LpNormalization", p=p, axis=axis) for p in (1, 2) for axis in (0, -1)),
    *(Case("MeanVarianceNormalization",
           [node("MeanVarianceNormalization", ["a"], ["y"], axes=axes)], {"a": shape},
           single=True, dims=[*shape])
      for shape, axes in (((2, 3, 2, 2), [0, 2, 3]), ((4, 3), [0]))),
    # The reference evaluator leaves the last channel of a window out.
    single(shaped("LRN", (2, 5, 2, 2), size=3, alpha=0.5)),
    single(shaped("LRN", (1, 4, 3, 1), size=5, bias=2.0, alpha=0.5)),
    # The reference evaluator has the two statistics in different types.
    *(Case("LayerNormalization",
           [node("LayerNormalization", ["a", "s"], ["n", "m", "d"]),
            node("CastLike", ["m", "a"], ["m1"]), node("CastLike", ["d", "a"], ["d1"]),
            node("Mul", ["m1", "d1"], ["p"]), node("Mul", [left, "p"], ["y"])],
           {"a": (2, 3), "s": (3,)}, dims=dims)
      for left, dims in (("n", [2, 3]), ("m1", [2, 1]))),
    *(Case("LayerNormalization",
           [node("LayerNormalization", ["a", *more], ["y"], axis=axis, epsilon=0.01)],
           {"a": (2, 3, 4)} | dict.fromkeys(more, (3, 4) if axis == 1 else (4,)))
      for axis in (-1, 1) for more in (("s",), ("s", "b"))),
    shaped("Slice", (4, 5), ints(1, -1), ints(9, -9), ints(0, 1), ints(2, -2)),
    shaped("Slice", (4, 3), ints(-3), ints(-1)),
    shaped("Gather", (3, 4), np.array([[0, -1], [0, 2]], I64)),
    shaped("Gather", (3, 4), np.array(1, I64), axis=-1),
    shaped("Gather", (2, 3, 2), np.array([[0, -1, 0], [2, 2, 1]], I64), axis=1),
    shaped("Gather", (3, 2), np.array([2, 0], np.int32)),
    shaped("Slice", (3, 4), ints(2, 1), ints(1, 3)),
    *(Case("Slice", [node("Add", ["a", "w"], ["h"]), node("Slice", ["h", "s", "e"], ["y"])],
           {"w": (3,)}, {"s": ints(*starts), "e": ints(*ends)}, inputs={"a": (3, 3)}, batch=True)
      for starts, ends in (((-2, 0), (9, -1)), ((2, 1), (1, 3)))),
    shaped("GatherND", (3, 2, 2), np.array([[0, 1], [2, 0], [0, 1]], I64)),
    shaped("Tile", (2, 3), ints(2, 2)),
    shaped("Pad", (2, 3), ints(1, 0, 2, 1)), shaped("Pad", (2, 3), ints(0, 1, 0, 2), np.array(0.5)),
    shaped("Pad", (3, 4), ints(1, 2, 2, 1), mode="reflect"),
    shaped("Pad", (2, 3), ints(2, 1, 0, 1), mode="edge"),
    Case("Pad", [node("Pad", ["a", "p", "", "x"], ["y"])], {"a": (2, 3)},
         {"p": ints(1, 2), "x": ints(1)}),
    Case("Pad", [node("Pad", ["a", "p", "", "x"], ["y"], mode="edge")], {"a": (2, 3)},
         {"p": ints(1, 2), "x": ints(-1)}),
    shaped("Clip", (3, 4), np.array(-0.9), np.array(0.8)),
    Case("Clip", [node("Clip", ["a", "", "c"], ["y"])], {"a": (3, 4)}, {"c": np.array(0.8)}),
    unary("Clip"), shaped("Clip", (3, 4), np.array(0.8), np.array(-0.9)),
    Case("Clip", [node("Clip", ["a", "b", "c"], ["h"]), node("MatMul", ["h", "w"], ["y"])],
         {"a": (3, 4), "w": (4, 2)}, {"b": np.array(-0.9), "c": np.array(0.8)}),
    *(Case(op, [node(op, ["a", "b", "c"], ["y"])], {"a": (2, 3), "b": (3,), "c": (2, 1)})
      for op in ("Max", "Min")),
    Case("Max", [node("Max", ["a"], ["y"])], {"a": (2, 3)}),
    pool("Acos", (2, 3)), pool("Asin", (2, 3)), pool("Atanh", (2, 3)), unary("Asinh"),
    unary("Atan"), unary("Sinh"), unary("Cosh"), unary("Tan"),
    Case("Acosh", [node("Exp", ["a"], ["e"]), node("Acosh", ["e"], ["y"])], {"a": (2, 3)},
         positive=True),
    single(unary("Celu")), single(unary("Celu", alpha=0.5)), unary("Selu"),
    unary("Selu", alpha=1.0, gamma=2.0),
    unary("HardSigmoid"), unary("HardSigmoid", alpha=1.0), unary("HardSwish"), unary("Mish"),
    Case("HardSwish", [node("Mul", ["a", "f"], ["h"]), node("HardSwish", ["h"], ["y"])],
         {"a": (2, 5)}, {"f": np.array(4.0)}),
    unary("Softsign"), unary("Shrink"), unary("Shrink", lambd=1.0, bias=0.5),
    unary("ThresholdedRelu"), unary("ThresholdedRelu", alpha=0.5),
    *(Case("Swish", [node("Swish", ["a"], ["y"], **s)], {"a": (2, 3)}, opset=24)
      for s in ({}, {"alpha": 1.7})),
    Case("CastLike", [node("CastLike", ["a", "t"], ["y"])], {"a": (2, 3)}, {"t": np.array(1.0)}),
    Case("Mod", [node("Mod", ["a", "b"], ["y"], fmod=1)], {"a": (3, 4), "b": (4,)}),
    Case("Mean", [node("Mean", ["a", "b", "c"], ["y"])], {"a": (2, 3), "b": (3,), "c": ()}),
    Case("Pow", [node("Pow", ["a", "b"], ["y"])], {"a": (2, 3), "b": (3,)}, positive=True),
    Case("Clip", [node("Clip", ["a", "b", "c"], ["y"])], {"a": (4, 5), "b": (), "c": ()}),
    Case("Range", [node("Range", ["a", "f", "b"], ["y"])], {"a": (), "b": ()},
         {"f": np.array(9.0)}, positive=True, dims=["n"]),
    Case("OneHot", [node("OneHot", ["i", "d", "a"], ["h"], axis=0), node("Exp", ["h"], ["y"])],
         {"a": (2,)}, {"i": np.array([[1, 0], [2, 5]], I64), "d": np.array(3)}),
    Case("Pad", [node("Pad", ["a", "p", "b"], ["y"])], {"a": (2, 3), "b": ()},
         {"p": ints(1, 0, 2, 1)}),
    *(single(Case("DequantizeLinear",
           [node("DequantizeLinear", ["q", "a", "z"], ["y"], **settings)], {"a": shape},
           {"q": np.arange(-5, 7, dtype=np.int8).reshape(3, 4),
            "z": np.ones(shape, np.int8)}))
      for shape, settings in (((), {}), ((3,), {"axis": 0}), ((4,), {"axis": -1}),
                              ((3, 2), {"axis": 1, "block_size": 2}),
                              ((2, 4), {"axis": 0, "block_size": 2}))),
    *(shaped("CumSum", (2, 3), np.array(1), exclusive=e, reverse=r)
      for e in (0, 1) for r in (0, 1)),
    Case("TopK", [node("TopK", ["a", "k"], ["y", "i"], axis=1)], {"a": (2, 5)}, {"k": ints(2)},
         distinct=True),
    Case("TopK", [node("TopK", ["a", "k"], ["y", "i"], axis=0, largest=0)], {"a": (4, 2)},
         {"k": ints(3)}, distinct=True),
    shaped("Trilu", (3, 4)), shaped("Trilu", (2, 3, 3), np.array(-1), upper=0),
    shaped("Compress", (3, 4), np.array([True, False, True]), axis=0),
    shaped("Compress", (2, 2), np.array([False, True, True])),
    shaped("ReverseSequence", (4, 3), ints(1, 4, 2), batch_axis=1, time_axis=0),
    *(scatter("ScatterElements", ints(2, 0, 1, 2, 0, 0).reshape(2, 3), (2, 3), axis=axis,
              reduction=r)
      for axis in (0, 1) for r in ("none", "add", "mul", "min", "max")),
    *(scatter("ScatterND", ints(2, -3, 2).reshape(3, 1), (3, 4), reduction=r)
      for r in ("none", "add", "mul", "min", "max")),
    scatter("ScatterND", ints(2, 1, 0, 3).reshape(2, 2), (2,)),
    *(Case("TensorScatter", [node("TensorScatter", ["a", "b", "w"], ["y"], mode=mode)],
           {"a": (2, 4, 3), "b": (2, 2, 3)}, {"w": ints(*at)}, opset=24)
      for mode, at in (("linear", (0, 2)), ("circular", (1, 3)))),
    *(shaped(f"Reduce{op}", (2, 3, 2), ints(*axes), keepdims=k)
      for op in REDUCTIONS for axes, k in (((1,), 0), ((0, -1), 1))),
    *(shaped(f"Reduce{op}", (2, 3), keepdims=0) for op in REDUCTIONS),
    Case("ReduceLogSum", [node("ReduceLogSum", ["a", "x"], ["y"], keepdims=0)], {"a": (2, 3)},
         {"x": ints(1)}, positive=True),
    *(shaped(f"Reduce{op}", (2, 3), *axes, noop_with_empty_axes=1, keepdims=0)
      for op in (*REDUCTIONS, "Max", "Min", "Sum", "Mean")
      for axes in ((), (ints(),))),
    unary("Elu"), unary("Elu", alpha=0.5), unary("Reciprocal"), unary("Sin"), unary("Cos"),
    unary("Dropout"),
    Case("PRelu", [node("PRelu", ["a", "s"], ["y"])], {"a": (2, 3, 2), "s": (3, 1)}),
    *(shaped(op, (2, 3, 2), ints(*axes), keepdims=k) for op in ("ReduceMax", "ReduceMin")
      for axes in ((1,), (0, -1)) for k in (0, 1)),
    shaped("ReduceMax", (2, 3), keepdims=0), shaped("ReduceMin", (2, 3)),
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
    if case.distinct:
        order = np.random.default_rng(seed).permutation
        params = {n: order(a.size).reshape(a.shape) / a.size - 0.4 for n, a in params.items()}
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
            symbolic=case.symbolic, opset=case.opset, dims=case.dims,
        )  # fmt: skip
        if case.batch:
            for info in forward.graph.input:
                info.type.tensor_type.shape.dim[0].dim_param = "batch"
        return training_graphs(forward, "mse", wrt=list(params))

    feeds = {**params, **inputs}
    small = build(np.float32)
    check(small.pullback)
    narrow = {name: np.asarray(v, np.float32) for name, v in feeds.items()}
    if case.broken_reference:
        y = run_ort(small.forward, narrow)[small.output_name]
        cotangent = np.asarray(rng.normal(size=np.shape(y)), np.float32)
        found = run_ort(small.pullback, {**narrow, small.output_gradient_name: cotangent})
        run = ort_runner(small.forward)
        for name, gradient in zip(small.parameter_names, small.gradient_names, strict=True):
            # Linear between the kinks, so that a wide step loses nothing but rounding.
            expected = numeric_gradient(
                small.forward, narrow, name, small.output_name, cotangent, 4e-3, run
            )
            assert found[gradient].shape == params[name].shape
            np.testing.assert_allclose(found[gradient], expected, rtol=3e-3, atol=3e-3)
        return
    graphs = build(np.float64)
    check(graphs.pullback)
    y = run_reference(graphs.forward, feeds)[graphs.output_name]
    cotangent = rng.normal(size=np.shape(y))
    feeds_all = {**feeds, graphs.output_gradient_name: cotangent}
    exact = run_reference(graphs.pullback, feeds_all)
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


# The cases of other families are in files of their own.
FAMILIES = ("activations", "convolution", "elementwise", "indexing", "layers", "moving",
            "normalization", "reductions")  # fmt: skip


def test_every_rule_of_these_families_has_a_case() -> None:
    families = {f"{rules.__name__}.{family}" for family in FAMILIES}
    entries = {op: lookup("", op) for op in supported_ops()}
    ops = {op for op, entry in entries.items() if entry and entry.rule.__module__ in families}
    assert ops <= {case.op for case in CASES}


A = {"a": (2, 2, 5, 4)}


@pytest.mark.parametrize(
    ("nodes", "params", "constants", "says"),
    [
        ([node("Dropout", ["a", "s"], ["y"])], {**A, "s": ()}, {}, "the ratio 's' depends"),
        ([node("MaxPool", ["a"], ["z", "i"], kernel_shape=[2, 2]),
          node("Cast", ["i"], ["y"], to=11)], A, {}, None),
    ],
)  # fmt: skip
def test_what_a_rule_cannot_do_it_says(nodes, params, constants, says) -> None:
    shapes = arrays(params, True, 0)
    forward = model_of(nodes, shapes, constants=constants)
    if not forward.graph.output[0].type.tensor_type.HasField("shape"):
        for _ in A["a"]:  # inference gives up on LayerNormalization's mean
            forward.graph.output[0].type.tensor_type.shape.dim.add()
    if says is None:  # whole numbers have no gradient: zeros
        graphs = training_graphs(forward, "mse", wrt=list(params))
        feeds = {**shapes, graphs.output_gradient_name: np.ones((2, 2, 4, 3))}
        assert not run_reference(graphs.pullback, feeds)[graphs.gradient_names[0]].any()
        return
    with pytest.raises(GradientRuleError, match=says):
        training_graphs(forward, "mse", wrt=list(params))


def test_sizes_that_a_window_needs_have_to_be_known() -> None:
    nodes = [
        node("Conv", ["a", "k"], ["h"]),
        node("AveragePool", ["h"], ["y"], kernel_shape=[2, 2], strides=[2, 2], ceil_mode=1),
    ]
    forward = model_of(
        nodes, {"k": np.ones((2, 2, 3, 2))}, inputs={"a": np.ones(A["a"])}, symbolic=True
    )
    forward.graph.input[0].type.tensor_type.shape.dim[1].dim_value = 2
    with pytest.raises(GradientRuleError, match="spatial sizes of 'h' are unknown"):
        training_graphs(forward, "mse", wrt=["k"])


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.data())
def test_convolutions_of_any_geometry(data) -> None:
    kernel = data.draw(st.tuples(st.integers(1, 3), st.integers(1, 3)))
    dilations = data.draw(st.tuples(st.integers(1, 2), st.integers(1, 3)))
    strides = data.draw(st.tuples(st.integers(1, 3), st.integers(1, 3)))
    pads = data.draw(st.tuples(*[st.integers(0, 2)] * 4))
    sizes = [
        max(d * (k - 1) + 1 + data.draw(st.integers(0, 4)) - pads[i] - pads[i + 2], 1)
        for i, (k, d) in enumerate(zip(kernel, dilations, strict=True))
    ]
    check_case(
        conv((2, 2, *sizes), (2, 2, *kernel), strides=list(strides), dilations=list(dilations),
             pads=list(pads))
    )  # fmt: skip


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
