"""The node's state on disk: written completely, checked when read, never trusted blindly.

Rule: a file that is torn, changed or newer is not used; the reason is logged and the one before it
is tried. An intact one that this node can't resume (another version of the program or of bbnode
wrote it, or other targets) is kept aside under a name of its own, and no file kept aside is ever
replaced or removed. From such a file the states of components are taken over, if slot and type
agree. A new file is complete on disk before an old one is touched, and only a good one becomes the
previous one: a full disk or a crash at any point leaves a file at least as good as before. If a
checkpoint can't be written, the node continues without it.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import logging
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgpack
import trio
from pydantic import BaseModel, ValidationError

from bbnode.components.contracts import ComponentError
from bbnode.daemon import paths
from bbnode.daemon.invoke.rounds import Rounds
from bbnode.engine import Adopted, Node
from bbnode.engine.errors import SnapshotRefused, StateRefused
from bbnode.ir.caps import MAX_CHECKPOINT_BYTES, MAX_KEPT_UNSENT_BYTES, MAX_STATE_ENTRIES
from bbnode.ir.errors import BbnodeError, DecodeError, DeploymentError
from bbnode.ir.peer import PeerId
from bbnode.transport.base import Unsent
from bbnode.transport.driver import trio_clock_ns

logger = logging.getLogger(__name__)

FORMAT_VERSION = 2
MAGIC = b"BBNODE1\n"
# Files kept aside before the log mentions their size; more are kept as well.
MANY_KEPT = 8
# The digest of the artifact, and a number if several files of it are kept.
_KEPT = re.compile(r"checkpoint\.[0-9a-f]{8}(?:\.[0-9]{1,6})?")
_DIGEST_BYTES = 32


class CheckpointRefused(DeploymentError):
    """A checkpoint's file is torn, changed or newer."""


