"""No value ends a process in ONNX Runtime: each op that it would end fails, by name.

The graphs run in a child process, so that a guard that is missing fails a test and not all of them.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from onnx import ModelProto, TensorProto, helper
from onnx.backend.test.case.node import collect_testcases
from onnx.helper import make_node as node

from bbnode.components.backends.graphs import one_op_model
from bbnode.components.backends.guards import guarded
from bbnode.components.backends.ort import OrtBackend, OrtBackendConfig
from bbnode.components.errors import BackendError, GraphKilled

F32 = np.float32
LEAST = {np.int32: np.iinfo(np.int32).min, np.int64: np.iinfo(np.int64).min}


@pytest.fixture(scope="module")
def backend() -> Iterator[OrtBackend]:
    made = OrtBackend(OrtBackendConfig(isolation="process", max_run_s=30.0))
    yield made
    made.on_stop()


def run(backend: OrtBackend, model: ModelProto, inputs: list[Any]) -> list[Any]:
    return backend.prepare(model).run([each for each in inputs if each is not None])


def ops(model: ModelProto) -> list[str]:
    return [each.op_type for each in model.graph.node]


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize(
    ("over", "by"),
    [((2,), (2,)), ((), (3,)), ((100,), ()), ((2, 1), (1, 3)), ((), ())],
    ids=str,
)
def test_the_least_integer_is_not_divided_by_minus_one(backend, dtype, over, by) -> None:
    inputs = [np.full(over, LEAST[dtype], dtype), np.full(by, -1, dtype)]
    with pytest.raises(BackendError, match="least integer by -1") as refused:
        run(backend, one_op_model("Div", inputs), inputs)
    assert not isinstance(refused.value, GraphKilled)
    assert refused.value.node == "Div"


@pytest.mark.parametrize("dtype", [np.int8, np.int16, np.int32, np.int64])
def test_a_guarded_quotient_is_the_same(backend, dtype) -> None:
    least, most = np.iinfo(dtype).min, np.iinfo(dtype).max
    over = np.array([least, least + 1, most, 7, -7, 0], dtype)
    by = np.array([1, -1, -1, 2, 2, -1], dtype)
    (made,) = run(backend, one_op_model("Div", [over, by]), [over, by])
    np.testing.assert_array_equal(made, [least, most, -most, 3, -3, 0])


def typed(
    nodes: list[Any], ports: dict[str, Any], outputs: dict[str, int], **more: Any
) -> ModelProto:
    made = helper.make_graph(
        nodes,
        "g",
        [
            helper.make_tensor_value_info(
                name, helper.np_dtype_to_tensor_dtype(value.dtype), [None] * value.ndim
            )
            for name, value in ports.items()
        ],
        [helper.make_tensor_value_info(name, kind, None) for name, kind in outputs.items()],
        **more,
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(made, opset_imports=opsets, ir_version=10)


BAD = np.array([LEAST[np.int64]]), np.array([-1])
INT64 = TensorProto.INT64


def const(name: str, value: Any) -> Any:
    return helper.make_tensor(name, INT64, np.shape(value), np.ravel(value).tolist())


def nested() -> ModelProto:
    """Return a division in a branch, of values from outside that no port states."""
    branch = helper.make_graph(
        [node("Div", ["aa", "bb"], ["q"], name="inner")], "then", [],
        [helper.make_empty_tensor_value_info("q")],
    )  # fmt: skip
    other = helper.make_graph(
        [node("Identity", ["aa"], ["r"])], "else", [], [helper.make_empty_tensor_value_info("r")]
    )
    nodes = [
        node("Neg", ["a"], ["na"]), node("Neg", ["na"], ["aa"]), node("Identity", ["b"], ["bb"]),
        node("Constant", [], ["yes"], value=helper.make_tensor("t", TensorProto.BOOL, [], [1])),
        node("If", ["yes"], ["y"], then_branch=branch, else_branch=other, name="if"),
    ]  # fmt: skip
    return typed(nodes, {"a": BAD[0], "b": BAD[1]}, {"y": INT64})


def in_function() -> ModelProto:
    """Return a division in a local function, which says no types."""
    made = typed([node("quotient", ["a", "b"], ["y"], domain="own", name="call")],
                 {"a": BAD[0], "b": BAD[1]}, {"y": INT64})  # fmt: skip
    made.functions.append(
        helper.make_function(
            "own", "quotient", ["p", "q"], ["r"], [node("Div", ["p", "q"], ["r"], name="inner")],
            [helper.make_opsetid("", 21)],
        )
    )  # fmt: skip
    made.opset_import.append(helper.make_opsetid("own", 1))
    return made


def of_unknown() -> ModelProto:
    """Return a division of what an op of the runtime's own makes."""
    nodes = [
        node("ExpandDims", ["a", "at"], ["aa"], domain="com.microsoft"),
        node("ExpandDims", ["b", "at"], ["bb"], domain="com.microsoft"),
        node("Div", ["aa", "bb"], ["y"], name="inner"),
    ]
    at = helper.make_tensor("at", TensorProto.INT32, [], [0])
    return typed(nodes, {"a": BAD[0], "b": BAD[1]}, {"y": INT64}, initializer=[at])


