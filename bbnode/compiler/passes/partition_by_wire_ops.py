"""`partition_by_wire_ops`: the one global program becomes one function per class of peer.

Rule: after it the root is gone; what belongs to a class stands in that class's main, and
nothing but wire edges leads from one main to another.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from onnx import FunctionProto, NodeProto

from bbnode.compiler import flow
from bbnode.compiler.content_hash import content_name, digest_key, function_digest
from bbnode.compiler.errors import CrossClassDataflow, Where
from bbnode.compiler.function_table import called_from, is_bootstrap
from bbnode.compiler.hoisting import join_equal, name_by_content
from bbnode.compiler.opsets import import_used, versions_of
from bbnode.compiler.ordering import in_program_order
from bbnode.compiler.slots import slot_roles
from bbnode.compiler.unit import CompilationUnit, CompileOptions, Counters, WireEdge
from bbnode.compiler.wire_pairs import wire_pairs
from bbnode.ir import keys, protos


class PartitionByWireOps:
    """Cuts the root into partition mains.

    1. Ops are grouped by `home_class`; an op without one belongs to the root's home class.
    2. A main keeps its ops in program order, which is topological.
    3. Its inputs are the root's inputs that its ops read or wait for, its outputs the root's
       outputs that it makes; types and slots are those of its own values and ops.
    4. It is called `<class>#<16 hex>`, a hash over its content and over what it calls, taken
       before any address is stamped and without source lines.
    5. A value that is made on one class and read on another is CrossClassDataflow.
    6. `unit.partitions` is in class order, `unit.wire_edges` in the order of the Sends, and of
       the other functions those stay that a main or a bootstrap calls, and the bootstraps.
    7. Sub-Module bodies that are still called are called `Hoist_<Module>_<16 hex>`, a hash over
       the body as it is now; equal ones are one.
    """

    name: ClassVar[str] = "partition_by_wire_ops"

    def run(self, unit: CompilationUnit, options: CompileOptions) -> Counters:
        if not unit.partitions and protos.get_meta(unit.root, keys.TARGET_KEY) is None:
            _partition(unit)
        wire_ops = sum(protos.is_wire(n) for f in unit.partitions.values() for n in f.node)
        return {
            "partition_count": len(unit.partitions),
            "wire_edges": len(unit.wire_edges),
            "wire_ops": wire_ops,
        }


def _partition(unit: CompilationUnit) -> None:
    join_equal(unit.model, typed_only=False)
    name_by_content(unit.model)
    root = unit.root
    nodes = in_program_order(root.node)
    default = protos.get_meta(root, keys.HOME_KEY) or keys.SELF_CLASS
    groups: dict[str, list[NodeProto]] = {}
    for node in nodes:
        home = protos.get_meta(node, keys.HOME_CLASS_KEY)
        if home is None:
            home = default
            protos.set_meta(node, keys.HOME_CLASS_KEY, home)
        groups.setdefault(home, []).append(node)
    if not groups:
        groups[default] = []
    maker = {name: (home, node) for home, g in groups.items() for node in g for name in node.output}
    versions = versions_of(root, unit.model)
    mains = {
        home: _Main(root, home, groups[home], maker, versions).build() for home in sorted(groups)
    }
    unit.wire_edges = _wire_edges(nodes)
    kept = _kept_functions(unit, mains.values())
    digests = {digest_key(f): function_digest(f) for f in kept}
    for home, main in mains.items():
        called = called_from(unit.model, [main])
        main.name = f"{home}#{content_name(main, called, digests)}"
    names = {protos.function_key(f) for f in kept}
    for index in range(len(unit.model.functions) - 1, -1, -1):
        if index == 0 or protos.function_key(unit.model.functions[index]) not in names:
            del unit.model.functions[index]
    unit.partitions = mains


def _kept_functions(unit: CompilationUnit, mains: Iterable[FunctionProto]) -> list[FunctionProto]:
    others = list(unit.model.functions[1:])
    bootstraps = [f for f in others if is_bootstrap(f)]
    called = called_from(unit.model, [*mains, *bootstraps])
    wanted = {protos.function_key(f) for f in (*called, *bootstraps)}
    return [f for f in others if protos.function_key(f) in wanted]


class _Main:
    """One class's share of the root, in the making."""

    def __init__(
        self,
        root: FunctionProto,
        home: str,
        nodes: list[NodeProto],
        maker: dict[str, tuple[str, NodeProto]],
        versions: dict[str, int],
    ) -> None:
        self._root = root
        self._home = home
        self._nodes = nodes
        self._maker = maker
        self._versions = versions

    def build(self) -> FunctionProto:
        main = FunctionProto(domain=keys.MODULE_DOMAIN)
        read, made = self._values()
        main.input.extend(name for name in self._root.input if name in read)
        main.output.extend(name for name in self._root.output if name in made)
        protos.set_meta(main, keys.TARGET_KEY, "true")
        protos.set_meta(main, keys.HOME_KEY, self._home)
        self._list_slots(main)
        main.node.extend(self._nodes)
        import_used(main, self._versions)
        main.value_info.extend(
            info for info in self._root.value_info if info.name in read or info.name in made
        )
        return main

    def _values(self) -> tuple[set[str], set[str]]:
        read: set[str] = set()
        made: set[str] = set()
        for node in self._nodes:
            for name in flow.reads(node):
                if name not in read:
                    read.add(name)
                    self._check_home(node, name)
            made.update(name for name in node.output if name)
        return read, made

    def _check_home(self, node: NodeProto, name: str) -> None:
        home, producer = self._maker.get(name, (self._home, None))
        if producer is not None and home != self._home:
            raise CrossClassDataflow(
                node_name=node.name,
                home_a=self._home,
                home_b=home,
                value_a=node.output[0] if node.output else node.name,
                value_b=name,
                producer_a=node.name,
                producer_b=producer.name,
                where=Where.of(node),
            )

    def _list_slots(self, main: FunctionProto) -> None:
        used = {protos.get_meta(node, keys.SLOT_KEY) for node in self._nodes}
        main.attribute.extend(name for name in self._root.attribute if name in used)
        main.attribute_proto.extend(a for a in self._root.attribute_proto if a.name in used)
        known = protos.all_meta(self._root)
        for slot in slot_roles(self._root):
            for prefix in (keys.SLOT_ROLE_PREFIX, keys.CONCRETE_TYPE_SLOT_PREFIX):
                text = known.get(prefix + slot)
                if slot in used and text is not None:  # the main is new: nothing to replace
                    main.metadata_props.add(key=prefix + slot, value=text)


def _wire_edges(nodes: list[NodeProto]) -> list[WireEdge]:
    return [
        WireEdge(
            producer_class=protos.get_meta(pair.send, keys.HOME_CLASS_KEY) or "",
            consumer_class=protos.get_meta(pair.recv, keys.HOME_CLASS_KEY) or "",
            value_name=pair.recv.output[0],
            send_node=pair.send.name,
            recv_node=pair.recv.name,
        )
        for pair in wire_pairs(nodes)
    ]
