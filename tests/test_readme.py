"""What the README tells a user is what the program does."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from bbnode.cli import exits
from bbnode.cli.main import command_names
from bbnode.daemon.config import sources

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")


def test_every_exit_code_stands_there() -> None:
    rows = re.findall(r"^\| (\d) \| (.+) \|$", README, re.MULTILINE)
    assert {int(code): text for code, text in rows} == exits.MEANINGS


def test_every_command_stands_there() -> None:
    assert set(re.findall(r"^\| `bbnode (\w+)", README, re.MULTILINE)) == set(command_names())


def test_the_example_configuration_is_one(tmp_path: Path) -> None:
    (example,) = re.findall(r"```toml\n(.*?)```", README, re.DOTALL)
    assert tomllib.loads(example)
    file = tmp_path / "node.toml"
    file.write_text(example, encoding="utf-8")
    config = sources.resolve(file, environ={}).config
    assert config.slots == {"data": {"shard": 0}}
    wait = config.invoke[0].wait_for
    assert wait is not None
    assert wait.enough_peers == 3
