"""The named methods of `BackendSlot`: against ONNX's schemas, and run in ONNX Runtime."""

# ruff: noqa: ARG005  # every case of a table takes the same arguments

from __future__ import annotations

import inspect

import numpy as np
import onnxruntime as ort
import pytest
from onnx import FunctionProto, ModelProto, TensorProto, helper
from onnx.defs import OpSchema

from bbnode.dsl import BackendSlot, BadArgument, Graph, Output, types
from bbnode.dsl.backend.catalogue import _defaults, catalogue
from tests import protos
from tests.dsl.programs import build, root

C = BackendSlot("compute")
OPTION = OpSchema.FormalParameterOption

# The specification's list of what every backend runs (its part 5d; `Where` is among the
# primitives of the facts), and the op of ONNX that each method records.
NAMED = {
    "add": "Add", "sub": "Sub", "mul": "Mul", "div": "Div", "neg": "Neg", "abs": "Abs",
    "sqrt": "Sqrt", "exp": "Exp", "log": "Log", "pow": "Pow",
    "mat_mul": "MatMul", "gemm": "Gemm", "dot": None,
    "relu": "Relu", "sigmoid": "Sigmoid", "tanh": "Tanh", "softmax": "Softmax",
    "leaky_relu": "LeakyRelu", "gelu": "Gelu",
    "reshape": "Reshape", "transpose": "Transpose", "concat": "Concat", "split": "Split",
    "slice": "Slice", "squeeze": "Squeeze", "unsqueeze": "Unsqueeze", "identity": "Identity",
    "cast": "Cast",
    "reduce_sum": "ReduceSum", "reduce_mean": "ReduceMean", "reduce_max": "ReduceMax",
    "reduce_min": "ReduceMin",
    "equal": "Equal", "greater": "Greater", "less": "Less", "where": "Where",
    "batch_normalization": "BatchNormalization", "layer_normalization": "LayerNormalization",
    "conv": "Conv", "max_pool": "MaxPool", "average_pool": "AveragePool",
    "global_average_pool": "GlobalAveragePool",
    "zeros": None, "ones": None, "constant": None,
    "gather": "Gather", "scatter": "ScatterElements",
    "if_": None, "loop": None,
}  # fmt: skip
# Attributes that a method leaves to `op`: they ask for more outputs.
LEFT_TO_OP = {"BatchNormalization": {"training_mode"}, "Cast": {"round_mode"}}
SCHEMA_METHODS = [(method, op_type) for method, op_type in NAMED.items() if op_type]


@pytest.mark.parametrize("method", NAMED)
def test_a_named_method_is_written_out_and_says_what_it_records(method: str) -> None:
    function = inspect.getattr_static(BackendSlot, method)
    assert inspect.isfunction(function)
    hints = inspect.get_annotations(function)
    assert set(hints) == {*inspect.signature(function).parameters, "return"} - {"self"}
    text = function.__doc__ or ""
    op_types = [NAMED[method]] if NAMED[method] else {
        "dot": ["Mul", "ReduceSum"], "zeros": ["ConstantOfShape"], "ones": ["ConstantOfShape"],
        "constant": ["Constant"], "if_": ["If"], "loop": ["Loop"],
    }[method]  # fmt: skip
    for op_type in op_types:
        assert f"`{op_type}`-{catalogue()[op_type].since_version}" in text


@pytest.mark.parametrize(("method", "op_type"), SCHEMA_METHODS)
def test_a_signature_is_that_of_the_schema(method: str, op_type: str) -> None:
    schema = catalogue()[op_type]
    signature = inspect.signature(inspect.getattr_static(BackendSlot, method))
    parameters = list(signature.parameters.values())[2:]
    positional = [p for p in parameters if p.kind is not p.KEYWORD_ONLY]
    assert len(positional) == len(schema.inputs)
    for parameter, formal in zip(positional, schema.inputs, strict=True):
        assert (parameter.kind is parameter.VAR_POSITIONAL) == (formal.option == OPTION.Variadic)
        assert (parameter.default is None) == (formal.option == OPTION.Optional)
    keywords = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
    assert keywords.pop("after") is None
    keywords.pop("outputs", None)
    assert set(keywords) == set(schema.attributes) - LEFT_TO_OP.get(op_type, set())
    for name, default in keywords.items():
        if schema.attributes[name].required:
            assert default is inspect.Parameter.empty
        else:
            assert default == _defaults(op_type).get(name)


