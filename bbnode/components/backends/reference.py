"""ONNX's reference evaluator as a backend.

Rule: no speed, all of ONNX; for tests, and for checking the results of another backend.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, helper
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun, RuntimeContextError, RuntimeImplementationError
from onnx.reference.ops import op_loop, op_scan

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
    """ONNX's Loop, as the specification has it; the evaluator finds an op by its class's name.

    The evaluator's own takes a condition that is left out for false, and joins the scan outputs
    of all steps along their first axis instead of a new one.
    """

    op_domain = ""
    # Of the base class, which has no types.
    body: Any
    _run_body: Any

    def _run(
        self,
        M: Any,  # noqa: N803  # ONNX's name
        cond: Any,
        *args: Any,
        context: Any = None,
        **kwargs: Any,
    ) -> Any:
        del kwargs["body"]
        number, condition, *states = self.body.input_names
        going = True if cond is None else bool(np.all(cond))
        carried = list(args)
        rows: list[list[Any]] = [[] for _ in range(self.K)]
        step = 0
        while going and (M is None or step < int(np.asarray(M).item())):
            feeds = dict(context or {})
            feeds |= {number: np.asarray(step, np.int64), condition: np.asarray(going)}
            feeds |= dict(zip(states, carried, strict=True))
            found = self._run_body(feeds, **kwargs)
            going = bool(np.all(found[0]))
            carried = list(found[1 : 1 + len(carried)])
            for row, value in zip(rows, found[1 + len(carried) :], strict=True):
                row.append(value)
            step += 1
        return self._check_and_fix_outputs((*carried, *_stacked(self, rows, len(carried) + 1)))


class Scan(op_scan.Scan):
    """ONNX's Scan with its axes and directions, of which the evaluator's own knows the default."""

    op_domain = ""
    # Of the base class, which has no types.
    num_scan_inputs: Any
    _run_body: Any

    def __init__(self, onnx_node: Any, run_params: Any) -> None:
        given = dict.fromkeys(_SCAN_SETTINGS)
        plain = NodeProto()
        plain.CopyFrom(onnx_node)
        del plain.attribute[:]
        for attribute in onnx_node.attribute:
            if attribute.name in given:
                given[attribute.name] = list(attribute.ints)
            else:
                plain.attribute.append(attribute)
        begin: Any = super().__init__
        begin(plain, run_params)
        self._settings = given

    def _run(self, *args: Any, context: Any = None, bindings: Any = None, **_: Any) -> Any:
        count = len(args) - self.num_scan_inputs
        given = len(self.output_names) - count
        lists = [
            list(chosen or [0] * (given if "output" in name else self.num_scan_inputs))
            for name, chosen in self._settings.items()
        ]
        axes, ways, out_axes, out_ways = lists
        slices = [
            np.flip(moved, 0) if way else moved
            for value, axis, way in zip(args[count:], axes, ways, strict=True)
            for moved in [np.moveaxis(value, axis, 0)]
        ]
        carried = list(args[:count])
        rows: list[list[Any]] = [[] for _ in range(given)]
        for step in range(len(slices[0])):
            feeds = dict(context or {})
            values = [*carried, *(each[step] for each in slices)]
            feeds |= dict(zip(self.input_names, values, strict=True))
            found = self._run_body(feeds, bindings=bindings)
            carried = list(found[:count])
            for row, value in zip(rows, found[count:], strict=True):
                row.append(value)
        made = [
            np.moveaxis(np.flip(rows, 0) if way else rows, 0, axis)
            for rows, axis, way in zip(_stacked(self, rows, count), out_axes, out_ways, strict=True)
        ]
        return self._check_and_fix_outputs((*carried, *made))


# In the order in which `Scan` takes them apart.
_SCAN_SETTINGS = (
    *("scan_input_axes", "scan_input_directions"),
    *("scan_output_axes", "scan_output_directions"),
)


def _stacked(op: Any, rows: Sequence[Sequence[Any]], first: int) -> list[Any]:
    """Return values of all steps, [steps, ...]; of no step, with the sizes that the body says.

    `first` is the position of the first of them among the outputs of the body.
    """
    made = []
    for row, kind in zip(rows, op.body.output_types[first:], strict=True):
        if row:
            made.append(np.stack(row))
            continue
        tensor = kind.tensor_type
        sizes = [dim.dim_value for dim in tensor.shape.dim]
        # A body may leave the type open.
        elem_type = tensor.elem_type or TensorProto.FLOAT
        made.append(np.zeros([0, *sizes], helper.tensor_dtype_to_np_dtype(elem_type)))
    return made


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
MENDED_OPS: tuple[type[OpRun], ...] = (Loop, Scan, GatherElements)


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
            with np.errstate(over="ignore"):  # beyond its type a number is infinite, as in ONNX
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