class CheckpointOfAnotherFormat(CheckpointRefused):
    """A checkpoint is intact, but another version of bbnode wrote it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BestRound:
    """The round of a checkpoint that was written because the round was the best so far.

    `value` is that of the target's output `output`; `settings` the digest of the node's settings,
    "" in a file of an earlier release.
    """

    target: str
    round: int
    output: str
    value: float
    settings: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Upgrade:
    """The states that a node took over from a checkpoint that it could not resume.

    `version` is the beginning of the digest of the checkpoint's artifact; `kept` is its file.
    """

    version: str
    kept: Path
    adopted: Adopted

    def as_json(self) -> dict[str, Any]:
        """Return it for the status."""
        parameters = {
            slot: {"taken": list(parts.taken), "left": dict(parts.left)}
            for slot, parts in self.adopted.parts.items()
        }
        return {
            "version": self.version,
            "kept": str(self.kept),
            "taken": list(self.adopted.taken),
            "left": dict(self.adopted.left),
            "parameters": parameters,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class UnsentEnvelope:
    """An unacknowledged envelope; `data` is None if there was no room for it."""

    peer: PeerId
    tag: int
    data: bytes | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """The state that survives a restart.

    It has the engine's snapshot and, by target, the number of finished rounds and the execution of
    the current one; at a stop also the envelopes that no peer has acknowledged. `schemas` is the
    meaning of the examples of data slots in the federation, as JSON by slot, "" for those of others
    alone. `best` is set in one that is kept because of its round. `upgrade` is never in the file.
    """

    artifact_sha256: str
    node: bytes
    rounds_done: dict[str, int]
    rounds_running: dict[str, int] = field(default_factory=dict)
    unsent: tuple[UnsentEnvelope, ...] = ()
    schemas: Mapping[str, str] = field(default_factory=dict)
    best: BestRound | None = None
    upgrade: Upgrade | None = None


@dataclass(frozen=True, slots=True)
class FileVersion:
    """The attributes that identify a written file, unchanged since."""

    inode: int
    size: int
    changed_ns: int

    @classmethod
    def of(cls, path: Path) -> FileVersion | None:
        """Return those of a file; None if there is none. Raises OSError."""
        try:
            info = path.stat(follow_symlinks=False)
        except FileNotFoundError:
            return None
        return cls(info.st_ino, info.st_size, info.st_mtime_ns)


def checkpoint_file(state_dir: Path) -> Path:
    """Return the file of the newest checkpoint; `.previous` beside it is the one before."""
    return state_dir / "checkpoint"


def best_file(state_dir: Path) -> Path:
    """Return the file of the checkpoint after the best round."""
    return state_dir / "best.checkpoint"


def write(
    state_dir: Path, checkpoint: Checkpoint, good: FileVersion | None = None
) -> FileVersion | None:
    """Write the checkpoint; the previous one, if good, stays beside it. Raises StorageError.

    Returns the version of the file. Passed as `good` next time, it saves reading a file that has
    not changed since.
    """
    path = checkpoint_file(state_dir)
    fresh = path.with_suffix(".new")
    try:
        paths.write_synced(fresh, _packed(checkpoint), mode=0o600)
        if (good is not None and good == FileVersion.of(path)) or _is_good(path):
            path.replace(path.with_suffix(".previous"))
        fresh.replace(path)
        paths.sync_directory(state_dir)
        return FileVersion.of(path)
    except OSError as error:
        raise paths.StorageError(f"{path}: cannot be written: {error.strerror}") from error


def write_best(state_dir: Path, checkpoint: Checkpoint) -> None:
    """Write the checkpoint of the best round; one of other settings or artifact is kept aside.

    Raises StorageError.
    """
    path = best_file(state_dir)
    with contextlib.suppress(FileNotFoundError, CheckpointRefused):
        other = read(path)
        if _maker(other) != _maker(checkpoint):
            keep_aside(path, other.artifact_sha256)
    paths.write_atomically(path, _packed(checkpoint), mode=0o600)


def _maker(saved: Checkpoint) -> tuple[str, str]:
    return saved.artifact_sha256, "" if saved.best is None else saved.best.settings


def best_round(state_dir: Path, artifact_sha256: str) -> BestRound | None:
    """Return the best round of this artifact that has a checkpoint, if any.

    Raises StorageError for a file that can't be read; one that is refused is logged.
    """
    path = best_file(state_dir)
    try:
        checkpoint = read(path)
    except FileNotFoundError:
        return None
    except CheckpointRefused as error:
        logger.warning("checkpoint refused", extra={"path": str(path), "reason": str(error)})
        return None
    return checkpoint.best if checkpoint.artifact_sha256 == artifact_sha256 else None


def read(path: Path) -> Checkpoint:
    """Return the checkpoint in a file.

    Raises FileNotFoundError, StorageError, and CheckpointRefused, whose text names no file.
    """
    try:
        if path.stat().st_size > MAX_CHECKPOINT_BYTES:
            raise CheckpointRefused(f"larger than any checkpoint ({MAX_CHECKPOINT_BYTES} bytes)")
        data = path.read_bytes()
    except FileNotFoundError:
        raise
    except OSError as error:
        raise paths.StorageError(f"{path}: cannot be read: {error.strerror}") from error
    return _parse(data)


def found(path: Path) -> tuple[Path, Checkpoint]:
    """Return a file that must hold a checkpoint, and its content.

    Raises CheckpointRefused with the file's name, StorageError.
    """
    try:
        return path, read(path)
    except FileNotFoundError as error:
        raise CheckpointRefused(f"{path}: there is no such checkpoint") from error
    except CheckpointRefused as error:
        raise CheckpointRefused(f"{path}: {error}") from error


def newest(state_dir: Path) -> tuple[Path, Checkpoint]:
    """Return the newest checkpoint of a stopped node, of any artifact, and its file.

    Raises StateDirInUse, StorageError, and CheckpointRefused if there is none, which names each
    damaged file and the intact ones beside them.
    """
    path = checkpoint_file(state_dir)
    if not state_dir.is_dir():
        raise CheckpointRefused(f"{state_dir}: there is no such state directory")
    with paths.lock_state_dir(state_dir):
        try:
            return found(path)
        except CheckpointRefused as error:
            before = path.with_suffix(".previous")
            try:
                return found(before)
            except CheckpointRefused as again:
                texts = [str(error), *([str(again)] if before.exists() else [])]
                raise CheckpointRefused("; ".join([*texts, *_offers(state_dir)])) from again


def _offers(state_dir: Path) -> list[str]:
    """Return alternatives to the newest checkpoints, for an error."""
    offers = []
    with contextlib.suppress(FileNotFoundError, CheckpointRefused, paths.StorageError):
        best = read(best_file(state_dir)).best
        if best is not None:
            offers.append(
                f"the checkpoint of the best round is whole (round {best.round}, {best.output} "
                f"{best.value:.6g}): take it with --best"
            )
    with contextlib.suppress(OSError):
        offers += [f"kept of another version: --checkpoint {kept}" for kept in _kept(state_dir)[:1]]
    return offers


def _packed(checkpoint: Checkpoint) -> bytes:
    fields: dict[str, Any] = {
        "version": FORMAT_VERSION,
        "artifact_sha256": checkpoint.artifact_sha256,
        "node": checkpoint.node,
        "rounds_done": checkpoint.rounds_done,
        "rounds_running": checkpoint.rounds_running,
        "unsent": [[each.peer.to_bytes(), each.tag, each.data] for each in checkpoint.unsent],
    }
    if checkpoint.schemas:
        fields["schemas"] = dict(checkpoint.schemas)
    best = checkpoint.best
    if best is not None:
        fields["best"] = [best.target, best.round, best.output, best.value]
        fields["best_settings"] = best.settings
    try:
        body = msgpack.packb(fields)
    except ValueError as error:  # one piece is larger than its 32 bits can express
        raise _too_large(len(checkpoint.node)) from error
    if len(MAGIC) + hashlib.sha256().digest_size + len(body) > MAX_CHECKPOINT_BYTES:
        raise _too_large(len(body))
    return b"".join((MAGIC, hashlib.sha256(body).digest(), body))


def _too_large(size: int) -> paths.StorageError:
    """Return the error for a state too large to be read again: the previous file stays."""
    return paths.StorageError(
        f"a checkpoint of {size} bytes would be larger than any that is read (the node's state "
        "4 GiB, all 8 GiB); the one before stays. Keep fewer weights, or optimizer states, on "
        "this node"
    )


def remove_orphans(state_dir: Path) -> None:
    """Remove temporary files of killed writers; the caller holds the directory's lock."""
    path = checkpoint_file(state_dir)
    fresh = path.with_suffix(".new")
    own = (fresh.name, best_file(state_dir).name, "incarnation", "control.token")
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
    """Yield all readable checkpoints, of any artifact, newest first.

    One that another version of bbnode wrote is kept aside. Raises StorageError if that fails.
    """
    newest = checkpoint_file(state_dir)
    for path in (newest, newest.with_suffix(".previous")):
        try:
            checkpoint = read(path)
        except FileNotFoundError:
            continue
        except (paths.StorageError, CheckpointRefused) as error:
            logged = {"path": str(path), "reason": str(error)}
            if isinstance(error, CheckpointOfAnotherFormat):
                logged["kept"] = str(
                    keep_aside(path, hashlib.sha256(path.read_bytes()).hexdigest())
                )
            logger.warning("checkpoint refused", extra=logged)
            continue
        yield path, checkpoint


