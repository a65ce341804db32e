"""The node's state on disk: written whole, checked when read, never trusted blindly.

Rule: a file that is torn, changed or newer is not used; the reason is logged and the one before it
is tried. Of one of another version of the program, only the states of components are used, where
slot and type agree, and the file is kept aside, so that nothing of it is lost. A new file is
complete on disk before an old one is touched, and only a good one becomes the one before: a full
disk or a crash at any point leaves at least as good a file as there was. If a checkpoint can't be
written, the node continues without it.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgpack
import trio
from pydantic import BaseModel, ValidationError

from bbnode.components.contracts import ComponentError
from bbnode.daemon import paths
from bbnode.daemon.invoke.rounds import Rounds
from bbnode.engine import Node
from bbnode.engine.errors import SnapshotRefused, StateRefused
from bbnode.ir.caps import MAX_KEPT_UNSENT_BYTES
from bbnode.ir.errors import BbnodeError, DecodeError, DeploymentError
from bbnode.ir.peer import PeerId
from bbnode.transport.base import Unsent
from bbnode.transport.driver import trio_clock_ns

logger = logging.getLogger(__name__)

FORMAT_VERSION = 2
_MAGIC = b"BBNODE1\n"
# Versions of the program whose last checkpoints are kept: the one before, and one more.
MAX_KEPT_VERSIONS = 2
_KEPT = re.compile(r"checkpoint\.[0-9a-f]{8}")
_DIGEST_BYTES = 32


class CheckpointRefused(DeploymentError):
    """A checkpoint's file is torn, changed or newer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnsentEnvelope:
    """An envelope that its peer had not acknowledged; `data` None: there was no room for it."""

    peer: PeerId
    tag: int
    data: bytes | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """The state that survives a restart.

    It has the engine's snapshot and, by target, the rounds made and the execution of the current
    one; at a stop also the envelopes that no peer has acknowledged.
    """

    artifact_sha256: str
    node: bytes
    rounds_done: dict[str, int]
    rounds_running: dict[str, int] = field(default_factory=dict)
    unsent: tuple[UnsentEnvelope, ...] = ()


def checkpoint_file(state_dir: Path) -> Path:
    """Return the file of the newest checkpoint; `.previous` beside it is the one before."""
    return state_dir / "checkpoint"


def write(state_dir: Path, checkpoint: Checkpoint) -> None:
    """Write the checkpoint; the one before, if it is good, stays beside it. Raises StorageError."""
    body = msgpack.packb(
        {
            "version": FORMAT_VERSION,
            "artifact_sha256": checkpoint.artifact_sha256,
            "node": checkpoint.node,
            "rounds_done": checkpoint.rounds_done,
            "rounds_running": checkpoint.rounds_running,
            "unsent": [[each.peer.to_bytes(), each.tag, each.data] for each in checkpoint.unsent],
        }
    )
    path = checkpoint_file(state_dir)
    fresh = path.with_suffix(".new")
    data = b"".join((_MAGIC, hashlib.sha256(body).digest(), body))
    paths.write_atomically(fresh, data, mode=0o600)
    try:
        if _is_good(path):
            path.replace(path.with_suffix(".previous"))
        fresh.replace(path)
        paths.sync_directory(state_dir)
    except OSError as error:
        raise paths.StorageError(f"{path}: cannot be written: {error.strerror}") from error


def remove_orphans(state_dir: Path) -> None:
    """Remove temporary files of killed writers; the caller holds the directory's lock."""
    path = checkpoint_file(state_dir)
    fresh = path.with_suffix(".new")
    own = (fresh.name, "incarnation", "control.token")
    for orphan in paths.remove_orphans(state_dir, own):
        logger.info("removed what a killed daemon left", extra={"path": str(orphan)})
    with contextlib.suppress(OSError):
        # It was never the node's state: the next one replaces it in any case.
        fresh.unlink(missing_ok=True)


def usable(state_dir: Path, artifact_sha256: str) -> Iterator[Checkpoint]:
    """Yield all usable checkpoints of this artifact, newest first; refused ones are logged.

    A node may still refuse one; then try the next.
    """
    for _, saved in _whole(state_dir):
        if saved.artifact_sha256 == artifact_sha256:
            yield saved


