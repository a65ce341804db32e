"""Gradient rules of LSTM, GRU and RNN.

Rule: the op itself stays the forward pass, and gives the state of every step. From these the gates
of all steps are found again at once, in two matrix products; so are the derivatives, factors that
a gradient is multiplied by. What is left to do step by step is little: a Scan that goes back
through time, with one matrix product and a few multiplications per step. The gradients of the
weights are again products over all steps at once.

A step behind the end of a sequence (`sequence_lens`) hands its state on: its factors are zero.
The formulas are the derivatives of the equations of ONNX's operator reference.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
from onnx import NodeProto

from bbnode.components.autodiff.builder import INT64, InferredType, first_output
from bbnode.components.autodiff.nested import closed_graph
from bbnode.components.autodiff.table import Term, VjpContext, vjp

Grads = Sequence[str | None]


# --- activations ------------------------------------------------------------------------------


# Functions of a gate, with the values of the alpha and beta that they take.
_ACTIVATIONS: dict[str, tuple[float, ...]] = {
    "affine": (1.0, 0.0),
    "elu": (1.0,),
    "hardsigmoid": (0.2, 0.5),
    "leakyrelu": (0.01,),
    "relu": (),
    "scaledtanh": (1.0, 1.0),
    "sigmoid": (),
    "softplus": (),
    "softsign": (),
    "tanh": (),
    "thresholdedrelu": (1.0,),
}


@dataclass(frozen=True, slots=True)
class _Activation:
    """A function of a gate, by its name in lower case."""

    name: str
    alpha: float = 0.0
    beta: float = 0.0

    def value(self, x: Term) -> Term:
        """Return the function's value."""
        match self.name:
            case "affine":
                return x * self.alpha + self.beta
            case "elu":
                return x.op("Elu", alpha=self.alpha)
            case "hardsigmoid":
                return x.op("HardSigmoid", alpha=self.alpha, beta=self.beta)
            case "leakyrelu":
                return x.op("LeakyRelu", alpha=self.alpha)
            case "relu":
                return x.op("Relu")
            case "scaledtanh":
                return (x * self.beta).op("Tanh") * self.alpha
            case "sigmoid":
                return x.op("Sigmoid")
            case "softplus":
                return x.op("Softplus")
            case "softsign":
                return x.op("Softsign")
            case "tanh":
                return x.op("Tanh")
            case _:
                return x.op("ThresholdedRelu", alpha=self.alpha)

    def slope(self, x: Term, y: Term) -> Term:
        """Return the derivative at x, where the value is y."""
        match self.name:
            case "affine":
                return x * 0.0 + self.alpha
            case "elu":
                return (x > 0.0).where(1.0, y + self.alpha)
            case "hardsigmoid":
                rises = (y > 0.0).op("And", y.op("Less", 1.0))
                return rises.where(self.alpha, 0.0)
            case "leakyrelu":
                return (x > 0.0).where(1.0, self.alpha)
            case "relu":
                return (x > 0.0).where(1.0, 0.0)
            case "scaledtanh":
                plain = (x * self.beta).op("Tanh")
                return (1.0 - plain * plain) * (self.alpha * self.beta)
            case "sigmoid":
                return y * (1.0 - y)
            case "softplus":
                return x.op("Sigmoid")
            case "softsign":
                rest = 1.0 - y.op("Abs")
                return rest * rest
            case "tanh":
                return 1.0 - y * y
            case _:
                return (x > self.alpha).where(1.0, 0.0)


# --- what the three ops share --------------------------------------------------------------------


@dataclass(slots=True)
class _AllOutputs:
    """The forward node with all of its outputs named."""

    node: NodeProto
    outputs: list[str]
    added: list[str] = field(default_factory=list)

    def names(self) -> list[str]:
        return self.added

    def nodes(self) -> list[NodeProto]:
        made = NodeProto()
        made.CopyFrom(self.node)
        made.output[:] = self.outputs
        return [made]


