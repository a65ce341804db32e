"""The pages agree with each other and with the code: links, names of modules, pictures."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bbnode.daemon.artifacts.build import compile_module
from bbnode.daemon.artifacts.picture import to_svg

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
LINK = re.compile(r"\]\((?!https?:)([^)#\s]+)(#[^)]*)?\)")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    broken = [
        target
        for target, _ in LINK.findall(page.read_text(encoding="utf-8"))
        if not (page.parent / target).exists()
    ]
    assert not broken


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_are_named_are_there(page: Path) -> None:
    if page.name == "CHANGELOG.md":
        pytest.skip("it tells of the past")
    text = page.read_text(encoding="utf-8")
    named = re.findall(r"`((?:bbnode|tests|docs|deploy|scripts|bench)/[\w./-]+)`", text)
    assert not [name for name in named if not (ROOT / name).exists()]


def test_the_picture_of_the_round_is_current() -> None:
    model = compile_module("bbnode.examples.federated_digits:FederatedRound", {})
    kept = ROOT / "docs" / "pictures" / "federated_round.svg"
    assert kept.read_text(encoding="utf-8") == to_svg(model)
