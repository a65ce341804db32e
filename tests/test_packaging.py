"""What pyproject.toml promises is there: entry points, version, files."""

from __future__ import annotations

import importlib
import tomllib
from pathlib import Path

import bbnode
from bbnode.components import registry

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_every_component_entry_point_registers_the_type_that_it_names() -> None:
    entries = PROJECT["entry-points"][registry.ENTRY_POINT_GROUP]
    for type_name, module in entries.items():
        importlib.import_module(module)
        cls = registry.component_class(type_name)
        assert (cls.TYPE_NAME, cls.__module__) == (type_name, module)


def test_every_component_that_ships_has_its_entry_point() -> None:
    for file in (ROOT / "bbnode" / "components").glob("*.py"):
        importlib.import_module(f"bbnode.components.{file.stem}")
    entries = PROJECT["entry-points"][registry.ENTRY_POINT_GROUP]
    shipped = {
        name
        for name, cls in registry._REGISTERED.items()
        if cls.__module__.startswith("bbnode.components.")
    }
    assert shipped == set(entries)


def test_the_version_stands_in_two_places_and_is_one() -> None:
    assert PROJECT["version"] == bbnode.__version__
    assert f"## [{bbnode.__version__}]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_scripts_can_be_run() -> None:
    for name in ("scripts/demo", "scripts/test", "scripts/check", "scripts/bench", ".ci/run"):
        file = ROOT / name
        assert file.stat().st_mode & 0o111, name
        assert file.read_text(encoding="utf-8").startswith("#!/usr/bin/env bash\n"), name
