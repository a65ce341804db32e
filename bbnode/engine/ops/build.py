"""Binders, which make the `fire` of an op when a plan is made.

Rule: a binder is found by `(domain, op_type)` when a plan is made and never again. It
reads attributes and metadata, raises InvalidArtifact for what it can't use, and returns a
closure over integers. The closure reaches everything that belongs to one node through
`frame.rt`, so that nodes that run the same artifact share one plan.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

from bbnode.engine.errors import InvalidArtifact
from bbnode.engine.frame import Frame, Op
from bbnode.engine.ops.declared import Declared, narrower
from bbnode.engine.places import OpPlace
from bbnode.ir import keys, types
from bbnode.ir.flatten import FlatOp
from bbnode.ir.graph import OpNode
from bbnode.ir.shapes import Dim
from bbnode.ir.types import TypeKind, TypeNode

Fire: TypeAlias = Callable[[Frame], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodUse:
    """A contract method that an op calls: with the context, `inputs`, and `attributes` by name."""

    slot: str
    method: str
    where: str
    inputs: tuple[str, ...]
    attributes: tuple[str, ...]


@dataclass(slots=True, kw_only=True)
class Linker:
    """Numbers for what the ops of a program share.

    Attributes:
        slots: those that something is bound to.
        response_site_of: returns the site where a request's answers arrive in its slice, or None.
        methods: what install has to find on components, in order.
        semaphores: number, units (None: nothing acquires it), and the op that says so.
        queues, holds: numbers by name.
        joins: numbers by target and name.
    """

    slots: Mapping[str, int]
    response_site_of: Callable[[OpBuild], int | None]
    methods: dict[MethodUse, None] = field(default_factory=dict)
    semaphores: dict[str, tuple[int, int | None, str]] = field(default_factory=dict)
    queues: dict[str, int] = field(default_factory=dict)
    holds: dict[str, int] = field(default_factory=dict)
    joins: dict[tuple[str, str], int] = field(default_factory=dict)

    def slot_index(self, slot: str, where: str) -> int:
        """Return the number of a slot; InvalidArtifact when no binding names it."""
        if slot not in self.slots:
            raise InvalidArtifact(where, f"uses slot {slot!r}, to which nothing is bound")
        return self.slots[slot]

    def require_method(self, use: MethodUse) -> None:
        """Note a method that install has to find on the slot's component."""
        self.methods[use] = None

    def semaphore(self, build: OpBuild, name: str, units: int | None) -> int:
        """Return the number of a semaphore; InvalidArtifact when ops disagree on its units."""
        number, known, where = self.semaphores.get(name, (len(self.semaphores), None, ""))
        if known is not None and units is not None and known != units:
            raise build.wrong(
                f"gives the semaphore {name!r} {units} units, and {where} gives it {known}; "
                "write one `n` for one name"
            )
        if units is not None:
            known, where = units, build.where
        self.semaphores[name] = (number, known, where or build.where)
        return number

    def queue(self, name: str) -> int:
        """Return the number of a queue."""
        return self.queues.setdefault(name, len(self.queues))

    def hold(self, name: str) -> int:
        """Return the number of a held value."""
        return self.holds.setdefault(name, len(self.holds))

    def join(self, target: str, name: str) -> int:
        """Return the number of a join."""
        return self.joins.setdefault((target, name), len(self.joins))


