"""What the shipped backends share: a bounded cache of prepared graphs, by content.

Rule: a graph is prepared once per content, from whatever thread asks first; the least
recently used one goes when the cache is full.
"""

from __future__ import annotations

import hashlib
import threading
from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from onnx import ModelProto, NodeProto, TensorProto, helper

from bbnode.components.contracts import Backend, PreparedGraph
from bbnode.components.errors import BackendError, InvalidComponentConfig
from bbnode.ir.bounds import OutOfBounds, check_bounds
from bbnode.ir.keys import FRAMEWORK_IR_VERSION, ONNX_OPSET_VERSION


class CachingBackend(Backend):
    """A backend that prepares whole graphs; subclasses say how in `build_graph`."""

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
    def build_graph(self, model: ModelProto) -> PreparedGraph:
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
        try:
            # Whoever made it: a runtime that is given a model would read the files that it names.
            check_bounds(model)
        except OutOfBounds as error:
            raise BackendError(f"{self.TYPE_NAME}: graph {model.graph.name!r}: {error}") from error
        built = self.build_graph(model)
        with self._lock:
            self._prepared[key] = built
            while len(self._prepared) > self._max_prepared:
                self._prepared.popitem(last=False)
        return built


def scaled_sum_model() -> ModelProto:
    """`acc [n] + weight [] * x [n] -> total [n]`, float32: what averages and deltas are made of."""
    nodes = [
        helper.make_node("Mul", ["x", "weight"], ["scaled"], name="scale"),
        helper.make_node("Add", ["acc", "scaled"], ["total"], name="add"),
    ]
    return _vector_model("scaled_sum", nodes, {"acc": ["n"], "x": ["n"], "weight": []}, "total")


def quotient_model() -> ModelProto:
    """`x [n] / by [] -> quotient [n]`, float32."""
    nodes = [helper.make_node("Div", ["x", "by"], ["quotient"], name="divide")]
    return _vector_model("quotient", nodes, {"x": ["n"], "by": []}, "quotient")


def _vector_model(
    name: str, nodes: Sequence[NodeProto], inputs: Mapping[str, list[str]], output: str
) -> ModelProto:
    """A model of float32 inputs of these dimensions, and one output [n]."""
    make = partial(helper.make_tensor_value_info, elem_type=TensorProto.FLOAT)
    graph = helper.make_graph(
        nodes,
        name,
        [make(name=each, shape=dims) for each, dims in inputs.items()],
        [make(name=output, shape=["n"])],
    )
    return helper.make_model(
        graph,
        ir_version=FRAMEWORK_IR_VERSION,
        opset_imports=[helper.make_opsetid("", ONNX_OPSET_VERSION)],
    )
