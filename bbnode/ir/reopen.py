"""The reopening of compiled programs: the marks that a compile leaves, and their reversal.

Rule: neither half knows any specific pass. A `Recording` observes the program before passes change
it, and at the end writes marks: each recorded op has its original place and its changes, from old
to new; nodes that passes made name the pass (`made_by`). `reopen` reverts these. Later edits stay:
a change is reverted only if it is still in place.

docs/compiler.md lists what an artifact keeps.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import lru_cache
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from typing import Any

from google.protobuf.message import DecodeError as ProtobufDecodeError
from onnx import AttributeProto, NodeProto

from bbnode.ir import keys
from bbnode.ir.bounds import check_bounds
from bbnode.ir.caps import MAX_NAME_CHARS
from bbnode.ir.errors import AuthorError
from bbnode.ir.graph import (
    Attribute,
    Function,
    FunctionKey,
    OpNode,
    Program,
    ValueType,
    call_key,
    captured_by,
    make_node,
    sorted_opsets,
)
from bbnode.ir.onnx_file import attribute_of, attribute_proto, model_of, node_of, node_proto

_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), check_circular=False).encode
# Sets of metadata keys: a program has some dozens.
_KEPT_KEY_SETS = 1024
_MAX_TEXT = 400  # characters of what is wrong with a mark, which a stranger may have written
_SLOT_PREFIXES = (keys.SLOT_ROLE_PREFIX, keys.CONCRETE_TYPE_SLOT_PREFIX)


class NotReopenable(AuthorError):
    """A compiled program lacks the marks that are needed to reopen it."""


# --- writing ------------------------------------------------------------------------------


@dataclass(slots=True)
class _Recorded:
    """A node as it was recorded."""

    function: Function
    at: int
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    after: tuple[str, ...]
    attributes: Mapping[str, Attribute]
    metadata: dict[str, str]


@dataclass(slots=True)
class Recording:
    """The recorded form of a program, kept while passes change it."""

    _nodes: dict[OpNode, _Recorded] = field(default_factory=dict)
    _names: dict[Function, str] = field(default_factory=dict)
    _root: dict[str, Any] = field(default_factory=dict)
    _types: Mapping[str, ValueType] = field(default_factory=dict)
    _marked: set[OpNode] = field(default_factory=set)

    def observe(self, program: Program, made_by: str = "") -> None:
        """Take the program as it is for the recorded one.

        Nodes that were seen before keep the form in which they were seen; nodes that are gone are
        forgotten. Of the nodes that passes made, those of the pass `made_by` count as recorded.
        """
        known, self._nodes = self._nodes, {}
        for function in program.functions:
            for at, node in enumerate(function.nodes):
                if node.made_by and node.made_by != made_by:
                    continue
                seen = known.get(node)
                if seen is None:
                    ports = node.inputs, node.outputs, node.after
                    metadata = node.metadata.copy()
                    seen = _Recorded(function, at, *ports, node.attributes, metadata)
                else:
                    seen.at, seen.function = at, function
                self._nodes[node] = seen
        self._names = {function: function.name for function in program.functions}
        root = program.functions[0]
        self._types = root.types.copy()
        self._root = {
            "name": root.name,
            "doc_string": root.doc_string,
            "metadata": root.metadata.copy(),
            "inputs": root.inputs.copy(),
            "outputs": root.outputs.copy(),
            "attributes": root.attributes.copy(),
        }

    def sign(self, functions: Iterable[Function], name: str) -> None:
        """Sign the nodes that a pass put into functions: those that nobody recorded or signed."""
        for function in functions:
            if function.domain != keys.BACKEND_SUBGRAPH_DOMAIN:
                for node in function.nodes:
                    if not node.made_by and node not in self._nodes:
                        node.made_by = name

    def mark(self, node: OpNode) -> None:
        """Write the changes of a node since its recording on the node."""
        seen = None if node in self._marked else self._nodes.get(node)
        if seen is None:
            return
        self._marked.add(node)
        metadata, before = node.metadata, seen.metadata
        added = _added(tuple(metadata), tuple(before))
        is_same = (
            node.inputs is seen.inputs
            and node.outputs is seen.outputs
            and node.after is seen.after
            and node.attributes is seen.attributes
            and before.items() <= metadata.items()
        )
        changed = {} if is_same else _changes(node, seen)
        if "|" in added:
            changed["added"], added = added.split(","), ""
        text = f"{seen.at}|{added}|{_encode(changed) if changed else ''}"
        _write_text(metadata, keys.RECORDED_KEY, text)

    def finish(self, program: Program) -> None:
        """Write the marks on a compiled program that allow it to be reopened."""
        for function in program.functions:
            if function.domain == keys.BACKEND_SUBGRAPH_DOMAIN:
                continue
            for node in function.nodes:
                self.mark(node)
        gone: dict[Function, list[str]] = {}
        for node, seen in self._nodes.items():
            if node not in self._marked:
                gone.setdefault(seen.function, []).append(_as_recorded(node, seen))
        for function in program.functions:
            name = self._names.get(function, function.name)
            found: dict[str, Any] = {} if name == function.name else {"name": name}
            found |= {"gone": gone[function]} if function in gone else {}
            if function.metadata.get(keys.TARGET_KEY) is not None:
                types = dict(self._other_types(function))
                found |= {"types": types} if types else {}
            if found:
                _write_text(function.metadata, keys.RECORDED_KEY, _encode(found))
        root = next(iter(self._names), None)
        said = {**self._root, "gone": gone.get(root, []) if root is not None else []}
        text = _encode(said)
        _write_text(program.metadata, keys.RECORDED_KEY, text)

    def _other_types(self, main: Function) -> Iterable[tuple[str, str]]:
        """Yield the recorded types of values that were replaced by others, not narrowed to them."""
        # A payload that nobody reads travels as a trigger, whatever its type would be.
        unread = {
            node.outputs[0]
            for node in main.nodes
            if node.metadata.get(keys.WIRE_TRANSPORT_KEY) == keys.TRANSPORT_TRIGGER_ONLY
            and node.op_type in keys.INBOUND_OPS
            and node.outputs
        }
        for name, now in main.types.items():
            before = self._types.get(name)
            if before is None or before is now or before.kind is None or now.kind is None:
                continue
            if name in unread or not now.kind.is_a(before.kind):
                yield name, base64.b64encode(before.content).decode()


@lru_cache(maxsize=_KEPT_KEY_SETS)
def _added(now: tuple[str, ...], before: tuple[str, ...]) -> str:
    """Return the added keys, interned, since nodes of one kind have the same."""
    return ",".join([key.removeprefix(keys.PREFIX) for key in now if key not in before])


def _changes(node: OpNode, seen: _Recorded) -> dict[str, Any]:
    found: dict[str, Any] = {}
    metadata = {key: text for key, text in seen.metadata.items() if node.metadata.get(key) != text}
    if metadata:
        found["metadata"] = metadata
    for port in ("inputs", "outputs", "after"):
        before, now = getattr(seen, port), getattr(node, port)
        if before != now:
            found[port] = [before, now]
    if node.attributes is not seen.attributes:
        attributes = {
            name: [
                _print(now),
                None if (old := seen.attributes.get(name)) is None else _stored(old),
            ]
            for name, now in node.attributes.items()
            if now is not seen.attributes.get(name) and not now.graphs
        }
        if attributes:
            found["attributes"] = attributes
        captured = dict(zip(node.captured, captured_by(seen.attributes), strict=False))
        renamed = {now: old for now, old in captured.items() if now != old}
        if renamed:
            found["captured"] = renamed
    return found


def _print(attribute: Attribute) -> Any:
    """Return a fingerprint, by which a later change of an attribute is seen."""
    value = attribute.value
    if isinstance(value, int | float):
        return value
    data = value.content if isinstance(value, ValueType) else value
    return f"{zlib.crc32(data if isinstance(data, bytes) else repr(data).encode()):08x}"


def _stored(attribute: Attribute) -> str:
    return base64.b64encode(attribute_proto("", attribute).SerializeToString()).decode()


def _as_recorded(node: OpNode, seen: _Recorded) -> str:
    copy = make_node(
        *(node.op_type, node.domain, node.name, seen.inputs, seen.outputs, seen.attributes),
        *(seen.after, {**seen.metadata, keys.RECORDED_KEY: f"{seen.at}||"}, node.source_line),
        *(node.made_by, node.overload, node.doc_string, node.extras),
    )
    return base64.b64encode(node_proto(copy).SerializeToString()).decode()


def mark_call(call: OpNode, members: Sequence[OpNode], values: Sequence[str]) -> None:
    """Write on the call of a subgraph what ops it stands for.

    Args:
        call: the call; its inputs and outputs are those of the function, in order.
        members: the ops, with their marks; number i is called `<op type>_<i>` in the function.
        values: names of all values that they make; number i is called `bb_v_<i>` in the function
            unless it is one of its outputs.
    """
    base = members[-1].metadata
    base = {key: text for key, text in base.items() if not key.startswith(keys.RECORDED_KEY)}
    entries = []
    for node in members:
        own = dict(node.metadata)
        mark = _take_text(own, keys.RECORDED_KEY)
        entries.append(
            [node.name, node.source_line, mark, None if own == base else own, node.after]
        )
    said = {"metadata": base, "values": list(values), "nodes": entries}
    _write_text(call.metadata, keys.MEMBERS_KEY, _encode(said))


@dataclass(frozen=True, slots=True)
class FusedOp:
    """An op that a fused graph stands for: its name, `<file>:<line>`, and Module."""

    name: str
    line: str
    module: str


def members_text(metadata: Mapping[str, str]) -> str:
    """Return what the call of a subgraph says of its ops, for `members_of`; "" if nothing."""
    if keys.MEMBERS_KEY not in metadata:
        return ""
    return _take_text(dict(metadata), keys.MEMBERS_KEY) or ""


def members_of(text: str) -> list[FusedOp]:
    """Return the ops of a subgraph, in its order; [] for a text that is not ours."""
    found = []
    try:
        said = json.loads(text)
        for name, line, _, own, _ in said["nodes"]:
            module = (said["metadata"] if own is None else own).get(keys.MODULE_INSTANCE_KEY, "")
            found.append(FusedOp(str(name), str(line), str(module)))
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        return []
    return found


def _write_text(metadata: dict[str, str], key: str, text: str) -> None:
    """Write a text of any length, in pieces of which each may stand in a file."""
    if len(text) <= MAX_NAME_CHARS:
        metadata[key] = text
        return
    metadata[key] = text[:MAX_NAME_CHARS]
    for number, start in enumerate(range(MAX_NAME_CHARS, len(text), MAX_NAME_CHARS), 1):
        metadata[f"{key}.{number}"] = text[start : start + MAX_NAME_CHARS]


def _take_text(metadata: dict[str, str], key: str) -> str | None:
    """Remove a text that `_write_text` wrote, and return it."""
    text = metadata.pop(key, None)
    number = 1
    while text is not None and (more := metadata.pop(f"{key}.{number}", None)) is not None:
        text += more
        number += 1
    return text


# --- the way back -------------------------------------------------------------------------


def home_of(program: Program) -> str | None:
    """Return the home class of the Module that a program was recorded from, if it says so."""
    try:
        said = json.loads(_take_text(dict(program.metadata), keys.RECORDED_KEY) or "{}")
        home = said["metadata"][keys.HOME_KEY]
    except (ValueError, TypeError, LookupError, RecursionError):
        return None
    return home if isinstance(home, str) else None


def is_compiled(program: Program) -> bool:
    """Return True if the compiler made the program."""
    return keys.COMPILED_KEY in program.metadata


def reopen(program: Program) -> Program:
    """Return the recorded form of a compiled program, edits that were made since then included.

    All targets that the program holds are joined into one root again. Raises NotReopenable when
    it has no marks, when they are broken or hold what no program needs (`check_bounds`), or when it
    sends to a target that it does not hold.
    """
    program = program.copy()
    try:
        opened = _Reopening(program).run()
        # Marks hold nodes and names that nobody has looked at yet.
        check_bounds(model_of(opened))
    except NotReopenable:
        raise
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError,
            ProtobufDecodeError, AuthorError) as error:  # fmt: skip
        raise NotReopenable(
            "what the program keeps of its recorded form is broken "
            f"({type(error).__name__}: {error!s:.{_MAX_TEXT}}); record and compile it again"
        ) from error
    return opened


class _Reopening:
    def __init__(self, program: Program) -> None:
        self._program = program
        said = _take_text(program.metadata, keys.RECORDED_KEY)
        if said is None:
            raise NotReopenable(
                "the program keeps nothing of its recorded form; record and compile it again"
            )
        self._said: dict[str, Any] = json.loads(said)
        self._table = {function.key: function for function in program.functions}
        self._source: dict[str, str] = {}  # value of an op that goes -> what that op read
        self._inlined: set[FunctionKey] = set()
        self._mains = [f for f in program.functions if keys.TARGET_KEY in f.metadata]
        self._is_cut = bool(self._mains)
        self._mains = self._mains or program.functions[:1]

    def run(self) -> Program:
        program = self._program
        self._check_whole()
        renamed: dict[FunctionKey, str] = {}
        placed = {function: self._nodes_of(function) for function in program.functions}
        for function in program.functions:
            said = json.loads(_take_text(function.metadata, keys.RECORDED_KEY) or "{}")
            placed[function] += map(_gone_node, said.get("gone", ()))
            if "name" in said:
                renamed[function.key] = function.name = said["name"]
            for value, content in said.get("types", {}).items():
                if value in function.types:
                    function.types[value] = ValueType.of_content(base64.b64decode(content))
        root = self._join(placed)
        others = [f for f in program.functions if f not in self._mains]
        program.functions = [root, *(f for f in others if f.key not in self._inlined)]
        for function in others:
            self._fill(function, placed[function])
        for function in program.functions:
            for node in function.nodes:
                node.op_type = renamed.get(call_key(node), node.op_type)
        program.metadata = {
            key: text for key, text in program.metadata.items() if not key.startswith(keys.PREFIX)
        }
        return program

    def _check_whole(self) -> None:
        if not self._is_cut:
            return
        there = {main.metadata.get(keys.HOME_KEY) for main in self._mains}
        for main in self._mains:
            for node in main.nodes:
                wanted = node.metadata.get(keys.PEER_CLASS_KEY)
                if node.domain == keys.WIRE_DOMAIN and wanted is not None and wanted not in there:
                    raise NotReopenable(
                        f"{node.name!r} goes to the class {wanted!r}, whose target is not in hand; "
                        "open the whole program"
                    )

    def _nodes_of(self, function: Function) -> list[tuple[float, OpNode]]:
        """Return the recorded nodes of a function and those added later, with their places."""
        nodes: list[OpNode] = []
        for node in function.nodes:
            said = _take_text(node.metadata, keys.MEMBERS_KEY)
            if said is not None:
                nodes += self._expanded(node, json.loads(said), function)
            elif node.made_by and keys.RECORDED_KEY not in node.metadata:
                if node.inputs:
                    self._source.update(dict.fromkeys(node.outputs, node.inputs[0]))
            else:
                nodes.append(node)
        placed: list[tuple[float, OpNode]] = []
        place = -1.0
        for node in nodes:
            mark = _take_text(node.metadata, keys.RECORDED_KEY)
            if mark is not None:
                place = _restore(node, mark)
            placed.append((place, node))
        return placed

    def _expanded(self, call: OpNode, said: dict[str, Any], function: Function) -> list[OpNode]:
        """Return the ops of a subgraph that replace its call."""
        body = self._table[call_key(call)]
        if body is function:
            raise NotReopenable(f"{function.name!r} is called in itself: the program is damaged")
        self._inlined.add(body.key)
        names = {f"bb_v_{index}": name for index, name in enumerate(said["values"])}
        names.update(zip(body.inputs, call.inputs, strict=True))
        names.update(zip(body.outputs, call.outputs, strict=True))
        for inner in body.nodes:
            for name in inner.outputs:
                names.setdefault(name, f"{call.name}/{name}")
        for name, declared in body.types.items():
            function.types.setdefault(names.get(name, name), declared)
        nodes = []
        for inner in body.nodes:
            node = inner.copy()
            node.rename(names)
            kind, _, number = inner.name.rpartition("_")
            if kind == inner.op_type and number.isdigit() and int(number) < len(said["nodes"]):
                name, line, mark, own, after = said["nodes"][int(number)]
                node.name, node.source_line, node.after = name, line, after
                node.metadata = dict(said["metadata"] if own is None else own)
                if mark is not None:
                    _write_text(node.metadata, keys.RECORDED_KEY, mark)
            else:  # somebody added it
                node.name = f"{call.name}/{inner.name}"
                node.metadata = {**said["metadata"], **inner.metadata}
            nodes.append(node)
        return nodes

    def _join(self, placed: Mapping[Function, list[tuple[float, OpNode]]]) -> Function:
        """Return the root from which the targets were cut."""
        said = self._said
        root = Function(
            name=said["name"],
            domain=keys.MODULE_DOMAIN,
            doc_string=said["doc_string"],
            metadata=dict(said["metadata"]),
        )
        entries = list(map(_gone_node, said["gone"]))
        for main in self._mains:
            entries += placed[main]
            root.inputs += [name for name in main.inputs if name not in root.inputs]
            root.outputs += [name for name in main.outputs if name not in root.outputs]
            root.attributes += [name for name in main.attributes if name not in root.attributes]
            root.defaults.update(main.defaults)
            root.types.update({n: t for n, t in main.types.items() if n not in root.types})
            root.notes.update(main.notes)
            slots = {k: v for k, v in main.metadata.items() if k.startswith(_SLOT_PREFIXES)}
            root.metadata.update(slots)
        # A target lists its concrete slots in the root's order, which is written down nowhere else.
        defaults = _merged(main.defaults for main in self._mains)
        root.defaults = {name: root.defaults[name] for name in defaults}
        for port in ("inputs", "outputs", "attributes"):
            order = {name: at for at, name in enumerate([*said[port], *getattr(root, port)][::-1])}
            getattr(root, port).sort(key=order.__getitem__, reverse=True)
        root.opset_imports = sorted_opsets(
            {entry.domain: entry for main in self._mains for entry in main.opset_imports}.values()
        )
        self._fill(root, entries)
        return root

    def _fill(self, function: Function, entries: list[tuple[float, OpNode]]) -> None:
        """Put the nodes into a function, in their places; of several copies of an op, one."""
        nodes = [node for _, node in sorted(entries, key=lambda entry: entry[0])]
        function.nodes = list({node.name: node for node in reversed(nodes)}.values())[::-1]
        made = {*function.inputs, *(n for node in function.nodes for n in node.outputs)}
        function.keep_types(made)
        for node in function.nodes:
            past = {name: self._origin(name, made) for name in node.reads if name not in made}
            lost = [name for name, origin in past.items() if origin not in made]
            if lost:
                raise NotReopenable(
                    f"op {node.name!r} reads {lost[0]!r}, which nothing in hand makes or sends; "
                    "open the whole program"
                )
            if past:
                node.rename(past)

    def _origin(self, name: str, made: Set[str]) -> str:
        """Return what goes into the row of ops that go and that made a value."""
        seen = set()
        while name not in made and name not in seen:
            seen.add(name)
            name = self._source.get(name, name)
        return name


def _merged(orders: Iterable[Iterable[str]]) -> list[str]:
    """Return all names in an order that agrees with each of `orders`, if there is one."""
    names: dict[str, None] = {}
    sorter = TopologicalSorter[str]()
    for order in map(tuple, orders):
        names.update(dict.fromkeys(order))
        for name in order:
            sorter.add(name)
        for before, after in pairwise(order):
            sorter.add(after, before)
    try:
        return list(sorter.static_order())
    except CycleError:  # somebody edited one of them
        return list(names)


def _gone_node(text: str) -> tuple[float, OpNode]:
    node = node_of(NodeProto.FromString(base64.b64decode(text)))
    mark = node.metadata.pop(keys.RECORDED_KEY)
    return float(mark.partition("|")[0]), node


def _restore(node: OpNode, mark: str) -> float:
    """Revert the changes of passes to a node; return its place."""
    at, added, text = mark.split("|", 2)
    said = json.loads(text) if text else {}
    for key in said.get("added", filter(None, added.split(","))):
        if node.metadata.pop(keys.PREFIX + key, None) is None:
            node.metadata.pop(key, None)
    node.metadata.update(said.get("metadata", {}))
    for port in ("inputs", "outputs", "after"):
        if port in said:
            before, then = said[port]
            now = list(getattr(node, port))
            if now == then:
                now = before
            elif len(before) == len(then) == len(now):
                now = [old if name == new else name
                       for name, old, new in zip(now, before, then, strict=True)]  # fmt: skip
            setattr(node, port, tuple(now))
    changed = dict(node.attributes)
    for name, (print_then, before) in said.get("attributes", {}).items():
        if name in changed and _print(changed[name]) == print_then:
            if before is None:
                del changed[name]
            else:
                changed[name] = _loaded(before)
    node.attributes = changed
    if "captured" in said:
        node.rename_captured(said["captured"])
    return float(at)


def _loaded(text: str) -> Attribute:
    return attribute_of(AttributeProto.FromString(base64.b64decode(text)))
