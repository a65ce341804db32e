"""Gradient rules of LSTM, GRU and RNN.

Rule: where the gradient is wanted, the op is written as a Scan that hands out, beside the states,
the factors that a gradient is multiplied by on its way back through each step. The way back is a
second Scan, with little more than one matrix product per step. All that does not depend on the
step before is worked out for all steps at once: the share of the inputs in the gates in front of
the loop, and the gradients of weights and inputs behind it.

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

from bbnode.components.autodiff.builder import INT64, GraphBuilder, InferredType, first_output
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

    def by_slope(self, scale: Term, x: Term, y: Term) -> Term:
        """Return `scale` times the slope; of tanh from the product scale * y, often there."""
        if self.name == "tanh":
            return scale - scale * y * y
        if self.name == "sigmoid":
            return scale * (y - y * y)
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
        w, r: [G H, I] and [G H, H]; `turned` is r transposed.
        wb, rb: the biases, [G H], or None.
        peepholes: those of i, o and f, [H] each, or None.
        activations: in the order of the op.
        kept: what the forward loop handed out, [T, B, any].
    """

    number: int
    backwards: bool
    w: Term
    r: Term
    turned: Term
    wb: Term | None
    rb: Term | None
    peepholes: list[Term] | None
    activations: tuple[_Activation, ...]
    kept: dict[str, Term] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class _Unrolled:
    """The forward node written as loops, for all sweeps over the graph.

    Attributes:
        made: the loops, and what they read.
        own: the outputs of the forward node.
        x: the inputs, [T, B, I].
        mask: 1 where a step is in its sequence, 0 behind the end, [T, B, 1]; None where all are
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

    @abstractmethod
    def bias(self, d: _Direction) -> Term | None:
        """Return the bias that all steps have in common with the inputs' share, [G H]."""

    @abstractmethod
    def forth(self, d: _Direction, v: Values) -> Step:
        """Emit a step: of `x`, the inputs' share in the gates, and of the states.

        Hands out the factors for `back`.
        """

    @abstractmethod
    def back(self, d: _Direction, v: Values) -> Step:
        """Emit a step back: of `dh` (`dc`), gradients of the states after it.

        Hands out `gates`: gradients of the arguments of the gates.
        """

    def shares(self, d: _Direction, found: Values) -> tuple[Term, Term]:
        """Return the gradients of the inputs' and the states' share in the gates, [T, B, G H]."""
        return found["gates"], found["gates"]

    def state_weights(self, d: _Direction, of_h: Term) -> Term:
        """Return the gradient of R, [G H, H]."""
        return self.weights(of_h, d.kept["before"])

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

    def rows(self, value: Term, width: int) -> Term:
        """Return [T, B, width] as [T B, width]."""
        return value.op("Reshape", self.ints(-1, width))

    def steps(self, value: Term, like: Term) -> Term:
        """Return [T B, width] as [T, B, width], with T and B of `like`, [T, B, any]."""
        ends = self.term(self.b.op("Shape", like.name, start=0, end=2))
        return value.op("Reshape", ends.op("Concat", self.ints(-1), axis=0))

    def split(self, value: Term, *parts: int) -> list[Term]:
        """Return parts of the last axis, so many times H wide."""
        sizes = self.b.ints([part * self.hidden for part in parts])
        return [
            self.term(n) for n in self.b.emit("Split", [value.name, sizes], len(parts), axis=-1)
        ]

    def joined(self, *values: Term, axis: int = -1) -> Term:
        first, *others = values
        return first.op("Concat", *others, axis=axis)

    def weights(self, gates: Term, values: Term) -> Term:
        """Return the gradient of a matrix that values [T, B, n] are multiplied by: [any, n]."""
        n = self.size if values.name == self.unrolled.x.name else self.hidden
        return self.flat(gates).op("Gemm", self.rows(values, n), transA=1)

    def flat(self, gates: Term) -> Term:
        """Return [T, B, n] as [T B, n]."""
        return gates.op("Flatten", axis=2)

    def sum(self, value: Term) -> Term:
        """Return the sum over all steps and sequences, [n]."""
        return value.op("ReduceSum", self.ints(0, 1), keepdims=0)

    def through(self, h: Term, turned: Term, share: Term | None) -> Term:
        """Return what a state contributes to the gates, and a share that is added."""
        return h.op("Gemm", turned, *([] if share is None else [share]))

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
        key = first_output(ctx.node)
        known = ctx.b.instead.get(key)
        if not isinstance(known, _Unrolled):
            known = ctx.b.instead[key] = self._unroll()
        self.unrolled = known
        found = [self._sweep(d) for d in known.directions]
        grads: list[str | None] = [None] * len(ctx.inputs)
        if ctx.wants(0):
            total = found[0]["x"]
            for other in found[1:]:
                total = total + other["x"]
            grads[0] = (total.op("Transpose", perm=[1, 0, 2]) if self.batch_first else total).name
        for position, kind in ((1, "w"), (2, "r"), (3, "b"), (5, "dh"), (6, "dc"), (7, "p")):
            if ctx.wants(position):
                axis = 1 if self.batch_first and kind in ("dh", "dc") else 0
                parts = [each[kind].op("Unsqueeze", self.ints(axis)) for each in found]
                grads[position] = self.joined(*parts, axis=axis).name
        return grads

    def _unroll(self) -> _Unrolled:
        """Write the node as loops, which give its outputs, and what the way back reads."""
        ctx, outer = self.ctx, self.ctx.b
        forward = outer.nested()
        with self.writing(forward):
            x = self._time_first(ctx.inputs[0], [1, 0, 2])
            directions = [self._direction(number) for number in range(len(self.ways))]
            mask = self._mask(x)
            outputs: list[list[Term]] = [[] for _ in range(3)]
            for d in directions:
                share = self.rows(x, self.size).op(
                    "Gemm", d.w, *([] if (bias := self.bias(d)) is None else [bias]), transB=1
                )
                states = {
                    name: self._state(d, 5 + at, None, x) for at, name in enumerate(self.STATES)
                }
                slices = {"x": self.steps(share, x)} | ({} if mask is None else {"mask": mask})
                last, given = self._loop(d, states, slices, self.forth, back=False)
                d.kept = {name: value for name, value in given.items() if name != "y"}
                outputs[0].append(given["y"])
                for at, state in enumerate(last.values()):
                    outputs[1 + at].append(state)
            for at, (name, parts) in enumerate(zip(ctx.node.output, outputs, strict=False)):
                if name:
                    axis = 1 if at == 0 else 0
                    both = [part.op("Unsqueeze", self.ints(axis)) for part in parts]
                    end = self.joined(*both, axis=axis)
                    if self.batch_first:
                        end = end.op("Transpose", perm=[2, 0, 1, 3] if at == 0 else [1, 0, 2])
                    forward.nodes.append(make_node("Identity", [end.name], [name], name=name))
        outer.initializers += forward.initializers
        return _Unrolled(
            made=forward.nodes,
            own=frozenset(ctx.node.output),
            x=x,
            mask=mask,
            directions=directions,
        )

    def _direction(self, number: int) -> _Direction:
        ctx = self.ctx
        wb = rb = peepholes = None
        if ctx.has(3):
            wb, rb = self.split(self._of(self.term(ctx.inputs[3]), number), self.GATES, self.GATES)
        if ctx.has(7):
            peepholes = self.split(self._of(self.term(ctx.inputs[7]), number), 1, 1, 1)
        r = self._of(self.term(ctx.inputs[2]), number)
        return _Direction(
            number=number,
            backwards=self.ways[number],
            w=self._of(self.term(ctx.inputs[1]), number),
            r=r,
            turned=r.op("Transpose", perm=[1, 0]),
            wb=wb,
            rb=rb,
            peepholes=peepholes,
            activations=self.activations[number],
        )

    def _sweep(self, d: _Direction) -> Values:
        """Emit the way back through one direction; returns the gradients of the inputs."""
        ctx, x, mask = self.ctx, self.unrolled.x, self.unrolled.mask
        grads = [*ctx.grads, None, None, None]
        flows = {
            f"d{name}": self._state(d, None, grads[1 + at], x)
            for at, name in enumerate(self.STATES)
        }
        slices = dict(d.kept)
        if grads[0] is not None:
            slices["dy"] = self._of(self._time_first(grads[0], [1, 2, 0, 3]), d.number, axis=1)
        if mask is not None:
            slices["mask"] = mask
        first, found = self._loop(d, flows, slices, self.back, back=True)
        of_x, of_h = self.shares(d, found)
        made = {
            **first,
            "x": of_x.op("MatMul", d.w),
            "w": self.weights(of_x, x),
            "r": self.state_weights(d, of_h),
            "b": self.joined(self.sum(of_x), self.sum(of_h), axis=0),
        }
        if d.peepholes is not None:
            of_i, of_o, of_f, _ = self.split(of_h, 1, 1, 1, 1)
            cells, before = d.kept["cells"], d.kept["cells_before"]
            parts = [of_i * before, of_o * cells, of_f * before]
            made["p"] = self.joined(*(self.sum(part) for part in parts), axis=0)
        return made

    def _of(self, value: Term, number: int, axis: int = 0) -> Term:
        """Return what belongs to one direction."""
        if len(self.ways) == 1:
            return value.op("Squeeze", self.ints(axis))
        index = self.term(self.b.constant(np.asarray(number, np.int64), "direction"))
        return value.op("Gather", index, axis=axis)

    def _state(self, d: _Direction, position: int | None, name: str | None, x: Term) -> Term:
        """Return an input, or a value of its shape, of one direction, [B, H]; zeros without."""
        if position is not None and self.ctx.has(position):
            name = self.ctx.inputs[position]
        if name is not None:
            return self._of(self._time_first(name, [1, 0, 2]), d.number)
        batch = self.term(self.b.op("Shape", x.name, start=1, end=2))
        shape = batch.op("Concat", self.ints(self.hidden), axis=0)
        return self.term(self.ctx.scalar(0.0, self.like)).op("Expand", shape)

    def _time_first(self, name: str, perm: list[int]) -> Term:
        """Return a value with the batch not in front; `perm` is for one that has it there."""
        value = self.term(name)
        return value.op("Transpose", perm=perm) if self.batch_first else value

    def _mask(self, x: Term) -> Term | None:
        """Return 1 where a step is in its sequence, 0 behind the end, [T, B, 1]."""
        if not self.ctx.has(4):
            return None
        steps = self.b.op("Squeeze", self.b.op("Shape", x.name, start=0, end=1))
        zero, one = (self.b.constant(np.asarray(n, np.int64), "number") for n in (0, 1))
        number = self.term(self.b.op("Range", zero, steps, one)).op("Unsqueeze", self.ints(1, 2))
        length = self.term(self.b.op("Cast", self.ctx.inputs[4], to=INT64))
        inside = number.op("Less", length.op("Unsqueeze", self.ints(0, 2)))
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

        `carried` [B, n] and `slices` [T, B, n] are given to `write` under their names. Returns the
        last of what it carries on, [B, n], and all that it hands out, [T, B, n].
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


