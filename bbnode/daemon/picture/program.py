"""What a picture shows: panels of boxes, edges in them, wires between them.

Rule: gates and deadline checks belong to the op that they guard, and are drawn on its box; every
other op is a box of its own. Whatever is left out of the drawing (values of implied edges,
metadata, attributes) is in the box's details.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import onnx
from onnx import FunctionProto, NodeProto

from bbnode.compiler.analysis import order
from bbnode.daemon.inspect import WirePair, bindings_of, deadline_of, mains_of, wire_pairs
from bbnode.daemon.picture import details, text
from bbnode.ir import keys, protos
from bbnode.ir.errors import DeploymentError
from bbnode.ir.onnx_file import function_of
from bbnode.ir.slots import Binding
from bbnode.ir.types import TypeNode

# Beyond this nobody reads a picture, and laying it out would take minutes.
MAX_BOXES = 1500

_TX_GATES = frozenset({keys.OP_PEER_HEALTH_GATE_TX, keys.OP_BACKOFF_GATE_TX})


class PictureTooLarge(DeploymentError):
    """The program has more ops than a picture can show."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pill:
    """A gate on the box of its wire op; `key` finds its details."""

    key: str
    label: str


@dataclass(slots=True, kw_only=True)
class Box:
    """One op with its gates and its deadline check, or a port of the function.

    `kind` is role, backend, wire, call, syscall, input or output; `number` the op's place in
    the function, from 1, and 0 for a port. `key` is unique in the picture.
    """

    key: str
    kind: str
    number: int
    title: str
    lines: tuple[str, ...] = ()
    role: str = ""
    deadline: str = ""
    before: list[Pill] = field(default_factory=list)
    behind: list[Pill] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """One box needs another: `data`, or just the order (`after`, `control`); indices of boxes."""

    source: int
    target: int
    kind: str
    label: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Wire:
    """What travels: (panel, box) that sends, (panel, box) that receives."""

    source: tuple[int, int]
    target: tuple[int, int]
    label: str
    tooltip: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One function: a partition, or a Module body that partitions call.

    `ops` counts gates and deadline checks as well.
    """

    title: str
    subtitle: str
    ops: int
    slots: tuple[Binding, ...]
    boxes: tuple[Box, ...]
    edges: tuple[Edge, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """Everything that a picture shows; `details` by key of box or pill."""

    name: str
    panels: tuple[Panel, ...]
    wires: tuple[Wire, ...]
    details: Mapping[str, details.Detail]


def read(model: onnx.ModelProto) -> Program:
    """The picture's content. Raises PictureTooLarge above `MAX_BOXES`."""
    mains = mains_of(model)
    shown = [*mains, *(f for f in model.functions if _is_body(f, mains))]
    total = sum(len(function.node) for function in shown)
    if total > MAX_BOXES:
        raise PictureTooLarge(
            f"the artifact has {total} ops, a picture shows at most {MAX_BOXES}; use `bbnode "
            "inspect` without --svg and --html, or `bbnode compile --dump-after` for the text"
        )
    bindings = bindings_of(model)
    graphs = {f.name: f for f in model.functions if f.domain == keys.BACKEND_SUBGRAPH_DOMAIN}
    pairs = list(wire_pairs(mains))
    far = _far_ends(pairs)
    readers = [
        _Reader(index, function, bindings.get(function.name, []), graphs, far)
        for index, function in enumerate(shown)
    ]
    found: dict[str, details.Detail] = {}
    for reader in readers:
        found.update(reader.details())
    return Program(
        name=model.graph.name,
        panels=tuple(reader.panel() for reader in readers),
        wires=tuple(_wires(readers, pairs)),
        details=found,
    )


def _is_body(function: FunctionProto, mains: list[FunctionProto]) -> bool:
    return function.domain != keys.BACKEND_SUBGRAPH_DOMAIN and function not in mains


def _far_ends(pairs: list[WirePair]) -> dict[str, str]:
    """`→ class` or `← class` by `<function>\\0<node>` of a wire op."""
    found = {}
    for pair in pairs:
        found[f"{pair.to.name}\0{pair.recv.name}"] = f"← {class_of(pair.source)}"
        if pair.source is not None and pair.send is not None:
            found[f"{pair.source.name}\0{pair.send.name}"] = f"→ {class_of(pair.to)}"
    return found


def class_of(function: FunctionProto | None) -> str:
    """The class of peer that a partition is for."""
    return (protos.get_meta(function, keys.HOME_KEY) or function.name) if function else "?"