def test_a_default_is_not_written_down_and_another_value_is() -> None:
    def body(g: Graph) -> None:
        x = g.input("x", types.TENSOR_FLOAT)
        C.softmax(g, x, axis=-1)
        C.softmax(g, x, axis=1)
        C.leaky_relu(g, x, alpha=0.01)
        C.split(g, x, num_outputs=2, axis=0)

    plain, other, leaky, split = root(body).node
    assert not plain.attribute
    assert protos.get_attr(other, "axis") == 1
    assert not leaky.attribute
    assert [a.name for a in split.attribute] == ["num_outputs"]


def run(body, **arrays: np.ndarray) -> list[np.ndarray]:
    """Run what `body(g, *inputs)` records and returns, as one plain ONNX graph."""
    made: list[Output] = []

    def record(g: Graph) -> None:
        inputs = [
            g.input(name, types.TENSOR_BY_ELEM[helper.np_dtype_to_tensor_dtype(array.dtype)])
            for name, array in arrays.items()
        ]
        result = body(g, *inputs)
        made.extend(result if isinstance(result, tuple | list) else [result])

    return execute(root(record), made, arrays)


def execute(
    function: FunctionProto, outputs: list[Output], arrays: dict[str, np.ndarray]
) -> list[np.ndarray]:
    graph = helper.make_graph(
        list(function.node),
        "g",
        [
            helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape)
            for n, a in arrays.items()
        ],
        [helper.make_empty_tensor_value_info(value.name) for value in outputs],
    )
    imports = [entry for entry in function.opset_import if entry.domain == ""]
    model: ModelProto = helper.make_model(graph, opset_imports=imports, ir_version=10)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, dict(arrays))


rng = np.random.default_rng(3)
A, B = (rng.uniform(0.5, 2, (2, 3)).astype("f4") for _ in range(2))
IMAGE = rng.normal(size=(1, 2, 4, 4)).astype("f4")
CHANNEL = rng.uniform(0.5, 2, 2).astype("f4")
INDEX = np.array([[1], [0]])
EPS = 1e-5


def windows(x: np.ndarray) -> np.ndarray:
    """[1, 2, 4, 4] in 2 by 2 windows: [1, 2, 2, 2, 4]."""
    return x.reshape(1, 2, 2, 2, 2, 2).transpose(0, 1, 2, 4, 3, 5).reshape(1, 2, 2, 2, 4)


