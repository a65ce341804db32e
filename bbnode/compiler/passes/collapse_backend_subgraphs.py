"""`collapse_backend_subgraphs`: what a backend can run at once becomes one graph.

Rule: the engine has one path for backend work, a prepared graph; a single op is a graph too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import ClassVar

from bbnode.compiler.analysis import order
from bbnode.compiler.analysis.functions import by_key
from bbnode.compiler.opsets import versions_of
from bbnode.compiler.ordering import program_order
from bbnode.compiler.subgraph_body import collapse
from bbnode.compiler.subgraph_groups import Groups, backend_slot, find_groups
from bbnode.compiler.unit import CompilationUnit, CompileOptions, Counters
from bbnode.ir import keys, plain
from bbnode.ir.plain import Function, FunctionKey, Node


class CollapseBackendSubgraphs:
    """Turns upstream ONNX ops of backend slots into functions of domain `backend_subgraph`.

    1. A group is ops of one slot that are connected, without a path out of the group and back
       in, whose outputs all come at the time at which they came without it. A single op is a
       group; an op without a slot, or that refers to attributes of its function, stays.
    2. Each group becomes one function, named by a hash of its content: equal graphs share one.
       If and Loop stay inside with their bodies; a small constant goes into each of its
       readers' groups.
    3. The call carries the slot of its ops, waits for all that they waited for (`after`,
       `control_after`), and ops that had a member in `control_after` name the call instead.
    4. The function declares the types of its values as far as they are known.
    5. Between two ops of one slot, a `PassThrough` that waits for nothing (what inlining leaves
       of a Module's border) does not keep them apart; it goes when nobody else reads it.
    6. Bodies stay acyclic and in program order.
    """

    name: ClassVar[str] = "collapse_backend_subgraphs"

    def run(self, unit: CompilationUnit, options: CompileOptions) -> Counters:
        table = by_key(unit.program.functions)
        ops = groups = 0
        for function in unit.bodies():
            if function.domain == keys.BACKEND_SUBGRAPH_DOMAIN:
                continue
            if not any(backend_slot(node) is not None for node in function.node):
                continue
            needs = order.needs_of(function.node)
            order = program_order(function.node, needs)
            if not order.is_sorted(needs):
                order.reorder(function, order)
                needs = order.needs_of(function.node)
            if _bypass_aliases(function):
                needs = order.needs_of(function.node)
            found = find_groups(function, needs, unit.prints)
            _Rewrite(unit, function, found, table).run()
            groups += len(found.members)
            ops += sum(map(len, found.members)) + len(found.copied)
        return {"ops_collapsed": ops, "subgraph_calls": groups}


def _bypass_aliases(function: Function) -> bool:
    """Let backend ops read past PassThroughs to the op of their slot that made the value.

    Says whether that may have changed the function.
    """
    aliases: dict[str, int] = {}  # what a PassThrough makes -> its index
    readers: list[tuple[Node, str]] = []
    for index, node in enumerate(function.node):
        if _is_alias(node):
            aliases[node.output[0]] = index
        elif aliases and any(name in aliases for name in node.input):
            slot = backend_slot(node)
            if slot is not None:
                readers.append((node, slot))
    if not readers:
        return False
    made = order.producers(function)
    source: dict[str, str] = {}
    for name, index in aliases.items():  # in program order: an alias of an alias comes later
        read = function.node[index].input[0]
        source[name] = source.get(read, read)
    for node, slot in readers:
        past = {
            name: source[name]
            for name in node.input
            if name in aliases and source[name] in made
            and backend_slot(function.node[made[source[name]]]) == slot
        }  # fmt: skip
        node.input = [past.get(name, name) for name in node.input]
    _drop_unread(function, aliases)
    return True


def _drop_unread(function: Function, aliases: dict[str, int]) -> None:
    """Remove the aliases that nobody reads any more; those behind first."""
    reads = Counter(function.output)
    for node in function.node:
        reads.update(order.reads(node))
    dropped = set()
    for name, index in reversed(aliases.items()):
        if not reads[name]:
            dropped.add(index)
            reads[function.node[index].input[0]] -= 1
    if dropped:
        kept = [node for index, node in enumerate(function.node) if index not in dropped]
        function.node = kept


def _is_alias(node: Node) -> bool:
    return (
        node.domain == keys.SYSCALL_DOMAIN
        and node.op_type == "PassThrough"
        and node.metadata.get(keys.AFTER_KEY) is None
        and node.metadata.get(keys.CONTROL_AFTER_KEY) is None
    )


class _Rewrite:
    """The replacement of the groups of one function."""

    def __init__(
        self,
        unit: CompilationUnit,
        function: Function,
        groups: Groups,
        table: dict[FunctionKey, Function],
    ) -> None:
        self._unit = unit
        self._function = function
        self._groups = groups
        self._table = table
        self._nodes: Sequence[Node] = list(function.node)
        self._group_of = {i: g for g, members in enumerate(groups.members) for i in members}

    def run(self) -> None:
        exposed = self._exposed()
        types = self._function.types
        versions = versions_of(self._function, self._unit.program)
        constants = {self._nodes[i].output[0]: self._nodes[i] for i in self._groups.copied}
        calls: dict[int, Node] = {}  # by the group's last node
        renamed: dict[str, str] = {}
        for members in self._groups.members:
            nodes = [self._nodes[index] for index in members]
            nodes[:0] = _used_constants(nodes, constants)
            made = collapse(nodes, exposed, types, versions, self._unit.prints)
            if plain.function_key(made.function) not in self._table:
                self._unit.program.functions.append(made.function)
                self._table[plain.function_key(made.function)] = made.function
            calls[members[-1]] = made.call
            renamed.update((self._nodes[index].name, made.call.name) for index in members)
        self._replace(calls, renamed)
        self._drop_types()

    def _exposed(self) -> set[str]:
        """Values of groups that something outside of their group reads."""
        made = {
            name: group for index, group in self._group_of.items()
            for name in self._nodes[index].output if name
        }  # fmt: skip
        exposed = {name for name in self._function.output if name in made}
        group_of = self._group_of
        for index, before in enumerate(self._groups.needs):
            group = group_of.get(index)
            if any(group_of.get(need, group) != group for need in before):
                names = order.reads(self._nodes[index])
                exposed.update(name for name in names if made.get(name, group) != group)
        return exposed

    def _replace(self, calls: dict[int, Node], renamed: dict[str, str]) -> None:
        nodes: list[Node] = []
        places = [-1] * len(self._nodes)  # a copied constant has none
        for index, node in enumerate(self._nodes):
            if index in calls:
                for member in self._groups.members[self._group_of[index]]:
                    places[member] = len(nodes)
                nodes.append(calls[index])
            elif index not in self._group_of and index not in self._groups.copied:
                _rename_control(node, renamed)
                places[index] = len(nodes)
                nodes.append(node)
        order = program_order(nodes, self._needs_between(places, len(nodes)))
        self._function.node = [nodes[index] for index in order]

    def _needs_between(self, places: Sequence[int], count: int) -> list[list[int]]:
        """What the new nodes wait for, from what the old ones did; `places` are old to new."""
        needs: list[list[int]] = [[] for _ in range(count)]
        for before, place in zip(self._groups.needs, places, strict=True):
            if place >= 0:
                needs[place] += [p for p in map(places.__getitem__, before) if p not in (-1, place)]
        return needs

    def _drop_types(self) -> None:
        """Values that are gone into a subgraph are declared there, not here."""
        left = set(self._function.input)
        left.update(name for node in self._function.node for name in node.output)
        self._function.keep_types(left)


def _used_constants(nodes: Sequence[Node], constants: dict[str, Node]) -> list[Node]:
    if not constants:
        return []
    used = dict.fromkeys(n for node in nodes for n in order.data_reads(node) if n in constants)
    return [constants[name] for name in used]


def _rename_control(node: Node, renamed: dict[str, str]) -> None:
    names = order.split_names(node.metadata.get(keys.CONTROL_AFTER_KEY))
    if any(name in renamed for name in names):
        new = dict.fromkeys(renamed.get(name, name) for name in names)
        node.metadata[keys.CONTROL_AFTER_KEY] = ",".join(new)
