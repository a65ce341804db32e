"""`--stage`: what a text names, with which arguments and where, and what is refused."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bbnode.cli.main import main
from bbnode.cli.stages import StageRefused, parse_stage
from bbnode.compiler import Compiler
from bbnode.compiler.errors import UnknownStage
from bbnode.ir.authors_code import AuthorsCodeFailed


@pytest.mark.parametrize(
    ("text", "arguments", "before", "after"),
    [
        ("a.b:C", {}, None, None),
        (" a.b:C() ", {}, None, None),
        ("a.b:C(x=1, y='z')", {"x": 1, "y": "z"}, None, None),
        ("a.b:C(x=[1, -2.5], y={'k': (True,)})", {"x": [1, -2.5], "y": {"k": (True,)}}, None, None),
        ("a.b:C@before:type_solver", {}, "type_solver", None),
        ("a.b:C(x=1)@after:dead-code.2", {"x": 1}, None, "dead-code.2"),
        ("a.b:C(x='@before:y)')@after:z", {"x": "@before:y)"}, None, "z"),
        ("a.b:C(\n  x=1,\n)", {"x": 1}, None, None),
    ],
)
def test_a_stage_is_a_class_with_arguments_and_a_place(
    text: str, arguments: dict[str, Any], before: str | None, after: str | None
) -> None:
    stage = parse_stage(text)
    assert stage.name == "a.b:C"
    assert (stage.arguments, stage.before, stage.after) == (arguments, before, after)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "does not name a stage.*begins with no name"),
        ("a.b:", "does not name a stage.*no class stands behind the colon"),
        ("a/b.py:C", "does not name a stage.*begins with a file"),
        ("a.b:C@type_solver", "does not name a stage.*'@type_solver' is no place"),
        ("a.b:C@before:", "does not name a stage.*is no place"),
        ("a.b:C@before:x@after:y", "does not name a stage.*@before:PASS or @after:PASS, once"),
        ("a.b:C(" + "(" * 20_000, "does not name a stage.*characters; at most"),
        ("a.b:C(x=1", "does not name a stage.*no closing parenthesis"),
        ("a.b:C d", "does not name a stage.*'d' is too much"),
        ("a.b:C(x=1) d", "does not name a stage.*'d' is too much"),
        ("a.b:C(x=)", "cannot be read as arguments"),
        ("a.b:C(x=1, x=2)", "given twice"),
        ("a.b:C(x=" + "[" * 900 + "]" * 900 + ")", "cannot be read as arguments"),
        ("a.b:C()()", "cannot be read as arguments"),
        ("a.b:C()\n+ f(x=1)", "cannot be read as arguments"),
        ("a.b:C(1)", "by its name"),
        ("a.b:C(**{'x': 1})", "by its name"),
        ("a.b:C(*[1])", "by its name"),
        ("a.b:C(x=__import__('os'))", "has to be a literal"),
        ("a.b:C(x=y)", "has to be a literal"),
        ("a.b:C(x=[i for i in 'ab'])", "has to be a literal"),
        ("a.b:C(x=f'{1}')", "has to be a literal"),
    ],
)
def test_what_names_no_stage_is_refused(text: str, said: str) -> None:
    with pytest.raises(StageRefused, match=said):
        parse_stage(text)


@given(text=st.text(max_size=60) | st.text("ab.:C()=@,'[]1 \\\n", max_size=40).map("a:C".__add__))
def test_any_text_is_a_stage_or_refused(text: str) -> None:
    try:
        assert parse_stage(text).name
    except StageRefused as error:
        assert str(error)  # noqa: PT017 - both ends are right


@pytest.fixture
def passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module with one pass, in the current directory."""
    (tmp_path / "own_passes_of_a_test.py").write_text(
        "from bbnode.compiler import Pass\n"
        "class Mark(Pass):\n"
        "    def __init__(self, *, text, times=1):\n"
        "        self.made = text * times\n"
        "    def run(self, unit, options):\n"
        "        unit.program.metadata['example.mark'] = self.made\n"
    )
    (tmp_path / "broken_passes_of_a_test.py").write_text("1 / 0\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [str(tmp_path), *sys.path])
    return "own_passes_of_a_test"


def test_a_stage_is_made_of_its_class(passes: str) -> None:
    stage = parse_stage(f"{passes}:Mark(text='a', times=2)@after:type_solver")
    made = stage.add_to(Compiler())
    at = made.pass_names.index("mark")
    assert made.pass_names[at - 1] == "type_solver"
    assert made.passes[at].made == "aa"


def test_the_command_compiles_with_a_stage(passes: str, capsys: pytest.CaptureFixture[str]) -> None:
    program = "bbnode.examples.federated_digits:FederatedRound"
    stage = f"{passes}:Mark(text='hello')"
    assert main(["compile", program, "-o", "with.onnx", "--stage", stage, "--time"]) == 0
    assert "mark" in capsys.readouterr().out
    assert b"hello" in Path("with.onnx").read_bytes()
    assert main(["compile", program, "--stage", "no_such_pass@before:validate"]) == 2
    said = capsys.readouterr().err
    assert "no_such_pass" in said
    assert not Path("artifact.onnx").exists()


def test_a_place_that_is_not_there_is_said(passes: str) -> None:
    with pytest.raises(UnknownStage, match="did you mean 'validate'"):
        parse_stage(f"{passes}:Mark(text='a')@before:valdate").add_to(Compiler())


def test_what_is_no_pass_is_said(passes: str) -> None:
    with pytest.raises(UnknownStage, match=r"derives from bbnode\.compiler\.Pass"):
        parse_stage("pathlib:PurePath").add_to(Compiler())


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("own_passes_of_a_test:Mar", "did you mean 'Mark'"),
        ("own_passes_of_a_test:Mark", "it needs text"),
        ("own_passes_of_a_test:Mark(text='a', tims=1)", "did you mean 'times'"),
        ("no_such_package.x:Mark", "can't be imported: there is no module"),
        ("broken_passes_of_a_test:Mark", "can't be imported: ZeroDivisionError.*of_a_test.py:1"),
    ],
)
def test_a_class_that_cannot_be_made_is_said(passes: str, text: str, said: str) -> None:
    assert passes
    with pytest.raises((StageRefused, AuthorsCodeFailed), match=said):
        parse_stage(text).add_to(Compiler())
