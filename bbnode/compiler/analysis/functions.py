"""The functions of a model and their call graph.

Rule: a call is a node whose `(domain, op_type, overload)` is the key of a function of the model.
"""

from __future__ import annotations

from collections.abc import Iterable

from bbnode.compiler.errors import CyclicGraph
from bbnode.ir import keys
from bbnode.ir.graph import Function, FunctionKey, OpNode, Program, call_key


def is_bootstrap(function: Function) -> bool:
    """Return True if a function is the bootstrap of a Module."""
    return function.metadata.get(keys.MODULE_PHASE_KEY) == keys.BOOTSTRAP_PHASE


def by_key(functions: Iterable[Function]) -> dict[FunctionKey, Function]:
    """Return functions by the key that a call names."""
    return {function.key: function for function in functions}


def calls_of(
    function: Function, table: dict[FunctionKey, Function]
) -> list[tuple[OpNode, FunctionKey]]:
    """Return the calls in a function's body, in order, with the key of the function called."""
    names = {name for _, name, _ in table}
    return [
        (node, key) for node in function.nodes
        if node.op_type in names and (key := call_key(node)) in table
    ]  # fmt: skip


def callees_first(
    roots: Iterable[FunctionKey], calls: dict[FunctionKey, list[FunctionKey]]
) -> list[FunctionKey]:
    """Return all functions reachable from `roots`, each after those that it calls.

    Raises CyclicGraph naming the functions of a call cycle.
    """
    order: list[FunctionKey] = []
    state: dict[FunctionKey, bool] = {}  # False while on the path, True when done
    for root in roots:
        if root in state:
            continue
        path = [(root, iter(calls.get(root, ())))]
        state[root] = False
        while path:
            key, rest = path[-1]
            callee = next(rest, None)
            if callee is None:
                state[key] = True
                order.append(key)
                path.pop()
            elif callee not in state:
                state[callee] = False
                path.append((callee, iter(calls.get(callee, ()))))
            elif not state[callee]:
                names = [entry[0] for entry in path]
                raise CyclicGraph(involves=tuple(k[1] for k in names[names.index(callee) :]))
    return order


def called_from(program: Program, mains: Iterable[Function]) -> list[Function]:
    """Return the functions that `mains` call, directly or indirectly, in the model's order.

    A cycle of calls is no error here: each function is listed once.
    """
    table = by_key(program.functions)
    wanted: set[FunctionKey] = set()
    todo = list(mains)
    while todo:
        for _, key in calls_of(todo.pop(), table):
            if key not in wanted:
                wanted.add(key)
                todo.append(table[key])
    return [f for f in program.functions if f.key in wanted]
