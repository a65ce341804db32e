"""Every way in which a compile can fail.

Rule: one class per variant; its fields identify the op, slot or value. `CompileError` is the base
of all, `ValidationError` of those that the pass `validate` raises. An AuthorError is for the
author of the program to fix, a DeploymentError for the caller who wrote the bind chain.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import ClassVar, Final

from bbnode.ir import keys
from bbnode.ir.errors import AuthorError, BbnodeError, DeploymentError
from bbnode.ir.graph import OpNode

MAX_LISTED = 8  # names listed in one message; the others are only counted


@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    """The place in the author's program: node, Module path and `<file>:<line>`, as far as known."""

    node_name: str = ""
    module: str = ""
    source_line: str = ""

    @classmethod
    def of(cls, node: OpNode) -> Where:
        """Return the place that recorded `node`."""
        return cls(
            node_name=node.name,
            module=node.metadata.get(keys.MODULE_INSTANCE_KEY, ""),
            source_line=node.source_line,
        )

    def __str__(self) -> str:
        parts = []
        if self.module:
            parts.append(f"in Module {self.module}")
        if self.source_line:
            parts.append(f"at {self.source_line}")
        return f" ({', '.join(parts)})" if parts else ""


NOWHERE = Where()


def listed(names: tuple[str, ...]) -> str:
    """Return a list of names for a message, cut after `MAX_LISTED`."""
    shown = ", ".join(repr(name) for name in names[:MAX_LISTED])
    more = len(names) - MAX_LISTED
    return f"{shown} and {more} more" if more > 0 else shown


@dataclass(kw_only=True, eq=False)
class CompileError(BbnodeError):
    """Base of all errors of the compiler. `where` is the author's source line, if known."""

    where: Where = NOWHERE
    MESSAGE: ClassVar[str] = ""  # both texts are formatted with the error's fields
    MEND: ClassVar[str] = "Compile the program again"

    def __post_init__(self) -> None:
        Exception.__init__(self, f"{self.message()}{self.where}. {self.mend()}")
        # Not a frozen dataclass: contextlib and trio assign `__traceback__` and friends.
        self._sealed = frozenset(f.name for f in fields(self))

    def __setattr__(self, name: str, value: object) -> None:
        if name in getattr(self, "_sealed", ()):
            raise AttributeError(f"{type(self).__name__}.{name} is fixed")
        super().__setattr__(name, value)

    # A dataclass prints its fields by default; users should see the message.
    __str__ = BbnodeError.__str__

    def message(self) -> str:
        """Return the description of the fault, as a sentence without its full stop."""
        return self.MESSAGE.format_map(vars(self)) or type(self).__name__

    def mend(self) -> str:
        """Return the remedy, as a sentence."""
        return self.MEND.format_map(vars(self))

    @property
    def module(self) -> str:
        """Path of the Module that recorded the op, or ""."""
        return self.where.module

    @property
    def source_line(self) -> str:
        """`<file>:<line>` that recorded the op, or ""."""
        return self.where.source_line


@dataclass(kw_only=True, eq=False)
class ValidationError(CompileError, AuthorError):
    """The recorded program is malformed."""


# --- validate: one class per rule -----------------------------------------------------------


@dataclass(kw_only=True, eq=False)
class UnknownOp(ValidationError):
    """No opset, role, protocol or function of the model has this op."""

    node_name: str
    op_type: str
    domain: str

    MESSAGE = "op {node_name!r} is of the unknown type {domain}::{op_type}"
    MEND = "Use an op of `ai.onnx` or of bbnode's opsets, or import the package that adds it"


@dataclass(kw_only=True, eq=False)
class DanglingInput(ValidationError):
    """An op reads a value that nothing makes."""

    node_name: str
    input_name: str

    MESSAGE = "op {node_name!r} reads {input_name!r}, which no op or input makes"
    MEND = "Declare it with `g.input`, or pass an Output of this very graph"