def _sum_of(a: Term | None, c: Term | None) -> Term | None:
    return None if a is None or c is None else a + c


# --- the three ops --------------------------------------------------------------------------------


class _Rnn(_Cell):
    """h' = f(x W + h R + b)."""

    GATES = 1
    DEFAULTS = ("Tanh",)

    def bias(self, d: _Direction) -> Term | None:
        return _sum_of(d.wb, d.rb)

    def forth(self, d: _Direction, v: Values) -> Step:
        (f,) = d.activations
        argument = self.through(v["h"], d.turned, v["x"])
        after = f.value(argument)
        factor = f.slope(argument, after)
        return {"h": self.carried(after, v["h"], v)}, {
            "y": self.inside(after, v),
            "before": v["h"],
            "factor": self.inside(factor, v),
        }

    def back(self, d: _Direction, v: Values) -> Step:
        dh = self.arriving(v)
        gate = dh * v["factor"]
        return {"dh": self.handed_on(gate.op("MatMul", d.r), dh, v)}, {"gates": gate}


class _Lstm(_Cell):
    """The gates i, o, f and the candidate g; c' = f c + i g, h' = o h(c')."""

    GATES = 4
    STATES = ("h", "c")
    DEFAULTS = ("Sigmoid", "Tanh", "Tanh")

    def bias(self, d: _Direction) -> Term | None:
        return _sum_of(d.wb, d.rb)

    def forth(self, d: _Direction, v: Values) -> Step:
        f, g, h = d.activations
        before, peep = v["c"], d.peepholes
        coupled = bool(self.ctx.attribute("input_forget", 0))
        all_gates = self.through(v["h"], d.turned, v["x"])
        if peep is None:
            to_gates, to_g = self.split(all_gates, 3, 1)
            gates = f.value(to_gates)
            i, o, keep = self.split(gates, 1, 1, 1)
        else:
            to_i, to_o, to_f, to_g = self.split(all_gates, 1, 1, 1, 1)
            to_i, to_f = to_i + before * peep[0], to_f + before * peep[2]
            i, keep = f.value(to_i), f.value(to_f)
        if coupled:
            keep = 1.0 - i
        new = g.value(to_g)
        cell = before * keep + i * new
        if peep is not None:
            to_o = to_o + cell * peep[1]
            o = f.value(to_o)
            to_gates, gates = self.joined(to_i, to_o, to_f), self.joined(i, o, keep)
        bounded = h.value(cell)
        # What the gradients of c' and h' are multiplied by to get those of the gates' arguments.
        of_i, of_f = (new - before, before * 0.0) if coupled else (new, before)
        factors = f.by_slope(self.joined(of_i, bounded, of_f), to_gates, gates)
        into_c = h.by_slope(o, cell, bounded)
        by_g = g.by_slope(i, to_g, new)
        given = {"y": self.inside(o * bounded, v), "before": v["h"]}
        if peep is not None:
            by_i, by_o, by_f = self.split(factors, 1, 1, 1)
            into_c = into_c + by_o * peep[1]
            keep = keep + by_i * peep[0] + by_f * peep[2]
            given |= {"cells": cell, "cells_before": before}
        after = {
            "h": self.carried(o * bounded, v["h"], v),
            "c": self.carried(cell, before, v),
        }
        return after, given | {
            "factors": self.inside(self.joined(factors, by_g), v),
            "into_c": self.inside(into_c, v),
            "keep": self.kept(keep, v),
        }

    def back(self, d: _Direction, v: Values) -> Step:
        dh = self.arriving(v)
        dc = v["dc"] + dh * v["into_c"]
        gates = self.joined(dc, dh, dc, dc) * v["factors"]
        before = {
            "dh": self.handed_on(gates.op("MatMul", d.r), dh, v),
            "dc": dc * v["keep"],
        }
        return before, {"gates": gates}


