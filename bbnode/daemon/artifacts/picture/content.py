"""The content of a picture: panels of boxes, edges in them, wires between them.

Rule: a gate or deadline check is drawn on the box of the op that it guards; every other op has a
box of its own, but for constants, which are a line in the boxes of their readers unless asked for.
What is not drawn (values of implied edges, metadata, attributes) is text in the details of a box;
long values are cut. `layout` fills in the positions.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from math import prod
from typing import TypedDict

from bbnode.daemon.artifacts.inspect import (
    WireCrossing,
    bindings_of,
    deadline_of,
    mains_of,
    wire_edges,
)
from bbnode.daemon.artifacts.listing import cut, short, show
from bbnode.daemon.artifacts.picture import text
from bbnode.ir import keys
from bbnode.ir.errors import AuthorError, DeploymentError
from bbnode.ir.graph import (
    Attribute,
    AttributeKind,
    Function,
    OpNode,
    Program,
    Tensor,
    is_onnx_op,
    is_role,
)
from bbnode.ir.reopen import home_of
from bbnode.ir.slots import Binding

# Nobody can read a larger picture, and laying it out would take minutes.
MAX_BOXES = 1500
# Sum of the rows that all edges pass, with which the layout's time grows (8 s on one core at most).
MAX_PASSED_ROWS = 60_000
MAX_LISTED_OPS = 400
# These fit into a line of a box.
MAX_ARGUMENTS = 4
MAX_ARGUMENT_CHARS = 24
# A constant with more elements is shown by its type and shape.
MAX_ELEMENTS_SHOWN = 4

_TX_GATES = frozenset({keys.OP_PEER_HEALTH_GATE_TX, keys.OP_BACKOFF_GATE_TX})
_SHOWN_IN_A_BOX = frozenset(
    {
        *(AttributeKind.INT, AttributeKind.FLOAT, AttributeKind.INTS, AttributeKind.FLOATS),
        AttributeKind.STRING,
    }
)

Point = tuple[float, float]


class PictureTooLarge(DeploymentError):
    """The program has more ops, or more edges between them, than a picture can show."""

    def __init__(self, content: str, most: int) -> None:
        super().__init__(
            f"the artifact has {content}, a picture shows at most {most}; use `bbnode inspect` "
            "without --svg and --html, or `bbnode compile --dump-after` for the text"
        )


@dataclass(slots=True)
class Rect:
    """A place in the picture, in pixels from its upper left corner."""

    x: float = 0.0
    y: float = 0.0
    width: float = 0.0
    height: float = 0.0

    @property
    def centre(self) -> float:
        """The x of its middle."""
        return self.x + self.width / 2

    @property
    def bottom(self) -> float:
        """The y of its lower edge."""
        return self.y + self.height


@dataclass(slots=True)
class Pill:
    """A gate on the box of its wire op; `key` finds its details."""

    key: str
    label: str
    rect: Rect = field(default_factory=Rect)


@dataclass(slots=True, kw_only=True, eq=False)
class Box:
    """One op with its gates and its deadline check, or a port of the function.

    `kind` is role, backend, wire, call, syscall, input or output; `number` the op's place in
    the function, from 1, and 0 for a port. `key` is unique in the picture. `rect` is the op
    itself, its gates stand above (`before`) and below (`behind`) it.
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
    row: int = 0
    rect: Rect = field(default_factory=Rect)

    @property
    def is_port(self) -> bool:
        """True for an input or output of the function."""
        return self.kind in ("input", "output")


@dataclass(slots=True, kw_only=True, eq=False)
class Edge:
    """One box needs another: `data`, or just the order (`after`, `control`).

    Its line leads down through `points`: straight where x stays, else a curve.
    """

    source: Box
    target: Box
    kind: str
    label: str
    points: tuple[Point, ...] = ()


@dataclass(slots=True, kw_only=True, eq=False)
class DrawnWire:
    """A value that travels from a box of one panel to a box of another.

    Its line is a polyline with right angles; `place` is where its label stands.
    """

    source: Box
    target: Box
    panels: tuple[int, int]
    label: str
    tooltip: str
    points: tuple[Point, ...] = ()
    place: Rect = field(default_factory=Rect)


@dataclass(slots=True)
class Chip:
    """One slot in a panel's header."""

    rect: Rect
    label: str
    role: str


