"""Rules of image ops, products, attention and likelihood losses against central differences.

The differences are taken of ONNX Runtime in float64 where it has the kernel, else of ONNX's
reference evaluator where both agree on the forward pass, else of ONNX Runtime in float32. The
gradient graph runs in ONNX Runtime in float32, as on a node. A few cases of each op run by
default, the sweep over attributes is slow.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import onnx
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from onnx import ModelProto, NodeProto, helper, numpy_helper
from onnx.helper import make_node as node

from bbnode.components.autodiff import GradientRuleError, TrainingGraphs, training_graphs
from bbnode.ir.onnx_file import subgraph_of
from bbnode.ir.versions import means_the_same
from tests.components.graphs import check, numeric_gradient, ort_runner, run_ort, run_reference
from tests.components.test_autodiff_rules import Case, arrays

Shape = tuple[int, ...]
F32, I64 = np.float32, np.int64
OPSET, IR_VERSION = 25, 13

# ONNX's reference evaluator computes these in float32, or not as their operator pages say; and it
# can't run ConvTranspose for several groups of several channels, or with output_shape.
NO_REFERENCE = {"AffineGrid", "GridSample", "LRN", "MaxUnpool"}

# Inputs that are not differentiated, by op.
SETTINGS = {"Resize": (1, 2, 3), "Attention": (3, 6), "RotaryEmbedding": (3,)}

CASES: list[tuple[str, Case, bool]] = []  # name, case, whether it is quick


def add(
    case_name: str, inputs: Sequence[str], params: Mapping[str, Shape],
    constants: Mapping[str, np.ndarray] | None = None, *, op: str, quick: bool = False,
    outputs: Sequence[str] = ("y",), more: Iterable[NodeProto] = (), batch: bool = False,
    symbolic: bool = False, feeds: Mapping[str, Shape] | None = None, positive: bool = False,
    **attributes: object,
) -> None:  # fmt: skip
    nodes = [node(op, list(inputs), list(outputs), **attributes), *more]
    case = Case(op, nodes, params, constants or {}, positive, feeds or {}, symbolic, batch)
    CASES.append((f"{op}-{case_name}", case, quick))


def ints(*values: int) -> np.ndarray:
    return np.array(values, I64)


# --- images -----------------------------------------------------------------------------------


def transposed(name: str, x: Shape, kernel: Shape, bias: bool = True, **settings: object) -> None:
    groups = int(str(settings.get("group", 1)))
    params = {"a": x, "k": kernel} | ({"c": (kernel[1] * groups,)} if bias else {})
    add(name, list(params), params, op="ConvTranspose", **settings)


transposed("plain", (2, 2, 3, 4), (2, 3, 3, 2))
transposed("strides", (2, 2, 3, 4), (2, 3, 3, 2), bias=False, strides=[2, 3])
transposed("padded", (1, 2, 3, 3), (2, 1, 3, 3), strides=[2, 2], pads=[1, 1, 1, 1],
           output_padding=[1, 1], quick=True)  # fmt: skip
transposed("groups", (1, 4, 3, 3), (4, 2, 3, 2), group=2, strides=[2, 1], pads=[1, 0, 0, 1],
           quick=True)  # fmt: skip
transposed("dilated", (1, 2, 3, 3), (2, 1, 2, 2), dilations=[2, 3])
transposed("line", (1, 2, 4), (2, 2, 3), strides=[2], pads=[1, 0])
transposed("volume", (1, 1, 2, 2, 2), (1, 2, 2, 2, 2), strides=[2, 1, 2])
transposed("beyond", (1, 2, 3, 3), (2, 1, 2, 2), strides=[3, 3], output_padding=[2, 1], quick=True)
transposed("beyond-unit-kernel", (1, 2, 3, 3), (2, 1, 1, 1), strides=[2, 2], output_padding=[1, 1])
transposed("output-shape", (1, 2, 3, 3), (2, 1, 3, 3), strides=[2, 2], output_shape=[6, 7])
transposed("same-upper", (1, 2, 3, 3), (2, 1, 3, 3), strides=[2, 2], auto_pad="SAME_UPPER")
transposed("same-lower", (1, 2, 3, 3), (2, 1, 3, 2), strides=[2, 2], auto_pad="SAME_LOWER")
transposed("valid", (1, 2, 3, 3), (2, 1, 3, 2), strides=[2, 2], auto_pad="VALID")
add("symbolic-batch", ["x", "k"], {"k": (2, 1, 3, 3)}, op="ConvTranspose", batch=True,
    feeds={"x": (3, 2, 3, 3)}, strides=[2, 2])  # fmt: skip


def resized(
    name: str, x: Shape, scales: Sequence[float] = (), sizes: Sequence[int] = (),
    roi: Sequence[float] = (), **settings: object,
) -> None:  # fmt: skip
    inputs = ["a", "roi" if roi else "", "scales" if scales else "", "sizes" if sizes else ""]
    constants = {"roi": np.array(roi, F32), "scales": np.array(scales, F32), "sizes": ints(*sizes)}
    used = {key: value for key, value in constants.items() if value.size}
    while not inputs[-1]:
        inputs.pop()
    add(name, inputs, {"a": x}, used, op="Resize", **settings)


PLACES = ("half_pixel", "asymmetric", "align_corners", "pytorch_half_pixel", "half_pixel_symmetric")
for _mode, _place in itertools.product(("nearest", "linear", "cubic"), PLACES):
    _at = {"mode": _mode, "coordinate_transformation_mode": _place}
    resized(f"{_mode}-{_place}-scales", (1, 2, 3, 4), [1, 1, 2, 1.7], **_at)
    resized(f"{_mode}-{_place}-sizes", (1, 2, 5, 4), sizes=[1, 2, 3, 7], **_at)
for _rounding, _place in itertools.product(
    ("round_prefer_floor", "round_prefer_ceil", "floor", "ceil"), ("half_pixel", "asymmetric")
):
    _at = {"nearest_mode": _rounding, "coordinate_transformation_mode": _place}
    resized(f"{_rounding}-{_place}", (1, 1, 3, 4), [1, 1, 2, 3], **_at)
    resized(f"{_rounding}-{_place}-part", (1, 1, 3, 4), [1, 1, 4, 1.5], **_at)
resized("unet", (2, 2, 3, 4), [1, 1, 2, 2], coordinate_transformation_mode="asymmetric",
        nearest_mode="floor", quick=True)  # fmt: skip
resized("bilinear", (1, 2, 3, 4), sizes=[1, 2, 5, 7], mode="linear", quick=True)
resized("antialias", (1, 1, 6, 5), [1, 1, 0.5, 0.6], mode="linear", antialias=1, quick=True)
resized("antialias-cubic", (1, 1, 6, 5), [1, 1, 0.5, 0.6], mode="cubic", antialias=1,
        cubic_coeff_a=-0.5)  # fmt: skip
resized("exclude", (1, 1, 6, 5), [1, 1, 1.4, 0.6], mode="cubic", exclude_outside=1)
resized("axes", (1, 2, 6, 5), [1.5, 0.6], axes=[2, 3], mode="linear")
resized("axes-turned", (1, 2, 6, 5), sizes=[4, 9], axes=[3, 2])
resized("not-larger", (1, 2, 6, 5), sizes=[4, 9], axes=[2, 3], mode="linear",
        keep_aspect_ratio_policy="not_larger")  # fmt: skip
resized("not-smaller", (1, 1, 6, 5), sizes=[4, 9], axes=[2, 3],
        keep_aspect_ratio_policy="not_smaller")  # fmt: skip
resized("crop", (1, 1, 4, 5), sizes=[1, 1, 3, 3], roi=[0, 0, 0.2, 0.3, 1, 1, 0.8, 1.2],
        mode="linear", coordinate_transformation_mode="tf_crop_and_resize",
        extrapolation_value=10.0)  # fmt: skip
resized("volume", (1, 1, 3, 3, 3), [1, 1, 2, 2, 2], mode="linear")
resized("line", (1, 1, 5), [1, 1, 1.6], mode="linear")
resized("matrix", (3, 4), [2, 0.5], mode="linear")
resized("middle", (3, 4, 2), [1, 2, 1])
resized("channels", (2, 3), [2, 1.5])
_SCALES = {"s": np.array([1, 1, 1.5, 2], F32)}
add("symbolic-batch", ["x", "", "s"], {"k": (2, 1, 1, 1)}, _SCALES, op="Resize",
    feeds={"x": (3, 1, 4, 3)}, batch=True, mode="linear", outputs=["r"],
    more=[node("Conv", ["r", "k"], ["y"])])  # fmt: skip

for _layout in ("DCR", "CRD"):
    add(_layout, ["a"], {"a": (2, 8, 2, 3)}, op="DepthToSpace", blocksize=2, mode=_layout,
        quick=True)  # fmt: skip
add("blocks", ["a"], {"a": (2, 2, 4, 6)}, op="SpaceToDepth", blocksize=2, quick=True)
add("both", ["a", "s"], {"a": (3, 5)}, {"s": ints(6, 2)}, op="CenterCropPad", quick=True)
add("axes", ["a", "s"], {"a": (2, 4, 3)}, {"s": ints(2, 5)}, op="CenterCropPad", axes=[1, -1])
for _count, _settings in (
    (12, {}), (6, {"strides": [2, 1]}), (30, {"pads": [1, 0, 1, 2]}), (4, {"dilations": [1, 2]}),
):  # fmt: skip
    _constants = {"i": ints(5, 5), "b": ints(2, 3)}
    add("-".join(_settings), ["a", "i", "b"], {"a": (1, 12, _count)}, _constants, op="Col2Im",
        quick=_count == 6, **_settings)  # fmt: skip
add("plane", ["a", "i"], {"a": (1, 1, 2, 2)}, {"i": ints(1, 3, 10, 8).reshape(1, 1, 2, 2)},
    op="MaxUnpool", kernel_shape=[2, 2], strides=[2, 2], quick=True)  # fmt: skip
for _order in (1, 2, 3):
    add(f"p{_order}", ["a"], {"a": (1, 2, 5, 4)}, op="LpPool", p=_order, kernel_shape=[2, 3],
        strides=[2, 1], pads=[1, 0, 0, 1], quick=_order == 3)  # fmt: skip
add("ceil", ["a"], {"a": (1, 2, 5, 4)}, op="LpPool", kernel_shape=[2, 2], strides=[2, 3],
    ceil_mode=1)  # fmt: skip
add("dilated", ["a"], {"a": (1, 1, 6, 5)}, op="LpPool", kernel_shape=[2, 2], dilations=[2, 1])
add("same", ["a"], {"a": (1, 1, 6, 5)}, op="LpPool", kernel_shape=[2, 2], strides=[2, 2],
    auto_pad="SAME_LOWER")  # fmt: skip
for _size in (1, 3, 5):
    add(f"size{_size}", ["a"], {"a": (2, 4, 2, 3)}, op="LRN", size=_size, alpha=0.3, beta=0.6,
        bias=1.5, quick=_size == 3)  # fmt: skip
for _ceil, _included in itertools.product((0, 1), (0, 1)):
    _at = {"op": "AveragePool", "ceil_mode": _ceil, "count_include_pad": _included}
    add(f"a{_ceil}{_included}", ["a"], {"a": (1, 2, 6, 5)}, kernel_shape=[3, 2], strides=[2, 2],
        pads=[1, 0, 1, 1], quick=True, **_at)  # fmt: skip
    add(f"b{_ceil}{_included}", ["a"], {"a": (1, 1, 7, 5)}, kernel_shape=[2, 2], strides=[3, 3],
        pads=[0, 1, 1, 1], **_at)  # fmt: skip
    add(f"c{_ceil}{_included}", ["a"], {"a": (1, 1, 7, 6)}, kernel_shape=[2, 2], strides=[3, 2],
        dilations=[2, 2], pads=[1, 1, 1, 1], **_at)  # fmt: skip

for _mode, _padding, _aligned in itertools.product(
    ("linear", "nearest", "cubic"), ("zeros", "border", "reflection"), (0, 1)
):
    add(f"{_mode}-{_padding}-{_aligned}", ["a", "g"], {"a": (2, 2, 3, 4), "g": (2, 2, 3, 2)},
        op="GridSample", mode=_mode, padding_mode=_padding, align_corners=_aligned,
        quick=_padding == "reflection" and not _aligned)  # fmt: skip
add("volume", ["a", "g"], {"a": (1, 2, 3, 2, 3), "g": (1, 2, 2, 1, 3)}, op="GridSample")
for _aligned in (0, 1):
    add(f"plane{_aligned}", ["t", "s"], {"t": (2, 2, 3)}, {"s": ints(2, 3, 4, 2)}, op="AffineGrid",
        align_corners=_aligned, quick=not _aligned)  # fmt: skip
    add(f"volume{_aligned}", ["t", "s"], {"t": (2, 3, 4)}, {"s": ints(2, 3, 2, 3, 2)},
        op="AffineGrid", align_corners=_aligned)  # fmt: skip


# --- products ---------------------------------------------------------------------------------

EQUATIONS: list[tuple[str, list[Shape], bool]] = [
    ("ij,jk->ik", [(2, 3), (3, 4)], False),
    ("bhid,bhjd->bhij", [(2, 2, 3, 2), (2, 2, 4, 2)], True),
    ("ii->i", [(3, 3)], True), ("ii->", [(3, 3)], False), ("iij->j", [(2, 2, 3)], False),
    ("iijj->ij", [(2, 2, 3, 3)], False), ("ii,ij->j", [(2, 2), (2, 3)], False),
    ("ij->", [(2, 3)], False), ("ij->ji", [(2, 3)], False), ("ij,k->i", [(2, 3), (4,)], True),
    ("i,j->ij", [(2,), (3,)], False), ("i,i->", [(3,), (3,)], False),
    (",ij->ij", [(), (2, 3)], False), (",->", [(), ()], False),
    ("ij,jk", [(2, 3), (3, 2)], False), ("ij,kj", [(2, 3), (4, 3)], False),
    ("b n d , n d -> b n", [(2, 3, 2), (3, 2)], False),
    ("...ij,...jk->...ik", [(2, 2, 3), (2, 3, 2)], False),
    ("...ij,...jk->...ik", [(1, 2, 3), (4, 3, 2)], True),
    ("...ij,jk->...ik", [(2, 2, 3), (3, 2)], False),
    ("...i->...", [(2, 3, 2)], False), ("i...->...", [(2, 3, 2)], False),
    ("bij,bjk,kl->bil", [(2, 2, 3), (2, 3, 2), (2, 2)], True),
    ("abc,cd,de->abe", [(2, 1, 2), (2, 3), (3, 2)], False),
    ("ij,ij->ij", [(2, 3), (2, 1)], True),
]  # fmt: skip
for _number, (_equation, _shapes, _quick) in enumerate(EQUATIONS):
    _names = [f"p{i}" for i in range(len(_shapes))]
    add(f"{_number}:{_equation}", _names, dict(zip(_names, _shapes, strict=True)), op="Einsum",
        equation=_equation, quick=_quick)  # fmt: skip
add("symbolic", ["x", "w"], {"w": (4, 3)}, op="Einsum", equation="...i,io->...o",
    feeds={"x": (2, 3, 4)}, symbolic=True, quick=True)  # fmt: skip


# --- attention --------------------------------------------------------------------------------


def attention(
    name: str, q: Shape = (2, 2, 3, 4), k: Shape = (2, 2, 5, 4), v: Shape = (2, 2, 5, 3), *,
    mask: np.ndarray | Shape | None = None, past: int = 0, valid: Sequence[int] = (),
    **settings: object,
) -> None:  # fmt: skip
    params: dict[str, Shape] = {"q": q, "k": k, "v": v}
    constants: dict[str, np.ndarray] = {}
    inputs = ["q", "k", "v", "", "", "", ""]
    if mask is not None:
        inputs[3] = "m"
        if isinstance(mask, tuple):
            params["m"] = mask
        else:
            constants["m"] = mask
    if past:
        heads = k[1] if len(k) == 4 else int(str(settings["kv_num_heads"]))
        for index, (key, shape) in enumerate((("pk", k), ("pv", v))):
            width = shape[3] if len(shape) == 4 else shape[2] // heads
            params[key] = (k[0], heads, past, width)
            inputs[4 + index] = key
    if valid:
        constants["n"] = ints(*valid)
        inputs[6] = "n"
    while not inputs[-1]:
        inputs.pop()
    add(name, inputs, params, constants, op="Attention", **settings)


SEEN = np.random.default_rng(1).random((3, 5)) > 0.4
SEEN[:, 0] = True
BLIND = SEEN.copy()
BLIND[1] = False
attention("plain")
attention("causal", is_causal=1)
attention("scale-and-cap", scale=0.7, softcap=1.5, quick=True)
attention("mask", mask=SEEN)
attention("mask-of-a-blind-row", mask=BLIND, quick=True)
attention("bias", mask=np.random.default_rng(2).normal(size=(2, 1, 3, 5)))
attention("infinite-bias", mask=np.where(BLIND, 0.3, -np.inf), quick=True)
# As exporters write it: a finite bias, where causality leaves nothing else to see.
attention("lowest-bias", is_causal=1, quick=True,
          mask=np.array([[-1e30, 0, 0, 0, 0], [-1e30, 0, 0, 0, 0], [0.0] * 5]))  # fmt: skip
attention("trained-bias", mask=(2, 3, 5))
attention("short-mask", mask=SEEN[:, :4])
attention("short-bias", mask=np.ones((3, 4)))
attention("grouped", q=(2, 4, 3, 4), quick=True)
attention("one-key-head", q=(2, 4, 3, 4), k=(2, 1, 5, 4), v=(2, 1, 5, 3), is_causal=1)
attention("3d", q=(2, 3, 8), k=(2, 5, 8), v=(2, 5, 6), q_num_heads=2, kv_num_heads=2)
attention("3d-grouped", q=(2, 3, 8), k=(2, 5, 4), v=(2, 5, 6), q_num_heads=4, kv_num_heads=2,
          is_causal=1, quick=True)  # fmt: skip
attention("past", past=2)
attention("past-causal", past=2, is_causal=1, quick=True)
attention("past-3d", q=(2, 3, 8), k=(2, 5, 8), v=(2, 5, 6), q_num_heads=2, kv_num_heads=2, past=2)
attention("present", past=2, outputs=["o", "k1", "v1"], more=[
    *(node("ReduceSum", [name], [f"s{name}"], keepdims=0) for name in ("o", "k1", "v1")),
    node("Mul", ["so", "sk1"], ["s"]), node("Mul", ["s", "sv1"], ["y"])])  # fmt: skip
for _level in (0, 3):
    attention(f"scores{_level}", outputs=["o", "", "", "qk"], qk_matmul_output_mode=_level, more=[
        node("ReduceMean", ["o"], ["s"], keepdims=0), node("Mul", ["qk", "s"], ["y"])])  # fmt: skip
attention("lengths", valid=[3, 5])
attention("lengths-causal", valid=[4, 5], is_causal=1)
attention("window", q=(1, 2, 5, 4), k=(1, 2, 5, 4), v=(1, 2, 5, 3), left_window_size=1,
          right_window_size=1)  # fmt: skip
add("of-itself", ["q", "q", "q"], {"q": (2, 2, 3, 4)}, op="Attention", is_causal=1, quick=True)
add("symbolic-batch", ["x", "k", "v"], {"k": (2, 2, 5, 4), "v": (2, 2, 5, 3)}, op="Attention",
    feeds={"x": (2, 2, 3, 4)}, batch=True)  # fmt: skip


def rotary(
    name: str, x: Shape, table: Shape, places: Sequence[Sequence[int]] = (), *, quick: bool = False,
    **settings: object,
) -> None:  # fmt: skip
    """Both layouts of a head, with tables that are constants and with trained ones."""
    rng = np.random.default_rng(3)
    for layout, trained in itertools.product((0, 1), (False, True)):
        tables = {"c": rng.normal(size=table), "s": rng.normal(size=table)}
        constants = {} if trained else dict(tables)
        if places:
            constants["p"] = np.array(places, I64)
        add(f"{name}-{layout}-{trained}", ["x", "c", "s", *(["p"] if places else [])],
            {"x": x} | (dict.fromkeys(tables, table) if trained else {}), constants,
            op="RotaryEmbedding", interleaved=layout, quick=quick, **settings)  # fmt: skip


rotary("4d", (2, 2, 3, 6), (2, 3, 3))
rotary("places", (2, 2, 3, 6), (5, 3), [[0, 1, 2], [2, 4, 3]])
rotary("3d", (2, 3, 12), (2, 3, 3), num_heads=2)
rotary("part", (2, 2, 3, 6), (2, 3, 2), rotary_embedding_dim=4, quick=True)
rotary("part-3d", (2, 3, 12), (4, 2), [[0, 1, 3], [0, 0, 1]], rotary_embedding_dim=4, num_heads=2)


# --- likelihood -------------------------------------------------------------------------------

for _op, _reduction, _weighted, _ignored, _shape in itertools.product(
    ("SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss"), ("mean", "sum", "none"),
    (False, True), (None, 1, -1), ((4, 3), (2, 3, 2, 2)),
):  # fmt: skip
    _labels = np.random.default_rng(5).integers(0, 3, (_shape[0], *_shape[2:]))
    _more: dict[str, object] = {}
    if _ignored is not None:
        _labels.flat[0] = _ignored
        _more["ignore_index"] = _ignored
    _constants = {"l": _labels.astype(I64 if _weighted else np.int32)}
    if _weighted:
        _constants["w"] = np.array([0.5, 2.0, 1.0])
    add(f"{_reduction}-{_weighted}-{_ignored}-{len(_shape)}", ["x", *_constants], {"x": _shape},
        _constants, op=_op, reduction=_reduction,
        quick=_weighted and _ignored == -1 and len(_shape) == 4, **_more)  # fmt: skip
_LABELS = {"l": ints(0, 2, 1, 1)}
add("both-outputs", ["x", "l"], {"x": (4, 3)}, _LABELS, op="SoftmaxCrossEntropyLoss",
    outputs=["s", "p"], more=[node("Mul", ["s", "p"], ["y"])], quick=True)  # fmt: skip
add("log-probabilities", ["x", "l"], {"x": (4, 3)}, _LABELS, op="SoftmaxCrossEntropyLoss",
    outputs=["s", "y"])  # fmt: skip
add("trained-weights", ["x", "l", "w"], {"x": (4, 3), "w": (3,)}, _LABELS, positive=True,
    op="SoftmaxCrossEntropyLoss")  # fmt: skip


# GlobalLpPool has a test of its own.
OPS = frozenset({"GlobalLpPool", *(case.op for _, case, _ in CASES)})


def forward_model(
    case: Case, params: Mapping[str, np.ndarray], inputs: Mapping[str, np.ndarray], dtype: type
) -> ModelProto:
    elem = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    infos = []
    for name, array in inputs.items():
        dims: list[int | str] = [*array.shape]
        if case.symbolic:
            dims = [f"{name}{axis}" for axis in range(array.ndim)]
        elif case.batch:
            dims[0] = "batch"
        infos.append(helper.make_tensor_value_info(name, elem, dims))
    # Numbers of float32 are settings, which are of that type in every model.
    constants = {n: a.astype(dtype) if a.dtype == np.float64 else a
                 for n, a in case.constants.items()}  # fmt: skip
    tensors = {name: array.astype(dtype) for name, array in params.items()} | constants
    graph = helper.make_graph(
        case.nodes, "g", infos, [helper.make_tensor_value_info("y", elem, None)],
        [numpy_helper.from_array(array, name) for name, array in tensors.items()],
    )  # fmt: skip
    model = helper.make_model(
        graph, ir_version=IR_VERSION, opset_imports=[helper.make_opsetid("", OPSET)]
    )
    return onnx.shape_inference.infer_shapes(model, data_prop=True)


def cast(feeds: Mapping[str, np.ndarray], dtype: type) -> dict[str, np.ndarray]:
    return {name: np.asarray(array, dtype) for name, array in feeds.items()}


def settings_of(case: Case) -> set[str]:
    return {attribute.name for attribute in case.nodes[0].attribute}


def differences(
    case: Case, graphs: dict[type, TrainingGraphs], feeds: Mapping[str, np.ndarray],
    y: np.ndarray, cotangent: np.ndarray, name: str,
) -> tuple[np.ndarray, float]:  # fmt: skip
    """The gradient by central differences, and how well it may be trusted."""
    exact = graphs[np.float64]
    wide = cast(feeds, np.float64)
    y_name = exact.output_name
    try:
        run = ort_runner(exact.forward)
        run([y_name], wide)
    except Exception:  # noqa: BLE001  # no kernel of float64: one of several types
        run = None
    if (
        run is None
        and case.op not in NO_REFERENCE
        and settings_of(case).isdisjoint({"group", "output_shape"})
    ):
        made = run_reference(exact.forward, wide)[y_name]
        if np.allclose(made, y, rtol=1e-4, atol=1e-5):
            return numeric_gradient(exact.forward, wide, name, y_name, cotangent), 2e-4
    if run is not None:
        return numeric_gradient(exact.forward, wide, name, y_name, cotangent, 1e-6, run), 2e-4
    small = graphs[F32].forward
    runner = ort_runner(small)
    return numeric_gradient(small, cast(feeds, F32), name, y_name, cotangent, 1e-2, runner), 5e-3


def case_params() -> list[object]:
    return [
        pytest.param(case, id=name, marks=[] if quick else [pytest.mark.slow])
        for name, case, quick in CASES
    ]


@pytest.mark.parametrize("case", case_params())
def test_rule_agrees_with_differences(case: Case) -> None:
    agree(case, arrays(case.params, case.positive, 0), arrays(case.inputs, case.positive, 1))


def agree(case: Case, params: Mapping[str, np.ndarray], inputs: Mapping[str, np.ndarray]) -> None:
    graphs = {
        dtype: training_graphs(forward_model(case, params, inputs, dtype), "mse", wrt=list(params))
        for dtype in (np.float64, F32)
    }
    small = graphs[F32]
    check(small.pullback)
    feeds = {**params, **inputs}
    y = run_ort(small.forward, cast(feeds, F32))[small.output_name]
    cotangent = np.random.default_rng(2).normal(size=np.shape(y))
    everything = {**feeds, small.output_gradient_name: cotangent}
    found = run_ort(small.pullback, cast(everything, F32))
    for name, gradient in zip(small.parameter_names, small.gradient_names, strict=True):
        expected, tolerance = differences(case, graphs, feeds, y, cotangent, name)
        assert found[gradient].shape == params[name].shape
        np.testing.assert_allclose(found[gradient], expected, rtol=tolerance, atol=tolerance)


def nodes_of_onnx() -> Iterable[tuple[str, Case, dict[str, np.ndarray]]]:
    """ONNX's node tests of the ops here, by name, with the values of what is differentiated."""
    from onnx.backend.test.case.node import collect_testcases

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        collected = {case.name: case for case in collect_testcases(None)}
    for name, found in collected.items():
        graph = found.model.graph
        made = graph.node[0]
        if len(graph.node) > 1 or made.op_type not in OPS or "output_shape" in name:
            continue
        copied = NodeProto()
        copied.CopyFrom(made)
        # Some have a "y" among their inputs, which is the output here.
        copied.input[:] = [key and f"in_{key}" for key in made.input]
        copied.output[0] = "y"
        values = {
            f"in_{port.name}": value
            for port, value in zip(graph.input, found.data_sets[0][0], strict=True)
        }
        wanted = [
            key for position, key in enumerate(copied.input)
            if position not in SETTINGS.get(made.op_type, ()) and key
            and values[key].dtype == F32 and values[key].size < 200
        ]  # fmt: skip
        if not wanted or found.data_sets[0][1][0].dtype != F32:
            continue
        view = next(iter(subgraph_of(graph).all_nodes()))
        if not means_the_same(view, found.model.opset_import[0].version, OPSET):
            continue
        # Constants of float64 take the type of the data; the settings of Resize have their own.
        kind = F32 if made.op_type == "Resize" else np.float64
        held = {
            key: value.astype(kind) if value.dtype == F32 else value
            for key, value in values.items() if key not in wanted
        }  # fmt: skip
        shapes = {key: values[key].shape for key in wanted}
        case = Case(made.op_type, [copied], shapes, held)
        # Off the round numbers, where kinks and equal elements are.
        rng = np.random.default_rng(0)
        yield (
            name,
            case,
            {key: values[key] + rng.uniform(0.01, 0.04, values[key].shape) for key in wanted},
        )


