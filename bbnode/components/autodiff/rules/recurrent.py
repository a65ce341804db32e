"""Gradient rules of LSTM, GRU and RNN.

Rule: where the gradient is wanted, the op is written as a Scan that hands out, beside the states,
the factors that a gradient is multiplied by on its way back through each step. The way back is a
second Scan, with little more than one matrix product per step. All that does not depend on the
step before is worked out for all steps at once behind it: the gradients of weights and inputs.

The batch is the last axis in there, [units, B]: gates are rows then, which are parted and joined
as whole blocks, and a product by a matrix reads it as it lies. States, inputs and a row of ones are
joined, so that one product by R, W and the biases gives the arguments of gates. Kernels pack the
right factor of a product anew each time: that is the states here, which are smaller than the
matrix for all but huge batches.

A step behind the end of a sequence (`sequence_lens`) hands its state on: its factors are zero.
The formulas are the derivatives of the equations of ONNX's operator reference.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
from onnx import NodeProto
from onnx.helper import make_node

from bbnode.components.autodiff.builder import INT64, GraphBuilder, InferredType
from bbnode.components.autodiff.nested import closed_graph, reads
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

    def by_slope(self, scale: Term, x: Term, y: Term, product: Term) -> Term:
        """Return `scale` times the slope; `product` is scale * y, which is often there."""
        if self.name == "tanh":
            return scale - product * y
        if self.name == "sigmoid":
            return product - product * y
        return scale * self.slope(x, y)

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

# The values of one step, or of all of them, by name.
Values = Mapping[str, Term]
# What is carried on and what is handed out, by name.
Step = tuple[Values, Values]


@dataclass(slots=True, kw_only=True)
class _Direction:
    """One direction of a node. T steps, B sequences, I inputs, H hidden units, G gates.

    Attributes:
        number: 0, or 1 for the second of two.
        backwards: True if it begins with the last step.
        w, r: [G H, I] and [G H, H].
        wb, rb: the biases, [G H], or None.
        late: what of rb is added behind the reset gate, [H, 1], or None.
        peepholes: those of i, o and f, [H, 1] each, or None.
        activations: in the order of the op.
        blocks: r, w and the biases as one matrix, [G H, H + I + 1], by `_Cell.parts`.
        blocks_r, blocks_w: the columns of either, by `_Cell.parts`.
        turned: those of r transposed, and all of it at the end.
        kept: what the forward loop handed out, [T, any, B].
    """

    number: int
    backwards: bool
    w: Term
    r: Term
    wb: Term | None
    rb: Term | None
    late: Term | None = None
    peepholes: list[Term] | None
    activations: tuple[_Activation, ...]
    blocks: list[Term] = field(default_factory=list)
    blocks_r: list[Term] = field(default_factory=list)
    blocks_w: list[Term] = field(default_factory=list)
    turned: list[Term] = field(default_factory=list)
    kept: dict[str, Term] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class _Unrolled:
    """The forward node written as loops, for all sweeps over the graph.

    Attributes:
        made: the loops, and what they read.
        own: the outputs of the forward node.
        x: the inputs, [T, I, B]; with ones behind them, [T, I + 1, B], where there are biases.
        mask: 1 where a step is in its sequence, 0 behind the end, [T, 1, B]; None where all are
            equally long.
        directions: one or two.
    """

    made: list[NodeProto]
    own: frozenset[str]
    x: Term
    mask: Term | None
    directions: list[_Direction]

    def names(self) -> list[str]:
        """Return the values that the way back reads."""
        return [name for node in self.made for name in node.output if name not in self.own]

    def nodes(self) -> list[NodeProto]:
        return self.made


class _Cell(ABC):
    """One node, and the rule of its kind.

    Inputs by position: X, W, R, B, sequence_lens, initial_h, then LSTM's initial_c and P.
    """

    GATES: ClassVar[int]
    STATES: ClassVar[tuple[str, ...]] = ("h",)
    DEFAULTS: ClassVar[tuple[str, ...]]

    def __init__(self, ctx: VjpContext) -> None:
        self.ctx = ctx
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

    @property
    @abstractmethod
    def parts(self) -> tuple[int, ...]:
        """The gates that are computed at once, by their number."""

    def bias(self, d: _Direction) -> Term | None:
        """Return the bias that the row of ones is multiplied by, [G H]; None without one."""
        return None if d.wb is None or d.rb is None else d.wb + d.rb

    @abstractmethod
    def forth(self, d: _Direction, v: Values) -> Step:
        """Emit a step: of the inputs `x`, with ones behind them, and of the states.

        Hands out the factors for `back`, and as `seen` what the matrix of all weights was
        multiplied by, [H + I + 1, B]. All values are [any, B].
        """

    @abstractmethod
    def back(self, d: _Direction, v: Values) -> Step:
        """Emit a step back: of `dh` (`dc`), gradients of the states after it.

        Hands out `gates`: gradients of the arguments of the gates.
        """

    def weights(self, d: _Direction, found: Values) -> tuple[Term, Term, Term, Term]:
        """Return the gradients of the inputs' and the states' share in the gates, [T, G H, B].

        And of R, [G H, H], and of W, with those of the biases behind it, [G H, I + 1].
        """
        gates = found["gates"]
        return gates, gates, *self.columns(self.of_matrix(gates, d.kept["seen"]))

    # -- terms ----------------------------------------------------------------------------------

    @property
    def b(self) -> GraphBuilder:
        return self.ctx.b

    @contextmanager
    def writing(self, b: GraphBuilder) -> Iterator[None]:
        """Emit into another builder for a while."""
        outer, self.ctx.b = self.ctx.b, b
        try:
            yield
        finally:
            self.ctx.b = outer

    def term(self, name: str) -> Term:
        return self.ctx.term(name, self.like)

    def ints(self, *values: int) -> Term:
        return self.term(self.b.ints(values))

    def split(self, value: Term, *parts: int, axis: int = -2) -> list[Term]:
        """Return parts of an axis, so many times H long."""
        if len(parts) == 1:
            return [value]
        sizes = self.b.ints([part * self.hidden for part in parts])
        return [
            self.term(n) for n in self.b.emit("Split", [value.name, sizes], len(parts), axis=axis)
        ]

    def joined(self, *values: Term, axis: int = -2) -> Term:
        first, *others = values
        return first.op("Concat", *others, axis=axis) if others else first

    def columns(self, matrix: Term) -> tuple[Term, Term]:
        """Return the first H columns, and the others."""
        sizes = self.b.ints([self.hidden, self.size + int(self.ctx.has(3))])
        r, w = self.b.emit("Split", [matrix.name, sizes], 2, axis=1)
        return self.term(r), self.term(w)

    def of_matrix(self, gates: Term, values: Term) -> Term:
        """Return the gradient [n, m] of a matrix that gives gates [T, n, B] of [T, m, B]."""
        if self.ctx.wants(0):  # the gates are there in rows
            return self.flat(values).op("MatMul", self.rows(gates)).op("Transpose", perm=[1, 0])
        return self.flat(gates).op("Gemm", self.flat(values), transB=1)

    def rows(self, gates: Term) -> Term:
        """Return [T, n, B] as [T B, n]."""
        return gates.op("Transpose", perm=[0, 2, 1]).op("Flatten", axis=2)

    def flat(self, value: Term) -> Term:
        """Return [T, n, B] as [n, T B]."""
        return value.op("Transpose", perm=[1, 0, 2]).op("Flatten", axis=1)

    def sum(self, value: Term) -> Term:
        """Return the sum of [T, n, B] over all steps and sequences, [n]."""
        return value.op("ReduceSum", self.ints(0, 2), keepdims=0)

    def product(self, matrix: Term, h: Term, share: Term | None = None) -> Term:
        """Return matrix @ h, and a share that is added."""
        return matrix.op("MatMul", h) if share is None else matrix.op("Gemm", h, share)

    # -- steps behind the end of a sequence -----------------------------------------------------

    def inside(self, factor: Term, v: Values) -> Term:
        """Return a factor that is zero behind the end."""
        return factor * v["mask"] if "mask" in v else factor

    def kept(self, factor: Term, v: Values) -> Term:
        """Return a factor that is one behind the end."""
        return factor * v["mask"] + (1.0 - v["mask"]) if "mask" in v else factor

    def carried(self, after: Term, before: Term, v: Values) -> Term:
        """Return the state after a step, which is the one before behind the end."""
        return before + (after - before) * v["mask"] if "mask" in v else after

    def handed_on(self, before: Term, dh: Term, v: Values) -> Term:
        """Return the gradient of the state before a step, with what goes past the gates."""
        return before + dh * (1.0 - v["mask"]) if "mask" in v else before

    def arriving(self, v: Values) -> Term:
        """Return the gradient of a state: from the steps after it, and from Y."""
        if "dy" not in v:
            return v["dh"]
        return v["dh"] + self.inside(v["dy"], v)

    # -- the node --------------------------------------------------------------------------------

    def grads(self) -> Grads:
        """Emit the gradients of all inputs."""
        ctx = self.ctx
        self.unrolled = known = ctx.instead(_Unrolled, self._unroll)
        found = [self._sweep(d) for d in known.directions]
        grads: list[str | None] = [None] * len(ctx.inputs)
        if ctx.wants(0):
            total = found[0]["x"]
            for other in found[1:]:
                total = total + other["x"]
            rows = self.b.op("Transpose", ctx.inputs[0], perm=[1, 0, 2])
            total = self.term(
                self.b.reshape_like(total.name, rows if self.batch_first else ctx.inputs[0])
            )
            grads[0] = (total.op("Transpose", perm=[1, 0, 2]) if self.batch_first else total).name
        for position, kind in ((1, "w"), (2, "r"), (3, "b"), (5, "dh"), (6, "dc"), (7, "p")):
            if ctx.wants(position):
                both = self.joined(
                    *(each[kind].op("Unsqueeze", self.ints(0)) for each in found), axis=0
                )
                grads[position] = (self._turned_back(both) if kind in ("dh", "dc") else both).name
        return grads

    def _unroll(self) -> _Unrolled:
        """Write the node as loops, which give its outputs, and what the way back reads."""
        ctx, outer = self.ctx, self.ctx.b
        forward = outer.nested()
        with self.writing(forward):
            x = self.term(ctx.inputs[0])
            x = x.op("Transpose", perm=[1, 2, 0] if self.batch_first else [0, 2, 1])
            directions = [self._direction(number) for number in range(len(self.ways))]
            mask = self._mask()
            outputs: list[list[Term]] = [[] for _ in range(3)]
            if ctx.has(3):  # the biases are a column of W
                x = x.op("Pad", self.ints(0, 0, 0, 0, 1, 0), 1.0)
            for d in directions:
                states = {name: self._state(d, 5 + at, None) for at, name in enumerate(self.STATES)}
                slices = {"x": x}
                if mask is not None:
                    slices["mask"] = mask
                last, given = self._loop(d, states, slices, self._forth, back=False)
                d.kept = {**given}
                if "y" in given:
                    outputs[0].append(d.kept.pop("y"))
                for at, state in enumerate(last.values()):
                    outputs[1 + at].append(state)
            for at, (name, parts) in enumerate(zip(ctx.node.output, outputs, strict=False)):
                if name:
                    axis = 1 if at == 0 else 0
                    both = [part.op("Unsqueeze", self.ints(axis)) for part in parts]
                    end = self._turned_back(self.joined(*both, axis=axis), rank=4 - min(at, 1))
                    forward.nodes.append(make_node("Identity", [end.name], [name], name=name))
        outer.initializers += forward.initializers
        # In a loop's body the way back may only read what has a known rank.
        elem_type = ctx.elem_type(self.like)
        for term, rank in (
            *((each, 3) for each in (x, mask) if each is not None),
            *((each, 2) for d in directions for each in (d.w, d.r, *d.turned)),
        ):
            ctx.types.setdefault(term.name, InferredType(elem_type, (None,) * rank))
        return _Unrolled(
            made=forward.nodes,
            own=frozenset(ctx.node.output),
            x=x,
            mask=mask,
            directions=directions,
        )

    def _forth(self, d: _Direction, v: Values) -> Step:
        """Emit a step without what nothing reads."""
        after, given = self.forth(d, v)
        unread = set() if self.ctx.node.output[0] else {"y"}
        return after, {name: value for name, value in given.items() if name not in unread}

    def _direction(self, number: int) -> _Direction:
        ctx = self.ctx
        wb = rb = peepholes = None
        if ctx.has(3):
            both = self._of(self.term(ctx.inputs[3]), number)
            wb, rb = self.split(both, self.GATES, self.GATES, axis=0)
        if ctx.has(7):
            columns = self._of(self.term(ctx.inputs[7]), number).op("Unsqueeze", self.ints(1))
            peepholes = self.split(columns, 1, 1, 1)
        w, r = (self._of(self.term(ctx.inputs[at]), number) for at in (1, 2))
        d = _Direction(
            number=number,
            backwards=self.ways[number],
            w=w,
            r=r,
            wb=wb,
            rb=rb,
            peepholes=peepholes,
            activations=self.activations[number],
        )
        bias = self.bias(d)
        if bias is not None:
            w = self.joined(w, bias.op("Unsqueeze", self.ints(1)), axis=1)
        d.blocks = self.split(self.joined(r, w, axis=1), *self.parts)
        d.blocks_r, d.blocks_w = (self.split(each, *self.parts) for each in (r, w))
        d.turned = [each.op("Transpose", perm=[1, 0]) for each in (*d.blocks_r, r)]
        return d

    def _sweep(self, d: _Direction) -> Values:
        """Emit the way back through one direction; returns the gradients of the inputs."""
        ctx, mask = self.ctx, self.unrolled.mask
        grads = [*ctx.grads, None, None, None]
        flows = {
            f"d{name}": self._state(d, None, grads[1 + at]) for at, name in enumerate(self.STATES)
        }
        slices = dict(d.kept)
        if grads[0] is not None:
            dy = self._of(self.term(grads[0]), d.number, axis=2 if self.batch_first else 1)
            slices["dy"] = dy.op("Transpose", perm=[1, 2, 0] if self.batch_first else [0, 2, 1])
        if mask is not None:
            slices["mask"] = mask
        first, found = self._loop(d, flows, slices, self.back, back=True)
        of_x, of_h, r, w = self.weights(d, found)
        made = {**first, "x": self.rows(of_x).op("MatMul", d.w), "w": w, "r": r}
        if d.wb is not None:
            parts = self.b.emit("Split", [w.name, self.b.ints([self.size, 1])], 2, axis=1)
            made["w"], column = (self.term(part) for part in parts)
            of_wb = column.op("Squeeze", self.ints(1))
            of_rb = of_wb if of_h.name == of_x.name else self.sum(of_h)
            made["b"] = self.joined(of_wb, of_rb, axis=0)
        if d.peepholes is not None:
            of_i, of_o, of_f, _ = self.split(of_h, 1, 1, 1, 1)
            cells, before = d.kept["cells"], d.kept["cells_before"]
            terms = [of_i * before, of_o * cells, of_f * before]
            made["p"] = self.joined(*(self.sum(each) for each in terms), axis=0)
        return made

    def _of(self, value: Term, number: int, axis: int = 0) -> Term:
        """Return what belongs to one direction."""
        if len(self.ways) == 1:
            return value.op("Squeeze", self.ints(axis))
        index = self.term(self.b.constant(np.asarray(number, np.int64), "direction"))
        return value.op("Gather", index, axis=axis)

    def _state(self, d: _Direction, position: int | None, name: str | None) -> Term:
        """Return an input, or a value of its shape, of one direction, [H, B]; zeros without."""
        if position is not None and self.ctx.has(position):
            name = self.ctx.inputs[position]
        if name is not None:
            own = self._of(self.term(name), d.number, axis=1 if self.batch_first else 0)
            return own.op("Transpose", perm=[1, 0])
        at = 0 if self.batch_first else 1
        batch = self.term(self.b.op("Shape", self.ctx.inputs[0], start=at, end=at + 1))
        shape = self.ints(self.hidden).op("Concat", batch, axis=0)
        return self.term(self.ctx.scalar(0.0, self.like)).op("Expand", shape)

    def _turned_back(self, value: Term, rank: int = 3) -> Term:
        """Return [..., n, B] with the axes of the op's inputs and outputs."""
        if self.batch_first:
            return value.op("Transpose", perm=[rank - 1, *range(rank - 1)])
        return value.op("Transpose", perm=[*range(rank - 2), rank - 1, rank - 2])

    def _mask(self) -> Term | None:
        """Return 1 where a step is in its sequence, 0 behind the end, [T, 1, B]."""
        if not self.ctx.has(4):
            return None
        at = 1 if self.batch_first else 0
        steps = self.b.op("Squeeze", self.b.op("Shape", self.ctx.inputs[0], start=at, end=at + 1))
        zero, one = (self.b.constant(np.asarray(n, np.int64), "number") for n in (0, 1))
        number = self.term(self.b.op("Range", zero, steps, one)).op("Unsqueeze", self.ints(1, 2))
        length = self.term(self.b.op("Cast", self.ctx.inputs[4], to=INT64))
        inside = number.op("Less", length.op("Unsqueeze", self.ints(0, 1)))
        return inside.op("Cast", to=self.ctx.elem_type(self.like))

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

    def _loop(
        self,
        d: _Direction,
        carried: Values,
        slices: Values,
        write: Callable[[_Direction, Values], Step],
        *,
        back: bool,
    ) -> Step:
        """Emit a Scan through the steps of a direction, in its order or `back`.

        `carried` [n, B] and `slices` [T, n, B] are given to `write` under their names. Returns the
        last of what it carries on, [n, B], and all that it hands out, [T, n, B].
        """
        outer, inner = self.b, self.b.nested()
        names = {name: inner.fresh(name) for name in (*carried, *slices)}
        with self.writing(inner):
            states, given = write(d, {name: self.term(own) for name, own in names.items()})
        elem_type = self.ctx.elem_type(self.like)
        matrix = InferredType(elem_type, (None, None))
        # Only what is read: a slice that is not would be copied for nothing.
        read = reads(inner.nodes) | dict.fromkeys(
            v.name for v in (*states.values(), *given.values())
        )
        there = {name: value for name, value in slices.items() if names[name] in read}
        graph = closed_graph(
            "steps",
            inner,
            [(names[name], matrix) for name in (*carried, *there)],
            [(value.name, matrix) for value in (*states.values(), *given.values())],
        )
        way = [int(d.backwards != back)]
        made = outer.add(
            "Scan",
            [value.name for value in (*carried.values(), *there.values())],
            len(states) + len(given),
            body=graph,
            num_scan_inputs=len(there),
            scan_input_directions=way * len(there),
            scan_output_directions=way * len(given),
        )
        ends, rows = made[: len(states)], made[len(states) :]
        self.ctx.types |= dict.fromkeys(ends, matrix)
        self.ctx.types |= dict.fromkeys(rows, InferredType(elem_type, (None, None, None)))
        return (
            {name: self.term(end) for name, end in zip(states, ends, strict=True)},
            {name: self.term(row) for name, row in zip(given, rows, strict=True)},
        )


