"""Crossings: the types of the values on each wire edge, and the site ids derived from them.

Rule: a site id depends on names that the author chose and on the type of the value that crosses,
and on nothing in the bodies around. An edit of one class therefore keeps the sites of a program
as long as the crossing values keep their types, and peers of both versions reach each other.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache

from bbnode.compiler.analysis.functions import by_key
from bbnode.compiler.analysis.order import split_names
from bbnode.compiler.errors import SiteCollision, Where
from bbnode.compiler.unit import CompilationUnit, WireEdge
from bbnode.ir import ids, keys, types
from bbnode.ir.caps import MAX_COMPOSITE_DEPTH
from bbnode.ir.graph import Function, OpNode, call_key, is_wire

_KEPT_NAMES = 256  # cached type names: ours are some dozens, packages may bring more
# Ops that hand their input on unchanged.
_TRANSPARENT = keys.GATE_OPS | {keys.OP_DEADLINE_CHECK, "PassThrough"}


@dataclass(slots=True)
class Crossings:
    """The crossings of a partitioned unit, and the site ids assigned so far."""

    unit: CompilationUnit
    _sites: dict[int, OpNode] = field(default_factory=dict)
    _composites: _Composites = field(init=False)

    def __post_init__(self) -> None:
        self._composites = _Composites(self.unit)

    def crosses(self, edge: WireEdge, send: OpNode, recv: OpNode) -> str:
        """Return the type of the value that crosses on an edge; `Trigger` without a payload."""
        if recv.metadata.get(keys.WIRE_TRANSPORT_KEY) == keys.TRANSPORT_TRIGGER_ONLY:
            return types.TRIGGER.name
        sender = self.unit.partitions[edge.producer_class]
        if send.op_type == keys.OP_SEND_RESP:  # the receiver gets the batch of all answers
            return self._composites.text(sender, send.inputs[0])
        receiver = self.unit.partitions[edge.consumer_class]
        if receiver.kind_of(recv.outputs[0]) is types.COMPOSITE:
            return self._composites.text(sender, send.inputs[0], (receiver, recv.outputs[0]))
        return _name(receiver.kind_of(recv.outputs[0]))

    def site(self, edge: WireEdge, recv: OpNode, crosses: str) -> int:
        """Return the site id of a receiver.

        Raises SiteCollision when another receiver has it.
        """
        port = recv.metadata.get(keys.PORT_KEY) or edge.value_name
        scope = recv.metadata.get(keys.PORT_SCOPE_KEY)
        path = f"{scope}/{port}" if scope else port
        site = ids.site_id(self.unit.program_name, edge.consumer_class, path, recv.op_type, crosses)
        other = self._sites.setdefault(site, recv)
        if other is not recv:
            raise SiteCollision(
                port=path, receiver=edge.consumer_class, node_name=recv.name,
                other=other.name, where=Where.of(recv),
            )  # fmt: skip
        return site


@lru_cache(maxsize=_KEPT_NAMES)
def _name(kind: types.TypeNode | None) -> str:
    """Return a type's name, with its wire hash unless that is the hash of its first version."""
    kind = kind or types.ANY
    is_first = kind.wire_hash == ids.wire_hash(kind.name)
    return kind.name if is_first else f"{kind.name}#{kind.wire_hash:016x}"


@dataclass(frozen=True, slots=True)
class _Place:
    """A function, and the call through which it is inspected."""

    function: Function
    call: OpNode | None = None
    caller: _Place | None = None


class _Composites:
    """Types of values, those inside of composites included."""

    def __init__(self, unit: CompilationUnit) -> None:
        self._functions = by_key(unit.program.functions)
        self._sends: dict[tuple[str, str], tuple[Function, str]] = {}
        data = {
            (home, node.name): node.inputs[0]
            for home, main in unit.partitions.items() for node in main.nodes
            if is_wire(node, *keys.SEND_OPS)
        }  # fmt: skip
        for edge in unit.wire_edges:
            sent = data.get((edge.producer_class, edge.send_node))
            if sent is not None:
                source = (unit.partitions[edge.producer_class], sent)
                self._sends.setdefault((edge.consumer_class, edge.recv_node), source)

    def text(self, main: Function, value: str, arrives: tuple[Function, str] | None = None) -> str:
        """Return the type of a value, with the types of a composite's parts as far as known.

        Args:
            main: the partition that makes the value.
            value: its name there.
            arrives: another partition and the value's name there, asked if the maker does not know.
        """
        parts = self._parts(_Place(main), value, 0)
        if parts is None and arrives is not None:
            parts = self._taken_apart(*arrives)
        kind = types.COMPOSITE if arrives is not None else main.kind_of(value)
        return _name(kind) if parts is None else f"{_name(kind)}[{','.join(parts)}]"

    def _parts(self, place: _Place, value: str, depth: int) -> list[str] | None:
        """Return the part types of a composite from the Bundle that makes it; None if unknown."""
        if place.function.kind_of(value) is not types.COMPOSITE:
            return None
        for at, node in self._makers(place, value):
            if node.op_type != keys.OP_BUNDLE or node.domain != keys.COMPOSITE_DOMAIN:
                continue
            parts = []
            listed = split_names(_text(node.attr("child_types", "")))
            for index, name in enumerate(node.inputs):
                kind = at.function.kind_of(name)
                if kind is None and index < len(listed):
                    kind = types.type_by_id(listed[index])
                inner = None
                if kind is types.COMPOSITE and depth < MAX_COMPOSITE_DEPTH:
                    inner = self._parts(at, name, depth + 1)
                parts.append(_name(kind) + ("" if inner is None else f"[{','.join(inner)}]"))
            return parts
        return None

    def _makers(self, place: _Place, value: str) -> Iterator[tuple[_Place, OpNode]]:
        """Yield the ops that a value originates from, nearest first, across calls and the wire."""
        seen = set()
        while (where := (id(place.function), id(place.call), value)) not in seen:
            seen.add(where)
            node = place.function.producer(value)
            if node is None:
                if place.call is None or place.caller is None:
                    return
                index = place.function.inputs.index(value)
                value = place.call.inputs[index] if index < len(place.call.inputs) else ""
                place = place.caller
                continue
            yield place, node
            callee = self._functions.get(call_key(node))
            if callee is not None:
                value = callee.outputs[node.outputs.index(value)]
                place = _Place(callee, node, place)
            elif is_wire(node) and node.op_type in keys.INBOUND_OPS:
                home = place.function.metadata.get(keys.HOME_KEY) or ""
                source = self._sends.get((home, node.name))
                if source is None or value != node.outputs[0]:
                    return
                place, value = _Place(source[0]), source[1]
            elif node.domain == keys.SYSCALL_DOMAIN and node.op_type in _TRANSPARENT:
                value = node.inputs[0]
            else:
                return

    def _taken_apart(self, main: Function, value: str) -> list[str] | None:
        """Return the part types of a composite from an Unbundle that reads it; None without one."""
        names = [value]
        while names:
            for node in main.readers(names.pop()):
                if node.op_type == keys.OP_UNBUNDLE and node.domain == keys.COMPOSITE_DOMAIN:
                    return [_name(main.kind_of(name)) for name in node.outputs]
                if node.domain == keys.SYSCALL_DOMAIN and node.op_type in _TRANSPARENT:
                    names += node.outputs
        return None


def _text(value: object) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