def keep_aside(path: Path, digest: str) -> Path:
    """Keep a checkpoint under a name of its own: `<name>.<first 8 digits of the digest>`.

    If another file has that name, a number follows it: no kept file is replaced. Raises
    StorageError.
    """
    # The previous file is kept under the name of the newest: its content identifies its owner.
    first = f"{path.name.removesuffix('.previous')}.{digest[:8]}"
    names = itertools.chain([first], (f"{first}.{number}" for number in itertools.count(2)))
    kept = path.with_name(first)
    try:
        for kept in map(path.with_name, names):
            if not kept.exists():
                break
            if _are_equal(kept, path):
                return kept
        try:
            kept.hardlink_to(path)
            paths.sync_directory(path.parent)
        except OSError:  # a file system without links
            paths.write_atomically(kept, path.read_bytes(), mode=0o600)
        _warn_of_many(path.parent)
    except OSError as error:
        raise paths.StorageError(
            f"{kept}: {path.name} cannot be kept aside: {error.strerror}; make room, or move that "
            "file away"
        ) from error
    return kept


def _are_equal(one: Path, other: Path) -> bool:
    return one.samefile(other) or (
        one.stat().st_size == other.stat().st_size and one.read_bytes() == other.read_bytes()
    )


def _kept(state_dir: Path) -> list[Path]:
    """Return the files kept aside, for each artifact the newest one first."""
    listed = itertools.islice(state_dir.iterdir(), MAX_STATE_ENTRIES)
    kept = [path for path in listed if _KEPT.fullmatch(path.name)]
    return sorted(kept, key=lambda p: (len(p.name), p.name), reverse=True)


