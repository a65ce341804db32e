"""Which settings an artifact may make, and which name something of the machine."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import msgpack
import pytest

from bbnode.components import local_setting, path_setting
from bbnode.components.contracts import Component
from bbnode.components.registry import (
    ConfigTypeMismatch,
    build_config,
    component_class,
    encode_config,
    known_types,
)
from bbnode.components.settings import (
    LocalSettingRefused,
    local_settings,
    names_files,
    path_settings,
)

PAGE = Path(__file__).parents[2] / "docs" / "components.md"


@dataclass(frozen=True, kw_only=True)
class LakeConfig:
    path: str = path_setting()
    url: str = local_setting(default="")
    cache: Path | None = None
    parts: list[Path] = field(default_factory=list)
    kinds: tuple[str, ...] = path_setting(default=("a", "b"))
    depth: int = 3


class Lake(Component):
    TYPE_NAME: ClassVar[str] = "test.Lake"
    Config: ClassVar[type] = LakeConfig


def built(stored: dict[object, object], own: bool = False, **given: object) -> LakeConfig:
    config: LakeConfig = build_config(Lake, "lake", msgpack.packb(stored), given, own_artifact=own)
    return config


def test_a_component_says_which_settings_name_something_of_the_machine() -> None:
    assert local_settings(LakeConfig) == ("path", "url", "cache", "parts", "kinds")
    assert path_settings(LakeConfig) == ("path", "cache", "parts", "kinds")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("path", "/etc/passwd"),
        ("path", ""),
        ("url", "http://192.0.2.1/"),
        ("cache", "x"),
        ("cache", 5),
        ("parts", ["x"]),
        ("kinds", ["a"]),
        ("kinds", "a"),
    ],
)
def test_an_artifact_does_not_make_them(name: str, value: object) -> None:
    base = {} if name == "path" else {"path": "mine"}
    with pytest.raises(LocalSettingRefused, match=rf"--set slots\.lake\.{name}=") as caught:
        built({name: value}, **base)
    assert str(caught.value).isprintable()
    # What this node gives counts, whatever the artifact says; its own artifacts may say all.
    assert built({"path": "/etc/passwd"}, path="mine").path == "mine"
    assert built({"path": "/data"}, own=True).path == "/data"


def test_what_is_at_its_default_says_nothing() -> None:
    stored = {"url": "", "cache": None, "parts": [], "kinds": ["a", "b"], "depth": 7}
    config = built(stored, path="mine")
    assert (config.depth, config.cache, config.kinds) == (7, None, ("a", "b"))
    # As a compiler stores it.
    raw = encode_config(LakeConfig(path="there", depth=9))
    assert build_config(Lake, "lake", raw, {"path": "mine"}) == LakeConfig(path="mine", depth=9)


@pytest.mark.parametrize(
    "raw",
    [b"\xc1", b"\x93", b"\x01", b"\x91\x92\xa1a\x01", b"\x81\xc4\x01a\x01", b"\x81\x90\x01",
     b"\x91" * 5_000, b"\xa1a", b"\xd9"],
)  # fmt: skip
def test_settings_that_are_no_table_are_refused(raw: bytes) -> None:
    with pytest.raises(ConfigTypeMismatch, match="slot 'lake'"):
        build_config(Lake, "lake", raw, {"path": "x"})


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("/etc/passwd", True),
        ("..", True),
        ("~", True),
        ("C:\\x", True),
        ("id_rsa.pem", True),
        ("file:x", True),
        (["a", {"b": "keys/own"}], True),
        ("softmax_cross_entropy", False),
        ("digits", False),
        ("0.5", False),
        (b"/etc", False),
        (3, False),
        (None, False),
        ([1, [2, "iid"]], False),
    ],
)
def test_what_looks_like_a_path_is_shown(value: object, shown: bool) -> None:
    assert names_files(None, {"x": value}) == (("x",) if shown else ())


def test_a_marked_setting_is_shown_whatever_it_looks_like() -> None:
    assert names_files(LakeConfig, {"path": "x", "depth": 1}) == ("path",)


def test_every_setting_of_ours_that_sounds_like_a_path_is_marked() -> None:
    sounds = re.compile(r"path|file|dir|folder|url|module|command|socket|host")
    for name in known_types():
        config = component_class(name).Config
        for setting in config.__dataclass_fields__:
            assert not sounds.search(setting) or setting in local_settings(config), (name, setting)


def test_the_page_runs() -> None:
    scope: dict[str, object] = {"__name__": "docs"}
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL):
        exec(compile(block, str(PAGE), "exec", dont_inherit=True), scope)
    config = scope["CodebookConfig"]
    assert isinstance(config, type)
    assert local_settings(config) == ("file", "service", "extra")
