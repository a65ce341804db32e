"""The blocks of docs/python.md and the notebook do what they show."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import onnx
import pytest

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "python.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
# Beyond it, it would be no shorter than the quickstarts of others.
MOST_LINES = 60


def test_the_first_round_is_short() -> None:
    assert len(BLOCKS[0].splitlines()) < MOST_LINES


def test_the_blocks_run_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    level = logging.getLogger("bbnode").level
    names: dict[str, object] = {"__name__": "page"}
    try:
        for number, block in enumerate(BLOCKS):
            exec(compile(block, f"docs/python.md, block {number}", "exec"), names)
    finally:
        logging.getLogger("bbnode").setLevel(level)
    said = capsys.readouterr().out.splitlines()
    losses = [float(line.rpartition(" ")[2]) for line in said if line.startswith("round ")]
    assert len(losses) == 10
    assert losses[-1] < 0.02 < losses[0]
    onnx.checker.check_model(onnx.load(tmp_path / "trained.onnx"))
    assert said[-1] == "(0, 0) (0, 0)"
