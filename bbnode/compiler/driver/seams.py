"""The invariants between two passes, and the history of nodes.

Rule: the checks are structural and linear in the size of the program.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from bbnode.compiler.analysis.order import split_names, topological
from bbnode.compiler.errors import CyclicGraph, PassInvariantBroken, Where
from bbnode.compiler.unit import CompilationUnit
from bbnode.ir import keys
from bbnode.ir.graph import Function, FunctionKey, OpNode, call_key

# Domains whose ops can only be calls.
CALL_DOMAINS = frozenset({keys.MODULE_DOMAIN, keys.BACKEND_SUBGRAPH_DOMAIN})

_U64_DIGITS = 20

# Metadata that later passes and the engine parse as a natural number.
NUMBER_KEYS = (
    keys.SLOT_ID_KEY,
    keys.INSTANCE_KEY,
    keys.CHAIN_DEPTH_KEY,
    keys.BUDGET_NS_KEY,
    keys.DEADLINE_NS_KEY,
    keys.SITE_ID_KEY,
    keys.TYPE_HASH_KEY,
    keys.RECV_SLOT_ID_KEY,
)


def check(unit: CompilationUnit, pass_name: str) -> None:
    """Raise PassInvariantBroken naming `pass_name` if the program is malformed."""
    bodies = unit.bodies()
    table = frozenset(body.key for body in bodies)
    if len(table) != len(bodies):
        raise PassInvariantBroken(
            pass_name=pass_name, detail="two functions of the model have one name"
        )
    for body in bodies:
        if _is_sound(body, table):
            continue
        fault = next(_faults(body, table), None)
        if fault is not None:
            raise PassInvariantBroken(
                pass_name=pass_name,
                detail=f"in function {body.name!r} {fault[1]}",
                where=Where() if fault[0] is None else Where.of(body.nodes[fault[0]]),
            )


def is_sound(unit: CompilationUnit) -> bool:
    """Return True if `check` would find nothing."""
    try:
        check(unit, "")
    except PassInvariantBroken:
        return False
    return True


def _is_sound(function: Function, table: frozenset[FunctionKey]) -> bool:
    """Return True if one walk shows that a function is well-formed and in topological order.

    That is the usual case; `_faults` then describes the faults of any other function.
    """
    available = set(function.inputs)
    count = len(available)
    names: set[str] = set()
    for node in function.nodes:
        if node.domain in CALL_DOMAINS and call_key(node) not in table:
            return False
        if not available.issuperset(node.reads):
            return False
        control = node.metadata.get(keys.CONTROL_AFTER_KEY)
        if control and not names.issuperset(split_names(control)):
            return False
        names.add(node.name)
        available.update(node.outputs)
        count += len(node.outputs)
    if "" in available:  # an unnamed output
        available.discard("")
        count -= sum(node.outputs.count("") for node in function.nodes)
    held = [node.metadata for node in function.nodes]
    numbers = {metadata[key] for metadata in held for key in NUMBER_KEYS if key in metadata}
    are_unique = len(names) == len(function.nodes) and len(available) == count
    return are_unique and available.issuperset(function.outputs) and all(map(is_natural, numbers))


Fault = tuple[int | None, str]  # index of the node concerned


def _faults(function: Function, table: frozenset[FunctionKey]) -> Iterator[Fault]:
    """Yield the faults of one function."""
    makers: dict[str, int] = dict.fromkeys(function.inputs, -1)
    node_at: dict[str, int] = {}
    for index, node in enumerate(function.nodes):
        if node_at.setdefault(node.name, index) != index:
            yield index, f"two nodes are called {node.name!r}"
        for name in filter(None, node.outputs):
            if makers.setdefault(name, index) != index:
                yield index, f"value {name!r} is made twice, here by {node.name!r}"
        if node.domain in CALL_DOMAINS and call_key(node) not in table:
            yield index, f"{node.name!r} calls {node.op_type!r}, which is not in the model"
    needs = []
    for index, node in enumerate(function.nodes):
        for key in NUMBER_KEYS:
            text = node.metadata.get(key)
            if text is not None and not is_natural(text):
                yield index, f"{key} of {node.name!r} is {text!r}, not a natural number"
        before: list[int] = []
        for verb, names in (("reads", node.computes_with), ("waits for", node.after)):
            for name in names:
                if name not in makers:
                    yield index, f"{node.name!r} {verb} {name!r}, which nothing makes"
                before.append(makers.get(name, -1))
        for name in split_names(node.metadata.get(keys.CONTROL_AFTER_KEY)):
            if name not in node_at:
                yield index, f"{node.name!r} waits for the op {name!r}, which is not there"
            before.append(node_at.get(name, -1))
        needs.append([need for need in before if need >= 0])
    for name in function.outputs:
        if name not in makers:
            yield None, f"the output {name!r} is made by no op"
    try:
        topological(function, needs)
    except CyclicGraph as error:
        yield None, f"the ops {', '.join(error.involves)} wait for each other"


def is_natural(text: str) -> bool:
    """Return True if a metadata value is the decimal of a u64."""
    if not (text.isascii() and text.isdigit() and len(text) <= _U64_DIGITS):
        return False
    return len(text) < _U64_DIGITS or int(text) < 1 << 64


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeHistory:
    """The pass that made a node ("" = recorded) and the passes that changed it, in order."""

    made_by: str
    changed_by: tuple[str, ...]


@dataclass(slots=True)
class History:
    """Traces nodes through the passes, by name. Off by default, since it copies every node.

    Nodes of the root and of the partition mains are identified by their name, since a partition
    keeps it; nodes of other functions by `<function>::<node>`.
    """

    _content: dict[str, tuple[object, ...]] = field(default_factory=dict)
    _made_by: dict[str, str] = field(default_factory=dict)
    _changed_by: dict[str, list[str]] = field(default_factory=dict)

    def observe(self, unit: CompilationUnit, pass_name: str) -> None:
        """Record the changes since the last call; `pass_name` is "" for the recorded program."""
        contents: dict[str, tuple[object, ...]] = {}
        for name, node in self._nodes(unit):
            content = node.content()
            contents[name] = content
            before = self._content.get(name)
            if before is None:
                self._made_by.setdefault(name, pass_name)
            elif before != content:
                self._changed_by.setdefault(name, []).append(pass_name)
        self._content = contents

    def result(self) -> dict[str, NodeHistory]:
        """Return the history of every node that still exists."""
        return {
            name: NodeHistory(
                made_by=self._made_by[name], changed_by=tuple(self._changed_by.get(name, ()))
            )
            for name in self._content
        }

    @staticmethod
    def _nodes(unit: CompilationUnit) -> Iterator[tuple[str, OpNode]]:
        mains = list(unit.partitions.values())
        for index, function in enumerate(unit.bodies()):
            is_main = (
                index < len(mains)
                or function.metadata.get(keys.TARGET_KEY) is not None
                or function.metadata.get(keys.ROOT_KEY) is not None
            )
            for node in function.nodes:
                yield (node.name if is_main else f"{function.name}::{node.name}"), node
