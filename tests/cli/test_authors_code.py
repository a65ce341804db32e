"""What a program's own code raises: its frames, exit 5; everything with --traceback."""

from __future__ import annotations

from pathlib import Path

import pytest

from bbnode.cli.main import main
from bbnode.daemon.artifacts.build import load_module, record
from bbnode.dsl import BadArgument
from bbnode.ir.authors_code import AuthorsCodeFailed

PROGRAM = """
from bbnode.components import OrtBackend
from bbnode.dsl import BackendSlot, Module, types


def helper(table):
    return table["no"]


class InBody(Module):
    def body(self, g):
        helper({})


class InInit(Module):
    def __init__(self):
        raise ValueError("two\\nlines")


class InBindings(Module):
    def body(self, g):
        g.output("y", g.input("x", types.TENSOR_FLOAT))

    def bindings(self):
        return {}["no"]


class Uses(Module):
    code = "pass"

    def body(self, g):
        x = g.input("x", types.TENSOR_FLOAT)
        import numpy as np
        exec(compile(self.code, __file__, "exec"), {"y": x, "np": np})
"""


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    name = f"p_{abs(hash(str(tmp_path)))}.py"
    (tmp_path / name).write_text(PROGRAM)
    return name


@pytest.mark.parametrize(
    ("cls", "first", "frames"),
    [
        (
            "InBody",
            "the Module InBody: KeyError: 'no'",
            ["in body: helper({})", "in helper: return"],
        ),
        ("InInit", "ValueError: two (", ["in __init__: raise ValueError"]),
        ("InBindings", "the bindings() of InBindings: KeyError", ["in bindings: return {}"]),
    ],
)
def test_the_authors_own_frames_are_shown_and_the_program_is_at_fault(
    program: str, capsys: pytest.CaptureFixture[str], cls: str, first: str, frames: list[str]
) -> None:
    assert main(["compile", f"{program}:{cls}"]) == 5
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("error: ")
    assert first in lines[0]
    for line, frame in zip(lines[1:], frames, strict=False):
        assert program in line
        assert frame in line
    assert len(lines) == len(frames) + 2
    assert "--traceback compile" in lines[-1]
    with pytest.raises(AuthorsCodeFailed):
        main(["--traceback", "compile", f"{program}:{cls}"])


@pytest.mark.parametrize(
    "code",
    [
        *("y > 3", "bool(y)", "y and y", "not y", "3 in y", "len(y)", "list(y)", "f'{y:.2f}'"),
        *("float(y)", "int(y)", "range(y)", "np.mean(y)", "np.ones(3) + y", "y[0]", "sum(y)"),
        *("max(y, y)", "round(y)", "a, b = y", "[1][y]"),
    ],
)
def test_python_that_reads_a_recorded_value_is_a_typed_error_with_its_line(
    program: str, code: str
) -> None:
    module = load_module(f"{program}:Uses", {})
    module.code = code  # type: ignore[attr-defined]
    with pytest.raises(BadArgument, match=rf"Uses \({program}:\d+\): 'x' has|with 'x' while"):
        record(module)


def test_a_recorded_value_can_still_be_printed(program: str) -> None:
    module = load_module(f"{program}:Uses", {})
    module.code = "assert 'x' in f'{y}' and y == y and {y: 1}"  # type: ignore[attr-defined]
    record(module)
