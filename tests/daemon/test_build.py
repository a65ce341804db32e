from __future__ import annotations

from pathlib import Path

import pytest

from bbnode.daemon.artifacts.build import ModuleNotUsable, load_module


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        ("federated_digits", "package.module:Class"),
        ("sub/prog.py:Double", "'sub.prog:Double'"),
        ("no_such_module:Double", "No module named 'no_such_module'"),
        ("bbnode.examples.quickstart:Nobody", "has no Module class 'Nobody'; it has: "),
    ],
)
def test_what_names_no_class_is_told_how_to(
    spec: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModuleNotUsable, match=why):
        load_module(spec, {})