@dataclass(slots=True, kw_only=True)
class Panel:
    """One function: a partition, a bootstrap, or a Module body that partitions call.

    `ops` counts gates and deadline checks as well, and constants that are not drawn. Panels of one
    `peer_class` stand below each other, where `layout` can: `column` is where.
    """

    title: str
    subtitle: str
    peer_class: str
    ops: int
    slots: tuple[Binding, ...]
    boxes: list[Box]
    edges: list[Edge]
    column: int = 0
    rect: Rect = field(default_factory=Rect)
    header_height: float = 0.0
    chips: list[Chip] = field(default_factory=list)


class PortDetail(TypedDict):
    """One input or output: `boxes` are keys of the ops that make or read it."""

    name: str
    type: str
    boxes: list[str]


class Detail(TypedDict):
    """One op; the ops guarding it are in `guards`."""

    name: str
    op: str
    domain: str
    inputs: list[PortDetail]
    outputs: list[PortDetail]
    waits: list[PortDetail]
    attributes: dict[str, str]
    metadata: dict[str, str]
    graph: list[str]
    guards: list[str]


@dataclass(slots=True)
class Sample:
    """One entry of the legend: a sign, and what it stands for.

    `sign` is box (in the colours of `name`, a role or the kind of a box), line (of the kind `name`
    of an edge, or "wire"), gate, or empty where the label says it. `rect` is filled in by `layout`.
    """

    sign: str
    name: str
    label: str
    rect: Rect = field(default_factory=Rect)


@dataclass(slots=True, kw_only=True)
class DrawnProgram:
    """The content of a picture; `details` by key of box or pill.

    `folded` has the constants that are not drawn, by key: the keys of the boxes that read them.
    """

    name: str
    panels: list[Panel]
    wires: list[DrawnWire]
    details: Mapping[str, Detail]
    folded: Mapping[str, Sequence[str]] = field(default_factory=dict)
    legend: list[Sample] = field(default_factory=list)
    width: float = 0.0
    height: float = 0.0


def read(program: Program, *, fold: bool = True) -> DrawnProgram:
    """Return the picture's content; with `fold`, constants are lines in the boxes of their readers.

    Raises PictureTooLarge above `MAX_BOXES`, and `layout` above `MAX_PASSED_ROWS`.
    """
    mains = mains_of(program)
    subgraphs = {f.name: f for f in program.functions if f.domain == keys.BACKEND_SUBGRAPH_DOMAIN}
    bodies = [
        f for f in program.functions if f not in mains and f.domain != keys.BACKEND_SUBGRAPH_DOMAIN
    ]
    total = sum(len(function.nodes) for function in (*mains, *bodies))
    if total > MAX_BOXES:
        raise PictureTooLarge(f"{total} ops", MAX_BOXES)
    bindings = bindings_of(program)
    crossings = list(wire_edges(mains))
    mains = _from_home(mains, crossings, home_of(program))
    far_ends = {each.recv: f"← {class_of(each.source)}" for each in crossings}
    far_ends |= {each.send: f"→ {class_of(each.to)}" for each in crossings if each.send}
    readers = [
        _Reader(f"p{index}", function, bindings.get(function.name, []), subgraphs, far_ends)
        for index, function in enumerate((*mains, *bodies))
    ]
    callers = _callers(mains, bodies)
    panels = [reader.panel(callers) for reader in readers]
    folded: dict[str, list[str]] = {}
    if fold:
        for reader, panel in zip(readers, panels, strict=True):
            folded |= reader.fold_constants(panel)
    wires = list(_wires(readers, crossings))
    return DrawnProgram(
        name=program.name,
        panels=panels,
        wires=wires,
        legend=list(_legend(panels, wires)),
        folded=folded,
        details={key: detail for reader in readers for key, detail in reader.details().items()},
    )


def _callers(mains: Sequence[Function], bodies: Sequence[Function]) -> dict[str, str]:
    """Return the class of peer that calls each Module body first, by the body's name."""
    callers: dict[str, str] = {}
    for function in (*mains, *bodies):
        for node in function.nodes:
            if node.domain == keys.MODULE_DOMAIN:
                caller = callers.get(function.name) or class_of(function)
                callers.setdefault(node.op_type, caller)
    return callers


# Names of boxes without a role; a backend's ops may have no slot of their own.
_KINDS = {
    "wire": "sends or receives",
    "backend": "Backend",
    "call": "calls a Module",
    "syscall": "framework op",
    "input": "input or output",
}
_LINES = {"data": "data", "after": "order, by the author", "control": "order in a slot"}


