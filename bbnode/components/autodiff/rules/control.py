"""Gradient rules of If, Scan and Loop.

Rule: the gradient of a branch is the branch that was taken, run again and swept back. The
gradient of a loop is a loop in the opposite direction: the forward loop is written so that it also
hands out, for each step, the values that the sweep of its body reads, and the loop back takes them
step by step. Gradients of what a body reads from around it are summed over all steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from onnx import GraphProto, NodeProto, TensorProto, numpy_helper

from bbnode.components.autodiff.builder import (
    FLOATS,
    INT64,
    UNKNOWN,
    GraphBuilder,
    InferredType,
    captured_names,
    first_output,
    prune,
)
from bbnode.components.autodiff.errors import GradientRuleError
from bbnode.components.autodiff.nested import (
    NestedBody,
    body_of,
    closed_graph,
    loop_types,
    reads,
    seeds_of,
)
from bbnode.components.autodiff.reverse import active_values, pull_back, zeros_like
from bbnode.components.autodiff.table import VjpContext, vjp

Grads = Sequence[str | None]

# Ops of gradients that may leave a loop where they read nothing that it changes: they cannot fail.
_MOVABLE = frozenset({"Cast", "Identity", "Neg", "Shape", "Size", "Transpose"})


@vjp("If", constant_inputs={0})
def _if(ctx: VjpContext) -> Grads:
    bodies = [body_of(ctx, name) for name in ("then_branch", "else_branch")]
    read = dict.fromkeys(name for body in bodies for name in body.captured)
    wanted = [name for name in read if ctx.varies(name)]
    graphs: list[GraphProto] = []
    for body, name in zip(bodies, ("then", "else"), strict=True):
        inner = ctx.b.nested()
        types = body.types(inner, ctx.types, {})
        seeds = seeds_of(inner, body.outputs, ctx.grads)
        found = pull_back(inner, body.nodes, types, seeds, wanted)
        ends = [(found[each], ctx.types[each]) for each in wanted]
        graphs.append(closed_graph(name, inner, [], ends, body.nodes, body.tensors))
    then, otherwise = graphs
    grads = ctx.b.add("If", ctx.inputs, len(wanted), then_branch=then, else_branch=otherwise)
    ctx.captured += zip(wanted, grads, strict=True)
    return [None]


@dataclass(slots=True, kw_only=True)
class _Loop:
    """A Scan or Loop of the forward graph, and what its gradients ask it to hand out.

    Attributes:
        node: of the forward graph.
        body: of it, under names of its own.
        inner: where the gradient of the body is emitted; all sweeps over the graph share it.
        types: of values in the body and around it.
        varying: formals and captured values with a gradient.
        kept: values in the body that are handed out step by step, to the names outside.
        moved: values that a loop back needs and that stand before it.
    """

    node: NodeProto
    body: NestedBody
    inner: GraphBuilder
    types: dict[str, InferredType]
    varying: set[str]
    kept: dict[str, str] = field(default_factory=dict)
    moved: set[str] = field(default_factory=set)

    def names(self) -> list[str]:
        return [*self.kept.values()]

    def nodes(self) -> list[NodeProto]:
        """Return the node with an output for each value that is kept."""
        made = NodeProto()
        made.CopyFrom(self.node)
        leading = 1 if made.op_type == "Loop" else 0  # the condition is no output of the node
        short = len(self.body.outputs) - leading - len(made.output)
        made.output.extend([*[""] * short, *self.kept.values()])
        given = [(name, self.types[name]) for name in (*self.body.outputs, *self.kept)]
        # Only what the body itself makes: the gradient's nodes are pruned away.
        graph = closed_graph(
            "body", self.inner, self.body.formals, given, self.body.nodes, self.body.tensors
        )
        for attribute in made.attribute:
            if attribute.name == "body":
                attribute.g.CopyFrom(graph)
            elif attribute.name in ("scan_output_axes", "scan_output_directions"):
                attribute.ints.extend([0] * len(self.kept))
        return [made]

    def keep(self, ctx: VjpContext, value: str) -> str:
        """Return the name outside of a value of the body at all steps, [steps, ...]."""
        name = self.kept.get(value)
        if name is None:
            kind = self.types.get(value)
            if kind is None or kind.elem_type == 0 or kind.dims is None:
                raise self.unknown(ctx, value)
            name = self.kept[value] = ctx.b.fresh(f"kept/{value}")
            ctx.types[name] = InferredType(kind.elem_type, (None, *kind.dims))
        return name

    def unknown(self, ctx: VjpContext, value: str) -> GradientRuleError:
        """Return the error of a value in the body that has to be known, and is not."""
        return ctx.error(
            f"the type or rank of {value.removeprefix('d/')!r} in its body is unknown",
            "give the model's inputs shapes, and let no step of the loop change the rank of a "
            "value that it carries",
        )


def _loop_of(ctx: VjpContext, leading: int, carried: int, initial: Sequence[str]) -> _Loop:
    """Return what is known of the loop, from an earlier sweep or found out now.

    `leading` formals and outputs stand before the `carried` ones only in Loop: the iteration's
    number and the condition, of which the condition is an output.
    """
    return ctx.instead(_Loop, lambda: _new_loop(ctx, leading, carried, initial))


def _new_loop(ctx: VjpContext, leading: int, carried: int, initial: Sequence[str]) -> _Loop:
    body = body_of(ctx, "body")
    inner = ctx.b.nested()
    states = [name for name, _ in body.formals[leading : leading + carried]]
    ends = body.outputs[leading // 2 : leading // 2 + carried]
    kinds = [ctx.type_of(value) for value in initial]
    slices = _per_step(ctx, body, leading + carried)
    types = loop_types(inner, body, ctx.types, kinds, leading, slices)
    for name, _ in body.formals:
        if types[name].elem_type == 0:
            raise ctx.error(
                f"{name.removeprefix('d/')!r} in its body is no tensor of a known type",
                "carry tensors, and give the model's inputs types",
            )
    given = {name for name in body.captured if ctx.varies(name)}
    given |= {s for s, value in zip(states, initial, strict=True) if ctx.varies(value)}
    xs = [name for name, _ in body.formals[leading + carried :]]
    given |= {x for x, value in zip(xs, ctx.inputs[carried:], strict=False) if ctx.varies(value)}
    while True:
        varying = active_values(body.nodes, types, given)
        more = {
            state
            for state, end in zip(states, ends, strict=True)
            if end in varying and types[state].elem_type in FLOATS
        }
        if more <= given:
            break
        given |= more
    return _Loop(
        node=ctx.node,
        # Declared with what is known now: a runtime wants to know the ranks.
        body=replace(body, formals=tuple((name, types[name]) for name, _ in body.formals)),
        inner=inner,
        types=types,
        varying=given,
    )


def _per_step(ctx: VjpContext, body: NestedBody, first: int) -> dict[str, InferredType]:
    """Return the types of the slices that a Scan gives its body."""
    made: dict[str, InferredType] = {}
    slices = body.formals[first:]
    if not slices:
        return made
    axes = list(ctx.attribute("scan_input_axes", [0] * len(slices)))
    values = ctx.inputs[-len(slices) :]
    for (name, declared), value, axis in zip(slices, values, axes, strict=True):
        kind = ctx.type_of(value)
        if kind.dims is None:
            made[name] = declared
        else:
            place = axis % max(len(kind.dims), 1)
            dims = tuple(dim for at, dim in enumerate(kind.dims) if at != place)
            made[name] = InferredType(kind.elem_type, dims)
    return made


@dataclass(slots=True, kw_only=True)
class _Way:
    """A value of each step that the loop back reads, with the axis and the direction of steps.

    `formal` is its name in the body, `value` that of all steps outside.
    """

    formal: str
    value: str
    axis: int = 0
    backwards: int = 0  # 1 if the forward loop takes or gives the last slice first


@vjp("Scan")
def _scan(ctx: VjpContext) -> Grads:
    count = int(ctx.attribute("num_scan_inputs", 0))
    carried = len(ctx.inputs) - count
    loop = _loop_of(ctx, 0, carried, ctx.inputs[:carried])
    given = len(loop.body.outputs) - carried
    axes = list(ctx.attribute("scan_input_axes", [0] * count))
    directions = list(ctx.attribute("scan_input_directions", [0] * count))
    taken = [
        _Way(formal=formal, value=value, axis=axis, backwards=way)
        for (formal, _), value, axis, way in zip(
            loop.body.formals[carried:], ctx.inputs[carried:], axes, directions, strict=True
        )
    ]
    out_axes = list(ctx.attribute("scan_output_axes", [0] * given))
    out_ways = list(ctx.attribute("scan_output_directions", [0] * given))
    back = _Back(ctx, loop, 0, carried, taken, list(zip(out_axes, out_ways, strict=True)))
    return back.hand_out(back.scan(ctx.b, back.starts(ctx.inputs[:carried])))


@vjp("Loop", constant_inputs={0, 1})
def _loop(ctx: VjpContext) -> Grads:
    initial = ctx.inputs[2:]
    carried = len(initial)
    loop = _loop_of(ctx, 2, carried, initial)
    given = len(loop.body.outputs) - 1 - carried
    back = _Back(ctx, loop, 2, carried, [], [(0, 0)] * given)
    return [None, None, *back.hand_out(back.scan_if_any(back.starts(initial)))]


class _Back:
    """The loop back of one sweep."""

    def __init__(
        self,
        ctx: VjpContext,
        loop: _Loop,
        leading: int,
        carried: int,
        taken: Sequence[_Way],
        given: Sequence[tuple[int, int]],
    ) -> None:
        self.ctx = ctx
        self.loop = loop
        body, inner = loop.body, loop.inner
        states = [name for name, _ in body.formals[leading : leading + carried]]
        ends = body.outputs[leading // 2 :]
        self.states = states
        self.moving = [state for state in states if state in loop.varying]
        self.summed = [name for name in body.captured if name in loop.varying]
        self.sliced = [way for way in taken if way.formal in loop.varying]
        types = loop.types

        # The gradients that each step takes: of the carried values, and of what it hands out.
        self.flowing = {state: inner.fresh(f"flow/{state}") for state in self.moving}
        grads: list[str | None] = [self.flowing.get(state) for state in states]
        self.ways: list[_Way] = []
        node_grads = [*ctx.grads, *[None] * (len(ends) - len(ctx.grads))]
        for end, grad, (axis, backwards) in zip(
            ends[carried:], node_grads[carried:], given, strict=True
        ):
            formal = None
            if grad is not None:
                formal = inner.fresh(f"step/{end}")
                types[formal] = types[end]
                self.ways.append(_Way(formal=formal, value=grad, axis=axis, backwards=backwards))
            grads.append(formal)
        wanted = [*self.moving, *self.summed, *(way.formal for way in self.sliced)]
        seeds = seeds_of(inner, ends, grads)
        found = pull_back(inner, body.nodes, types, seeds, wanted)

        # The sums over all steps so far.
        self.sums = {name: inner.fresh(f"sum/{name}") for name in self.summed}
        self.ends: list[tuple[str, InferredType]] = [(found[s], types[s]) for s in self.moving]
        for name, total in self.sums.items():
            self.ends.append((inner.op("Add", total, found[name]), types[name]))
        self.ends += [(found[way.formal], types[way.formal]) for way in self.sliced]
        for name, (_, kind) in zip(wanted, self.ends, strict=True):
            if kind.dims is None:
                raise loop.unknown(ctx, name)
        self.taken = {way.formal: way for way in taken}
        self.nodes: list[NodeProto] = []
        self.tensors: list[TensorProto] = []
        self._choose()
        self._leave_the_loop()
        if not self.ways:  # something has to say how many steps there are
            formal = body.formals[0][0]
            self.ways.append(
                taken[0] if taken else _Way(formal=formal, value=loop.keep(ctx, formal))
            )
        self.node_grads = node_grads

    def _choose(self) -> None:
        """Part what the sweep of the body reads into what is kept, taken and made again."""
        loop = self.loop
        body, inner = loop.body, loop.inner
        varying = {name for name, _ in body.formals}
        forward: list[NodeProto] = []
        for node in body.nodes:
            other = inner.instead.get(first_output(node))
            forward += [node] if other is None else other.nodes()
        for node in forward:
            if not varying.isdisjoint(captured_names(node)):
                varying.update(node.output)
        sweep, constants = prune(inner.nodes, inner.initializers, [name for name, _ in self.ends])
        shapes: list[TensorProto] = []
        remaining: list[NodeProto] = []
        for node in sweep:
            if node.op_type != "Shape" or node.input[0] not in varying:
                remaining.append(node)
            elif (known := self._shape(node)) is not None:
                shapes.append(known)
            else:  # the forward loop finds it, so that not all of the value is kept for it
                varying.add(node.output[0])
        needed = reads(remaining)
        needed.update((name, None) for name, _ in self.ends)
        again, tensors = prune(
            [node for node in forward if varying.isdisjoint(node.output)],
            [*body.tensors, *inner.initializers],
            needed,
        )
        self.nodes = [*again, *remaining]
        held = {tensor.name: tensor for tensor in (*tensors, *constants, *shapes)}
        self.tensors = [*held.values()]
        for name in needed:
            if name in self.taken:
                self.ways.append(self.taken[name])
            elif name in varying:
                self.ways.append(_Way(formal=name, value=loop.keep(self.ctx, name)))

    def _shape(self, node: NodeProto) -> TensorProto | None:
        """Return the shape that a node of the sweep finds, where it is known; note its type."""
        kind = self.loop.types.get(node.input[0], UNKNOWN)
        if kind.dims is None:
            raise self.loop.unknown(self.ctx, node.input[0])
        bounds = {attribute.name: int(attribute.i) for attribute in node.attribute}
        dims = kind.dims[bounds.get("start", 0) : bounds.get("end")]
        self.loop.types[node.output[0]] = InferredType(INT64, (len(dims),))
        sizes = [dim for dim in dims if isinstance(dim, int)]
        if len(sizes) < len(dims):
            return None
        return numpy_helper.from_array(np.asarray(sizes, np.int64), node.output[0])

    def _leave_the_loop(self) -> None:
        """Move what is the same at each step, and can't fail, to where the loop stands."""
        inside = {*self.flowing.values(), *self.sums.values(), *(way.formal for way in self.ways)}
        inside.update(tensor.name for tensor in self.tensors)
        stay: list[NodeProto] = []
        for node in self.nodes:
            if node.op_type in _MOVABLE and inside.isdisjoint(node.input):
                if node.output[0] not in self.loop.moved:
                    self.loop.moved.add(node.output[0])
                    self.ctx.b.nodes.append(node)
            else:
                inside.update(node.output)
                stay.append(node)
        self.nodes = stay

    def scan(self, b: GraphBuilder, starts: Sequence[str]) -> list[str]:
        """Emit the Scan that goes back; returns the gradients in the order of `ends`."""
        types = self.loop.types
        flows = [(self.flowing[state], types[state]) for state in self.moving]
        sums = [(self.sums[name], types[name]) for name in self.summed]
        slices = [(way.formal, types[way.formal]) for way in self.ways]
        graph = closed_graph(
            "back",
            self.loop.inner.nested(),
            [*flows, *sums, *slices],
            self.ends,
            self.nodes,
            self.tensors,
        )
        settings: dict[str, list[int]] = {}
        if self.sliced:
            settings["scan_output_axes"] = [way.axis for way in self.sliced]
            settings["scan_output_directions"] = [1 - way.backwards for way in self.sliced]
        return b.add(
            "Scan",
            [*starts, *(way.value for way in self.ways)],
            len(self.ends),
            body=graph,
            num_scan_inputs=len(self.ways),
            scan_input_axes=[way.axis for way in self.ways],
            scan_input_directions=[1 - way.backwards for way in self.ways],
            **settings,
        )

    def scan_if_any(self, starts: Sequence[str]) -> list[str]:
        """Emit the same for a loop that may make no step at all, where a Scan may fail."""
        b = self.ctx.b
        steps = b.op("Shape", self.ways[0].value, start=0, end=1)
        some = b.op("Greater", b.op("Squeeze", steps), b.constant(np.asarray(0, np.int64)))
        inner = b.nested()
        made = self.scan(inner, starts)
        kinds = [kind for _, kind in self.ends]
        then = closed_graph("steps", inner, [], list(zip(made, kinds, strict=True)))
        none = closed_graph("none", b.nested(), [], list(zip(starts, kinds, strict=True)))
        return b.add("If", [some], len(made), then_branch=then, else_branch=none)

    def starts(self, initial: Sequence[str]) -> list[str]:
        """Emit what the loop back begins with: gradients of the final values, and empty sums."""
        ctx = self.ctx
        made: list[str] = []
        finals = [*ctx.node.output, *[""] * len(initial)]
        for state, first, final, grad in zip(
            self.states, initial, finals, self.node_grads, strict=False
        ):
            if state in self.moving:
                like = final or first
                made.append(grad or zeros_like(ctx.b, ctx.types | {like: ctx.type_of(first)}, like))
        return made + [zeros_like(ctx.b, ctx.types, name) for name in self.summed]

    def hand_out(self, found: Sequence[str]) -> list[str | None]:
        """Return the gradients of the initial and of the sliced values; note the captured ones."""
        wanted = [*self.moving, *self.summed, *(way.formal for way in self.sliced)]
        grads = dict(zip(wanted, found, strict=True))
        self.ctx.captured += [(name, grads[name]) for name in self.summed]
        return [grads.get(name) for name in (*self.states, *self.taken)]
