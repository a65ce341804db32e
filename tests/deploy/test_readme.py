"""deploy/README.md: its commands are the CLI's, its files and variables are there."""

from __future__ import annotations

import re

import pytest

from bbnode.daemon.config import keys, sources
from tests.deploy import cli
from tests.deploy.compose import DEPLOY, FILE

TEXT = (DEPLOY / "README.md").read_text("utf-8")
CALLS = cli.calls_in(TEXT)


def test_there_are_commands() -> None:
    assert {words[0] for words in CALLS} >= {
        *("compile", "init", "wait", "status", "network", "invite", "join", "snapshot"),
        *("doctor", "peers", "bugreport", "logs", "id"),
    }


@pytest.mark.parametrize("words", CALLS, ids=" ".join)
def test_every_command_is_one_of_the_cli(words: list[str]) -> None:
    cli.check(words)


def test_files_are_there() -> None:
    named = set(re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", TEXT))
    named = {name for name in named if not name.startswith("https://")}
    named |= {f"../{f}" for f in re.findall(r"(?<![\w/])deploy/[\w/@.-]+\w", TEXT)}
    assert len(named) > 8
    for name in named:
        assert (DEPLOY / name).exists(), name


def test_the_variables_are_those_of_the_testbed() -> None:
    table = TEXT.partition("## The testbed")[2]
    told = set(re.findall(r"`([A-Z_]{4,})`", table))
    assert told == set(re.findall(r"\$\{(\w+):-", FILE.read_text("utf-8")))
    for name, default in re.findall(r"\$\{(\w+):-([^}]+)\}", FILE.read_text("utf-8")):
        row = next(line for line in table.splitlines() if f"`{name}`" in line)
        assert default in row, name


def test_keys_of_the_configuration_exist() -> None:
    known = {".".join(path) for path, _ in keys()}
    told = set(re.findall(r"`((?:node|network|access|control)\.[a-z_]+)[`,]", TEXT))
    files = {"node.toml", "network.id", "control.sock", "control.token"}
    assert len(told - files) >= 5
    assert told - files <= known


def test_the_first_node_is_a_configuration(tmp_path) -> None:
    (lines,) = re.findall(r"printf '([^']*dataset[^']*)'", TEXT)
    file = tmp_path / "server.toml"
    start = '[artifact]\npath = "artifact.onnx"\ntargets = ["server"]\n'
    file.write_text(start + lines.replace("\\n", "\n"))
    config = sources.resolve(file, environ={}).config
    assert config.slots == {"data": {"dataset": "digits", "split": "test"}}
