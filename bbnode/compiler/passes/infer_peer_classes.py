"""`infer_peer_classes`: the projection of the program: each op gets the class it runs on.

Rule: `placement.py` solves; this pass stamps the solution on the program.
"""

from __future__ import annotations

from bbnode.compiler.analysis.functions import by_key, callees_first, calls_of
from bbnode.compiler.analysis.order import rename_node
from bbnode.compiler.analysis.placement import Placement
from bbnode.compiler.analysis.slots import slots_of_calls
from bbnode.compiler.errors import Where
from bbnode.compiler.rewriting.inlining import home_of
from bbnode.compiler.unit import CompilationUnit, CompileOptions, Counters, HomeClaim, Pass
from bbnode.ir import keys, types
from bbnode.ir.graph import Function, FunctionKey, OpNode
from bbnode.ir.types import TypeNode


class InferPeerClasses(Pass):
    """Stamps `home_class` on every op of the root and `peer_class` on every send.

    1. Function inputs live on the class that they name, else on the Module's home; an op lives
       where the values live that it reads, or else waits for (CrossClassDataflow when those
       are two classes).
    2. An op that reads nothing lives where its slot is used, if that is one class, else at
       home; where that leaves two answers it is AmbiguousHome.
    3. A send's `received` and `sender` live on the class it goes to, a request's `responses`
       on the requester's. That class is UnresolvedPeerClass when nothing says it.
    4. A called Module that names a `home` is called with values that live there
       (HomeContradicted), and what nothing else places in it lives there; one that names none
       lives where it is called.
    5. Constants, and ONNX ops over constants alone, live wherever they are read: on several
       classes there is one copy each, called `<name>@<class>`.
    """

    def run(self, unit: CompilationUnit, options: CompileOptions) -> Counters:
        if unit.partitions:
            return {"homes_stamped": 0, "peer_classes_stamped": 0, "constants_copied": 0}
        root = unit.root
        called = slots_of_calls(unit.program.functions[1:])
        placement = Placement(root, called, _claims(unit))
        placement.solve()
        demand = placement.demand()
        for index, classes in demand.items():
            kept = placement.default if placement.default in classes else classes[0]
            placement.homes[index] = kept
        for node, home in zip(placement.nodes, placement.homes, strict=True):
            node.metadata[keys.HOME_CLASS_KEY] = home or placement.default
        for index, peer_class in placement.destinations.items():
            placement.nodes[index].metadata[keys.PEER_CLASS_KEY] = peer_class
        copied = _copy_constants(root, placement, demand)
        return {
            "homes_stamped": len(root.nodes),
            "peer_classes_stamped": len(placement.destinations),
            "constants_copied": copied,
        }


def _claims(unit: CompilationUnit) -> list[HomeClaim]:
    """Return the homes declared by the Modules that the root calls, inlined ones included.

    A remaining call is of a body that sends nothing, so all homes declared in that body are
    homes of the call.
    """
    claims = list(unit.home_claims.get(unit.root.key, ()))
    table = by_key(unit.program.functions[1:])
    calls = {key: [k for _, k in calls_of(f, table)] for key, f in table.items()}
    inside: dict[FunctionKey, dict[tuple[str, str], None]] = {}
    for key in callees_first(table, calls):
        home = home_of(table[key])
        named = {} if home is None else {(table[key].name, home): None}
        named |= {(c.called, c.home): None for c in unit.home_claims.get(key, ())}
        for callee in calls[key]:
            named |= inside[callee]
        inside[key] = named
    for node, key in calls_of(unit.root, table):
        where = Where.of(node)
        for called, home in inside[key]:
            claims.extend(
                HomeClaim(value=value, called=called, home=home, where=where)
                for value in ("", *node.computes_with, *node.after)
            )
    return claims


def _copy_constants(root: Function, placement: Placement, demand: dict[int, list[str]]) -> int:
    """Copy each placeless op for every class except the one that keeps the original."""
    renamed: dict[str, dict[str, str]] = {}  # class -> value -> name of the copy's value
    for index, classes in demand.items():
        for home in classes:
            if home != placement.homes[index]:
                names = renamed.setdefault(home, {})
                names.update((v, f"{v}@{home}") for v in placement.nodes[index].outputs if v)
    if not renamed:
        return 0
    nodes: list[OpNode] = []
    for index, node in enumerate(placement.nodes):
        home = placement.homes[index] or placement.default
        others = (other for other in demand.get(index, ()) if other != home)
        nodes.extend(_copy(node, other, renamed[other]) for other in others)
        if home in renamed:
            rename_node(node, renamed[home])
        nodes.append(node)
    known = root.kinds()
    root.nodes = nodes
    fresh: dict[str, TypeNode] = {}
    for names in renamed.values():
        fresh.update((new, known.get(old, types.ANY)) for old, new in names.items())
    root.declare(fresh)
    return len(nodes) - len(placement.nodes)


def _copy(node: OpNode, home: str, names: dict[str, str]) -> OpNode:
    copy = node.copy()
    copy.name = f"{node.name}@{home}"
    copy.made_by = InferPeerClasses.name
    rename_node(copy, names)
    copy.metadata[keys.HOME_CLASS_KEY] = home
    return copy
