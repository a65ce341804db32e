"""A start that fails says why where whoever runs services looks: at the journal, and the status."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from bbnode.cli import exits, output
from tests.patience import PATIENCE_S

ARTIFACT = '[artifact]\npath = "missing.onnx"\ntargets = ["server"]\n'


def as_service(folder: Path, *words: str) -> tuple[int, list[str], list[str]]:
    """Exit code, lines of the journal and notifications of a command that systemd starts."""
    log = folder / "journal"
    address = str(folder / "notify")
    with (
        log.open("wb") as stream,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as supervisor,
    ):
        supervisor.bind(address)
        supervisor.setblocking(False)
        seen = os.fstat(stream.fileno())
        done = subprocess.run(
            [sys.executable, "-m", "bbnode", *words],
            env=os.environ
            | {"JOURNAL_STREAM": f"{seen.st_dev}:{seen.st_ino}", "NOTIFY_SOCKET": address},
            stderr=stream,
            stdout=subprocess.DEVNULL,
            timeout=PATIENCE_S,
            check=False,
        )
        heard: list[str] = []
        try:
            while True:
                heard.append(supervisor.recv(1 << 16).decode())
        except BlockingIOError:
            pass
    return done.returncode, log.read_text("utf-8").splitlines(), heard


@pytest.mark.parametrize(
    ("text", "code", "why"),
    [
        ("[node]\nnmae = 1\n", exits.USAGE, "nmae"),
        ("[", exits.USAGE, "node.toml"),
        (ARTIFACT, exits.USAGE, "missing.onnx"),
        (None, exits.USAGE, "no such file"),
    ],
)
def test_the_reason_is_an_error_and_the_status(
    tmp_path: Path, text: str | None, code: int, why: str
) -> None:
    file = tmp_path / "node.toml"
    if text is not None:
        file.write_text(text)
    done, lines, heard = as_service(tmp_path, "run", "--config", str(file))
    assert done == code
    (line,) = [each for each in lines if "error: " in each]
    assert line.startswith("<3>error: ")
    assert why in line
    assert heard[-1].startswith("STATUS=failed: ")
    assert why in heard[-1]


def test_a_wrong_option_is_an_error_too(tmp_path: Path) -> None:
    code, lines, _ = as_service(tmp_path, "run", "--confg", "x")
    assert code == exits.USAGE
    assert lines[0].startswith("<3>error: ")


def test_no_line_of_a_traceback_is_information(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "journal"
    with log.open("w") as stream:
        seen = os.fstat(stream.fileno())
        monkeypatch.setenv("JOURNAL_STREAM", f"{seen.st_dev}:{seen.st_ino}")
        monkeypatch.setattr(sys, "stderr", stream)
        try:
            raise ValueError("a fault\nof ours")
        except ValueError as error:
            output.show_uncaught(type(error), error, error.__traceback__)
        output.error("what", "  more")
    lines = log.read_text("utf-8").splitlines()
    assert len(lines) > 4
    assert all(line.startswith("<3>") for line in lines)


def test_elsewhere_nothing_stands_before_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # Somebody's terminal below a service: the variable is of another stream.
    monkeypatch.setenv("JOURNAL_STREAM", "1:2")
    output.error("what", "  more")
    assert capsys.readouterr().err == "error: what\n  more\n"
