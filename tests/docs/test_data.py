"""The programs of `docs/data.md` run, and print what the page says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from bbnode.components.registry import component_class
from tests.patience import PATIENCE_S

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "data.md").read_text(encoding="utf-8")
PROGRAMS = re.findall(r"^```python\n(.*?)^```\n\n```text\n(.*?)^```", PAGE, re.M | re.S)
SECTIONS = {
    "Lines of text": "bbnode.TextDataSource",
    "Folders of images": "bbnode.ImageFolderDataSource",
    "Your own Python": "bbnode.IterableDataSource",
}


@pytest.mark.parametrize(("program", "printed"), PROGRAMS, ids=range(len(PROGRAMS)))
def test_programs_print_what_the_page_says(program: str, printed: str, tmp_path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=PATIENCE_S,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.stdout, done.stderr) == (printed, "")


@pytest.mark.parametrize("section", SECTIONS)
def test_settings_are_those_of_the_source(section: str) -> None:
    text = PAGE.partition(f"## {section}\n")[2].partition("\n## ")[0]
    (block,) = re.findall(r"```toml\n(.*?)```", text, re.S)
    cls = component_class(SECTIONS[section])
    cls(cls.Config(**tomllib.loads(block)["slots"]["data"]))