def _whole(state_dir: Path) -> Iterator[tuple[Path, Checkpoint]]:
    """Yield all checkpoints that can be read, of any artifact, newest first."""
    newest = checkpoint_file(state_dir)
    for path in (newest, newest.with_suffix(".previous")):
        try:
            yield path, _parse(path.read_bytes())
        except FileNotFoundError:
            continue
        except (OSError, CheckpointRefused) as error:
            logger.warning("checkpoint refused", extra={"path": str(path), "reason": str(error)})


def keep_aside(path: Path, artifact_sha256: str) -> Path:
    """Keep a checkpoint of another version as `checkpoint.<its first 8 hex digits>`.

    Of each version the newest one is kept, and as many versions as `MAX_KEPT_VERSIONS`. Raises
    StorageError.
    """
    kept = path.with_name(f"checkpoint.{artifact_sha256[:8]}")
    try:
        kept.unlink(missing_ok=True)
        try:
            kept.hardlink_to(path)
        except OSError:  # a file system without links
            paths.write_atomically(kept, path.read_bytes(), mode=0o600)
        others = [p for p in path.parent.glob("checkpoint.*") if _KEPT.fullmatch(p.name)]
        others.sort(key=lambda p: (p == kept, p.stat().st_mtime), reverse=True)
        for old in others[MAX_KEPT_VERSIONS:]:
            old.unlink()
            logger.warning("dropped the checkpoint of an old version", extra={"path": str(old)})
    except OSError as error:
        raise paths.StorageError(f"{kept}: cannot be kept: {error.strerror}") from error
    return kept


def _is_good(path: Path) -> bool:
    try:
        _parse(path.read_bytes())
    except (OSError, CheckpointRefused):
        return False
    return True


class _CheckpointBody(BaseModel, strict=True):
    """A checkpoint as in the file; one of an earlier release has no `unsent`."""

    artifact_sha256: str
    node: bytes
    rounds_done: dict[str, int]
    rounds_running: dict[str, int]
    unsent: tuple[tuple[bytes, int, bytes | None], ...] = ()


def _parse(data: bytes) -> Checkpoint:
    start = len(_MAGIC) + _DIGEST_BYTES
    if not data.startswith(_MAGIC) or len(data) < start:
        raise CheckpointRefused("not a checkpoint of this version of bbnode, or torn")
    body = data[start:]
    if hashlib.sha256(body).digest() != data[len(_MAGIC) : start]:
        raise CheckpointRefused("its checksum does not fit: torn or changed")
    try:
        fields = msgpack.unpackb(body, max_ext_len=0, max_bin_len=len(body), use_list=False)
    except (ValueError, TypeError, msgpack.exceptions.UnpackException) as error:
        raise CheckpointRefused(f"it can't be read: {error}") from error
    version = fields.get("version") if isinstance(fields, dict) else None
    if version != FORMAT_VERSION:
        raise CheckpointRefused(f"format {version!r}, this bbnode reads {FORMAT_VERSION}")
    try:
        read = _CheckpointBody.model_validate(fields)
        unsent = tuple(
            UnsentEnvelope(peer=PeerId.from_bytes(peer), tag=tag, data=data)
            for peer, tag, data in read.unsent
        )
    except ValidationError as error:
        first = error.errors()[0]
        raise CheckpointRefused(f"its {first['loc'][0]!r} is malformed: {first['msg']}") from error
    except DecodeError as error:
        raise CheckpointRefused(f"its 'unsent' is malformed: {error}") from error
    return Checkpoint(**read.model_dump(exclude={"unsent"}), unsent=unsent)


def restore_or_install(
    state_dir: Path, artifact_sha256: str, install: Callable[[], Node]
) -> tuple[Node, Checkpoint | None]:
    """Return a node and the newest checkpoint, which it accepted; or a fresh node and None.

    Without one of this artifact, components take their states from the newest one of another
    version of the program, and the rounds that it counted are returned. Raises StorageError when
    that one cannot be kept.

    `install` makes a node; it is called again after each checkpoint that a node refused.
    """
    node = install()
    for saved in usable(state_dir, artifact_sha256):
        try:
            node.restore(saved.node)
        except BbnodeError as error:
            logger.warning("snapshot refused", extra={"reason": str(error)})
            node = install()  # part of the checkpoint may have been loaded
            continue
        logger.info("restored", extra={"rounds_done": saved.rounds_done})
        return node, saved
    for path, saved in _whole(state_dir):
        if saved.artifact_sha256 != artifact_sha256:
            return _upgraded(path, saved, install, node)
    return node, None


