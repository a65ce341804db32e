"""Both shipped backends keep the same contract."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper
from onnx.helper import make_node as node
from onnxruntime.capi import onnxruntime_pybind11_state as ort_errors

from bbnode.components import errors
from bbnode.components.backends import ort
from bbnode.components.backends.caching import CachingBackend
from bbnode.components.backends.graphs import scaled_sum_model
from bbnode.components.backends.ort import OrtBackend, OrtBackendConfig
from bbnode.components.backends.reference import ReferenceBackend, ReferenceBackendConfig
from bbnode.components.registry import ConfigTypeMismatch, build_config
from bbnode.ir import codec
from bbnode.ir.types import TENSOR_FLOAT
from tests.components.graphs import model_of

F32 = np.float32


@pytest.fixture(params=["ort", "reference"])
def backend(request) -> CachingBackend:
    if request.param == "ort":
        return OrtBackend(OrtBackendConfig(max_prepared=2))
    return ReferenceBackend(ReferenceBackendConfig(max_prepared=2))


def square(name: str = "a"):
    mul = node("Mul", [name, name], ["y"])
    return model_of([mul], {}, inputs={name: np.ones((2,))}, dtype=F32, symbolic=True)


def test_execute_runs_by_name(backend) -> None:
    vector = np.array([1, 2, 3], F32)
    feeds = {"weight": np.asarray(2, F32), "x": vector, "acc": vector}
    out = backend.execute(scaled_sum_model(), feeds)
    np.testing.assert_array_equal(out["total"], [3, 6, 9])
    assert out["total"].dtype == F32


def test_numpy_scalars_and_strided_views_are_tensors(backend) -> None:
    prepared = backend.prepare(scaled_sum_model())
    (total,) = prepared.run([np.zeros(3, F32), np.arange(6, dtype=F32)[::2], F32(2)])
    np.testing.assert_array_equal(total, [0, 4, 8])


def test_prepared_graphs_are_cached_by_content_and_bounded(backend) -> None:
    first = backend.prepare(square())
    assert backend.prepare(square()) is first
    backend.prepare(square("b"))
    assert backend.prepare(square()) is first  # used again: now "b" is the oldest
    backend.prepare(square("c"))
    assert backend.prepare(square()) is first
    assert len(backend._prepared) == 2


def test_a_graph_that_cannot_run_is_refused_at_prepare(backend) -> None:
    model = square()
    model.graph.node[0].op_type = "NoSuchOp"
    with pytest.raises(errors.BackendError, match=r"graph 'g' cannot be prepared.*NoSuchOp"):
        backend.prepare(model)


def test_inputs_that_do_not_fit_are_refused(backend) -> None:
    prepared = backend.prepare(scaled_sum_model())
    with pytest.raises(errors.BackendError, match=r"1 input\(s\) for 3 \(acc, x, weight\)"):
        prepared.run([np.ones(2, F32)])
    with pytest.raises(errors.BackendError, match=r"'scaled_sum'.*[Aa]dd"):
        prepared.run([np.ones(2, F32), np.ones(3, F32), np.asarray(1, F32)])


def test_ort_names_dtypes_and_shapes_of_inputs_it_refuses() -> None:
    prepared = OrtBackend(OrtBackendConfig()).prepare(scaled_sum_model())
    with pytest.raises(errors.BackendError, match=r"acc: float64\[2\]"):
        prepared.run([np.ones(2), np.ones(2, F32), np.asarray(1, F32)])


def test_supports_goes_by_op_and_version(backend) -> None:
    assert backend.supports("Gelu", 20)
    assert not backend.supports("Gelu", 19)
    assert not backend.supports("Upsample", 21)  # deprecated since 10
    assert not backend.supports("NoSuchOp", 21)


def wire(array: np.ndarray, shift: int) -> tuple[bytearray, memoryview]:
    """An envelope whose payload begins at an address that is `shift` beyond a multiple of 8."""
    payload = bytearray(bytes(16) + codec.encode_value(array))
    at = (shift - np.frombuffer(payload, np.uint8).ctypes.data) % 8
    payload = bytearray(bytes(at) + codec.encode_value(array) + bytes(16 - at))
    return payload, memoryview(payload)[at : len(payload) - 16 + at]


@pytest.mark.parametrize("shift", [0, 4])
def test_a_tensor_off_the_wire_is_adopted_without_a_copy(backend, shift: int) -> None:
    payload, view = wire(np.arange(6, dtype=F32).reshape(2, 3), shift)
    tensor = backend.materialize_from_wire(TENSOR_FLOAT, view)
    assert np.shares_memory(tensor, np.frombuffer(payload, np.uint8))
    assert not tensor.flags.writeable
    np.testing.assert_array_equal(backend.neg(tensor), [[0, -1, -2], [-3, -4, -5]])


def test_what_is_not_aligned_is_copied_once_and_not_at_each_use() -> None:
    backend = OrtBackend(OrtBackendConfig())
    payload, view = wire(np.arange(6, dtype=F32), 1)
    tensor = backend.materialize_from_wire(TENSOR_FLOAT, view)
    assert not np.shares_memory(tensor, np.frombuffer(payload, np.uint8))
    assert tensor.flags.aligned
    assert not tensor.flags.writeable
    np.testing.assert_array_equal(backend.neg(tensor), -np.arange(6))


def test_ort_reads_an_array_in_place_and_hands_out_its_own_memory(monkeypatch) -> None:
    prepared = OrtBackend(OrtBackendConfig()).prepare(square())
    seen = []
    run = prepared._run

    def watch(names, feeds, options):
        seen.append((feeds, run(names, feeds, options)))
        return seen[-1][1]

    monkeypatch.setattr(prepared, "_run", watch)
    given = np.full(1 << 15, 3, F32)
    (out,) = prepared.run([given])
    ((feeds, made),) = seen
    assert feeds["a"] is given
    assert out is made[0]
    assert not out.flags.owndata  # a view of ONNX Runtime's buffer, not a numpy copy of it


def test_a_small_result_does_not_pin_the_arena() -> None:
    (out,) = OrtBackend(OrtBackendConfig()).prepare(square()).run([np.array([2, 3], F32)])
    assert out.flags.owndata
    np.testing.assert_array_equal(out, [4, 9])


def test_a_provider_that_gives_up_leaves_it_to_another_one(monkeypatch) -> None:
    prepared = OrtBackend(OrtBackendConfig()).prepare(square())

    def gives_up(names, feeds, options=None):
        raise ort_errors.EPFail("the device is gone")

    monkeypatch.setattr(prepared, "_run", gives_up)
    (out,) = prepared.run([np.array([2, 3], F32)])
    np.testing.assert_array_equal(out, [4, 9])
    assert prepared._run is not gives_up  # the next one does not try it again
    monkeypatch.setattr(prepared, "_run", gives_up)
    monkeypatch.setattr(prepared._session, "run", gives_up)
    with pytest.raises(errors.BackendError, match="inputs were a: float32"):
        prepared.run([np.array([2, 3], F32)])


def test_settings_out_of_range_are_refused() -> None:
    with pytest.raises(errors.BackendUnavailable, match=r"'?NoSuchProvider.*CPUExecutionProvider"):
        OrtBackend(OrtBackendConfig(providers=("CPUExecutionProvider", "NoSuchProvider")))
    with pytest.raises(errors.BackendUnavailable, match="none given"):
        OrtBackend(OrtBackendConfig(providers=()))
    with pytest.raises(errors.InvalidComponentConfig, match="thread counts"):
        OrtBackend(OrtBackendConfig(intra_op_threads=0))
    with pytest.raises(errors.InvalidComponentConfig, match="max_prepared"):
        ReferenceBackend(ReferenceBackendConfig(max_prepared=0))


@pytest.mark.parametrize(
    ("there", "taken"),
    [
        (["CPUExecutionProvider"], ["CPUExecutionProvider"]),
        (
            ["TensorrtExecutionProvider", "CUDAExecutionProvider", "CPUExecutionProvider"],
            ["CUDAExecutionProvider", "CPUExecutionProvider"],
        ),
    ],
)
def test_auto_takes_cuda_where_it_is(monkeypatch, there: list[str], taken: list[str]) -> None:
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: there)
    assert OrtBackend(OrtBackendConfig())._providers == taken


def test_a_listed_provider_that_does_not_start_is_told(monkeypatch) -> None:
    there = ["CUDAExecutionProvider", "CPUExecutionProvider"]
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: there)
    real = onnxruntime.InferenceSession

    def session(data, options, providers, **settings):
        return real(data, options, providers=["CPUExecutionProvider"])

    monkeypatch.setattr(onnxruntime, "InferenceSession", session)
    named = OrtBackend(OrtBackendConfig(providers=tuple(there)))
    with pytest.raises(errors.BackendUnavailable, match="CUDAExecutionProvider could not be"):
        named.prepare(square())
    OrtBackend(OrtBackendConfig()).prepare(square())  # "auto" goes on without


@pytest.mark.parametrize("threads", [1, 2])
def test_thread_counts_reach_the_session(threads: int) -> None:
    config = OrtBackendConfig(intra_op_threads=threads, inter_op_threads=threads)
    options = OrtBackend(config).prepare(square())._session.get_session_options()
    assert options.intra_op_num_threads == options.inter_op_num_threads == threads
    parallel = onnxruntime.ExecutionMode.ORT_PARALLEL
    assert (options.execution_mode == parallel) == (threads > 1)


def test_providers_in_a_nodes_settings() -> None:
    def made(setting):
        return build_config(OrtBackend, "compute", b"", {"providers": setting}).providers

    assert made("auto") == "auto"
    assert made(["CPUExecutionProvider"]) == ("CPUExecutionProvider",)
    with pytest.raises(ConfigTypeMismatch, match="providers"):
        made("cuda")


@pytest.mark.parametrize("ranks", [(1, 2), (2, 3)])
def test_a_scan_runs_though_the_program_leaves_ranks_open(ranks) -> None:
    """ONNX Runtime's kernel refuses a body whose outputs have no shape, which it infers."""
    make = onnx.helper.make_node
    body = onnx.helper.make_graph(
        [make("Add", ["s", "v"], ["s2"]), make("Mul", ["s2", "v"], ["o"])],
        "body",
        [onnx.helper.make_tensor_value_info(name, 1, None) for name in "sv"],
        [onnx.helper.make_tensor_value_info(name, 1, None) for name in ("s2", "o")],
    )
    graph = onnx.helper.make_graph(
        [make("Scan", ["z", "x"], ["f", "y"], body=body, num_scan_inputs=1)],
        "steps",
        [onnx.helper.make_tensor_value_info(name, 1, None) for name in "zx"],
        [onnx.helper.make_tensor_value_info(name, 1, None) for name in "fy"],
    )
    model = onnx.helper.make_model(
        graph, opset_imports=[onnx.helper.make_opsetid("", 25)], ir_version=13
    )
    z = np.ones((2,) * ranks[0], np.float32)
    x = np.arange(3 * z.size, dtype=np.float32).reshape(3, *z.shape)
    last, steps = OrtBackend(OrtBackendConfig()).prepare(model).run([z, x])
    sums = 1 + np.cumsum(x, 0)
    np.testing.assert_array_equal(last, sums[-1])
    np.testing.assert_array_equal(steps, sums * x)


