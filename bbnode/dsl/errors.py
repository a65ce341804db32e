"""Errors of a program while it is recorded, and of ONNX models while they become Modules.

Rule: these errors are the author's to fix, so each names the Module that was being recorded, the
line of the author's source, the fault, and the remedy.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from pathlib import PurePath

from bbnode.ir.errors import AuthorError, MissingFile

# Frames of these packages are skipped to find the author's line: custom ops record themselves when
# called, a program's arguments are checked where its class is created, numpy converts values.
_PACKAGES = (
    "bbnode.dsl.", "bbnode.ops.", "bbnode.programs.arguments.", "bbnode.programs.composing.",
    "numpy.",
)  # fmt: skip
# A context variable, so that threads that build programs do not see each other's path.
_PATH: ContextVar[str] = ContextVar("bbnode_module_path", default="")


@contextmanager
def recording(path: str) -> Iterator[None]:
    """Set the path of the Modules that are recorded inside the block, for its errors."""
    token = _PATH.set(path)
    try:
        yield
    finally:
        _PATH.reset(token)


def author_line() -> str:
    """Return `<file name>:<line>` of the innermost frame outside of these packages.

    Directories are left out, so that a source records to the same bytes on every machine.
    """
    frame = sys._getframe(1)
    while frame.f_back is not None:
        module = frame.f_globals.get("__name__", "")
        if not f"{module}.".startswith(_PACKAGES):
            break
        frame = frame.f_back
    return f"{_file_name(frame.f_code.co_filename)}:{frame.f_lineno}"


@lru_cache(maxsize=256)  # more than the files of one program
def _file_name(path: str) -> str:
    return PurePath(path).name


class RecordingError(AuthorError):
    """A Module body cannot be recorded.

    Attributes:
        what: the fault and its remedy.
        module: names of the Modules being recorded, outermost first, joined by "/", or the name
            passed to the constructor; empty outside of a Module.
        source: `<file name>:<line>` of the author's code.
    """

    def __init__(self, what: str, module: str = "") -> None:
        self.what = what
        self.module = module or _PATH.get()
        self.source = author_line()
        where = f"{self.module} ({self.source})" if self.module else self.source
        super().__init__(f"{where}: {what}")


class BadArgument(RecordingError):
    """An argument is of the wrong kind, out of range, missing, unknown, or one too many."""


class BadName(RecordingError):
    """A name cannot stand in the artifact."""


class DuplicateName(RecordingError):
    """A port, input or output of that name exists already."""


class UnknownName(RecordingError):
    """Nothing of that name was recorded."""


class NoSuchOp(RecordingError, AttributeError):
    """A slot has no such op. (An AttributeError too, so that `hasattr` keeps its meaning.)"""


class ForeignOutput(RecordingError):
    """A value of one recording was used in another."""


class NotReceived(RecordingError):
    """`.sender` was used on a value that no peer sent."""


class SlotConflict(RecordingError):
    """One slot name was used with two roles, two configs or two peer classes."""


class GraphClosed(RecordingError):
    """Something was recorded into a Module that has finished recording."""


class BranchMismatch(RecordingError):
    """Branches of an `if_`, or a `loop` and its body, do not return the same values."""


class BranchMisuse(RecordingError):
    """An op was recorded in a branch where it is not allowed, or outside while one is recorded."""


class RecursiveModule(RecordingError):
    """A Module calls itself, or calls nest too deep."""


# --- ONNX models and artifacts that become Modules -----------------------------------------


class OnnxImportError(RecordingError):
    """An ONNX model cannot become a Module; ops and values are named as in its file."""


class BrokenModel(OnnxImportError):
    """The file cannot be read, is not an ONNX model, or fails ONNX's own checker."""


class MissingModelFile(MissingFile, BrokenModel):
    """The file does not exist."""


class ModelTooLarge(OnnxImportError):
    """The model has more bytes or ops than one artifact can hold."""


class NestingTooDeep(OnnxImportError):
    """Graphs of If, Loop or Scan, or calls of local functions, nest too deep or in a cycle."""


class ExternalDataMissing(OnnxImportError):
    """Tensors are in other files, which are missing or must not be read."""


class UnsupportedDomain(OnnxImportError):
    """An op is of a domain that neither ONNX nor the model itself defines."""


class UnsupportedPort(OnnxImportError):
    """An input or output is not a tensor that can travel between peers."""


class UnconvertibleModel(OnnxImportError):
    """The model's opset cannot be brought to the one that programs are recorded in."""


class BrokenArtifact(OnnxImportError):
    """A model to replay was neither recorded nor compiled by bbnode, or was changed."""


class NoSuchTarget(OnnxImportError):
    """The artifact has no target of that name."""


class UnknownValue(OnnxImportError):
    """The model has no value of that name."""


class BadCut(OnnxImportError):
    """The model cannot be cut there."""


class TooManyStages(OnnxImportError):
    """More stages were requested than the model has places to be cut at."""
