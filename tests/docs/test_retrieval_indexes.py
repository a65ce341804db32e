"""The blocks of docs/retrieval.md about indexes, filters and access do what they say."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from bbnode.components import FlatIndex
from bbnode.components.indexes.filters import conditions
from bbnode.components.registry import build_config

PAGE = (Path(__file__).parents[2] / "docs" / "retrieval.md").read_text(encoding="utf-8")


def blocks(language: str, about: str) -> list[str]:
    found = re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)
    return [block for block in found if about in block]


def test_the_collection_is_kept_and_searched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (block,) = blocks("python", "Collection.open(")
    exec(compile(block, "docs/retrieval.md", "exec"), {})
    assert (tmp_path / "molecules" / "index.json").is_file()


def test_the_filter_is_one() -> None:
    (block,) = blocks("python", '"kind !="')
    names: dict[str, dict[str, str | int]] = {}
    exec(compile(block, "docs/retrieval.md", "exec"), names)
    assert len(conditions(names["where"])) == 5


def test_the_settings_of_access_are_taken_and_all_are_told_of() -> None:
    (block,) = blocks("toml", "visible_to")
    settings = tomllib.loads(block)["slots"]["index"]
    made = FlatIndex(build_config(FlatIndex, "index", b"", settings))
    assert made.config.visible_to["asker"] == {"year <": 2020}
    section = PAGE.split("## Who may search what")[1]
    for name in (*settings, "tell_centroids"):
        assert f"`{name}`" in section or name == "path"