def by_initializer() -> ModelProto:
    nodes = [node("Div", ["a", "c"], ["s"]), node("Add", ["s", "b"], ["y"])]
    return typed(nodes, {"a": BAD[0], "b": BAD[1]}, {"y": INT64}, initializer=[const("c", [5, -1])])


@pytest.mark.parametrize("model", [nested, in_function, of_unknown, by_initializer])
def test_a_division_is_guarded_wherever_it_stands(backend, model) -> None:
    with pytest.raises(BackendError, match="least integer by -1") as refused:
        run(backend, model(), list(BAD))
    assert not isinstance(refused.value, GraphKilled)
    fine = run(backend, model(), [np.array([9]), np.array([-2])])
    assert np.asarray(fine[0]).dtype == np.int64


def test_a_division_of_constants_fails_where_the_graph_is_prepared(backend) -> None:
    nodes = [node("Div", ["c", "d"], ["s"]), node("Add", ["s", "a"], ["y"])]
    both = [const("c", [LEAST[np.int64]]), const("d", [-1])]
    model = typed(nodes, {"a": BAD[0]}, {"y": INT64}, initializer=both)
    with pytest.raises(BackendError, match="division by zero") as refused:
        run(backend, model, [BAD[1]])
    assert not isinstance(refused.value, GraphKilled)


def test_floats_of_any_kind_pay_nothing() -> None:
    for dtype in (np.float16, np.float32, np.float64, np.uint8, np.int8, np.uint64):
        model = one_op_model("Div", [np.ones(2, dtype), np.ones(2, dtype)])
        assert guarded(model) is model


def test_what_can_not_trap_gets_no_guard() -> None:
    sizes = [
        node("Shape", ["a"], ["s"]), node("Gather", ["s", "zero"], ["n"]),
        node("Div", ["a", "n"], ["y"]),
    ]  # fmt: skip
    model = typed(sizes, {"a": BAD[0]}, {"y": INT64}, initializer=[const("zero", 0)])
    assert guarded(model) is model
    constant = [node("Div", ["a", "two"], ["h"]), node("Div", ["two", "a"], ["y"])]
    model = typed(constant, {"a": BAD[0]}, {"y": INT64}, initializer=[const("two", [2, 3])])
    assert guarded(model) is model
    cast = [
        node("Cast", ["a"], ["f"], to=TensorProto.FLOAT), node("Exp", ["f"], ["e"]),
        node("Div", ["f", "e"], ["y"]),
    ]  # fmt: skip
    model = typed(cast, {"a": BAD[0]}, {"y": TensorProto.FLOAT})
    assert guarded(model) is model


def recurrent(op: str, shape: tuple[int, ...]) -> tuple[str, list[Any], int, dict[str, Any]]:
    gates = {"GRU": 3, "LSTM": 4, "RNN": 1}[op]
    weights = [np.zeros((1, 5 * gates, n), F32) for n in (shape[2], 5)]
    return op, [np.zeros(shape, F32), *weights], 2, {"hidden_size": 5}


