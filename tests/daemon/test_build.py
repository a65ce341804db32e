from __future__ import annotations

import sys
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
        ("raises:Double", r"can't be imported: KeyError: 'no' \(raises_deeper\.py:2\)"),
        ("misspelt:Double", r"can't be imported: SyntaxError: .*\(misspelt\.py:3\)"),
        ("lacks:Double", r"ModuleNotFoundError: No module named 'nowhere' \(lacks\.py:1\)"),
        ("fine:Doubl", "has no Module class 'Doubl'; did you mean 'Double'"),
    ],
)
def test_what_names_no_class_is_told_how_to(
    spec: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "raises.py").write_text("import raises_deeper\n")
    (tmp_path / "raises_deeper.py").write_text("\n{}['no']\n")
    (tmp_path / "misspelt.py").write_text("\n\nclas Double: pass\n")
    (tmp_path / "lacks.py").write_text("import nowhere\n")
    (tmp_path / "fine.py").write_text("from bbnode.dsl import Module\nclass Double(Module): pass\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [str(tmp_path), *sys.path])
    for name in ("raises", "raises_deeper", "misspelt", "lacks", "fine"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(ModuleNotUsable, match=why):
        load_module(spec, {})
