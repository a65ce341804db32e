"""State directories: their lock, their socket's path, and files that are whole or not there."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from bbnode.daemon import paths


def test_a_short_socket_stands_in_the_state_directory(tmp_path: Path) -> None:
    assert paths.control_socket(tmp_path) == tmp_path / "control.sock"


def test_a_long_one_moves_to_the_runtime_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/1")
    one, two = Path("/" + "a" * 120), Path("/" + "b" * 120)
    found = paths.control_socket(one)
    assert found.parent == Path("/run/user/1/bbnode")
    assert found == paths.control_socket(one) != paths.control_socket(two)
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert paths.control_socket(one).parent.name == f"bbnode-{os.geteuid()}"


def test_the_border_is_the_length_that_the_kernel_takes(tmp_path: Path) -> None:
    rest = paths.SOCKET_PATH_MAX_BYTES - len("/control.sock")
    fits, too_long = Path("/" + "x" * (rest - 1)), Path("/" + "x" * rest)
    assert paths.control_socket(fits).parent == fits
    assert paths.control_socket(too_long).parent != too_long


@pytest.mark.parametrize("variable", ["XDG_RUNTIME_DIR", "TMPDIR"])
def test_a_deep_runtime_directory_is_passed_over(
    variable: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    deep = tmp_path / ("r" * 120)
    deep.mkdir()
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setenv(variable, str(deep))
    monkeypatch.setattr(tempfile, "tempdir", None)
    found = paths.control_socket(deep / "state")
    assert found.parent == Path(f"/tmp/bbnode-{os.geteuid()}")
    assert len(os.fsencode(found)) <= paths.SOCKET_PATH_MAX_BYTES


def test_a_socket_directory_that_others_can_write_is_refused(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    with pytest.raises(paths.SocketPathError, match="0700"):
        paths.make_socket_dir(shared / "control.sock")
    linked = tmp_path / "linked"
    linked.symlink_to(tmp_path, target_is_directory=True)
    with pytest.raises(paths.SocketPathError):
        paths.make_socket_dir(linked / "control.sock")


@pytest.mark.parametrize("umask", [0, 0o002, 0o022, 0o077])
def test_what_is_made_for_a_state_others_cannot_write(umask: int, tmp_path: Path) -> None:
    # Debian's logins have 002, each user being a group.
    before = os.umask(umask)
    try:
        paths.make_state_dir(tmp_path / "one" / "two" / "state")
    finally:
        os.umask(before)
    one, two = tmp_path / "one", tmp_path / "one" / "two"
    assert {stat.S_IMODE(each.stat().st_mode) for each in (one, two)} == {0o755 & ~umask}
    assert stat.S_IMODE((two / "state").stat().st_mode) == 0o700
    # As the state of a service that was joined in it.
    paths.make_socket_dir(two / "control.sock")


def test_one_process_owns_a_state_directory(tmp_path: Path) -> None:
    state = tmp_path / "state"
    script = (
        "import sys; from pathlib import Path; from bbnode.daemon import paths\n"
        "with paths.lock_state_dir(Path(sys.argv[1])): pass\n"
    )
    command = [sys.executable, "-c", script, str(state)]
    with paths.lock_state_dir(state):
        assert stat.S_IMODE(state.stat().st_mode) == 0o700
        other = subprocess.run(command, capture_output=True, text=True, check=False)
        assert other.returncode != 0
        assert f"StateDirInUse: state directory {state} is in use by process {os.getpid()}" in (
            other.stderr
        )
        with pytest.raises(paths.StateDirInUse), paths.lock_state_dir(state):
            pass
    assert subprocess.run(command, capture_output=True, check=False).returncode == 0


def test_a_state_directory_that_cannot_be_made_is_a_typed_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(paths.StorageError, match=r"set node\.state_dir"):
        paths.make_state_dir(tmp_path / "file" / "state")


def test_a_file_is_whole_or_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "f"
    paths.write_atomically(file, b"old", mode=0o600)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600

    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(paths.StorageError, match="No space left on device"):
        paths.write_atomically(file, b"new", mode=0o600)
    assert file.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [file]


def test_a_folder_that_may_not_be_entered_hides_no_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The user of a service in root's home: a look at anything there is refused.
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (tmp_path / "bbnode").mkdir()
    found = tmp_path / "bbnode" / "peer.toml"
    found.write_text("")
    exists = Path.exists

    def refused(self: Path) -> bool:
        if not self.is_absolute():
            raise PermissionError(13, "Permission denied", str(self))
        return exists(self)

    monkeypatch.setattr(Path, "exists", refused)
    assert paths.find_config(Path("peer.toml")) == found
    assert paths.find_config(Path("other.toml")) == Path("other.toml")


@pytest.mark.parametrize("kind", ["link", "dangling", "fifo", "directory"])
def test_a_lock_is_a_file_of_its_own(kind: str, tmp_path: Path) -> None:
    state, target = tmp_path / "state", tmp_path / "target"
    state.mkdir(mode=0o700)
    lock = paths.lock_file(state)
    if kind != "dangling":
        target.write_text("precious")
    match kind:
        case "link" | "dangling":
            lock.symlink_to(target)
        case "fifo":
            os.mkfifo(lock)
        case _:
            lock.mkdir()
    with pytest.raises(paths.StorageError, match="lock"), paths.lock_state_dir(state):
        pytest.fail("locked")
    assert target.exists() is (kind != "dangling")
    if target.exists():
        assert target.read_text() == "precious"


def test_a_lock_on_a_full_disk_is_a_typed_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with (
        pytest.raises(paths.StorageError, match=r"lock: .*No space left"),
        paths.lock_state_dir(tmp_path / "state"),
    ):
        pytest.fail("locked")


def test_clients_do_not_ask_in_a_directory_of_somebody_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    long = tmp_path / ("n" * 120)
    paths.control_socket(long)
    waiting = tmp_path / "bbnode"
    waiting.mkdir()
    waiting.chmod(0o777)
    with pytest.raises(paths.SocketPathError, match="nobody else can write"):
        paths.control_socket(long)
    waiting.rmdir()
    waiting.symlink_to(tmp_path, target_is_directory=True)
    with pytest.raises(paths.SocketPathError):
        paths.control_socket(long)


def test_what_killed_writers_left_is_removed(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.write_text("")
    old = [".tickets.abcdefgh", ".identity.key.4711.new"]
    for name in (".checkpoint.new.ab12_x9z", ".revocations.abcdefgh", *old, ".note", ".a.short"):
        (tmp_path / name).write_text("part")
    (tmp_path / ".checkpoint.new.abcdefgi").symlink_to(kept)
    (tmp_path / ".checkpoint.new.abcdefgj").mkdir()
    for name in old:
        os.utime(tmp_path / name, (0, 0))
    removed = paths.remove_orphans(tmp_path, ("checkpoint.new",))
    assert {path.name for path in removed} == {".checkpoint.new.ab12_x9z", *old}
    # A link, a directory, what another process may be writing now, and what is not ours.
    assert {path.name for path in tmp_path.iterdir()} == {
        "kept",
        ".revocations.abcdefgh",
        ".checkpoint.new.abcdefgi",
        ".checkpoint.new.abcdefgj",
        ".note",
        ".a.short",
    }
    assert paths.remove_orphans(tmp_path / "none", ()) == []
