"""Errors of slots and bindings, of the function table, and of the pipeline itself.

Rule: as in `errors.py`, from where these are imported.
"""

from __future__ import annotations

from dataclasses import dataclass

from bbnode.compiler.error_base import CompileError, listed
from bbnode.ir import keys
from bbnode.ir.errors import AuthorError, DeploymentError

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
    """A bound component depends on a slot that no bind call fills."""

    component: str
    bound_at_slot: str
    required_role: str
    required_slot: str

    def message(self) -> str:
        return (
            f"component {self.component!r} at slot {self.bound_at_slot!r} depends on a "
            f"{self.required_role} at slot {self.required_slot!r}, which is not bound"
        )

    def mend(self) -> str:
        method = keys.snake_case(self.required_role)
        return f"Add `.bind_{method}({self.required_slot!r}, <component class>)`"


@dataclass(kw_only=True, eq=False)
class MissingBinding(CompileError, DeploymentError):
    """Something at `site` needs the component of a slot, and there is none."""

    slot: str
    site: str

    def message(self) -> str:
        return f"{self.site} needs the component of slot {self.slot!r}, which has none"

    def mend(self) -> str:
        return f"Bind slot {self.slot!r}, or declare it with a concrete component"


@dataclass(kw_only=True, eq=False)
class BindingMismatch(CompileError, DeploymentError):
    """A bind call names something that can't fill the slot."""

    slot: str
    role: str
    detail: str

    def message(self) -> str:
        return f"slot {self.slot!r} can't be bound as {self.role}: {self.detail}"

    def mend(self) -> str:
        return f"Bind it once, with a registered class that implements the {self.role} contract"


@dataclass(kw_only=True, eq=False)
class AmbiguousRole(CompileError, AuthorError):
    """One slot is used as a concrete one and as a generic one."""

    role: str
    concrete_type: str
    generic_slot_id: int
    slot: str = ""

    def message(self) -> str:
        return (
            f"slot {self.slot!r} of role {self.role} is concrete ({self.concrete_type!r}) in one "
            f"place and generic (slot id {self.generic_slot_id}) in another"
        )

    def mend(self) -> str:
        return "Give the two slots different names, or make both concrete or both generic"


@dataclass(kw_only=True, eq=False)
class RoleMethodFailed(CompileError, DeploymentError):
    """The component of a slot does not have the method that an op calls."""

    slot: str
    op_type: str
    source: str

    def message(self) -> str:
        return f"op {self.op_type!r} can't run on slot {self.slot!r}: {self.source}"

    def mend(self) -> str:
        return "Bind a component that has the method, or leave the op out"


# --- ops and functions ----------------------------------------------------------------------


@dataclass(kw_only=True, eq=False)
class ExpansionFailed(CompileError, AuthorError):
    """An op's attributes can't be completed from its signature."""

    op_type: str
    domain: str
    reason: str
    node_name: str = ""

    def message(self) -> str:
        return f"op {self.node_name!r} ({self.domain}::{self.op_type}): {self.reason}"

    def mend(self) -> str:
        return "Give the attribute a value of the right kind where the op is recorded"


@dataclass(kw_only=True, eq=False)
class EmptyFunctionTable(CompileError, AuthorError):
    """The model has no functions, so there is no program."""

    def message(self) -> str:
        return "the model holds no functions"

    def mend(self) -> str:
        return "Compile what `Module.build()` returns (a plain ONNX graph goes into a Module)"


@dataclass(kw_only=True, eq=False)
class ModelOutOfBounds(CompileError, AuthorError):
    """The model holds names, counts or depths that no program needs (`bbnode.ir.bounds`)."""

    detail: str

    def message(self) -> str:
        return f"the model can't be compiled: {self.detail}"

    def mend(self) -> str:
        return "Compile what `Module.build()` returns"


@dataclass(kw_only=True, eq=False)
class AlreadyCompiled(CompileError, AuthorError):
    """The model carries the passport of a compiled one."""

    def message(self) -> str:
        return "the model is compiled already"

    def mend(self) -> str:
        return "Install it as it is, or compile what `Module.build()` returns"