def _warn_of_many(state_dir: Path) -> None:
    kept = _kept(state_dir)
    if len(kept) > MANY_KEPT:
        logger.warning(
            "many checkpoints of other versions are kept; remove those that nobody needs",
            extra={"files": len(kept), "bytes": sum(path.stat().st_size for path in kept)},
        )


def _is_good(path: Path) -> bool:
    try:
        read(path)
    except (OSError, paths.StorageError, CheckpointRefused):
        return False
    return True


class _CheckpointBody(BaseModel, strict=True):
    """A checkpoint in its file format; one of an earlier release has no `unsent` and no `best`."""

    artifact_sha256: str
    node: bytes
    rounds_done: dict[str, int]
    rounds_running: dict[str, int]
    unsent: tuple[tuple[bytes, int, bytes | None], ...] = ()
    schemas: dict[str, str] = {}
    best: tuple[str, int, str, float] | None = None
    best_settings: str = ""


def _parse(data: bytes) -> Checkpoint:
    start = len(MAGIC) + _DIGEST_BYTES
    if not data.startswith(MAGIC) or len(data) < start:
        raise CheckpointRefused("not a checkpoint of this version of bbnode, or torn")
    body = data[start:]
    if hashlib.sha256(body).digest() != data[len(MAGIC) : start]:
        raise CheckpointRefused("its checksum does not fit: torn or changed")
    try:
        fields = msgpack.unpackb(body, max_ext_len=0, max_bin_len=len(body), use_list=False)
    except (ValueError, TypeError, msgpack.exceptions.UnpackException) as error:
        raise CheckpointRefused(f"it can't be read: {error}") from error
    version = fields.get("version") if isinstance(fields, dict) else None
    if version != FORMAT_VERSION:
        refusal = CheckpointOfAnotherFormat if type(version) is int else CheckpointRefused
        raise refusal(f"format {version!r}, this bbnode reads {FORMAT_VERSION}")
    try:
        body_read = _CheckpointBody.model_validate(fields)
        unsent = tuple(
            UnsentEnvelope(peer=PeerId.from_bytes(peer), tag=tag, data=data)
            for peer, tag, data in body_read.unsent
        )
    except ValidationError as error:
        first = error.errors()[0]
        raise CheckpointRefused(f"its {first['loc'][0]!r} is malformed: {first['msg']}") from error
    except DecodeError as error:
        raise CheckpointRefused(f"its 'unsent' is malformed: {error}") from error
    best = None
    if body_read.best is not None:
        target, number, output, value = body_read.best
        best = BestRound(
            target=target,
            round=number,
            output=output,
            value=value,
            settings=body_read.best_settings,
        )
    return Checkpoint(
        artifact_sha256=body_read.artifact_sha256,
        node=body_read.node,
        rounds_done=body_read.rounds_done,
        rounds_running=body_read.rounds_running,
        unsent=unsent,
        schemas=body_read.schemas,
        best=best,
    )


