"""Every way in which a compile can fail.

Rule: one class per variant; its fields say which op, slot or value is meant. `CompileError`
is the base of all, `ValidationError` of those that the pass `validate` raises. What the
author of the program has to change is an AuthorError, what the bind chain lacks a
DeploymentError. All of them can be imported from here.
"""

from __future__ import annotations

from dataclasses import dataclass

from bbnode.compiler.error_base import CompileError, ValidationError, Where, listed
from bbnode.compiler.errors_build import (
    AlreadyCompiled,
    AmbiguousRole,
    BindingMismatch,
    BootstrapCompositionCycle,
    BootstrapCompositionGap,
    DanglingCall,
    DuplicateFunction,
    EmptyFunctionTable,
    ExpansionFailed,
    Internal,
    IrVersionMismatch,
    MissingBinding,
    ModelOutOfBounds,
    PassInvariantBroken,
    RoleMethodFailed,
    RuntimeIncomplete,
    StageFailed,
    UnboundDependency,
    UnboundSlot,
    UnknownStage,
    WireOpInBootstrap,
)
from bbnode.ir import keys
from bbnode.ir.errors import AuthorError

__all__ = [
    "AlreadyCompiled",
    "AmbiguousHome",
    "AmbiguousRole",
    "BindingMismatch",
    "BootstrapCompositionCycle",
    "BootstrapCompositionGap",
    "CompileError",
    "CrossClassDataflow",
    "CyclicGraph",
    "DanglingCall",
    "DanglingInput",
    "DuplicateFunction",
    "DuplicateNodeName",
    "DuplicateOutput",
    "EmptyFunctionTable",
    "ExpansionFailed",
    "IncompatibleStorageOnEdge",
    "Internal",
    "IrVersionMismatch",
    "MalformedSlotMetadata",
    "MissingBinding",
    "MissingTypeInfo",
    "ModelOutOfBounds",
    "OpsetNotImported",
    "PassInvariantBroken",
    "RoleMethodFailed",
    "RuntimeIncomplete",
    "StageFailed",
    "TypeConstraintFailed",
    "UnboundDependency",
    "UnboundSlot",
    "UnknownOp",
    "UnknownStage",
    "UnpairedWireRequest",
    "UnresolvedPeerClass",
    "UnresolvedType",
    "ValidationError",
    "Where",
    "WireOpInBootstrap",
]

# --- validate: one class per rule -----------------------------------------------------------


@dataclass(kw_only=True, eq=False)
class UnknownOp(ValidationError):
    """No opset, role, protocol or function of the model has this op."""

    node_name: str
    op_type: str
    domain: str

    def message(self) -> str:
        return f"op {self.node_name!r} is of the unknown type {self.domain}::{self.op_type}"

    def mend(self) -> str:
        return "Use an op of `ai.onnx` or of bbnode's opsets, or import the package that adds it"


@dataclass(kw_only=True, eq=False)
class DanglingInput(ValidationError):
    """A value is read that nothing makes."""

    node_name: str
    input_name: str

    def message(self) -> str:
        return f"op {self.node_name!r} reads {self.input_name!r}, which no op or input makes"

    def mend(self) -> str:
        return "Declare it with `g.input`, or pass an Output of this very graph"


@dataclass(kw_only=True, eq=False)
class DuplicateOutput(ValidationError):
    """Two ops write one value."""

    value_name: str
    node_a: str
    node_b: str

    def message(self) -> str:
        return f"value {self.value_name!r} is written by {self.node_a!r} and by {self.node_b!r}"

    def mend(self) -> str:
        return "Give each output, and each function input, a name of its own"


@dataclass(kw_only=True, eq=False)
class DuplicateNodeName(ValidationError):
    """Two ops have one name, or an op has none: control edges go by node names."""

    node_name: str
    function: str

    def message(self) -> str:
        return f"function {self.function!r} holds more than one op called {self.node_name!r}"

    def mend(self) -> str:
        return "Give each node a name of its own (the DSL does)"


@dataclass(kw_only=True, eq=False)
class MissingTypeInfo(ValidationError):
    """A function input has no declared type."""

    input_name: str
    function: str = ""

    def message(self) -> str:
        return f"input {self.input_name!r} of {self.function!r} declares no type"

    def mend(self) -> str:
        return "Declare it in value_info (`g.input` does it; `Any` counts)"


@dataclass(kw_only=True, eq=False)
class MalformedSlotMetadata(ValidationError):
    """A slot op does not say which slot it runs on."""

    node_name: str
    detail: str

    def message(self) -> str:
        return f"slot metadata of op {self.node_name!r} is malformed: {self.detail}"

    def mend(self) -> str:
        return (
            "Record it through a slot class: generic ops carry required_trait and slot_id, "
            "concrete ones concrete_type and instance"
        )


@dataclass(kw_only=True, eq=False)
class CyclicGraph(ValidationError):
    """Ops, or functions, depend on themselves. `involves` names one cycle."""

    involves: tuple[str, ...]

    def message(self) -> str:
        return f"the program is not acyclic: {listed(self.involves)} wait for each other"

    def mend(self) -> str:
        return "Start a new execution for the next turn (a Send to `@self`, or another invoke)"


