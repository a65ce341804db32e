"""Programs that ship compile to the bytes of the release before, in which nodes may run them.

The lines of source that artifacts name are left out: they move with any edit of a file. To accept
other bytes on purpose, write the table anew: `python -m tests.programs.test_bytes_stay`.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from bbnode import programs
from bbnode.dsl.core import graph
from tests.programs.files import compiled
from tests.programs.variants import VARIANTS

TABLE = Path(__file__).with_name("digests.json")
ALL = [(name, variant) for name, of in VARIANTS.items() for variant in of]


def digest(program: Any) -> str:
    return hashlib.sha256(compiled(program).SerializeToString(deterministic=True)).hexdigest()


def _key(name: str, variant: str) -> str:
    return f"{name} {variant}".strip()


@pytest.mark.parametrize(("name", "variant"), ALL, ids=lambda each: each or "plain")
def test_a_program_compiles_to_the_bytes_of_before(
    name: str, variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graph, "author_line", lambda: "program.py:1")
    program = getattr(programs, name)(**VARIANTS[name][variant])
    assert digest(program) == json.loads(TABLE.read_text())[_key(name, variant)]


def test_each_program_has_its_bytes_kept() -> None:
    ready = {
        name
        for name in programs.__all__
        if isinstance(each := getattr(programs, name), type)
        and issubclass(each, programs.ReadyProgram)
    }
    assert ready - {"ReadyProgram", "TrainingProgram"} == {*VARIANTS}
    assert {_key(*each) for each in ALL} == {*json.loads(TABLE.read_text())}


if __name__ == "__main__":
    graph.author_line = lambda: "program.py:1"
    found = {_key(n, v): digest(getattr(programs, n)(**VARIANTS[n][v])) for n, v in ALL}
    TABLE.write_text(json.dumps(found, indent=1) + "\n")