def _legend(panels: Sequence[Panel], wires: Sequence[DrawnWire]) -> Iterator[Sample]:
    """Yield the entries of the legend: only the signs that this picture uses."""
    boxes = [box for panel in panels for box in panel.boxes]
    roles = sorted({box.role for box in boxes if box.role})
    yield from (Sample("box", role, role) for role in roles)
    kinds = {"input" if box.is_port else box.kind for box in boxes if not box.role}
    yield from (Sample("box", k, t) for k, t in _KINDS.items() if k in kinds and t not in roles)
    lines = {edge.kind for panel in panels for edge in panel.edges}
    yield from (Sample("line", kind, label) for kind, label in _LINES.items() if kind in lines)
    if wires:
        yield Sample("line", "wire", "over the network")
    if any(box.before or box.behind for box in boxes):
        yield Sample("gate", "", "gate")
    if any(box.deadline for box in boxes):
        yield Sample("", "", "≤ 10 s: checked against this deadline")
    yield Sample("", "", "small number: place in program order")


def _from_home(
    mains: Sequence[Function], crossings: Sequence[WireCrossing], home: str | None
) -> list[Function]:
    """Return the partitions from left to right: the home class, then those that it reaches.

    Each stands after the one that first sends to it. Without a known home class, the partitions
    with inputs go first.
    """
    sends: dict[str, list[str]] = {}
    for each in crossings:
        if each.source is not None:
            sends.setdefault(each.source.name, []).append(each.to.name)
    starts = sorted(mains, key=lambda main: (class_of(main) != home, not main.inputs))
    by_name = {main.name: main for main in mains}
    reached: dict[str, Function] = {}
    for start in starts:
        todo = deque([start.name])
        while todo:
            name = todo.popleft()
            if name not in reached:
                reached[name] = by_name[name]
                todo.extend(sends.get(name, ()))
    return list(reached.values())


def class_of(function: Function | None) -> str:
    """Return the class of peer that a partition is for."""
    return function.metadata.get(keys.HOME_KEY) or function.name if function else "?"


