"""A compiled artifact on disk: read whole, digest checked, parsed with bounds.

Rule: the digest is over the unchanged bytes of the file, so that it is the one that `sha256sum`
prints and that peers compare in their hello.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
from google.protobuf.message import DecodeError as ProtobufDecodeError

from bbnode.ir import keys
from bbnode.ir.bounds import OutOfBounds, check_bounds
from bbnode.ir.caps import MAX_ARTIFACT_BYTES
from bbnode.ir.errors import AuthorError, EnvironmentFault, MissingFile
from bbnode.ir.graph import Program
from bbnode.ir.onnx_file import program_of
from bbnode.ir.seal import is_intact


class ArtifactUnreadable(EnvironmentFault):
    """The artifact's file can't be read."""


class ArtifactRejected(AuthorError):
    """The file is not a compiled artifact of bbnode, or not the one that was expected."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Artifact:
    """A compiled model with the digest of its bytes."""

    model: onnx.ModelProto
    sha256: str
    size: int
    # True if this process compiled it from the user's own code; a file may be from anybody.
    own: bool = False

    @property
    def targets(self) -> tuple[str, ...]:
        """The names of its targets, each `class#hash`."""
        return tuple(f.name for f in self.model.functions if _meta(f, keys.TARGET_KEY) == "true")


def load_artifact(path: Path, *, expected_sha256: str | None = None) -> Artifact:
    """Read and check a compiled artifact.

    Raises MissingFile, ArtifactUnreadable, or ArtifactRejected for a wrong digest, for a file that
    is not an ONNX model, and for a model that was not compiled.
    """
    try:
        if path.stat().st_size > MAX_ARTIFACT_BYTES:
            raise ArtifactRejected(f"{path}: larger than the 2 GiB that an ONNX file can have")
        data = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
        raise MissingFile(
            f"{path}: {error.strerror}; make the artifact with `bbnode compile`, or correct "
            "artifact.path in the configuration"
        ) from error
    except OSError as error:
        raise ArtifactUnreadable(f"{path}: {error.strerror}; make it readable") from error
    return parse_artifact(data, str(path), expected_sha256=expected_sha256)


def parse_artifact(
    data: bytes, where: str, *, expected_sha256: str | None = None, own: bool = False
) -> Artifact:
    """Return the artifact in `data`; `where` names it in errors, `own`: it was compiled here."""
    sha256 = hashlib.sha256(data).hexdigest()
    if expected_sha256 is not None and sha256 != expected_sha256.lower():
        raise ArtifactRejected(
            f"{where}: its sha256 is {sha256}, expected {expected_sha256.lower()}; the file was "
            "changed, fetch it again or correct artifact.sha256"
        )
    model = onnx.ModelProto()
    try:
        model.ParseFromString(data)
    except (ProtobufDecodeError, RecursionError) as error:
        raise ArtifactRejected(
            f"{where}: not an ONNX model ({len(data)} bytes); make it with `bbnode compile`"
        ) from error
    try:
        check_bounds(model)
    except OutOfBounds as error:
        raise ArtifactRejected(f"{where}: {error}") from error
    passport = _meta(model, keys.COMPILED_KEY)
    if passport is None:
        raise ArtifactRejected(
            f"{where}: an ONNX model that bbnode has not compiled; run `bbnode compile` on its "
            "Module"
        )
    if passport != keys.COMPILED_CURRENT_VERSION:
        raise ArtifactRejected(
            f"{where}: compiled as {passport!r}, this bbnode runs "
            f"{keys.COMPILED_CURRENT_VERSION!r}; compile it again"
        )
    if not is_intact(model):
        raise ArtifactRejected(
            f"{where}: it was changed after it was compiled; fetch or compile it again"
        )
    names = Counter((f.domain, f.name, f.overload) for f in model.functions)
    targets = Counter((f.name,) for f in model.functions if _meta(f, keys.TARGET_KEY) is not None)
    for name, count in (*names.items(), *targets.items()):
        if count > 1:
            raise ArtifactRejected(
                f"{where}: {count} functions in it are called {'::'.join(name)!r:.80}; compile it "
                "again"
            )
    return Artifact(model=model, sha256=sha256, size=len(data), own=own)


def serialize(model: onnx.ModelProto) -> bytes:
    """Return the bytes of an artifact: the same model gives the same bytes."""
    return bytes(model.SerializeToString(deterministic=True))


def as_graph(model: onnx.ModelProto | Program) -> Program:
    """Return the graph of a model."""
    return model if isinstance(model, Program) else program_of(model)


def _meta(proto: Any, key: str) -> str | None:
    return next((entry.value for entry in proto.metadata_props if entry.key == key), None)