@dataclass(slots=True, kw_only=True)
class _Direction:
    """One direction of a node. T steps, B sequences, I inputs, H hidden units, G gates.

    Attributes:
        backwards: True if it begins with the last step.
        w, r: [G H, I] and [G H, H].
        wb, rb: the biases, [G H], or None.
        x, h: inputs, and states of the step before, [T, B, I] and [T, B, H].
        initial_c: state of the cell before the first step, [B, H]; LSTM alone.
        peepholes: [3 H], or None.
        grad: of the states, [T, B, H], or None.
        last, last_c: gradients of the last states, [B, H].
        mask: 1 in a sequence, 0 behind its end, [T, B, 1]; None where all are equally long.
        activations: in the order of the op.
    """

    backwards: bool
    w: Term
    r: Term
    wb: Term | None
    rb: Term | None
    x: Term
    h: Term
    initial_c: Term | None
    peepholes: Term | None
    grad: Term | None
    last: Term
    last_c: Term | None
    mask: Term | None
    activations: tuple[_Activation, ...]


@dataclass(slots=True, kw_only=True)
class _Found:
    """Gradients of one direction, named as the inputs of the op."""

    x: Term
    w: Term
    r: Term
    b: Term
    h: Term
    c: Term | None = None
    p: Term | None = None


