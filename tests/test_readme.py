"""The README, and the pages that it leads to, say what the program does."""

from __future__ import annotations

import re
import runpy
import shlex
import tomllib
from pathlib import Path

import onnx
import pytest

from bbnode import templates
from bbnode.cli import exits
from bbnode.cli.main import command_names, main
from bbnode.compiler.driver.targets import target_names
from bbnode.components import values
from bbnode.daemon.artifacts.build import compile_module
from bbnode.daemon.config import sources
from bbnode.daemon.lifecycle import assembly
from bbnode.sim import Network

ROOT = Path(__file__).parent.parent
README, COMMANDS, NODES, INDEX = (
    (ROOT / name).read_text(encoding="utf-8")
    for name in ("README.md", "docs/commands.md", "docs/nodes.md", "docs/index.md")
)


def test_the_program_is_one(tmp_path: Path) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    file = tmp_path / "readme_program.py"
    file.write_text(program, encoding="utf-8")
    compiled = compile_module(f"{file}:Training", {})
    assert {each.partition("#")[0] for each in target_names(compiled)} == {"server", "client"}


def test_the_index_leads_to_every_page() -> None:
    linked = set(re.findall(r"\]\(([^)#]+)", INDEX))
    pages = {path.name for path in (ROOT / "docs").glob("*.md")} - {"index.md"}
    assert pages <= linked


def test_every_exit_code_stands_there() -> None:
    rows = re.findall(r"^\| (\d) \| (.+) \|$", COMMANDS, re.MULTILINE)
    assert {int(code): text for code, text in rows} == exits.MEANINGS


def test_every_command_stands_there() -> None:
    assert set(re.findall(r"^\| `bbnode (\w+)", COMMANDS, re.MULTILINE)) == set(command_names())


def test_two_nodes_by_hand_make_a_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The commands write two configurations; what these say makes a round, in the simulator."""
    templates.write_project(tmp_path / "my-training", "federated")
    monkeypatch.chdir(tmp_path / "my-training")
    monkeypatch.syspath_prepend(str(tmp_path / "my-training"))
    runpy.run_module("my_training.data", run_name="__main__")
    (block,) = re.findall(r"## Two nodes by hand.*?```sh\n(.*?)```", NODES, re.DOTALL)
    said = block.replace("\\\n", " ")
    invoked: list[str] = []
    for line in said.splitlines():
        for inner in re.findall(r"\$\((bbnode .*?)\)", line):
            assert main(shlex.split(inner)[1:]) == 0
            line = line.replace(f"$({inner})", capsys.readouterr().out.strip())
        program, *words = shlex.split(line, comments=True)
        if program == "bbnode" and words[0] in {"compile", "inspect", "init"}:
            assert main(words) == 0
            capsys.readouterr()
        elif program == "bbnode" and words[0] == "invoke":
            invoked = words
    network = Network(seed=0)
    for name in ("server", "client"):
        resolved = sources.resolve(Path(name, "node.toml"), environ={})
        config = resolved.config
        assert (config.network.bootstrap == []) == (name == "server")
        model = onnx.load("artifact.onnx")
        settings = assembly.slot_settings(resolved, assembly.find_artifact(resolved))
        network.add(name, model, config.artifact.targets, config=settings)
    server = network["server"]
    inputs = {"tick": values.TRIGGER}
    assert invoked[:4] == ["invoke", "server", "-i", "tick=trigger"]
    execution = server.invoke("server", inputs)
    network.run_until_idle()
    assert [node.failures() for node in network.nodes] == [[], []]
    assert set(server.outputs(execution)) == {"loss", "accuracy", "stats", "model"}


def test_the_example_configuration_is_one(tmp_path: Path) -> None:
    (example,) = re.findall(r"```toml\n(.*?)```", NODES, re.DOTALL)
    assert tomllib.loads(example)
    file = tmp_path / "node.toml"
    file.write_text(example, encoding="utf-8")
    config = sources.resolve(file, environ={}).config
    assert config.slots == {"data": {"shard": 0}}
    wait = config.invoke[0].wait_for
    assert wait is not None
    assert wait.enough_peers == 3
