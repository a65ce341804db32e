"""The table of docs/methods/combining.md is what parts say of each other.

`python -m tests.docs.test_combining_page` writes it anew.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from pathlib import Path

from bbnode import programs
from bbnode.programs.composing import RoundPart, contradiction
from tests.programs.composed import PARTS

PAGE = Path(__file__).parents[2] / "docs" / "methods" / "combining.md"
BEGIN, END = "<!-- parts -->\n", "<!-- end -->\n"


def preset(part: RoundPart) -> str:
    """Return the name of the program that is known by a part; "" where there is none."""
    found = [
        name
        for name in programs.__all__
        if type(getattr(getattr(programs, name), part.slot, None)) is type(part)
        and name != "FederatedTraining"
    ]
    return f"`{found[0]}`" if len(found) == 1 else ""


def refused(part: RoundPart) -> str:
    """Return what a part does not go with, by the reasons, beside others of its own argument."""
    by: dict[str, list[str]] = defaultdict(list)
    for other in PARTS:
        pair = (part, other)
        found = contradiction(pair) if other.slot != part.slot or part.several else None
        if found and other is not part:
            by[found[2]].append(f"`{type(other).__name__}`")
    return "; ".join(f"{', '.join(others)}: {why}" for why, others in by.items())


def table() -> str:
    rows = ["| argument | part | known as | does not go with |", "| --- | --- | --- | --- |"]
    for slot, parts in itertools.groupby(PARTS, key=lambda part: part.slot):
        rows += [
            f"| `{slot}` | `{type(each).__name__}` | {preset(each)} | {refused(each)} |"
            for each in parts
        ]
    return "\n".join(rows) + "\n"


def test_the_table_is_what_the_parts_say() -> None:
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    found, _, after = rest.partition(END)
    assert before
    assert after
    assert found == table()


if __name__ == "__main__":
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    PAGE.write_text(before + BEGIN + table() + END + rest.partition(END)[2], encoding="utf-8")
