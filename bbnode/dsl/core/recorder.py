"""The recorder of a whole model: its Modules, its slots, and the program that they make.

Rule: a body is recorded every time it is called and stored once: functions that differ only in
their source lines are one. Nothing here depends on addresses, object hashes or time. A slot name
has one slot and one id in the whole model; ids count from 0 in order of first use.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from bbnode.dsl.errors import RecursiveModule, SlotConflict, recording
from bbnode.ir import keys
from bbnode.ir.graph import Function, OpNode, Program, sorted_opsets
from bbnode.ir.onnx_file import graph_proto, ir_version_for, joined_extras
from bbnode.ir.slots import ConcreteSpec

# Deeper than any real program; stops a recursion of Modules well before Python's own limit.
MAX_MODULE_DEPTH = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotUse:
    """The slot of one op, as written by its author."""

    name: str
    role: str
    concrete: ConcreteSpec | None = None
    peer_class: str | None = None
    include_self: bool = False


@dataclass(slots=True)
class _KnownSlot:
    id: int
    role: str
    concrete: ConcreteSpec | None = None
    instance: int = 0
    peer_class: str | None = None


class SlotTable:
    """Slots of one model.

    A name that means two roles, two configs or two peer classes is refused here. One that is
    both generic and concrete is left for the compiler to refuse (`AmbiguousRole`).
    """

    def __init__(self) -> None:
        self._slots: dict[str, _KnownSlot] = {}

    def check(self, use: SlotUse) -> None:
        """Raise SlotConflict if a use contradicts an earlier one of the same name."""
        known = self._slots.get(use.name)
        if known is None:
            return
        start = f"slot {use.name!r}"
        if known.role != use.role:
            raise SlotConflict(
                f"{start} is a {known.role} slot already; give the {use.role} its own name"
            )
        if known.concrete is not None and use.concrete not in (None, known.concrete):
            raise SlotConflict(
                f"{start} holds another {known.concrete.type_name} or another config already; one "
                "name is one component: use a second name, or the same config"
            )
        if known.peer_class not in (None, use.peer_class):
            raise SlotConflict(
                f"{start} selects peers of class {known.peer_class!r} already; use a second slot "
                f"for class {use.peer_class!r}"
            )

    def take(self, use: SlotUse) -> dict[str, str]:
        """Register a use and return the metadata for the op's node. Raises as `check`."""
        self.check(use)
        known = self._slots.setdefault(use.name, _KnownSlot(len(self._slots), use.role))
        meta = {keys.SLOT_KEY: use.name, keys.SLOT_ID_KEY: str(known.id)}
        if use.concrete is None:
            meta[keys.REQUIRED_TRAIT_KEY] = f"{use.role}Runtime"
        else:
            type_name = use.concrete.type_name
            if known.concrete is None:
                others = (s.concrete for s in self._slots.values() if s.concrete is not None)
                known.instance = sum(other.type_name == type_name for other in others)
                known.concrete = use.concrete
            meta[keys.CONCRETE_TYPE_KEY] = type_name
            meta[keys.INSTANCE_KEY] = str(known.instance)
        if use.peer_class is not None:
            known.peer_class = meta[keys.PEER_CLASS_KEY] = use.peer_class
        if use.include_self:
            meta[keys.INCLUDE_SELF_KEY] = "true"
        return meta

    def slot_id(self, name: str) -> int:
        """Return the id of a registered slot."""
        return self._slots[name].id


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleSource:
    """A Module as the recorder sees it.

    Attributes:
        identity: an object that identifies the Module; a second one on the stack is a recursion.
        name: name of the Module.
        record: records the Module's body, or with True its bootstrap.
    """

    identity: object
    name: str
    record: Callable[[ModelRecorder, bool], Function]


