"""Both shipped backends keep the same contract."""

from __future__ import annotations

import numpy as np
import pytest
from onnx.helper import make_node as node

from bbnode.components import errors
from bbnode.components.backend_base import PRIMITIVE_OPS, CachingBackend, scaled_sum_model
from bbnode.components.ort_backend import OrtBackend, OrtBackendConfig
from bbnode.components.reference_backend import ReferenceBackend, ReferenceBackendConfig
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
    return model_of([node("Mul", [name, name], ["y"])], {}, inputs={name: np.ones((2,))}, dtype=F32)


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
    with pytest.raises(errors.BackendError, match="scaled_sum"):
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


def test_a_tensor_off_the_wire_is_adopted_without_a_copy(backend) -> None:
    payload = bytearray(b"!" + codec.encode_value(np.arange(6, dtype=F32).reshape(2, 3)))
    view = memoryview(payload)[1:]  # at an odd address, as slices of an envelope are
    tensor = backend.materialize_from_wire(TENSOR_FLOAT, view)
    assert np.shares_memory(tensor, np.frombuffer(payload, np.uint8))
    (out,) = backend.primitive("Neg", [tensor])
    np.testing.assert_array_equal(out, [[0, -1, -2], [-3, -4, -5]])


A = np.array([[1, 2], [3, 4]], F32)
ROW = np.array([2, 4], F32)
I64 = np.int64
PRIMITIVES = {
    "Abs": ([-A], {}, A), "Add": ([A, ROW], {}, A + ROW), "Sub": ([A, ROW], {}, A - ROW),
    "Mul": ([A, ROW], {}, A * ROW), "Div": ([A, ROW], {}, A / ROW), "Neg": ([A], {}, -A),
    "Sqrt": ([A], {}, np.sqrt(A)), "Pow": ([A, ROW], {}, A**ROW), "Exp": ([A], {}, np.exp(A)),
    "Log": ([A], {}, np.log(A)), "MatMul": ([A, A], {}, A @ A),
    "ReduceSum": ([A], {"keepdims": 0}, A.sum()), "ReduceMean": ([A], {"keepdims": 0}, A.mean()),
    "ReduceMax": ([A], {"keepdims": 0}, A.max()), "ReduceMin": ([A], {"keepdims": 0}, A.min()),
    "Reshape": ([A, np.array([4], I64)], {}, A.reshape(4)), "Transpose": ([A], {}, A.T),
    "Concat": ([A, A], {"axis": 0}, np.concatenate([A, A])),
    "Slice": ([A, np.array([0], I64), np.array([1], I64)], {}, A[:1]),
    "Split": ([A, np.array([1, 1], I64)], {"axis": 0}, A[:1]),
    "Squeeze": ([A[:1], np.array([0], I64)], {}, A[0]),
    "Unsqueeze": ([ROW, np.array([0], I64)], {}, ROW[None]),
    "Identity": ([A], {}, A), "Cast": ([A], {"to": 7}, A.astype(I64)),
    "Equal": ([A, A.T], {}, A == A.T), "Greater": ([A, A.T], {}, A > A.T),
    "Less": ([A, A.T], {}, A < A.T), "Where": ([A > 2, A, -A], {}, np.where(A > 2, A, -A)),
    "Constant": ([], {"value_floats": [1.0, 2.0]}, np.array([1, 2], F32)),
    "Gather": ([A, np.array([1], I64)], {}, A[[1]]),
}  # fmt: skip


def test_the_thirty_primitives_are_all_there() -> None:
    assert set(PRIMITIVES) == PRIMITIVE_OPS
    assert len(PRIMITIVE_OPS) == 30


@pytest.mark.parametrize("op", sorted(PRIMITIVES))
def test_primitive(backend, op: str) -> None:
    inputs, attributes, expected = PRIMITIVES[op]
    outputs = 2 if op == "Split" else 1
    out = backend.primitive(op, inputs, outputs, **attributes)
    assert len(out) == outputs
    np.testing.assert_allclose(out[0], expected, rtol=1e-6)
    assert out[0].dtype == np.asarray(expected).dtype


def test_what_is_no_primitive_is_refused(backend) -> None:
    with pytest.raises(errors.BackendError, match="'Conv' is no primitive"):
        backend.primitive("Conv", [A, A])
    with pytest.raises(errors.BackendError, match="MatMul"):
        backend.primitive("MatMul", [A, A.astype(I64)])


def test_settings_out_of_range_are_refused() -> None:
    with pytest.raises(errors.BackendUnavailable, match=r"'?NoSuchProvider.*CPUExecutionProvider"):
        OrtBackend(OrtBackendConfig(providers=("NoSuchProvider",)))
    with pytest.raises(errors.InvalidComponentConfig, match="thread counts"):
        OrtBackend(OrtBackendConfig(intra_op_threads=0))
    with pytest.raises(errors.InvalidComponentConfig, match="max_prepared"):
        ReferenceBackend(ReferenceBackendConfig(max_prepared=0))