@dataclass(kw_only=True, eq=False)
class OpsetNotImported(ValidationError):
    """An op's opset version is not in opset_import, or the model imports another one."""

    domain: str
    version_used: int
    version_imported: int | None = None  # by the model, where it is not that of the function
    node_name: str = ""

    def message(self) -> str:
        used = f"op {self.node_name!r} uses opset {self.domain!r} version {self.version_used}"
        if self.version_imported is None:
            return f"{used}, which neither its function nor the model imports"
        return f"{used}, and is another op in version {self.version_imported} of the model"

    def mend(self) -> str:
        if self.version_imported is None:
            return f"Add ({self.domain!r}, {self.version_used}) to opset_import"
        return "Import one version in the model and in all of its functions"


@dataclass(kw_only=True, eq=False)
class UnpairedWireRequest(ValidationError):
    """A request without its response, or the other way round."""

    node_name: str
    detail: str

    def message(self) -> str:
        return f"wire op {self.node_name!r} is unpaired: {self.detail}"

    def mend(self) -> str:
        return "Answer each `r = g.request(…)` with exactly one `r.respond(value)`"


# --- placement: homes and peer classes ------------------------------------------------------


@dataclass(kw_only=True, eq=False)
class UnresolvedPeerClass(CompileError, AuthorError):
    """Nothing says which class of peer a Send goes to, or several things say several."""

    node_name: str
    peer_input: str
    classes: tuple[str, ...] = ()  # those that were found, when they are several

    def message(self) -> str:
        which = "whose class is unknown"
        if self.classes:
            which = f"which are of several classes: {listed(self.classes)}"
        return f"op {self.node_name!r} sends to the peers {self.peer_input!r}, {which}"

    def mend(self) -> str:
        if self.classes:
            return "Send to each class by a `g.net_out` of its own (they may share the port)"
        return (
            'Take the peers from a PeerSelectorSlot(…, peer_class="<class>"), from a `.sender`, '
            'from `g.peer_ids(…, peer_class="<class>")`, or from a graph input that is named like '
            "the class"
        )


@dataclass(kw_only=True, eq=False)
class CrossClassDataflow(CompileError, AuthorError):
    """An op reads values that live on two classes."""

    node_name: str
    home_a: str
    home_b: str
    value_a: str = ""
    value_b: str = ""
    producer_a: str = ""  # node that makes value_a, or the input's name
    producer_b: str = ""

    def message(self) -> str:
        return (
            f"op {self.node_name!r} reads {self.value_a!r} of {self.producer_a!r}, which lives on "
            f"class {self.home_a!r}, and {self.value_b!r} of {self.producer_b!r}, which lives on "
            f"class {self.home_b!r}"
        )

    def mend(self) -> str:
        return (
            f"Send one of them over first: `g.net_out(<port>, <peers of class {self.home_a!r}>, "
            f"{self.value_b})` and use what it returns"
        )


@dataclass(kw_only=True, eq=False)
class AmbiguousHome(CompileError, AuthorError):
    """An op without data inputs could live on several classes."""

    node_name: str
    slot: str
    homes: tuple[str, ...]

    def message(self) -> str:
        return (
            f"op {self.node_name!r} has no data inputs and its slot {self.slot!r} is used on "
            f"the classes {listed(self.homes)}"
        )

    def mend(self) -> str:
        return "Pin it with `after=<a value of the class where it belongs>`"


# --- types ----------------------------------------------------------------------------------


@dataclass(kw_only=True, eq=False)
class TypeConstraintFailed(CompileError, AuthorError):
    """The type of a value does not fit the port that it meets."""

    op: str
    detail: str

    def message(self) -> str:
        return f"types of op {self.op!r} do not fit: {self.detail}"

    def mend(self) -> str:
        return "Convert the value (`Cast` for tensors), or pass one of the type that is expected"


@dataclass(kw_only=True, eq=False)
class UnresolvedType(CompileError, AuthorError):
    """A value's type stays abstract under strict types.

    `slot` and `role` are those of its op, where nothing is bound that could narrow the type.
    """

    value: str
    known: str = "Any"
    op: str = ""
    slot: str = ""
    role: str = ""

    def message(self) -> str:
        return f"the type of value {self.value!r} is known only as {self.known!r}"

    def mend(self) -> str:
        if self.slot:
            return (
                f"Slot {self.slot!r} is not bound: add `.bind_{keys.snake_case(self.role)}"
                f"({self.slot!r}, <component class>)` (its `storage` narrows the type), or compile "
                "with_permissive_types()"
            )
        return (
            "Declare it where it begins (`g.input(name, type)`), bind a component whose `storage` "
            "narrows it, or compile with_permissive_types()"
        )


@dataclass(kw_only=True, eq=False)
class IncompatibleStorageOnEdge(CompileError, AuthorError):
    """What is sent is not what the receiving side takes."""

    send_node: str
    recv_node: str
    sent: str
    received: str

    def message(self) -> str:
        return (
            f"{self.send_node!r} sends {self.sent!r}, but {self.recv_node!r} hands it on as "
            f"{self.received!r}"
        )

    def mend(self) -> str:
        return f"Put a Codec (or a Cast) from {self.sent!r} to {self.received!r} between them"
