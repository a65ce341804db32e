"""docs/own-model.md: its files train, and its commands are what `bbnode` takes.

Rule: a section with files is a task. Its scripts run; its program is compiled and trained on the
simulator from the files that the scripts wrote, with the settings that the page gives to `bbnode
up`. The nodes of `bbnode up` itself are processes, which the tests of the testbed start.
"""

from __future__ import annotations

import re
import runpy
import shlex
import sys
from pathlib import Path
from typing import Any

import onnxruntime
import pytest

from bbnode.cli.commands import up
from bbnode.cli.main import main
from bbnode.components import values
from bbnode.daemon.artifacts.build import compile_module
from bbnode.daemon.testbed.plan import AskedRounds, LocalPlan, node_config
from bbnode.sim import Network

PAGE = (Path(__file__).parents[2] / "docs" / "own-model.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"(?:^`([\w./-]+)`:\n\n)?^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class Task:
    """The blocks of a section: its files, its shell commands, and what is run at the end."""

    def __init__(self, section: str) -> None:
        self.files: dict[str, str] = {}
        self.commands: list[list[str]] = []
        self.use: list[str] = []
        for name, language, text in BLOCK.findall(section):
            if name:
                self.files[name] = text
            elif language == "sh":
                lines = text.replace("\\\n", " ").splitlines()
                self.commands += [shlex.split(line, comments=True) for line in lines if line]
            elif language == "python":
                self.use.append(text)


TASKS = {
    section.partition(":")[0]: Task(section)
    for section in PAGE.split("\n## ")[1:]
    if "`program.py`:" in section
}


def test_there_are_the_three_tasks() -> None:
    assert list(TASKS) == ["Numbers", "Images", "Text"]


@pytest.mark.parametrize("title", list(TASKS))
def test_a_task_learns(title: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = TASKS[title]
    if title == "Images":
        pytest.importorskip("PIL")
    if title == "Numbers":
        pytest.importorskip("pyarrow")
    monkeypatch.chdir(tmp_path)
    # Each task has a module `program`, in a folder of its own that `up` adds to the path.
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "program", raising=False)
    for name, text in task.files.items():
        (tmp_path / name).write_text(text)
    plan = run_commands(task, monkeypatch)
    asked = plan.invocation
    assert isinstance(asked, AskedRounds)
    assert asked.times >= 10

    artifact = compile_module("program.py", {})
    network = Network(seed=0)
    for name, node in plan.nodes.items():
        slots: dict[str, Any] = node_config(node, plan).slots
        network.add(name, artifact, node.group.classes, config=slots)
    (server,) = (node for node in network.nodes if "server" in node.classes)
    losses = []
    for _ in range(8):
        execution = server.invoke("server", {"tick": values.TRIGGER})
        network.run_until_idle()
        losses.append(float(server.outputs(execution)["loss"]))
    assert losses[-1] < 0.8 * losses[0]

    trained = server.component("global").export()
    (tmp_path / "trained.onnx").write_bytes(trained.SerializeToString())
    onnxruntime.InferenceSession(tmp_path / "trained.onnx")
    for code in task.use:
        exec(compile(code, "own-model.md", "exec", dont_inherit=True), {"__name__": "page"})


def run_commands(task: Task, monkeypatch: pytest.MonkeyPatch) -> LocalPlan:
    """Run the scripts; let `bbnode up` work out its plan; look whether `export` has its options."""
    plans: list[LocalPlan] = []

    def planned(plan: LocalPlan, *_: object, **__: object) -> int:
        plans.append(plan)
        return 0

    monkeypatch.setattr("bbnode.daemon.testbed.up.run_testbed", planned)
    for program, *words in task.commands:
        if program == "python":
            runpy.run_path(words[0], run_name="__main__")
        elif words[0] == "up":
            assert main(words) == 0
        else:
            assert words[0] == "export"
            assert main(words) in {1, 2, 3}  # there is no node: words that it lacks are refused too
            assert main([*words, "--help"]) == 0
    (plan,) = plans
    assert up.PROJECT.name == "pyproject.toml"
    return plan