def test_sums_at_indices_lose_nothing_on_several_threads() -> None:
    graph = helper.make_graph(
        [helper.make_node("ScatterND", ["zeros", "at", "rows"], ["y"], reduction="add")], "sums",
        [
            helper.make_tensor_value_info("zeros", 1, ["v", 64]),
            helper.make_tensor_value_info("at", 7, ["n", 1]),
            helper.make_tensor_value_info("rows", 1, ["n", 64]),
        ],
        [helper.make_tensor_value_info("y", 1, ["v", 64])],
    )  # fmt: skip
    model = helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 21)])
    prepared = OrtBackend(OrtBackendConfig(intra_op_threads=4)).prepare(model)
    rows = 50_000
    at, ones = np.zeros((rows, 1), np.int64), np.ones((rows, 64), np.float32)
    for _ in range(5):
        (found,) = prepared.run([np.zeros((2, 64), np.float32), at, ones])
        np.testing.assert_array_equal(found, [[rows] * 64, [0] * 64])


def test_optimizers_that_are_left_out_would_have_changed_nothing(tmp_path) -> None:
    """Of graphs that some of them do change: their ops are what decides."""
    x, w = np.ones((2, 3, 4), F32), np.full((4, 4), 0.5, F32)
    written = {
        "plain": [node("Relu", ["x"], ["y"])],
        "gelu": [
            node("Div", ["x", "root"], ["d"]), node("Erf", ["d"], ["e"]),
            node("Add", ["e", "one"], ["a"]), node("Mul", ["x", "a"], ["m"]),
            node("Mul", ["m", "half"], ["y"]),
        ],
        "quick gelu": [
            node("Mul", ["x", "root"], ["d"]), node("Sigmoid", ["d"], ["s"]),
            node("Mul", ["x", "s"], ["y"]),
        ],
        "biased softmax": [node("Add", ["x", "w4"], ["s"]), node("Softmax", ["s"], ["y"])],
        "quantized": [
            node("DynamicQuantizeLinear", ["x"], ["q", "scale", "zero"]),
            node("DequantizeLinear", ["q", "scale", "zero"], ["f"]),
            node("MatMul", ["f", "w"], ["y"]),
        ],
        "function": [node("Gelu", ["x"], ["g"]), node("Attention", ["g", "g", "g"], ["y"],
                                                      q_num_heads=1, kv_num_heads=1)],
    }  # fmt: skip
    constants = {
        "root": np.asarray(2**0.5, F32), "one": np.asarray(1, F32), "half": np.asarray(0.5, F32),
        "w": w, "w4": x,
    }  # fmt: skip
    idle = {}
    for name, nodes in written.items():
        read = {value for each in nodes for value in each.input}
        own = {key: value for key, value in constants.items() if key in read}
        model = model_of(nodes, own, inputs={"x": x}, dtype=F32, opset=23)
        idle[name] = ort._idle_optimizers(model)
        made = []
        for left_out in ([], idle[name]):
            options = onnxruntime.SessionOptions()
            options.log_severity_level = 4
            options.optimized_model_filepath = str(tmp_path / "made.onnx")
            content = model.SerializeToString()
            onnxruntime.InferenceSession(content, options, disabled_optimizers=left_out,
                                             providers=["CPUExecutionProvider"])  # fmt: skip
            made.append((tmp_path / "made.onnx").read_bytes())
        assert made[0] == made[1], name
    assert len(idle["plain"]) > len(idle["quantized"]) > 0
    assert "GeluFusionL1" not in idle["gelu"]


