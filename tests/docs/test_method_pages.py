"""Each page of docs/methods is listed, its links lead somewhere, and its programs compile."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from bbnode.compiler import Compiler
from bbnode.dsl import Module

FOLDER = Path(__file__).parents[2] / "docs" / "methods"
PAGES = sorted(page for page in FOLDER.glob("*.md") if page.name != "README.md")
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\((?!https?:)([^)#\s]+)(#[^)]*)?\)")


def test_each_page_is_listed_once() -> None:
    listed = re.findall(r"^- \[.*?\]\((\S+)\): ", (FOLDER / "README.md").read_text(), re.MULTILINE)
    assert sorted(listed) == [page.name for page in PAGES]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere_and_programs_compile(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = page.read_text(encoding="utf-8")
    assert not [link for link, _ in LINK.findall(text) if not (page.parent / link).exists()]
    monkeypatch.chdir(tmp_path)
    module = ModuleType("page")
    monkeypatch.setitem(sys.modules, "page", module)  # dataclasses look a class's module up
    for code in BLOCK.findall(text):
        exec(code, vars(module))
    made = [each for each in vars(module).values() if getattr(each, "__module__", "") == "page"]
    for program in made:
        if isinstance(program, type) and issubclass(program, Module):
            one = program()
            Compiler().bind_all(one.bindings()).compile(one.build())
