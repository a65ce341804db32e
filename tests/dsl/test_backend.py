"""`BackendSlot`: the `ai.onnx` catalogue, by ONNX's schemas."""

# ruff: noqa: ARG005  # every case of a table takes the same arguments

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from bbnode.dsl import BackendSlot, BadArgument, Graph, NoSuchOp, types
from bbnode.dsl.backend.catalogue import catalogue, method_name
from bbnode.ir import keys
from tests import protos
from tests.dsl.programs import build, only, root

C = BackendSlot("compute")

# What the specification asks every backend to run and ONNX (still) has.
REQUIRED_OPS = [
    "Add",
    "Sub",
    "Mul",
    "Div",
    "Neg",
    "Abs",
    "Sqrt",
    "Exp",
    "Log",
    "Pow",
    "MatMul",
    "Gemm",
    "Relu",
    "Sigmoid",
    "Tanh",
    "Softmax",
    "LeakyRelu",
    "Gelu",
    "Reshape",
    "Transpose",
    "Concat",
    "Split",
    "Slice",
    "Squeeze",
    "Unsqueeze",
    "Identity",
    "Cast",
    "ReduceSum",
    "ReduceMean",
    "ReduceMax",
    "ReduceMin",
    "Equal",
    "Greater",
    "Less",
    "BatchNormalization",
    "LayerNormalization",
    "Conv",
    "MaxPool",
    "AveragePool",
    "GlobalAveragePool",
    "Constant",
    "Gather",
    "ScatterElements",
    "If",
    "Loop",
]


# Those that have a method of their own, with its own text.
NAMED = {*REQUIRED_OPS, "Where"} - {"ScatterElements"}


def floats(g: Graph, *names: str):
    return [g.input(name, types.TENSOR_FLOAT) for name in names]


def test_the_catalogue_is_that_of_the_opset_we_record() -> None:
    assert set(REQUIRED_OPS) <= set(catalogue())
    assert len(catalogue()) > 180
    assert "Scatter" not in catalogue()  # deprecated
    assert all(s.since_version <= keys.ONNX_OPSET_VERSION for s in catalogue().values())


def test_method_names_are_unique_and_resolve_to_their_op() -> None:
    names = {method_name(op_type) for op_type in catalogue()}
    assert len(names) == len(catalogue())
    assert names <= set(dir(C))
    for op_type in catalogue():
        method = getattr(C, method_name(op_type))
        assert method.__name__ == method_name(op_type)
        assert method.__doc__
        if op_type not in NAMED:
            assert method.__doc__ == catalogue()[op_type].doc
        assert method_name(op_type).isidentifier()


@pytest.mark.parametrize(
    ("op_type", "name"),
    [("MatMul", "mat_mul"), ("LSTM", "lstm"), ("BatchNormalization", "batch_normalization"),
     ("If", "if_"), ("ReduceL2", "reduce_l2"), ("QLinearConv", "q_linear_conv")],
)  # fmt: skip
def test_method_names(op_type, name) -> None:
    assert method_name(op_type) == name


@pytest.mark.parametrize("name", ["matmul", "mat_mul", "MatMul"])
def test_spellings_of_one_op(name) -> None:
    assert root(lambda g: getattr(C, name)(g, *floats(g, "a", "b"))).node[0].op_type == "MatMul"


def test_a_recorded_node_runs_as_plain_onnx() -> None:
    def body(g: Graph) -> None:
        x, w, b = floats(g, "x", "w", "b")
        y = C.relu(g, C.gemm(g, x, w, b, transB=True, alpha=0.5))
        low, high = C.split(g, y, num_outputs=2, axis=1)
        g.output("y", C.sub(g, high, low))

    function = root(body)
    model = helper.make_model(
        helper.make_graph(
            [n for n in function.node if n.op_type != "PassThrough"],
            "g",
            [
                helper.make_tensor_value_info(n, TensorProto.FLOAT, shape)
                for n, shape in (("x", [3, 4]), ("w", [6, 4]), ("b", [6]))
            ],
            [helper.make_tensor_value_info("Sub_0.C", TensorProto.FLOAT, [3, 3])],
        ),
        opset_imports=[o for o in function.opset_import if o.domain == ""],
        ir_version=10,
    )
    onnx.checker.check_model(model, full_check=True)
    rng = np.random.default_rng(0)
    x, w, b = (rng.standard_normal(s).astype(np.float32) for s in ((3, 4), (6, 4), (6,)))
    (got,) = ReferenceEvaluator(model).run(None, {"x": x, "w": w, "b": b})
    y = np.maximum(0.5 * x @ w.T + b, 0)
    np.testing.assert_allclose(got, y[:, 3:] - y[:, :3], rtol=1e-5, atol=1e-6)


def test_attributes_are_checked_and_sorted() -> None:
    def body(g: Graph, **attributes) -> None:
        C.gemm(g, *floats(g, "a", "b"), **attributes)

    one = root(lambda g: body(g, beta=2, alpha=0.5))
    other = root(lambda g: body(g, alpha=np.float32(0.5), beta=2.0))
    assert [a.name for a in one.node[0].attribute] == ["alpha", "beta"]
    assert list(one.node[0].attribute) == list(other.node[0].attribute)
    assert protos.get_attr(one.node[0], "beta") == 2.0


