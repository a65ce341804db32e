"""What the README shows of the simulator runs as it stands there."""

from __future__ import annotations

import re
from pathlib import Path

from tests.sim import programs

README = (Path(__file__).parent.parent.parent / "README.md").read_text(encoding="utf-8")


def test_the_snippet_runs_and_shows_what_it_says(capsys) -> None:
    (snippet,) = (
        code
        for code in re.findall(r"```python\n(.*?)```", README, re.DOTALL)
        if "bbnode.sim" in code
    )
    scope: dict[str, object] = {"compiled": programs.rounds()}
    exec(compile(snippet, "README.md", "exec"), scope)
    shown = capsys.readouterr().out
    network = scope["network"]
    assert len(scope["server"].outputs(scope["execution"])["answers"].responses) == 4
    assert not network["client-3"].is_up
    assert network.now_ns == 50_000_000
    assert shown.rstrip().endswith(network.trace.digest)
