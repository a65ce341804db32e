"""Small ONNX models for the tests of differentiation, and two ways to run them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import onnx
import onnxruntime
from onnx import ModelProto, NodeProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

from bbnode.components.backends.lowering import mended
from bbnode.components.backends.reference import MENDED_OPS

OPSET = 21

# Wanted outputs, and inputs by name, to outputs.
Runner = Callable[[Sequence[str] | None, Mapping[str, np.ndarray]], Sequence[np.ndarray]]


class Erf(OpRun):
    """ONNX's Erf in the type of its input; the reference evaluator's own computes in float32."""

    op_domain = ""

    def _run(self, x: np.ndarray) -> tuple[np.ndarray]:
        return (np.vectorize(math.erf, otypes=[x.dtype])(x),)


REFERENCE_OPS = (*MENDED_OPS, Erf)


def model_of(
    nodes: Sequence[NodeProto],
    params: Mapping[str, np.ndarray],
    *,
    inputs: Mapping[str, np.ndarray] | None = None,
    output: str = "y",
    dtype: type = np.float64,
    constants: Mapping[str, np.ndarray] | None = None,
    opset: int = OPSET,
    symbolic: bool = False,
    dims: Sequence[int | str | None] | None = None,
) -> ModelProto:
    """`params` become initializers of `dtype`; inputs lose their sizes where `symbolic`.

    `dims` of the output are given where ONNX does not infer them.
    """
    elem = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    infos = []
    for name, array in (inputs or {}).items():
        sizes = [f"{name}{i}" for i in range(array.ndim)] if symbolic else list(array.shape)
        infos.append(helper.make_tensor_value_info(name, elem, sizes))
    tensors = [numpy_helper.from_array(a.astype(dtype), n) for n, a in params.items()]
    for name, array in (constants or {}).items():
        kept = array.astype(dtype) if np.issubdtype(array.dtype, np.floating) else array
        tensors.append(numpy_helper.from_array(kept, name))
    graph = helper.make_graph(
        list(nodes), "g", infos, [helper.make_tensor_value_info(output, elem, dims)], tensors
    )
    model = helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", opset)])
    return onnx.shape_inference.infer_shapes(model)


def evaluator_of(model: ModelProto) -> ReferenceEvaluator:
    return ReferenceEvaluator(model, new_ops=list(REFERENCE_OPS))


def run_reference(model: ModelProto, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    names = [output.name for output in model.graph.output]
    wanted = {port.name for port in model.graph.input}
    fed = {name: np.asarray(value) for name, value in feeds.items() if name in wanted}
    return dict(zip(names, evaluator_of(model).run(None, fed), strict=True))


def ort_runner(model: ModelProto) -> Runner:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 3
    held = mended(model).SerializeToString()
    session = onnxruntime.InferenceSession(held, options, providers=["CPUExecutionProvider"])
    return session.run


def run_ort(model: ModelProto, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    names = [output.name for output in model.graph.output]
    wanted = {port.name for port in model.graph.input}
    fed = {name: np.asarray(value) for name, value in feeds.items() if name in wanted}
    return dict(zip(names, ort_runner(model)(names, fed), strict=True))


def numeric_gradient(
    model: ModelProto,
    feeds: Mapping[str, np.ndarray],
    name: str,
    output: str,
    cotangent: np.ndarray,
    h: float = 1e-6,
    run: Runner | None = None,
) -> np.ndarray:
    """Central differences of <cotangent, output> by `feeds[name]`, summed in float64."""
    evaluator = run or evaluator_of(model).run

    def value(array: np.ndarray) -> float:
        (y,) = evaluator([output], {**feeds, name: array})
        return float(np.sum(np.asarray(y, np.float64) * cotangent))

    base = feeds[name]
    gradient = np.zeros(base.shape)
    for index in np.ndindex(*base.shape):
        up, down = base.copy(), base.copy()
        up[index] += h
        down[index] -= h
        gradient[index] = (value(up) - value(down)) / (2 * h)
    return gradient


def check(model: ModelProto) -> None:
    onnx.checker.check_model(model, full_check=True)