@dataclass(kw_only=True, eq=False)
class DuplicateOutput(ValidationError):
    """Two ops write one value."""

    value_name: str
    node_a: str
    node_b: str

    MESSAGE = "value {value_name!r} is written by {node_a!r} and by {node_b!r}"
    MEND = "Give each output, and each function input, a name of its own"


@dataclass(kw_only=True, eq=False)
class DuplicateNodeName(ValidationError):
    """Two ops have the same name, or an op has none: control edges go by node names."""

    node_name: str
    function: str

    MESSAGE = "function {function!r} holds more than one op called {node_name!r}"
    MEND = "Give each node a name of its own (the DSL does)"


@dataclass(kw_only=True, eq=False)
class MissingTypeInfo(ValidationError):
    """A function input has no declared type."""

    input_name: str
    function: str = ""

    MESSAGE = "input {input_name!r} of {function!r} declares no type"
    MEND = "Declare it in value_info (`g.input` does it; `Any` counts)"


@dataclass(kw_only=True, eq=False)
class MalformedSlotMetadata(ValidationError):
    """The metadata of a slot op does not name the slot that it runs on."""

    node_name: str
    detail: str

    MESSAGE = "slot metadata of op {node_name!r} is malformed: {detail}"
    MEND = (
        "Record it through a slot class: generic ops carry required_trait and slot_id, "
        "concrete ones concrete_type and instance"
    )


@dataclass(kw_only=True, eq=False)
class CyclicGraph(ValidationError):
    """Ops or functions depend on each other in a cycle. `involves` names one cycle."""

    involves: tuple[str, ...]

    def message(self) -> str:
        return f"the program is not acyclic: {listed(self.involves)} wait for each other"

    MEND = "Start a new execution for the next turn (a Send to `@self`, or another invoke)"


@dataclass(kw_only=True, eq=False)
class OpsetNotImported(ValidationError):
    """An op's opset version is not in opset_import, or the model imports another one."""

    domain: str
    version_used: int
    version_imported: int | None = None  # the model's version, if it differs from the function's
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

    MESSAGE = "wire op {node_name!r} is unpaired: {detail}"
    MEND = "Answer each `r = g.request(…)` with exactly one `r.respond(value)`"


@dataclass(kw_only=True, eq=False)
class SiteCollision(CompileError, AuthorError):
    """Two receivers of one class have the same site id, so messages would reach the wrong one."""

    port: str
    receiver: str
    node_name: str
    other: str

    MESSAGE = (
        "port {port!r} of class {receiver!r} has the site of another: {node_name!r}, {other!r}"
    )
    MEND = "Give each port that a class receives at a name of its own"


# --- placement: homes and peer classes ------------------------------------------------------


@dataclass(kw_only=True, eq=False)
class UnresolvedPeerClass(CompileError, AuthorError):
    """The class of peer that a Send goes to is unknown or ambiguous."""

    node_name: str
    peer_input: str
    classes: tuple[str, ...] = ()  # all candidates, if there are several

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
    port: str = ""  # the port that delivers one of the values from the class of the other
    brought_by: str = ""  # `net_out` or `request`, the call of that port
    is_answer: bool = False  # the op is a `respond`, whose request that port is
    is_later: bool = False  # value_a depends on what returns through that port

    MESSAGE = (
        "op {node_name!r} reads {value_a!r} of {producer_a!r}, which lives on class "
        "{home_a!r}, and {value_b!r} of {producer_b!r}, which lives on class {home_b!r}"
    )
    MEND = (
        "Send one of them over first: `g.net_out(<port>, <peers of class {home_a!r}>, "
        "{value_b})` and use what it returns"
    )

    def mend(self) -> str:
        if not self.port:
            return super().mend()
        # A separate message would start another execution, which does not have the other value.
        sent = f"`g.{self.brought_by}({self.port!r}, …, g.bundle([…, {self.value_a}]))`"
        also = f"send {self.value_a!r} along, {sent}, and take it apart there"
        if self.is_later:
            also = (
                f"{self.value_a!r} is made of the answers to {self.port!r}: send it there by "
                "another request, which comes after it"
            )
        if self.is_answer:
            return (
                f"`respond` answers from class {self.home_b!r}, with a value that is made there, "
                f"of what {self.port!r} received; if it needs another one, {also}"
            )
        return also[:1].upper() + also[1:]


