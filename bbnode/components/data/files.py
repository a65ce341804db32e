"""Files of data sources: what may be opened, what readers raise, and whether it still is the same.

Rule: a file is a user's own, and may be anything all the same: a folder, a pipe, cut short, another
format. Each becomes a DataUnavailable of one line.
"""

from __future__ import annotations

import lzma
import os
import stat
import struct
import tokenize
import zipfile
import zlib
from pathlib import Path

from bbnode.components.errors import DataUnavailable

# What numpy, zipfile and the decompressors raise for bytes that are not theirs.
UNREADABLE = (
    OSError, ValueError, TypeError, LookupError, EOFError, MemoryError, OverflowError,
    RuntimeError, SyntaxError, tokenize.TokenError, struct.error, zlib.error, lzma.LZMAError,
    zipfile.BadZipFile,
)  # fmt: skip

_MOST_SHOWN = 300  # characters of a reader's own message
_KINDS = (
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def status_of(component: str, path: Path, wanted: str) -> os.stat_result:
    """Return the status of a file or folder; `wanted` says what `path` should be.

    Raises DataUnavailable for a path that is not there, and for pipes and devices, whose opening
    may wait for ever.
    """
    if not str(path).strip() or "\0" in str(path):
        raise DataUnavailable(f"{component}: `path` is empty; set it to {wanted}")
    try:
        status = path.stat()
    except OSError as error:
        why = error.strerror or str(error)
        raise DataUnavailable(
            f"{component}: cannot read {path}: {why}; set `path` to {wanted}"
        ) from error
    for is_kind, name in _KINDS:
        if is_kind(status.st_mode):
            raise DataUnavailable(f"{component}: {path} is {name}; set `path` to {wanted}")
    return status


def regular(component: str, path: Path, wanted: str) -> os.stat_result:
    """Return the status of a regular file; DataUnavailable for anything else."""
    status = status_of(component, path, wanted)
    if not stat.S_ISREG(status.st_mode):
        raise DataUnavailable(f"{component}: {path} is a folder; set `path` to {wanted}")
    return status


def told(error: BaseException) -> str:
    """Return a reader's message as one bounded line."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}…"


class Unchanged:
    """A watch over a mapped file: one that is cut short in place would end the process (SIGBUS)."""

    def __init__(self, component: str, path: Path) -> None:
        self._component, self._path = component, path
        self._first = _fingerprint(path)

    def check(self) -> None:
        """Raise DataUnavailable if the file was written to since; a renamed one stays as it was."""
        now = _fingerprint(self._path)
        if now is None or self._first is None or now[0] != self._first[0] or now == self._first:
            return
        raise DataUnavailable(
            f"{self._component}: {self._path} was changed while in use; write a new file, rename "
            "it over the old one, and restart the node"
        )


def _fingerprint(path: Path) -> tuple[tuple[int, int], int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None  # removed: what is mapped stays
    return (status.st_dev, status.st_ino), status.st_size, status.st_mtime_ns
