"""The node's state on disk: written whole, checked when read, never trusted blindly.

Rule: a file that is torn, changed, newer, or of another artifact is not used; the reason is
told and the one before it is tried.
"""

from __future__ import annotations

import hashlib
import logging
from dataclasses import dataclass
from pathlib import Path

import msgpack

from bbnode.daemon import paths

logger = logging.getLogger(__name__)

FORMAT_VERSION = 1
_MAGIC = b"BBNODE1\n"
_DIGEST_BYTES = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """What survives a restart: the engine's snapshot and the rounds made, by target."""

    artifact_sha256: str
    node: bytes
    rounds_done: dict[str, int]


def checkpoint_file(state_dir: Path) -> Path:
    """Where the newest checkpoint lies; `.previous` beside it is the one before."""
    return state_dir / "checkpoint"


def write(state_dir: Path, checkpoint: Checkpoint) -> None:
    """Write the checkpoint; the one before stays beside it. Raises StorageError."""
    body = msgpack.packb(
        {
            "version": FORMAT_VERSION,
            "artifact_sha256": checkpoint.artifact_sha256,
            "node": checkpoint.node,
            "rounds_done": checkpoint.rounds_done,
        }
    )
    path = checkpoint_file(state_dir)
    if path.exists():
        path.replace(path.with_suffix(".previous"))
    data = _MAGIC + hashlib.sha256(body).digest() + body
    paths.write_atomically(path, data, mode=0o600)


def read(state_dir: Path, artifact_sha256: str) -> Checkpoint | None:
    """The newest usable checkpoint of this artifact, or None; what was refused is logged."""
    newest = checkpoint_file(state_dir)
    for path in (newest, newest.with_suffix(".previous")):
        try:
            checkpoint = _parse(path.read_bytes())
        except FileNotFoundError:
            continue
        except (OSError, ValueError, TypeError, KeyError) as error:
            logger.warning("checkpoint refused", extra={"path": str(path), "reason": str(error)})
            continue
        if checkpoint.artifact_sha256 != artifact_sha256:
            logger.warning(
                "checkpoint refused",
                extra={"path": str(path), "reason": "it was made with another artifact"},
            )
            continue
        return checkpoint
    return None


def _parse(data: bytes) -> Checkpoint:
    start = len(_MAGIC) + _DIGEST_BYTES
    if not data.startswith(_MAGIC) or len(data) < start:
        raise ValueError("not a checkpoint of this version of bbnode, or torn")
    body = data[start:]
    if hashlib.sha256(body).digest() != data[len(_MAGIC) : start]:
        raise ValueError("its checksum does not fit: torn or changed")
    fields = msgpack.unpackb(body, max_ext_len=0, max_bin_len=len(body))
    if fields["version"] != FORMAT_VERSION:
        raise ValueError(f"format {fields['version']}, this bbnode reads {FORMAT_VERSION}")
    return Checkpoint(
        artifact_sha256=fields["artifact_sha256"],
        node=fields["node"],
        rounds_done=dict(fields["rounds_done"]),
    )