# --- the three ops --------------------------------------------------------------------------------


class _Rnn(_Cell):
    """h' = f(W x + R h + b)."""

    GATES = 1
    DEFAULTS = ("Tanh",)
    parts = (1,)

    def forth(self, d: _Direction, v: Values) -> Step:
        (f,) = d.activations
        seen = self.joined(v["h"], v["x"])
        argument = self.product(d.blocks[0], seen)
        after = f.value(argument)
        factor = f.slope(argument, after)
        return {"h": self.carried(after, v["h"], v)}, {
            "y": self.inside(after, v),
            "seen": seen,
            "factor": self.inside(factor, v),
        }

    def back(self, d: _Direction, v: Values) -> Step:
        dh = self.arriving(v)
        gate = dh * v["factor"]
        return {"dh": self.handed_on(self.product(d.turned[-1], gate), dh, v)}, {"gates": gate}


class _Lstm(_Cell):
    """The gates i, o, f and the candidate g; c' = f c + i g, h' = o h(c')."""

    GATES = 4
    STATES = ("h", "c")
    DEFAULTS = ("Sigmoid", "Tanh", "Tanh")

    @property
    def parts(self) -> tuple[int, ...]:
        return (1, 1, 1, 1) if self.ctx.has(7) else (3, 1)

    def forth(self, d: _Direction, v: Values) -> Step:
        f, g, h = d.activations
        before, peep = v["c"], d.peepholes
        coupled = bool(self.ctx.attribute("input_forget", 0))
        seen = self.joined(v["h"], v["x"])
        to = [self.product(block, seen) for block in d.blocks]
        if peep is None:
            to_gates, to_g = to
            i, o, keep = self.split(f.value(to_gates), 1, 1, 1)
            to_i, to_o, to_f = self.split(to_gates, 1, 1, 1)  # read by few activations
        else:
            to_i, to_o, to_f, to_g = to
            to_i, to_f = to_i + before * peep[0], to_f + before * peep[2]
            i, keep = f.value(to_i), f.value(to_f)
        if coupled:
            keep = 1.0 - i
        new = g.value(to_g)
        kept, added = before * keep, i * new
        cell = kept + added
        if peep is not None:
            to_o = to_o + cell * peep[1]
            o = f.value(to_o)
        bounded = h.value(cell)
        y = o * bounded
        # What the gradients of c' and h' are multiplied by to get those of the gates' arguments.
        by_o = f.by_slope(bounded, to_o, o, y)
        if coupled:
            of_i = new - before
            by_i, by_f = f.by_slope(of_i, to_i, i, of_i * i), before * 0.0
        else:
            by_i, by_f = f.by_slope(new, to_i, i, added), f.by_slope(before, to_f, keep, kept)
        by_g = g.by_slope(i, to_g, new, added)
        into_c = h.by_slope(o, cell, bounded, y)
        given = {"y": self.inside(y, v), "seen": seen}
        if peep is not None:
            into_c = into_c + by_o * peep[1]
            keep = keep + by_i * peep[0] + by_f * peep[2]
            given |= {"cells": cell, "cells_before": before}
        after = {"h": self.carried(y, v["h"], v), "c": self.carried(cell, before, v)}
        return after, given | {
            "factors": self.inside(self.joined(by_i, by_o, by_f, by_g), v),
            "into_c": self.inside(into_c, v),
            "keep": self.kept(keep, v),
        }

    def back(self, d: _Direction, v: Values) -> Step:
        dh = self.arriving(v)
        dc = v["dc"] + dh * v["into_c"]
        gates = self.joined(dc, dh, dc, dc) * v["factors"]
        before = {
            "dh": self.handed_on(self.product(d.turned[-1], gates), dh, v),
            "dc": dc * v["keep"],
        }
        return before, {"gates": gates}


