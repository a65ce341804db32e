"""Functions of a model that call each other: how deep, and how much they are when inlined.

Rule: looked at before anything follows a call, since calls in a ring never end and calls of
calls multiply.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from onnx import FunctionProto, NodeProto

from bbnode.dsl.errors import NestingTooDeep
from bbnode.dsl.onnx_walk import all_nodes
from bbnode.ir import protos

# What the compiler inlines at most into one program.
MAX_OPS = 200_000

FunctionKey = tuple[str, str, str]


def inlined_size(
    nodes: Iterable[NodeProto], functions: Iterable[FunctionProto], module: str
) -> int:
    """How many ops these nodes are when all calls of `functions` are inlined.

    Raises NestingTooDeep when functions call each other in a ring.
    """
    table = {protos.function_key(function): function for function in functions}
    sizes: dict[FunctionKey, int] = {}
    for key in _callees_first(table, module):
        sizes[key] = _size(table[key].node, sizes)
    return _size(nodes, sizes)


def _size(nodes: Iterable[NodeProto], sizes: Mapping[FunctionKey, int]) -> int:
    return sum(sizes.get(protos.call_key(node), 1) for node in all_nodes(nodes))


def _callees_first(table: Mapping[FunctionKey, FunctionProto], module: str) -> list[FunctionKey]:
    calls = {
        key: dict.fromkeys(
            k for node in all_nodes(function.node) if (k := protos.call_key(node)) in table
        )
        for key, function in table.items()
    }
    order: list[FunctionKey] = []
    finished: dict[FunctionKey, bool] = {}
    for root in table:
        path = [] if root in finished else [(root, iter(calls[root]))]
        finished.setdefault(root, False)
        while path:
            key, rest = path[-1]
            callee = next(rest, None)
            if callee is None:
                finished[key] = True
                order.append(key)
                path.pop()
            elif callee not in finished:
                finished[callee] = False
                path.append((callee, iter(calls[callee])))
            elif not finished[callee]:
                raise NestingTooDeep(
                    f"function {callee[1]!r} of the model calls itself, directly or not; ONNX has "
                    "no recursion, export the model again",
                    module,
                )
    return order
