"""Ranks of graph inputs: told where the readers leave no choice, never guessed."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import numpy_helper
from onnx.helper import make_node as node

from bbnode.engine.ops.graphs import input_rank
from bbnode.ir.graph import Subgraph
from bbnode.ir.onnx_file import node_of


def constant(name: str, *shape: int):
    return node("Constant", [], [name], value=numpy_helper.from_array(np.ones(shape, np.float32)))


KERNEL = constant("k", 2, 3, 3, 3)


@pytest.mark.parametrize(
    ("nodes", "rank"),
    [
        ([KERNEL, node("Conv", ["x", "k"], ["y"])], 4),
        ([constant("k", 2, 3, 3), node("Conv", ["x", "k"], ["y"])], 3),
        ([node("Conv", ["x", "k"], ["y"])], None),  # a kernel that comes from elsewhere
        ([KERNEL, node("Conv", ["k", "x"], ["y"])], None),
        ([node("MaxPool", ["x"], ["y"], kernel_shape=[2, 2])], 4),
        ([node("AveragePool", ["x"], ["y"], kernel_shape=[2])], 3),
        ([node("Gemm", ["x", "w"], ["y"])], 2),
        ([node("Gemm", ["w", "x"], ["y"])], None),
        # Ops without the ports or attributes that they need are the backend's to refuse.
        ([node("Add", ["x"], ["y"])], None),
        ([node("Conv", ["x"], ["y"])], None),
        ([node("Relu", ["x"], [])], None),
        ([node("MaxPool", ["x"], ["y"])], None),
        ([node("MaxPool", ["x"], ["y"], kernel_shape=2)], None),
        ([node("Constant", [], ["c"], value=1), node("Add", ["x", "c"], ["y"])], None),
        ([node("MatMul", ["x", "w"], ["y"])], None),
        ([KERNEL, node("Relu", ["x"], ["h"]), node("Conv", ["h", "k"], ["y"])], 4),
        # Pixels that are scaled first: the constant is smaller than what it scales.
        ([KERNEL, constant("s"), constant("m", 3, 1, 1), node("Div", ["x", "s"], ["h"]),
          node("Sub", ["h", "m"], ["c"]), node("Conv", ["c", "k"], ["y"])], 4),
        # One as large could have made the rank.
        ([KERNEL, constant("m", 1, 3, 1, 1), node("Sub", ["x", "m"], ["c"]),
          node("Conv", ["c", "k"], ["y"])], None),
        ([KERNEL, node("Add", ["x", "z"], ["c"]), node("Conv", ["c", "k"], ["y"])], None),
        ([node("Identity", ["x"], ["y"])], None),
    ],
)  # fmt: skip
def test_input_rank(nodes, rank) -> None:
    graph = Subgraph(inputs=["x"])
    graph.nodes = [node_of(each) for each in nodes]
    assert input_rank(graph, "x") == rank
