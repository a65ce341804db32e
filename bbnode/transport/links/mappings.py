"""Memory for large messages, which is used again when nobody looks at a message any more.

Rule: new memory costs more than the message that comes into it, since the system clears each page
at its first touch. So a mapping comes back when the last view of it is gone, in whichever thread
that is, and serves the next message of about its size. What lies free is bounded (`_FREE_BYTES`)
and goes back to the system when it was not wanted between two calls of `trim`.
"""

from __future__ import annotations

import contextlib
import mmap
from typing import Final

import numpy as np

# From this size on memory is mapped: it is untouched until it is written. A bytearray is cleared
# first, which blocks the loop for 0.3 s a GiB.
_MAPPED_BYTES: Final = 1024 * 1024
# A line of the processor's cache, and more than any number type asks for. Memory that is not
# mapped begins at a multiple of 16 only, which is enough for all of those too.
_ALIGN_BYTES: Final = 64
# Free memory that a process keeps: that of one full inbox.
_FREE_BYTES: Final = 256 * 1024 * 1024
# A free mapping serves a message of this part of its size and up; so no message takes much more
# than is counted for it.
_LEAST_USED: Final = 0.8

# The free ones, and those of them that the last `trim` has seen. Threads change them by single
# calls.
_free: list[mmap.mmap] = []
_seen: set[int] = set()


class _Lent(np.ndarray):
    """The bytes of a mapping; whoever looks at them holds it."""

    mapping: mmap.mmap | None = None

    def __del__(self) -> None:
        mapping = self.mapping
        if mapping is not None and free_bytes() + len(mapping) <= _FREE_BYTES:
            _seen.discard(id(mapping))
            _free.append(mapping)


def allocate(size: int, anchor: int) -> memoryview:
    """Return memory for a message, with anything in it; its byte `anchor` is aligned to 64 bytes.

    Raises MemoryError or OSError.
    """
    skipped = -anchor % _ALIGN_BYTES
    wanted = skipped + size
    if size < _MAPPED_BYTES:
        return memoryview(bytearray(wanted))[skipped:]
    mapping = _taken(wanted) or _mapped(wanted)
    lent = np.ndarray.__new__(_Lent, (wanted,), np.uint8, mapping)
    lent.mapping = mapping
    return lent.data[skipped:]


def free_bytes() -> int:
    """Return the bytes that are kept for the next messages."""
    return sum(map(len, list(_free)))


def trim() -> None:
    """Return to the system what has been free since the last call."""
    for mapping in list(_free):
        if id(mapping) not in _seen:
            _seen.add(id(mapping))
            continue
        with contextlib.suppress(ValueError):  # taken meanwhile
            _free.remove(mapping)
            _seen.discard(id(mapping))


def _taken(size: int) -> mmap.mmap | None:
    """Return the smallest free mapping that this many bytes fill, None without one."""
    for mapping in sorted(_free, key=len):
        if size <= len(mapping) and size >= len(mapping) * _LEAST_USED:
            with contextlib.suppress(ValueError):  # another thread has taken it
                _free.remove(mapping)
                _seen.discard(id(mapping))
                return mapping
    return None


def _mapped(size: int) -> mmap.mmap:
    # Private, which is not Python's default: Linux gives shared memory small pages only, whose
    # 16,000 faults cost a message of 64 MiB 50 ms; huge pages cost 4 ms.
    mapped = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            mapped.madvise(mmap.MADV_HUGEPAGE)
    return mapped
