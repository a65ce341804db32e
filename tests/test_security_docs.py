"""SECURITY.md and docs/hardening.md: their commands, keys and links are there."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from bbnode.components.backends.ort import OrtBackendConfig
from bbnode.daemon.config import AccessSection, LimitsSection
from tests.deploy import cli

ROOT = Path(__file__).parents[1]
FILES = (ROOT / "SECURITY.md", ROOT / "docs" / "hardening.md")
HARDENING = FILES[1].read_text("utf-8")


@pytest.mark.parametrize("words", cli.calls_in(HARDENING), ids=" ".join)
def test_every_command_is_one_of_the_cli(words: list[str]) -> None:
    cli.check(words)


def test_the_configuration_is_one() -> None:
    example, isolated = re.findall(r"```toml\n(.*?)```", HARDENING, re.DOTALL)
    OrtBackendConfig(**tomllib.loads(isolated)["slots"]["compute"])
    tables = tomllib.loads(example)
    AccessSection.model_validate(tables.pop("access"))
    LimitsSection.model_validate(tables.pop("limits"))
    assert not tables


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_links_and_files_are_there(file: Path) -> None:
    text = file.read_text("utf-8")
    links = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text)
    assert links
    named = [file.parent / link for link in links]
    named += [ROOT / name for name in re.findall(r"`((?:bbnode|tests|docs)/[\w/.]+)`", text)]
    assert [name for name in named if not name.exists()] == []
