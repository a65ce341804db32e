"""The example of docs/indexes.md runs, and the page names the library as the code does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bbnode.components.libraries import FAISS

PAGE = (Path(__file__).parents[2] / "docs" / "indexes.md").read_text(encoding="utf-8")


def test_the_example_runs() -> None:
    pytest.importorskip("faiss")
    (block,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    exec(compile(block, "docs/indexes.md", "exec"), {})


def test_the_library_is_asked_for_as_pyproject_has_it() -> None:
    pyproject = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    assert f'indexes = ["{FAISS.requirement}"]' in pyproject
    assert f"pip install '{FAISS.requirement}'" in PAGE
