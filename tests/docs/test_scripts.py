"""docs/scripts.md and docs/from-flower.md: their code runs, and what they count is so."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bbnode import templates
from bbnode.compiler import Compiler
from bbnode.programs import FederatedTraining

DOCS = Path(__file__).parents[2] / "docs"


def run(page: str) -> dict[str, object]:
    """Run the `python` blocks of a page, one after the other, and return their names."""
    text = (DOCS / page).read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    assert len(blocks) >= 2
    names: dict[str, object] = {"__name__": "__main__"}
    for block in blocks:
        exec(compile(block, page, "exec", dont_inherit=True), names)
    return names


def test_the_script_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run("scripts.md")
    assert (tmp_path / "artifact.onnx").stat().st_size > 1000


def test_the_programs_beside_flower_compile() -> None:
    names = run("from-flower.md")
    for name in ("Training", "Round"):
        program = names[name]()  # type: ignore[operator]
        Compiler().bind_all(program.bindings()).compile(program.build())
    assert isinstance(names["Training"](), FederatedTraining)  # type: ignore[operator]


def test_the_lines_are_counted_right(tmp_path: Path) -> None:
    templates.write_project(tmp_path / "counted", "federated")
    counts = []
    for name in ("program.py", "data.py"):
        lines = (tmp_path / "counted" / "counted" / name).read_text().splitlines()
        counts.append(sum(1 for line in lines if line.strip()))
    page = (DOCS / "from-flower.md").read_text(encoding="utf-8")
    told = re.search(
        r"trains in (\d+) lines.*?has (\d+), `data.py`.*? examples, (\d+)\.", page, re.DOTALL
    )
    assert told is not None
    assert [int(number) for number in told.groups()] == [sum(counts), *counts]
