"""`bbnode verify`: each method is what numpy says, and a wrong one is found out."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import numpy as np
import pytest

from bbnode import verify
from bbnode.cli import main
from bbnode.verify import Compared, MethodCheck, all_checks, check, judged
from bbnode.verify.check import RoundFailed

CHECKS = {each.name: each for each in all_checks()}
DOCS = Path(__file__).parents[2] / "docs" / "methods"


@pytest.mark.parametrize("name", CHECKS)
def test_nodes_compute_what_numpy_says(name: str) -> None:
    outcome = judged(CHECKS[name])
    if outcome.missing:
        pytest.skip(outcome.error)
    assert outcome.error == ""
    assert outcome.ok, (
        f"{outcome.deviation:.1e} off, above {outcome.check.tolerance:g} ({outcome.at})"
    )


# Whose page tells how something is done with a method, or whose result is no number.
WITHOUT = {
    *("README", "combining", "early-stopping", "robust"),
    *("cyclon", "hyparview", "kademlia", "random-walk", "selectors"),
}


def test_each_page_of_a_method_has_a_check() -> None:
    pages = {path.stem for path in DOCS.glob("*.md")} - WITHOUT
    assert {each.page for each in CHECKS.values()} == pages


def test_the_numpy_side_knows_nothing_of_bbnode() -> None:
    source = Path(verify.__file__).with_name("reference.py").read_text("utf-8")
    imported = {
        name.partition(".")[0]
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([node.module] if isinstance(node, ast.ImportFrom) else [
            alias.name for alias in node.names
        ])
        if name
    }  # fmt: skip
    assert imported <= {"__future__", "collections", "dataclasses", "typing", "numpy"}


@pytest.mark.parametrize(
    ("found", "expected", "ok"),
    [
        (1.0, 1.0 + 1e-5, True),
        (1.0, 1.0 + 1e-3, False),
        (1e6, 1e6 + 1.0, True),  # relative above 1
        ([1.0, 2.0], [1.0], False),
        (float("nan"), float("nan"), False),
        (float("inf"), float("inf"), False),
    ],
)
def test_a_deviation_is_over_the_size_of_what_is_expected(
    found: object, expected: object, ok: bool
) -> None:
    assert (Compared(found, expected).deviation <= verify.TOLERANCE) is ok


def _one(found: object, name: str = "Wrong") -> MethodCheck:
    def run(folder: Path):
        if isinstance(found, Exception):
            raise found
        yield Compared(found, np.ones(3), "round 2")

    return MethodCheck(name=name, page="fedavg", about="a check", run=run)


@pytest.mark.parametrize(
    ("found", "verdict", "code"),
    [
        (np.ones(3), "right", 0),
        (np.ones(3) * 1.1, "WRONG", 1),
        (RoundFailed("Train_0: no"), "WRONG", 1),
        (ImportError("No module named 'lightgbm'"), "missing", 0),
    ],
)
def test_the_command_prints_each_and_its_exit_code_says_if_all_are_right(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    found: object,
    verdict: str,
    code: int,
) -> None:
    monkeypatch.setattr(verify, "all_checks", lambda: [_one(found, "First")])
    assert main.main(["verify"]) == code
    shown = capsys.readouterr()
    assert shown.out.startswith(f"{verdict:<7}  First")
    assert main.main(["verify", "first", "--json"]) == code
    told = json.loads(capsys.readouterr().out)
    assert told["schema"] == "bbnode/verify/1"
    assert told["ok"] is (code == 0)
    (one,) = told["checks"]
    assert (one["name"], one["ok"], one["missing"]) == (
        "First", verdict == "right", verdict == "missing",
    )  # fmt: skip


def test_a_method_that_there_is_not_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["verify", "fedmagic"]) == 2
    assert "no method fits 'fedmagic'" in capsys.readouterr().err


def test_a_check_that_compares_nothing_is_no_success() -> None:
    empty = MethodCheck(name="Empty", page="fedavg", about="", run=lambda _: iter(()))
    assert not judged(empty).ok
    assert check.MethodOutcome(check=empty, deviation=0.0, error="x").ok is False


def test_the_page_shows_a_check_of_ones_own() -> None:
    text = DOCS.with_name("verify.md").read_text("utf-8")
    (block,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    exec(compile(block, "docs/verify.md", "exec"), {})
    shown = re.findall(r"^right +(.+?)  ", text, re.MULTILINE)
    assert {*shown} <= {*CHECKS}
    assert len(shown) > 3
