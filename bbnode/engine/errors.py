"""Errors of the engine, one class per reason.

Rule: install errors and entry-point errors are raised to the host; an error during a poll becomes a
step and never an exception. The `kind` of an `OpFailed` step is the name of a class here.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType

from bbnode.components.contracts import ComponentError
from bbnode.ir.errors import AuthorError, BbnodeError, DeploymentError, EnvironmentFault
from bbnode.ir.interrupts import let_stop

# --- install ---------------------------------------------------------------------------


class InstallError(DeploymentError):
    """An artifact can't be installed on this node."""


class BrokenSeal(InstallError):
    """The artifact was changed after it was compiled: its seal does not fit."""


class NotCompiled(InstallError):
    """The model was not compiled, or by another version of the compiler."""


class InvalidArtifact(InstallError):
    """The compiled model is malformed: made by hand, cut short, or changed."""

    def __init__(self, where: str, what: str) -> None:
        self.where = where
        self.what = what
        super().__init__(f"{where}: {what}; compile the program again")


class UnknownTarget(InstallError):
    """No partition of the artifact has this name or class."""

    def __init__(self, target: str, known: Iterable[str]) -> None:
        self.target = target
        self.known = tuple(known)
        classes = [name.split("#")[0] for name in self.known]
        there = f"there is: {', '.join(self.known) or 'none'}"
        hint = did_you_mean(target, [*self.known, *classes], there)
        super().__init__(f"no target {target!r}{hint}")


class UnreachableOps(InstallError):
    """Ops that no execution can ever fire, such as one that needs the values of two deliveries."""

    def __init__(self, ops: Sequence[str]) -> None:
        self.ops = tuple(ops)
        listed = "\n  ".join(self.ops)
        super().__init__(
            f"{len(self.ops)} op(s) can never fire, since what they need never meets in one "
            "execution; compile the program again, and the compiler says which values these are:"
            f"\n  {listed}"
        )


class SlotBindingConflict(InstallError):
    """Targets that are installed together bind one slot to different things."""

    def __init__(self, slot: str, contributors: Sequence[tuple[str, str]]) -> None:
        self.slot = slot
        self.contributors = tuple(contributors)
        listed = "; ".join(f"{target}: {bound}" for target, bound in contributors)
        super().__init__(
            f"slot {slot!r} is bound differently by the targets ({listed}); "
            "give the slots different names, or install the targets on different nodes"
        )


class MissingComponents(InstallError):
    """Component types of the artifact are not installed here; lists all of them."""

    def __init__(self, missing: Sequence[tuple[str, str, str]]) -> None:
        self.missing = tuple(missing)
        listed = "; ".join(f"slot {slot!r}: {reason}" for slot, _, reason in missing)
        super().__init__(f"{len(missing)} component type(s) are missing: {listed}")


class RoleMismatch(InstallError):
    """A bound component does not fulfil the role of its slot."""


class UnknownSlot(InstallError):
    """No installed target has a slot of this name."""


class MissingDependency(InstallError):
    """A component depends on a slot that no installed target binds."""


class DependencyCycle(InstallError):
    """Components depend on each other in a ring."""


class ComponentConstructionFailed(InstallError):
    """A component raised something unexpected while it was made."""


class UnsupportedOps(InstallError):
    """Ops of the artifact can't run on this engine or its components; lists all of them."""

    def __init__(
        self,
        ops: Sequence[str],
        remedy: str = "bind components that have them, or upgrade bbnode",
    ) -> None:
        self.ops = tuple(ops)
        listed = "\n  ".join(self.ops)
        super().__init__(f"{len(self.ops)} op(s) can't run here; {remedy}:\n  {listed}")