@pytest.mark.slow
def test_nodes_of_onnx() -> None:
    count = 0
    for name, case, params in nodes_of_onnx():
        print(name)  # shown where it fails
        try:
            agree(case, params, {})
        except GradientRuleError as error:
            if "qk_matmul_output_mode" not in str(error):
                raise
        count += 1
    assert count > 100


# What gives the input of a ConvTranspose: nodes that the forward pass has in another form where
# their gradients need more than their outputs.
BEFORE: dict[str, tuple[list[NodeProto], Mapping[str, Shape], Mapping[str, np.ndarray]]] = {
    "nothing": ([node("Identity", ["a"], ["h"])], {}, {}),
    "Conv": ([node("Conv", ["a", "q"], ["h"])], {"q": (16, 16, 1, 1)}, {}),
    "ConvTranspose": ([node("ConvTranspose", ["a", "q"], ["h"])], {"q": (16, 16, 1, 1)}, {}),
    "Gelu": ([node("Gelu", ["a"], ["h"])], {}, {}),
    "LayerNormalization": (
        [node("LayerNormalization", ["a", "q", "r"], ["h"], axis=1)],
        {"q": (16, 1, 1), "r": (16, 1, 1)},
        {},
    ),
    "MaxPool": ([node("MaxPool", ["a"], ["h"], kernel_shape=[1, 1])], {}, {}),
    "MatMul": (
        [node("MatMul", ["a", "q"], ["m"]), node("Reshape", ["m", "s"], ["h"])],
        {"q": (1, 1)},
        {"s": ints(0, 16, -1, 1)},
    ),
}


