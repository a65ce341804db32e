"""The table of vector-Jacobian products, and the context of a rule.

Rule: one function per op, registered by `op_type`; a rule sees one node and the gradient of
its outputs, and returns the gradients of its inputs (trailing ones without a gradient may be
left out). More ops are added with `@vjp`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar, cast

import numpy as np
import numpy.typing as npt
from onnx import NodeProto, helper, numpy_helper

from bbnode.components.autodiff.builder import (
    FLOAT,
    AttributeValue,
    Dims,
    GraphBuilder,
    InferredType,
    Instead,
    first_output,
)
from bbnode.components.autodiff.errors import GradientRuleError

T = TypeVar("T")
Other = TypeVar("Other", bound=Instead)


class Term:
    """A value of the graph that a rule writes: arithmetic on terms emits nodes.

    A number in it becomes a constant of the element type of `like`, a forward value, or of the
    ONNX element type `like` itself.
    """

    __slots__ = ("_ctx", "_like", "name")

    def __init__(self, ctx: VjpContext, name: str, like: str | int) -> None:
        self._ctx = ctx
        self.name = name
        self._like = like

    def cast(self, elem_type: int) -> Term:
        """Return this value in another ONNX element type; numbers are then of that type too."""
        own = self._like if isinstance(self._like, int) else self._ctx.elem_type(self._like)
        if own == elem_type:
            return self
        return Term(self._ctx, self._ctx.b.op("Cast", self.name, to=elem_type), elem_type)

    def op(self, op_type: str, *others: Term | float, **attributes: AttributeValue) -> Term:
        """Emit an op of this value and others, which has one output."""
        names = [
            other.name if isinstance(other, Term) else self._ctx.scalar(other, self._like)
            for other in others
        ]
        return Term(self._ctx, self._ctx.b.op(op_type, self.name, *names, **attributes), self._like)

    def __add__(self, other: Term | float) -> Term:
        return self.op("Add", other)

    def __sub__(self, other: Term | float) -> Term:
        return self.op("Sub", other)

    def __rsub__(self, other: float) -> Term:
        return Term(self._ctx, self._ctx.scalar(other, self._like), self._like).op("Sub", self)

    def __mul__(self, other: Term | float) -> Term:
        return self.op("Mul", other)

    def __truediv__(self, other: Term | float) -> Term:
        return self.op("Div", other)

    def __rtruediv__(self, other: float) -> Term:
        return Term(self._ctx, self._ctx.scalar(other, self._like), self._like).op("Div", self)

    def __neg__(self) -> Term:
        return self.op("Neg")

    def __gt__(self, other: Term | float) -> Term:
        return self.op("Greater", other)

    def where(self, then: Term | float, otherwise: Term | float) -> Term:
        """Return `then` where this condition holds, `otherwise` elsewhere."""
        return self.op("Where", then, otherwise)


class VjpContext:
    """One node of the forward graph, seen from a rule.

    Attributes:
        b: where the rule emits its nodes.
        node: the forward node.
        grads: per output, the name of its gradient, or None where nothing depends on it.
        types: the inferred types of the forward values.
        made: the nodes of the forward graph, this one among them, by each of their outputs.
        captured: gradients of values that the node's graphs read from around it, as (name,
            gradient); a rule of an op with graphs appends them.
    """

    def __init__(
        self,
        b: GraphBuilder,
        node: NodeProto,
        grads: Sequence[str | None],
        types: dict[str, InferredType],
        active: frozenset[str] | set[str],
        made: Mapping[str, NodeProto],
    ) -> None:
        self.b = b
        self.node = node
        self.grads = tuple(grads)
        self.types = types
        self.made = made
        self.captured: list[tuple[str, str]] = []
        self._active = active

    @property
    def inputs(self) -> list[str]:
        """The input names of the node; "" where an optional one is left out."""
        return list(self.node.input)

    @property
    def y(self) -> str:
        """The name of the first output."""
        return self.node.output[0]

    @property
    def g(self) -> str:
        """The gradient of the first output; only for ops that have a single one."""
        grad = self.grads[0]
        if grad is None:
            raise self.error("the gradient of output 0 is needed, and it has none")
        return grad

    @property
    def dy(self) -> Term:
        """The gradient of the first output as a term."""
        return self.term(self.g)

    @property
    def out(self) -> Term:
        """The first output as a term."""
        return self.term(self.y)

    def input(self, index: int) -> Term:
        """Return an input as a term."""
        return self.term(self.node.input[index], self.node.input[index])

    def instead(self, kind: type[Other], make: Callable[[], Other]) -> Other:
        """Have the node written in another way where the gradient needs what that makes.

        Args:
            kind: of what `make` returns.
            make: writes it, where no earlier sweep over the node has.

        Raises:
            GradientRuleError: the sweep is not over the node's own graph: a rule was called on a
                node made up for it, whose outputs may be those of another one.
        """
        key = first_output(self.node)
        if self.made.get(key) is not self.node:
            raise self.error(
                "a rule was called on a node that is in no graph",
                "emit that node with ctx.b.op, and go back through it with pull_back_through",
            )
        known = self.b.instead.get(key)
        if not isinstance(known, kind):
            known = self.b.instead[key] = make()
        return known

    def term(self, name: str, like: str | int | None = None) -> Term:
        """Return a value as a term; its numbers are of the type of `like` (the first output)."""
        return Term(self, name, self.y if like is None else like)

    def has(self, index: int) -> bool:
        """Return True if optional input `index` is there."""
        return index < len(self.node.input) and self.node.input[index] != ""

    def wants(self, index: int) -> bool:
        """Return True if the gradient of input `index` is needed."""
        return self.has(index) and self.varies(self.node.input[index])

    def varies(self, value: str) -> bool:
        """Return True if the gradient of a value is needed."""
        return value in self._active

    def type_of(self, value: str) -> InferredType:
        """Return the inferred type of `value`."""
        return self.types.get(value, InferredType(0, None))

    def elem_type(self, value: str) -> int:
        """Return the ONNX element type of `value`; GradientRuleError where it is unknown."""
        elem_type = self.type_of(value).elem_type
        if elem_type == 0:
            raise self.error(f"the element type of {value!r} is unknown")
        return elem_type

    def held(self, index: int) -> npt.NDArray[np.generic] | None:
        """Return the value of an input that is a constant of the model; None for any other."""
        tensor = self.b.known.get(self.node.input[index]) if self.has(index) else None
        return None if tensor is None else numpy_helper.to_array(tensor)

    def rank(self, value: str) -> int:
        """Return the rank of `value`; GradientRuleError where it is unknown."""
        dims = self.type_of(value).dims
        if dims is None:
            raise self.error(f"the rank of {value!r} is unknown")
        return len(dims)

    def attribute(self, name: str, default: T) -> T:
        """Return the value of an attribute of the node, `default` where it is not set."""
        for attribute in self.node.attribute:
            if attribute.name == name:
                value = helper.get_attribute_value(attribute)
                return cast(T, value.decode() if isinstance(value, bytes) else value)
        return default

    def scalar(self, number: float, like: str | int) -> str:
        """Return a 0-D constant of an ONNX element type, or of that of a forward value."""
        return self.b.scalar(number, like if isinstance(like, int) else self.elem_type(like))

    def axis(self, value: str, default: int) -> int:
        """Return the node's `axis` attribute, counted from the front of `value`.

        Raises GradientRuleError where `value` has no such axis: what counts up to it never ends.
        """
        axis, rank = int(self.attribute("axis", default)), self.rank(value)
        if not -rank <= axis <= rank:
            raise self.error(
                f"its axis {axis} is none of the {rank} axes of {value!r}", "give it one of these"
            )
        return axis + rank if axis < 0 else axis

    def error(self, reason: str, remedy: str | None = None) -> GradientRuleError:
        """Return a typed error about this node, to be raised by the rule."""
        return GradientRuleError(
            node=self.node.name or self.node.output[0],
            op_type=self.node.op_type,
            reason=reason,
            remedy=remedy or "run onnx.shape_inference on the model and give its inputs shapes",
        )

    def sum_to(self, grad: str, target: str, grad_dims: Dims | None = None) -> str:
        """Undo broadcasting: sum `grad` down to the shape of the forward value `target`.

        `grad_dims` are the dimensions of `grad` (those of output 0 by default). Where they
        and the target's tell which axes were stretched, the axes are constants; otherwise
        the graph works them out from the shapes it meets.
        """
        wide = self.type_of(self.y).dims if grad_dims is None else grad_dims
        narrow = self.type_of(target).dims
        if wide is not None and narrow is not None:
            axes = stretched_axes(wide, narrow)
            if axes is not None:
                return self._sum_static(grad, axes, wide, len(wide) - len(narrow), target)
        return self._sum_dynamic(grad, target)

    def _sum_static(self, grad: str, axes: list[int], wide: Dims, extra: int, target: str) -> str:
        if not axes:
            return grad
        leading = [axis for axis in axes if axis < extra]
        kept = [axis for axis in axes if axis >= extra]
        if not kept and len(wide) == extra + 1 and self.type_of(target).elem_type == FLOAT:
            return self._sum_rows(grad, wide[:extra])
        if kept:
            grad = self.b.op("ReduceSum", grad, self.b.ints(kept), keepdims=1)
        if leading:
            grad = self.b.op("ReduceSum", grad, self.b.ints(leading), keepdims=0)
        return grad

    def _sum_rows(self, grad: str, rows: Dims) -> str:
        """Return [C], the sum of `grad`, [*rows, C], over its rows.

        As a product with ones: runtimes compute it in a quarter of the time of a ReduceSum.
        """
        flat = self.b.op("Flatten", grad, axis=len(rows))
        return self.b.op("MatMul", self.rows_of(1.0, flat, rows), flat)

    def rows_of(self, number: float, flat: str, rows: Dims) -> str:
        """Return a float32 vector of `number` for each row of `flat`, a matrix of so many `rows`.

        One vector serves all values of as many rows.
        """
        b = self.b
        count = b.op("Shape", flat, start=0, end=1)
        if None not in rows:
            count = b.sizes.setdefault(rows, count)
        return b.op("Expand", b.constant(np.asarray([number], np.float32), "number"), count)

    def _sum_dynamic(self, grad: str, target: str) -> str:
        b = self.b
        shape = b.op("Shape", target)
        missing = b.op("Sub", b.op("Size", b.op("Shape", grad)), b.op("Size", shape))
        # Pad with ones on the left; then every 1 is an axis to sum (a sum over one is free).
        one = np.asarray(1, dtype=np.int64)
        padding = b.op("Expand", b.constant(one, "one"), b.op("Unsqueeze", missing, b.ints([0])))
        padded = b.op("Concat", padding, shape, axis=0)
        is_one = b.op("Equal", padded, b.constant(one, "one"))
        axes = b.op("Squeeze", b.op("NonZero", is_one), b.ints([0]))
        summed = b.op("ReduceSum", grad, axes, keepdims=1, noop_with_empty_axes=1)
        return b.op("Reshape", summed, shape, allowzero=1)


def stretched_axes(wide: Dims, narrow: Dims) -> list[int] | None:
    """Return the axes of `wide` that broadcasting made or stretched; None where it is uncertain."""
    extra = len(wide) - len(narrow)
    axes = list(range(extra))
    for axis, (big, small) in enumerate(zip(wide[extra:], narrow, strict=True), start=extra):
        if isinstance(small, int):
            if small == 1 and big != 1:
                axes.append(axis)
        elif small is None or big != small:
            return None  # a symbolic dimension may turn out to be 1
    return axes


Rule: TypeAlias = Callable[[VjpContext], Sequence[str | None]]
R = TypeVar("R", bound=Rule)


@dataclass(frozen=True, slots=True)
class TableEntry:
    """A rule, and the inputs that are settings of the op: constants there are no weights.

    A rule may differentiate by such an input all the same, where it is computed or asked for.
    """

    rule: Rule
    constant_inputs: frozenset[int]


_TABLE: dict[tuple[str, str], TableEntry] = {}

# Ops whose outputs do not vary with their inputs, or only by jumps: the sweep stops there.
_PIECEWISE_CONSTANT = frozenset(
    {
        "And", "ArgMax", "ArgMin", "Bernoulli", "Ceil", "Constant", "ConstantOfShape", "Equal",
        "EyeLike", "Floor", "Greater", "GreaterOrEqual", "Hardmax", "IsInf", "IsNaN", "Less",
        "LessOrEqual", "NonZero", "Not", "Or", "RandomNormalLike", "RandomUniformLike", "Round",
        "Shape", "Sign", "Size", "Xor",
    }
)  # fmt: skip


def vjp(op_type: str, *, domain: str = "", constant_inputs: Iterable[int] = ()) -> Callable[[R], R]:
    """Register a rule; constants at the positions `constant_inputs` are settings, not weights."""

    def register(rule: R) -> R:
        _TABLE[(domain, op_type)] = TableEntry(rule, frozenset(constant_inputs))
        return rule

    return register


def lookup(domain: str, op_type: str) -> TableEntry | None:
    """Return the entry of an op; "ai.onnx" and "" are the same domain."""
    return _TABLE.get(("" if domain == "ai.onnx" else domain, op_type))


def is_piecewise_constant(domain: str, op_type: str) -> bool:
    """Return True if no gradient flows through the op at all."""
    return domain in ("", "ai.onnx") and op_type in _PIECEWISE_CONSTANT


def supported_ops() -> tuple[str, ...]:
    """Return the sorted names of the `ai.onnx` ops that have a rule."""
    return tuple(sorted(op for domain, op in _TABLE if domain == ""))


def supported_by_family() -> dict[str, tuple[str, ...]]:
    """Return the ops that have a rule, by the family of rules that each is in.

    An op of another domain than `ai.onnx` has its domain before its name.
    """
    families: dict[str, list[str]] = {}
    for (domain, op), entry in _TABLE.items():
        family = entry.rule.__module__.rsplit(".", 1)[-1]
        families.setdefault(family, []).append(f"{domain}.{op}" if domain else op)
    return {family: tuple(sorted(ops)) for family, ops in sorted(families.items())}
