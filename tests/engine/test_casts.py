"""The op Cast, against ONNX's own evaluator."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

from bbnode.engine import errors, steps
from bbnode.ir import keys, types
from bbnode.ir.values import TRIGGER, U64, dtype_of
from tests.engine.builder import Partition, model
from tests.engine.support import bring_up, of

TENSORS = [node for node in types.TENSOR_BY_ELEM.values() if node is not types.TENSOR_STRING]


def cast(value, to: str):
    p = Partition("server", inputs=["x"])
    p.op(keys.TYPES_DOMAIN, "Cast", ["x"], ["y"], to=to)
    p.output("out", "y")
    node = bring_up(model(p), "server")
    node.invoke("server", {"x": value})
    made = node.poll(0)
    return [e.value for e in of(steps.AppEvent, made)], [f.kind for f in of(steps.OpFailed, made)]


def by_onnx(value, source, wanted):
    if source.elem_type in types.BITS_OF_ELEM:  # the evaluator casts none of them to another
        value, source = value.astype(np.float32), types.TENSOR_FLOAT
    node = helper.make_node("Cast", ["x"], ["y"], to=wanted.elem_type)
    graph = helper.make_graph(
        [node],
        "g",
        [helper.make_tensor_value_info("x", source.elem_type, [None])],
        [helper.make_tensor_value_info("y", wanted.elem_type, [None])],
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)])
    return ReferenceEvaluator(made).run(None, {"x": value})[0]


@pytest.mark.parametrize("wanted", TENSORS, ids=lambda t: t.name)
@pytest.mark.parametrize("source", TENSORS, ids=lambda t: t.name)
def test_tensors_convert_as_onnx_says(source, wanted) -> None:
    numbers = [0, 1, 2, 100] if "UINT" in source.name else [-3, 0, 1, 100]
    if source.elem_type in (
        TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.BFLOAT16
    ):  # fmt: skip
        numbers = [0.0, 0.5, 1.75, 100.0] if "UINT" in wanted.name else [-1.75, 0.0, 0.5, 100.0]
    elif "UINT" in wanted.name:
        numbers = [0, 1, 2, 100]
    value = np.array(numbers).astype(dtype_of(source))
    (made,), failed = cast(value, wanted.id)
    assert failed == []
    assert made.dtype == dtype_of(wanted)
    assert made.tolist() == by_onnx(value, source, wanted).tolist()
    assert not made.flags.writeable


def test_what_does_not_fit_is_no_failure_and_no_warning() -> None:
    (made,), failed = cast(np.array([1e300, np.nan]), types.TENSOR_FLOAT.id)
    assert failed == []
    assert np.isinf(made[0])
    assert cast(np.array([np.nan, 1e300]), types.TENSOR_INT64.id)[1] == []


@pytest.mark.parametrize(
    ("value", "to"),
    [(TRIGGER, types.TRIGGER.id), (U64(3), types.ANY.id), (np.ones(2), types.TENSOR.id)],
)
def test_a_value_of_the_type_passes(value, to) -> None:
    (made,), failed = cast(value, to)
    assert failed == []
    assert type(made) is type(value)


@pytest.mark.parametrize(
    ("value", "to"),
    [
        (TRIGGER, types.U64.id),
        (U64(3), types.TENSOR_UINT64.id),
        (np.ones(2), types.TRIGGER.id),
        (np.ones(2), types.TENSOR_STRING.id),
        (np.array(["1"], object), types.TENSOR_INT64.id),
    ],
)
def test_everything_else_is_refused(value, to) -> None:
    assert cast(value, to) == ([], ["CastRefused"])


def test_an_unknown_type_is_refused_at_install() -> None:
    with pytest.raises(errors.InvalidArtifact, match="Nonsense"):
        cast(TRIGGER, "ai.bytesandbrains.Nonsense")