SIGNAL = np.ones((1, 16, 1), F32)
IMAGE = np.ones((1, 1, 4, 4), F32)
KILLS = {
    "GRU, no steps": recurrent("GRU", (0, 2, 3)),
    "GRU, no rows": recurrent("GRU", (4, 0, 3)),
    "GRU, no features": recurrent("GRU", (4, 2, 0)),
    "LSTM, no rows": recurrent("LSTM", (4, 0, 3)),
    "STFT, no window": ("STFT", [SIGNAL, np.array(4), np.ones(0, F32)], 1, {}),
    "STFT, no frame": ("STFT", [SIGNAL, np.array(4), None, np.array(0)], 1, {}),
    "Unique, empty rows": ("Unique", [np.ones((3, 0), F32)], 4, {"axis": 0}),
    "Conv, no kernel": ("Conv", [IMAGE, np.ones((1, 1, 0, 2), F32)], 1, {}),
    "ConvTranspose, no input": (
        "ConvTranspose", [np.ones((1, 1, 0, 2, 2), F32), np.ones((1, 1, 2, 2, 2), F32)], 1, {},
    ),
    "RoiAlign, no map": (
        "RoiAlign", [np.ones((1, 1, 0, 4), F32), np.ones((1, 4), F32), np.array([0])], 1, {},
    ),
    "GridSample, no map": (
        "GridSample", [np.ones((1, 1, 4, 0), F32), np.zeros((1, 2, 2, 2), F32)], 1,
        {"padding_mode": "border"},
    ),
}  # fmt: skip
FINE = {
    "GridSample": ("GridSample", [IMAGE, np.zeros((1, 2, 2, 2), F32)], 1, {}),
    "GRU": recurrent("GRU", (4, 2, 3)),
    "LSTM, no steps": recurrent("LSTM", (0, 2, 3)),
    "STFT": ("STFT", [SIGNAL, np.array(4), np.ones(8, F32), np.array(8)], 1, {}),
    "Unique": ("Unique", [np.ones((3, 2), F32)], 4, {"axis": 0}),
    "Unique, no rows": ("Unique", [np.ones((0, 2), F32)], 4, {"axis": 0}),
    "Conv": ("Conv", [IMAGE, np.ones((1, 1, 2, 2), F32)], 1, {}),
    "Conv, no filters": ("Conv", [IMAGE, np.ones((0, 1, 2, 2), F32)], 1, {}),
    "ConvTranspose": (
        "ConvTranspose", [np.ones((1, 1, 1, 2, 2), F32), np.ones((1, 1, 2, 2, 2), F32)], 1, {},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", KILLS)
def test_sizes_of_zero_that_end_a_kernel_are_refused(backend, case) -> None:
    op, inputs, outputs, attributes = KILLS[case]
    model = one_op_model(op, inputs, outputs, **attributes)
    with pytest.raises(BackendError, match=f"op '{op}': {op} (of|with)") as refused:
        run(backend, model, inputs)
    assert not isinstance(refused.value, GraphKilled)
    assert refused.value.node == op


@pytest.mark.parametrize("case", FINE)
def test_other_sizes_give_what_they_gave(backend, case) -> None:
    import onnxruntime

    op, inputs, outputs, attributes = FINE[case]
    model = one_op_model(op, inputs, outputs, **attributes)
    made = run(backend, model, inputs)
    plain = onnxruntime.InferenceSession(model.SerializeToString())
    ports = [port.name for port in plain.get_inputs()]
    feeds = dict(zip(ports, (each for each in inputs if each is not None), strict=True))
    for mine, theirs in zip(made, plain.run(None, feeds), strict=True):
        np.testing.assert_array_equal(mine, theirs)


# --- all ops of ONNX ---------------------------------------------------------------------


def extremes(inputs: list[Any]) -> Iterator[list[Any]]:
    """Yield inputs with one tensor at extreme values, or with an axis of size 0."""
    for at, value in enumerate(inputs):
        if not isinstance(value, np.ndarray) or value.dtype.kind not in "iuf":
            continue
        if value.dtype.kind == "f":
            numbers: list[Any] = [np.nan, np.inf, -1e30]
        else:
            kind = np.iinfo(value.dtype)
            numbers = [n for n in (0, -1, kind.min, kind.max) if kind.min <= n]
        with np.errstate(all="ignore"):
            changed = [np.full_like(value, number) for number in numbers]
        changed += [
            np.zeros([0 if a == axis else n for a, n in enumerate(value.shape)], value.dtype)
            for axis in range(value.ndim)
        ]
        for each in changed:
            yield [*inputs[:at], each, *inputs[at + 1 :]]
    for size in sorted({n for v in inputs if isinstance(v, np.ndarray) for n in v.shape}):
        yield [
            np.zeros([0 if n == size else n for n in v.shape], v.dtype)
            if isinstance(v, np.ndarray)
            else v
            for v in inputs
        ]


def all_cases() -> Iterator[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield from collect_testcases(None)


def opened(model: ModelProto) -> ModelProto:
    """Return the model for inputs of any size."""
    made = ModelProto()
    made.CopyFrom(model)
    for port in (*made.graph.input, *made.graph.output):
        if port.type.HasField("tensor_type"):
            port.type.tensor_type.ClearField("shape")
    return made


@pytest.mark.slow
def test_no_extreme_value_ends_the_process_in_any_op_of_onnx() -> None:
    """What a Loop or the size of a result takes is no matter of guards; all else is."""
    backend = OrtBackend(
        OrtBackendConfig(isolation="process", max_run_s=20.0, max_memory_bytes=2 << 30)
    )
    killed = []
    for case in all_cases():
        if case.model is None or not case.data_sets or "loop" in case.name:
            continue
        try:
            graph = backend.prepare(opened(case.model))
        except BackendError:
            continue
        for inputs in extremes(list(case.data_sets[0][0])):
            try:
                graph.run(inputs)
            except GraphKilled as error:
                if error.reason != "memory":
                    killed.append(f"{case.name}: {error}")
            except Exception:  # noqa: BLE001 - whatever is refused was survived
                pass
    backend.on_stop()
    assert killed == []
