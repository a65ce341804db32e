"""ONNX's reference evaluator as a backend.

Rule: no speed, all of ONNX; for tests, and for checking the results of another backend.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from onnx import ModelProto
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun, RuntimeContextError, RuntimeImplementationError
from onnx.reference.ops import op_loop

from bbnode.components.backends.caching import CachingBackend
from bbnode.components.backends.graphs import check_count, from_onnx, to_onnx
from bbnode.components.contracts import PreparedGraph
from bbnode.components.errors import BackendError
from bbnode.components.registry import register_component
from bbnode.ir import types
from bbnode.ir.values import Value


@dataclass(frozen=True, kw_only=True)
class ReferenceBackendConfig:
    """Settings of `ReferenceBackend`.

    Attributes:
        max_prepared: prepared graphs that are kept.
    """

    max_prepared: int = 64


# What numpy and the evaluator raise for graphs and inputs that do not fit each other.
_FAILURES = (
    ArithmeticError,
    AttributeError,
    LookupError,
    NotImplementedError,
    RuntimeError,
    RuntimeContextError,
    RuntimeImplementationError,
    TypeError,
    ValueError,
)


class Loop(op_loop.Loop):
    """ONNX's Loop; a condition that is left out is true.

    The evaluator's own takes it for false, and so runs such a loop not even once. It finds an
    op by the name of its class.
    """

    op_domain = ""

    def _run(self, M: Any, cond: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N803  # ONNX's
        run: Any = super()._run
        return run(M, np.True_ if cond is None else cond, *args, **kwargs)


class GatherElements(OpRun):
    """ONNX's GatherElements; the evaluator's own mistakes what has more than 32 elements to choose
    from, a negative axis, and indices that are shorter than the data.
    """

    op_domain = ""

    def _run(self, data: Any, indices: Any, axis: int = 0) -> tuple[Any]:
        axis %= data.ndim
        rest = tuple(slice(None if i == axis else n) for i, n in enumerate(indices.shape))
        return (np.take_along_axis(data[rest], indices, axis),)


# Evaluators for the ops that ONNX's reference evaluator gets wrong.
MENDED_OPS: tuple[type[OpRun], ...] = (Loop, GatherElements)


class _ReferenceGraph:
    def __init__(self, evaluator: ReferenceEvaluator, model: ModelProto, label: str) -> None:
        self._evaluator = evaluator
        self._inputs = [port.name for port in model.graph.input]
        self._label = label
        self._kinds = [types.type_from_proto(port.type) for port in model.graph.output]

    def run(self, inputs: Sequence[Value]) -> list[Value]:
        """Return the outputs in graph order for inputs in graph order."""
        check_count(self._label, self._inputs, inputs)
        feeds = dict(zip(self._inputs, map(to_onnx, inputs), strict=True))
        try:
            made = self._evaluator.run(None, feeds)
            return [
                each if kind is None else from_onnx(each, kind)
                for each, kind in zip(made, self._kinds, strict=True)
            ]
        except _FAILURES as error:
            raise BackendError(f"{self._label}: {type(error).__name__}: {error}") from error


@register_component
class ReferenceBackend(CachingBackend):
    """Runs graphs node by node in numpy."""

    TYPE_NAME: ClassVar[str] = "bbnode.ReferenceBackend"
    Config: ClassVar[type] = ReferenceBackendConfig

    def __init__(self, config: ReferenceBackendConfig) -> None:
        super().__init__(config, config.max_prepared)

    def build_graph(self, model: ModelProto) -> PreparedGraph:
        label = f"{self.TYPE_NAME}: graph {model.graph.name!r}"
        kept = ModelProto()  # the evaluator keeps its model, and the caller may change it
        kept.CopyFrom(model)
        try:
            return _ReferenceGraph(ReferenceEvaluator(kept, new_ops=list(MENDED_OPS)), kept, label)
        except _FAILURES as error:
            raise BackendError(
                f"{label} cannot be prepared: {type(error).__name__}: {error}; check it with "
                "onnx.checker.check_model"
            ) from error
