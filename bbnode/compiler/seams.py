"""What has to hold between two passes, and who made or changed what.

Rule: cheap and structural, linear in the size of what changed since the last look. A function whose
bytes did not change is not looked at again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from onnx import FunctionProto, NodeProto

from bbnode.compiler import flow
from bbnode.compiler.errors import CyclicGraph, ExpansionFailed, PassInvariantBroken, Where
from bbnode.compiler.function_table import FunctionKey
from bbnode.compiler.unit import CompilationUnit
from bbnode.ir import keys, protos

# Domains whose ops can only be calls.
CALL_DOMAINS = frozenset({keys.MODULE_DOMAIN, keys.BACKEND_SUBGRAPH_DOMAIN})

# Metadata that later passes and the engine parse as a natural number.
NUMBER_KEYS = frozenset(
    {
        keys.SLOT_ID_KEY,
        keys.INSTANCE_KEY,
        keys.CHAIN_DEPTH_KEY,
        keys.DEADLINE_NS_KEY,
        keys.SITE_ID_KEY,
        keys.TYPE_HASH_KEY,
        keys.RECV_SLOT_ID_KEY,
    }
)


@dataclass(slots=True)
class Seams:
    """Remembers what was looked at, for one compile."""

    _seen: dict[FunctionKey, bytes] = field(default_factory=dict)
    _known_keys: frozenset[FunctionKey] = frozenset()

    def check(self, unit: CompilationUnit, pass_name: str) -> None:
        """Raise PassInvariantBroken naming `pass_name` when the program is malformed."""
        bodies = unit.bodies()
        table = frozenset(protos.function_key(body) for body in bodies)
        if len(table) != len(bodies):
            raise PassInvariantBroken(
                pass_name=pass_name, detail="two functions of the model have one name"
            )
        all_calls_again = not self._known_keys <= table
        seen: dict[FunctionKey, bytes] = {}
        for body in bodies:
            key = protos.function_key(body)
            seen[key] = body.SerializeToString()
            if all_calls_again or self._seen.get(key) != seen[key]:
                fault = next(faults(body, table), None)
                if fault is not None:
                    raise PassInvariantBroken(
                        pass_name=pass_name,
                        detail=f"in function {body.name!r} {fault[1]}",
                        where=Where.of(fault[0]) if fault[0] is not None else Where(),
                    )
        self._seen = seen
        self._known_keys = table


Fault = tuple[NodeProto | None, str]


def faults(function: FunctionProto, table: frozenset[FunctionKey]) -> Iterator[Fault]:
    """What is malformed in one function, with the node concerned."""
    made: set[str] = set(function.input)
    node_names: set[str] = set()
    for node in function.node:
        if node.name in node_names:
            yield node, f"two nodes are called {node.name!r}"
        node_names.add(node.name)
        for name in node.output:
            if name in made:
                yield node, f"value {name!r} is made twice, here by {node.name!r}"
            if name:
                made.add(name)
        if node.domain in CALL_DOMAINS and protos.call_key(node) not in table:
            yield node, f"{node.name!r} calls {node.op_type!r}, which is not in the model"
    for node in function.node:
        yield from _node_faults(node, made, node_names)
    for name in function.output:
        if name not in made:
            yield None, f"the output {name!r} is made by no op"
    try:
        flow.topological(function)
    except CyclicGraph as error:
        yield None, f"the ops {', '.join(error.involves)} wait for each other"


def _node_faults(node: NodeProto, made: set[str], node_names: set[str]) -> Iterator[Fault]:
    try:
        wanted = flow.data_reads(node)
    except ExpansionFailed as error:
        yield node, error.reason
        return
    for name in wanted:
        if name not in made:
            yield node, f"{node.name!r} reads {name!r}, which nothing makes"
    for entry in node.metadata_props:
        key = entry.key
        if key in NUMBER_KEYS:
            if not is_natural(entry.value):
                yield node, f"{key} of {node.name!r} is {entry.value!r}, not a natural number"
        elif key == keys.AFTER_KEY:
            for name in flow.split_names(entry.value):
                if name not in made:
                    yield node, f"{node.name!r} waits for {name!r}, which nothing makes"
        elif key == keys.CONTROL_AFTER_KEY:
            for name in flow.split_names(entry.value):
                if name not in node_names:
                    yield node, f"{node.name!r} waits for the op {name!r}, which is not there"


def is_natural(text: str) -> bool:
    """Whether a metadata value is a decimal of at most 20 digits (a u64)."""
    return text.isascii() and text.isdigit() and len(text) <= 20


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeHistory:
    """Which pass made a node ("" = recorded) and which ones changed it, in order."""

    made_by: str
    changed_by: tuple[str, ...]


@dataclass(slots=True)
class History:
    """Follows nodes through the passes, by name. Off unless asked for: it copies every node.

    Nodes of the root and of the partition mains go by their name, since a partition keeps it;
    nodes of other functions by `<function>::<node>`.
    """

    _content: dict[str, bytes] = field(default_factory=dict)
    _made_by: dict[str, str] = field(default_factory=dict)
    _changed_by: dict[str, list[str]] = field(default_factory=dict)

    def observe(self, unit: CompilationUnit, pass_name: str) -> None:
        """Compare with what was there before; `pass_name` is "" for the recorded program."""
        found: dict[str, bytes] = {}
        for name, node in self._nodes(unit):
            content = node.SerializeToString()
            found[name] = content
            before = self._content.get(name)
            if before is None:
                self._made_by.setdefault(name, pass_name)
            elif before != content:
                self._changed_by.setdefault(name, []).append(pass_name)
        self._content = found

    def result(self) -> dict[str, NodeHistory]:
        """The history of every node that is there at the end."""
        return {
            name: NodeHistory(
                made_by=self._made_by[name], changed_by=tuple(self._changed_by.get(name, ()))
            )
            for name in self._content
        }

    @staticmethod
    def _nodes(unit: CompilationUnit) -> Iterator[tuple[str, NodeProto]]:
        mains = list(unit.partitions.values())
        for index, function in enumerate(unit.bodies()):
            is_main = (
                index < len(mains)
                or protos.get_meta(function, keys.TARGET_KEY) is not None
                or protos.get_meta(function, keys.ROOT_KEY) is not None
            )
            for node in function.node:
                yield (node.name if is_main else f"{function.name}::{node.name}"), node
