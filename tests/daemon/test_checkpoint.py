"""A checkpoint is used whole or not at all."""

from __future__ import annotations

import errno
import functools
import hashlib
import os
import tempfile
from dataclasses import replace
from pathlib import Path

import msgpack
import pytest

from bbnode.daemon.paths import StorageError
from bbnode.daemon.state import checkpoint
from bbnode.daemon.state.checkpoint import Checkpoint, UnsentEnvelope
from bbnode.ir.peer import PeerId

SHA = "a" * 64


def saved(number: int) -> Checkpoint:
    return Checkpoint(artifact_sha256=SHA, node=bytes([number]) * 50, rounds_done={"s": number})


def _read(state_dir: Path, sha256: str) -> Checkpoint | None:
    return next(checkpoint.usable(state_dir, sha256), None)


def test_what_was_written_is_read(tmp_path: Path) -> None:
    checkpoint.write(tmp_path, saved(1))
    assert _read(tmp_path, SHA) == saved(1)
    assert checkpoint.checkpoint_file(tmp_path).stat().st_mode & 0o777 == 0o600


def test_there_is_none_at_first(tmp_path: Path) -> None:
    assert _read(tmp_path, SHA) is None


def test_one_of_another_artifact_is_refused(tmp_path: Path) -> None:
    checkpoint.write(tmp_path, saved(1))
    assert _read(tmp_path, "b" * 64) is None


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
    assert _read(tmp_path, SHA) == saved(1)
    assert "refused" in caplog.text


def test_a_newer_format_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "FORMAT_VERSION", checkpoint.FORMAT_VERSION + 1)
    checkpoint.write(tmp_path, saved(1))
    monkeypatch.undo()
    assert _read(tmp_path, SHA) is None


def sealed(body: bytes) -> bytes:
    return b"BBNODE1\n" + hashlib.sha256(body).digest() + body


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"\xc1", "can't be read"),
        (msgpack.packb([1]), "format None"),
        (msgpack.packb({"version": checkpoint.FORMAT_VERSION}), "artifact_sha256"),
        (
            msgpack.packb(
                {"version": checkpoint.FORMAT_VERSION, "artifact_sha256": SHA, "node": "x"}
            ),
            "'node'",
        ),
        (
            msgpack.packb(
                {
                    "version": checkpoint.FORMAT_VERSION,
                    "artifact_sha256": SHA,
                    "node": b"",
                    "rounds_done": {"s": "x"},
                    "rounds_running": {},
                }
            ),
            "rounds_done",
        ),
    ],
)
def test_a_sealed_file_of_something_else_is_refused(
    tmp_path: Path, body: bytes, says: str, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint.checkpoint_file(tmp_path).write_bytes(sealed(body))
    assert _read(tmp_path, SHA) is None
    assert says in caplog.records[-1].reason  # type: ignore[attr-defined]


def test_cut_at_any_byte_it_gives_way_to_the_one_before(tmp_path: Path) -> None:
    checkpoint.write(tmp_path, saved(1))
    checkpoint.write(tmp_path, saved(2))
    path = checkpoint.checkpoint_file(tmp_path)
    data = path.read_bytes()
    for length in range(len(data)):
        path.write_bytes(data[:length])
        assert _read(tmp_path, SHA) == saved(1), length
    path.write_bytes(data)
    assert list(checkpoint.usable(tmp_path, SHA)) == [saved(2), saved(1)]


def test_a_damaged_one_never_takes_the_place_of_a_good_one(tmp_path: Path) -> None:
    checkpoint.write(tmp_path, saved(1))
    checkpoint.write(tmp_path, saved(2))
    checkpoint.checkpoint_file(tmp_path).write_bytes(b"torn")
    checkpoint.write(tmp_path, saved(3))
    assert list(checkpoint.usable(tmp_path, SHA)) == [saved(3), saved(1)]


@pytest.mark.parametrize("number", range(12))
def test_a_failing_disk_leaves_a_good_one(
    tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system call number `number` of a write fails, and all that come after it."""
    checkpoint.write(tmp_path, saved(1))
    checkpoint.write(tmp_path, saved(2))
    calls = 0

    def failing(call):
        @functools.wraps(call)
        def wrapper(*arguments, **more):
            nonlocal calls
            calls += 1
            if calls > number:
                raise OSError(errno.ENOSPC, "No space left on device")
            return call(*arguments, **more)

        return wrapper

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", failing(os.fsync))
        patch.setattr(os, "fchmod", failing(os.fchmod))
        patch.setattr(Path, "replace", failing(Path.replace))
        patch.setattr(tempfile, "mkstemp", failing(tempfile.mkstemp))
        said = ""
        try:
            checkpoint.write(tmp_path, saved(3))
        except StorageError as error:
            said = str(error)
    assert ("No space left" in said) is (number < calls)
    found = list(checkpoint.usable(tmp_path, SHA))
    assert found in ([saved(2), saved(1)], [saved(2)], [saved(3), saved(2)])
    checkpoint.write(tmp_path, saved(4))
    assert _read(tmp_path, SHA) == saved(4)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoint", "checkpoint.previous"]


def test_what_nobody_acknowledged_is_kept(tmp_path: Path) -> None:
    peer = PeerId.from_seed("a")
    unsent = (
        UnsentEnvelope(peer=peer, tag=7, data=b"x" * 9),
        UnsentEnvelope(peer=peer, tag=8, data=None),
    )
    made = replace(saved(1), unsent=unsent)
    checkpoint.write(tmp_path, made)
    assert _read(tmp_path, SHA) == made


OF_A_RELEASE = {
    "version": checkpoint.FORMAT_VERSION,
    "artifact_sha256": SHA,
    "node": b"n",
    "rounds_done": {},
    "rounds_running": {},
}


def test_one_of_an_earlier_release_has_none(tmp_path: Path) -> None:
    checkpoint.checkpoint_file(tmp_path).write_bytes(sealed(msgpack.packb(OF_A_RELEASE)))
    found = _read(tmp_path, SHA)
    assert found is not None
    assert found.unsent == ()


@pytest.mark.parametrize("unsent", [7, [7], [[b"\x00", 1, b""]], [[b"", "1", b""]], [[b"", 1]]])
def test_malformed_envelopes_are_refused(
    tmp_path: Path, unsent: object, caplog: pytest.LogCaptureFixture
) -> None:
    body = msgpack.packb({**OF_A_RELEASE, "unsent": unsent})
    checkpoint.checkpoint_file(tmp_path).write_bytes(sealed(body))
    assert _read(tmp_path, SHA) is None
    assert "'unsent'" in caplog.records[-1].reason  # type: ignore[attr-defined]