def restore_or_install(
    state_dir: Path, artifact_sha256: str, install: Callable[[], Node]
) -> tuple[Node, Checkpoint | None]:
    """Return a node and the newest checkpoint, which it accepted; or a fresh node and None.

    One of this artifact that was kept aside, while another version ran, is used as well. Without
    any, components take their states from the newest one of all, and the rounds that it counted are
    returned. A file that is not resumed is kept aside. Raises StorageError if it cannot be: then
    nothing may be started that would replace it.

    `install` creates a node; it is called again after each checkpoint that a node refused.
    """
    node = install()
    refused: set[Path] = set()
    kept: list[Path] = []

    def resumed(path: Path, saved: Checkpoint) -> bool:
        nonlocal node
        try:
            node.restore(saved.node)
        except BbnodeError as error:
            logged = {"path": str(path), "reason": str(error)}
            logger.warning("snapshot refused", extra=logged)
            node = install()  # part of the checkpoint may have been loaded
            return False
        restored: dict[str, Any] = {"rounds_done": saved.rounds_done}
        if path in kept:
            restored["path"] = str(path)
        logger.info("restored", extra=restored)
        return True

    others: dict[str, Path] = {}  # the newest file of each
    for path, saved in _whole(state_dir):
        if saved.artifact_sha256 != artifact_sha256:
            others.setdefault(saved.artifact_sha256, path)
        elif resumed(path, saved):
            _keep_all_aside(others)
            return node, saved
        else:
            refused.add(keep_aside(path, saved.artifact_sha256))
    _keep_all_aside(others)
    own = f"checkpoint.{artifact_sha256[:8]}"
    kept += [path for path in _kept(state_dir) if path.name.startswith(own)]
    for path in kept:
        if path in refused:
            continue
        aside = _kept_one(path)
        if aside is None or aside.artifact_sha256 != artifact_sha256 or not resumed(path, aside):
            continue
        # Now it is the newest one; the file in its place is kept under its own name.
        try:
            path.replace(checkpoint_file(state_dir))
            paths.sync_directory(state_dir)
        except OSError as error:
            raise paths.StorageError(f"{path}: cannot be moved: {error.strerror}") from error
        return node, aside
    for path, saved in _whole(state_dir):
        return _upgraded(path, saved, install, node)
    return node, None


def _keep_all_aside(others: dict[str, Path]) -> None:
    for digest, path in others.items():
        keep_aside(path, digest)


def _kept_one(path: Path) -> Checkpoint | None:
    try:
        return read(path)
    except (OSError, paths.StorageError, CheckpointRefused) as error:
        logger.warning("checkpoint refused", extra={"path": str(path), "reason": str(error)})
        return None


