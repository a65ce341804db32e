"""The programs of `docs/data.md` print what stands below them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bbnode.components.data import iterable

PAGE = (Path(__file__).parents[2] / "docs" / "data.md").read_text("utf-8")
PROGRAMS = {
    section.partition("\n")[0]: re.findall(
        r"^```python\n(.*?)^```\n\n```text\n(.*?)^```$", section, re.MULTILINE | re.DOTALL
    )
    for section in PAGE.split("\n## ")
}


@pytest.mark.parametrize("title", [title for title, found in PROGRAMS.items() if found])
def test_the_programs_print_what_the_page_says(title, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(iterable, "_provided", {})
    for program, printed in PROGRAMS[title]:
        exec(compile(program, f"docs/data.md: {title}", "exec"), {})
        assert capsys.readouterr().out == printed


def test_every_program_of_the_page_is_run() -> None:
    assert sum(map(len, PROGRAMS.values())) == PAGE.count("```python") >= 7
