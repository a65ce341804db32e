"""The reverse sweep: from gradients of values to gradients of what they depend on.

Rule: one pass over the nodes forward (who depends on `wrt`), one pass back (rules in reverse
order); contributions to a value are added in that order, so that sums come out the same.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from onnx import NodeProto

from bbnode.components.autodiff.builder import FLOATS, GraphBuilder, InferredType, captured_names
from bbnode.components.autodiff.errors import GradientRuleError, UnsupportedGradient
from bbnode.components.autodiff.table import VjpContext, is_piecewise_constant, lookup


def active_values(
    nodes: Iterable[NodeProto], types: Mapping[str, InferredType], wrt: Iterable[str]
) -> set[str]:
    """Return the names of the values that vary smoothly with any of `wrt`, `wrt` included."""
    active = set(wrt)
    for node in nodes:
        if is_piecewise_constant(node.domain, node.op_type):
            continue
        if active.isdisjoint(captured_names(node)):
            continue
        for output in node.output:
            known = types.get(output)
            if output and (known is None or known.elem_type == 0 or known.elem_type in FLOATS):
                active.add(output)
    return active


def pull_back(
    b: GraphBuilder,
    nodes: Sequence[NodeProto],
    types: dict[str, InferredType],
    seeds: Mapping[str, str],
    wrt: Sequence[str],
) -> dict[str, str]:
    """Emit the gradients of `wrt`, given gradients of some values (`seeds`: value to gradient).

    Returns one gradient name per name of `wrt`; one that nothing depends on gets zeros.

    Raises:
        UnsupportedGradient: an op on the way has no rule.
        GradientRuleError: a rule cannot handle its node.
    """
    active = active_values(nodes, types, wrt)
    made = {output: node for node in nodes for output in node.output}
    pending: dict[str, list[str]] = {value: [grad] for value, grad in seeds.items()}
    for node in reversed(nodes):
        if active.isdisjoint(node.output):
            continue
        grads = [_collect(b, pending, name) for name in node.output]
        if all(grad is None for grad in grads):
            continue
        entry = lookup(node.domain, node.op_type)
        if entry is None:
            raise _without_rule(node)
        context = VjpContext(b, node, grads, types, active, made)
        try:
            rule = entry.rule(context)
        except GradientRuleError as error:
            if (cause := _of_unknown_type(nodes, types, active)) is not None:
                raise _without_rule(cause) from error
            raise
        # A rule leaves out trailing inputs that have no gradient.
        found = [*zip(node.input, rule, strict=False), *context.captured]
        for name, grad in found:
            if grad is not None and name in active:
                pending.setdefault(name, []).append(grad)
    results: dict[str, str] = {}
    for name in wrt:
        grad = _collect(b, pending, name)
        results[name] = zeros_like(b, types, name) if grad is None else grad
    return results


def _without_rule(node: NodeProto) -> UnsupportedGradient:
    name = node.name or node.output[0]
    return UnsupportedGradient(node=name, op_type=node.op_type, domain=node.domain)


def _of_unknown_type(
    nodes: Iterable[NodeProto], types: Mapping[str, InferredType], active: Collection[str]
) -> NodeProto | None:
    """Return an op without a rule that nobody knows the type of, nor of what is made of it."""
    for node in nodes:
        made = node.output[0] if node.output else ""
        if made in active and lookup(node.domain, node.op_type) is None:
            known = types.get(made)
            if known is None or not known.elem_type:
                return node
    return None


def _collect(b: GraphBuilder, pending: dict[str, list[str]], value: str) -> str | None:
    """Return the sum of the contributions to `value` so far."""
    parts = pending.get(value)
    if not parts:
        return None
    first, *others = _joined(b, parts)
    total = first
    for part in others:
        total = b.op("Add", total, part)
    pending[value] = [total]
    return total


def _joined(b: GraphBuilder, parts: Sequence[str]) -> Sequence[str]:
    """Return the contributions, with one in place of those of slices that make up an axis.

    Each of those is a slice's gradient in zeros; without the zeros, their sum is the slices behind
    each other.
    """
    slices: dict[tuple[int, int, int], str] = {}  # those of one place are added up at once
    for part in parts:
        if (p := b.padded.get(part)) is not None:
            key = p.axis, p.first, p.last
            slices[key] = b.op("Add", slices[key], p.value) if key in slices else p.value
    if len(slices) < 2:
        return parts
    found = sorted(slices)
    axis, at = found[0][0], 0
    size = next(p.size for part in parts if (p := b.padded.get(part)) is not None)
    for own, first, last in found:
        if own != axis or first != at or first == last:
            return parts
        at = last
    if at != size:
        return parts
    whole = b.op("Concat", *(slices[key] for key in found), axis=axis)
    return [whole, *(part for part in parts if part not in b.padded)]


def zeros_like(b: GraphBuilder, types: Mapping[str, InferredType], value: str) -> str:
    """Emit zeros of the type and shape of `value`."""
    return b.op("Expand", b.scalar(0.0, types[value].elem_type), b.op("Shape", value))
