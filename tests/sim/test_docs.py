"""The code of docs/simulator.md runs as it stands there."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).parent.parent.parent / "docs" / "simulator.md"


def test_the_page_runs_from_top_to_bottom() -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == 6
    scope: dict[str, object] = {"__name__": "docs"}
    exec(compile("\n".join(blocks), str(PAGE), "exec"), scope)
    assert scope["network"].now_ns == 3_000_000_000