class _Reader:
    def __init__(
        self,
        prefix: str,
        function: Function,
        bindings: Iterable[Binding],
        subgraphs: Mapping[str, Function],
        far_ends: Mapping[OpNode, str],
    ) -> None:
        self.function = function
        self._prefix = prefix
        self._bindings = {binding.slot: binding for binding in bindings}
        self._subgraphs = subgraphs
        self._far_ends = far_ends
        self.boxes: list[Box] = [self._port("input", name) for name in function.inputs]
        self.box_of: dict[OpNode, Box] = {}
        # Keys of nodes that are drawn as a pill on another node's box.
        self._pills: dict[OpNode, str] = {}
        self._made = {box.title: box for box in self.boxes}
        self._read()

    def _read(self) -> None:
        hosts = self._hosts()
        numbers = {node: index + 1 for index, node in enumerate(self.function.nodes)}
        for node, number in numbers.items():
            if node not in hosts:
                self.box_of[node] = self._box(number, node)
                self.boxes.append(self.box_of[node])
        for node, host in hosts.items():
            box = self.box_of[node] = self.box_of[host]
            if node.op_type == keys.OP_DEADLINE_CHECK:
                if node.metadata.get(keys.DEADLINE_FROM_KEY) != keys.DEADLINE_FROM_NOBODY:
                    box.deadline = text.duration(deadline_of(node))
                continue
            self._pills[node] = f"{self._prefix}n{numbers[node]}"
            pill = Pill(self._pills[node], node.op_type)
            (box.before if node.op_type in _TX_GATES else box.behind).append(pill)
        for node in self.function.nodes:
            self._made.update((name, self.box_of[node]) for name in node.outputs if name)
        self._ports = []
        for name in self.function.outputs:
            maker = self._made.get(name)
            if maker is None or maker.kind != "output":
                self._ports.append(self._port("output", name))
        self.boxes += self._ports

    def _hosts(self) -> dict[OpNode, OpNode]:
        """Return the nodes drawn on another node's box: gate or check to the op it guards."""
        by_name = {node.name: node for node in self.function.nodes}
        hosts: dict[OpNode, OpNode] = {}
        for node in self.function.nodes:
            guarded = by_name.get(_guarded(node) or "")
            if guarded is not None and guarded is not node:
                hosts[node] = guarded
        # Chains or cycles of guards, as in a malformed artifact, get boxes of their own.
        return {node: host for node, host in hosts.items() if host not in hosts}

    def _port(self, kind: str, name: str) -> Box:
        kind_of_value = self._kind(name)
        return Box(
            key=f"{self._prefix}{kind}:{name}",
            kind=kind,
            number=0,
            title=name,
            lines=(kind_of_value,) if kind_of_value else (),
        )

    def _box(self, number: int, node: OpNode) -> Box:
        kind, title, lines = self._describe(node)
        return Box(
            key=f"{self._prefix}n{number}",
            kind=kind,
            number=number,
            title=title,
            lines=tuple(line for line in lines if line),
            role=_role_of(node, self._bindings.get(node.metadata.get(keys.SLOT_KEY, ""))),
        )

    def _describe(self, node: OpNode) -> tuple[str, str, list[str]]:
        """Return kind, title and lines of a box."""
        arguments = ", ".join(_arguments(node))
        if node.domain == keys.WIRE_DOMAIN:
            port = node.metadata.get(keys.PORT_KEY, "")
            far_end = self._far_ends.get(node, "")
            return "wire", node.op_type, [f"{port} {far_end}".strip(), arguments]
        if node.domain == keys.BACKEND_SUBGRAPH_DOMAIN:
            graph = self._subgraphs.get(node.op_type)
            ops = [] if graph is None else [inner.op_type for inner in graph.nodes]
            title = ops[0] if len(ops) == 1 else f"graph of {text.counted(len(ops), 'op')}"
            return "backend", title, [self._slot_line(node), ", ".join(_runs(ops)) * (len(ops) > 1)]
        if node.domain == keys.MODULE_DOMAIN:
            home = node.metadata.get(keys.HOME_CLASS_KEY)
            return "call", node.op_type, [f"Module, in {home}"]
        if _is_output(node, self.function):
            return "output", node.outputs[0], [self._kind(node.outputs[0])]
        if is_role(node):
            return "role", node.op_type, [self._slot_line(node), arguments]
        if is_onnx_op(node):
            return "backend", node.op_type, [self._slot_line(node), arguments]
        return "syscall", node.op_type, [arguments]

    def _slot_line(self, node: OpNode) -> str:
        slot = node.metadata.get(keys.SLOT_KEY, "")
        binding = self._bindings.get(slot)
        component = binding.type_name.rpartition(".")[2] if binding is not None else ""
        return f"{slot} · {component}" if component else slot

    def _kind(self, name: str) -> str:
        known = self.function.kind_of(name)
        return "" if known is None else known.name

    def panel(self, callers: Mapping[str, str]) -> Panel:
        """Return the function's panel, without positions; `callers` as `_callers` returns."""
        function = self.function
        title, subtitle, peer_class = class_of(function), function.name, class_of(function)
        if keys.TARGET_KEY not in function.metadata:
            title = function.name
            subtitle = "called by partitions"
            if function.metadata.get(keys.MODULE_PHASE_KEY) == keys.BOOTSTRAP_PHASE:
                subtitle = f"bootstrap of {peer_class}, before it is ready"
            elif not function.metadata.get(keys.HOME_KEY):
                peer_class = callers.get(function.name, peer_class)
        return Panel(
            title=title,
            subtitle=subtitle,
            peer_class=peer_class,
            ops=len(self.function.nodes),
            slots=tuple(sorted(self._bindings.values(), key=lambda b: (b.slot_id, b.slot))),
            boxes=self.boxes,
            edges=list(self._edges()),
        )

    def fold_constants(self, panel: Panel) -> dict[str, list[str]]:
        """Take constants out of the panel and write their values into the boxes of their readers.

        A constant that waits for something, that others wait for, or that is an output stays.
        Returns the keys of the readers, by the key of the constant.
        """
        constants = {
            self.box_of[node]: node
            for node in self.function.nodes
            if node.op_type == "Constant" and node not in self._pills
        }
        leaving: dict[Box, list[Edge]] = {}
        for edge in panel.edges:
            constants.pop(edge.target, None)
            leaving.setdefault(edge.source, []).append(edge)
        values: dict[Box, list[str]] = {}
        folded: dict[str, list[str]] = {}
        for box, node in constants.items():
            edges = leaving.get(box, [])
            if box.before or box.behind or not edges:
                continue
            if any(edge.kind != "data" or edge.target.is_port for edge in edges):
                continue
            folded[box.key] = [edge.target.key for edge in edges]
            for edge in edges:
                values.setdefault(edge.target, []).append(_value_of(node))
        for box, shown in values.items():
            word = "constants" if shown[1:] else "constant"
            listed = ", ".join(shown[:MAX_ARGUMENTS]) + ", …" * (len(shown) > MAX_ARGUMENTS)
            box.lines = (*box.lines, f"{word} {listed}")
        panel.boxes = [box for box in panel.boxes if box.key not in folded]
        panel.edges = [edge for edge in panel.edges if edge.source.key not in folded]
        return folded

    def _edges(self) -> Iterator[Edge]:
        """Yield data edges, then `after` and `control_after` edges between other pairs of boxes."""
        labelled: dict[tuple[Box, Box], tuple[str, dict[str, None]]] = {}
        for kind, source, target, label in self._needs():
            if source is not None and source is not target:
                first, labels = labelled.setdefault((source, target), (kind, {}))
                if first == kind:
                    labels[label] = None
        for (source, target), (kind, labels) in labelled.items():
            yield Edge(source=source, target=target, kind=kind, label=", ".join(labels))

    def _needs(self) -> Iterator[tuple[str, Box | None, Box, str]]:
        for node in self.function.nodes:
            for name in node.computes_with:
                yield "data", self._made.get(name), self.box_of[node], self._typed(name)
        for port in self._ports:
            yield "data", self._made.get(port.title), port, self._typed(port.title)
        for node in self.function.nodes:
            for name in node.after:
                yield "after", self._made.get(name), self.box_of[node], f"after {name}"
        by_name = {node.name: node for node in self.function.nodes}
        for node in self.function.nodes:
            for name in node.metadata.get(keys.CONTROL_AFTER_KEY, "").split(","):
                if name in by_name:
                    label = "in program order, since both use one slot"
                    yield "control", self.box_of[by_name[name]], self.box_of[node], label

    def _typed(self, name: str) -> str:
        kind = self._kind(name)
        return f"{name}: {kind}" if kind else name

    def details(self) -> dict[str, Detail]:
        """Return details of all nodes, by the key of their box or pill; a check has its op's."""
        key_of = {node: self._pills.get(node, box.key) for node, box in self.box_of.items()}
        readers: dict[str, dict[str, None]] = {}
        for node in self.function.nodes:
            for name in node.reads:
                readers.setdefault(name, {})[key_of[node]] = None

        def made(name: str) -> PortDetail:
            maker = self.function.producer(name)
            boxes = [] if maker is None else [key_of[maker]]
            return PortDetail(name=name, type=self._kind(name), boxes=boxes)

        details: dict[str, Detail] = {}
        guards: dict[str, list[str]] = {}
        for node in self.function.nodes:
            key, graph = key_of[node], None
            if node.op_type == keys.OP_DEADLINE_CHECK and node.domain == keys.SYSCALL_DOMAIN:
                guards.setdefault(key, []).append(node.name)
                if _guarded(node) is not None:
                    continue
            if node.domain == keys.BACKEND_SUBGRAPH_DOMAIN:
                graph = self._subgraphs.get(node.op_type)
            notes = {**node.metadata, "after": ",".join(node.after)}
            notes |= {"source_line": node.source_line, "made_by": node.made_by}
            details[key] = Detail(
                name=node.name,
                op=node.op_type,
                domain=node.domain or keys.ONNX_DOMAIN,
                inputs=[made(name) for name in node.inputs if name],
                outputs=[
                    PortDetail(name=name, type=self._kind(name), boxes=list(readers.get(name, ())))
                    for name in node.outputs
                    if name
                ],
                waits=[made(name) for name in node.after],
                attributes={short(name): _shown(each) for name, each in node.attributes.items()},
                metadata={short(key): cut(value) for key, value in notes.items() if value},
                graph=[] if graph is None else list(_graph_lines(graph)),
                guards=[],
            )
        for key, names in guards.items():
            if key in details:
                details[key]["guards"] = names
        return details