class _Reader:
    """Reads one function."""

    def __init__(
        self,
        index: int,
        function: FunctionProto,
        bindings: list[Binding],
        graphs: Mapping[str, FunctionProto],
        far: Mapping[str, str],
    ) -> None:
        self.function = function
        self._prefix = f"p{index}"
        self._bindings = {binding.slot: binding for binding in bindings}
        self._graphs = graphs
        self._far = far
        self._types = protos.value_types(function)
        self.boxes: list[Box] = []
        self._box_of_node: dict[int, int] = {}
        self._made: dict[str, int] = {}  # value -> box
        self.box_by_name: dict[str, int] = {}  # node name -> box
        self._read()

    def _read(self) -> None:
        for name in self.function.input:
            self._made[name] = len(self.boxes)
            self.boxes.append(self._port("input", name))
        hosts = self._hosts()
        for index, node in enumerate(self.function.node):
            if index not in hosts:
                self._box_of_node[index] = len(self.boxes)
                self.boxes.append(self._box(index, node))
        for index, host in hosts.items():
            self._attach(index, self._box_of_node[host])
        for index, node in enumerate(self.function.node):
            box = self._box_of_node[index]
            self.box_by_name[node.name] = box
            self._made.update((name, box) for name in node.output if name)
        for name in self.function.output:
            made = self._made.get(name)
            if made is None or self.boxes[made].kind != "output":
                self.boxes.append(self._port("output", name))

    def _hosts(self) -> dict[int, int]:
        """Nodes that are drawn on another node's box: gate or check to the op it guards."""
        by_name = {node.name: index for index, node in enumerate(self.function.node)}
        found: dict[int, int] = {}
        for index, node in enumerate(self.function.node):
            guarded = _guarded(node)
            if guarded is not None and by_name.get(guarded, index) != index:
                found[index] = by_name[guarded]
        # A chain of guards would be odd, and a ring of them a malformed artifact: those stay.
        return {index: host for index, host in found.items() if host not in found}

    def _attach(self, index: int, host: int) -> None:
        node = self.function.node[index]
        self._box_of_node[index] = host
        box = self.boxes[host]
        if node.op_type == keys.OP_DEADLINE_CHECK:
            box.deadline = text.duration(deadline_of(node))
            return
        gate = Pill(key=f"{self._prefix}n{index}", label=node.op_type)
        (box.before if node.op_type in _TX_GATES else box.behind).append(gate)

    def _port(self, kind: str, name: str) -> Box:
        known = self._types.get(name)
        return Box(
            key=f"{self._prefix}{kind}:{name}",
            kind=kind,
            number=0,
            title=name,
            lines=(known.name,) if known is not None else (),
        )

    def _box(self, index: int, node: NodeProto) -> Box:
        kind, title, lines = self._describe(node)
        slot = protos.get_meta(node, keys.SLOT_KEY)
        return Box(
            key=f"{self._prefix}n{index}",
            kind=kind,
            number=index + 1,
            title=title,
            lines=tuple(line for line in lines if line),
            role=details.role_of(node, self._bindings.get(slot or "")),
        )

    def _describe(self, node: NodeProto) -> tuple[str, str, list[str]]:
        """Kind, title and lines of a box."""
        arguments = details.arguments(node)
        if node.domain == keys.WIRE_DOMAIN:
            port = protos.get_meta(node, keys.PORT_KEY) or ""
            end = self._far.get(f"{self.function.name}\0{node.name}", "")
            return "wire", node.op_type, [f"{port} {end}".strip(), arguments]
        if node.domain == keys.BACKEND_SUBGRAPH_DOMAIN:
            graph = self._graphs.get(node.op_type)
            ops = [] if graph is None else [inner.op_type for inner in graph.node]
            title = ops[0] if len(ops) == 1 else f"graph of {text.counted(len(ops), 'op')}"
            listed = ", ".join(details.runs(ops)) if len(ops) > 1 else ""
            return "backend", title, [self._slot_line(node), listed]
        if node.domain == keys.MODULE_DOMAIN:
            return (
                "call",
                node.op_type,
                [f"Module, in {protos.get_meta(node, keys.HOME_CLASS_KEY)}"],
            )
        if _is_output(node, self.function):
            known = self._types.get(node.output[0])
            return "output", node.output[0], [known.name if known is not None else ""]
        if (
            protos.is_role(node)
            or protos.is_onnx_domain(node.domain)
            or node.domain == keys.ONNX_ML_DOMAIN
        ):
            kind = "role" if protos.is_role(node) else "backend"
            return kind, node.op_type, [self._slot_line(node), arguments]
        return "syscall", node.op_type, [arguments]

    def _slot_line(self, node: NodeProto) -> str:
        slot = protos.get_meta(node, keys.SLOT_KEY) or ""
        binding = self._bindings.get(slot)
        component = binding.type_name.rpartition(".")[2] if binding is not None else ""
        return f"{slot} · {component}" if component else slot

    def panel(self) -> Panel:
        main = protos.get_meta(self.function, keys.TARGET_KEY) is not None
        return Panel(
            title=class_of(self.function) if main else self.function.name,
            subtitle=self.function.name if main else "called by partitions",
            ops=len(self.function.node),
            slots=tuple(sorted(self._bindings.values(), key=lambda b: (b.slot_id, b.slot))),
            boxes=tuple(self.boxes),
            edges=tuple(self._edges()),
        )

    def details(self) -> dict[str, details.Detail]:
        """Details of all nodes, by the key of their box or pill."""
        # A gate has a pill; a deadline check has none, and is told of on its op.
        where = {index: self.boxes[box].key for index, box in self._box_of_node.items()}
        for box in self.boxes:
            for pill in (*box.before, *box.behind):
                where[int(pill.key.removeprefix(f"{self._prefix}n"))] = pill.key
        return details.of_function(self.function, where, self._types, self._graphs)

    def _edges(self) -> Iterator[Edge]:
        """Data edges, then `after` and `control_after` edges between other pairs of boxes."""
        labels: dict[tuple[int, int], list[str]] = {}
        kinds: dict[tuple[int, int], str] = {}
        for kind, source, target, label in self._needs():
            if source == target:
                continue
            kinds.setdefault((source, target), kind)
            if kinds[source, target] == kind:
                known = labels.setdefault((source, target), [])
                if label not in known:
                    known.append(label)
        for (source, target), names in labels.items():
            yield Edge(
                source=source,
                target=target,
                kind=kinds[source, target],
                label=", ".join(names),
            )

    def _needs(self) -> Iterator[tuple[str, int, int, str]]:
        nodes = list(enumerate(function_of(self.function).nodes))
        for index, node in nodes:
            for name in node.computes_with:
                if name in self._made:
                    yield "data", self._made[name], self._box_of_node[index], self._typed(name)
        for box, port in enumerate(self.boxes):
            if port.kind == "output" and port.number == 0 and port.title in self._made:
                yield "data", self._made[port.title], box, self._typed(port.title)
        for index, node in nodes:
            for name in node.after:
                if name in self._made:
                    yield "after", self._made[name], self._box_of_node[index], f"after {name}"
        for index, node in nodes:
            for name in order.split_names(node.metadata.get(keys.CONTROL_AFTER_KEY)):
                if name in self.box_by_name:
                    label = "in program order, since both use one slot"
                    yield "control", self.box_by_name[name], self._box_of_node[index], label

    def _typed(self, name: str) -> str:
        known: TypeNode | None = self._types.get(name)
        return name if known is None else f"{name}: {known.name}"


