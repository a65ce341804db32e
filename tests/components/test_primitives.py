"""Thirty primitives or whole graphs: each side of a backend gives the other."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import mutually_broadcastable_shapes
from onnx import helper, numpy_helper
from onnx.helper import make_node as node
from onnx.reference import ReferenceEvaluator

from bbnode.components import errors
from bbnode.components.backends.ort import OrtBackend, OrtBackendConfig
from bbnode.components.backends.primitives import PRIMITIVES
from bbnode.components.backends.reference import ReferenceBackend, ReferenceBackendConfig
from bbnode.components.contracts import Backend
from bbnode.ir.errors import AuthorError
from tests.components.graphs import model_of

F32 = np.float32
I64 = np.int64


def _axes(axes: Any) -> tuple[int, ...] | None:
    return None if axes is None or not len(axes) else tuple(int(a) for a in axes)


def _reducing(function: Any):
    def reduce(self, x, axes=None, *, keepdims=1, noop_with_empty_axes=0):
        if noop_with_empty_axes and _axes(axes) is None:
            return x
        return np.asarray(function(x, axis=_axes(axes), keepdims=bool(keepdims)))

    return reduce


class NumpyBackend(Backend):
    """Nothing but primitives."""

    TYPE_NAME: ClassVar[str] = "test.NumpyBackend"

    # fmt: off
    def abs(self, x): return np.abs(x)
    def add(self, a, b): return np.add(a, b)
    def sub(self, a, b): return np.subtract(a, b)
    def mul(self, a, b): return np.multiply(a, b)
    def div(self, a, b): return np.divide(a, b)
    def neg(self, x): return np.negative(x)
    def sqrt(self, x): return np.sqrt(x)
    def pow(self, x, exponent): return np.power(x, exponent).astype(x.dtype)
    def exp(self, x): return np.exp(x)
    def log(self, x): return np.log(x)
    def equal(self, a, b): return np.equal(a, b)
    def greater(self, a, b): return np.greater(a, b)
    def less(self, a, b): return np.less(a, b)
    def where(self, condition, a, b): return np.where(condition, a, b)
    def mat_mul(self, a, b): return np.matmul(a, b)
    def identity(self, x): return x
    def constant(self, value): return numpy_helper.to_array(value)
    def transpose(self, x, *, perm=None): return np.transpose(x, perm)
    def concat(self, *parts, axis): return np.concatenate(parts, axis)
    def squeeze(self, x, axes=None): return np.squeeze(x, _axes(axes))
    def unsqueeze(self, x, axes): return np.expand_dims(x, _axes(axes) or ())
    def gather(self, x, indices, *, axis=0): return np.take(x, indices, axis)

    def cast(self, x, *, to, saturate=1):
        return np.asarray(x).astype(helper.tensor_dtype_to_np_dtype(to))

    def reshape(self, x, shape, *, allowzero=0):
        return np.reshape(x, [x.shape[i] if n == 0 and not allowzero else n
                              for i, n in enumerate(shape)])

    def slice(self, x, starts, ends, axes=None, steps=None):
        axes = range(len(starts)) if axes is None else axes
        steps = [1] * len(starts) if steps is None else steps
        at = [slice(None)] * x.ndim
        for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
            at[axis] = slice(start, end, step)
        return x[tuple(at)]

    def split(self, x, sizes=None, *, axis=0, num_outputs=None):
        if sizes is None:
            return np.array_split(x, num_outputs, axis)
        return np.split(x, np.cumsum(sizes)[:-1], axis)

    reduce_sum = _reducing(np.sum)
    reduce_mean = _reducing(np.mean)
    reduce_max = _reducing(np.max)
    reduce_min = _reducing(np.min)
    # fmt: on


class ExecuteOnly(Backend):
    """Nothing but `execute`."""

    TYPE_NAME: ClassVar[str] = "test.ExecuteOnly"

    def execute(self, model, inputs):
        names = [port.name for port in model.graph.output]
        return dict(zip(names, ReferenceEvaluator(model).run(None, dict(inputs)), strict=True))


class AddOnly(Backend):
    TYPE_NAME: ClassVar[str] = "test.AddOnly"

    def add(self, a, b):
        return np.add(a, b)


@pytest.fixture(params=["ort", "reference", "execute", "numpy"])
def backend(request) -> Backend:
    return {
        "ort": lambda: OrtBackend(OrtBackendConfig()),
        "reference": lambda: ReferenceBackend(ReferenceBackendConfig()),
        "execute": lambda: ExecuteOnly(None),
        "numpy": lambda: NumpyBackend(None),
    }[request.param]()


def ints(*values: int) -> np.ndarray:
    return np.array(values, I64)


A = np.array([[1, 2], [3, 4]], F32)
ROW = np.array([2, 4], F32)
TWO = numpy_helper.from_array(np.array([1, 2], F32))
CASES: dict[str, tuple[list[Any], dict[str, Any], Any]] = {
    "Abs": ([-A], {}, A), "Add": ([A, ROW], {}, A + ROW), "Sub": ([A, ROW], {}, A - ROW),
    "Mul": ([A, ROW], {}, A * ROW), "Div": ([A, ROW], {}, A / ROW), "Neg": ([A], {}, -A),
    "Sqrt": ([A], {}, np.sqrt(A)), "Pow": ([A, ROW], {}, A**ROW), "Exp": ([A], {}, np.exp(A)),
    "Log": ([A], {}, np.log(A)), "MatMul": ([A, A], {}, A @ A),
    "ReduceSum": ([A], {"keepdims": 0}, A.sum()),
    "ReduceMean": ([A, ints(0)], {"keepdims": 0}, A.mean(0)),
    "ReduceMax": ([A, ints(-1)], {}, A.max(1, keepdims=True)),
    "ReduceMin": ([A], {"noop_with_empty_axes": 1}, A),
    "Reshape": ([A, ints(4)], {}, A.reshape(4)), "Transpose": ([A], {}, A.T),
    "Concat": ([A, A], {"axis": 0}, np.concatenate([A, A])),
    "Slice": ([A, ints(1), ints(-9), None, ints(-1)], {}, A[::-1]),
    "Split": ([A, ints(1, 1)], {"axis": 0}, A[:1]),
    "Squeeze": ([A[:1], ints(0)], {}, A[0]), "Unsqueeze": ([ROW, ints(0)], {}, ROW[None]),
    "Identity": ([A], {}, A), "Cast": ([A], {"to": 7}, A.astype(I64)),
    "Equal": ([A, A.T], {}, A == A.T), "Greater": ([A, A.T], {}, A > A.T),
    "Less": ([A, A.T], {}, A < A.T), "Where": ([A > 2, A, -A], {}, np.where(A > 2, A, -A)),
    "Constant": ([], {"value": TWO}, np.array([1, 2], F32)),
    "Gather": ([A, ints(-1)], {}, A[[1]]),
}  # fmt: skip


def test_the_thirty_primitives_are_all_there() -> None:
    assert set(CASES) == set(PRIMITIVES)
    assert len(PRIMITIVES) == len(set(PRIMITIVES.values())) == 30


@pytest.mark.parametrize("op", sorted(CASES))
def test_primitive(backend: Backend, op: str) -> None:
    inputs, attributes, expected = CASES[op]
    out = getattr(backend, PRIMITIVES[op])(*inputs, **attributes)
    if op == "Split":
        assert len(out) == 2
        out = out[0]
    np.testing.assert_allclose(out, expected, rtol=1e-6)
    assert out.dtype == np.asarray(expected).dtype


def test_split_into_parts_alike(backend: Backend) -> None:
    parts = backend.split(A, axis=1, num_outputs=2)
    np.testing.assert_array_equal(np.concatenate(parts, 1), A)
    assert len(parts) == 2


def test_a_graph_by_names(backend: Backend) -> None:
    graph = model_of(
        [node("Mul", ["x", "w"], ["h"]), node("Split", ["h", "s"], ["y", "z"], axis=0)],
        {"w": ROW}, inputs={"x": A}, dtype=F32, constants={"s": ints(1, 1)},
    )  # fmt: skip
    made = backend.execute(graph, {"x": A})
    assert list(made) == ["y"]
    np.testing.assert_array_equal(made["y"], [[2, 8]])
    if type(backend) is not ExecuteOnly:  # whose execute is its own
        with pytest.raises(errors.BackendError, match=r"'g' lacks the input\(s\) x; it takes x"):
            backend.execute(graph, {})


def test_ops_beyond_the_primitives_are_named_before_anything_runs() -> None:
    graph = model_of(
        [node("Relu", ["x"], ["h"]), node("Add", ["h", "x"], ["k"]), node("Erf", ["k"], ["y"])],
        {}, inputs={"x": A}, dtype=F32,
    )  # fmt: skip
    with pytest.raises(errors.BackendError, match=r"'g' .*ai.onnx::Erf, ai.onnx::Relu"):
        NumpyBackend(None).prepare(graph)
    with pytest.raises(errors.BackendError, match=r"ai.onnx::Mul; it has Add"):
        AddOnly(None).prepare(model_of([node("Mul", ["x", "x"], ["y"])], {}, inputs={"x": A}))


def test_what_neither_side_gives_is_refused() -> None:
    with pytest.raises(errors.BackendError, match=r"has no Mul; it has Add"):
        AddOnly(None).mul(A, A)
    with pytest.raises(errors.BackendError, match=r"Constant \(of its initializers\)"):
        AddOnly(None).prepare(model_of([node("Add", ["x", "w"], ["y"])], {"w": A}, inputs={"x": A}))

    class Nothing(Backend):
        TYPE_NAME: ClassVar[str] = "test.Nothing"

    with pytest.raises(AuthorError, match="override prepare"):
        Nothing(None)


def test_supports_is_what_the_backend_brings() -> None:
    assert NumpyBackend(None).supports("MatMul", 21)
    assert not NumpyBackend(None).supports("MatMul", 17)
    assert not NumpyBackend(None).supports("Relu", 21)
    assert not NumpyBackend(None).supports("Add", 21, "ai.onnx.ml")
    assert AddOnly(None).supports("Add", 21)
    assert not AddOnly(None).supports("Mul", 21)
    assert ExecuteOnly(None).supports("Gelu", 20)
    assert not ExecuteOnly(None).supports("Gelu", 19)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda m: setattr(m.opset_import[0], "version", 13), "opset 13"),
        (lambda m: m.opset_import.clear(), "opset none"),
        (lambda m: m.graph.node[0].input.__setitem__(0, "ghost"), "'ghost', which nothing"),
        (lambda m: setattr(m.graph.output[0], "name", "ghost"), "its output needs 'ghost'"),
        (lambda m: m.functions.add(), "functions"),
    ],
)
def test_graphs_that_primitives_cannot_run(change, says: str) -> None:
    graph = model_of([node("Add", ["x", "x"], ["y"])], {}, inputs={"x": A}, dtype=F32)
    change(graph)
    with pytest.raises(errors.BackendError, match=says):
        NumpyBackend(None).prepare(graph)


def test_inputs_that_do_not_fit_name_graph_and_node() -> None:
    graph = model_of([node("MatMul", ["x", "x"], ["y"], name="mm")], {}, inputs={"x": A}, dtype=F32)
    prepared = NumpyBackend(None).prepare(graph)
    with pytest.raises(errors.BackendError, match=r"graph 'g', node 'mm': ValueError"):
        prepared.run([np.ones((2, 3), F32)])
    with pytest.raises(errors.BackendError, match=r"2 input\(s\) for 1 \(x\)"):
        prepared.run([A, A])


def test_a_primitive_of_its_own_goes_before_the_graph_side() -> None:
    class Both(ExecuteOnly):
        TYPE_NAME: ClassVar[str] = "test.Both"

        def add(self, a, b):
            return np.full_like(a, 7)

    np.testing.assert_array_equal(Both(None).add(A, A), np.full_like(A, 7))
    np.testing.assert_array_equal(Both(None).mul(A, A), A * A)


UNARY = ["Abs", "Neg", "Identity", "Transpose"]
BINARY = ["Add", "Sub", "Mul"]


@st.composite
def graphs(draw):
    """A random graph of primitives over small whole numbers, where float32 is exact."""
    shapes = draw(mutually_broadcastable_shapes(num_shapes=2, max_dims=3, max_side=3)).input_shapes
    rng = np.random.default_rng(draw(st.integers(0, 1 << 16)))
    feeds = {f"x{i}": rng.integers(-3, 4, s).astype(F32) for i, s in enumerate(shapes)}
    values = {name: array.shape for name, array in feeds.items()}
    nodes = []
    constants: dict[str, np.ndarray] = {}
    for index in range(draw(st.integers(1, 8))):
        name = f"v{index}"
        a = draw(st.sampled_from(sorted(values)))
        kind = draw(
            st.sampled_from(
                [
                    *UNARY,
                    *BINARY,
                    "ReduceSum",
                    "ReduceMax",
                    "Compare",
                    "Unsqueeze",
                    "Concat",
                    "Gather",
                    "Slice",
                ]
            )
        )
        fits = [n for n in sorted(values) if _broadcasts(values[n], values[a])]
        b = draw(st.sampled_from(fits))
        out = np.zeros(values[a])
        if kind in UNARY:
            nodes.append(node(kind, [a], [name]))
            out = out.T if kind == "Transpose" else out
        elif kind in BINARY:
            nodes.append(node(kind, [a, b], [name]))
            out = out + np.zeros(values[b])
        elif kind == "Compare":
            nodes.append(node("Greater", [a, b], [f"m{index}"]))
            nodes.append(node("Where", [f"m{index}", a, b], [name]))
            out = out + np.zeros(values[b])
        elif kind == "Unsqueeze":
            constants["zero"] = ints(0)
            nodes.append(node("Unsqueeze", [a, "zero"], [name]))
            out = out[None]
        elif not out.ndim:
            nodes.append(node("Identity", [a], [name]))
        elif kind.startswith("Reduce"):
            constants["zero"] = ints(0)
            keep = draw(st.integers(0, 1))
            nodes.append(node(kind, [a, "zero"], [name], keepdims=keep))
            out = out.sum(0, keepdims=bool(keep))
        elif kind == "Concat":
            nodes.append(node("Concat", [a, a], [name], axis=0))
            out = np.concatenate([out, out])
        elif kind == "Gather":
            constants["last"] = ints(-1, 0)
            nodes.append(node("Gather", [a, "last"], [name]))
            out = out[[-1, 0]]
        else:
            constants |= {"one": ints(-1), "far": ints(-100), "zero": ints(0)}
            nodes.append(node("Slice", [a, "one", "far", "zero", "one"], [name]))
        values[name] = np.shape(out)
    return model_of(
        nodes, {}, inputs=feeds, output=f"v{index}", dtype=F32, constants=constants, symbolic=True
    ), feeds


def _broadcasts(left: tuple[int, ...], right: tuple[int, ...]) -> bool:
    pairs = zip(reversed(left), reversed(right), strict=False)
    return all(a == b or 1 in (a, b) for a, b in pairs)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(graphs())
def test_primitives_alone_give_what_onnx_runtime_gives(made) -> None:
    graph, feeds = made
    mine = NumpyBackend(None).execute(graph, feeds)
    theirs = OrtBackend(OrtBackendConfig()).execute(graph, feeds)
    assert mine.keys() == theirs.keys()
    for name, value in theirs.items():
        assert np.shape(mine[name]) == np.shape(value)
        np.testing.assert_array_equal(mine[name], value)


def test_constants_of_all_spellings() -> None:
    made = NumpyBackend(None).execute(
        model_of(
            [
                node("Constant", [], ["a"], value_float=2.0),
                node("Constant", [], ["b"], value_floats=[1.0, 2.0]),
                node("Constant", [], ["t"], value=numpy_helper.from_array(F32(3))),
                node("Add", ["a", "b"], ["c"]), node("Mul", ["c", "t"], ["y"]),
            ],
            {}, dtype=F32,
        ), {},
    )  # fmt: skip
    np.testing.assert_array_equal(made["y"], [9, 12])
    graph = model_of([node("Constant", [], ["y"], value_string=b"x")], {}, dtype=F32)
    with pytest.raises(errors.BackendError, match="value_string"):
        NumpyBackend(None).prepare(graph)
