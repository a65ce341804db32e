"""A pool of memory for large messages.

Rule: fresh memory costs more than receiving the message into it, since the system clears each page
at its first touch. So a mapping returns to the pool when the last view of it is gone, in whichever
thread that is, and serves the next message of about its size. Free memory is bounded
(`_FREE_BYTES`) and returned to the system if it was not used between two calls of `trim`.
"""

from __future__ import annotations

import contextlib
import mmap
from typing import Final

import numpy as np

# From this size on memory is mapped, and so untouched until it is written. A bytearray is cleared
# first, which blocks the loop for 0.3 s per GiB.
_MAPPED_BYTES: Final = 1024 * 1024
# A cache line, and more than any number type requires. Memory that is not mapped is aligned to 16
# bytes only, which is enough for all number types too.
_ALIGN_BYTES: Final = 64
# Free memory that a process keeps: the size of one full inbox.
_FREE_BYTES: Final = 256 * 1024 * 1024
# The minimum size of a message, as a fraction of the free mapping that it takes, so that no message
# occupies much more than is counted for it.
_LEAST_USED: Final = 0.8

# Free mappings, and the ids of those that the last `trim` has seen. Threads change both only by
# single, atomic calls.
_free: list[mmap.mmap] = []
_seen: set[int] = set()


class _Lent(np.ndarray):
    """The bytes of a mapping; every view of them keeps it alive."""

    mapping: mmap.mmap | None = None

    def __del__(self) -> None:
        mapping = self.mapping
        if mapping is not None and free_bytes() + len(mapping) <= _FREE_BYTES:
            _seen.discard(id(mapping))
            _free.append(mapping)


def allocate(size: int, anchor: int) -> memoryview:
    """Return uninitialised memory for a message, with its byte `anchor` aligned to 64 bytes.

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
    """Return the number of bytes kept for further messages."""
    return sum(map(len, list(_free)))


def trim() -> None:
    """Return mappings to the system that have been free since the last call."""
    for mapping in list(_free):
        if id(mapping) not in _seen:
            _seen.add(id(mapping))
            continue
        with contextlib.suppress(ValueError):  # taken meanwhile
            _free.remove(mapping)
            _seen.discard(id(mapping))


def _taken(size: int) -> mmap.mmap | None:
    """Remove and return the smallest free mapping for this many bytes, None without one."""
    for mapping in sorted(_free, key=len):
        if size <= len(mapping) and size >= len(mapping) * _LEAST_USED:
            with contextlib.suppress(ValueError):  # another thread has taken it
                _free.remove(mapping)
                _seen.discard(id(mapping))
                return mapping
    return None


def _mapped(size: int) -> mmap.mmap:
    # Private, which is not Python's default: Linux backs shared memory by small pages only, whose
    # 16,000 faults cost 50 ms for a message of 64 MiB; huge pages cost 4 ms.
    mapped = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            mapped.madvise(mmap.MADV_HUGEPAGE)
    return mapped
