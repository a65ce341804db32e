"""Gradients of an op by way of simpler ops that compute the same.

Rule: a rule writes the simpler ops, and the sweep goes back through them; so the derivatives of an
op with many forms are those of the ops that it is defined by.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from onnx import NodeProto, helper

from bbnode.components.autodiff.builder import InferredType, captured_names, inferred_types
from bbnode.components.autodiff.reverse import pull_back
from bbnode.components.autodiff.sizes import with_equal_sizes
from bbnode.components.autodiff.table import VjpContext
from bbnode.ir.keys import FRAMEWORK_IR_VERSION


def pull_back_through(
    ctx: VjpContext, outputs: Sequence[str | None], emitted: Sequence[NodeProto] | None = None
) -> Sequence[str | None]:
    """Return the gradients of the node's inputs through nodes that the rule has emitted.

    Args:
        ctx: the node.
        outputs: per output of the node, the emitted value that equals it; None where that output
            has no gradient.
        emitted: where these nodes are; those of the sweep by default.

    Raises:
        UnsupportedGradient, GradientRuleError: of one of the emitted nodes.
    """
    seeds: dict[str, str] = {}
    for value, grad in zip(outputs, ctx.grads, strict=False):
        if value is not None and grad is not None:
            seeds[value] = ctx.b.op("Add", seeds[value], grad) if value in seeds else grad
    # An input may stand at several positions; the sweep has all its contributions in one.
    wanted: dict[str, int] = {}
    for index, name in enumerate(ctx.inputs):
        if ctx.wants(index):
            wanted.setdefault(name, index)
    nodes = _between(ctx, seeds, ctx.b.nodes if emitted is None else emitted)
    found = pull_back(ctx.b, nodes, _types(ctx, nodes), seeds, list(wanted))
    grads: list[str | None] = [None] * len(ctx.inputs)
    for name, index in wanted.items():
        grads[index] = found[name]
    return grads


def _between(
    ctx: VjpContext, outputs: Mapping[str, str], emitted: Sequence[NodeProto]
) -> list[NodeProto]:
    """Return, in order, the emitted nodes between the node's inputs and `outputs`."""
    leaves = set(ctx.inputs)
    needed = set(outputs) - leaves
    nodes: list[NodeProto] = []
    for node in reversed(emitted):
        if not needed.isdisjoint(node.output):
            nodes.append(node)
            needed |= captured_names(node) - leaves
    nodes.reverse()
    return nodes


def _types(ctx: VjpContext, nodes: Sequence[NodeProto]) -> dict[str, InferredType]:
    made = {name for node in nodes for name in node.output}
    read = sorted({name for node in nodes for name in captured_names(node)} - made)
    constants = [tensor for tensor in ctx.b.initializers if tensor.name in read]
    inside = {tensor.name for tensor in constants}
    leaves = {name: ctx.type_of(name) for name in read if name not in inside}
    infos = [
        helper.make_tensor_value_info(
            name, ctx.elem_type(name), None if kind.dims is None else list(kind.dims)
        )
        for name, kind in leaves.items()
    ]
    model = helper.make_model(
        helper.make_graph(list(nodes), "composed", infos, [], constants),
        ir_version=FRAMEWORK_IR_VERSION,
        opset_imports=[helper.make_opsetid(*entry) for entry in ctx.b.opsets],
    )
    return {**with_equal_sizes(nodes, inferred_types(model)), **leaves}
