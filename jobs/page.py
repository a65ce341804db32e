"""The table of docs/jobs.md: each job, what it took, what came of it, and what checks it."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from jobs.job import RESULTS, ROOT, Row, load

PAGE: Final = ROOT / "docs" / "jobs.md"
_TABLE: Final = re.compile(r"(?<=<!-- table -->\n\n).*?(?=\n\n<!-- end -->)", re.DOTALL)


def recorded(path: Path = RESULTS) -> list[Row]:
    """Return the rows of the file of results."""
    if not path.exists():
        return []
    return [Row(**each) for each in json.loads(path.read_text("utf-8"))]


def table(rows: Sequence[Row]) -> str:
    """Return the table in Markdown: of each job the long form, or the quick one without one."""
    lines = [
        "| job | what is done | minutes | MiB | moved, MiB | result | reference | claims |",
        "|---|---|---:|---:|---:|---|---|---:|",
    ]
    best = {row.name: row for row in sorted(rows, key=lambda row: not row.quick)}
    for name, row in sorted(best.items()):
        form = " (quick)" if row.quick else ""
        lines.append(
            f"| `{name}`{form} | {load(name).says} | {row.seconds / 60:.1f} | {row.memory_mib:g} "
            f"| {row.moved_mib:g} | {row.result} | {row.reference} | {row.held} of {row.claims} |"
        )
    return "\n".join(lines)


def write(rows: Sequence[Row], page: Path = PAGE) -> None:
    """Put the table into the page."""
    text = page.read_text("utf-8")
    page.write_text(_TABLE.sub(lambda _: table(rows), text), "utf-8")


def shown(page: Path = PAGE) -> str:
    """Return the table that the page has."""
    found = _TABLE.search(page.read_text("utf-8"))
    return found[0] if found else ""
