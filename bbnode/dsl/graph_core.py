"""The part of a Graph that slots and helpers record through.

Rule: a Graph is one function in the making, and `emit` is the one way in which nodes come to
be. Names are counted per op type, so that the same calls in the same order give the same
function; every node says which line of the author's source made it. When its Module has
finished recording, the Graph is closed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

import onnx
from onnx import AttributeProto, FunctionProto, NodeProto

from bbnode.dsl.core.names import check_name
from bbnode.dsl.errors import (
    BadArgument,
    BranchMisuse,
    DuplicateName,
    ForeignOutput,
    GraphClosed,
    RecordingError,
    SlotConflict,
)
from bbnode.dsl.output import After, Output
from bbnode.dsl.slot_table import SlotUse
from bbnode.dsl.source import author_line
from bbnode.ir import keys, protos
from bbnode.ir.types import TypeNode

if TYPE_CHECKING:
    from bbnode.dsl.core.recorder import ModelRecorder

Error = TypeVar("Error", bound=RecordingError)


class GraphCore:
    """Names, nodes, types and slots of one function in the making."""

    def __init__(self, recorder: ModelRecorder, *, name: str, home: str) -> None:
        self.recorder = recorder
        self.name = name
        self.home = home
        self._function = FunctionProto(name=name, domain=keys.MODULE_DOMAIN)
        self._types: dict[str, TypeNode] = {}
        self._counts: dict[str, int] = {}
        self._slots: dict[str, SlotUse] = {}
        self._opsets: set[tuple[str, int]] = set()
        self._scopes: list[str] = []
        self._closed = False
        self.is_bootstrap = False  # whether it records a Module's `bootstrap`
        self._branch = ""  # what is being recorded in a branch of this Graph's, if anything

    @property
    def module_path(self) -> str:
        """Names of the Modules being recorded, outermost first, joined by "/"."""
        return self.recorder.module_path or self.name

    def error(self, kind: type[Error], what: str) -> Error:
        """An error of this recording, to be raised: it knows the Module and the line."""
        return kind(what, module=self.module_path, source=author_line())

    def emit(
        self,
        domain: str,
        op_type: str,
        *,
        inputs: Iterable[Output | None] = (),
        outputs: Sequence[tuple[str, TypeNode]] = (),
        attributes: Iterable[AttributeProto] = (),
        metadata: Mapping[str, str] | None = None,
        slot: SlotUse | None = None,
        after: After = None,
        opset_version: int = keys.BB_OPSET_VERSION,
        value_names: Sequence[str] = (),
    ) -> tuple[Output, ...]:
        """Record one node and give its outputs.

        Args:
            domain, op_type, opset_version: what the node calls.
            inputs: values of this Graph, in port order; None for an optional one left out.
            outputs: (port, type) of each output; values are called `<node name>.<port>`.
            attributes, metadata: of the node, beside what every node gets.
            slot: the slot that runs the op.
            after: values that must be there before the op fires.
            value_names: names of the output values, where they are the author's own.

        Raises:
            ForeignOutput, BadArgument, DuplicateName, SlotConflict, GraphClosed.
        """
        self.check_open()
        names = ["" if value is None else self.value_name(value) for value in inputs]
        meta = self._metadata(slot, metadata or {}, after)
        path = "/".join((*self._scopes, op_type))
        number = self._counts.get(path, 0)
        self._counts[path] = number + 1
        node = NodeProto(domain=domain, op_type=op_type, name=f"{path}_{number}", input=names)
        node.attribute.extend(attributes)
        for key, text in meta.items():
            node.metadata_props.add(key=key, value=text)
        made = []
        for index, (port, kind) in enumerate(outputs):
            value = value_names[index] if value_names else f"{node.name}.{port}"
            node.output.append(value)
            made.append(self.declare(value, kind))
        self._function.node.append(node)
        self._opsets.add((domain, opset_version))
        return tuple(made)

    def _metadata(
        self, slot: SlotUse | None, given: Mapping[str, str], after: After
    ) -> dict[str, str]:
        """What stands in a node's metadata."""
        waits = [self.value_name(value) for value in self._listed(after)]
        meta = {} if slot is None else self._take_slot(slot)
        meta.update(given)
        if waits:
            meta[keys.AFTER_KEY] = ",".join(dict.fromkeys(waits))
        meta[keys.MODULE_INSTANCE_KEY] = "_".join((self.name, *self._scopes))
        meta[keys.SOURCE_LINE_KEY] = author_line()
        return meta

    def declare(self, name: str, kind: TypeNode) -> Output:
        """Make a value known; DuplicateName when this Graph has one of that name."""
        if name in self._types:
            raise self.error(
                DuplicateName, f"{name!r} names an input or output already; choose another name"
            )
        self._types[name] = kind
        return Output(graph=self, name=name, type=kind)

    def value_name(self, value: object) -> str:
        """Name of a value of this Graph; BadArgument or ForeignOutput for anything else."""
        if not isinstance(value, Output):
            raise self.error(
                BadArgument,
                f"{value!r:.80} ({type(value).__name__}) is no recorded value; "
                "a literal becomes one with g.constant(…)",
            )
        if not self._holds(value.graph):
            raise self.error(
                ForeignOutput,
                f"{value.name!r} was recorded by {value.graph.title} and is no value of "
                f"this Graph; {value.graph.way_out}",
            )
        return value.name

    def _holds(self, graph: GraphCore) -> bool:
        """Whether the values of a Graph may be read in this one."""
        return graph is self

    @property
    def title(self) -> str:
        """What this Graph records, for messages."""
        return f"Module {self.name!r}"

    @property
    def way_out(self) -> str:
        """How a value of this Graph gets to another one, for messages."""
        return "hand it in with .call().input(name, value), and take it back with .output(name)"

    @property
    def last_node(self) -> NodeProto:
        """The node that was recorded last."""
        return self._function.node[-1]

    def check_open(self) -> None:
        """GraphClosed when recording is over, BranchMisuse while a branch of it is recorded."""
        if self._closed:
            raise self.error(
                GraphClosed, f"{self.title} has finished recording; record inside of its body"
            )
        if self._branch:
            raise self.error(
                BranchMisuse,
                f"{self._branch} is being recorded; give its ops the Graph that it gets as its "
                "first argument",
            )

    @contextmanager
    def recording_branch(self, title: str) -> Iterator[None]:
        """Inside, nothing is recorded here but in the branch."""
        self._branch = title
        try:
            yield
        finally:
            self._branch = ""

    def finish(self) -> FunctionProto:
        """Close the Graph and give its function."""
        self.check_open()
        self._closed = True
        function = self._function
        function.opset_import.extend(protos.opset_imports(self._opsets))
        protos.set_meta(function, keys.HOME_KEY, self.home)
        for name, use in self._slots.items():
            if use.concrete is None:
                function.attribute.append(name)
            else:
                config = onnx.helper.make_attribute(name, use.concrete.config)
                function.attribute_proto.append(config)
                key = keys.CONCRETE_TYPE_SLOT_PREFIX + name
                protos.set_meta(function, key, use.concrete.type_name)
            slot_id = self.recorder.slots.slot_id(name)
            protos.set_meta(function, keys.SLOT_ROLE_PREFIX + name, f"{use.role}|{slot_id}")
        protos.write_types(function, self._types)
        return function

    @contextmanager
    def with_module(self, name: str) -> Iterator[None]:
        """Nodes recorded inside are called `<name>/…`: for readers, without other effect."""
        self._scopes.append(check_name("module scope", name, module=self.module_path))
        try:
            yield
        finally:
            self._scopes.pop()

    def _check_slot(self, use: SlotUse) -> None:
        conflict = self.recorder.slots.conflict(use)
        if conflict is not None:
            raise self.error(SlotConflict, conflict)

    def _take_slot(self, use: SlotUse) -> dict[str, str]:
        self._check_slot(use)
        self._slots.setdefault(use.name, use)
        return self.recorder.slots.take(use)

    def _listed(self, after: object) -> Sequence[object]:
        if after is None:
            return ()
        if isinstance(after, Output):
            return (after,)
        if isinstance(after, list | tuple):
            return after
        raise self.error(
            BadArgument,
            f"after={after!r:.80} is neither a recorded value nor a list of them",
        )
