"""A collection's rows in a directory: appended, mapped, and safe against a crash at any moment.

Rule: a change counts when its record is whole in the log. Its vectors are on disk before the record
is written, so that a torn end of the log is a change that never was. What is rewritten goes to
files of a new generation, which count when the manifest names it. Files:

    index.json      the manifest: format, metric, dimensions, generation; replaced atomically
    vectors.G       float32, little-endian, row by row; mapped, longer than its rows
    items.G         the log: records of rows added (ids, metadata) and of ids removed
    searcher.G.N    the searcher's N-th saved state, and searcher.json, which names the last
    lock            locked as long as the directory is open; says by whom

A record is a head (magic, kind, length of the body, number, CRC-32 of these), a body, and a tail
(CRC-32 of the body, magic).
"""

from __future__ import annotations

import errno
import fcntl
import json
import mmap
import os
import re
import secrets
import stat
import struct
import sys
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, NoReturn

import numpy as np
import numpy.typing as npt

from bbnode.components.indexes.errors import (
    IndexDamaged,
    IndexInUse,
    IndexMismatch,
    IndexUnavailable,
)
from bbnode.components.indexes.searchers import METRICS, Floats, Ids, Mask, Rows, Searcher
from bbnode.components.indexes.stores import Store
from bbnode.ir.decoding import shown
from bbnode.ir.values import MAX_INT64

FORMAT: Final = 1
_MANIFEST, _LOCK, _SAVED = "index.json", "lock", "searcher.json"
_OURS: Final = re.compile(
    r"(index|searcher)\.json(\.new)?|lock|(vectors|items)\.\d+|searcher\.\d+\.\d+(\.new)?"
)
_MAX_MANIFEST_BYTES: Final = 1 << 16

_HEAD: Final = struct.Struct("<4sB3xQQ")  # magic, kind, bytes of the body, number
_CRC: Final = struct.Struct("<I")
_TAIL: Final = struct.Struct("<I4s")  # CRC-32 of the body, magic
_ADDED: Final = struct.Struct("<QQI4x")  # next id, rows, CRC-32 of their vectors
_RECORD, _END = b"BBix", b"xiBB"
_ADD, _REMOVE = 1, 2
_HEAD_BYTES: Final = _HEAD.size + _CRC.size

_LEAST_ROWS: Final = 1024
_MOST_GROWN_BYTES: Final = 1 << 28  # by which the file of vectors is made longer at a time
_READ_BYTES: Final = 1 << 22  # of metadata, at a time
_ROWS_AT_ONCE: Final = 4096  # that are rewritten
# Rows since the searcher was saved, beyond which it is saved again; or an eighth of all, if more.
_UNSAVED_ROWS: Final = 20_000


