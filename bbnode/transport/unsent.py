"""An envelope that was handed to the transport and that nobody has acknowledged."""

from __future__ import annotations

from dataclasses import dataclass

from bbnode.ir.peer import PeerId


@dataclass(frozen=True, slots=True, kw_only=True)
class Unsent:
    """An envelope that its peer has not acknowledged: it may have come, or not."""

    peer: PeerId
    tag: int
    parts: tuple[memoryview, ...]

    @property
    def size(self) -> int:
        """Bytes of all its parts."""
        return sum(len(part) for part in self.parts)
