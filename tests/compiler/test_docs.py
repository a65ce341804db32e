"""docs/compiler.md: its code runs, and its list of passes is that of the passes."""

from __future__ import annotations

import re
from pathlib import Path

from bbnode.compiler.driver import pipeline
from bbnode.compiler.reference import passes_markdown

PAGE = (Path(__file__).parents[2] / "docs" / "compiler.md").read_text(encoding="utf-8")


def test_the_code_of_the_page_runs() -> None:
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    assert blocks
    exec(compile("\n".join(blocks), "compiler.md", "exec", dont_inherit=True), {"__name__": "page"})


def test_the_list_of_passes_is_current() -> None:
    _, _, rest = PAGE.partition("<!-- printed by `python -m bbnode.compiler.reference` -->\n\n")
    listed, _, _ = rest.partition("\n<!-- end -->")
    assert listed == passes_markdown()


def test_every_pass_lists_the_rules_that_it_establishes() -> None:
    for name, found in pipeline.shipped_passes().items():
        assert "\n1. " in (found.__doc__ or "").replace("    ", ""), name