def _guarded(node: NodeProto) -> str | None:
    """Name of the node that a gate or deadline check guards."""
    if node.domain != keys.SYSCALL_DOMAIN:
        return None
    if node.op_type == keys.OP_DEADLINE_CHECK:
        return protos.get_meta(node, keys.DEADLINE_CHECK_SOURCE_KEY)
    source = keys.GATE_SOURCES.get(node.op_type)
    return protos.get_meta(node, source) if source is not None else None


def _is_output(node: NodeProto, function: FunctionProto) -> bool:
    return (
        node.domain == keys.SYSCALL_DOMAIN
        and node.op_type == "PassThrough"
        and bool(node.output)
        and node.output[0] in function.output
    )


def _wires(readers: list[_Reader], pairs: list[WirePair]) -> Iterator[Wire]:
    panels = {reader.function.name: index for index, reader in enumerate(readers)}
    for pair in pairs:
        if pair.source is None or pair.send is None:
            continue
        ends = []
        for function, node in ((pair.source, pair.send), (pair.to, pair.recv)):
            panel = panels[function.name]
            ends.append((panel, readers[panel].box_by_name[node.name]))
        value = pair.recv.output[0] if pair.recv.output else ""
        known = protos.value_types(pair.to).get(value)
        label = protos.get_meta(pair.send, keys.PORT_KEY) or value
        if pair.send.op_type == keys.OP_SEND_RESP:
            label = f"{label}: answer"
        trigger = protos.get_meta(pair.send, keys.WIRE_TRANSPORT_KEY) == keys.TRANSPORT_TRIGGER_ONLY
        carried = "trigger only" if trigger else known.name if known is not None else ""
        site = protos.get_meta(pair.recv, keys.SITE_ID_KEY) or ""
        yield Wire(
            source=ends[0],
            target=ends[1],
            label=f"{label} · {carried}" if carried else label,
            tooltip=f"{value} travels from {class_of(pair.source)} to {class_of(pair.to)}, "
            f"site {site}",
        )
