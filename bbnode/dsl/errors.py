"""What can be wrong with a program while it is recorded.

Rule: the author is at fault, so every error names the Module that was being recorded, the line
of the author's source that did it, what is wrong there, and how to mend it.
"""

from __future__ import annotations

from bbnode.dsl.context import recorded_module
from bbnode.ir.errors import AuthorError


class RecordingError(AuthorError):
    """A Module body cannot be recorded.

    Attributes:
        what: what is wrong and how to mend it.
        module: chain of Module names, outermost first, joined by "/"; empty outside of one.
        source: `<file name>:<line>` of the author's code.
    """

    def __init__(self, what: str, *, module: str, source: str) -> None:
        module = module or recorded_module()
        self.what = what
        self.module = module
        self.source = source
        super().__init__(f"{module} ({source}): {what}" if module else f"{source}: {what}")


class BadArgument(RecordingError):
    """An argument is of the wrong kind, out of range, missing, unknown, or one too many."""


class BadName(RecordingError):
    """A name cannot stand in the artifact."""


class DuplicateName(RecordingError):
    """A port, input or output of that name is there already."""


class UnknownName(RecordingError):
    """Nothing of that name was recorded."""


class UnknownOp(RecordingError, AttributeError):
    """A slot has no such op. (An AttributeError too, so that `hasattr` keeps its meaning.)"""


class ForeignOutput(RecordingError):
    """A value of one recording was used in another."""


class NotReceived(RecordingError):
    """`.sender` of a value that no peer sent."""


class SlotConflict(RecordingError):
    """One slot name was used with two roles, two configs or two peer classes."""


class GraphClosed(RecordingError):
    """Something was recorded into a Module that has finished recording."""


class BranchMismatch(RecordingError):
    """Branches of an `if_`, or a `loop` and its body, do not give the same values."""


class BranchMisuse(RecordingError):
    """Something was recorded in a branch that cannot stand there, or past it."""


class RecursiveModule(RecordingError):
    """A Module calls itself, or calls nest without end."""