CASES = {
    "add": (lambda g, a, b: C.add(g, a, b), (A, B), A + B),
    "sub": (lambda g, a, b: C.sub(g, a, b), (A, B), A - B),
    "mul": (lambda g, a, b: C.mul(g, a, b), (A, B), A * B),
    "div": (lambda g, a, b: C.div(g, a, b), (A, B), A / B),
    "neg": (lambda g, a: C.neg(g, a), (A,), -A),
    "abs": (lambda g, a: C.abs(g, a), (-A,), A),
    "sqrt": (lambda g, a: C.sqrt(g, a), (A,), np.sqrt(A)),
    "exp": (lambda g, a: C.exp(g, a), (A,), np.exp(A)),
    "log": (lambda g, a: C.log(g, a), (A,), np.log(A)),
    "pow": (lambda g, a, b: C.pow(g, a, b), (A, B), A**B),
    "mat_mul": (lambda g, a, b: C.matmul(g, a, b), (A, B.T.copy()), A @ B.T),
    "gemm": (lambda g, a, b, c: C.gemm(g, a, b, c, transB=True, beta=0.5), (A, B, CHANNEL),
             A @ B.T + 0.5 * CHANNEL),
    "dot": (lambda g, a, b: C.dot(g, a, b), (A, B), (A * B).sum(-1)),
    "relu": (lambda g, a: C.relu(g, a), (A - 1,), np.maximum(A - 1, 0)),
    "sigmoid": (lambda g, a: C.sigmoid(g, a), (A,), 1 / (1 + np.exp(-A))),
    "tanh": (lambda g, a: C.tanh(g, a), (A,), np.tanh(A)),
    "softmax": (lambda g, a: C.softmax(g, a, axis=0), (A,), np.exp(A) / np.exp(A).sum(0)),
    "leaky_relu": (lambda g, a: C.leaky_relu(g, a, alpha=0.5), (A - 1,),
                   np.where(A > 1, A - 1, (A - 1) / 2)),
    "gelu": (lambda g, a: C.gelu(g, a, approximate="tanh"), (A,),
             A / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (A + 0.044715 * A**3)))),
    "reshape": (lambda g, a: C.reshape(g, a, [3, -1]), (A,), A.reshape(3, 2)),
    "transpose": (lambda g, a: C.transpose(g, a), (A,), A.T),
    "concat": (lambda g, a, b: C.concat(g, a, b, axis=1), (A, B), np.concatenate([A, B], 1)),
    "split": (lambda g, a: C.split(g, a, [1, 2], axis=1), (A,), [A[:, :1], A[:, 1:]]),
    "split_equal": (lambda g, a: C.split(g, a, num_outputs=2), (A,), [A[:1], A[1:]]),
    "split_one": (lambda g, a: C.split(g, a, num_outputs=1), (A,), [A]),
    "slice": (lambda g, a: C.slice(g, a, [2], [-9], [1], [-1]), (A,), A[:, ::-1]),
    "squeeze": (lambda g, a: C.squeeze(g, C.unsqueeze(g, a, [0, 3]), [3]), (A,), A[None]),
    "unsqueeze": (lambda g, a: C.unsqueeze(g, a, [1]), (A,), A[:, None]),
    "identity": (lambda g, a: C.identity(g, a), (A,), A),
    "cast": (lambda g, a: C.cast(g, a, to=types.TENSOR_INT64), (A,), A.astype("i8")),
    "reduce_sum": (lambda g, a: C.reduce_sum(g, a, [1], keepdims=False), (A,), A.sum(1)),
    "reduce_mean": (lambda g, a: C.reduce_mean(g, a, [0]), (A,), A.mean(0, keepdims=True)),
    "reduce_max": (lambda g, a: C.reduce_max(g, a, keepdims=False), (A,), A.max()),
    "reduce_min": (lambda g, a: C.reduce_min(g, a, keepdims=False), (A,), A.min()),
    "equal": (lambda g, a, b: C.equal(g, a, b), (A, A), np.ones_like(A, bool)),
    "greater": (lambda g, a, b: C.greater(g, a, b), (A, B), A > B),
    "less": (lambda g, a, b: C.less(g, a, b), (A, B), A < B),
    "where": (lambda g, a, b: C.where(g, C.less(g, a, b), a, b), (A, B), np.minimum(A, B)),
    "batch_normalization": (
        lambda g, x, c: C.batch_normalization(g, x, c, c, c, c), (IMAGE, CHANNEL),
        (IMAGE - CHANNEL[:, None, None]) / np.sqrt(CHANNEL[:, None, None] + EPS)
        * CHANNEL[:, None, None] + CHANNEL[:, None, None],
    ),
    "layer_normalization": (
        lambda g, a, s: C.layer_normalization(g, a, s), (A, np.ones(3, "f4")),
        (A - A.mean(1, keepdims=True)) / np.sqrt(A.var(1, keepdims=True) + EPS),
    ),
    "conv": (lambda g, x, w: C.conv(g, x, w, strides=[2, 2]),
             (IMAGE, np.ones((1, 2, 2, 2), "f4")), windows(IMAGE).sum((1, 4))[:, None]),
    "max_pool": (lambda g, x: C.max_pool(g, x, kernel_shape=[2, 2], strides=[2, 2]), (IMAGE,),
                 windows(IMAGE).max(-1)),
    "average_pool": (lambda g, x: C.average_pool(g, x, kernel_shape=[2, 2], strides=[2, 2]),
                     (IMAGE,), windows(IMAGE).mean(-1)),
    "global_average_pool": (lambda g, x: C.global_average_pool(g, x), (IMAGE,),
                            IMAGE.mean((2, 3), keepdims=True)),
    "zeros": (lambda g, a: C.add(g, a, C.zeros(g, [2, 3])), (A,), A),
    "ones": (lambda g, a: C.cast(g, C.ones(g, [2], dtype=types.TENSOR_INT64), to=1), (A,),
             np.ones(2, "f4")),
    "constant": (lambda g, a: C.mul(g, a, C.constant(g, 2.0)), (A,), 2 * A),
    "gather": (lambda g, a, i: C.gather(g, a, i, axis=1), (A, np.array([2, 0])), A[:, [2, 0]]),
    "scatter": (lambda g, a, i, u: C.scatter(g, a, i, u, axis=1, reduction="add"),
                (A, INDEX, B[:, :1].copy()), A + np.array([[0, B[0, 0], 0], [B[1, 0], 0, 0]])),
}  # fmt: skip


