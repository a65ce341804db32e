"""The comparison of the page with its probes: what it has to find."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.specification import rows
from tests.specification.rows import Rows

PAGE = f"""# Differences

## Engine

| the specification | bbnode | why |
|---|---|---|
| `Gate` waits | it does not | reasons |
| {rows.NOTHING} | `Collect` | reasons |

## Prose

No table.
"""


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rows:
    path = tmp_path / "page.md"
    path.write_text(PAGE, "utf-8")
    monkeypatch.setattr(rows, "PAGE", path)
    made = Rows("Engine")
    made.probe("`Gate`")(test_a_page_and_its_probes_agree)
    return made


def test_a_page_and_its_probes_agree(engine: Rows) -> None:
    assert rows.sections() == {"Engine": ["`Gate` waits | it does not | reasons",
                                          "`Collect` | reasons"]}  # fmt: skip
    engine.probe("`Collect`")(test_a_page_and_its_probes_agree)
    engine.check()


def test_a_row_without_a_probe_is_found(engine: Rows) -> None:
    with pytest.raises(AssertionError):
        engine.check()


@pytest.mark.parametrize("second", ["`Gat", "`Timer`"])
def test_a_probe_without_a_row_of_its_own_is_found(engine: Rows, second: str) -> None:
    engine.probe("`Collect`")(test_a_page_and_its_probes_agree)
    engine.probe(second)(test_a_page_and_its_probes_agree)
    with pytest.raises(AssertionError):
        engine.check()


def test_a_probe_is_a_test_and_the_only_one_of_its_row(engine: Rows) -> None:
    for begins, probe in (("`Gate`", test_a_page_and_its_probes_agree), ("`Other`", print)):
        with pytest.raises(AssertionError):
            engine.probe(begins)(probe)


def test_a_section_without_its_table_is_found(engine: Rows) -> None:
    with pytest.raises(KeyError):
        Rows("Prose").check()
