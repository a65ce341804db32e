"""Sizes of bodies with all calls inlined, computed before any call is.

Rule: each body is counted once, however often it is called, since a few functions that call each
other twice amount to billions of ops. Nothing is inlined before its size was counted here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from onnx import FunctionProto, GraphProto, ModelProto, NodeProto

from bbnode.ir.caps import (
    MAX_CALL_DEPTH,
    MAX_INLINED_BYTES,
    MAX_INLINED_GROWTH,
    MAX_INLINED_OPS,
)
from bbnode.ir.errors import AuthorError
from bbnode.ir.graph import FunctionKey, is_onnx_domain

_ROOT: FunctionKey = ("", "", "")  # no function has such a name


class InliningRefused(AuthorError):
    """The calls of functions are too many, or nested too deep, to be inlined."""


@dataclass(slots=True)
class Counted:
    """One body before inlining.

    Attributes:
        ops: number of ops that are no calls.
        weight: total weight of these ops, in the caller's unit.
        calls: called functions, each with the weight that every op of it gains in this call.
    """

    ops: int = 0
    weight: int = 0
    calls: list[tuple[FunctionKey, int]] = field(default_factory=list)


def inlined_size(root: FunctionKey, bodies: Mapping[FunctionKey, Counted]) -> tuple[int, int]:
    """Return the ops and the weight of `root` with all calls inlined.

    Raises InliningRefused for a cycle of calls, or calls nested deeper than `MAX_CALL_DEPTH`.
    """
    done: dict[FunctionKey, tuple[int, int, int]] = {}  # ops, weight, levels below
    open_: set[FunctionKey] = set()
    todo = [root]
    while todo:
        key = todo[-1]
        body = bodies[key]
        waits = [called for called, _ in body.calls if called not in done]
        if key in done:
            todo.pop()
        elif waits:
            open_.add(key)
            if not open_.isdisjoint(waits):
                raise InliningRefused(f"{_named(key)} is called in a ring; functions can't be")
            todo += waits
        else:
            ops, weight, levels = body.ops, body.weight, 0
            for called, gained in body.calls:
                inner = done[called]
                ops += inner[0]
                weight += inner[1] + gained * inner[0]
                levels = max(levels, inner[2] + 1)
            if levels > MAX_CALL_DEPTH:
                raise InliningRefused(
                    f"{_named(key)}: calls nest deeper than {MAX_CALL_DEPTH}; inline some"
                )
            done[key] = (ops, weight, levels)
            open_.discard(key)
            todo.pop()
    return done[root][:2]


def check_calls(model: ModelProto) -> None:
    """Raise InliningRefused if a model's functions can't be inlined within bounds.

    The result may have `MAX_INLINED_OPS` ops and `MAX_INLINED_BYTES`, or `MAX_INLINED_GROWTH`
    times those of the model itself.
    """
    if not model.functions:
        return
    functions = {
        _key(function.domain, function.name, function.overload): function
        for function in model.functions
    }
    bodies = {_ROOT: _counted(model.graph.node, functions)}
    for key, function in functions.items():
        bodies[key] = _counted(function.node, functions)
    ops, weight = inlined_size(_ROOT, bodies)
    own_ops = sum(body.ops + len(body.calls) for body in bodies.values())
    own_bytes = sum(body.weight for body in bodies.values())
    for inlined, own, least, unit in (
        (ops, own_ops, MAX_INLINED_OPS, "ops"),
        (weight, own_bytes, MAX_INLINED_BYTES, "bytes"),
    ):
        most = max(least, MAX_INLINED_GROWTH * own)
        if inlined > most:
            raise InliningRefused(
                f"the model's functions call each other so often that they stand for more than "
                f"{most} {unit}, and the model itself has {own}; inline them "
                "(onnx.inliner.inline_local_functions), so that it shows its size"
            )


def _counted(nodes: Sequence[NodeProto], functions: Mapping[FunctionKey, FunctionProto]) -> Counted:
    counted = Counted()
    todo: list[NodeProto | GraphProto] = list(nodes)
    while todo:
        part = todo.pop()
        if isinstance(part, GraphProto):
            todo += part.node
            counted.weight += sum(tensor.ByteSize() for tensor in part.initializer)
            continue
        inner = [graph for each in part.attribute for graph in each.graphs]
        inner += [each.g for each in part.attribute if each.HasField("g")]
        todo += inner
        key = _key(part.domain, part.op_type, part.overload)
        if key in functions:
            counted.calls.append((key, 0))
        else:
            counted.ops += 1
            counted.weight += 0 if inner else part.ByteSize()
    return counted


def _key(domain: str, name: str, overload: str) -> FunctionKey:
    return ("" if is_onnx_domain(domain) else domain, name, overload)


def _named(key: FunctionKey) -> str:
    return f"function {'::'.join(filter(None, key))!r:.160}" if key != _ROOT else "the model"
