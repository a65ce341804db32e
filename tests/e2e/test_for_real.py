"""docs/for-real.md: its commands, as they stand there, with both machines on this one."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import onnx

from tests.patience import PATIENCE_S

PAGE = (Path(__file__).parents[2] / "docs" / "for-real.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```sh (server|laptop)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


class Machines:
    """Two folders that stand for the machines, and the processes that were started in them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.place = {"server": root / "server", "laptop": root / "laptop"}
        commands = root / "bin"
        for folder in (*self.place.values(), commands):
            folder.mkdir()
        for name, words in (("bbnode", "-m bbnode"), ("python", "")):
            tool = commands / name
            tool.write_text(f'#!/bin/sh\nexec "{sys.executable}" {words} "$@"\n')
            tool.chmod(0o755)
        self.environment = {
            **os.environ,
            "PATH": f"{commands}:{os.environ['PATH']}",
            "PYTHONPATH": str(Path(__file__).parents[2]),
            "HOME": str(root),
            **{
                f"XDG_{kind}_HOME": str(root / kind)
                for kind in ("CACHE", "CONFIG", "DATA", "STATE")
            },
        }

    def run(self, machine: str, text: str) -> str:
        """Run a block in the folder where the one before ended; return what it printed."""
        script = f"{text}\npwd > {self.root / machine}.cwd\njobs -p >> {self.root / 'pids'}\n"
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", script],
            cwd=self.place[machine],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        assert done.returncode == 0, (text, done.stdout, done.stderr)
        self.place[machine] = Path((self.root / f"{machine}.cwd").read_text().strip())
        return done.stdout

    def end(self) -> None:
        """Stop the nodes."""
        pids = self.root / "pids"
        for pid in pids.read_text().split() if pids.exists() else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGTERM)


def test_the_commands_of_the_page_train_a_model_and_bring_it_home(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    machines = Machines(tmp_path)
    # What the page's first block sets, for one machine.
    (first, text), *blocks = BLOCKS
    assert (first, text) == ("server", "export HOST=192.0.2.10 PORT=4001\n")
    machines.environment |= {"HOST": "127.0.0.1", "PORT": port}
    home = [text for text in blocks if "bbnode export" in text[1]]
    assert blocks[-1:] == home
    try:
        for machine, text in blocks[:-1]:
            if "@ticket" in text:
                sent = (machines.place["server"] / "ticket").read_bytes()
                (machines.place["laptop"] / "ticket").write_bytes(sent)
            machines.run(machine, text)
        made = 0
        while made < 3:
            told = machines.run("server", "bbnode rounds --json -c node/node.toml")
            made = len(json.loads(told)["rounds"])
        machines.run(*blocks[-1])
        model = onnx.load(machines.place["server"] / "model.onnx")
        onnx.checker.check_model(model)
    finally:
        machines.end()


def test_every_command_of_the_page_is_run_or_in_the_table() -> None:
    shell = re.findall(r"^```(\w+[^\n]*)\n", PAGE, re.MULTILINE)
    assert set(shell) == {"sh server", "sh laptop"}
    assert len(shell) == len(BLOCKS)
