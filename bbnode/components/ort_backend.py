"""ONNX Runtime as a backend.

Rule: numpy arrays go in and come out without a copy (ONNX Runtime reads the array's buffer
and hands out its own); the same graph and inputs give the same bits every time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import onnxruntime
from onnx import ModelProto
from onnxruntime.capi import onnxruntime_pybind11_state as ort_errors

from bbnode.components.backend_base import CachingBackend
from bbnode.components.contracts import PreparedGraph
from bbnode.components.errors import BackendError, BackendUnavailable, InvalidComponentConfig
from bbnode.components.registry import register_component
from bbnode.ir.values import Value

# ONNX Runtime's exceptions share no base of their own, and differ between releases.
_ORT_FAILURES: tuple[type[Exception], ...] = tuple(
    value
    for value in vars(ort_errors).values()
    if isinstance(value, type) and issubclass(value, Exception)
)
# Its Python layer adds these, for inputs that are no tensors or have the wrong dtype.
_FAILURES: tuple[type[Exception], ...] = (*_ORT_FAILURES, RuntimeError, TypeError, ValueError)

_LOG_ERRORS_ONLY = 3  # 0 verbose .. 4 fatal; its warnings tell of dropped initializers and such


@dataclass(frozen=True, kw_only=True)
class OrtBackendConfig:
    """Settings of `OrtBackend`.

    Attributes:
        intra_op_threads: threads inside one op. 1: a reduction that is split over threads adds
            in another order, and the node's other work needs the cores.
        inter_op_threads: ops of one graph at once; more than 1 also lets branches run parallel.
        providers: execution providers in order of preference.
        max_prepared: sessions kept.
    """

    intra_op_threads: int = 1
    inter_op_threads: int = 1
    providers: tuple[str, ...] = ("CPUExecutionProvider",)
    max_prepared: int = 64


class _OrtGraph:
    """One session, with its port names looked up once."""

    def __init__(self, session: Any, label: str) -> None:
        self._session = session
        self._label = label
        self._inputs = [port.name for port in session.get_inputs()]
        self._outputs = [port.name for port in session.get_outputs()]

    def run(self, inputs: Sequence[Value]) -> list[Value]:
        """Outputs in graph order for inputs in graph order."""
        if len(inputs) != len(self._inputs):
            raise BackendError(
                f"{self._label}: {len(inputs)} input(s) for {len(self._inputs)} "
                f"({', '.join(self._inputs)})"
            )
        # Bytes off the wire may start anywhere; ONNX Runtime wants them aligned and dense.
        feeds = {
            name: np.require(value, requirements=("C", "A"))
            for name, value in zip(self._inputs, inputs, strict=True)
        }
        try:
            results: list[Value] = self._session.run(self._outputs, feeds)
        except _FAILURES as error:
            raise BackendError(
                f"{self._label}: {_first_line(error)}; inputs were "
                + ", ".join(f"{n}: {v.dtype}{list(v.shape)}" for n, v in feeds.items())
            ) from error
        return results


@register_component
class OrtBackend(CachingBackend):
    """Runs graphs in ONNX Runtime; the default backend."""

    TYPE_NAME: ClassVar[str] = "bbnode.OrtBackend"
    Config: ClassVar[type] = OrtBackendConfig
    config: OrtBackendConfig

    def __init__(self, config: OrtBackendConfig) -> None:
        super().__init__(config, config.max_prepared)
        if config.intra_op_threads < 1 or config.inter_op_threads < 1:
            raise InvalidComponentConfig(
                f"{self.TYPE_NAME}: thread counts have to be 1 or more, are "
                f"{config.intra_op_threads} (intra) and {config.inter_op_threads} (inter)"
            )
        available = onnxruntime.get_available_providers()
        missing = [name for name in config.providers if name not in available]
        if missing or not config.providers:
            raise BackendUnavailable(
                f"{self.TYPE_NAME}: execution provider(s) {', '.join(missing) or '(none given)'} "
                f"not available; this onnxruntime has {', '.join(available)}"
            )

    def _build(self, model: ModelProto) -> PreparedGraph:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = self.config.intra_op_threads
        options.inter_op_num_threads = self.config.inter_op_threads
        options.use_deterministic_compute = True
        options.log_severity_level = _LOG_ERRORS_ONLY
        # Spinning waits burn the cores that the other daemons of this machine want.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        label = f"{self.TYPE_NAME}: graph {model.graph.name!r}"
        try:
            session = onnxruntime.InferenceSession(
                model.SerializeToString(), options, providers=list(self.config.providers)
            )
        except _FAILURES as error:
            raise BackendError(
                f"{label} cannot be prepared: {_first_line(error)}; check it with "
                "onnx.checker.check_model, and that its opset is one this onnxruntime runs"
            ) from error
        return _OrtGraph(session, label)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
