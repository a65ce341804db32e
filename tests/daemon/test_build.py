from __future__ import annotations

import sys
from pathlib import Path

import pytest

from bbnode.daemon.artifacts.build import ModuleNotUsable, argument_fault, load_module
from bbnode.ir.authors_code import AuthorsCodeFailed


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        ("federated_digits", "package.module:Class"),
        ("sub/prog.py:Double", "sub/prog.py: no such file"),
        ("fine.py:Doubl", "has no Module class 'Doubl'; did you mean 'Double'"),
        ("two.py", r"exactly one Module class \(it has: One, Two\).*two.py:Class"),
        ("not-a-name.py", "'not-a-name' is no name of a Python module"),
        ("json.py", r"the name 'json' belongs to another module \(.*__init__.py\)"),
        ("no_such_module:Double", "there is no module 'no_such_module'"),
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
    (tmp_path / "two.py").write_text(
        "import fine\nclass One(fine.Double): pass\nclass Two(One): pass"
    )
    for name in ("not-a-name.py", "json.py"):
        (tmp_path / name).write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [str(tmp_path), *sys.path])
    for name in ("two", "raises", "raises_deeper", "misspelt", "lacks", "fine"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises((ModuleNotUsable, AuthorsCodeFailed), match=why):
        load_module(spec, {})


def test_a_file_is_the_module_that_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "odd folder" / "package_of_one"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("")
    (folder / "helper.py").write_text("from bbnode.dsl import Module\n")
    (folder / "prog.py").write_text("from .helper import Module\nclass Only(Module): pass\n")
    monkeypatch.setattr("sys.path", list(sys.path))
    for spec in (f"{folder}/prog.py", f"{folder}/prog.py:Only"):
        assert type(load_module(spec, {})).__module__ == "package_of_one.prog"
    for name in ("package_of_one", "package_of_one.prog", "package_of_one.helper"):
        monkeypatch.delitem(sys.modules, name)


class _Takes:
    def __init__(self, clients: int, *, rounds: int = 1) -> None: ...


class _TakesAny(_Takes):
    def __init__(self, clients: int, **more: object) -> None: ...


@pytest.mark.parametrize(
    ("cls", "args", "fault"),
    [
        (_Takes, {"clients": 1}, ""),
        (_Takes, {"clients": 1, "round": 2}, "no argument 'round'; did you mean 'rounds'"),
        (_Takes, {"clients": 1, "zzz": 2}, "no argument 'zzz'; it has: clients, rounds"),
        (_Takes, {"rounds": 2}, "it needs clients"),
        (_TakesAny, {"clients": 1, "zzz": 2}, ""),
        (_TakesAny, {"zzz": 2}, "it needs clients"),
    ],
)
def test_arguments_that_do_not_fit_are_named(cls: type, args: dict[str, int], fault: str) -> None:
    told = argument_fault(cls, args)
    assert fault in told if fault else told == ""
