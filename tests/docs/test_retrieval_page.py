"""docs/retrieval.md: its first section is done as a reader does it, and its programs print."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import bbnode
from bbnode.cli.main import main
from tests.patience import PATIENCE_S

PAGE = (Path(__file__).parents[2] / "docs" / "retrieval.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"(?:^`([\w./-]+)`:\n\n)?^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def section(title: str) -> list[tuple[str, str, str]]:
    """The blocks of a section: file name, if it is one, language and text."""
    (found,) = [each for each in PAGE.split("\n## ") if each.startswith(title)]
    return BLOCK.findall(found)


def test_ten_minutes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    testbed: subprocess.Popen[bytes] | None = None
    searched = []
    try:
        for name, language, text in section("Ten minutes"):
            if name:
                Path(name).write_text(text)
            elif language == "python":
                assert testbed is not None
                stop(testbed)
                exec(compile(text, "retrieval.md", "exec", dont_inherit=True), {"__name__": "page"})
            for line in text.replace("\\\n", " ").splitlines() if language == "sh" else ():
                program, *words = shlex.split(line, comments=True)
                if program == "python":
                    exec(compile(Path(words[0]).read_text(), words[0], "exec"), {"__name__": "x"})
                elif words[0] == "up":
                    testbed = started(words)
                else:
                    assert main(words) == 0
                    if words[1] == "search":
                        searched.append(capsys.readouterr().out)
    finally:
        if testbed is not None:
            stop(testbed)
    alone, together = searched
    assert len(re.findall(r"chess", alone)) == 3
    assert len(re.findall(r"Chess, volume", together)) == 5
    assert "sender" in together
    last = capsys.readouterr().out.splitlines()[-3:]
    assert all(re.fullmatch(r"\d+ 0\.\d+ Chess, volume \d+", line) for line in last), last
    with bbnode.open_index("shards/0") as index:
        assert len(index) == 200  # what was added to the node is in its directory


def started(words: list[str]) -> subprocess.Popen[bytes]:
    """Run the testbed of the page until the asker is connected with its three shards."""
    testbed = subprocess.Popen(
        [sys.executable, "-m", "bbnode", *words],
        env={**os.environ, "PYTHONPATH": str(Path(bbnode.__file__).parents[1])},
        stdout=subprocess.DEVNULL,
    )
    config = Path("up-out/nodes/asker/node.toml")
    ends_s = time.monotonic() + PATIENCE_S
    while not config.exists() and testbed.poll() is None and time.monotonic() < ends_s:
        time.sleep(0.05)
    assert (
        main(["wait", "--ready", "--peers", "3", "--timeout", str(PATIENCE_S), "-c", str(config)])
        == 0
    )
    return testbed


def stop(testbed: subprocess.Popen[bytes]) -> None:
    if testbed.poll() is None:
        testbed.send_signal(signal.SIGINT)
    testbed.wait(PATIENCE_S)


def test_python_prints_what_the_page_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (_, python, code), (_, text, printed) = section("On the command line")
    assert (python, text) == ("python", "text")
    exec(compile(code, "retrieval.md", "exec", dont_inherit=True), {"__name__": "page"})
    assert capsys.readouterr().out == printed