class _Cell(ABC):
    """One node, and the rule of its kind.

    Inputs by position: X, W, R, B, sequence_lens, initial_h, then LSTM's initial_c and P.
    """

    GATES: ClassVar[int]
    DEFAULTS: ClassVar[tuple[str, ...]]

    def __init__(self, ctx: VjpContext) -> None:
        self.ctx = ctx
        self.b = ctx.b
        self.like = ctx.inputs[0]
        hidden = ctx.type_of(ctx.inputs[2]).dims
        inputs = ctx.type_of(ctx.inputs[1]).dims
        if not hidden or not isinstance(hidden[-1], int):
            raise ctx.error("the hidden size is unknown", "give R a shape")
        if not inputs or not isinstance(inputs[-1], int):
            raise ctx.error("the input size is unknown", "give W a shape")
        self.hidden, self.size = hidden[-1], inputs[-1]
        if ctx.attribute("clip", None) is not None:
            raise ctx.error("it clips the arguments of its gates", "leave the attribute clip out")
        direction = str(ctx.attribute("direction", "forward"))
        self.ways = {"forward": [False], "reverse": [True], "bidirectional": [False, True]}.get(
            direction, []
        )
        if not self.ways:
            raise ctx.error(f"direction {direction!r} is none", "take forward or reverse")
        self.batch_first = bool(ctx.attribute("layout", 0))
        self.activations = self._activations()

    @abstractmethod
    def differentiate(self, d: _Direction) -> _Found:
        """Emit the gradients of one direction."""

    # -- terms ----------------------------------------------------------------------------------

    def term(self, name: str) -> Term:
        return self.ctx.term(name, self.like)

    def ints(self, *values: int) -> Term:
        return self.term(self.b.ints(values))

    def rows(self, value: Term, width: int) -> Term:
        """Return [T, B, width] as [T B, width]."""
        return value.op("Reshape", self.ints(-1, width))

    def steps(self, value: Term, like: Term) -> Term:
        """Return [T B, width] as [T, B, width], with T and B of `like`, [T, B, any]."""
        ends = self.term(self.b.op("Shape", like.name, start=0, end=2))
        return value.op("Reshape", ends.op("Concat", self.ints(-1), axis=0))

    def split(self, value: Term, parts: int, axis: int = -1) -> list[Term]:
        names = self.b.emit("Split", [value.name], parts, axis=axis, num_outputs=parts)
        return [self.term(name) for name in names]

    def joined(self, values: Sequence[Term], axis: int = -1) -> Term:
        first, *others = values
        return first.op("Concat", *others, axis=axis)

    def product(self, a: Term, c: Term, bias: Term | None = None) -> Term:
        """Return a c^T + bias, of matrices."""
        return a.op("Gemm", c, *([] if bias is None else [bias]), transB=1)

    def weights(self, gates: Term, values: Term) -> Term:
        """Return the gradient of a matrix that `values` [T B, n] were multiplied by: [G H, n]."""
        return gates.op("Gemm", values, transA=1)

    def sum(self, rows: Term) -> Term:
        return rows.op("ReduceSum", self.ints(0), keepdims=0)

    # -- steps ----------------------------------------------------------------------------------

    def arguments(self, d: _Direction) -> Term:
        """Return x W + h R + b of all gates and steps, [T, B, G H]."""
        bias = None if d.wb is None or d.rb is None else d.wb + d.rb
        of_x = self.product(self.rows(d.x, self.size), d.w, bias)
        return self.steps(self.product(self.rows(d.h, self.hidden), d.r, of_x), d.x)

    def before(self, d: _Direction, after: Term, first: Term) -> Term:
        """Return the states before each step, [T, B, H], of those after it, and the first."""
        begin = first.op("Unsqueeze", self.ints(0))
        if d.backwards:
            later = after.op("Slice", self.ints(1), self.ints(_END), self.ints(0))
            return self.joined([later, begin], 0)
        earlier = after.op("Slice", self.ints(0), self.ints(-1), self.ints(0))
        return self.joined([begin, earlier], 0)

    def inside(self, d: _Direction, factor: Term) -> Term:
        """Return a factor that is zero behind the end of a sequence."""
        return factor if d.mask is None else factor * d.mask

    def kept(self, d: _Direction, factor: Term) -> Term:
        """Return a factor that is one behind the end of a sequence."""
        return factor if d.mask is None else factor * d.mask + (1.0 - d.mask)

    def stay(self, d: _Direction) -> Term | None:
        """Return how much of a state is handed on besides what the gates do."""
        return None if d.mask is None else 1.0 - d.mask

    def handed_on(self, before: Term, dh: Term, v: Mapping[str, Term]) -> Term:
        """Return the gradient of the state before a step."""
        return before + dh * v["stay"] if "stay" in v else before

    def found(self, d: _Direction, of_x: Term, of_h: Term, first: Term) -> _Found:
        """Emit the gradients that follow from those of the gates' arguments, [T, B, G H].

        `of_x` and `of_h`: as far as they come from the inputs and from the states.
        """
        width = self.GATES * self.hidden
        x, h = self.rows(of_x, width), self.rows(of_h, width)
        return _Found(
            x=of_x.op("MatMul", d.w),
            w=self.weights(x, self.rows(d.x, self.size)),
            r=self.weights(h, self.rows(d.h, self.hidden)),
            b=self.joined([self.sum(x), self.sum(h)], 0),
            h=first,
        )

    # -- the node --------------------------------------------------------------------------------

    def grads(self) -> Grads:
        """Emit the gradients of all inputs."""
        ctx = self.ctx
        found = [self.differentiate(d) for d in self._directions()]
        grads: list[str | None] = [None] * len(ctx.inputs)
        if ctx.wants(0):
            total = found[0].x
            for other in found[1:]:
                total = total + other.x
            grads[0] = (total.op("Transpose", perm=[1, 0, 2]) if self.batch_first else total).name
        for position, kind in ((1, "w"), (2, "r"), (3, "b"), (5, "h"), (6, "c"), (7, "p")):
            parts: list[Term | None] = [getattr(each, kind) for each in found]
            if ctx.wants(position):
                axis = 1 if self.batch_first and kind in "hc" else 0
                both = [p.op("Unsqueeze", self.ints(axis)) for p in parts if p is not None]
                grads[position] = self.joined(both, axis).name
        return grads

    def _directions(self) -> list[_Direction]:
        ctx, count = self.ctx, len(self.ways)
        x = self._time_first(ctx.inputs[0], [1, 0, 2])
        states = self._time_first(self._states(), [1, 2, 0, 3])  # [T, D, B, H]
        grads = [*ctx.grads, None, None, None][:3]
        steps = None if grads[0] is None else self._time_first(grads[0], [1, 2, 0, 3])
        mask, last_step = self._mask(x)
        made = []
        for number, backwards in enumerate(self.ways):

            def of(value: Term, axis: int = 0, number: int = number) -> Term:
                if count == 1:
                    return value.op("Squeeze", self.ints(axis))
                return value.op("Gather", self.term(self._index(number)), axis=axis)

            def state(
                position: int, given: str | None = None, of: Callable[..., Term] = of
            ) -> Term:
                """Return an initial state, or a gradient of its shape; zeros without."""
                if given is None and ctx.has(position):
                    given = ctx.inputs[position]
                if given is None:
                    return self._zeros(x)
                return of(self._time_first(given, [1, 0, 2]))

            bias = self.split(of(self.term(ctx.inputs[3])), 2) if ctx.has(3) else [None, None]
            grad = None if steps is None else of(steps, 1)
            if grad is not None and mask is not None:
                grad = grad * mask
            d = _Direction(
                backwards=backwards,
                w=of(self.term(ctx.inputs[1])),
                r=of(self.term(ctx.inputs[2])),
                wb=bias[0],
                rb=bias[1],
                x=x,
                h=x,
                initial_c=state(6),
                peepholes=of(self.term(ctx.inputs[7])) if ctx.has(7) else None,
                grad=grad,
                last=self._zeros(x) if grads[1] is None else state(5, grads[1]),
                last_c=self._zeros(x) if grads[2] is None else state(6, grads[2]),
                mask=mask,
                activations=self.activations[number],
            )
            d.h = self.before(d, of(states, 1), state(5))
            if backwards and last_step is not None:  # a shorter sequence begins here
                d.h = last_step.op("Where", state(5).op("Unsqueeze", self.ints(0)), d.h)
            made.append(d)
        return made

    def _index(self, number: int) -> str:
        return self.b.constant(np.asarray(number, np.int64), "direction")

    def _time_first(self, name: str, perm: list[int]) -> Term:
        """Return a value with the batch not in front; `perm` is for one that has it there."""
        value = self.term(name)
        return value.op("Transpose", perm=perm) if self.batch_first else value

    def _zeros(self, x: Term) -> Term:
        """Return zeros [B, H]."""
        batch = self.term(self.b.op("Shape", x.name, start=1, end=2))
        shape = batch.op("Concat", self.ints(self.hidden), axis=0)
        return self.term(self.ctx.scalar(0.0, self.like)).op("Expand", shape)

    def _states(self) -> str:
        """Return the name of Y, which the forward node is made to give if it does not."""
        node = self.ctx.node
        if node.output[0]:
            return node.output[0]
        key = first_output(node)
        known = self.b.instead.get(key)
        if not isinstance(known, _AllOutputs):
            name = self.b.fresh("Y")
            known = _AllOutputs(node, [name, *node.output[1:]], [name])
            self.b.instead[key] = known
        return known.outputs[0]

    def _mask(self, x: Term) -> tuple[Term | None, Term | None]:
        """Return what steps are in their sequences, and what are the last, [T, B, 1]."""
        if not self.ctx.has(4):
            return None, None
        steps = self.b.op("Squeeze", self.b.op("Shape", x.name, start=0, end=1))
        zero, one = (self.b.constant(np.asarray(n, np.int64), "number") for n in (0, 1))
        number = self.term(self.b.op("Range", zero, steps, one)).op("Unsqueeze", self.ints(1, 2))
        length = self.term(self.b.op("Cast", self.ctx.inputs[4], to=INT64))
        length = length.op("Unsqueeze", self.ints(0, 2))
        inside = number.op("Less", length).op("Cast", to=self.ctx.elem_type(self.like))
        after = self.term(self.b.op("Add", number.name, one))
        return inside, after.op("Equal", length)

    def _activations(self) -> list[tuple[_Activation, ...]]:
        ctx, each = self.ctx, len(self.DEFAULTS)
        listed: list[bytes] = list(ctx.attribute("activations", []))
        names = [name.decode() for name in listed]
        names = names or [*self.DEFAULTS] * len(self.ways)
        if len(names) != each * len(self.ways):
            raise ctx.error(
                f"it names {len(names)} activations for {len(self.ways)} direction(s)",
                f"name {each} for each direction",
            )
        given: list[list[float]] = [
            list(ctx.attribute(f"activation_{which}", [])) for which in ("alpha", "beta")
        ]
        chosen = []
        for name in names:
            defaults = _ACTIVATIONS.get(name.lower())
            if defaults is None:
                raise ctx.error(
                    f"it has the activation {name!r}", f"take one of {', '.join(_ACTIVATIONS)}"
                )
            # Given values are used up in the order of the functions that take one.
            numbers = [
                float(values.pop(0)) if values else default
                for values, default in zip(given, defaults, strict=False)
            ]
            chosen.append(_Activation(name.lower(), *numbers))
        return [tuple(chosen[at : at + each]) for at in range(0, len(chosen), each)]

    def through_time(
        self,
        d: _Direction,
        carried: Mapping[str, Term],
        slices: Mapping[str, Term | None],
        write: Callable[[Mapping[str, Term]], tuple[list[Term], list[Term]]],
        backward: bool = True,
    ) -> list[Term]:
        """Emit a Scan through the steps of a direction, from its end to its begin if `backward`.

        `carried` [B, n] and `slices` [T, B, n] are given to `write` under their names; what is
        None is left out. It returns what is carried on and what is handed out. Returns both: the
        last of the carried, [B, n], and the handed out of all steps, [T, B, n].
        """
        inner = self.b.nested()
        outer, self.b, self.ctx.b = self.b, inner, inner
        try:
            there = {name: value for name, value in slices.items() if value is not None}
            matrix = InferredType(self.ctx.elem_type(self.like), (None, None))
            names = {name: inner.fresh(name) for name in (*carried, *there)}
            states, given = write({name: self.term(own) for name, own in names.items()})
        finally:
            self.b = self.ctx.b = outer
        graph = closed_graph(
            "steps",
            inner,
            [(name, matrix) for name in names.values()],
            [(value.name, matrix) for value in (*states, *given)],
        )
        way = [int(d.backwards != backward)]
        made = outer.add(
            "Scan",
            [value.name for value in (*carried.values(), *there.values())],
            len(states) + len(given),
            body=graph,
            num_scan_inputs=len(there),
            scan_input_directions=way * len(there),
            **({"scan_output_directions": way * len(given)} if given else {}),
        )
        return [self.term(name) for name in made]