@dataclass(kw_only=True, eq=False)
class DuplicateFunction(CompileError, AuthorError):
    """Two functions of the model answer to one call."""

    domain: str
    function: str

    def message(self) -> str:
        return f"the model holds two functions {self.domain}::{self.function}"

    def mend(self) -> str:
        return "Give one of the two Modules another name"


@dataclass(kw_only=True, eq=False)
class WireOpInBootstrap(CompileError, AuthorError):
    """A wire op stands where no partition is cut: in a bootstrap."""

    node_name: str
    function: str

    def message(self) -> str:
        return f"wire op {self.node_name!r} stands in the bootstrap {self.function!r}"

    def mend(self) -> str:
        return "Send from the Module's body: a bootstrap runs on one node, before any peer is there"


@dataclass(kw_only=True, eq=False)
class DanglingCall(CompileError, AuthorError):
    """A call of a function that the model does not hold."""

    node_name: str
    domain: str
    function: str

    def message(self) -> str:
        return (
            f"op {self.node_name!r} calls {self.domain}::{self.function}, which is not in the model"
        )

    def mend(self) -> str:
        return "Keep the functions that `Module.build()` recorded in the model"


@dataclass(kw_only=True, eq=False)
class BootstrapCompositionGap(CompileError, AuthorError):
    """A bootstrap calls a child bootstrap that the model does not hold."""

    parent: str
    child: str

    def message(self) -> str:
        return f"bootstrap {self.parent!r} calls {self.child!r}, which is not in the model"

    def mend(self) -> str:
        return "Give the child Module a `bootstrap` body, or leave the call out"


@dataclass(kw_only=True, eq=False)
class BootstrapCompositionCycle(CompileError, AuthorError):
    """Bootstraps call each other in a ring."""

    path: tuple[str, ...]

    def message(self) -> str:
        return f"bootstraps call each other in a ring: {listed(self.path)}"

    def mend(self) -> str:
        return "Break the ring: what both need goes into a bootstrap that both call"


@dataclass(kw_only=True, eq=False)
class IrVersionMismatch(CompileError, DeploymentError):
    """The model's ir_version is not the one the compiler was told to take."""

    expected: int
    got: int

    def message(self) -> str:
        return f"the model has ir_version {self.got}, the compiler takes {self.expected}"

    def mend(self) -> str:
        return "Record it again with this bbnode, or compile with_target_version(...)"


# --- the pipeline ---------------------------------------------------------------------------


@dataclass(kw_only=True, eq=False)
class RuntimeIncomplete(CompileError, AuthorError):
    """A gate or check that the run time relies on is missing."""

    missing: str
    target: str = ""

    def message(self) -> str:
        return f"target {self.target!r} is incomplete: {self.missing}"

    def mend(self) -> str:
        return "Leave the passes that insert it in the pipeline, or drop its gate contract"


@dataclass(kw_only=True, eq=False)
class PassInvariantBroken(CompileError, AuthorError):
    """The program is malformed after a pass or a user stage."""

    pass_name: str
    detail: str

    def message(self) -> str:
        return f"pass {self.pass_name!r} broke the program: {self.detail}"

    def mend(self) -> str:
        return "Mend the stage, or report the pass with the program that shows it"


@dataclass(kw_only=True, eq=False)
class StageFailed(CompileError, AuthorError):
    """A pass of the caller's raised; its error is the cause."""

    stage: str
    detail: str

    def message(self) -> str:
        return f"pass {self.stage!r} failed: {self.detail}"

    def mend(self) -> str:
        return "Mend the pass, or take it out with without_stage(...)"


@dataclass(kw_only=True, eq=False)
class UnknownStage(CompileError, DeploymentError):
    """A pass is named that is not there, or one is added whose name is taken."""

    stage: str
    detail: str

    def message(self) -> str:
        return f"pass {self.stage!r}: {self.detail}"

    def mend(self) -> str:
        return "`Compiler.pass_names` lists the passes of a compile, in their order"


@dataclass(kw_only=True, eq=False)
class Internal(CompileError, AuthorError):
    """The compiler contradicts itself."""

    detail: str

    def message(self) -> str:
        return f"the compiler contradicts itself: {self.detail}"

    def mend(self) -> str:
        return "Please report it with the program that shows it"
