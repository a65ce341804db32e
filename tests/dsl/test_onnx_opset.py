"""Models of any opset that ONNX Runtime runs mean the same after they were brought to ours."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from bbnode.compiler import Compiler
from bbnode.components.backends.ort import OrtBackend
from bbnode.dsl import OnnxModule
from bbnode.dsl.errors import UnconvertibleModel
from bbnode.ir import keys
from tests.dsl.onnx_models import (
    assert_same,
    cnn,
    mlp,
    model_of,
    ort,
    port,
    run,
    run_compiled,
    x_of,
)

N = helper.make_node


@pytest.mark.parametrize("opset", [8, 9, 11, 13, 15, 17, 19, 20, 21, 22, 23, 24, 25, 26])
def test_a_cnn_of_any_opset(opset) -> None:
    model = cnn(opset=opset)
    x = x_of(2, 1, 8, 8)
    module = OnnxModule(model)
    versions = {o.domain: o.version for o in module.build().functions[0].opset_import}
    assert versions[""] == keys.ONNX_OPSET_VERSION
    assert_same(run(module, x=x), ort(model, x=x))


@pytest.mark.parametrize("opset", [9, 12, 17, 22, 25])
def test_an_mlp_of_any_opset_in_stages(opset) -> None:
    model = mlp(opset=opset)
    x = x_of(3, 8)
    assert_same(run(OnnxModule(model).split(stages=2), input_1=x), ort(model, input_1=x))


# Ops whose meaning, ports or attributes changed on the way, in their old spelling.
OLD = {
    "softmax of rank 3": (11, [N("Softmax", ["x"], ["y"])]),
    "axes of Squeeze": (11, [N("Unsqueeze", ["x"], ["u"], axes=[0]),
                             N("Squeeze", ["u"], ["y"], axes=[0])]),
    "axes of ReduceSum": (12, [N("ReduceSum", ["x"], ["y"], axes=[1])]),
    "axes of ReduceMean": (13, [N("ReduceMean", ["x"], ["y"], axes=[1], keepdims=0)]),
    "limits of Clip": (8, [N("Clip", ["x"], ["y"], min=-0.5, max=0.25)]),
    "pads of Pad": (10, [N("Pad", ["x"], ["y"], pads=[0, 0, 1, 0, 0, 2], value=3.0)]),
    "Slice by attributes": (9, [N("Slice", ["x"], ["y"], axes=[2], starts=[1], ends=[3])]),
    "TopK by attribute": (9, [N("TopK", ["x"], ["y", "where"], k=2, axis=2)]),
    "sizes of Split": (12, [N("Split", ["x"], ["a", "b"], axis=2, split=[1, 3]),
                            N("Concat", ["b", "a"], ["y"], axis=2)]),
    "Split in equal parts": (13, [N("Split", ["x"], ["a", "b"], axis=2),
                                  N("Sub", ["a", "b"], ["y"])]),
    "ratio of Dropout": (10, [N("Dropout", ["x"], ["y"], ratio=0.4)]),
    "types of Where": (9, [N("Greater", ["x", "x"], ["c"]), N("Where", ["c", "x", "x"], ["y"])]),
    "Upsample": (9, [N("Upsample", ["x", "scales"], ["y"], mode="nearest")]),
}  # fmt: skip


@pytest.mark.parametrize("name", OLD)
def test_old_spellings_keep_their_meaning(name) -> None:
    opset, nodes = OLD[name]
    scales = numpy_helper.from_array(np.array([1, 1, 2], np.float32), "scales")
    weights = [scales] if name == "Upsample" else []
    model = model_of(
        nodes, [port("x", [2, 3, 4])], [port("y", None)], weights, opset=opset, ir_version=7
    )
    x = x_of(2, 3, 4)
    assert_same(run(OnnxModule(model), x=x), ort(model, x=x))


def test_graphs_inside_of_ops_are_converted_too() -> None:
    then = helper.make_graph(
        [N("ReduceMean", ["x"], ["t"], axes=[1])], "then", [], [port("t", None)]
    )
    other = helper.make_graph(
        [N("ReduceMax", ["x"], ["e"], axes=[1])], "else", [], [port("e", None)]
    )
    model = model_of(
        [N("If", ["c"], ["y"], then_branch=then, else_branch=other)],
        [port("x", [2, 4]), port("c", [], TensorProto.BOOL)], [port("y", None)], opset=13,
    )  # fmt: skip
    for choice in (True, False):
        feeds = {"x": x_of(2, 4), "c": np.array(choice)}
        assert_same(run(OnnxModule(model), **feeds), ort(model, **feeds))


def test_an_opset_without_a_way_to_ours_is_refused_by_its_ops() -> None:
    model = model_of(
        [N("Resize", ["x", "roi", "none", "sizes"], ["y"], "half",
           coordinate_transformation_mode="tf_half_pixel_for_nn")],
        [port("x", [2, 4]), port("sizes", [2], TensorProto.INT64),
         port("roi", [0]), port("none", [0])],
        [port("y", [2, 4])], opset=12,
    )  # fmt: skip
    with pytest.raises(UnconvertibleModel) as error:
        OnnxModule(model, name="resized")
    text = str(error.value)
    assert text.startswith("resized (test_onnx_opset.py:")
    assert "opset 12 and cannot be brought to 25, because of Resize 'half'" in text
    assert "export it again with opset 25" in text


NEW = {
    "RMSNormalization": (23, [N("RMSNormalization", ["x", "s"], ["y"])], {"s": [4]}),
    "Attention": (23, [N("Attention", ["x", "x", "x"], ["y"], q_num_heads=2, kv_num_heads=2)], {}),
    "Attention that counts": (
        24, [N("Attention", ["x", "x", "x"], ["y"], q_num_heads=1, kv_num_heads=1,
               is_causal=1)], {}),
    "RotaryEmbedding": (
        23, [N("RotaryEmbedding", ["x", "cos", "sin"], ["y"], num_heads=1)],
        {"cos": [2, 3, 2], "sin": [2, 3, 2]}),
    "Swish": (24, [N("Swish", ["x"], ["y"])], {}),
    "Swish of its own slope": (25, [N("Swish", ["x"], ["y"], alpha=1.7)], {}),
    "TensorScatter": (24, [N("TensorScatter", ["x", "u"], ["y"], axis=1)], {"u": [2, 1, 4]}),
}  # fmt: skip


@pytest.mark.parametrize("name", NEW)
def test_new_ops_run_on_both_backends(name) -> None:
    opset, nodes, more = NEW[name]
    shapes = {"x": [2, 3, 4], **more}
    model = model_of(
        nodes, [port(n, s) for n, s in shapes.items()], [port("y", None)], opset=opset,
        ir_version=11,
    )  # fmt: skip
    feeds = {n: x_of(*s) for n, s in shapes.items()}
    want = ReferenceEvaluator(model).run(None, feeds)[0]
    got = run(OnnxModule(model), **feeds)["y"]
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("node", "shape"),
    [
        (N("RandomUniform", [], ["noise"], shape=[2], low=0.25, high=0.5), [2]),
        (N("RandomNormal", [], ["noise"], shape=[2]), [2]),
    ],
)
def test_a_kernel_of_an_older_opset_is_used_where_the_newer_has_none(node, shape) -> None:
    """ONNX Runtime 1.32 has none of the random ops of opset 22, nor Swish."""
    nodes = [node, N("Swish", ["x"], ["s"]), N("Mul", ["noise", "z"], ["n"]),
             N("Add", ["s", "n"], ["y"])]  # fmt: skip
    model = model_of(nodes, [port("x", shape), port("z", shape)], [port("y", None)], opset=24,
                     ir_version=11)  # fmt: skip
    x = x_of(*shape)
    got = run(OnnxModule(model), x=x, z=np.zeros(shape, np.float32))["y"]
    np.testing.assert_allclose(got, x / (1 + np.exp(-x)), rtol=1e-5)


def test_a_program_recorded_at_opset_21_compiles_and_runs() -> None:
    module = OnnxModule(mlp())
    program, home = module.build(), module.home
    program.ir_version = 10
    for owner in (program, *program.functions):
        for entry in owner.opset_import:
            if entry.domain == "":
                entry.version = 21
    x = x_of(3, 8)
    made = Compiler().bind_backend("compute", OrtBackend).compile(program)
    assert_same(run_compiled(made, home, input_1=x), ort(mlp(), input_1=x))


@pytest.mark.parametrize("op_type", ["Relu", "Gelu", "Sin", "Round", "Mish"])
def test_newer_ops_that_only_gained_types_are_taken(op_type) -> None:
    model = model_of([N(op_type, ["x"], ["y"])], [port("x", [4])], [port("y", [4])], opset=22)
    module = OnnxModule(model)
    assert module.build().functions[0].node[0].op_type == op_type
    x = x_of(4)
    assert_same(run(module, x=x), ort(model, x=x))


def test_the_ops_of_the_recorded_opset_are_known_to_this_onnx() -> None:
    assert onnx.defs.onnx_opset_version() >= keys.ONNX_OPSET_VERSION


# --- what ONNX's converter gets wrong --------------------------------------------------------


@pytest.mark.parametrize("axis", [None, 0, 2, -2])
def test_an_old_hardmax_sees_its_input_as_a_matrix(axis) -> None:
    given = {} if axis is None else {"axis": axis}
    model = model_of(
        [N("Hardmax", ["x"], ["h"], **given), N("Neg", ["h"], ["y"])], [port("x", [2, 3, 4])],
        [port("y", None)], opset=11, ir_version=6,
    )  # fmt: skip
    x = x_of(2, 3, 4)
    assert_same(run(OnnxModule(model), x=x), ort(model, x=x))


def test_old_ops_in_a_branch_are_rewritten_too() -> None:
    then = helper.make_graph([N("Hardmax", ["x"], ["t"])], "then", [], [port("t", None)])
    other = helper.make_graph([N("Neg", ["x"], ["e"])], "else", [], [port("e", None)])
    model = model_of(
        [N("If", ["c"], ["y"], then_branch=then, else_branch=other)],
        [port("x", [2, 3, 4]), port("c", [], TensorProto.BOOL)], [port("y", None)], opset=11,
        ir_version=6,
    )  # fmt: skip
    feeds = {"x": x_of(2, 3, 4), "c": np.array(True)}
    assert_same(run(OnnxModule(model), **feeds), ort(model, **feeds))


@pytest.mark.parametrize("shape", [[2, 3], [2, 3, 3, 3], [2, 3, 4]])
def test_a_slope_of_opset_6_is_of_the_channels(shape) -> None:
    """A slope [3] for [2, 3, 3, 3] fits the last axis as well."""
    slope = np.array([0.5, -1.0, 2.0], np.float32)
    model = model_of(
        [N("PRelu", ["x", "s"], ["y"])], [port("x", shape)], [port("y", None)],
        [numpy_helper.from_array(slope, "s")], opset=6, ir_version=4,
    )  # fmt: skip
    x = x_of(*shape)
    by_channel = slope.reshape(-1, *[1] * (len(shape) - 2))
    got = run(OnnxModule(model), x=x)["y"]
    np.testing.assert_allclose(got, np.where(x > 0, x, x * by_channel), rtol=1e-6)


@pytest.mark.parametrize("mode", ["nearest", "linear"])
@pytest.mark.parametrize("scales", [[1, 1, 2, 2], [1, 1, 1.5, 2.5], [1, 1, 0.3, 0.8]])
@pytest.mark.parametrize("op_type", ["Resize", "Upsample"])
def test_an_old_resize_divides_by_its_scale(op_type, scales, mode) -> None:
    if op_type == "Upsample" and min(scales) < 1:
        return
    model = model_of(
        [N(op_type, ["x", "s"], ["y"], mode=mode)], [port("x", [1, 2, 5, 7])], [port("y", None)],
        [numpy_helper.from_array(np.array(scales, np.float32), "s")],
        opset=10 if op_type == "Resize" else 9, ir_version=5,
    )  # fmt: skip
    x = x_of(1, 2, 5, 7)
    assert_same(run(OnnxModule(model), x=x), ort(model, x=x))


def test_scales_that_sizes_replace_are_left_out() -> None:
    """Before opset 13 an empty tensor stood for an input that is left out."""
    empty = [numpy_helper.from_array(np.zeros(0, np.float32), name) for name in ("roi", "scales")]
    sizes = numpy_helper.from_array(np.array([1, 1, 3, 6]), "sizes")
    model = model_of(
        [N("Resize", ["x", "roi", "scales", "sizes"], ["y"], mode="linear")],
        [port("x", [1, 1, 2, 4])], [port("y", None)], [*empty, sizes], opset=11, ir_version=6,
    )  # fmt: skip
    x = x_of(1, 1, 2, 4)
    assert_same(run(OnnxModule(model), x=x), ort(model, x=x))


def _scan_of_opset_8() -> tuple[list[onnx.NodeProto], dict[str, list[int]]]:
    body = helper.make_graph(
        [N("Add", ["s", "v"], ["s2"]), N("Identity", ["s2"], ["o"])], "body",
        [port("s", [3]), port("v", [3])], [port("s2", [3]), port("o", [3])],
    )  # fmt: skip
    nodes = [N("Scan", ["", "z", "x"], ["f", "y"], name="steps", body=body, num_scan_inputs=1)]
    return nodes, {"z": [1, 3], "x": [1, 4, 3]}


REFUSED = {
    "Scan 'steps'": (8, *_scan_of_opset_8()),
    "no newer opset has tf_half_pixel_for_nn": (
        11, [N("Resize", ["x", "r", "s"], ["y"], name="up", mode="nearest",
               coordinate_transformation_mode="tf_half_pixel_for_nn")],
        {"x": [1, 1, 2, 2], "r": [0], "s": [4]}),
    "rounds to depends on its scales": (
        10, [N("Resize", ["x", "s"], ["y"], name="up", mode="nearest")],
        {"x": [1, 1, 2, 2], "s": [4]}),
    "PRelu 'p' .it depends on the rank of 'x'": (
        6, [N("PRelu", ["x", "s"], ["y"], name="p")], {"x": None, "s": [3]}),
}  # fmt: skip


@pytest.mark.parametrize("reason", REFUSED)
def test_an_old_op_that_no_newer_one_stands_for_is_refused_by_name(reason) -> None:
    opset, nodes, shapes = REFUSED[reason]
    model = model_of(
        nodes, [port(n, s) for n, s in shapes.items()], [port("y", None)], opset=opset,
        ir_version=4,
    )  # fmt: skip
    with pytest.raises(UnconvertibleModel, match=reason):
        OnnxModule(model)


def test_a_file_of_format_3_lists_its_weights_as_inputs() -> None:
    w = numpy_helper.from_array(np.ones(4, np.float32), "w")
    model = model_of(
        [N("Add", ["x", "w"], ["a"]), N("Pad", ["a"], ["y"], pads=[0, 1, 0, 2], value=3.0)],
        [port("x", [2, 4]), port("w", [4])], [port("y", None)], [w], opset=8, ir_version=3,
    )  # fmt: skip
    x = x_of(2, 4)
    assert_same(run(OnnxModule(model), x=x), ort(model, x=x))
