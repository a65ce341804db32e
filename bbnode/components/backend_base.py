"""What the shipped backends share: a bounded cache by content, and one-op graphs.

Rule: a graph is prepared once per content, from whatever thread asks first; the least
recently used one goes when the cache is full.
"""

from __future__ import annotations

import hashlib
import threading
from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from onnx import ModelProto, helper

from bbnode.components.contracts import Backend, PreparedGraph
from bbnode.components.errors import BackendError, InvalidComponentConfig
from bbnode.ir.keys import FRAMEWORK_IR_VERSION, ONNX_OPSET_VERSION
from bbnode.ir.values import Value

# The primitives that every backend has (FACTS, "Roles").
PRIMITIVE_OPS = frozenset(
    {
        "Abs", "Add", "Cast", "Concat", "Constant", "Div", "Equal", "Exp", "Gather", "Greater",
        "Identity", "Less", "Log", "MatMul", "Mul", "Neg", "Pow", "ReduceMax", "ReduceMean",
        "ReduceMin", "ReduceSum", "Reshape", "Slice", "Split", "Sqrt", "Squeeze", "Sub",
        "Transpose", "Unsqueeze", "Where",
    }
)  # fmt: skip


class CachingBackend(Backend):
    """A backend that prepares whole graphs; subclasses say how in `_build`."""

    def __init__(self, config: Any, max_prepared: int) -> None:
        super().__init__(config)
        if max_prepared < 1:
            raise InvalidComponentConfig(
                f"{self.TYPE_NAME}: max_prepared is {max_prepared}; keep at least one graph"
            )
        self._max_prepared = max_prepared
        self._prepared: OrderedDict[bytes, PreparedGraph] = OrderedDict()
        # Offloaded ops of different components share one backend, each on its own thread.
        self._lock = threading.Lock()

    @abstractmethod
    def _build(self, model: ModelProto) -> PreparedGraph:
        """Make a graph runnable; BackendError when that fails."""

    def prepare(self, model: ModelProto) -> PreparedGraph:
        """A runnable graph, from the cache when one of the same content is there.

        Raises:
            BackendError: the graph is invalid, or has an op that this backend does not run.
        """
        key = hashlib.sha256(model.SerializeToString(deterministic=True)).digest()
        with self._lock:
            found = self._prepared.get(key)
            if found is not None:
                self._prepared.move_to_end(key)
                return found
        # Built outside of the lock: a big graph must not hold up the running of small ones.
        built = self._build(model)
        with self._lock:
            self._prepared[key] = built
            while len(self._prepared) > self._max_prepared:
                self._prepared.popitem(last=False)
        return built

    def supports(self, op_type: str, opset_version: int, domain: str = "") -> bool:
        """Whether ONNX has this op at that version of the domain, not deprecated."""
        try:
            schema = onnx.defs.get_schema(op_type, opset_version, domain)
        except onnx.defs.SchemaError:
            return False
        return not schema.deprecated

    def primitive(
        self, op_type: str, inputs: Sequence[Value], outputs: int = 1, **attributes: Any
    ) -> list[Value]:
        """Run one of `PRIMITIVE_OPS` on tensors, as a graph of one node.

        Raises:
            BackendError: it is no primitive, or its inputs do not fit it.
        """
        if op_type not in PRIMITIVE_OPS:
            raise BackendError(
                f"{self.TYPE_NAME}: {op_type!r} is no primitive; run a graph that has it"
            )
        model = one_op_model(op_type, inputs, outputs, **attributes)
        return self.prepare(model).run(inputs)


def one_op_model(
    op_type: str, inputs: Sequence[Value], outputs: int = 1, **attributes: Any
) -> ModelProto:
    """A graph of one `ai.onnx` node for tensors of these dtypes and ranks, whatever their sizes.

    Raises:
        BackendError: ONNX knows no such op, or refuses these dtypes or ranks for it.
    """
    names = [f"in{i}" for i in range(len(inputs))]
    results = [f"out{i}" for i in range(outputs)]
    infos = []
    for name, value in zip(names, inputs, strict=True):
        array = np.asarray(value)
        dims = [f"{name}.{axis}" for axis in range(array.ndim)]
        elem_type = helper.np_dtype_to_tensor_dtype(array.dtype)
        infos.append(helper.make_tensor_value_info(name, elem_type, dims))
    try:
        node = helper.make_node(op_type, names, results, name=op_type, **attributes)
        types = onnx.shape_inference.infer_node_outputs(
            onnx.defs.get_schema(op_type, ONNX_OPSET_VERSION, ""),
            node,
            {info.name: info.type for info in infos},
            opset_imports=[helper.make_opsetid("", ONNX_OPSET_VERSION)],
            ir_version=FRAMEWORK_IR_VERSION,
        )
    except (
        onnx.checker.ValidationError,
        onnx.defs.SchemaError,
        onnx.shape_inference.InferenceError,
        ValueError,
    ) as error:
        raise BackendError(
            f"{op_type} of {[str(np.asarray(v).dtype) for v in inputs]}: {error}; "
            f"see the op's page in the ONNX operator list (opset {ONNX_OPSET_VERSION})"
        ) from error
    graph = helper.make_graph(
        [node], op_type, infos, [helper.make_value_info(name, types[name]) for name in results]
    )
    return helper.make_model(
        graph,
        ir_version=FRAMEWORK_IR_VERSION,
        opset_imports=[helper.make_opsetid("", ONNX_OPSET_VERSION)],
    )


def scaled_sum_model() -> ModelProto:
    """`acc [n] + weight [] * x [n] -> total [n]`, float32: what averages and deltas are made of."""
    vector = [helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, ["n"]) for n in ("acc", "x")]
    graph = helper.make_graph(
        [
            helper.make_node("Mul", ["x", "weight"], ["scaled"], name="scale"),
            helper.make_node("Add", ["acc", "scaled"], ["total"], name="add"),
        ],
        "scaled_sum",
        [*vector, helper.make_tensor_value_info("weight", onnx.TensorProto.FLOAT, [])],
        [helper.make_tensor_value_info("total", onnx.TensorProto.FLOAT, ["n"])],
    )
    return helper.make_model(
        graph,
        ir_version=FRAMEWORK_IR_VERSION,
        opset_imports=[helper.make_opsetid("", ONNX_OPSET_VERSION)],
    )
