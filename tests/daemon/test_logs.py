"""Log lines: one line an event, whatever the event holds."""

from __future__ import annotations

import io
import json
import logging
import os
import pty
from collections.abc import Iterator
from pathlib import Path

import pytest

from bbnode.daemon.observing import logs
from bbnode.ir.caps import MAX_LOG_VALUE_CHARS


@pytest.fixture(autouse=True)
def _restore() -> Iterator[None]:
    root = logging.getLogger()
    before = root.handlers[:], root.level
    root.handlers = []
    yield
    root.handlers, root.level = before
    logging.captureWarnings(capture=False)


def _logged(form: str, level: str, *args: object, **kwargs: object) -> str:
    stream = io.StringIO()
    logs.configure(level, form, stream=stream)
    logging.getLogger("bbnode.test").info(*args, **kwargs)
    return stream.getvalue()


def test_text_has_time_level_logger_message_and_data() -> None:
    line = _logged("text", "info", "listening on %s", "here", extra={"peer": "a b", "n": 3})
    assert line.endswith('INFO    bbnode.test: listening on here peer="a b" n=3\n')
    assert line[10] == "T"
    assert line[23] == "Z"


def test_json_is_one_object_with_the_data_as_its_own_keys() -> None:
    line = _logged("json", "info", "up", extra={"n": 3, "peer": object, "level_": None})
    entry = json.loads(line)
    assert (entry["level"], entry["logger"], entry["msg"], entry["n"]) == (
        "info",
        "bbnode.test",
        "up",
        3,
    )
    assert entry["peer"] == str(object)


def test_a_peer_cannot_forge_a_second_line() -> None:
    line = _logged("text", "info", "agent %s", "x\nERROR forged", extra={"a": "\x1b[31m\n"})
    assert line.count("\n") == 1
    assert "\x1b" not in line


def test_a_value_has_an_end() -> None:
    line = _logged("text", "info", "x", extra={"value": "y" * 10_000})
    assert len(line) < 2 * MAX_LOG_VALUE_CHARS


def test_lower_levels_are_left_out_and_a_second_call_replaces_the_first() -> None:
    assert _logged("text", "warning", "quiet") == ""
    first = io.StringIO()
    logs.configure("info", "text", stream=first)
    assert _logged("text", "info", "once").count("\n") == 1
    assert first.getvalue() == ""


def test_the_journal_gets_levels_and_no_time() -> None:
    stream = io.StringIO()
    logs.configure("info", "journal", stream=stream)
    try:
        raise ValueError("x")
    except ValueError:
        logging.getLogger("bbnode.test").exception("failed")
    logging.getLogger("bbnode.test").warning("careful")
    lines = stream.getvalue().splitlines()
    assert lines[0] == "<3>bbnode.test: failed"
    assert all(line.startswith("<3>") for line in lines[:-1])
    assert lines[-1] == "<4>bbnode.test: careful"


def test_a_terminal_gets_colours_unless_it_says_no(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = pty.openpty()
    with os.fdopen(ours, "rb", 0) as reader, os.fdopen(theirs, "w", 1) as terminal:
        for no_color in ("", "1"):
            monkeypatch.setenv("NO_COLOR", no_color)
            logs.configure("info", "auto", stream=terminal)
            logging.getLogger("bbnode.test").info("up")
            line = reader.read(1000).decode()
            assert ("\x1b[32mINFO" in line) is (no_color == "")


def test_the_journal_is_known_by_its_stream(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (tmp_path / "out").open("w+") as stream:
        found = os.fstat(stream.fileno())
        monkeypatch.setenv("JOURNAL_STREAM", f"{found.st_dev}:{found.st_ino}")
        logs.configure("info", "auto", stream=stream)
        logging.getLogger("bbnode.test").info("up")
        stream.seek(0)
        assert stream.read() == "<6>bbnode.test: up\n"


def test_a_level_changes_while_running() -> None:
    stream = io.StringIO()
    logs.configure("warning", "text", stream=stream)
    logging.getLogger("bbnode.test").info("before")
    logs.set_level("info")
    logging.getLogger("bbnode.test").info("after")
    assert "before" not in stream.getvalue()
    assert "after" in stream.getvalue()


@pytest.mark.parametrize("form", ["text", "json", "journal"])
def test_a_peers_text_in_a_traceback_does_nothing_to_a_terminal(form: str) -> None:
    stream = io.StringIO()
    logs.configure("info", form, stream=stream)
    try:
        raise ValueError("a peer said \x1b[2J\x9b31m\u202e")
    except ValueError:
        logging.getLogger("bbnode.x").exception("it failed")
    assert stream.getvalue().replace("\n", "").isprintable()
    assert "a peer said" in stream.getvalue()