@pytest.mark.parametrize("inside", [False, True], ids=["plain", "in-an-If"])
@pytest.mark.parametrize("held", [False, True], ids=["fed", "initializers"])
def test_a_batch_normalization_in_training_mode_leaves_what_it_reads_alone(
    held: bool, inside: bool
) -> None:
    """ONNX Runtime's kernel writes over the statistics that it is given."""
    port = helper.make_tensor_value_info
    nodes = [
        node("BatchNormalization", ["x", "s", "b", "m", "v"], ["y", "m2", "v2"], training_mode=1),
        node("Identity", ["m"], ["old"]),
        node("Add", ["m2", "m"], ["z"]),
    ]
    made = ["y", "m2", "v2", "old", "z"]
    if inside:
        branch = helper.make_graph(nodes, "then", [], [port(name, 1, None) for name in made])
        told = node("Constant", [], ["told"], value=onnx.numpy_helper.from_array(np.array(True)))
        nodes = [told, node("If", ["told"], made, then_branch=branch, else_branch=branch)]
    kept = {"s": 1.0, "b": 0.0, "m": 2.0, "v": 1.0}
    arrays = {name: np.full(3, value, np.float32) for name, value in kept.items()}
    fed = [port("x", 1, ["n", 3, 2])] + ([] if held else [port(n, 1, [3]) for n in arrays])
    graph = helper.make_graph(
        nodes, "norm", fed, [port(name, 1, None) for name in made],
        [onnx.numpy_helper.from_array(a, n) for n, a in arrays.items()] if held else [],
    )  # fmt: skip
    model = helper.make_model(graph, ir_version=13, opset_imports=[helper.make_opsetid("", 25)])
    x = np.random.default_rng(0).normal(size=(4, 3, 2)).astype(np.float32)
    prepared = OrtBackend(OrtBackendConfig()).prepare(model)
    for _ in range(2):
        y, mean, variance, old, total = prepared.run([x] if held else [x, *arrays.values()])
        np.testing.assert_allclose(mean, 1.8 + 0.1 * x.mean((0, 2)), rtol=1e-5)
        np.testing.assert_allclose(variance, 0.9 + 0.1 * x.var((0, 2)), rtol=1e-5)
        np.testing.assert_array_equal(old, arrays["m"])
        np.testing.assert_allclose(total, mean + 2, rtol=1e-6)
        np.testing.assert_allclose(y.mean((0, 2)), np.zeros(3), atol=1e-5)
    assert all(np.all(array == kept[name]) for name, array in arrays.items())