@pytest.mark.parametrize("before", BEFORE)
@pytest.mark.parametrize("positions", range(1, 9))
def test_a_transposed_convolution_leaves_the_node_before_it_alone(
    before: str, positions: int
) -> None:
    nodes, more, constants = BEFORE[before]
    made = node("ConvTranspose", ["h", "k"], ["y"], strides=[1 + positions % 2, 1])
    params = {"a": (2, 16, positions, 1), "k": (16, 2, 2, 1), **more}
    assert_like_differences(Case("ConvTranspose", [*nodes, made], params, constants))


def assert_like_differences(case: Case) -> None:
    """Every gradient, in float32, along one direction of all parameters, as differences have it."""
    arrays_of = arrays(case.params, False, 0)
    graphs = training_graphs(forward_model(case, arrays_of, {}, F32), "mse", wrt=list(case.params))
    check(graphs.pullback)
    run = ort_runner(graphs.forward)
    values = cast(arrays_of, F32)
    (y,) = run([graphs.output_name], values)
    rng = np.random.default_rng(2)
    cotangent = rng.normal(size=np.shape(y)).astype(F32)
    found = run_ort(graphs.pullback, {**values, graphs.output_gradient_name: cotangent})
    for name, gradient in zip(graphs.parameter_names, graphs.gradient_names, strict=True):
        # In a direction that all of the gradient tells in; y is linear in most of them.
        way = rng.normal(size=values[name].shape).astype(F32)
        ends = [
            run([graphs.output_name], {**values, name: values[name] + sign * F32(1e-2) * way})[0]
            for sign in (1, -1)
        ]
        slope = np.sum((ends[0].astype(float) - ends[1]) * cotangent) / 2e-2
        scale = np.linalg.norm(found[gradient]) * np.linalg.norm(way)
        rounding = 1e-5 * np.abs(y * cotangent).sum()  # of float32, over the step
        found_slope = np.sum(found[gradient].astype(float) * way)
        assert abs(found_slope - slope) < 2e-3 * scale + rounding, name


