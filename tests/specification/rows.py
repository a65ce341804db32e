"""The rows of docs/specification.md, and the probes of a section.

Rule: a row has one probe and a probe one row; a probe is named by the words with which its row
begins.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

PAGE = Path(__file__).parents[2] / "docs" / "specification.md"
NOTHING = "\N{EN DASH}"  # a cell of what one of the two does not have
Probe = TypeVar("Probe", bound=Callable[..., object])


def sections() -> dict[str, list[str]]:
    """Return the rows of each section with a table: the cells that say something, joined."""
    found: dict[str, list[str]] = {}
    for section in PAGE.read_text("utf-8").split("\n## ")[1:]:
        title, _, text = section.partition("\n")
        lines = [line for line in text.splitlines() if line.startswith("| ")]
        if lines:
            found[title] = [_row(line) for line in lines[1:]]
    return found


def _row(line: str) -> str:
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    return " | ".join(cell for cell in cells if cell != NOTHING)


class Rows:
    """The rows of one section, and which test probes which."""

    def __init__(self, section: str) -> None:
        self.section = section
        self.probes: dict[str, str] = {}

    def probe(self, begins: str) -> Callable[[Probe], Probe]:
        """Mark a test as the probe of the row that begins so."""

        def mark(test: Probe) -> Probe:
            name = getattr(test, "__name__", "")
            assert name.startswith("test_"), f"pytest does not run {name}"
            assert begins not in self.probes, f"{begins!r} has two probes"
            self.probes[begins] = name
            return test

        return mark

    def check(self) -> None:
        """Compare with the page: no row without its probe, no probe without its row."""
        rows = sections()[self.section]
        probed = {row: [p for p in self.probes if row.startswith(p)] for row in rows}
        assert [row for row, by in probed.items() if len(by) != 1] == []
        assert set(self.probes) - {p for by in probed.values() for p in by} == set()
        assert len(rows) == len(self.probes)
