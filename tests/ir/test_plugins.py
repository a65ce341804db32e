"""Plugins by entry point: found, loaded late, and broken ones told by their package."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bbnode.ir import plugins
from bbnode.ir.plugins import BrokenPlugin, UnknownPlugin
from tests.plugin_packages import Install, package_folder

GROUP = "bbnode.test_plugins"


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    with package_folder(tmp_path, monkeypatch, GROUP) as add:
        yield add


def test_a_plugin_is_imported_when_it_is_asked_for(install: Install) -> None:
    install("early", "THING = 7\n", thing="early_plugin:THING", whole="early_plugin")
    assert plugins.names(GROUP) == {"thing": "early", "whole": "early"}
    assert "early_plugin" not in sys.modules
    assert plugins.load(GROUP, "thing") == 7
    assert plugins.load(GROUP, "whole") is sys.modules["early_plugin"]


def test_an_unknown_plugin_is_told_with_the_nearest_name(install: Install) -> None:
    install("known", "", median="known_plugin")
    with pytest.raises(UnknownPlugin, match="did you mean 'median'"):
        plugins.load(GROUP, "meidan")
    assert plugins.names("bbnode.no_such_group") == {}


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("import no_such_module_at_all\n", "ModuleNotFoundError: No module named 'no_such"),
        ("1 / 0\n", "ZeroDivisionError: division by zero"),
        ("def (:\n", "SyntaxError"),
        ("", "AttributeError"),  # the object is not there
    ],
)
def test_a_broken_plugin_names_its_package(install: Install, source: str, problem: str) -> None:
    install("broken", source, bad="broken_plugin:THING")
    with pytest.raises(BrokenPlugin, match=f"package broken .*{problem}") as refused:
        plugins.load(GROUP, "bad")
    assert (refused.value.group, refused.value.name, refused.value.package) == (
        GROUP, "bad", "broken",
    )  # fmt: skip


def test_two_packages_with_one_name_are_refused(install: Install) -> None:
    install("first", "", same="first_plugin")
    install("second", "", same="second_plugin")
    with pytest.raises(BrokenPlugin, match="first and second"):
        plugins.load(GROUP, "same")
