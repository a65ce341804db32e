"""`partition_by_wire_ops`: the one global program becomes one function per class of peer.

Rule: after it the root is gone; the ops of a class are in that class's main, and only wire edges
lead from one main to another.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from bbnode.compiler.analysis.content_hash import content_name, digest_key, function_digest
from bbnode.compiler.analysis.functions import called_from, is_bootstrap
from bbnode.compiler.analysis.order import in_program_order
from bbnode.compiler.analysis.signatures import import_used, versions_of
from bbnode.compiler.analysis.slots import slot_roles
from bbnode.compiler.analysis.wire import wire_pairs
from bbnode.compiler.errors import CrossClassDataflow, Where
from bbnode.compiler.rewriting.hoisting import join_equal, name_by_content
from bbnode.compiler.unit import CompilationUnit, CompileOptions, Counters, Pass, WireEdge
from bbnode.ir import keys
from bbnode.ir.graph import Function, OpNode, is_wire


class PartitionByWireOps(Pass):
    """Cuts the root into partition mains.

    1. Ops are grouped by `home_class`; an op without one belongs to the root's home class.
    2. A main keeps its ops in program order, which is topological.
    3. A main has all inputs of the root that live on its class, whether an op reads them or
       not: they are what the author lets a caller give. Outputs of a main are the root's outputs
       that it makes; types and slots are those of its own values and ops.
    4. It is called `<class>#<16 hex>`, a hash over its content and over what it calls, taken
       before any address is stamped and without source lines.
    5. A value that is made on one class and read on another is CrossClassDataflow.
    6. `unit.partitions` is in class order, `unit.wire_edges` in the order of the Sends, and of
       the other functions those stay that a main or a bootstrap calls, and the bootstraps.
    7. Sub-Module bodies that are still called are called `Hoist_<Module>_<16 hex>`, a hash over
       the body as it is now; equal ones are one.
    """

    def run(self, unit: CompilationUnit, options: CompileOptions) -> Counters:
        if not unit.partitions and unit.root.metadata.get(keys.TARGET_KEY) is None:
            _partition(unit)
        wire_ops = sum(is_wire(n) for f in unit.partitions.values() for n in f.nodes)
        return {
            "partition_count": len(unit.partitions),
            "wire_edges": len(unit.wire_edges),
            "wire_ops": wire_ops,
        }


def _partition(unit: CompilationUnit) -> None:
    join_equal(unit, typed_only=False)
    name_by_content(unit)
    root = unit.root
    nodes = in_program_order(root)
    default = root.metadata.get(keys.HOME_KEY) or keys.SELF_CLASS
    groups: dict[str, list[OpNode]] = {}
    for node in nodes:
        home = node.metadata.get(keys.HOME_CLASS_KEY)
        if home is None:
            home = default
            node.metadata[keys.HOME_CLASS_KEY] = home
        groups.setdefault(home, []).append(node)
    homes = {name: root.home_of_input(name) or default for name in root.inputs}
    for home in homes.values():
        groups.setdefault(home, [])
    if not groups:
        groups[default] = []
    value_homes: dict[str, str] = {}
    for home, group in groups.items():
        for node in group:
            value_homes.update(dict.fromkeys(node.outputs, home))
    versions = versions_of(root, unit.program)
    mains = {
        home: _Main(root, home, groups[home], value_homes, versions, homes).build()
        for home in sorted(groups)
    }
    unit.wire_edges = _wire_edges(nodes)
    kept = _kept_functions(unit, mains.values())
    digests = {digest_key(f): function_digest(f, unit.prints) for f in kept}
    for home, main in mains.items():
        called = called_from(unit.program, [main])
        main.name = f"{home}#{content_name(main, called, digests, unit.prints)}"
    names = {f.key for f in kept}
    others = unit.program.functions[1:]
    unit.program.functions = [f for f in others if f.key in names]
    unit.partitions = mains


def _kept_functions(unit: CompilationUnit, mains: Iterable[Function]) -> list[Function]:
    others = list(unit.program.functions[1:])
    bootstraps = [f for f in others if is_bootstrap(f)]
    called = called_from(unit.program, [*mains, *bootstraps])
    wanted = {f.key for f in (*called, *bootstraps)}
    return [f for f in others if f.key in wanted]


class _Main:
    """Builds the main of one class from its share of the root."""

    def __init__(
        self,
        root: Function,
        home: str,
        nodes: list[OpNode],
        value_homes: Mapping[str, str],
        versions: dict[str, int],
        input_homes: Mapping[str, str],
    ) -> None:
        self._root = root
        self._input_homes = input_homes
        self._home = home
        self._nodes = nodes
        self._value_homes = value_homes
        self._versions = versions

    def build(self) -> Function:
        main = Function(domain=keys.MODULE_DOMAIN)
        read, written = self._values()
        read.update(name for name, home in self._input_homes.items() if home == self._home)
        main.inputs = [name for name in self._root.inputs if name in read]
        main.outputs = [name for name in self._root.outputs if name in written]
        main.metadata[keys.TARGET_KEY] = "true"
        main.metadata[keys.HOME_KEY] = self._home
        self._list_slots(main)
        main.nodes = self._nodes
        import_used(main, self._versions)
        main.types = {n: kind for n, kind in self._root.types.items() if n in read or n in written}
        notes = self._root.notes.items()
        main.notes = {n: note for n, note in notes if n in read or n in written}
        return main

    def _values(self) -> tuple[set[str], set[str]]:
        read: set[str] = set()
        written: set[str] = set()
        homes, home = self._value_homes, self._home
        for node in self._nodes:
            for name in node.reads:
                if homes.get(name, home) != home:
                    raise self._cross(node, name)
            read.update(node.reads)
            written.update(node.outputs)
        written.discard("")
        return read, written

    def _cross(self, node: OpNode, name: str) -> CrossClassDataflow:
        return CrossClassDataflow(
            node_name=node.name,
            home_a=self._home,
            home_b=self._value_homes[name],
            value_a=node.outputs[0] if node.outputs else node.name,
            value_b=name,
            producer_a=node.name,
            producer_b=next(n.name for n in self._root.nodes if name in n.outputs),
            where=Where.of(node),
        )

    def _list_slots(self, main: Function) -> None:
        used = {node.metadata.get(keys.SLOT_KEY) for node in self._nodes}
        main.attributes = [name for name in self._root.attributes if name in used]
        main.defaults = {n: a for n, a in self._root.defaults.items() if n in used}
        known = self._root.metadata
        for slot in slot_roles(self._root):
            for prefix in (keys.SLOT_ROLE_PREFIX, keys.CONCRETE_TYPE_SLOT_PREFIX):
                text = known.get(prefix + slot)
                if slot in used and text is not None:  # the main is new: nothing to replace
                    main.metadata[prefix + slot] = text


def _wire_edges(nodes: list[OpNode]) -> list[WireEdge]:
    return [
        WireEdge(
            producer_class=pair.send.metadata.get(keys.HOME_CLASS_KEY) or "",
            consumer_class=pair.recv.metadata.get(keys.HOME_CLASS_KEY) or "",
            value_name=pair.recv.outputs[0],
            send_node=pair.send.name,
            recv_node=pair.recv.name,
        )
        for pair in wire_pairs(nodes)
    ]
