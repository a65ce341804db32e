"""The two sides of a backend, thirty primitives and whole graphs: each follows from the other.

Rule: a backend overrides primitives, or `prepare`, or `execute`. One that runs graphs has every
primitive, as a graph of one node. One that has primitives runs every graph that is made of them,
node by node. An op that neither side covers is refused by name, before anything runs.

A primitive is named like its ONNX op in snake case. It takes the op's inputs by position (an
optional one that is left out is None) and its attributes as keywords, and means what the op means
at the opset that programs are recorded in.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, ClassVar

from onnx import ModelProto, TensorProto

from bbnode.components.backends.graphs import (
    FIRST_OPSET,
    ExecutedGraph,
    InterpretedGraph,
    PreparedGraph,
    one_op_model,
)
from bbnode.components.errors import BackendError
from bbnode.ir.onnx_file import onnx_schema
from bbnode.ir.values import Value

# Op type to method.
PRIMITIVES: Mapping[str, str] = {
    "Abs": "abs", "Add": "add", "Cast": "cast", "Concat": "concat", "Constant": "constant",
    "Div": "div", "Equal": "equal", "Exp": "exp", "Gather": "gather", "Greater": "greater",
    "Identity": "identity", "Less": "less", "Log": "log", "MatMul": "mat_mul", "Mul": "mul",
    "Neg": "neg", "Pow": "pow", "ReduceMax": "reduce_max", "ReduceMean": "reduce_mean",
    "ReduceMin": "reduce_min", "ReduceSum": "reduce_sum", "Reshape": "reshape", "Slice": "slice",
    "Split": "split", "Sqrt": "sqrt", "Squeeze": "squeeze", "Sub": "sub",
    "Transpose": "transpose", "Unsqueeze": "unsqueeze", "Where": "where",
}  # fmt: skip


class Primitives(ABC):
    """The methods of every backend; see the module's rule. Tensors are the backend's own."""

    TYPE_NAME: ClassVar[str]

    # -- graphs ---------------------------------------------------------------------------------

    def prepare(self, model: ModelProto) -> PreparedGraph:
        """Make a graph runnable.

        Raises ComponentError that names the graph and the op when the backend can't run it.
        """
        if type(self).execute is not Primitives.execute:
            return ExecutedGraph(self.TYPE_NAME, model, self.execute)
        methods = {op: getattr(self, PRIMITIVES[op]) for op in self.own_primitives()}
        return InterpretedGraph(self.TYPE_NAME, model, methods)

    def execute(self, model: ModelProto, inputs: Mapping[str, Value]) -> dict[str, Value]:
        """Run a graph by names: `{input: tensor}` to `{output: tensor}`.

        Raises ComponentError as `prepare`, and when an input is missing or does not fit.
        """
        names = [port.name for port in model.graph.input]
        lacking = [name for name in names if name not in inputs]
        if lacking:
            raise BackendError(
                f"{self.TYPE_NAME}: graph {model.graph.name!r} lacks the input(s) "
                f"{', '.join(lacking)}; it takes {', '.join(names)}"
            )
        results = self.prepare(model).run([inputs[name] for name in names])
        return {port.name: value for port, value in zip(model.graph.output, results, strict=True)}

    def supports(self, op_type: str, opset_version: int, domain: str = "") -> bool:
        """Return True if an op of ONNX can run here: domain "" (ai.onnx) or "ai.onnx.ml".

        By default: what ONNX has at that version and did not deprecate, if this backend runs
        graphs; else the primitives that it has.
        """
        if not self.runs_graphs():
            return not domain and opset_version >= FIRST_OPSET and op_type in self.own_primitives()
        schema = onnx_schema(op_type, opset_version, domain)
        return schema is not None and not schema.deprecated

    @classmethod
    def runs_graphs(cls) -> bool:
        """Return True if the class brings `prepare` or `execute` itself."""
        return cls.prepare is not Primitives.prepare or cls.execute is not Primitives.execute

    @classmethod
    @cache
    def own_primitives(cls) -> frozenset[str]:
        """Return the op types whose method the class brings itself."""
        return frozenset(
            op_type
            for op_type, method in PRIMITIVES.items()
            if getattr(cls, method) is not getattr(Primitives, method)
        )

    def _one(
        self, op_type: str, inputs: Sequence[Value | None], outputs: int = 1, **attributes: Any
    ) -> list[Value]:
        """Run a primitive as a graph of one node; what is None is left out."""
        if not self.runs_graphs():
            has = ", ".join(sorted(self.own_primitives())) or "nothing"
            raise BackendError(
                f"{self.TYPE_NAME} has no {op_type}; it has {has}. Override "
                f"{PRIMITIVES[op_type]}(), or prepare() or execute()"
            )
        given = {name: value for name, value in attributes.items() if value is not None}
        model = one_op_model(op_type, inputs, outputs, **given)
        return self.prepare(model).run([value for value in inputs if value is not None])

    # -- elementwise, with broadcasting ---------------------------------------------------------

    def abs(self, x: Value) -> Value:
        """Return |x|."""
        return self._one("Abs", [x])[0]

    def add(self, a: Value, b: Value) -> Value:
        """Return a + b."""
        return self._one("Add", [a, b])[0]

    def sub(self, a: Value, b: Value) -> Value:
        """Return a - b."""
        return self._one("Sub", [a, b])[0]

    def mul(self, a: Value, b: Value) -> Value:
        """Return a * b."""
        return self._one("Mul", [a, b])[0]

    def div(self, a: Value, b: Value) -> Value:
        """Return a / b; of integers, cut towards zero."""
        return self._one("Div", [a, b])[0]

    def neg(self, x: Value) -> Value:
        """Return -x."""
        return self._one("Neg", [x])[0]

    def sqrt(self, x: Value) -> Value:
        """Return the square root; NaN below zero."""
        return self._one("Sqrt", [x])[0]

    def pow(self, x: Value, exponent: Value) -> Value:
        """Return x to the exponent, in the dtype of x."""
        return self._one("Pow", [x, exponent])[0]

    def exp(self, x: Value) -> Value:
        """Return e to the x."""
        return self._one("Exp", [x])[0]

    def log(self, x: Value) -> Value:
        """Return the natural logarithm."""
        return self._one("Log", [x])[0]

    def equal(self, a: Value, b: Value) -> Value:
        """Return a == b, bool."""
        return self._one("Equal", [a, b])[0]

    def greater(self, a: Value, b: Value) -> Value:
        """Return a > b, bool."""
        return self._one("Greater", [a, b])[0]

    def less(self, a: Value, b: Value) -> Value:
        """Return a < b, bool."""
        return self._one("Less", [a, b])[0]

    def where(self, condition: Value, a: Value, b: Value) -> Value:
        """Return a where the condition holds, else b."""
        return self._one("Where", [condition, a, b])[0]

    def cast(self, x: Value, *, to: int, saturate: int = 1) -> Value:
        """Return x in the dtype with the ONNX number `to`; `saturate` is of float8 alone."""
        return self._one("Cast", [x], to=to, saturate=saturate)[0]

    # -- products and reductions ----------------------------------------------------------------

    def mat_mul(self, a: Value, b: Value) -> Value:
        """Return the matrix product, by numpy's rules for batches and vectors."""
        return self._one("MatMul", [a, b])[0]

    def reduce_sum(
        self, x: Value, axes: Value | None = None, *, keepdims: int = 1,
        noop_with_empty_axes: int = 0,
    ) -> Value:  # fmt: skip
        """Return the sum over `axes` [K] int64; over all of them without."""
        return self._reduce("ReduceSum", x, axes, keepdims, noop_with_empty_axes)

    def reduce_mean(
        self, x: Value, axes: Value | None = None, *, keepdims: int = 1,
        noop_with_empty_axes: int = 0,
    ) -> Value:  # fmt: skip
        """Return the mean over `axes`, as `reduce_sum`."""
        return self._reduce("ReduceMean", x, axes, keepdims, noop_with_empty_axes)

    def reduce_max(
        self, x: Value, axes: Value | None = None, *, keepdims: int = 1,
        noop_with_empty_axes: int = 0,
    ) -> Value:  # fmt: skip
        """Return the maximum over `axes`, as `reduce_sum`."""
        return self._reduce("ReduceMax", x, axes, keepdims, noop_with_empty_axes)

    def reduce_min(
        self, x: Value, axes: Value | None = None, *, keepdims: int = 1,
        noop_with_empty_axes: int = 0,
    ) -> Value:  # fmt: skip
        """Return the minimum over `axes`, as `reduce_sum`."""
        return self._reduce("ReduceMin", x, axes, keepdims, noop_with_empty_axes)

    def _reduce(self, op_type: str, x: Value, axes: Value | None, keep: int, noop: int) -> Value:
        inputs = [x] if axes is None else [x, axes]
        return self._one(op_type, inputs, keepdims=keep, noop_with_empty_axes=noop)[0]

    # -- shapes ---------------------------------------------------------------------------------

    def reshape(self, x: Value, shape: Value, *, allowzero: int = 0) -> Value:
        """Return x in `shape` [K] int64: one -1 is derived; 0 copies a size unless `allowzero`."""
        return self._one("Reshape", [x, shape], allowzero=allowzero)[0]

    def transpose(self, x: Value, *, perm: Sequence[int] | None = None) -> Value:
        """Return x with its axes in the order `perm`, reversed without."""
        return self._one("Transpose", [x], perm=perm)[0]

    def concat(self, *parts: Value, axis: int) -> Value:
        """Return the parts, one after the other along `axis`."""
        return self._one("Concat", parts, axis=axis)[0]

    def slice(
        self, x: Value, starts: Value, ends: Value, axes: Value | None = None,
        steps: Value | None = None,
    ) -> Value:  # fmt: skip
        """Return x from `starts` to before `ends` along `axes` (the first ones), in `steps` (1)."""
        inputs = [x, starts, ends, axes, steps]
        while inputs[-1] is None:
            inputs.pop()
        return self._one("Slice", inputs)[0]

    def split(
        self, x: Value, sizes: Value | None = None, *, axis: int = 0, num_outputs: int | None = None
    ) -> Sequence[Value]:
        """Return x cut along `axis` into `sizes` [K] int64, or into `num_outputs` parts alike."""
        if sizes is None:
            return self._one("Split", [x], num_outputs or 0, axis=axis, num_outputs=num_outputs)
        return self._one("Split", [x, sizes], len(sizes), axis=axis)

    def squeeze(self, x: Value, axes: Value | None = None) -> Value:
        """Return x without its axes of size 1: those of `axes` [K] int64, or all."""
        return self._one("Squeeze", [x] if axes is None else [x, axes])[0]

    def unsqueeze(self, x: Value, axes: Value) -> Value:
        """Return x with axes of size 1 at `axes` [K] int64 of the result."""
        return self._one("Unsqueeze", [x, axes])[0]

    def gather(self, x: Value, indices: Value, *, axis: int = 0) -> Value:
        """Return the entries of x at `indices` along `axis`; negative ones count from the end."""
        return self._one("Gather", [x, indices], axis=axis)[0]

    def identity(self, x: Value) -> Value:
        """Return x."""
        return self._one("Identity", [x])[0]

    def constant(self, value: TensorProto) -> Value:
        """Return a tensor of this backend with the contents of a TensorProto."""
        return self._one("Constant", [], value=value)[0]
