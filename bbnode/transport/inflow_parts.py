"""What a record of a sender is made of: messages that are held, and one that is being received.

Rule: plain data, and the memory of a large message; what becomes of them is decided in `inflow`.
"""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from bbnode.transport.links.framing import Lane, Open
from bbnode.transport.room import Claim, Meter

# From here on memory comes straight from the system, untouched until it is written, and goes
# back when the message is dropped. A bytearray is cleared first: 0.3 s a GiB with the loop
# standing still.
_MAPPED_BYTES: Final = 1024 * 1024
# A line of the processor's cache, and more than any number type asks for. Memory that is not
# mapped begins at a multiple of 16 only, which is enough for all of those too.
_ALIGN_BYTES: Final = 64
# For how many seconds a held message waits at least, so that a rate is not asked for each one.
_RATE_WAIT_S: Final = 0.05

# In how many seconds an envelope of this size may come in: 0 is now, `math.inf` is never.
Admit = Callable[[int], float]


@dataclass(slots=True, eq=False)
class Partial:
    """A large message that is being received; without a claim it is thrown away."""

    number: int
    total: int
    meter: Meter
    claim: Claim | None = None
    buffer: memoryview | None = None
    stored: int = 0


@dataclass(slots=True)
class HeldSmall:
    """A held small message; `admitted` once the authorizer let it in."""

    number: int
    data: bytes
    admitted: bool = False


@dataclass(slots=True)
class HeldOpen:
    """A held OPEN; `admitted` once the authorizer let it in, None before it was asked."""

    number: int
    opening: Open
    admitted: bool | None = None
    # Since when there is no room for it; inf for one that is to wait until there is.
    waits_since: float | None = None


@dataclass(slots=True)
class HeldBytes:
    """Held bytes of a CHUNK."""

    number: int
    data: bytes


@dataclass(slots=True)
class Acks:
    """What is owed to the sender of one lane."""

    due: bool = False
    # Bytes taken since the last acknowledgement.
    since: int = 0


class RateWaits:
    """How long a sender that is over its rate has to wait, by lane."""

    __slots__ = ("not_before",)

    def __init__(self) -> None:
        self.not_before = dict.fromkeys(Lane, 0.0)

    def ask(self, lane: Lane, size: int, admit: Admit, now: float) -> float:
        """What the authorizer says of a message; while it said to wait it is not asked."""
        if now < self.not_before[lane]:
            return self.not_before[lane] - now
        wait_s = admit(size)
        if 0 < wait_s < math.inf:
            wait_s = max(wait_s, _RATE_WAIT_S)
            self.not_before[lane] = now + wait_s
        return wait_s


def allocate(size: int, anchor: int) -> memoryview:
    """Memory for one message, with its byte `anchor` aligned; raises MemoryError or OSError."""
    skipped = -anchor % _ALIGN_BYTES
    if size < _MAPPED_BYTES:
        return memoryview(bytearray(skipped + size))[skipped:]
    # Private, which is not Python's default: of shared memory Linux gives small pages only, whose
    # 16,000 faults take a 64 MiB message 50 ms; large ones take 4.
    mapped = mmap.mmap(-1, skipped + size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            mapped.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(mapped)[skipped:]