def _guarded(node: OpNode) -> str | None:
    """Return the name of the node that a gate or deadline check guards."""
    if node.domain != keys.SYSCALL_DOMAIN:
        return None
    if node.op_type == keys.OP_DEADLINE_CHECK:
        return node.metadata.get(keys.DEADLINE_CHECK_SOURCE_KEY)
    return node.metadata.get(keys.GATE_SOURCES.get(node.op_type, ""))


def _is_output(node: OpNode, function: Function) -> bool:
    return (
        node.domain == keys.SYSCALL_DOMAIN
        and node.op_type == "PassThrough"
        and bool(node.outputs)
        and node.outputs[0] in function.outputs
    )


def _role_of(node: OpNode, binding: Binding | None) -> str:
    """Return the role whose slot an op uses, or ""."""
    if node.domain.startswith(keys.PROTOCOL_DOMAIN_PREFIX):
        return "Protocol"
    if is_role(node):
        snake = node.domain.removeprefix(keys.ROLE_DOMAIN_PREFIX)
        return "".join(part.capitalize() for part in snake.split("_"))
    if node.domain == keys.BACKEND_SUBGRAPH_DOMAIN:
        return "Backend"
    return binding.role if binding is not None else ""


def _arguments(node: OpNode) -> list[str]:
    """Return the attributes that are numbers or short texts, as `epochs=5`."""
    shown = []
    for name, attribute in node.attributes.items():
        if name.startswith(keys.PREFIX) or name == keys.ATTR_DEADLINE_NS:
            continue
        value = _shown(attribute)
        if attribute.kind is AttributeKind.TENSOR:
            shown.append(value)
        elif attribute.kind in _SHOWN_IN_A_BOX and len(value) <= MAX_ARGUMENT_CHARS:
            shown.append(f"{name}={value}")
    return shown[:MAX_ARGUMENTS]


