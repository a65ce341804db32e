"""Sizes of values that equal one another: what is found, and what is left open."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from bbnode.components.autodiff.builder import Dims
from bbnode.components.autodiff.nested import model_types


def dims_of(
    nodes: list[tuple[str, list[str], str]],
    inputs: dict[str, list[object]],
    shapes: dict[str, list[int]],
) -> dict[str, Dims | None]:
    graph = helper.make_graph(
        [helper.make_node(op, names, [out]) for op, names, out in nodes],
        "sizes",
        [helper.make_tensor_value_info(n, TensorProto.FLOAT, dims) for n, dims in inputs.items()],
        [helper.make_tensor_value_info(nodes[-1][2], TensorProto.FLOAT, None)],
        [numpy_helper.from_array(np.asarray(v, np.int64), n) for n, v in shapes.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)])
    return {name: kind.dims for name, kind in model_types(model).items()}


def test_heads_and_back() -> None:
    """A batch goes through heads that are taken together with it, products and sums."""
    found = dims_of(
        [
            ("Reshape", ["x", "heads"], "a"),  # (batch, 4, 6, 2)
            ("Reshape", ["a", "merged"], "m"),  # (batch * 4, 6, 2)
            ("Reshape", ["m", "turned"], "t"),  # (batch, 4, 2, 6)
            ("MatMul", ["a", "t"], "p"),
            ("Add", ["p", "p"], "s"),
            ("Add", ["s", "one"], "y"),
        ],
        {"x": ["batch", 6, 8], "one": [1, 1, 6]},
        {"heads": [-1, 4, 6, 2], "merged": [-1, 6, 2], "turned": [-1, 4, 2, 6]},
    )
    assert found["a"] == ("batch", 4, 6, 2)
    assert found["t"] == ("batch", 4, 2, 6)
    assert found["m"] is not None
    assert found["m"][0] != "batch"
    assert found["p"] == found["s"] == found["y"] == ("batch", 4, 6, 6)


@pytest.mark.parametrize(
    "shape",
    [[-1, 3], [-1, 16]],
    ids=["not-a-multiple", "a-fraction"],
)
def test_other_counts_stay_open(shape: list[int]) -> None:
    found = dims_of([("Reshape", ["x", "to"], "y")], {"x": ["batch", 8]}, {"to": shape})
    assert found["y"] is not None
    assert found["y"][0] != "batch"


def test_sizes_that_may_be_stretched_stay_open() -> None:
    """Two names may be the same size, or one of them 1."""
    found = dims_of(
        [("Reshape", ["x", "to"], "a"), ("Add", ["a", "z"], "y")],
        {"x": ["batch", 8], "z": ["rows", 4]},
        {"to": [-1, 4]},
    )
    assert found["y"] is not None
    assert found["y"][0] not in ("batch", "rows")