class DirectoryStore(Store):
    """Rows in a directory that this process has locked.

    Attributes:
        path: of the directory.
        manifest: as it stands on disk.
        ids: of all rows, int64 [N], when it was opened.
        alive: bool [N], when it was opened.
        next_id: the id that the next item is numbered with.
    """

    def __init__(self, path: Path, manifest: dict[str, Any], *, create: bool = False) -> None:
        """Open the files of a manifest's generation; `create`: they are new.

        The directory is locked. Raises IndexDamaged, IndexUnavailable.
        """
        self.path = path
        self.manifest = manifest
        self.next_id: int = manifest["next_id"]
        self.ids: Ids = np.zeros(0, np.int64)
        self.alive: Mask = np.zeros(0, np.bool_)
        self._broken = ""
        self._map: mmap.mmap | None = None
        self._vectors_fd = self._log_fd = -1
        self._saved_rows = 0
        self._saved_as = (0, 0)  # records and stamp of the searcher when it was saved
        self._open_files(create)

    @property
    def dimensions(self) -> int:
        """The length of a vector."""
        return int(self.manifest["dimensions"])

    # -- files --------------------------------------------------------------------------------

    def _open_files(self, create: bool) -> None:
        generation = self.manifest["generation"]
        self._count = self._capacity = self._records = 0
        self._starts: npt.NDArray[np.int64] = np.zeros(_LEAST_ROWS, np.int64)
        self._sizes: npt.NDArray[np.uint32] = np.zeros(_LEAST_ROWS, np.uint32)
        self._end = 0
        try:
            with _told(self.path, "opened"):
                self._vectors_fd = _open(self.path / f"vectors.{generation}", create)
                self._log_fd = _open(self.path / f"items.{generation}", create)
                if create:
                    _sync(self.path)
            self._replay()
            self._remap()
        except BaseException:
            self._close_files()
            raise

    def _close_files(self) -> None:
        for descriptor in (self._vectors_fd, self._log_fd):
            if descriptor >= 0:
                os.close(descriptor)
        self._vectors_fd = self._log_fd = -1
        self._map = None  # arrays of it keep it mapped

    def _replay(self) -> None:
        """Read the log, and cut off what a crash left of a record that never was whole."""
        events: list[Ids] = []
        rows: list[Ids] = []
        for kind, start, body in self._whole_records():
            if kind == _ADD:
                next_id, count, _ = _ADDED.unpack_from(body)
                fixed = _ADDED.size + 12 * count
                if len(body) < fixed:
                    self._damaged(f"a record at {start} is too short for its rows")
                ids = np.frombuffer(body, "<i8", count, _ADDED.size).astype(np.int64)
                sizes = np.frombuffer(body, "<u4", count, _ADDED.size + 8 * count)
                if fixed + int(sizes.sum(dtype=np.int64)) != len(body) or (ids < 0).any():
                    self._damaged(f"a record at {start} does not fit its rows")
                self.next_id = next_id
                events.append(ids)
                rows.append(np.arange(self._count, self._count + count))
                self._note(start + fixed, sizes)
            elif kind == _REMOVE and not len(body) % 8:
                ids = np.frombuffer(body, "<i8").astype(np.int64)
                events.append(ids)
                rows.append(np.full(len(ids), -1, np.int64))
            else:
                self._damaged(f"a record at {start} is of no known kind")
        all_ids = np.concatenate(events or [np.zeros(0, np.int64)])
        all_rows = np.concatenate(rows or [np.zeros(0, np.int64)])
        # What was said of an id last counts.
        last = len(all_ids) - 1 - np.unique(all_ids[::-1], return_index=True)[1]
        living = all_rows[last]
        self.ids = all_ids[all_rows >= 0]
        self.alive = np.zeros(self._count, np.bool_)
        self.alive[living[living >= 0]] = True

    def _whole_records(self) -> Iterator[tuple[int, int, bytes]]:
        """Yield (kind, start of the body, body) of each record, then cut a torn end off."""
        length = os.fstat(self._log_fd).st_size
        at = 0
        while at < length:
            head = self._read(at, min(_HEAD_BYTES, length - at))
            if len(head) < _HEAD_BYTES:
                break
            magic, kind, size, number = _HEAD.unpack_from(head)
            (crc,) = _CRC.unpack_from(head, _HEAD.size)
            if magic != _RECORD or crc != zlib.crc32(head[: _HEAD.size]):
                if self._is_empty(at + _HEAD_BYTES, length):
                    break  # a power cut leaves zeros where bytes were to come
                self._damaged(f"there is no record at {at}, where one begins")
            if number != self._records:
                self._damaged(f"the record at {at} is number {number}, not {self._records}")
            start = at + _HEAD_BYTES
            end = start + size + _TAIL.size
            if end > length:
                break
            body = self._read(start, size)
            crc, magic = _TAIL.unpack(self._read(start + size, _TAIL.size))
            if crc != zlib.crc32(body) or magic != _END:
                if magic != _END and self._is_empty(end, length):
                    break
                self._damaged(f"the record at {at} does not have its checksum")
            yield kind, start, body
            at = self._end = end
            self._records += 1
        if at < length:
            with _told(self.path, "repaired"):
                os.ftruncate(self._log_fd, at)
                os.fdatasync(self._log_fd)

    def _is_empty(self, at: int, length: int) -> bool:
        while at < length:
            part = self._read(at, min(_READ_BYTES, length - at))
            if any(part):
                return False
            at += len(part)
        return True

    def _read(self, at: int, size: int) -> bytes:
        parts: list[bytes] = []
        with _told(self.path, "read"):
            while size > 0:
                part = os.pread(self._log_fd, size, at)
                if not part:
                    self._damaged("its log is shorter than it was")
                parts.append(part)
                at, size = at + len(part), size - len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _damaged(self, what: str) -> NoReturn:
        name = f"items.{self.manifest['generation']}"
        raise IndexDamaged(
            f"the index {self.path} is damaged: {what} (file {name}); restore it from a backup, or "
            "remove the directory and add its items again"
        )

    def _note(self, start: int, sizes: npt.NDArray[np.uint32]) -> None:
        total = self._count + len(sizes)
        if total > len(self._starts):
            room = max(total, len(self._starts) * 3 // 2) - self._count
            self._starts = np.concatenate([self._starts[: self._count], np.zeros(room, np.int64)])
            self._sizes = np.concatenate([self._sizes[: self._count], np.zeros(room, np.uint32)])
        stops = np.cumsum(sizes, dtype=np.int64)
        self._starts[self._count : total] = start + stops - sizes
        self._sizes[self._count : total] = sizes
        self._count = total

    def _remap(self) -> None:
        """Map the file of vectors as long as it is now."""
        wide = 4 * self.dimensions
        with _told(self.path, "mapped"):
            length = os.fstat(self._vectors_fd).st_size
            self._capacity = length // wide
            if self._capacity < self._count:
                name = f"vectors.{self.manifest['generation']}"
                raise IndexDamaged(
                    f"the index {self.path} is damaged: {name} has {length} bytes, and "
                    f"{self._count} rows take {self._count * wide}; restore it from a backup, or "
                    "remove the directory and add its items again"
                )
            self._map = None
            if self._capacity:
                size = self._capacity * wide
                self._map = mmap.mmap(self._vectors_fd, size, access=mmap.ACCESS_READ)

    # -- the contract of a store --------------------------------------------------------------

    def vectors(self) -> Floats:
        """As the contract says; mapped. IndexDamaged when somebody cut the file off."""
        if self._map is None:
            self._require_whole()
            return np.zeros((0, self.dimensions), np.float32)
        wide = 4 * self.dimensions
        # A page of a mapped file that is not there any more would kill the process.
        if os.fstat(self._vectors_fd).st_size < self._count * wide:
            raise IndexDamaged(
                f"the index {self.path} is damaged: its file of vectors was cut off while it was "
                "open; restore it from a backup"
            )
        found = np.frombuffer(self._map, "<f4", self._count * self.dimensions)
        return found.reshape(self._count, self.dimensions)

    def append(self, ids: Ids, vectors: Floats, metadata: Sequence[bytes], next_id: int) -> None:
        """As the contract says; on disk when it returns."""
        data = np.ascontiguousarray(vectors, "<f4").view(np.uint8).reshape(-1).data
        with self._changing():
            self._write_vectors(data)
            sizes = np.array([len(blob) for blob in metadata], "<u4")
            fixed = _ADDED.pack(next_id, len(ids), zlib.crc32(data))
            body = b"".join([fixed, ids.astype("<i8").tobytes(), sizes.tobytes(), *metadata])
            start = self._end + _HEAD_BYTES
            self._write_record(_ADD, body)
        self._note(start + _ADDED.size + 12 * len(ids), sizes)
        self.next_id = next_id
        if self._count > self._capacity or self._map is None:
            self._remap()

    def remove(self, ids: Ids) -> None:
        """As the contract says; on disk when it returns."""
        with self._changing():
            self._write_record(_REMOVE, ids.astype("<i8").tobytes())

    def metadata(self, start: int, stop: int) -> Iterator[bytes]:
        """As the contract says; read from the log."""
        at = start
        while at < stop:
            first = int(self._starts[at])
            ends = self._starts[at:stop] + self._sizes[at:stop]
            many = max(1, int(np.searchsorted(ends, first + _READ_BYTES, "right")))
            data = self._read(first, int(ends[many - 1]) - first)
            for row in range(at, at + many):
                begin = int(self._starts[row]) - first
                yield data[begin : begin + int(self._sizes[row])]
            at += many

    def metadata_of(self, rows: Ids) -> list[bytes]:
        """As the contract says; nothing is read where these rows have none."""
        if not self._sizes[rows].any():
            return [b""] * len(rows)
        return super().metadata_of(rows)

    def rewrite(self, rows: Ids, ids: Ids) -> None:
        """As the contract says: a new generation, which counts once it is whole."""
        self._require_whole()
        old, old_manifest = (self._vectors_fd, self._log_fd), self.manifest
        held = self.vectors()
        made = {
            **old_manifest,
            "generation": old_manifest["generation"] + 1,
            "next_id": self.next_id,
        }
        _remove_files(self.path, keep=old_manifest["generation"])
        fresh = DirectoryStore(self.path, made, create=True)
        try:
            for at in range(0, len(rows), _ROWS_AT_ONCE):
                part = rows[at : at + _ROWS_AT_ONCE]
                low, high = int(part.min()), int(part.max()) + 1
                if high - low <= 2 * len(part):
                    near = list(self.metadata(low, high))
                    blobs = [near[row - low] for row in part.tolist()]
                else:
                    blobs = [blob for row in part.tolist() for blob in self.metadata(row, row + 1)]
                fresh.append(ids[at : at + len(part)], held[part], blobs, self.next_id)
            write_json(self.path / _MANIFEST, made)
        except BaseException:
            fresh._close_files()
            raise
        self.__dict__.update(fresh.__dict__)
        fresh._vectors_fd = fresh._log_fd = -1  # they are ours now
        for descriptor in old:
            os.close(descriptor)
        _remove_files(self.path, keep=made["generation"])

    def close(self) -> None:
        """Close the files."""
        self._close_files()
        self._broken = "it is closed"

    def __del__(self) -> None:
        self._close_files()

    def stats(self) -> dict[str, Any]:
        """Return the path, and bytes of the log."""
        return {"path": str(self.path), "log_bytes": self._end, "records": self._records}

    def verify(self) -> None:
        """Read all vectors and compare them with their checksums. Raises IndexDamaged."""
        first, records, vectors = 0, self._records, self.vectors()
        self._records = 0
        for kind, start, body in self._whole_records():
            if kind == _ADD:
                _, count, crc = _ADDED.unpack_from(body)
                data = vectors[first : first + count].reshape(-1).view(np.uint8).data
                if zlib.crc32(data) != crc:
                    self._damaged(f"the vectors of the record at {start} are not those added")
                first += count
        if self._records != records:
            self._damaged("its log lost records while it was open")

    # -- writing ------------------------------------------------------------------------------

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Undo what was written of a record when writing fails."""
        self._require_whole()
        try:
            yield
        except BaseException as error:
            try:
                os.ftruncate(self._log_fd, self._end)
            except OSError:
                self._broken = "a change was written in part, and could not be undone"
            if isinstance(error, OSError):
                raise _unavailable(self.path, "written", error) from error
            raise

    def _require_whole(self) -> None:
        if self._broken:
            raise IndexUnavailable(f"the index {self.path}: {self._broken}; open it again")

    def _write_vectors(self, data: memoryview) -> None:
        wide = 4 * self.dimensions
        at, wanted = self._count * wide, self._count * wide + len(data)
        if wanted > self._capacity * wide:
            grown = min(max(self._count // 2, _LEAST_ROWS) * wide, _MOST_GROWN_BYTES)
            os.ftruncate(self._vectors_fd, max(wanted, (at + grown) // wide * wide))
        _write_all(self._vectors_fd, data, at)
        os.fdatasync(self._vectors_fd)

    def _write_record(self, kind: int, body: bytes) -> None:
        head = _HEAD.pack(_RECORD, kind, len(body), self._records)
        tail = _TAIL.pack(zlib.crc32(body), _END)
        record = b"".join([head, _CRC.pack(zlib.crc32(head)), body, tail])
        _write_all(self._log_fd, memoryview(record), self._end)
        os.fdatasync(self._log_fd)
        self._end += len(record)
        self._records += 1

    # -- the searcher's state -----------------------------------------------------------------

    def save_searcher(self, searcher: Searcher) -> None:
        """Keep the searcher's state as of now. Raises IndexUnavailable."""
        self._require_whole()
        mark = (self._records, searcher.stamp())
        if mark == self._saved_as:
            return
        before = self._saved()
        last = str(before.get("file", "")).rpartition(".")[2]
        name = f"searcher.{self.manifest['generation']}.{int(last or 0) + 1}"
        new = self.path / f"{name}.new"
        with _told(self.path, "written"):
            new.unlink(missing_ok=True)
            self._saved_rows, self._saved_as = self._count, mark
            if not searcher.save(new):
                new.unlink(missing_ok=True)
                return
            _sync(new)
            new.replace(self.path / name)
            told = {
                "kind": searcher.KIND,
                "file": name,
                "rows": self._count,
                "records": self._records,
                "crc32": _crc_of(self.path / name),
            }
        write_json(self.path / _SAVED, told)
        if before.get("file"):
            with suppress(OSError, ValueError):
                _inside(self.path, before["file"]).unlink()

    def open_searcher(self, searcher: Searcher, rows: Rows) -> None:
        """Bring a new searcher up to all rows: from its saved state, or by building it anew."""
        saved = self._saved()
        count = saved.get("rows", -1)
        if saved.get("kind") == searcher.KIND and type(count) is int and 0 <= count <= len(rows):
            then = Rows(
                rows.metric, rows.vectors[:count], rows.ids[:count], rows.alive[:count],
                int(count - np.count_nonzero(rows.alive[:count])),
            )  # fmt: skip
            try:
                file = _inside(self.path, saved["file"])
                if _crc_of(file) != saved["crc32"]:
                    raise ValueError("its checksum is another")
                searcher.begin(rows.metric, rows.dimensions)
                records = int(saved["records"])
                searcher.open(file, then)
            except (OSError, ValueError, LookupError, TypeError):
                pass
            else:
                self._saved_rows = count
                self._saved_as = (records, searcher.stamp())
                if count < len(rows):
                    searcher.add(count, rows.vectors[count:])
                if rows.dead:
                    searcher.remove(np.flatnonzero(~rows.alive))
                return
        searcher.rebuild(rows)

    def searcher_is_behind(self) -> bool:
        """Return True when so many rows came since it was saved that it should be saved again."""
        return self._count - self._saved_rows > max(_UNSAVED_ROWS, self._saved_rows // 8)

    def _saved(self) -> dict[str, Any]:
        try:
            found = read_json(self.path / _SAVED)
        except (OSError, ValueError):
            return {}  # it is built anew
        mine = rf"searcher\.{self.manifest['generation']}\.\d{{1,18}}"
        return found if re.fullmatch(mine, str(found.get("file"))) else {}


# --- opening ---------------------------------------------------------------------------------


class DirectoryLock:
    """The lock of a directory; the kernel drops it when the process dies."""

    def __init__(self, path: Path) -> None:
        """Make the directory if there is none, and lock it. IndexInUse, IndexUnavailable."""
        self._fd = -1
        with _told(path, "opened"):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._fd = _open(path / _LOCK, create=True)
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                holder = os.pread(self._fd, 256, 0).decode("utf-8", "replace").strip()
                self.close()
                if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                    raise
                raise IndexInUse(
                    f"the index {path} is open in {shown(holder) if holder else 'another process'};"
                    " stop that, or ask it to search"
                ) from error
            os.ftruncate(self._fd, 0)
            name = Path(sys.argv[0] if sys.argv else "").name or "python"
            os.pwrite(self._fd, f"process {os.getpid()} ({name})\n".encode()[:256], 0)

    def close(self) -> None:
        """Unlock it."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __del__(self) -> None:
        self.close()


def refuse_foreign(path: Path) -> None:
    """Raise IndexMismatch for a directory of something else, before a file is made in it."""
    with _told(path, "read"):
        if not path.is_dir() or (path / _MANIFEST).exists():
            return
        others = sorted(each.name for each in path.iterdir() if not _OURS.fullmatch(each.name))
    if others:
        raise IndexMismatch(
            f"{path} is no index: it holds {shown(others[0])}; name an empty directory"
        )


def manifest_of(path: Path, *, create: bool) -> dict[str, Any] | None:
    """Return the manifest of a directory that is locked; None for a new one.

    Raises IndexMismatch (no index, a newer one), IndexDamaged, IndexUnavailable.
    """
    with _told(path, "read"):
        try:
            found = read_json(path / _MANIFEST)
        except FileNotFoundError:
            names = sorted(each.name for each in path.iterdir())
            refuse_foreign(path)
            if any(re.fullmatch(r"items\.\d+", name) for name in names):
                raise IndexDamaged(
                    f"the index {path} is damaged: its {_MANIFEST} is missing; restore it from a "
                    "backup, or remove the directory and add its items again"
                ) from None
            if not create:
                raise IndexMismatch(f"there is no index in {path}") from None
            return None
        except ValueError as error:
            raise IndexDamaged(
                f"the index {path} is damaged: {_MANIFEST} can't be read: {error}; restore it from "
                "a backup"
            ) from error
    version = found.get("format")
    if type(version) is int and version > FORMAT:
        raise IndexMismatch(
            f"the index {path} has the format {version}, of a newer bbnode; this one reads up to "
            f"{FORMAT}: upgrade it"
        )
    numbers = [found.get(name) for name in ("dimensions", "generation", "next_id")]
    good = (
        version == FORMAT
        and found.get("metric") in METRICS
        and isinstance(found.get("kind"), str)
        and isinstance(found.get("id"), str)
        and all(type(number) is int and 0 <= number <= MAX_INT64 + 1 for number in numbers)
    )
    if not good:
        raise IndexDamaged(
            f"the index {path} is damaged: {_MANIFEST} says what none can; restore it from a backup"
        )
    _remove_files(path, keep=found["generation"])
    return found


def new_manifest(metric: str, dimensions: int, kind: str) -> dict[str, Any]:
    """Return the manifest of a new index."""
    return {
        "format": FORMAT, "id": secrets.token_hex(16), "metric": metric, "dimensions": dimensions,
        "kind": kind, "generation": 0, "next_id": 0,
    }  # fmt: skip


def write_manifest(path: Path, manifest: dict[str, Any]) -> None:
    """Replace the manifest of a directory. Raises IndexUnavailable."""
    write_json(path / _MANIFEST, manifest)


# --- files -----------------------------------------------------------------------------------


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a small file. Raises OSError, ValueError."""
    with path.open("rb") as file:
        data = file.read(_MAX_MANIFEST_BYTES + 1)
    if len(data) > _MAX_MANIFEST_BYTES:
        raise ValueError(f"it has over {_MAX_MANIFEST_BYTES} bytes")
    try:
        found = json.loads(data)
    except RecursionError as error:
        raise ValueError("it nests too deeply") from error
    if not isinstance(found, dict):
        raise ValueError("it is no JSON object")  # noqa: TRY004 - of a file, not of a call
    return found


def write_json(path: Path, told: dict[str, Any]) -> None:
    """Replace a small file, so that a crash leaves the old one or the new one."""
    with _told(path.parent, "written"):
        new = path.with_name(path.name + ".new")
        made = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(made, "w", encoding="utf-8") as file:
            json.dump(told, file)
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
        _sync(path.parent)


def _open(path: Path, create: bool) -> int:
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        descriptor = os.open(path, flags | (os.O_CREAT if create else 0), 0o600)
    except FileNotFoundError as error:
        raise IndexDamaged(
            f"the index {path.parent} is damaged: {path.name} is missing; restore it from a "
            "backup, or remove the directory and add its items again"
        ) from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return descriptor


def _write_all(descriptor: int, data: memoryview, at: int) -> None:
    while len(data):
        done = os.pwrite(descriptor, data, at)
        data, at = data[done:], at + done


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _crc_of(path: Path) -> int:
    found = 0
    with path.open("rb") as file:
        while part := file.read(_READ_BYTES):
            found = zlib.crc32(part, found)
    return found


def _inside(path: Path, name: Any) -> Path:
    if not isinstance(name, str) or not re.fullmatch(r"searcher\.\d+\.\d+", name):
        raise ValueError("it names no file of a searcher")
    return path / name


def _remove_files(path: Path, *, keep: int) -> None:
    """Remove files of other generations, and halves of files: what a crash left."""
    with _told(path, "tidied up"):
        for name in [each.name for each in path.iterdir()]:
            parts = name.split(".")
            other = parts[0] in ("vectors", "items", "searcher") and parts[1] != str(keep)
            if _OURS.fullmatch(name) and (name.endswith(".new") or (other and parts[1].isdigit())):
                (path / name).unlink(missing_ok=True)


@contextmanager
def _told(path: Path, what: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:
        raise _unavailable(path, what, error) from error


def _unavailable(path: Path, what: str, error: Exception) -> IndexUnavailable:
    why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return IndexUnavailable(f"the index {path} can't be {what}: {why}")