def test_kinds_of_attributes() -> None:
    def body(g: Graph) -> None:
        (x,) = floats(g, "x")
        C.cast(g, x, to=types.TENSOR_INT64)
        C.transpose(g, x, perm=np.array([1, 0]))
        C.constant(g, value=np.arange(3))
        C.lstm(g, x, x, x, activations=["Sigmoid", "Tanh", "Tanh"], hidden_size=4, outputs=3)

    cast, transpose, constant, lstm = root(body).node
    assert protos.get_attr(cast, "to") == TensorProto.INT64
    assert list(protos.get_attr(transpose, "perm")) == [1, 0]
    np.testing.assert_array_equal(
        numpy_helper.to_array(protos.get_attr(constant, "value")), np.arange(3)
    )
    assert protos.get_attr(lstm, "activations") == [b"Sigmoid", b"Tanh", b"Tanh"]
    assert len(lstm.output) == 3


def test_optional_inputs_left_out() -> None:
    def body(g: Graph) -> None:
        x, high = floats(g, "x", "high")
        C.clip(g, x, None, high)
        C.clip(g, x, high, None)

    first, second = root(body).node
    assert list(first.input) == ["x", "", "high"]
    assert list(second.input) == ["x", "high"]


def test_output_types_that_the_schema_knows() -> None:
    def body(g: Graph) -> None:
        x, y = floats(g, "x", "y")
        values, indices = C.top_k(g, x, g.constant([1]))
        assert (values.type, indices.type) == (types.TENSOR_FLOAT, types.TENSOR_INT64)
        assert C.equal(g, x, y).type is types.TENSOR_BOOL
        assert C.cast(g, x, to=types.TENSOR_INT64).type is types.TENSOR_INT64
        assert C.sequence_construct(g, x, y).type is types.ANY
        assert C.add(g, x, y).type is types.TENSOR_FLOAT
        assert C.concat(g, x, y, axis=0).type is types.TENSOR_FLOAT

    build(body)


def test_if_and_loop_take_graphs() -> None:
    branch = helper.make_graph(
        [], "b", [], [helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in "pq"]
    )

    def body(g: Graph) -> None:
        cond, x = g.input("cond", types.TENSOR_BOOL), g.input("x", types.TENSOR_FLOAT)
        p, q = C.op(g, "If", cond, then_branch=branch, else_branch=branch)
        assert C.op(g, "Loop", None, cond, x, body=branch).graph is g
        g.output("p", C.add(g, p, q))

    function, node = only(body, "If")
    assert protos.get_attr(node, "then_branch") == branch
    (loop,) = (n for n in function.node if n.op_type == "Loop")
    assert list(loop.input) == ["", "cond", "x"]


@pytest.mark.parametrize(
    ("record", "error", "text"),
    [
        (lambda g, x: C.matmull(g, x, x), NoSuchOp, "has no op 'matmull'; did you mean 'mat_mul'"),
        (lambda g, x: C.op(g, "Matmul", x, x), NoSuchOp, "did you mean 'MatMul'"),
        (lambda g, x: C.op(g, 3, x), NoSuchOp, "has no op '3'"),
        (lambda g, x: C.op(g, "MatMul", x), BadArgument, r"takes the values \(A, B\), got 1"),
        (lambda g, x: C.elu(g, x, x), BadArgument, "got 2"),
        (lambda g, x: C.relu(g, None), BadArgument, "input 'X' of Relu can't be left out"),
        (lambda g, x: C.relu(g, 3.0), BadArgument, r"3.0 \(float\) is not a recorded value"),
        (lambda g, x: C.op(g, "Softmax", x, axes=1), BadArgument,
         "Softmax has no attribute 'axes'; did you mean 'axis'"),
        (lambda g, x: C.softmax(g, x, axis="1"), BadArgument, "has to be an integer"),
        (lambda g, x: C.softmax(g, x, axis=1 << 63), BadArgument, "has to be an integer"),
        (lambda g, x: C.transpose(g, x, perm="10"), BadArgument, "a list of integers"),
        (lambda g, x: C.transpose(g, x, perm=[1, None]), BadArgument, "a list of integers"),
        (lambda g, x: C.constant(g, value=object()), BadArgument, "an array of numbers"),
        (lambda g, x: C.constant(g, value=[[1], [1, 2]]), BadArgument, "an array"),
        (lambda g, x: C.op(g, "If", x, then_branch=1, else_branch=1), BadArgument,
         "onnx.GraphProto"),
        (lambda g, x: C.op(g, "Cast", x), BadArgument, "Cast needs the attribute to="),
        (lambda g, x: C.op(g, "Split", x), BadArgument, "say how many: outputs="),
        (lambda g, x: C.elu(g, x, outputs=2), BadArgument, "1 to 1 outputs, not 2"),
        (lambda g, x: C.split(g, x, num_outputs=1 << 30), BadArgument, "1 to 65536 outputs"),
        (lambda g, x: C.relu(x, x), BadArgument, "first argument is the Graph"),
    ],
)  # fmt: skip
def test_what_does_not_fit_the_schema(record, error, text) -> None:
    with pytest.raises(error, match=text) as caught:
        build(lambda g: record(g, g.input("x")))
    assert caught.value.source.startswith("test_backend.py:")
