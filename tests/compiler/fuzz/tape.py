"""Random choices from a list of numbers.

Rule: a program is a function of its tape, so that its body can be recorded again and again;
an exhausted tape gives 0 for ever, so that a shorter tape is a smaller program.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

Item = TypeVar("Item")


class Tape:
    def __init__(self, numbers: Sequence[int]) -> None:
        self._numbers = numbers
        self._at = 0

    def __bool__(self) -> bool:
        return self._at < len(self._numbers)

    def pick(self, n: int) -> int:
        """A number below `n`."""
        if self._at >= len(self._numbers):
            return 0
        self._at += 1
        return self._numbers[self._at - 1] % n

    def choose(self, items: Sequence[Item]) -> Item:
        return items[self.pick(len(items))]

    def cut(self, n: int) -> list[int]:
        """The next numbers, at most `n`, as a tape of their own."""
        part = list(self._numbers[self._at : self._at + n])
        self._at += len(part)
        return part
