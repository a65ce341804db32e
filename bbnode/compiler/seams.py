"""What has to hold between two passes, and who made or changed what.

Rule: cheap and structural, linear in the size of what changed since the last look. A function whose
bytes did not change is not looked at again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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


@dataclass(frozen=True, slots=True)
class _Facts:
    """What a check wants to know of a node; equal bytes give equal facts.

    `fault` is what is malformed in the node by itself, `call` the key of what it can only call.
    """

    name: str
    reads: list[str]
    makes: list[str]
    after: list[str]
    control: list[str]
    call: FunctionKey | None
    fault: str | None

    @classmethod
    def of(cls, node: NodeProto) -> _Facts:
        """Walk a node once."""
        fault = None
        try:
            reads = flow.data_reads(node)
        except ExpansionFailed as error:
            reads, fault = [], error.reason
        after: list[str] = []
        control: list[str] = []
        for entry in node.metadata_props:
            key = entry.key
            if key in NUMBER_KEYS:
                if not is_natural(entry.value):
                    said = f"{key} of {node.name!r} is {entry.value!r}, not a natural number"
                    fault = fault or said
            elif key == keys.AFTER_KEY:
                after = flow.split_names(entry.value)
            elif key == keys.CONTROL_AFTER_KEY:
                control = flow.split_names(entry.value)
        call = protos.call_key(node) if node.domain in CALL_DOMAINS else None
        makes = [name for name in node.output if name]
        return cls(node.name, reads, makes, after, control, call, fault)


@dataclass(slots=True)
class Seams:
    """Remembers what was looked at, for one compile."""

    _seen: dict[FunctionKey, bytes] = field(default_factory=dict)
    _known_keys: frozenset[FunctionKey] = frozenset()
    _facts: dict[bytes, _Facts] = field(default_factory=dict)

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
        kept: dict[bytes, _Facts] = {}
        for body in bodies:
            key = protos.function_key(body)
            seen[key] = body.SerializeToString()
            if all_calls_again or self._seen.get(key) != seen[key]:
                facts = [self._facts_of(node, kept) for node in body.node]
                if _is_sound(body, facts, table):
                    continue
                fault = next(_faults(body, facts, table), None)
                if fault is not None:
                    raise PassInvariantBroken(
                        pass_name=pass_name,
                        detail=f"in function {body.name!r} {fault[1]}",
                        where=Where() if fault[0] is None else Where.of(body.node[fault[0]]),
                    )
        self._seen = seen
        self._known_keys = table
        # What no node has any more is let go; functions that were not walked start afresh.
        self._facts = kept

    def _facts_of(self, node: NodeProto, kept: dict[bytes, _Facts]) -> _Facts:
        content = node.SerializeToString()
        facts = kept.get(content) or self._facts.get(content) or _Facts.of(node)
        kept[content] = facts
        return facts


def _is_sound(
    function: FunctionProto, facts: Sequence[_Facts], table: frozenset[FunctionKey]
) -> bool:
    """Whether a function has no fault and its ops stand in order, found in one walk.

    Most functions do, behind most passes; what is wrong with another one says `_faults`.
    """
    made = set(function.input)
    count = len(made)
    names: set[str] = set()
    for node in facts:
        if node.fault is not None or (node.call is not None and node.call not in table):
            return False
        if not (made.issuperset(node.reads) and made.issuperset(node.after)):
            return False
        if node.control and not names.issuperset(node.control):
            return False
        names.add(node.name)
        made.update(node.makes)
        count += len(node.makes)
    return len(names) == len(facts) and len(made) == count and made.issuperset(function.output)


Fault = tuple[int | None, str]  # index of the node concerned


def _faults(
    function: FunctionProto, facts: Sequence[_Facts], table: frozenset[FunctionKey]
) -> Iterator[Fault]:
    """What is malformed in one function."""
    made: dict[str, int] = dict.fromkeys(function.input, -1)
    node_at: dict[str, int] = {}
    for index, node in enumerate(facts):
        if node_at.setdefault(node.name, index) != index:
            yield index, f"two nodes are called {node.name!r}"
        for name in node.makes:
            if made.setdefault(name, index) != index:
                yield index, f"value {name!r} is made twice, here by {node.name!r}"
        if node.call is not None and node.call not in table:
            yield index, f"{node.name!r} calls {node.call[1]!r}, which is not in the model"
    needs = []
    for index, node in enumerate(facts):
        if node.fault is not None:
            yield index, node.fault
        before = []
        for name in node.reads:
            if name not in made:
                yield index, f"{node.name!r} reads {name!r}, which nothing makes"
            before.append(made.get(name, -1))
        for name in node.after:
            if name not in made:
                yield index, f"{node.name!r} waits for {name!r}, which nothing makes"
            before.append(made.get(name, -1))
        for name in node.control:
            if name not in node_at:
                yield index, f"{node.name!r} waits for the op {name!r}, which is not there"
            before.append(node_at.get(name, -1))
        needs.append([need for need in before if need >= 0])
    for name in function.output:
        if name not in made:
            yield None, f"the output {name!r} is made by no op"
    try:
        flow.topological(function, needs)
    except CyclicGraph as error:
        yield None, f"the ops {', '.join(error.involves)} wait for each other"


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
