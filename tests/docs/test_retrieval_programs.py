"""The code of "Programs" in docs/retrieval.md runs."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = (Path(__file__).parents[2] / "docs" / "retrieval.md").read_text(encoding="utf-8")


def test_the_blocks_run() -> None:
    section = PAGE.partition("\n## Programs\n")[2].partition("\n## ")[0]
    blocks = re.findall(r"^```python\n(.*?)^```$", section, re.DOTALL | re.MULTILINE)
    assert len(blocks) == 4
    code = compile("\n".join(blocks), "retrieval.md", "exec", dont_inherit=True)
    exec(code, {"__name__": "page"})