_END = int(np.iinfo(np.int64).max)


def _plus(a: Term, c: Term | None) -> Term:
    return a if c is None else a + c


# --- the three ops --------------------------------------------------------------------------------


class _Rnn(_Cell):
    """h' = f(x W + h R + b)."""

    GATES = 1
    DEFAULTS = ("Tanh",)

    def differentiate(self, d: _Direction) -> _Found:
        (f,) = d.activations
        argument = self.arguments(d)
        factor = f.slope(argument, f.value(argument))
        slices = {"dy": d.grad, "factor": self.inside(d, factor), "stay": self.stay(d)}

        def back(v: Mapping[str, Term]) -> tuple[list[Term], list[Term]]:
            dh = _plus(v["dh"], v.get("dy"))
            gate = dh * v["factor"]
            return [self.handed_on(gate.op("MatMul", d.r), dh, v)], [gate]

        first, gates = self.through_time(d, {"dh": d.last}, slices, back)
        return self.found(d, gates, gates, first)


class _Lstm(_Cell):
    """The gates i, o, f and the candidate g; c' = f c + i g, h' = o h(c')."""

    GATES = 4
    DEFAULTS = ("Sigmoid", "Tanh", "Tanh")

    def differentiate(self, d: _Direction) -> _Found:
        f, g, h = d.activations
        coupled = bool(self.ctx.attribute("input_forget", 0))
        to_i, to_o, to_f, to_g = self.split(self.arguments(d), 4)
        peep = None if d.peepholes is None else self.split(d.peepholes, 3)  # i, o, f
        candidate = g.value(to_g)
        cells = self._cells(d, to_i, to_f, candidate, peep, coupled)
        assert d.initial_c is not None
        before = self.before(d, cells, d.initial_c)
        if peep is not None:
            to_i, to_o, to_f = (
                to_i + before * peep[0],
                to_o + cells * peep[1],
                to_f + before * peep[2],
            )
        i, o, bounded = f.value(to_i), f.value(to_o), h.value(cells)
        keep = 1.0 - i if coupled else f.value(to_f)
        # What the gradients of c' and h' are multiplied by to get those of the gates' arguments.
        by_i = ((candidate - before) if coupled else candidate) * f.slope(to_i, i)
        by_o = bounded * f.slope(to_o, o)
        by_f = before * 0.0 if coupled else before * f.slope(to_f, keep)
        by_g = i * g.slope(to_g, candidate)
        into_c = o * h.slope(cells, bounded)
        if peep is not None:
            into_c = into_c + by_o * peep[1]
            keep = keep + by_i * peep[0] + by_f * peep[2]
        slices = {
            "dy": d.grad,
            "factors": self.inside(d, self.joined([by_i, by_o, by_f, by_g])),
            "into_c": self.inside(d, into_c),
            "keep": self.kept(d, keep),
            "stay": self.stay(d),
        }

        def back(v: Mapping[str, Term]) -> tuple[list[Term], list[Term]]:
            dh = _plus(v["dh"], v.get("dy"))
            dc = v["dc"] + dh * v["into_c"]
            gates = self.joined([dc, dh, dc, dc]) * v["factors"]
            return [self.handed_on(gates.op("MatMul", d.r), dh, v), dc * v["keep"]], [gates]

        assert d.last_c is not None
        carried = {"dh": d.last, "dc": d.last_c}
        first, first_c, gates = self.through_time(d, carried, slices, back)
        found = self.found(d, gates, gates, first)
        found.c = first_c
        if peep is not None:
            di, do, df, _ = self.split(gates, 4)
            parts = [di * before, do * cells, df * before]
            found.p = self.joined([self.sum(self.rows(part, self.hidden)) for part in parts], 0)
        return found

    def _cells(
        self,
        d: _Direction,
        to_i: Term,
        to_f: Term,
        candidate: Term,
        peep: list[Term] | None,
        coupled: bool,
    ) -> Term:
        """Return the cell's state after each step, [T, B, H]."""
        f = d.activations[0]
        assert d.initial_c is not None
        slices: dict[str, Term | None]
        if peep is None:
            i = f.value(to_i)
            keep = 1.0 - i if coupled else f.value(to_f)
            slices = {"keep": self.kept(d, keep), "new": self.inside(d, i * candidate)}

            def forth(v: Mapping[str, Term]) -> tuple[list[Term], list[Term]]:
                after = v["c"] * v["keep"] + v["new"]
                return [after], [after]

        else:
            own = peep
            slices = {"i": to_i, "f": None if coupled else to_f, "g": candidate, "m": d.mask}

            def forth(v: Mapping[str, Term]) -> tuple[list[Term], list[Term]]:
                i = f.value(v["i"] + v["c"] * own[0])
                keep = f.value(v["f"] + v["c"] * own[2]) if "f" in v else 1.0 - i
                after = v["c"] * keep + i * v["g"]
                if "m" in v:
                    after = v["c"] + (after - v["c"]) * v["m"]
                return [after], [after]

        _, cells = self.through_time(d, {"c": d.initial_c}, slices, forth, backward=False)
        return cells


