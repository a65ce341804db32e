"""The recording of a whole model: its functions, its slots, and the ModelProto they make.

Rule: a body is recorded every time it is called and kept once: functions that are equal but
for their source lines are one. Nothing here depends on addresses, hashes of objects or time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from onnx import FunctionProto, ModelProto, NodeProto

from bbnode.dsl.context import recording
from bbnode.dsl.core.graph import Graph
from bbnode.dsl.errors import RecursiveModule
from bbnode.dsl.slot_table import SlotTable
from bbnode.dsl.source import author_line
from bbnode.ir import keys, protos

# Deeper than any program; it ends a Module that makes a new Module in its body without end
# well before Python's own recursion limit does.
MAX_MODULE_DEPTH = 64

Recording = Callable[[Graph], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleSource:
    """What the recorder needs of a Module."""

    identity: object  # the same object on the stack twice is a recursion
    name: str
    home: str
    body: Recording
    bootstrap: Recording


class ModelRecorder:
    """Records one root Module and everything it calls."""

    def __init__(self) -> None:
        self.slots = SlotTable()
        self._path: list[ModuleSource] = []
        self._functions: list[FunctionProto] = []
        self._bootstraps: list[FunctionProto] = []
        self._by_content: dict[tuple[str, bytes, bytes], FunctionProto] = {}
        self._names: set[str] = set()
        # Calls of bootstraps that are being recorded: the Module has no name in the model yet.
        self._open_calls: list[tuple[object, NodeProto]] = []

    @property
    def module_path(self) -> str:
        """Names of the Modules being recorded, outermost first, joined by "/"."""
        return "/".join(source.name for source in self._path)

    def record_root(self, source: ModuleSource) -> ModelProto:
        """Record the root and everything that it calls; gives the recorded model."""
        # The root's name is taken first, so that a sub-Module of the same name steps aside.
        self._names.add(source.name)
        body, bootstrap = self._record(source)
        protos.set_meta(body, keys.ROOT_KEY, "true")
        if bootstrap is not None:
            bootstrap.name = source.name + keys.BOOTSTRAP_SUFFIX
            self._bootstraps.insert(0, bootstrap)
        self._name_open_calls(source, source.name)
        return self._assemble([body, *self._functions, *self._bootstraps])

    def record_call(self, source: ModuleSource) -> FunctionProto:
        """Record a sub-Module; gives the function to call, shared with equal ones."""
        body, bootstrap = self._record(source)
        key = (source.name, _content(body), b"" if bootstrap is None else _content(bootstrap))
        known = self._by_content.get(key)
        if known is not None:
            self._name_open_calls(source, known.name)
            return known
        body.name = self._free_name(source.name)
        self._by_content[key] = body
        self._functions.append(body)
        if bootstrap is not None:
            bootstrap.name = body.name + keys.BOOTSTRAP_SUFFIX
            self._bootstraps.append(bootstrap)
        self._name_open_calls(source, body.name)
        return body

    def record_bootstrap_call(self, source: ModuleSource) -> tuple[str, FunctionProto | None]:
        """Record a Module whose bootstrap is called.

        Returns:
            The name of its bootstrap, and the function: None when it has none, or when it is
            being recorded right now. What calls itself, or nothing, is left for the compiler to
            refuse, which sees all bootstraps.
        """
        if self._is_open(source):
            return source.name + keys.BOOTSTRAP_SUFFIX, None
        name = self.record_call(source).name + keys.BOOTSTRAP_SUFFIX
        return name, next((known for known in self._bootstraps if known.name == name), None)

    def bootstrap_called(self, source: ModuleSource, node: NodeProto) -> None:
        """Take note of the node that calls a Module's bootstrap."""
        if self._is_open(source):
            self._open_calls.append((source.identity, node))

    def _is_open(self, source: ModuleSource) -> bool:
        return any(outer.identity is source.identity for outer in self._path)

    def _name_open_calls(self, source: ModuleSource, name: str) -> None:
        for identity, node in self._open_calls:
            if identity is source.identity:
                node.op_type = name + keys.BOOTSTRAP_SUFFIX

    def _record(self, source: ModuleSource) -> tuple[FunctionProto, FunctionProto | None]:
        self._guard_recursion(source)
        self._path.append(source)
        try:
            with recording(self.module_path):
                body = self._record_function(source, source.body)
                bootstrap = self._record_function(source, source.bootstrap, is_bootstrap=True)
        finally:
            self._path.pop()
        protos.set_meta(bootstrap, keys.MODULE_PHASE_KEY, keys.BOOTSTRAP_PHASE)
        return body, bootstrap if bootstrap.node or bootstrap.input else None

    def _record_function(
        self, source: ModuleSource, record: Recording, *, is_bootstrap: bool = False
    ) -> FunctionProto:
        graph = Graph(self, name=source.name, home=source.home)
        graph.is_bootstrap = is_bootstrap
        record(graph)
        return graph.finish()

    def _guard_recursion(self, source: ModuleSource) -> None:
        recursive = self._is_open(source)
        if recursive or len(self._path) >= MAX_MODULE_DEPTH:
            why = "calls itself" if recursive else f"nests deeper than {MAX_MODULE_DEPTH} calls"
            raise RecursiveModule(
                f"Module {source.name!r} {why}; a program is unrolled when it is recorded: "
                "use Loop of a BackendSlot, or a send back to its own class, to repeat",
                module=self.module_path,
                source=author_line(),
            )

    def _free_name(self, name: str) -> str:
        """The name itself, or the first of `<name>_2`, `<name>_3`, … that is free."""
        free, number = name, 1
        while free in self._names:
            number += 1
            free = f"{name}_{number}"
        self._names.add(free)
        return free

    def _assemble(self, functions: list[FunctionProto]) -> ModelProto:
        model = ModelProto(ir_version=keys.FRAMEWORK_IR_VERSION, producer_name=keys.PRODUCER_NAME)
        model.graph.name = functions[0].name
        model.functions.extend(functions)
        used = {(entry.domain, entry.version) for f in functions for entry in f.opset_import}
        model.opset_import.extend(protos.opset_imports([*used, *_BASE_OPSETS]))
        return model


# onnx.checker wants every model to import the default opset.
_BASE_OPSETS = (("", keys.ONNX_OPSET_VERSION), (keys.MODULE_DOMAIN, keys.BB_OPSET_VERSION))


def _content(function: FunctionProto) -> bytes:
    """What makes two functions one: everything but the name and the source lines."""
    bare = FunctionProto()
    bare.CopyFrom(function)
    bare.name = ""
    for node in bare.node:
        protos.del_meta(node, keys.SOURCE_LINE_KEY)
    return bare.SerializeToString(deterministic=True)
