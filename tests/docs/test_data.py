"""The programs of `docs/data.md` print what stands below them, and its settings are ones."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from bbnode.components.data import iterable
from bbnode.components.registry import component_class

PAGE = (Path(__file__).parents[2] / "docs" / "data.md").read_text("utf-8")
PARTS = {part.partition("\n")[0]: part for part in PAGE.split("\n## ")}
PROGRAMS = {
    title: re.findall(
        r"^```python\n(.*?)^```\n\n```text\n(.*?)^```$", part, re.MULTILINE | re.DOTALL
    )
    for title, part in PARTS.items()
}
SOURCES = {
    "# Data": "bbnode.TableDataSource",
    "Lines of text": "bbnode.TextDataSource",
    "Folders of images": "bbnode.ImageFolderDataSource",
    "Your own Python": "bbnode.IterableDataSource",
}


@pytest.mark.parametrize("title", [title for title, found in PROGRAMS.items() if found])
def test_the_programs_print_what_the_page_says(title, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(iterable, "_provided", {})
    for program, printed in PROGRAMS[title]:
        exec(compile(program, f"docs/data.md: {title}", "exec"), {})
        assert capsys.readouterr().out == printed


def test_every_program_of_the_page_is_run() -> None:
    assert sum(map(len, PROGRAMS.values())) == PAGE.count("```python") >= 9


@pytest.mark.parametrize("title", SOURCES)
def test_settings_are_those_of_the_source(title: str) -> None:
    (block,) = re.findall(r"```toml\n(.*?)```", PARTS[title], re.DOTALL)
    cls = component_class(SOURCES[title])
    cls(cls.Config(**tomllib.loads(block)["slots"]["data"]))