@dataclass(kw_only=True, eq=False)
class HomeContradicted(CompileError, AuthorError):
    """A Module that names a home is called with a value that lives on another class."""

    called: str
    home: str
    value: str
    lives_on: str

    MESSAGE = (
        "Module {called!r} has the home {home!r}, and is called with {value!r}, which lives on "
        "class {lives_on!r}"
    )
    MEND = (
        "Send the value over first: `g.net_out(<port>, <peers of class {home!r}>, {value})`; or "
        "name no home in {called!r}: it then runs where it is called"
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

    MEND = "Pin it with `after=<a value of the class where it belongs>`"


# --- deliveries: values of different executions -----------------------------------------------


@dataclass(kw_only=True, eq=False)
class NeverFires(CompileError, AuthorError):
    """An op needs values of two executions, which never see each other's values.

    `value_a` exists in `execution_a` and `value_b` in `execution_b`; no execution has both.
    """

    node_name: str
    op_type: str
    value_a: str
    execution_a: str
    value_b: str
    execution_b: str

    MESSAGE = (
        "op {node_name!r} ({op_type}) can never fire: it needs {value_a!r}, which is of "
        "{execution_a}, and {value_b!r}, which is of {execution_b}; each of these is an execution "
        "of its own"
    )
    MEND = (
        "Ask with `g.request`, so that one execution waits and goes on with the answers; or gather "
        "deliveries with `g.collect`; or send the other value along in the message (`g.bundle`)"
    )

    def mend(self) -> str:
        if self.op_type == keys.OP_THRESHOLD:
            return (
                "Send them all to one port: `syscalls.threshold(g, received, n=…)` with more than "
                "its inputs counts deliveries"
            )
        return super().mend()


@dataclass(kw_only=True, eq=False)
class CollectNotReceived(CompileError, AuthorError):
    """A `g.collect` of a value that no peer has sent to the execution which brings it."""

    node_name: str
    value: str
    execution: str

    MESSAGE = "op {node_name!r} gathers {value!r} of {execution}, which no peer has sent"
    MEND = (
        "Collect what `g.net_out` or `r.received` of a `g.request` returns, or what is made of it; "
        "answers of a `g.request` are one batch already, `r.responses`"
    )


# --- types ----------------------------------------------------------------------------------


_WAYS_TO: Final = {
    "Trigger": "Make a trigger of the value: `syscalls.threshold(g, value, n=1)`",
    "PeerId": (
        "Pass one peer: the `.sender` of a received value, `g.peer_id(…)`, or "
        "`peer_lists.only_one(g, peers)` of a list"
    ),
}


@dataclass(kw_only=True, eq=False)
class TypeConstraintFailed(CompileError, AuthorError):
    """The type of a value does not fit the port that it meets."""

    op: str
    detail: str
    wanted: str = ""  # name of the expected type, if there is a single one

    MESSAGE = "types of op {op!r} do not fit: {detail}"
    MEND = "Convert the value (`Cast` for tensors), or pass one of the type that is expected"

    def mend(self) -> str:
        """Return how to get a value of the wanted type: no `Cast` makes a Trigger or a peer."""
        return _WAYS_TO.get(self.wanted, self.MEND)


@dataclass(kw_only=True, eq=False)
class ShapeContradiction(CompileError, AuthorError):
    """A declared shape contradicts the inferred one, or an op does not accept its input shapes."""

    op: str
    detail: str

    MESSAGE = "shapes at op {op!r} contradict each other: {detail}"
    MEND = "Mend the `shape=` that is wrong, or reshape the value; None for an axis says nothing"


@dataclass(kw_only=True, eq=False)
class StoredTypesDiffer(CompileError, AuthorError):
    """Values of two types are stored under one name, or read as another type than is stored."""

    op: str
    kind: str
    name: str
    other_op: str
    other_kind: str
    other_line: str = ""

    def message(self) -> str:
        line = f" (at {self.other_line})" if self.other_line else ""
        return (
            f"op {self.op!r} has {self.kind} under the name {self.name!r}, and "
            f"{self.other_op!r}{line} puts {self.other_kind} there"
        )

    MEND = "Give each type a name of its own, or convert the value before it is put there"


@dataclass(kw_only=True, eq=False)
class NothingStored(CompileError, AuthorError):
    """An op takes a stored value that the program never stores, so it can never fire."""

    op: str
    op_type: str
    name: str
    puts: str

    MESSAGE = "op {op!r} ({op_type}) takes what is kept under {name!r}, where nothing puts a value"
    MEND = "Put one there with a {puts} of the same name, or mend the name"


@dataclass(kw_only=True, eq=False)
class UnresolvedType(CompileError, AuthorError):
    """A value's type stays abstract under strict types."""

    value: str
    known: str = "Any"
    op: str = ""

    def message(self) -> str:
        what = "value" if self.op else "input"
        return f"the type of {what} {self.value!r} is known only as {self.known!r}"

    def mend(self) -> str:
        if not self.op:
            return (
                f"Declare it: `g.input({self.value!r}, types.TENSOR_FLOAT)`, or what it is; or "
                "bind a component whose `storage` narrows it, or compile with_permissive_types()"
            )
        return (
            "Declare it where it begins (`g.input(name, type)`), bind a component whose `storage` "
            "narrows it, or compile with_permissive_types()"
        )


@dataclass(kw_only=True, eq=False)
class IncompatibleStorageOnEdge(CompileError, AuthorError):
    """A sent value has a type that the receiving side does not accept."""

    send_node: str
    recv_node: str
    sent: str
    received: str
    port: str = ""  # a shared port: `recv_node` is another op that sends `received` to it

    MESSAGE = "{send_node!r} sends {sent!r}, but {recv_node!r} hands it on as {received!r}"
    MEND = (
        "Put a Codec (or a Cast) from {sent!r} to {received!r} between them; `codec=` of the port "
        "encodes and decodes"
    )

    def message(self) -> str:
        if not self.port:
            return super().message()
        return (
            f"port {self.port!r} gets two types: {self.recv_node!r} sends {self.received!r} there, "
            f"and {self.send_node!r} sends {self.sent!r}"
        )

    def mend(self) -> str:
        if not self.port:
            return super().mend()
        return (
            f"All sends to one port carry one type: give {self.send_node!r} a port of its own, or "
            f"cast what it sends to {self.received!r}"
        )


# --- slots and bindings ---------------------------------------------------------------------


@dataclass(kw_only=True, eq=False)
class UnboundSlot(CompileError, DeploymentError):
    """A generic slot that no bind call fills."""

    slot: str
    role: str
    target: str = ""

    def message(self) -> str:
        where = f" of target {self.target!r}" if self.target else ""
        return f"slot {self.slot!r} ({self.role}){where} is not bound"

    def mend(self) -> str:
        return f"Add `.bind_{keys.snake_case(self.role)}({self.slot!r}, <component class>)`"


@dataclass(kw_only=True, eq=False)
class UnboundDependency(CompileError, DeploymentError):
    """A bound component depends on a slot that no bind call fills.

    `for_op` is the op that needs it, if only some do; `others` are components of the same kind
    without that dependency.
    """

    component: str
    bound_at_slot: str
    required_role: str
    required_slot: str
    for_op: str = ""
    others: tuple[str, ...] = ()

    def message(self) -> str:
        why = f" for {self.for_op}" if self.for_op else ""
        return (
            f"component {self.component!r} at slot {self.bound_at_slot!r} depends on a "
            f"{self.required_role} at slot {self.required_slot!r}{why}, which is not bound"
        )

    def mend(self) -> str:
        method = keys.snake_case(self.required_role)
        add = f"Add `.bind_{method}({self.required_slot!r}, <component class>)`"
        if not self.others:
            return add
        use = f"; a model that is never trained here is {' or '.join(map(repr, self.others))}"
        return add + (use if self.required_role == "DataSource" else "")


@dataclass(kw_only=True, eq=False)
class MissingBinding(CompileError, DeploymentError):
    """The component of a slot, needed at `site`, is missing."""

    slot: str
    site: str

    MESSAGE = "{site} needs the component of slot {slot!r}, which has none"
    MEND = "Bind slot {slot!r}, or declare it with a concrete component"


@dataclass(kw_only=True, eq=False)
class BindingMismatch(CompileError, DeploymentError):
    """A bind call names something that can't fill the slot."""

    slot: str
    role: str
    detail: str

    MESSAGE = "slot {slot!r} can't be bound as {role}: {detail}"
    MEND = "Bind it once, with a registered class that implements the {role} contract"


@dataclass(kw_only=True, eq=False)
class AmbiguousRole(CompileError, AuthorError):
    """One slot is used as a concrete one and as a generic one."""

    role: str
    concrete_type: str
    generic_slot_id: int
    slot: str = ""

    MESSAGE = (
        "slot {slot!r} of role {role} is concrete ({concrete_type!r}) in one place and "
        "generic (slot id {generic_slot_id}) in another"
    )
    MEND = "Give the two slots different names, or make both concrete or both generic"


@dataclass(kw_only=True, eq=False)
class RoleMethodFailed(CompileError, DeploymentError):
    """The component of a slot does not have the method that an op calls."""

    slot: str
    op_type: str
    source: str

    MESSAGE = "op {op_type!r} can't run on slot {slot!r}: {source}"
    MEND = "Bind a component that has the method, or leave the op out"


# --- ops and functions ----------------------------------------------------------------------


@dataclass(kw_only=True, eq=False)
class ExpansionFailed(CompileError, AuthorError):
    """An op's attributes can't be completed from its signature."""

    op_type: str
    domain: str
    reason: str
    node_name: str = ""
    remedy: str = ""  # replaces the usual one

    MESSAGE = "op {node_name!r} ({domain}::{op_type}): {reason}"
    MEND = "Give the attribute a value of the right kind where the op is recorded"

    def mend(self) -> str:
        """Return the remedy of this failure, else that of attributes."""
        return self.remedy or self.MEND


@dataclass(kw_only=True, eq=False)
class EmptyFunctionTable(CompileError, AuthorError):
    """The model has no functions, so there is no program."""

    MESSAGE = "the model holds no functions"
    MEND = "Compile what `Module.build()` returns (a plain ONNX graph goes into a Module)"


@dataclass(kw_only=True, eq=False)
class ModelOutOfBounds(CompileError, AuthorError):
    """The model exceeds a bound on names, counts or depths (`bbnode.ir.bounds`)."""

    detail: str

    MESSAGE = "the model can't be compiled: {detail}"
    MEND = "Compile what `Module.build()` returns"


@dataclass(kw_only=True, eq=False)
class AlreadyCompiled(CompileError, AuthorError):
    """A compiled model can't be reopened for another compile."""

    detail: str

    MESSAGE = "the model is compiled already: {detail}"
    MEND = "Install it as it is, or compile what `Module.build()` returns"


@dataclass(kw_only=True, eq=False)
class DuplicateFunction(CompileError, AuthorError):
    """Two functions of the model have the same key."""

    domain: str
    function: str

    MESSAGE = "the model holds two functions {domain}::{function}"
    MEND = "Give one of the two Modules another name"


@dataclass(kw_only=True, eq=False)
class WireOpInBootstrap(CompileError, AuthorError):
    """A wire op stands where no partition is cut: in a bootstrap."""

    node_name: str
    function: str

    MESSAGE = "wire op {node_name!r} stands in the bootstrap {function!r}"
    MEND = "Send from the Module's body: a bootstrap runs on one node, before any peer is there"


@dataclass(kw_only=True, eq=False)
class SourceInBootstrap(CompileError, AuthorError):
    """An op that starts executions stands in a bootstrap, which is one execution itself."""

    node_name: str
    op_type: str
    function: str

    MESSAGE = (
        "op {node_name!r} ({op_type}) starts executions, and stands in the bootstrap {function!r}, "
        "where it never does"
    )
    MEND = "Record it in the Module's body; a bootstrap takes `syscalls.pulse` only"


@dataclass(kw_only=True, eq=False)
class DanglingCall(CompileError, AuthorError):
    """A call of a function that the model does not hold."""

    node_name: str
    domain: str
    function: str

    MESSAGE = "op {node_name!r} calls {domain}::{function}, which is not in the model"
    MEND = "Keep the functions that `Module.build()` recorded in the model"


@dataclass(kw_only=True, eq=False)
class BootstrapCompositionGap(CompileError, AuthorError):
    """A bootstrap calls a child bootstrap that the model does not hold."""

    parent: str
    child: str

    MESSAGE = "bootstrap {parent!r} calls {child!r}, which is not in the model"
    MEND = "Give the child Module a `bootstrap` body, or leave the call out"


@dataclass(kw_only=True, eq=False)
class BootstrapCompositionCycle(CompileError, AuthorError):
    """Bootstraps call each other in a cycle."""

    path: tuple[str, ...]

    def message(self) -> str:
        return f"bootstraps call each other in a ring: {listed(self.path)}"

    MEND = "Break the ring: what both need goes into a bootstrap that both call"


@dataclass(kw_only=True, eq=False)
class IrVersionMismatch(CompileError, DeploymentError):
    """The model's ir_version is not one that the compiler accepts."""

    oldest: int
    newest: int
    got: int

    MESSAGE = "the model has ir_version {got}, the compiler takes {oldest} to {newest}"
    MEND = "Record it again with this bbnode, or compile with_target_version(...)"

    @property
    def expected(self) -> int:
        """The newest version that the compiler accepts, its target version."""
        return self.newest


# --- the pipeline ---------------------------------------------------------------------------


@dataclass(kw_only=True, eq=False)
class RuntimeIncomplete(CompileError, AuthorError):
    """A gate or check that the run time relies on is missing."""

    missing: str
    target: str = ""

    MESSAGE = "target {target!r} is incomplete: {missing}"
    MEND = "Leave the passes that insert it in the pipeline, or drop its gate contract"


@dataclass(kw_only=True, eq=False)
class PassInvariantBroken(CompileError, AuthorError):
    """The program is malformed after a pass."""

    pass_name: str
    detail: str

    MESSAGE = "pass {pass_name!r} broke the program: {detail}"
    MEND = "Mend the pass, or report it with the program that shows it"


@dataclass(kw_only=True, eq=False)
class StageFailed(CompileError, AuthorError):
    """A pass of the caller raised; its exception is the cause."""

    stage: str
    detail: str

    MESSAGE = "pass {stage!r} failed: {detail}"
    MEND = "Mend the pass, or take it out with without_stage(...)"


@dataclass(kw_only=True, eq=False)
class UnknownStage(CompileError, DeploymentError):
    """A named pass does not exist, or a pass cannot be added."""

    stage: str
    detail: str

    MESSAGE = "pass {stage!r}: {detail}"
    MEND = "`bbnode compile --time` and `Compiler.pass_names` list the passes, in their order"


@dataclass(kw_only=True, eq=False)
class Internal(CompileError, AuthorError):
    """The compiler contradicts itself."""

    detail: str

    MESSAGE = "the compiler contradicts itself: {detail}"
    MEND = "Please report it with the program that shows it"
