"""A checkpoint is used whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from bbnode.daemon import checkpoint
from bbnode.daemon.checkpoint import Checkpoint

SHA = "a" * 64


def saved(number: int) -> Checkpoint:
    return Checkpoint(artifact_sha256=SHA, node=bytes([number]) * 50, rounds_done={"s": number})


def test_what_was_written_is_read(tmp_path: Path) -> None:
    checkpoint.write(tmp_path, saved(1))
    assert checkpoint.read(tmp_path, SHA) == saved(1)
    assert checkpoint.checkpoint_file(tmp_path).stat().st_mode & 0o777 == 0o600


def test_there_is_none_at_first(tmp_path: Path) -> None:
    assert checkpoint.read(tmp_path, SHA) is None


def test_one_of_another_artifact_is_refused(tmp_path: Path) -> None:
    checkpoint.write(tmp_path, saved(1))
    assert checkpoint.read(tmp_path, "b" * 64) is None


@pytest.mark.parametrize("damage", ["cut", "flip", "empty", "foreign"])
def test_a_damaged_one_gives_way_to_the_one_before(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint.write(tmp_path, saved(1))
    checkpoint.write(tmp_path, saved(2))
    path = checkpoint.checkpoint_file(tmp_path)
    data = path.read_bytes()
    path.write_bytes(
        {
            "cut": data[:-3],
            "flip": data[:60] + bytes([data[60] ^ 1]) + data[61:],
            "empty": b"",
            "foreign": b"something else altogether, long enough to be one" * 3,
        }[damage]
    )
    assert checkpoint.read(tmp_path, SHA) == saved(1)
    assert "refused" in caplog.text


def test_a_newer_format_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "FORMAT_VERSION", 2)
    checkpoint.write(tmp_path, saved(1))
    monkeypatch.undo()
    assert checkpoint.read(tmp_path, SHA) is None