@pytest.mark.parametrize("perm", [[1, 2, 0], [1, 0, 2]], ids=str)
@pytest.mark.parametrize(
    ("axes", "pads"), [([-1], [1, 2]), ([1, 2], [1, 2, 0, 0]), ([2, 0, 1], [1, 2, 3, 0, 0, 0])]
)
def test_a_pad_of_named_axes_stays_right_beside_transposes(
    perm: list[int], axes: list[int], pads: list[int]
) -> None:
    """ONNX Runtime's optimizer moves a Transpose past it, and mixes up the pads."""
    nodes = [
        node("Transpose", ["x"], ["t"], perm=perm),
        node("Pad", ["t", "pads", "", "axes"], ["p"]),
        node("Transpose", ["p"], ["y"], perm=np.argsort(perm).tolist()),
    ]
    held = {"pads": np.array(pads), "axes": np.array(axes)}
    graph = helper.make_graph(
        nodes, "pads", [helper.make_tensor_value_info("x", 1, ["n", 3, 4])],
        [helper.make_tensor_value_info("y", 1, None)],
        [onnx.numpy_helper.from_array(array, name) for name, array in held.items()],
    )  # fmt: skip
    model = helper.make_model(graph, ir_version=13, opset_imports=[helper.make_opsetid("", 25)])
    x = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    widths = np.zeros((3, 2), int)
    widths[axes] = np.reshape(pads, (2, -1)).T
    expected = np.pad(x.transpose(perm), widths).transpose(np.argsort(perm))
    (made,) = OrtBackend(OrtBackendConfig()).prepare(model).run([x])
    np.testing.assert_array_equal(made, expected)


