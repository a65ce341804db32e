"""Content that is read in pieces, from memory or from a file.

Rule: a file is read through one descriptor and never mapped: a mapped file that shrinks ends the
process with SIGBUS, while a short read is a typed error. A file whose size or modification time has
changed at the end is refused.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

_WINDOW_BYTES = 1 << 16  # read at once to serve small glances
_MAX_READ_BYTES = 1 << 30  # Linux reads at most 2 GiB - 4 KiB in one call
_FLAGS = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
_NO_WAITING = getattr(os, "O_NONBLOCK", 0)  # do not wait for the writer of a pipe


class NotRead(Exception):
    """Content cannot be read; the message has the reason. Never leaves `bbnode.ir`."""


class Content(Protocol):
    """Bytes that are addressed by offset."""

    @property
    def size(self) -> int:
        """The number of bytes."""

    def glance(self, start: int, count: int) -> bytes | memoryview:
        """Return a few bytes, fewer at the end."""

    def read(self, start: int, end: int) -> bytes | memoryview:
        """Return the bytes of a range. Raises NotRead if some are missing."""

    def read_into(self, start: int, place: memoryview) -> None:
        """Fill a writeable buffer of bytes. Raises NotRead."""


class InMemory:
    """Bytes in memory; reads return views."""

    def __init__(self, content: bytes) -> None:
        self._view = memoryview(content)

    @property
    def size(self) -> int:
        return len(self._view)

    def glance(self, start: int, count: int) -> memoryview:
        return self._view[start : start + count]

    def read(self, start: int, end: int) -> memoryview:
        return self._view[start:end]

    def read_into(self, start: int, place: memoryview) -> None:
        place[:] = self._view[start : start + len(place)]


class InFile:
    """The bytes of an open file. Not thread-safe."""

    def __init__(self, path: Path, *, follow: bool = True) -> None:
        """Open a file; `follow` also allows a link.

        Raises OSError, ValueError (a NUL in the path), NotRead if it is no regular file.
        """
        flags = _FLAGS | _NO_WAITING | (0 if follow else getattr(os, "O_NOFOLLOW", 0))
        self.name = path.name
        self._descriptor = os.open(path, flags)
        status = os.fstat(self._descriptor)
        if not stat.S_ISREG(status.st_mode):  # a device has no size, and may have no end
            self.close()
            raise NotRead(f"{self.name!r} is not a file")
        self._found = _version(status)
        self.size = status.st_size
        self._window, self._window_at = b"", 0

    def glance(self, start: int, count: int) -> bytes:
        at = start - self._window_at
        if at < 0 or at + count > len(self._window):
            end = min(start + max(count, _WINDOW_BYTES), self.size)
            self._window, self._window_at = self.read(start, end), start
            at = 0
        return self._window[at : at + count]

    def read(self, start: int, end: int) -> bytes:
        place = bytearray(end - start)
        self.read_into(start, memoryview(place))
        return bytes(place)

    def read_into(self, start: int, place: memoryview) -> None:
        done = 0
        while done < len(place):
            piece = place[done : done + _MAX_READ_BYTES]
            try:
                count = os.preadv(self._descriptor, [piece], start + done)
            except OSError as error:
                raise NotRead(f"cannot read {self.name!r}: {error.strerror or error}") from error
            if count <= 0:
                raise NotRead(f"{self.name!r} ends before its byte {start + len(place)}")
            done += count

    def check_unchanged(self) -> None:
        """Raise NotRead if the file has changed since it was opened."""
        if _version(os.fstat(self._descriptor)) != self._found:
            raise NotRead(f"{self.name!r} changed while it was read")

    def close(self) -> None:
        """Close the file, after which nothing can be read."""
        os.close(self._descriptor)


class OpenFiles:
    """A set of files that are opened once each and closed together."""

    def __init__(self) -> None:
        self._files: dict[Path, InFile] = {}

    def open(self, path: Path, *, follow: bool = True) -> InFile:
        """Open a file, or return it if it is open already. Raises what `InFile` raises."""
        if path not in self._files:
            self._files[path] = InFile(path, follow=follow)
        return self._files[path]

    def check_unchanged(self) -> None:
        """Raise NotRead if one of them has changed."""
        for file in self._files.values():
            file.check_unchanged()


@contextmanager
def open_files() -> Iterator[OpenFiles]:
    """Yield an OpenFiles, and close its files at the end.

    Raises NotRead at the end if one of them has changed.
    """
    files = OpenFiles()
    try:
        yield files
        files.check_unchanged()
    finally:
        for file in files._files.values():
            file.close()


def _version(status: os.stat_result) -> tuple[Any, ...]:
    return status.st_size, status.st_mtime_ns