def _upgraded(
    path: Path, saved: Checkpoint, install: Callable[[], Node], node: Node
) -> tuple[Node, Checkpoint | None]:
    """Return a node with the component states of a checkpoint that it can't resume.

    Rounds continue to count; executions, timers and envelopes of the other version end here. Raises
    StorageError if the file cannot be kept.
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
            logged = {"path": str(kept), "reason": str(error)}
            logger.warning("nothing taken from the checkpoint of another version", extra=logged)
            return install(), None
        node = install()  # a part of the state may have been loaded
    adopted = replace(adopted, left={**adopted.left, **refused})
    upgrade = Upgrade(version=saved.artifact_sha256[:8], kept=kept, adopted=adopted)
    some_left = adopted.left or any(parts.left for parts in adopted.parts.values())
    logged = upgrade.as_json()
    logger.log(
        logging.WARNING if some_left or saved.unsent else logging.INFO,
        "upgraded from another version of the program",
        extra={
            "version": logged["version"],
            "taken": logged["taken"],
            "left": logged["left"],
            "parameters": logged["parameters"],
            "unsent_dropped": len(saved.unsent),
            "path": logged["kept"],
        },
    )
    return node, Checkpoint(
        artifact_sha256=saved.artifact_sha256,
        node=b"",
        rounds_done=saved.rounds_done,
        upgrade=upgrade,
    )


class Checkpointer:
    """Writes the checkpoints of a running node, one at a time.

    Each is taken on the node's own loop, between two of its steps, and written in a thread.
    """

    def __init__(
        self,
        state_dir: Path,
        artifact_sha256: str,
        node: Node,
        rounds: Sequence[Rounds],
        done_before: Mapping[str, int] | None = None,
        schemas: Callable[[], Mapping[str, str]] = dict,
    ) -> None:
        """Create the checkpointer of a node and its rounds; nothing is written yet.

        `done_before` has the rounds of targets that run none now; `schemas` returns the meaning of
        data, as a `Checkpoint` has it.
        """
        self._schemas = schemas
        self._state_dir = state_dir
        self._artifact_sha256 = artifact_sha256
        self._node = node
        self._rounds = rounds
        self._done_before = dict(done_before or {})
        # Held from when a checkpoint is taken until it is written, so that no older one follows it,
        # and only one is in memory.
        self._turn = trio.Semaphore(1)
        self._writing: trio.Nursery
        self._written: FileVersion | None = None
        self._period_changed = trio.Event()
        self._every_s = 0.0
        # trio's time of the last written checkpoint, or of when the period was set first.
        self.saved_s = math.inf
        # Called with trio's time after each written checkpoint.
        self.on_saved: Callable[[float], None] = lambda _: None

    @property
    def every_s(self) -> float:
        """The period; 0: only on request."""
        return self._every_s

    def set_period(self, every_s: float) -> None:
        """Write a checkpoint every `every_s` seconds; 0: only on request."""
        self._every_s = every_s
        self.saved_s = min(self.saved_s, trio.current_time())
        self._period_changed.set()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Write checkpoints at the period, for ever."""
        async with trio.open_nursery() as self._writing:
            task_status.started()
            while True:
                self._period_changed = trio.Event()
                with trio.move_on_after(self._every_s or float("inf")) as waited:
                    await self._period_changed.wait()
                if waited.cancelled_caught:
                    await self.save()

    async def save(self) -> None:
        """Write a checkpoint, or log the failure."""
        await self.save_last(())

    async def save_beside(self, written: Callable[[], None]) -> None:
        """Take a checkpoint, and write it in the background, or log the failure.

        Returns when it is taken, which has to wait while another is written. `written` is called
        once it is on disk, or can't be; before the next one is taken. `run` has to run.
        """
        await self._turn.acquire()
        try:
            taken = self._taken()
        except BaseException as error:
            self._turn.release()
            if not isinstance(error, ComponentError):
                raise
            _say_none(error)
            written()
            return
        self._writing.start_soon(self._write_beside, taken, written)

    async def save_last(self, unsent: Sequence[Unsent]) -> bool:
        """Write a checkpoint with unacknowledged envelopes; log a failure and return False."""
        try:
            await self.save_now(unsent)
        except (paths.StorageError, ComponentError) as error:
            _say_none(error)
            return False
        return True

    async def save_now(self, unsent: Sequence[Unsent] = ()) -> int:
        """Write a checkpoint; returns the bytes of the node's state in it.

        Raises StorageError, or ComponentError if a component can't be saved now.
        """
        async with self._turn:
            saved = replace(self._taken(), unsent=_stored(unsent))
            await self._write(saved)
        return len(saved.node)

    async def save_best(self, best: BestRound) -> int:
        """Write a checkpoint to `best_file`, beside the others; it stays until the next call.

        Returns the bytes of the node's state in it. Call it before the next round begins. Raises
        StorageError, or ComponentError when a component can't be saved now.
        """
        async with self._turn:
            saved = replace(self._taken(), best=best)
            await trio.to_thread.run_sync(write_best, self._state_dir, saved)
        return len(saved.node)

    async def _write_beside(self, taken: Checkpoint, written: Callable[[], None]) -> None:
        try:
            await self._write(taken)
        except paths.StorageError as error:
            _say_none(error)
        finally:
            self._turn.release()
        written()

    async def _write(self, taken: Checkpoint) -> None:
        last, self._written = self._written, None
        self._written = await trio.to_thread.run_sync(write, self._state_dir, taken, last)
        self.saved_s = trio.current_time()
        self.on_saved(self.saved_s)

    def _taken(self) -> Checkpoint:
        """Return a checkpoint of the node now. Raises ComponentError."""
        return Checkpoint(
            artifact_sha256=self._artifact_sha256,
            node=self._node.snapshot(trio_clock_ns()),
            rounds_done=self._done_before | {r.entry.target: r.done for r in self._rounds},
            rounds_running={
                r.entry.target: r.running for r in self._rounds if r.running is not None
            },
            schemas=self._schemas(),
        )


def _say_none(error: BbnodeError) -> None:
    logger.warning("no checkpoint", extra={"reason": str(error)})


def _stored(unsent: Sequence[Unsent]) -> tuple[UnsentEnvelope, ...]:
    """Return envelopes for storage: with their bytes while there is room, in order."""
    kept, left = [], MAX_KEPT_UNSENT_BYTES
    for each in unsent:
        fits = each.size <= left
        left -= each.size if fits else 0
        data = b"".join(each.parts) if fits else None
        kept.append(UnsentEnvelope(peer=each.peer, tag=each.tag, data=data))
    return tuple(kept)