@dataclass(slots=True, kw_only=True)
class OpBuild:
    """One op that is being bound. `inputs` and `outputs` are value indices, by port."""

    op: Op
    flat: FlatOp
    target: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    types: Mapping[str, TypeNode]
    shapes: Mapping[str, tuple[Dim, ...]]
    place: OpPlace
    linker: Linker
    # Of the relays of one op: how many there are here, all of them, and where they count those that
    # have fired and those that were skipped.
    rivals: int = 0
    group: list[Op] = field(default_factory=list)
    counter: int = 0
    skips: int = 0
    latch: int | None = None  # its number, where rivals fire in other executions too
    opens_round: bool = False  # of the latch, with each execution

    @property
    def node(self) -> OpNode:
        """The node of the artifact."""
        return self.flat.node

    @property
    def where(self) -> str:
        """For messages: target, op and, if known, the author's line."""
        line = self.flat.node.source_line
        return f"{self.target}: {self.flat.name}{f' ({line})' if line else ''}"

    def wrong(self, what: str) -> InvalidArtifact:
        """Return an error that names this op."""
        return InvalidArtifact(self.where, f"{self.flat.op_type} {what}")

    def arity(self, inputs: int, outputs: int) -> None:
        """Check the number of ports."""
        if len(self.inputs) != inputs or len(self.outputs) > outputs:
            raise self.wrong(
                f"has {len(self.inputs)} inputs and {len(self.outputs)} outputs; "
                f"expected {inputs} and {outputs}"
            )

    def attr_int(self, name: str, default: int | None = None, *, minimum: int = 0) -> int:
        """Return an integer attribute."""
        value = self.node.attr(name, default)
        if type(value) is not int or value < minimum:
            raise self.wrong(f"needs an integer attribute {name!r} of {minimum} or more")
        return value

    def attr_text(self, name: str, default: str | None = None) -> str:
        """Return a string attribute."""
        value = self.node.attr(name, default)
        if isinstance(value, bytes):
            try:
                return value.decode()
            except UnicodeDecodeError as error:
                raise self.wrong(f"has an attribute {name!r} that is no text") from error
        if not isinstance(value, str):
            raise self.wrong(f"needs a string attribute {name!r}")
        return value

    def attr_tensor_type(self, name: str) -> TypeNode:
        """Return the tensor type whose id a string attribute is."""
        text = self.attr_text(name)
        node = types.type_by_id(text)
        if node is None or node.kind is not TypeKind.TENSOR:
            raise self.wrong(f"names the type {text!r}, which is no tensor type")
        return node

    def meta_int(self, key: str, default: int | None = None) -> int:
        """Return a decimal metadata entry, of at most 64 bits."""
        text = self.node.metadata.get(key)
        if text is None and default is not None:
            return default
        if text is None or not (text.isascii() and text.isdigit()) or len(text) > 20:
            raise self.wrong(f"needs the metadata {key} as a decimal number")
        number = int(text)
        if number >> 64:
            raise self.wrong(f"says {number} as its {key}, which has 64 bits")
        return number

    def declared(self, output: int, table: TypeNode) -> Declared:
        """Return the declared type of an output, which the op table has as `table`."""
        names = self.flat.outputs
        name = names[output] if output < len(names) else ""
        return Declared(narrower(table, self.types.get(name)), self.shapes.get(name))

    def slot(self) -> tuple[str, int]:
        """Return name and number of the slot of a component op."""
        slot = self.node.metadata.get(keys.SLOT_KEY)
        if slot is None:
            raise self.wrong(f"has no {keys.SLOT_KEY}")
        return slot, self.linker.slot_index(slot, self.where)

    def child_types(self, count: int) -> tuple[TypeNode, ...]:
        """Return the declared types of a composite's children; empty when none are declared."""
        declared = [word for word in self.attr_text("child_types", "").split(",") if word]
        if not declared:
            return ()
        nodes = [types.type_by_id(word) for word in declared]
        if len(nodes) != count or None in nodes:
            raise self.wrong(f"declares {len(nodes)} child types, known or not, for {count} parts")
        return tuple(node for node in nodes if node is not None)


Binder: TypeAlias = Callable[[OpBuild], Fire]
B = TypeVar("B", bound=Binder)

_BINDERS: dict[tuple[str, str], Binder] = {}


def binds(domain: str, *op_types: str) -> Callable[[B], B]:
    """Decorator: register the binder of some ops."""

    def register(binder: B) -> B:
        for op_type in op_types:
            _BINDERS[domain, op_type] = binder
        return binder

    return register


def binder_of(domain: str, op_type: str) -> Binder | None:
    """Return the registered binder of an op, or None."""
    return _BINDERS.get((domain, op_type))
