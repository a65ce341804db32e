"""Training where axes are open, and where indices are int32: the forms of plain exporters."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import helper
from onnx.helper import make_node as node

from bbnode.components.autodiff import GradientRuleError
from tests.components.slopes import assert_slope, forward_of, model_with

RNG = np.random.default_rng(0)
TWO = np.zeros((2, 2), np.float32)


def normal(*shape: int) -> np.ndarray:
    return (RNG.normal(size=shape) * 0.3).astype(np.float32)


IMAGES = [("x", ["b", 3, "h", "v"])]
POOLED = [
    node("GlobalAveragePool", ["z"], ["p"]),
    node("Flatten", ["p"], ["q"]),
    node("MatMul", ["q", "f"], ["y"]),
]
FIRST = node("Conv", ["x", "w0"], ["i"], pads=[1, 1, 1, 1])
HELD = {"w0": normal(3, 3, 3, 3), "w": normal(4, 3, 3, 3), "b": normal(4), "f": normal(4, 2)}


@pytest.mark.parametrize("sizes", [(8, 8), (7, 6), (5, 9)])
@pytest.mark.parametrize(
    "settings",
    [
        {"strides": [2, 2]},
        {"strides": [2, 2], "pads": [1, 1, 1, 1]},
        {"strides": [3, 2], "pads": [0, 1, 2, 0]},
        {"strides": [3, 3], "dilations": [1, 2]},
        {"strides": [2, 2], "auto_pad": "SAME_UPPER"},
        {"strides": [3, 2], "auto_pad": "SAME_LOWER"},
        {"auto_pad": "SAME_UPPER"},
        {"strides": [2, 2], "auto_pad": "VALID"},
        {"strides": [2, 1]},
    ],
)
def test_convolutions_over_open_sizes(settings, sizes) -> None:
    nodes = [FIRST, node("Conv", ["i", "w", "b"], ["z"], **settings), *POOLED]
    model = model_with(forward_of(nodes, IMAGES, [("y", ["b", 2])], HELD))
    assert_slope(model, normal(2, 3, *sizes), TWO)


@pytest.mark.parametrize("sizes", [(8, 8), (7, 6)])
@pytest.mark.parametrize(
    "made",
    [
        node("Conv", ["i", "w3"], ["z"], group=3, strides=[2, 2]),
        node("ConvTranspose", ["i", "t"], ["z"], strides=[2, 2]),
        node("ConvTranspose", ["i", "t"], ["z"], strides=[3, 2], output_padding=[1, 0],
             pads=[1, 0, 0, 1]),
        node("MaxPool", ["i"], ["z"], kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1]),
        node("AveragePool", ["i"], ["z"], kernel_shape=[2, 2], strides=[2, 2]),
        node("AveragePool", ["i"], ["z"], kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1]),
        node("AveragePool", ["i"], ["z"], kernel_shape=[3, 2], strides=[1, 2], pads=[1, 0, 1, 1],
             count_include_pad=1),
        node("LpPool", ["i"], ["z"], kernel_shape=[2, 2], strides=[2, 2]),
        node("Resize", ["i", "", "twice"], ["z"], mode="linear"),
    ],
)  # fmt: skip
def test_other_windows_over_open_sizes(made, sizes) -> None:
    tensors = {"w0": HELD["w0"], "w3": normal(6, 1, 3, 3), "t": normal(3, 4, 2, 2),
               "twice": np.asarray([1, 1, 2, 2], np.float32)}  # fmt: skip
    used = {name: value for name, value in tensors.items() if name in ("w0", *made.input)}
    channels = {"Conv": 6, "ConvTranspose": 4}.get(made.op_type, 3)
    nodes = [FIRST, made, *POOLED]
    model = model_with(
        forward_of(nodes, IMAGES, [("y", ["b", 2])], {**used, "f": normal(channels, 2)}),
        trainable=("*",),
    )
    assert_slope(model, normal(2, 3, *sizes), TWO)


def test_a_rounded_up_pool_says_that_its_sizes_are_open() -> None:
    pool = node("AveragePool", ["i"], ["z"], kernel_shape=[2, 2], strides=[2, 2], ceil_mode=1)
    forward = forward_of(
        [FIRST, pool, *POOLED], IMAGES, [("y", ["b", 2])],
        {"w0": HELD["w0"], "f": normal(3, 2)},
    )  # fmt: skip
    with pytest.raises(GradientRuleError, match="spatial sizes of 'i' are unknown"):
        model_with(forward).check_trains()


def test_a_net_of_two_scales_over_open_sizes() -> None:
    nodes = [
        node("Conv", ["x", "w", "b"], ["h"], pads=[1, 1, 1, 1]),
        node("Conv", ["h", "d"], ["down"], strides=[2, 2], pads=[1, 1, 1, 1]),
        node("ConvTranspose", ["down", "u"], ["up"], strides=[2, 2]),
        node("Concat", ["h", "up"], ["c"], axis=1),
        node("Conv", ["c", "o"], ["y"]),
    ]
    tensors = {"w": HELD["w"], "b": HELD["b"], "d": normal(4, 4, 3, 3), "u": normal(4, 4, 2, 2),
               "o": normal(5, 8, 1, 1)}  # fmt: skip
    forward = forward_of(nodes, IMAGES, [("y", ["b", 5, "h", "v"])], tensors)
    model = model_with(forward, loss="softmax_cross_entropy", class_axis=1)
    assert_slope(model, normal(2, 3, 8, 6), RNG.integers(0, 5, (2, 8, 6)))


@pytest.mark.parametrize("settings", [{"strides": [2]}, {"strides": [3], "pads": [2, 0]}])
def test_convolutions_over_open_time(settings) -> None:
    nodes = [
        node("Transpose", ["x"], ["t"], perm=[0, 2, 1]),
        node("Conv", ["t", "w0"], ["i"], pads=[1, 1]),
        node("Conv", ["i", "w"], ["z"], **settings),
        *POOLED,
    ]
    tensors = {"w0": normal(3, 3, 3), "w": normal(4, 3, 3), "f": HELD["f"]}
    forward = forward_of(nodes, [("x", ["b", "t", 3])], [("y", ["b", 2])], tensors)
    for steps in (7, 8):
        assert_slope(model_with(forward), normal(2, steps, 3), TWO)


WHOLE = [np.int32, np.int64]


@pytest.mark.parametrize("dtype", WHOLE)
@pytest.mark.parametrize("form", ["axes", "none", "steps", "computed", "two"])
def test_slices_by_either_kind_of_index(form: str, dtype) -> None:
    tensors = {"w": normal(4, 6)}
    spans = {
        "axes": ([0], [3], [1]), "none": ([0, 1], [9, 5]), "steps": ([5], [-100], [1], [-2]),
        "computed": ([0], None, [1]), "two": ([0, -5], [2, -1], [0, 1]),
    }[form]  # fmt: skip
    nodes = [node("MatMul", ["x", "w"], ["h"])]
    names = []
    for name, span in zip(("starts", "ends", "axes", "steps"), spans, strict=False):
        names.append(name)
        if span is not None:
            tensors[name] = np.asarray(span, dtype)
            continue
        kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
        nodes += [node("Shape", ["x"], ["s"], start=1, end=2),
                  node("Cast", ["s"], [name], to=kind)]  # fmt: skip
    nodes.append(node("Slice", ["h", *names], ["y"]))
    width = {"axes": 3, "none": 4, "steps": 3, "computed": 4, "two": 4}[form]
    forward = forward_of(nodes, [("x", ["b", 4])], [("y", ["b", width])], tensors, opset=17)
    assert_slope(model_with(forward), normal(2, 4), np.zeros((2, width), np.float32))


@pytest.mark.parametrize("dtype", WHOLE)
@pytest.mark.parametrize("op", ["Gather", "GatherElements", "ScatterElements", "CumSum", "OneHot"])
def test_indices_of_either_kind(op: str, dtype) -> None:
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    product = node("MatMul", ["x", "w"], ["h"])
    x, inputs = normal(2, 4), [("x", [2, 4])]
    tensors = {"w": normal(4, 6), "i": np.asarray([[5, 0, -5], [1, 2, 3]], dtype)}
    nodes = {
        "Gather": [product, node("Gather", ["h", "j"], ["y"], axis=1)],
        "GatherElements": [product, node("GatherElements", ["h", "i"], ["y"], axis=1)],
        "ScatterElements": [product, node("ScatterElements", ["h", "i", "u"], ["y"], axis=1)],
        "CumSum": [product, node("CumSum", ["h", "a"], ["y"])],
        "OneHot": [node("OneHot", ["x", "d", "v"], ["o"]), node("MatMul", ["o", "w"], ["y"])],
    }[op]
    tensors |= {"j": np.asarray([5, 0, -6], dtype), "u": normal(2, 3), "a": np.asarray(1, dtype),
                "d": np.asarray(4, dtype), "v": np.asarray([0.0, 1.0], np.float32)}  # fmt: skip
    shape = {"Gather": (2, 3), "GatherElements": (2, 3), "OneHot": (2, 4, 6)}.get(op, (2, 6))
    if op == "OneHot":
        x, inputs = np.asarray([[1, 2, 3, 3], [0, 0, 1, 2]], dtype), [("x", [2, 4], kind)]
    used = {name for each in nodes for name in each.input}
    held = {name: value for name, value in tensors.items() if name in used}
    forward = forward_of(nodes, inputs, [("y", list(shape))], held, opset=17)
    assert_slope(model_with(forward), x, np.zeros(shape, np.float32))


def test_a_rank_that_follows_from_whole_numbers_is_known() -> None:
    """As PyTorch's older exporter writes the projections of attention: cut at 2 mod 3."""
    nodes = [
        node("MatMul", ["x", "w"], ["h"]),
        node("Mod", ["two", "three"], ["cut"]),
        node("Add", ["cut", "one"], ["after"]),
        node("Shape", ["h"], ["s"]),
        node("Slice", ["s", "zero", "cut"], ["before"]),
        node("Slice", ["s", "after", "end"], ["behind"]),
        node("Div", ["eight", "two"], ["half"]),
        node("Cast", ["half"], ["width"], to=7),
        node("Concat", ["before", "three", "width", "behind"], ["shape"], axis=0),
        node("Reshape", ["h", "shape"], ["parts"]),
        node("Gather", ["parts", "first"], ["one_part"], axis=2),
        node("ReduceMean", ["one_part", "one"], ["y"], keepdims=0),
    ]
    whole = {"two": [2], "three": [3], "one": [1], "zero": [0], "end": [2**62], "eight": [8]}
    tensors = {name: np.asarray(value) for name, value in whole.items()}
    tensors |= {"w": normal(8, 12), "first": np.asarray(1)}
    forward = forward_of(nodes, [("x", ["b", "t", 8])], [("y", ["b", 4])], tensors, opset=18)
    assert_slope(model_with(forward), normal(2, 5, 8), np.zeros((2, 4), np.float32))
