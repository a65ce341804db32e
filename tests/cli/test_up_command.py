"""Options of `bbnode up`, and its table in pyproject.toml; nothing is started."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from bbnode.cli import exits
from bbnode.cli.main import main
from bbnode.daemon.testbed import up
from bbnode.daemon.testbed.up import UpOptions

PROGRAM = """
from bbnode.dsl import Module, types


class Alone(Module):
    home = "one"

    def body(self, g):
        g.output("same", g.input("given", types.TENSOR_FLOAT))
"""


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    def call(*args: str) -> tuple[int, str, str]:
        code = main(list(args))
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[UpOptions]:
    """What the command asks for, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    found: list[UpOptions] = []

    def run_up(options: UpOptions) -> int:
        found.append(options)
        return 0

    monkeypatch.setattr(up, "run_up", run_up)
    return found


def project(*lines: str) -> None:
    Path("pyproject.toml").write_text("\n".join(["[tool.bbnode.up]", *lines]))


def test_the_table_gives_defaults_and_the_command_line_wins(
    run: Callable[..., tuple[int, str, str]], asked: list[UpOptions]
) -> None:
    project(
        'program = "one.py"',
        "nodes = { server = 1, client = 3 }",
        'set = { "client.slots.data.path" = "data/{i}.npz", "limits.frames" = 3 }',
        'invoke = "server"',
        "inputs = { x = [1.5] }",
        "args = { a = 1, b = 2 }",
        "times = 7",
        'best = "accuracy"',
        "patience = 5",
        'out = "here"',
    )
    assert run("up")[0] == exits.OK
    assert asked[0] == UpOptions(
        program="one.py",
        args={"a": 1, "b": 2},
        nodes="server=1,client=3",
        settings=["client.slots.data.path=data/{i}.npz", "limits.frames=3"],
        invoke="server",
        inputs={"x": [1.5]},
        times=7,
        rounds={"best": "accuracy", "patience": 5},
        out=Path("here"),
        logs=[],
    )
    code, _, err = run(
        *("up", "two.py", "--nodes", "client=1", "--set", "limits.frames=4", "--arg", "b=3"),
        *("--invoke", "other", "-i", "y=trigger", "--times", "0", "--out", "there", "--keep"),
        *("--best", "loss", "--mode", "min", "--until-ctrl-c", "--logs", "client"),
    )
    assert code == exits.OK, err
    assert asked[1] == UpOptions(
        program="two.py",
        args={"a": 1, "b": 3},
        nodes="client=1",
        settings=[
            *("client.slots.data.path=data/{i}.npz", "limits.frames=3", "limits.frames=4"),
        ],
        invoke="other",
        inputs={"y": "trigger"},
        times=0,
        rounds={"best": "loss", "patience": 5, "mode": "min"},
        runs_on=True,
        out=Path("there"),
        keep=True,
        logs=["client"],
    )


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        (['progam = "x"'], "has no key 'progam'; keys: program"),
        (["program = 3"], "program has to be a str, not 3"),
        (["times = true"], "times has to be a int, not True"),
        (["program = "], "pyproject.toml: Invalid value"),
        (["patience = 3", 'program = "x.py"'], "they go with --best OUTPUT"),
        ([], "say what to run"),
    ],
)
def test_a_table_that_is_wrong_is_one_line(
    run: Callable[..., tuple[int, str, str]],
    asked: list[UpOptions],
    lines: list[str],
    why: str,
) -> None:
    project(*lines)
    code, _, err = run("up")
    assert code == exits.USAGE
    assert why in err
    assert err.count("\n") == 1
    assert not asked


@pytest.mark.parametrize(
    ("arguments", "code", "why"),
    [
        (["alone.py"], exits.USAGE, "one takes given: Tensor.FLOAT"),
        (["alone.py", "--nodes", "two=1", "--until-ctrl-c"], exits.USAGE, "has no class 'two'"),
        (["alone.py", "--invoke", "one", "-i", "given=[1]", "--logs", "x"], exits.USAGE, "--logs"),
        (["alone.py:Alon"], exits.USAGE, "did you mean 'Alone'"),
        (["gone.onnx"], exits.USAGE, "gone.onnx: No such file"),
        (["bad.onnx"], exits.REFUSED, "not an ONNX model"),
        (["wrong.py"], exits.REFUSED, "wrong.py:9"),
        (["alone.py", "--times", "-1"], exits.USAGE, "--times"),
        (["alone.py", "--set", "nonsense", "--until-ctrl-c"], exits.USAGE, "is not KEY=VALUE"),
    ],
)
def test_what_can_not_be_run_is_one_line_and_leaves_nothing(
    run: Callable[..., tuple[int, str, str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    code: int,
    why: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", list(sys.path))
    for name in ("alone", "wrong"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    Path("alone.py").write_text(PROGRAM)
    Path("wrong.py").write_text(PROGRAM.replace("given", ""))
    Path("bad.onnx").write_bytes(b"not a model")
    found, _, err = run("up", *arguments)
    assert (found, why in err) == (code, True), err
    assert err.count("error: ") == 1
    assert not Path("up-out").exists()
