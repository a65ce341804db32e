"""Content that is read piece by piece, from memory or from a file.

Rule: a file is read through one descriptor and never mapped: a mapped file that shrinks ends the
process with SIGBUS, where a read that falls short is an error with a name. A file of which size or
time of change differ at the end is refused.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

_WINDOW_BYTES = 1 << 16  # read at once for those who look at a few bytes
_MAX_READ_BYTES = 1 << 30  # Linux reads at most 2 GiB - 4 KiB in one call
_FLAGS = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
_NO_WAITING = getattr(os, "O_NONBLOCK", 0)  # for the writer of a pipe


class NotRead(Exception):
    """Content cannot be read; the text says why. Never leaves `bbnode.ir`."""


class Content(Protocol):
    """Bytes at places that are counted from the beginning."""

    @property
    def size(self) -> int:
        """The number of bytes."""

    def glance(self, start: int, count: int) -> bytes | memoryview:
        """Return some few bytes, fewer at the end."""

    def read(self, start: int, end: int) -> bytes | memoryview:
        """Return the bytes of a range. Raises NotRead where they are not all there."""

    def read_into(self, start: int, place: memoryview) -> None:
        """Fill a writeable buffer of bytes. Raises NotRead."""


class InMemory:
    """Bytes that somebody else holds; what is read of them are views."""

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
    """The bytes of an open file. Not for several threads at once."""

    def __init__(self, path: Path, *, follow: bool = True) -> None:
        """Open a file; with `follow` a link, too.

        Raises OSError, ValueError (a NUL in the path), NotRead for what is no file.
        """
        flags = _FLAGS | _NO_WAITING | (0 if follow else getattr(os, "O_NOFOLLOW", 0))
        self.name = path.name
        self._descriptor = os.open(path, flags)
        told = os.fstat(self._descriptor)
        if not stat.S_ISREG(told.st_mode):  # a device has no size, and may have no end
            self.close()
            raise NotRead(f"{self.name!r} is not a file")
        self._found = _version(told)
        self.size = told.st_size
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
        """Raise NotRead if somebody has written to the file since it was opened."""
        if _version(os.fstat(self._descriptor)) != self._found:
            raise NotRead(f"{self.name!r} changed while it was read")

    def close(self) -> None:
        """Close the file; nothing is read any more."""
        os.close(self._descriptor)


class OpenFiles:
    """Files that are closed together, each opened once."""

    def __init__(self) -> None:
        self._files: dict[Path, InFile] = {}

    def open(self, path: Path, *, follow: bool = True) -> InFile:
        """Open a file, or return it where it is open. Raises what `InFile` raises."""
        if path not in self._files:
            self._files[path] = InFile(path, follow=follow)
        return self._files[path]

    def check_unchanged(self) -> None:
        """Raise NotRead if one of them has changed."""
        for file in self._files.values():
            file.check_unchanged()


@contextmanager
def open_files() -> Iterator[OpenFiles]:
    """Yield what opens files, and close these at the end.

    Raises NotRead at the end where one of them changed meanwhile.
    """
    files = OpenFiles()
    try:
        yield files
        files.check_unchanged()
    finally:
        for file in files._files.values():
            file.close()


def _version(told: os.stat_result) -> tuple[Any, ...]:
    return told.st_size, told.st_mtime_ns