class WrongSignature(InstallError):
    """Methods of components do not take what they are called with; lists all of them."""

    def __init__(self, methods: Sequence[str]) -> None:
        self.methods = tuple(methods)
        listed = "\n  ".join(self.methods)
        super().__init__(
            f"{len(self.methods)} method(s) of components have other parameters than their ops; "
            f"mend the components:\n  {listed}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MissingOp:
    """A custom op that this node can't run; `installed`: the version of its opset here, or None."""

    where: str
    domain: str
    op_type: str
    version: int
    installed: int | None
    package: str

    def __str__(self) -> str:
        what = f"{self.where}: {self.domain}::{self.op_type}, opset version {self.version}"
        package = f"the package with the module {self.package!r}" if self.package else "a package"
        if self.installed is None:
            return f"{what}: install {package} here, which brings {self.domain}"
        if self.installed != self.version:
            return f"{what}: {package} is installed, with version {self.installed} of {self.domain}"
        return f"{what}: {package} is installed, and has no such op"


class MissingCustomOps(UnsupportedOps):
    """Custom ops of the artifact that no installed package has in the program's version.

    `missing` lists these; `ops` all that can't run here, as for UnsupportedOps.
    """

    def __init__(self, missing: Sequence[MissingOp], others: Sequence[str] = ()) -> None:
        self.missing = tuple(missing)
        super().__init__(
            [*map(str, missing), *others],
            "install the packages that the program was compiled with, or compile it again with "
            "those of this machine",
        )


# --- entry points ----------------------------------------------------------------------


class EntryError(BbnodeError):
    """A call at the node's boundary was refused; nothing was changed."""


class UnknownInput(EntryError):
    """The target has no input of this name."""


class MissingInput(EntryError):
    """An invoke leaves out inputs of the target."""


class AlreadyTransitivelyQueued(EntryError):
    """A bootstrap was requested that is already under way, by itself or through another one."""


class TooManyInputs(EntryError):
    """An invoke has more inputs than the cap."""


class OversizePayload(EntryError):
    """Something is larger than its cap."""


class InvalidDeadline(EntryError):
    """The time that a call gives its execution is none."""


class InputTypeMismatch(EntryError):
    """An input is of another type than the target declares."""


class InputShapeMismatch(InputTypeMismatch):
    """A tensor has another shape than the program declares for the input."""


class BudgetExceeded(EntryError, EnvironmentFault):
    """The byte budget of waiting events and executions is used up."""


class IngressFull(EntryError, EnvironmentFault):
    """Too many events wait for the next poll."""


class InvalidEventKind(EntryError):
    """A host may not publish this kind of event."""


class IngressClosed(EntryError):
    """The node was closed."""


# --- ops (kinds of OpFailed) -----------------------------------------------------------


class OpError(BbnodeError):
    """An op of an execution failed; what depends on it does not fire."""


# The label of a gate that a message does not pass a second time.
REASON_DUPLICATE = "duplicate"


class GateDenied(OpError):
    """A gate stopped an execution; `reason` is a stable label."""

    def __init__(self, gate: str, reason: str, detail: str = "") -> None:
        self.reason = reason
        super().__init__(f"{gate} reason={reason}{': ' + detail if detail else ''}")


class DeadlineExceeded(OpError):
    """An execution's or a parked op's deadline is over."""


class QuorumNotReached(OpError):
    """Too few of a cohort answered; with `too_few_asked`, fewer were asked than had to answer."""

    def __init__(self, what: str, *, too_few_asked: bool = False) -> None:
        super().__init__(what)
        self.too_few_asked = too_few_asked


class CompositeMismatch(OpError):
    """A composite does not hold what the program says."""


class NoAnswer(OpError):
    """A peer whose answer is wanted has not answered, or nobody has."""


class AnswersDiffer(OpError):
    """Answers that are to be put together are not of one type and shape."""


class InvalidOperand(OpError):
    """A wire or book op was given a value that it can't use."""


class WrongResultType(OpError, ComponentError):
    """A component returned something else than its contract says."""


class CannotRoute(OpError):
    """The address book has no address of a peer."""


class InvalidPeerAddress(EntryError):
    """The host gave an address that can't be one of that peer."""


class AddressBookFull(OpError):
    """The address book, or one entry of it, is full."""


class PendingAsyncExceeded(OpError):
    """Too many ops are parked."""


class FramesExceeded(OpError):
    """Too many executions are under way."""


class OutboundFull(OpError):
    """Too many envelopes wait to be sent."""


class PayloadTooLarge(OpError):
    """A value does not fit into one envelope."""


class CastRefused(OpError):
    """A value can't become one of the wanted type."""


class LimitNotTaken(OpError):
    """A semaphore was released more often than it was acquired."""


class QueueFull(OpError):
    """A queue holds as many values as it may."""


class AlreadyGathered(OpError):
    """A peer has contributed to the open batch of a join, which takes one value of each."""


class JoinFull(OpError):
    """The open batch of a join holds as many values as it may."""


class JoinIncomplete(OpError):
    """Too few values came to a join in its time; who came is in the detail."""


class NothingHeld(OpError):
    """A Flush found nothing under its name."""


class UnexpectedException(OpError):
    """A component raised an exception that is not a bbnode error: its author's fault."""


# --- snapshot --------------------------------------------------------------------------


class SnapshotRefused(DeploymentError):
    """A snapshot is torn, changed, newer, or does not fit what is installed."""


class StateRefused(SnapshotRefused):
    """A component refuses the state that a snapshot has for its slot."""

    def __init__(self, message: str, slot: str) -> None:
        super().__init__(message)
        self.slot = slot


class RecordRefused(DeploymentError):
    """A record of a node is malformed, newer, or does not fit the artifact."""


class SnapshotFailed(ComponentError):
    """A component, or a value of a program, can't be put into a snapshot."""


class NodeBusy(SnapshotFailed):
    """A component is at work in a thread, and its earlier state was not kept."""


class SavedFailure(OpError):
    """An error that was stored in a snapshot, with its original kind and text."""

    def __init__(self, kind: str, detail: str) -> None:
        self.kind = kind
        self.detail = detail
        super().__init__(f"{kind}: {detail}")


class ReservedName(InvalidArtifact, AuthorError):
    """A program uses a name that belongs to the framework."""


def describe(error: BaseException) -> tuple[str, str]:
    """Return the kind and text of an error, even if its `__str__` fails.

    The text ends with the line of an author's code that raised it.
    """
    if isinstance(error, SavedFailure):
        return error.kind, error.detail
    try:
        text = str(error)
    except BaseException as odd:  # noqa: BLE001 - `__str__` is code of a component's author
        let_stop(odd)
        text = "(its text can't be made)"
    if isinstance(error, SystemExit):
        text = f"{text or 'without a code'}; no code of a component ends the node: raise an error"
    place = raised_at(error)
    where = f" (raised at {place})"
    if not place or text.endswith(where):  # it may be that of its cause
        where = ""
    if isinstance(error, BbnodeError):
        return type(error).__name__, text + where
    return UnexpectedException.__name__, f"{type(error).__name__}: {text}{where}"


# Modules that call the code of a component's, an op's or a backend's author.
_CALLERS = frozenset({"bbnode.engine.ops.role", "bbnode.engine.ops.graphs", "bbnode.ops.custom"})
# Packages whose frames are not the author's: ours, and what ours use.
_NOT_AUTHORS = sys.stdlib_module_names | {
    *("base58", "bbnode", "google", "msgpack", "multiaddr", "numpy", "onnx", "onnxruntime", "trio"),
}
_MOST_CAUSES = 8


def raised_at(error: BaseException) -> str:
    """Return `<file name>:<line>` of the last frame in the package of a component's author.

    Empty for an error that comes from no code but ours.
    """
    link: BaseException | None = error
    for _ in range(_MOST_CAUSES):
        if link is None:
            break
        place = _authors_frame(link.__traceback__)
        if place:
            return place
        link = link.__cause__
    return ""


def _authors_frame(traceback: TracebackType | None) -> str:
    package, place = "", ""
    while traceback is not None:
        module = str(traceback.tb_frame.f_globals.get("__name__", ""))
        top = module.partition(".")[0]
        if module in _CALLERS:
            package, place = "", ""  # what is above belongs to the host
        elif top == package or (not package and top not in _NOT_AUTHORS):
            package = top
            path = traceback.tb_frame.f_code.co_filename.replace("\\", "/")
            place = f"{path.rpartition('/')[2]}:{traceback.tb_lineno}"
        traceback = traceback.tb_next
    return place


def did_you_mean(given: object, known: Iterable[str], listing: str = "") -> str:
    """Return `; did you mean 'x'?` for the nearest of `known`, or "".

    `listing`, such as "it has: x, y", goes behind it, or stands alone where nothing is near.
    """
    # A host may give any object.
    near = difflib.get_close_matches(given, list(known), n=1) if isinstance(given, str) else []
    if not near:
        return f"; {listing}" if listing else ""
    return f"; did you mean {near[0]!r}?" + (
        f" {listing[0].upper()}{listing[1:]}" if listing else ""
    )
