"""`infer_peer_classes`: the program, projected: each op gets the class it runs on.

Rule: the solving is `placement.py`'s; here is what it leaves on the program.
"""

from __future__ import annotations

from typing import ClassVar

from bbnode.compiler.analysis.order import rename_node
from bbnode.compiler.analysis.placement import Placement
from bbnode.compiler.analysis.slots import slots_of_calls
from bbnode.compiler.unit import CompilationUnit, CompileOptions, Counters
from bbnode.ir import keys, types
from bbnode.ir.graph import Function, OpNode
from bbnode.ir.types import TypeNode


class InferPeerClasses:
    """Stamps `home_class` on every op of the root and `peer_class` on every send.

    1. Function inputs live on the Module's home class; an op lives where the values live that
       it reads, or else waits for (CrossClassDataflow when those are two classes).
    2. An op that reads nothing lives where its slot is used, if that is one class, else at
       home; where that leaves two answers it is AmbiguousHome.
    3. A send's `received` and `sender` live on the class it goes to, a request's `responses`
       on the requester's. That class is UnresolvedPeerClass when nothing says it.
    4. Constants, and ONNX ops over constants alone, live wherever they are read: on several
       classes there is one copy each, called `<name>@<class>`.
    """

    name: ClassVar[str] = "infer_peer_classes"

    def run(self, unit: CompilationUnit, options: CompileOptions) -> Counters:
        if unit.partitions:
            return {"homes_stamped": 0, "peer_classes_stamped": 0, "constants_copied": 0}
        root = unit.root
        placement = Placement(root, slots_of_calls(unit.program.functions[1:]))
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


def _copy_constants(root: Function, placement: Placement, demand: dict[int, list[str]]) -> int:
    """One copy of a placeless op for every class but the one that keeps the original."""
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