def test_every_named_method_is_run() -> None:
    assert set(NAMED) - {"if_", "loop"} <= set(CASES)


@pytest.mark.parametrize("case", CASES)
def test_what_a_named_method_computes(case: str) -> None:
    body, arrays, expected = CASES[case]
    got = run(body, **{f"in{i}": array for i, array in enumerate(arrays)})
    wanted = expected if isinstance(expected, list) else [expected]
    assert len(got) == len(wanted)
    for one, other in zip(got, wanted, strict=True):
        assert one.shape == np.shape(other)
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=1e-6)


def test_a_shape_may_be_a_value() -> None:
    got = run(lambda g, a, shape: C.zeros(g, shape), a=A, shape=np.array([1, 2]))
    assert got[0].shape == (1, 2)


def test_types_that_are_known_at_once() -> None:
    def body(g: Graph) -> None:
        x = g.input("x", types.TENSOR_FLOAT)
        assert C.cast(g, x, to=TensorProto.INT8).type is types.TENSOR_BY_ELEM[TensorProto.INT8]
        assert C.zeros(g, [2]).type is types.TENSOR_FLOAT
        assert C.ones(g, [2], dtype=types.TENSOR_INT64).type is types.TENSOR_INT64
        assert C.dot(g, x, x).type is types.TENSOR_FLOAT
        assert [part.type for part in C.split(g, x, num_outputs=2)] == [types.TENSOR_FLOAT] * 2

    build(body)


@pytest.mark.parametrize(
    ("record", "text"),
    [
        (lambda g, x: C.reshape(g, x, "3"), "shape='3' is neither a recorded value nor a list"),
        (lambda g, x: C.reshape(g, x, [1.5]), "list of whole numbers"),
        (lambda g, x: C.reshape(g, x, [1 << 70]), "list of whole numbers"),
        (lambda g, x: C.squeeze(g, x, 1), "axes=1 is neither"),
        (lambda g, x: C.zeros(g, [2], dtype="float"), "dtype='float' is not a tensor type"),
        (lambda g, x: C.zeros(g, [2], dtype=types.PEER_ID), "is not a tensor type"),
        (lambda g, x: C.cast(g, x, to="int"), "to='int' of Cast has to be an integer"),
        (lambda g, x: C.cast(g, x, to=types.TRIGGER), "of Cast has to be an integer"),
        (lambda g, x: C.split(g, x), "either num_outputs=… or the sizes"),
        (lambda g, x: C.split(g, x, [1], num_outputs=1), "either num_outputs"),
        (lambda g, x: C.split(g, x, x), "say how many"),
        (lambda g, x: C.split(g, x, num_outputs=0), "1 to 65536 outputs, not 0"),
        (lambda g, x: C.max_pool(g, x, kernel_shape=2), "a list of integers"),
        (lambda g, x: C.add(g, x, 2.0), "a literal becomes one with g.constant"),
        (lambda g, x: C.dot(x, x, x), "the first argument is the Graph"),
    ],
)  # fmt: skip
def test_what_a_named_method_refuses(record, text) -> None:
    with pytest.raises(BadArgument, match=text) as caught:
        build(lambda g: record(g, g.input("x", types.TENSOR_FLOAT)))
    assert caught.value.module == "Program"
    assert caught.value.source.startswith("test_named_ops.py:")