class _Gru(_Cell):
    """The gates z and r, and the candidate n; h' = (1 - z) n + z h."""

    GATES = 3
    DEFAULTS = ("Sigmoid", "Tanh")

    def differentiate(self, d: _Direction) -> _Found:
        from_x = self.steps(self.product(self.rows(d.x, self.size), d.w, d.wb), d.x)
        if int(self.ctx.attribute("linear_before_reset", 0)):
            return self._reset_after(d, from_x)
        return self._reset_before(d, from_x)

    def _reset_after(self, d: _Direction, from_x: Term) -> _Found:
        f, g = d.activations
        states = self.rows(d.h, self.hidden)
        xz, xr, xn = self.split(from_x, 3)
        from_h = self.steps(self.product(states, d.r, d.rb), d.x)
        hz, hr, hn = self.split(from_h, 3)
        to_z, to_r = xz + hz, xr + hr
        z, r = f.value(to_z), f.value(to_r)
        to_n = xn + r * hn
        n = g.value(to_n)
        by_n = (1.0 - z) * g.slope(to_n, n)
        by_r = by_n * hn * f.slope(to_r, r)
        factors = self.joined([self._by_z(d, z, to_z, n), by_r, by_n * r])

        def back(v: Mapping[str, Term]) -> tuple[list[Term], list[Term]]:
            dh = _plus(v["dh"], v.get("dy"))
            gates = self.joined([dh, dh, dh]) * v["factors"]
            return [gates.op("MatMul", d.r) + dh * v["keep"]], [gates, dh]

        slices = {
            "dy": d.grad,
            "factors": self.inside(d, factors),
            "keep": self.kept(d, z),
        }
        first, gates, flow = self.through_time(d, {"dh": d.last}, slices, back)
        dz, dr, _ = self.split(gates, 3)
        of_x = self.joined([dz, dr, flow * self.inside(d, by_n)])
        return self.found(d, of_x, gates, first)

    def _reset_before(self, d: _Direction, from_x: Term) -> _Found:
        f, g = d.activations
        hidden = self.hidden
        states = self.rows(d.h, hidden)
        xz, xr, xn = self.split(from_x, 3)
        gate_weights, r_n = self._parts(d.r)
        gate_bias, bias_n = (None, None) if d.rb is None else self._parts(d.rb)
        hz, hr = self.split(self.steps(self.product(states, gate_weights, gate_bias), d.x), 2)
        to_z, to_r = xz + hz, xr + hr
        z, r = f.value(to_z), f.value(to_r)
        reset = r * d.h
        to_n = xn + self.steps(self.product(self.rows(reset, hidden), r_n, bias_n), d.x)
        n = g.value(to_n)
        slices = {
            "dy": d.grad,
            "by_z": self.inside(d, self._by_z(d, z, to_z, n)),
            "by_n": self.inside(d, (1.0 - z) * g.slope(to_n, n)),
            "by_r": d.h * f.slope(to_r, r),
            "r": r,
            "keep": self.kept(d, z),
        }

        def back(v: Mapping[str, Term]) -> tuple[list[Term], list[Term]]:
            dh = _plus(v["dh"], v.get("dy"))
            dn = dh * v["by_n"]
            into = dn.op("MatMul", r_n)
            gates = self.joined([dh * v["by_z"], into * v["by_r"]])
            before = gates.op("MatMul", gate_weights) + into * v["r"] + dh * v["keep"]
            return [before], [gates, dn]

        first, two, third = self.through_time(d, {"dh": d.last}, slices, back)
        gates = self.joined([two, third])
        found = self.found(d, gates, gates, first)
        rows = self.rows(third, hidden)
        found.r = self.joined(
            [
                self.weights(self.rows(two, 2 * hidden), states),
                self.weights(rows, self.rows(reset, hidden)),
            ],
            0,
        )
        return found

    def _by_z(self, d: _Direction, z: Term, to_z: Term, n: Term) -> Term:
        return (d.h - n) * d.activations[0].slope(to_z, z)

    def _parts(self, value: Term) -> list[Term]:
        """Return what belongs to z and r, and what belongs to n, along the first axis."""
        sizes = self.b.ints([2 * self.hidden, self.hidden])
        return [self.term(name) for name in self.b.emit("Split", [value.name, sizes], 2, axis=0)]


@vjp("LSTM", constant_inputs={4})
def _lstm(ctx: VjpContext) -> Grads:
    return _Lstm(ctx).grads()


@vjp("GRU", constant_inputs={4})
def _gru(ctx: VjpContext) -> Grads:
    return _Gru(ctx).grads()


@vjp("RNN", constant_inputs={4})
def _rnn(ctx: VjpContext) -> Grads:
    return _Rnn(ctx).grads()
