"""Models with ONNX Runtime's own ops, as its optimizer and its quantizers write them."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import helper, numpy_helper

from bbnode.compiler import Compiler
from bbnode.components.autodiff import training_graphs
from bbnode.components.autodiff.errors import AutodiffError
from bbnode.components.backends.reference import ReferenceBackend
from bbnode.dsl import OnnxModule
from bbnode.dsl.errors import UnsupportedDomain
from bbnode.engine.errors import UnsupportedOps
from tests.dsl.onnx_models import assert_same, model_of, ort, port, run, run_compiled, x_of

N = helper.make_node
RUNTIME = "com.microsoft"


def block(opset: int = 17):
    """A layer of a transformer after ONNX Runtime's optimizer, with ops of ONNX in between."""
    w = numpy_helper.from_array(x_of(4, 6), "w")
    s = numpy_helper.from_array(np.ones(6, np.float32), "s")
    nodes = [
        N("Relu", ["x"], ["r"]),
        N("FusedMatMul", ["r", "w"], ["h"], "product", alpha=2.0, domain=RUNTIME),
        N("Gelu", ["h"], ["g"], "gelu", domain=RUNTIME),
        N("Neg", ["g"], ["n"]),
        N("SkipLayerNormalization", ["g", "n", "s"], ["y"], "norm", domain=RUNTIME),
    ]
    model = model_of(
        nodes, [port("x", [2, 3, 4])], [port("y", [2, 3, 6])], [w, s], opset=opset, ir_version=8
    )
    model.opset_import.add(domain=RUNTIME, version=1)
    return model


@pytest.mark.parametrize("opset", [11, 17, 21])
def test_ops_of_onnx_runtime_run_where_the_backend_has_them(opset) -> None:
    x = x_of(2, 3, 4)
    assert_same(run(OnnxModule(block(opset)), x=x), ort(block(opset), x=x))


def test_a_backend_without_them_refuses_them_at_install() -> None:
    module = OnnxModule(block())
    made = Compiler().bind_backend("compute", ReferenceBackend).compile(module.build())
    with pytest.raises(UnsupportedOps, match=r"com\.microsoft::FusedMatMul"):
        run_compiled(made, module.home, x=x_of(2, 3, 4))


def test_an_op_that_onnx_runtime_does_not_have_is_refused_at_install() -> None:
    model = model_of([N("NoSuchOp", ["x"], ["y"], domain=RUNTIME)], [port("x", [2])],
                     [port("y", [2])], ir_version=8)  # fmt: skip
    model.opset_import.add(domain=RUNTIME, version=1)
    with pytest.raises(UnsupportedOps, match="NoSuchOp"):
        run(OnnxModule(model), x=x_of(2))


def test_another_domain_is_refused_when_the_model_is_read() -> None:
    model = model_of([N("Odd", ["x"], ["y"], domain="acme")], [port("x", [2])],
                     [port("y", [2])], ir_version=8)  # fmt: skip
    model.opset_import.add(domain="acme", version=1)
    with pytest.raises(UnsupportedDomain, match="acme::Odd"):
        OnnxModule(model)


def test_they_are_not_trained_through() -> None:
    with pytest.raises(AutodiffError):
        training_graphs(block(), "mse")