@pytest.mark.slow
@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.data())
def test_transposed_convolutions_behind_any_node(data: st.DataObject) -> None:
    """One to eight positions, any stride, dilation, group, pad and output padding."""

    def either(low: int, high: int) -> int:
        return data.draw(st.integers(low, high))

    strides, dilations, kernel = ([either(1, 3), either(1, 2)] for _ in range(3))
    sizes = data.draw(st.sampled_from([(n, 1) for n in range(1, 9)] + [(2, 2), (2, 3), (2, 4)]))
    groups = data.draw(st.sampled_from([1, 1, 2, 16]))
    extra = [either(0, stride - 1) for stride in strides]
    whole = [
        s * (n - 1) + d * (k - 1) + 1
        for s, n, d, k in zip(strides, sizes, dilations, kernel, strict=True)
    ]
    pads = [either(0, min(1, (w - 1) // 2)) for w in whole * 2]
    before = data.draw(st.sampled_from([name for name in BEFORE if name != "MatMul"]))
    nodes, more, constants = BEFORE[before]
    made = node("ConvTranspose", ["h", "k", "c"], ["y"], strides=strides, dilations=dilations,
                pads=pads, output_padding=extra, group=groups)  # fmt: skip
    outputs = either(1, 2)
    params = {"a": (2, 16, *sizes), "k": (16, outputs, *kernel), "c": (outputs * groups,), **more}
    assert_like_differences(Case("ConvTranspose", [*nodes, made], params, constants))


@pytest.mark.slow
@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.data())
def test_transposed_convolutions_of_any_geometry(data: st.DataObject) -> None:
    axes = data.draw(st.integers(1, 2))

    def each(low: int, high: int) -> list[int]:
        return data.draw(st.lists(st.integers(low, high), min_size=axes, max_size=axes))

    strides, dilations, kernel, sizes = each(1, 3), each(1, 2), each(1, 3), each(1, 3)
    groups = data.draw(st.integers(1, 2))
    extra = [data.draw(st.integers(0, stride - 1)) for stride in strides]
    whole = [
        s * (n - 1) + d * (k - 1) + 1
        for s, n, d, k in zip(strides, sizes, dilations, kernel, strict=True)
    ]
    pads = [data.draw(st.integers(0, min(2, (w - 1) // 2))) for w in whole * 2]
    made = node("ConvTranspose", ["a", "k", "c"], ["y"], strides=strides, dilations=dilations,
                pads=pads, output_padding=extra, group=groups)  # fmt: skip
    params = {"a": (2, 2 * groups, *sizes), "k": (2 * groups, 2, *kernel), "c": (2 * groups,)}
    agree(Case("ConvTranspose", [made], params), arrays(params, False, 0), {})


@pytest.mark.slow
@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.data())
def test_einsum_of_any_equation(data: st.DataObject) -> None:
    sizes = {"a": 2, "b": 3, "c": 1, "D": 2}
    terms = data.draw(st.lists(st.text("abcD", max_size=3), min_size=1, max_size=3))
    wide = [data.draw(st.booleans()) for _ in terms]
    letters = sorted(set("".join(terms)))
    output = data.draw(st.permutations(letters))[: data.draw(st.integers(0, len(letters)))]
    equation = ",".join(("..." if w else "") + term for w, term in zip(wide, terms, strict=True))
    equation += "->" + ("..." if any(wide) else "") + "".join(output)
    shapes = {}
    for index, (w, term) in enumerate(zip(wide, terms, strict=True)):
        ahead = data.draw(st.sampled_from([(2, 1), (1, 1), (1, 3), (2, 3)])) if w else ()
        shapes[f"p{index}"] = (*ahead, *(sizes[label] for label in term))
    made = node("Einsum", list(shapes), ["y"], equation=equation)
    agree(Case("Einsum", [made], shapes), arrays(shapes, False, 0), {})


@pytest.mark.slow
@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.data())
def test_resizes_of_any_kind(data: st.DataObject) -> None:
    shape = (1, data.draw(st.integers(1, 2)), *(data.draw(st.integers(1, 5)) for _ in range(2)))
    mode = data.draw(st.sampled_from(["nearest", "linear", "cubic"]))
    made = {
        "mode": mode,
        "coordinate_transformation_mode": data.draw(st.sampled_from(PLACES)),
        "nearest_mode": data.draw(
            st.sampled_from(["round_prefer_floor", "round_prefer_ceil", "floor", "ceil"])
        ),
    }
    new = [data.draw(st.integers(1, 8)) for _ in range(2)]
    if mode != "nearest" and data.draw(st.booleans()):
        made["antialias"] = 1
    constants = {}
    if data.draw(st.booleans()):
        constants["s"] = ints(*shape[:2], *new)
        inputs = ["a", "", "", "s"]
    else:
        # Whole sixteenths: runtimes differ in how they round sizes of others.
        scales = [1, 1, *(n / 16 for n in (data.draw(st.integers(16, 48)) for _ in range(2)))]
        constants["s"] = np.array(scales, F32)
        inputs = ["a", "", "s"]
    case = Case("Resize", [node("Resize", inputs, ["y"], **made)], {"a": shape}, constants)
    try:
        agree(case, arrays(case.params, False, 0), {})
    except GradientRuleError as error:
        assume("leave all sizes as they are" not in str(error))
        raise


@pytest.mark.parametrize("order", [1, 2, 3])
def test_a_global_norm(order: int) -> None:
    """ONNX Runtime has its kernel of opset 2 alone, and the reference evaluator none."""
    made = node("GlobalLpPool", ["a"], ["y"], p=order)
    case = Case("GlobalLpPool", [made], {"a": (2, 2, 3, 2)})
    params = {"a": np.random.default_rng(0).normal(size=(2, 2, 3, 2)).astype(F32)}
    params["a"][0, 0] = 0.0  # a norm of nothing has the gradient 0
    graphs = training_graphs(forward_model(case, params, {}, F32), "mse")
    for model in (graphs.forward, graphs.pullback):
        model.opset_import[0].version = 21
    cotangent = np.random.default_rng(2).normal(size=(2, 2, 1, 1)).astype(F32)
    feeds = {**params, graphs.output_gradient_name: cotangent}
    (found,) = run_ort(graphs.pullback, feeds).values()
    assert not found[0, 0].any()
    run = ort_runner(graphs.forward)
    expected = numeric_gradient(
        graphs.forward, params, "a", graphs.output_name, cotangent, 1e-2, run
    )
    # There the differences are those of |x|, which has a kink.
    expected[0, 0] = 0.0
    np.testing.assert_allclose(found, expected, rtol=5e-3, atol=5e-3)


@pytest.mark.parametrize(
    ("made", "params", "constants", "says"),
    [
        (node("Attention", ["a", "a", "a"], ["o", "", "", "y"], qk_matmul_output_mode=2),
         {"a": (1, 2, 3, 4)}, {}, "qk_matmul_output_mode 2"),
        (node("Einsum", ["a", "b"], ["y"], equation="aB,Ac"), {"a": (2, 3), "b": (2, 3)}, {},
         "capital and small"),
        (node("MaxUnpool", ["a", "i", "s"], ["y"], kernel_shape=[2, 2], strides=[2, 2]),
         {"a": (1, 1, 2, 2)}, {"i": ints(1, 3, 10, 8).reshape(1, 1, 2, 2), "s": ints(1, 1, 5, 5)},
         "output_shape"),
        (node("Resize", ["a", "", "s"], ["y"]), {"a": (3, 4)}, {"s": np.array([1.1, 1.2], F32)},
         "leave all sizes as they are"),
        (node("Resize", ["a", "r", "", "s"], ["y"], mode="linear",
              coordinate_transformation_mode="tf_crop_and_resize"),
         {"a": (3, 4), "r": (4,)}, {"s": ints(3, 4)}, "the region 'r' depends"),
    ],
)  # fmt: skip
def test_what_a_rule_cannot_do_it_says(
    made: NodeProto, params: dict[str, Shape], constants: dict[str, np.ndarray], says: str
) -> None:
    case = Case(made.op_type, [made], params, constants)
    values = arrays(params, True, 0)
    forward = forward_model(case, values, {}, F32)
    if not forward.graph.output[0].type.tensor_type.HasField("shape"):
        for _ in range(4):  # inference does not look at output_shape
            forward.graph.output[0].type.tensor_type.shape.dim.add()
    with pytest.raises(GradientRuleError, match=says):
        training_graphs(forward, "mse", wrt=list(params))


@pytest.mark.parametrize("mode", ["nearest", "linear"])
def test_upsample_is_trained_as_resize(mode: str) -> None:
    """The op of models before opset 10, which the version converter turns into Resize."""
    weight = np.random.default_rng(0).normal(size=(1, 2, 3, 4)).astype(F32)
    graph = helper.make_graph(
        [node("Upsample", ["a", "scales"], ["y"], mode=mode)], "g", [],
        [helper.make_tensor_value_info("y", 1, [1, 2, 6, 8])],
        [numpy_helper.from_array(weight, "a"),
         numpy_helper.from_array(np.array([1, 1, 2, 2], F32), "scales")],
    )  # fmt: skip
    old = helper.make_model(graph, ir_version=8, opset_imports=[helper.make_opsetid("", 9)])
    graphs = training_graphs(old, "mse", wrt=["a"])
    cotangent = np.random.default_rng(1).normal(size=(1, 2, 6, 8)).astype(F32)
    feeds = {"a": weight, graphs.output_gradient_name: cotangent}
    (found,) = run_ort(graphs.pullback, feeds).values()
    run = ort_runner(old)
    # The old model has the weight as a constant: it is linear, so the forward graph is asked.
    expected = numeric_gradient(
        graphs.forward, {"a": weight}, "a", graphs.output_name, cotangent, 1e-2,
        ort_runner(graphs.forward),
    )  # fmt: skip
    np.testing.assert_allclose(found, expected, rtol=2e-3, atol=2e-3)
    (before,) = run(None, {})
    after = run_ort(graphs.forward, feeds)[graphs.output_name]
    np.testing.assert_allclose(after, before, rtol=1e-6)