class ModelRecorder:
    """Records one root Module and everything it calls."""

    def __init__(self) -> None:
        self.slots = SlotTable()
        self.extras = b""  # device configurations and training graphs of the models in the program
        self._path: list[ModuleSource] = []
        self._functions: list[Function] = []
        self._bootstraps: list[Function] = []
        self._by_content: dict[tuple[object, ...], Function] = {}
        self._names: set[str] = set()
        # Calls of bootstraps whose Module is still being recorded and has no name yet.
        self._open_calls: list[tuple[object, OpNode]] = []

    def record_root(self, source: ModuleSource) -> Program:
        """Record the root and everything that it calls, as one program."""
        # The root's name is taken first, so that a sub-Module of the same name gets another.
        self._names.add(source.name)
        body, bootstrap = self._record(source)
        body.metadata[keys.ROOT_KEY] = "true"
        if bootstrap is not None:
            bootstrap.name = source.name + keys.BOOTSTRAP_SUFFIX
            self._bootstraps.insert(0, bootstrap)
        self._name_open_calls(source, source.name)
        functions = [body, *self._functions, *self._bootstraps]
        used = (entry for function in functions for entry in function.opset_imports)
        return Program(
            ir_version=ir_version_for(self.extras, keys.FRAMEWORK_IR_VERSION),
            extras=self.extras,
            producer_name=keys.PRODUCER_NAME,
            name=body.name,
            functions=functions,
            opset_imports=sorted_opsets([*used, *_BASE_OPSETS]),
        )

    def keep_extras(self, extras: bytes) -> None:
        """Keep the device configurations and training graphs of a model that is recorded.

        Raises ConflictingConfiguration.
        """
        if extras:
            self.extras = joined_extras(self.extras, extras)

    def record_call(self, source: ModuleSource) -> Function:
        """Record a sub-Module and return the function to call, shared with equal ones."""
        body, bootstrap = self._record(source)
        key = (source.name, _content(body), bootstrap and _content(bootstrap))
        known = self._by_content.get(key)
        if known is None:
            known = self._by_content[key] = body
            body.name = self._free_name(source.name)
            self._functions.append(body)
            if bootstrap is not None:
                bootstrap.name = body.name + keys.BOOTSTRAP_SUFFIX
                self._bootstraps.append(bootstrap)
        self._name_open_calls(source, known.name)
        return known

    def record_bootstrap_call(self, source: ModuleSource) -> tuple[str, Function | None]:
        """Record a Module whose bootstrap is called.

        Returns:
            The name of its bootstrap, and the function: None if it has none, or while it is
            being recorded. Calls of a missing bootstrap, and of itself, are left for the compiler
            to refuse, which sees the whole program.
        """
        if self._is_open(source):
            return source.name + keys.BOOTSTRAP_SUFFIX, None
        name = self.record_call(source).name + keys.BOOTSTRAP_SUFFIX
        return name, next((known for known in self._bootstraps if known.name == name), None)

    def bootstrap_called(self, source: ModuleSource, node: OpNode) -> None:
        """Remember the node that calls a Module's bootstrap."""
        if self._is_open(source):
            self._open_calls.append((source.identity, node))

    def _is_open(self, source: ModuleSource) -> bool:
        return any(outer.identity is source.identity for outer in self._path)

    def _name_open_calls(self, source: ModuleSource, name: str) -> None:
        for identity, node in self._open_calls:
            if identity is source.identity:
                node.op_type = name + keys.BOOTSTRAP_SUFFIX

    def _record(self, source: ModuleSource) -> tuple[Function, Function | None]:
        recursive = self._is_open(source)
        if recursive or len(self._path) >= MAX_MODULE_DEPTH:
            why = "calls itself" if recursive else f"nests deeper than {MAX_MODULE_DEPTH} calls"
            raise RecursiveModule(
                f"Module {source.name!r} {why}; a program is unrolled when it is recorded: "
                "use Loop of a BackendSlot, or a send back to its own class, to repeat"
            )
        self._path.append(source)
        try:
            with recording("/".join(outer.name for outer in self._path)):
                body, bootstrap = (source.record(self, which) for which in (False, True))
        finally:
            self._path.pop()
        bootstrap.metadata[keys.MODULE_PHASE_KEY] = keys.BOOTSTRAP_PHASE
        return body, bootstrap if bootstrap.nodes or bootstrap.inputs else None

    def _free_name(self, name: str) -> str:
        """Reserve the name itself, or the first of `<name>_2`, `<name>_3`, … that is free."""
        free, number = name, 1
        while free in self._names:
            number += 1
            free = f"{name}_{number}"
        self._names.add(free)
        return free


# onnx.checker wants every model to import the default opset.
_BASE_OPSETS = (("", keys.ONNX_OPSET_VERSION), (keys.MODULE_DOMAIN, keys.BB_OPSET_VERSION))


def _content(function: Function) -> tuple[object, ...]:
    """Return a function's content without its name and source lines, for deduplication."""
    nodes = []
    for node in function.nodes:
        bare = node.copy()
        bare.source_line = ""
        # Graphs are compared by their bytes.
        bare.attributes = {n: a for n, a in node.attributes.items() if not a.graphs}
        graphs = [graph_proto(graph).SerializeToString(deterministic=True) for graph in node.graphs]
        nodes.append((bare.content(), *graphs))
    ports = (*function.inputs, None, *function.outputs, None, *function.attributes)
    tables = (function.defaults, function.metadata, function.types)
    return (ports, *nodes, *function.opset_imports, *(tuple(table.items()) for table in tables))
