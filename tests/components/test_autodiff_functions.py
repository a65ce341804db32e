"""Ops that ONNX defines by others have a gradient without a rule of their own."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import NodeProto, TensorProto, helper
from onnx.helper import make_node as node

from bbnode.components.autodiff import UnsupportedGradient, training_graphs
from bbnode.components.autodiff.functions import expand_functions
from bbnode.components.autodiff.table import _TABLE
from tests.components.graphs import check, model_of, run_ort

PARAMS = {"a": np.linspace(-1.5, 2.0, 12).reshape(3, 4), "s": np.linspace(0.5, 1.5, 4)}


def gradients(nodes: list[NodeProto], names: list[str]) -> dict[str, np.ndarray]:
    params = {name: PARAMS[name] for name in names}
    forward = model_of(nodes, params, dtype=np.float32, opset=23, constants={"c": np.array(True)})
    graphs = training_graphs(forward, "mse", wrt=names)
    check(graphs.pullback)
    cotangent = np.cos(np.arange(12, dtype=np.float32)).reshape(3, 4)
    feeds = {name: value.astype(np.float32) for name, value in params.items()}
    return run_ort(graphs.pullback, {**feeds, graphs.output_gradient_name: cotangent})


def branch(made: NodeProto) -> NodeProto:
    """Put a node into both branches of an If."""
    ports = [helper.make_tensor_value_info("y", TensorProto.FLOAT, [3, 4])]
    inside = helper.make_graph([made], "branch", [], ports)
    return node("If", ["c"], ["y"], then_branch=inside, else_branch=inside)


@pytest.mark.parametrize(
    ("op", "names"),
    [
        ("Elu", ["a"]), ("Gelu", ["a"]), ("HardSwish", ["a"]), ("Mish", ["a"]), ("Selu", ["a"]),
        ("Softsign", ["a"]), ("LayerNormalization", ["a", "s"]), ("RMSNormalization", ["a", "s"]),
    ],
)  # fmt: skip
@pytest.mark.parametrize("nested", [False, True])
def test_a_function_op_without_a_rule_is_expanded(op, names, nested, monkeypatch) -> None:
    made = node(op, names, ["y"])
    nodes = [branch(made)] if nested else [made]
    by_rule = gradients(nodes, names)
    monkeypatch.delitem(_TABLE, ("", op))
    for name, found in gradients(nodes, names).items():
        np.testing.assert_allclose(found, by_rule[name], rtol=1e-4, atol=1e-5)


def test_what_no_gradient_passes_stays_as_it_is(monkeypatch) -> None:
    monkeypatch.delitem(_TABLE, ("", "Selu"))
    nodes = [node("Selu", ["x"], ["h"]), node("Mul", ["h", "a"], ["y"])]
    model = model_of(nodes, {"a": np.ones(2)}, inputs={"x": np.ones(2)})
    assert expand_functions(model, {"a"}) is model
    assert [n.op_type for n in training_graphs(model, "mse").forward.graph.node] == ["Selu", "Mul"]
    assert expand_functions(model, {"x"}) is not model


def test_an_op_that_is_no_function_is_refused_as_before() -> None:
    model = model_of([node("Det", ["a"], ["y"])], {"a": np.eye(2)})
    with pytest.raises(UnsupportedGradient, match="Det"):
        training_graphs(model, "mse")