def _concat(axis: int, shapes: list[list[int]]) -> None:
    """Run a Concat of arrays of these shapes, whose sizes are open, and compare with numpy's."""
    names = [f"x{i}" for i in range(len(shapes))]
    arrays = [np.full(shape, i + 1, F32) for i, shape in enumerate(shapes)]
    fed = [
        helper.make_tensor_value_info(n, 1, [None] * len(s))
        for n, s in zip(names, shapes, strict=True)
    ]
    graph = helper.make_graph(
        [node("Concat", names, ["y"], axis=axis)],
        "joined", fed, [helper.make_tensor_value_info("y", 1, None)],
    )  # fmt: skip
    model = helper.make_model(graph, ir_version=13, opset_imports=[helper.make_opsetid("", 25)])
    (made,) = OrtBackend(OrtBackendConfig()).prepare(model).run(arrays)
    np.testing.assert_array_equal(made, np.concatenate(arrays, axis))


@pytest.mark.parametrize(
    ("axis", "shapes"),
    [
        (0, [[0, 2], [3, 2]]),
        (0, [[2], [0], [3]]),
        (1, [[3, 2], [3, 0], [3, 1]]),
        (-1, [[3, 0], [3, 2]]),
        (1, [[0, 2], [0, 3]]),
        (1, [[2, 0, 4], [2, 3, 4]]),
        (-2, [[2, 1, 0], [2, 5, 0]]),
    ],
    ids=str,
)
def test_what_is_empty_is_joined(axis: int, shapes: list[list[int]]) -> None:
    _concat(axis, shapes)


@pytest.mark.parametrize(
    ("axis", "shapes"),
    [
        (1, [[3, 2], [0, 2]]),
        (1, [[0, 2], [3, 2]]),
        (-1, [[3, 2], [3, 2], [0, 2]]),
        (0, [[2, 0], [3, 4]]),
        (1, [[2, 3, 4], [2, 3, 0]]),
        (-2, [[2, 3, 0], [2, 3, 4]]),
    ],
    ids=str,
)
def test_an_empty_part_of_other_sizes_is_refused(axis: int, shapes: list[list[int]]) -> None:
    """ONNX Runtime takes it, and leaves its part of the result as memory was."""
    with pytest.raises(errors.BackendError, match="y/sizes"):
        _concat(axis, shapes)


def test_onnx_runtime_is_loaded_with_the_first_graph() -> None:
    # It is a seventh of what an idle node takes.
    program = (
        "import sys\n"
        "from bbnode.components.backends.graphs import scaled_sum_model\n"
        "from bbnode.components.backends.ort import OrtBackend, OrtBackendConfig\n"
        "backend = OrtBackend(OrtBackendConfig())\n"
        "assert 'onnxruntime' not in sys.modules\n"
        "backend.build_graph(scaled_sum_model())\n"
        "assert 'onnxruntime' in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