class _Gru(_Cell):
    """The gates z and r, and the candidate n; h' = (1 - z) n + z h."""

    GATES = 3
    DEFAULTS = ("Sigmoid", "Tanh")

    def __init__(self, ctx: VjpContext) -> None:
        super().__init__(ctx)
        self.reset_after = bool(ctx.attribute("linear_before_reset", 0))

    def bias(self, d: _Direction) -> Term | None:
        return d.wb if self.reset_after else _sum_of(d.wb, d.rb)

    def forth(self, d: _Direction, v: Values) -> Step:
        f, g = d.activations
        x, h = v["x"], v["h"]
        of_x, x_n = self.split(x, 2, 1)
        if self.reset_after:
            of_h, h_n = self.split(self.through(h, d.turned, d.rb), 2, 1)
            to_gates = of_x + of_h
        else:
            for_gates, for_n = self.split(d.turned, 2, 1)
            to_gates = self.through(h, for_gates, of_x)
        gates = f.value(to_gates)
        z, r = self.split(gates, 1, 1)
        to_n = x_n + r * h_n if self.reset_after else self.through(r * h, for_n, x_n)
        n = g.value(to_n)
        after = n + z * (h - n)
        by_n = g.by_slope(1.0 - z, to_n, n)
        given = {"y": self.inside(after, v), "before": h, "keep": self.kept(z, v)}
        if self.reset_after:
            factors = self.joined(
                f.by_slope(self.joined(h - n, by_n * h_n), to_gates, gates), by_n * r
            )
            given |= {"factors": self.inside(factors, v), "by_n": self.inside(by_n, v)}
        else:
            factors = f.by_slope(self.joined(h - n, h), to_gates, gates)
            given |= {"factors": self.inside(factors, v), "by_n": self.inside(by_n, v), "r": r}
            given["reset"] = r * h
        return {"h": self.carried(after, h, v)}, given

    def back(self, d: _Direction, v: Values) -> Step:
        dh = self.arriving(v)
        if self.reset_after:
            gates = self.joined(dh, dh, dh) * v["factors"]
            before = gates.op("MatMul", d.r) + dh * v["keep"]
            return {"dh": before}, {"gates": gates, "of_n": dh * v["by_n"]}
        for_gates, for_n = (self.term(name) for name in self._parts(d))
        of_n = dh * v["by_n"]
        into = of_n.op("MatMul", for_n)
        gates = self.joined(dh, into) * v["factors"]
        before = gates.op("MatMul", for_gates) + into * v["r"] + dh * v["keep"]
        return {"dh": before}, {"gates": gates, "of_n": of_n}

    def shares(self, d: _Direction, found: Values) -> tuple[Term, Term]:
        if self.reset_after:
            of_z, of_r, _ = self.split(found["gates"], 1, 1, 1)
            return self.joined(of_z, of_r, found["of_n"]), found["gates"]
        gates = self.joined(found["gates"], found["of_n"])
        return gates, gates

    def state_weights(self, d: _Direction, of_h: Term) -> Term:
        if self.reset_after:
            return super().state_weights(d, of_h)
        gates, of_n = self.split(of_h, 2, 1)
        return self.joined(
            self.weights(gates, d.kept["before"]), self.weights(of_n, d.kept["reset"]), axis=0
        )

    def _parts(self, d: _Direction) -> list[str]:
        """Return what of R belongs to z and r, [2 H, H], and to n, [H, H]."""
        sizes = self.b.ints([2 * self.hidden, self.hidden])
        return self.b.emit("Split", [d.r.name, sizes], 2, axis=0)


@vjp("LSTM", constant_inputs={4})
def _lstm(ctx: VjpContext) -> Grads:
    return _Lstm(ctx).grads()


@vjp("GRU", constant_inputs={4})
def _gru(ctx: VjpContext) -> Grads:
    return _Gru(ctx).grads()


@vjp("RNN", constant_inputs={4})
def _rnn(ctx: VjpContext) -> Grads:
    return _Rnn(ctx).grads()
