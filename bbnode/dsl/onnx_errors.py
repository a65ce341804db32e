"""What can be wrong with an ONNX model that becomes a Module, and with how it is split.

Rule: whoever wrote `OnnxModule(…)` is at fault or can mend it, so all of these are
RecordingErrors; each names the op or value of the model by the name that it has in the file.
"""

from __future__ import annotations

from typing import TypeVar

from bbnode.dsl.errors import RecordingError
from bbnode.dsl.source import author_line


class OnnxImportError(RecordingError):
    """An ONNX model cannot become a Module."""


class BrokenModel(OnnxImportError):
    """The file cannot be read, is no ONNX model, or is one that ONNX's own checker refuses."""


class ModelTooLarge(OnnxImportError):
    """More bytes or ops than one artifact holds."""


class NestingTooDeep(OnnxImportError):
    """Graphs of If, Loop or Scan, or calls of local functions, nest too deep or in a ring."""


class ExternalDataMissing(OnnxImportError):
    """Tensors stand in other files that are not there, or not to be read."""


class UnsupportedDomain(OnnxImportError):
    """An op of a domain that neither ONNX nor the model itself defines."""


class UnsupportedPort(OnnxImportError):
    """An input or output that is no tensor which can travel between peers."""


class UnconvertibleModel(OnnxImportError):
    """The model's opset cannot be brought to the one that programs are recorded in."""


class BrokenArtifact(OnnxImportError):
    """What was to be replayed is no program that bbnode recorded or compiled, or was changed."""


class UnknownTarget(OnnxImportError):
    """The artifact has no target of that name."""


class UnknownValue(OnnxImportError):
    """The model has no value of that name."""


class BadCut(OnnxImportError):
    """The model cannot be cut there."""


class TooManyStages(OnnxImportError):
    """More stages were asked for than the model has places to be cut at."""


Error = TypeVar("Error", bound=RecordingError)


def fault(kind: type[Error], what: str, module: str) -> Error:
    """An error of this import, to be raised: it knows the Module and the author's line."""
    return kind(what, module=module, source=author_line())


def first_line(error: BaseException) -> str:
    """The first line of another package's error text, cut to what a message can hold."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__)[:300]