def _upgraded(
    path: Path, saved: Checkpoint, install: Callable[[], Node], node: Node
) -> tuple[Node, Checkpoint | None]:
    """Return a node with the component states of another version, whose file is kept aside.

    The rounds made go on being counted; executions, timers and envelopes of the other version end
    here. Raises StorageError when the file cannot be kept: then nothing may be started that would
    replace it.
    """
    kept = keep_aside(path, saved.artifact_sha256)
    slots: list[str] | None = None
    refused: dict[str, str] = {}
    while True:
        try:
            adopted = node.adopt(saved.node, slots)
            break
        except StateRefused as error:
            refused[error.slot] = str(error)
            if slots is None:
                slots = list(node.slots)
            slots = [slot for slot in slots if slot != error.slot]
        except SnapshotRefused as error:
            said = {"path": str(kept), "reason": str(error)}
            logger.warning("nothing taken from the checkpoint of another version", extra=said)
            return install(), None
        node = install()  # a part of the state may have been loaded
    left = {**adopted.left, **refused}
    logger.log(
        logging.WARNING if left or saved.unsent else logging.INFO,
        "upgraded from another version of the program",
        extra={
            "version": saved.artifact_sha256[:8],
            "taken": list(adopted.taken),
            "left": left,
            "unsent_dropped": len(saved.unsent),
            "path": str(kept),
        },
    )
    return node, Checkpoint(
        artifact_sha256=saved.artifact_sha256, node=b"", rounds_done=saved.rounds_done
    )


class Checkpointer:
    """Writes the checkpoints of a running node."""

    def __init__(
        self, state_dir: Path, artifact_sha256: str, node: Node, rounds: Sequence[Rounds]
    ) -> None:
        """Make the checkpointer of a node and its rounds; nothing is written yet."""
        self._state_dir = state_dir
        self._artifact_sha256 = artifact_sha256
        self._node = node
        self._rounds = rounds
        self._one_at_a_time = trio.Lock()
        self._period_changed = trio.Event()
        self._every_s = 0.0
        # trio's time of the last one that was written, or of when the period was set first.
        self.saved_s = math.inf
        # Called with trio's time after each one that was written.
        self.on_saved: Callable[[float], None] = lambda _: None

    @property
    def every_s(self) -> float:
        """The period; 0: only on request."""
        return self._every_s

    def set_period(self, every_s: float) -> None:
        """Write a checkpoint every so many seconds; 0: only on request."""
        self._every_s = every_s
        self.saved_s = min(self.saved_s, trio.current_time())
        self._period_changed.set()

    async def run(self) -> None:
        """Write checkpoints at the period, for ever."""
        while True:
            self._period_changed = trio.Event()
            with trio.move_on_after(self._every_s or float("inf")) as waited:
                await self._period_changed.wait()
            if waited.cancelled_caught:
                await self.save()

    async def save(self) -> None:
        """Write a checkpoint, or log why that failed."""
        await self.save_last(())

    async def save_last(self, unsent: Sequence[Unsent]) -> bool:
        """Write a checkpoint with unacknowledged envelopes; log a failure and return False."""
        try:
            await self.save_now(unsent)
        except (paths.StorageError, ComponentError) as error:
            logger.warning("no checkpoint", extra={"reason": str(error)})
            return False
        return True

    async def save_now(self, unsent: Sequence[Unsent] = ()) -> int:
        """Write a checkpoint; returns the bytes of the node's state in it.

        Raises StorageError, or ComponentError when a component can't be saved now.
        """
        async with self._one_at_a_time:
            saved = Checkpoint(
                artifact_sha256=self._artifact_sha256,
                node=self._node.snapshot(trio_clock_ns()),
                rounds_done={r.entry.target: r.done for r in self._rounds},
                rounds_running={
                    r.entry.target: r.running for r in self._rounds if r.running is not None
                },
                unsent=_stored(unsent),
            )
            await trio.to_thread.run_sync(write, self._state_dir, saved)
        self.saved_s = trio.current_time()
        self.on_saved(self.saved_s)
        return len(saved.node)


def _stored(unsent: Sequence[Unsent]) -> tuple[UnsentEnvelope, ...]:
    """Return envelopes as they are stored: their bytes while there is room, in order."""
    kept, left = [], MAX_KEPT_UNSENT_BYTES
    for each in unsent:
        fits = each.size <= left
        left -= each.size if fits else 0
        data = b"".join(each.parts) if fits else None
        kept.append(UnsentEnvelope(peer=each.peer, tag=each.tag, data=data))
    return tuple(kept)
