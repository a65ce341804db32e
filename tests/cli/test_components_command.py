"""`bbnode components`: what is installed, and the settings of one."""

from __future__ import annotations

import dataclasses
import json
import re
from collections import Counter

import pytest

from bbnode.cli.main import main
from bbnode.components import ArrayDataSource, registry
from bbnode.daemon.config.reference import component_settings
from bbnode.ir import plugins


def test_every_setting_of_every_shipped_component_has_a_meaning() -> None:
    silent = [
        f"{name}.{setting.name}"
        for name in registry.known_types()
        if name.startswith("bbnode.")
        for setting in component_settings(registry.component_class(name).Config)
        if not setting.meaning
    ]
    assert not silent


def test_all_of_a_config_is_shown_with_type_default_and_mark() -> None:
    found = {each.name: each for each in component_settings(ArrayDataSource.Config)}
    assert set(found) == {field.name for field in dataclasses.fields(ArrayDataSource.Config)}
    assert found["path"].is_local
    assert found["path"].default is None
    assert found["test_fraction"].default == "0.2"
    assert found["split"].kind.startswith('"all" or "train"')


@pytest.mark.parametrize("name", ["bbnode.ArrayDataSource", "ArrayDataSource"])
def test_one_component_is_shown(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["components", name]) == 0
    shown = capsys.readouterr().out
    assert "bbnode.ArrayDataSource  (DataSource)" in shown
    assert "path = (required)    (text, from the node's own configuration alone)" in shown
    assert main(["components", name, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["schema"] == "bbnode/components/1"
    assert {"name": "path", "required": True, "local": True}.items() <= found["settings"][0].items()


def test_what_it_needs_of_others_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["components", "OnnxModel"]) == 0
    assert "needs a data_source in the slot 'data'" in capsys.readouterr().out


def test_all_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["components", "--json"]) == 0
    found = {each["name"]: each for each in json.loads(capsys.readouterr().out)["components"]}
    assert found["bbnode.FedAvg"]["roles"] == ["Aggregator"]
    assert main(["components"]) == 0
    assert "bbnode.FedAvg" in capsys.readouterr().out


def test_a_broken_package_does_not_hide_the_others(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    known = registry.known_types()
    monkeypatch.setattr(registry, "known_types", lambda: (*known, "broken.Thing"))
    assert main(["components", "--json"]) == 0
    found = {each["name"]: each for each in json.loads(capsys.readouterr().out)["components"]}
    assert found["broken.Thing"]["about"].startswith("can't be used: ")
    assert plugins.names(registry.ENTRY_POINT_GROUP)


def test_a_name_that_nothing_has_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["components", "ArrayDataSorce"]) == 2
    assert "did you mean 'bbnode.ArrayDataSource'" in capsys.readouterr().err


def test_settings_are_in_the_words_of_toml_and_each_has_a_meaning_of_its_own(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in registry.known_types():
        if not name.startswith("bbnode."):
            continue
        settings = list(component_settings(registry.component_class(name).Config))
        meanings = Counter(each.meaning for each in settings)
        assert not [text for text, times in meanings.items() if times > 1], name
        assert main(["components", name]) == 0
        lines = [line for line in capsys.readouterr().out.splitlines() if line[:3] != "   "]
        keys = [line for line in lines if re.match(r"  \w+ = ", line)]
        assert len(keys) == len(settings)
        python = r"\b(tuple|str|int|float|bool|None|Literal|Mapping|dict|True|False)\b|\|"
        assert not [line for line in keys if re.search(python, re.sub(r"'.*?'", "", line))], name