class _Gru(_Cell):
    """The gates z and r, and the candidate n; h' = (1 - z) n + z h."""

    GATES = 3
    DEFAULTS = ("Sigmoid", "Tanh")
    parts = (2, 1)

    def __init__(self, ctx: VjpContext) -> None:
        super().__init__(ctx)
        self.reset_after = bool(ctx.attribute("linear_before_reset", 0))

    def bias(self, d: _Direction) -> Term | None:
        if d.wb is None or d.rb is None or not self.reset_after:
            return super().bias(d)
        of_gates, of_n = self.split(d.rb, 2, 1, axis=0)
        d.late = of_n.op("Unsqueeze", self.ints(1))
        first, last = self.split(d.wb, 2, 1, axis=0)
        return self.joined(first + of_gates, last, axis=0)

    def forth(self, d: _Direction, v: Values) -> Step:
        f, g = d.activations
        h, x = v["h"], v["x"]
        seen = self.joined(h, x)
        to_gates = self.product(d.blocks[0], seen)
        z, r = self.split(f.value(to_gates), 1, 1)
        to_z, to_r = self.split(to_gates, 1, 1)  # read by few activations
        if self.reset_after:
            h_n = self.product(d.blocks_r[1], h, d.late)
            reset = r * h_n
            to_n = self.product(d.blocks_w[1], x) + reset
        else:
            reset = r * h
            reset_seen = self.joined(reset, x)
            to_n = self.product(d.blocks[1], reset_seen)
        n = g.value(to_n)
        off = h - n
        mixed = z * off
        after = n + mixed
        rest = 1.0 - z
        by_n = g.by_slope(rest, to_n, n, rest * n)
        by_z = f.by_slope(off, to_z, z, mixed)
        given = {"y": self.inside(after, v), "keep": self.kept(z, v), "by_n": self.inside(by_n, v)}
        if self.reset_after:
            by_r = f.by_slope(by_n * h_n, to_r, r, by_n * reset)
            factors = self.joined(by_z, by_r, by_n * r)
            given |= {"factors": self.inside(factors, v), "before": h}
        else:
            by_r = f.by_slope(h, to_r, r, reset)
            factors = self.joined(by_z, by_r)
            given |= {"factors": self.inside(factors, v), "r": r}
            given |= {"seen": seen, "reset_seen": reset_seen}
        return {"h": self.carried(after, h, v)}, given

    def back(self, d: _Direction, v: Values) -> Step:
        dh = self.arriving(v)
        of_n, handed_on = dh * v["by_n"], dh * v["keep"]
        if self.reset_after:
            gates = self.joined(dh, dh, dh) * v["factors"]
            before = self.product(d.turned[-1], gates, handed_on)
        else:
            for_gates, for_n, _ = d.turned
            into = self.product(for_n, of_n)
            gates = self.joined(dh, into) * v["factors"]
            before = self.product(for_gates, gates, handed_on) + into * v["r"]
        return {"dh": before}, {"gates": gates, "of_n": of_n}

    def weights(self, d: _Direction, found: Values) -> tuple[Term, Term, Term, Term]:
        gates, of_n = found["gates"], found["of_n"]
        if self.reset_after:
            of_gates, _ = self.split(gates, *self.parts)
            of_x = self.joined(of_gates, of_n)
            r = self.of_matrix(gates, d.kept["before"])
            return of_x, gates, r, self.of_matrix(of_x, self.unrolled.x)
        matrix = self.joined(
            self.of_matrix(gates, d.kept["seen"]),
            self.of_matrix(of_n, d.kept["reset_seen"]),
            axis=0,
        )
        of_all = self.joined(gates, of_n)
        return of_all, of_all, *self.columns(matrix)


@vjp("LSTM", constant_inputs={4})
def _lstm(ctx: VjpContext) -> Grads:
    return _Lstm(ctx).grads()


@vjp("GRU", constant_inputs={4})
def _gru(ctx: VjpContext) -> Grads:
    return _Gru(ctx).grads()


@vjp("RNN", constant_inputs={4})
def _rnn(ctx: VjpContext) -> Grads:
    return _Rnn(ctx).grads()
