"""ONNX's node tests with loops and recurrent layers: gradients along lines against differences."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from bbnode.components.autodiff import training_graphs
from tests.components.graphs import run_ort
from tests.components.test_autodiff_recurrent import OPS, exact

LOOPS = frozenset({"GRU", "LSTM", "Loop", "RNN", "Scan"})
STEP = 1e-3
# What the harness below does not make a model of: sequences, halves, whole numbers, old forms; and
# a Range, whose number of elements jumps with its start.
OTHERS = ("seq", "float16", "fp16", "int32", "scan_sum", "range_")


def node_cases() -> list[Any]:
    from onnx.backend.test.case.node import collect_testcases

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        collected = collect_testcases(None)
    return [
        case
        for case in collected
        if any(node.op_type in LOOPS for node in case.model.graph.node)
        and (not any(word in case.name for word in OTHERS) or "seq_length" in case.name)
    ]


@pytest.mark.slow
def test_gradients_of_the_node_tests() -> None:
    cases = node_cases()
    assert len(cases) > 20
    for case in cases:
        check_case(case)


def check_case(case: Any) -> None:
    rng = np.random.default_rng(0)
    graph = case.model.graph
    inputs, outputs = case.data_sets[0]
    values = {port.name: np.asarray(v) for port, v in zip(graph.input, inputs, strict=True)}
    params = {name: value for name, value in values.items() if value.dtype.kind == "f"}
    end, y = next(
        (port.name, value)
        for port, value in zip(graph.output, outputs, strict=True)
        if value.dtype.kind == "f"
    )
    model = helper.make_model(
        helper.make_graph(
            list(graph.node),
            "g",
            [],
            [helper.make_tensor_value_info(end, 1, [None] * y.ndim)],
            [numpy_helper.from_array(value, name) for name, value in values.items()],
        ),
        ir_version=10,
        opset_imports=case.model.opset_import,
    )
    graphs = training_graphs(model, "mse", wrt=list(params))
    cotangent = rng.normal(size=y.shape).astype(np.float32)
    feeds = {**params, graphs.output_gradient_name: cotangent}
    found = exact(graphs.pullback, feeds)
    run = ReferenceEvaluator(graphs.forward, new_ops=OPS).run
    for name, gradient in zip(graphs.parameter_names, graphs.gradient_names, strict=True):
        way = rng.normal(size=params[name].shape)
        ahead, behind = (
            np.sum(
                run([end], params | {name: (params[name] + h * way).astype(np.float32)})[0]
                * cotangent.astype(np.float64)
            )
            for h in (STEP, -STEP)
        )
        wanted = (ahead - behind) / (2 * STEP)
        slope = np.sum(found[gradient] * way)
        assert slope == pytest.approx(wanted, rel=2e-2, abs=3e-3), (case.name, name)
    for name, value in run_ort(graphs.pullback, feeds).items():
        np.testing.assert_allclose(value, found[name], rtol=1e-4, atol=1e-4, err_msg=case.name)