def _value_of(constant: OpNode) -> str:
    """Return the value of a constant as text."""
    values = [_shown(attribute) for attribute in constant.attributes.values()]
    return ", ".join(values) or "?"


def _shown(attribute: Attribute) -> str:
    """Return an attribute's value as `show` does, but the elements of a small tensor."""
    tensor = attribute.value
    if attribute.kind is not AttributeKind.TENSOR or not isinstance(tensor, Tensor):
        return show(attribute)
    if prod(tensor.shape) > MAX_ELEMENTS_SHOWN:
        return show(attribute)
    try:
        values = tensor.numpy()
    except AuthorError:  # a malformed one
        return show(attribute)
    is_float = values.dtype.kind == "f"
    numbers = [f"{each:.6g}" if is_float else str(each) for each in values.flat]
    listed = ", ".join(map(cut, numbers))
    return cut(listed if not values.ndim else f"[{listed}]")


def _graph_lines(graph: Function) -> Iterator[str]:
    for node in graph.nodes[:MAX_LISTED_OPS]:
        yield f"{', '.join(node.outputs)} = {node.op_type}({', '.join(node.inputs)})"
    if len(graph.nodes) > MAX_LISTED_OPS:
        yield f"… and {len(graph.nodes) - MAX_LISTED_OPS} more"


def _runs(ops: Sequence[str]) -> Iterator[str]:
    """Yield op types in order, repeats counted: `Relu`, `3 Add`."""
    for op, group in groupby(ops):
        count = sum(1 for _ in group)
        yield op if count == 1 else f"{count} {op}"


def _wires(readers: Sequence[_Reader], edges: Iterable[WireCrossing]) -> Iterator[DrawnWire]:
    panels = {reader.function.name: index for index, reader in enumerate(readers)}
    for edge in edges:
        send, recv = edge.send, edge.recv
        if edge.source is None or send is None:
            continue
        ends = (panels[edge.source.name], panels[edge.to.name])
        value = recv.outputs[0] if recv.outputs else ""
        label = send.metadata.get(keys.PORT_KEY) or value
        if send.op_type == keys.OP_SEND_RESP:
            label = f"{label}: answer"
        known = edge.to.kind_of(value)
        carried = "" if known is None else known.name
        if send.metadata.get(keys.WIRE_TRANSPORT_KEY) == keys.TRANSPORT_TRIGGER_ONLY:
            carried = "trigger only"
        yield DrawnWire(
            source=readers[ends[0]].box_of[send],
            target=readers[ends[1]].box_of[recv],
            panels=ends,
            label=f"{label} · {carried}" if carried else label,
            tooltip=f"{value} travels from {class_of(edge.source)} to {class_of(edge.to)}, "
            f"site {recv.metadata.get(keys.SITE_ID_KEY, '')}",
        )
