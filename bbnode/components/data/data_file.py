"""Files that data sources read: opened only where reading them ends, whatever stands at the path.

Rule: a FIFO or a device is refused instead of waited for, and a file that changes under its index
is refused, never half read. Files are read at offsets, for a mapped file that shrinks kills the
process; those that are mapped all the same, for their size, are checked before each batch.
"""

from __future__ import annotations

import contextlib
import lzma
import os
import stat
import struct
import tokenize
import zipfile
import zlib
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from bbnode.components.errors import DataUnavailable
from bbnode.ir.decoding import clip

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}

# What numpy, zipfile and the decompressors raise for bytes that are not theirs.
UNREADABLE = (
    OSError, ValueError, TypeError, LookupError, EOFError, MemoryError, OverflowError,
    RuntimeError, SyntaxError, tokenize.TokenError, struct.error, zlib.error, lzma.LZMAError,
    zipfile.BadZipFile,
)  # fmt: skip
_MOST_PATH_CHARS = 4096
_MOST_TOLD = 300  # characters of a reader's own message


class DataFile:
    """A regular file, open for reads at offsets by any thread.

    Attributes:
        path: where it was opened.
        size: in bytes, when it was opened.
    """

    def __init__(self, path: Path, component: str) -> None:
        """Open the file. Raises DataUnavailable, which says what stands there instead."""
        self.path = path
        self._component = component
        try:
            # Without O_NONBLOCK, a FIFO that took the place of the file would block here for ever.
            self._fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except (OSError, ValueError) as error:
            raise DataUnavailable(
                f"{component}: cannot open {named(path)}: {_why(error)}; set `path` to a file that "
                "this node may read"
            ) from error
        found = os.fstat(self._fd)
        if not stat.S_ISREG(found.st_mode):
            self.close()
            kind = _KINDS.get(stat.S_IFMT(found.st_mode), "no regular file")
            raise DataUnavailable(
                f"{component}: {named(path)} is {kind}; set `path` to a regular file"
            )
        self.size = found.st_size
        self._stamp = found.st_mtime_ns

    def read(self, offset: int, count: int) -> bytes:
        """Return the bytes at an offset; DataUnavailable when there are fewer of them."""
        parts: list[bytes] = []
        while count > 0:
            try:
                part = os.pread(self._fd, count, offset)
            except OSError as error:
                raise DataUnavailable(
                    f"{self._component}: cannot read {named(self.path)}: {_why(error)}"
                ) from error
            if not part:
                raise self._changed()
            parts.append(part)
            offset, count = offset + len(part), count - len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def stream(self) -> BinaryIO:
        """Return the file as a stream of its own descriptor; use one at a time."""
        made = os.fdopen(os.dup(self._fd), "rb")
        made.seek(0)
        return made

    def check_unchanged(self) -> None:
        """Raise DataUnavailable if the file was written to since it was opened."""
        found = os.fstat(self._fd)
        if (found.st_size, found.st_mtime_ns) != (self.size, self._stamp):
            raise self._changed()

    def close(self) -> None:
        """Close the file; a second time does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> DataFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_fd", -1) >= 0:
            self.close()

    def _changed(self) -> DataUnavailable:
        return DataUnavailable(
            f"{self._component}: {named(self.path)} changed while it was in use; start the node "
            "again once nothing writes to it"
        )


def read_whole(path: Path, component: str, max_bytes: int) -> bytes:
    """Return the content of a small file; DataUnavailable when it is larger than `max_bytes`."""
    with DataFile(path, component) as file:
        if file.size > max_bytes:
            raise DataUnavailable(
                f"{component}: {named(path)} has {file.size} bytes, more than {max_bytes}; is it "
                "the right file?"
            )
        return file.read(0, file.size)


class Room:
    """The memory that the values of all files of one source may take together."""

    def __init__(self, component: str, max_mib: int = 0) -> None:
        self._component = component
        self._bytes = max_mib << 20 if max_mib else memory_limit()
        self._left = self._bytes

    def take(self, path: Path, size: int, remedy: str = "") -> None:
        """Raise DataUnavailable for a size that a file declares, where it is too much."""
        self._left -= size
        if self._left < 0:
            raise DataUnavailable(
                f"{self._component}: {named(path)} takes {size >> 20} MiB in memory, and "
                f"max_memory_mib leaves {(self._left + size) >> 20} of {self._bytes >> 20}; "
                f"{remedy or 'raise it'}, if the file is what you think it is"
            )


def memory_limit() -> int:
    """Return the bytes that the values of one file may take: half of what this process may have."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    with contextlib.suppress(OSError, ValueError):
        groups = Path("/proc/self/cgroup").read_text("ascii").splitlines()
        place = next((each[3:] for each in groups if each.startswith("0::")), "/")
        root = Path("/sys/fs/cgroup")
        for folder in (root / place.lstrip("/"), *(root / place.lstrip("/")).parents):
            if not folder.is_relative_to(root):
                break
            with contextlib.suppress(OSError, ValueError):  # "max"
                limits.append(int((folder / "memory.max").read_text("ascii")))
    return min(limits) // 2


def named(path: str | Path) -> str:
    """Return a path as a message may show it: names of files are data, of an archive, say."""
    return clip(str(path), _MOST_PATH_CHARS)


def told(error: BaseException) -> str:
    """Return a reader's message as one bounded line."""
    return clip(" ".join(str(error).split()) or type(error).__name__, _MOST_TOLD)


def _why(error: OSError | ValueError) -> str:
    return str(getattr(error, "strerror", None) or error)
