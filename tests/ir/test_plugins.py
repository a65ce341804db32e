"""Plugins by entry point: found, loaded late, and broken ones told by their package."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bbnode.ir import plugins
from bbnode.ir.plugins import BrokenPlugin, UnknownPlugin

GROUP = "bbnode.test_plugins"
Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Install a package with one module `<package>_plugin` and entry points into a folder."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def add(package: str, source: str, **entries: str) -> None:
        info = tmp_path / f"{package}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        listed = "".join(f"{name} = {value}\n" for name, value in entries.items())
        (info / "entry_points.txt").write_text(f"[{GROUP}]\n{listed}")
        (tmp_path / f"{package}_plugin.py").write_text(source)
        plugins.rescan()

    yield add
    monkeypatch.undo()
    plugins.rescan()


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
    sys.modules.pop("broken_plugin", None)


def test_two_packages_with_one_name_are_refused(install: Install) -> None:
    install("first", "", same="first_plugin")
    install("second", "", same="second_plugin")
    with pytest.raises(BrokenPlugin, match="first and second"):
        plugins.load(GROUP, "same")
