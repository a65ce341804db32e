"""`bbnode join --user` and `--system`: the node that was joined is the one that the unit runs."""

from __future__ import annotations

import os
import pwd
import re
import stat
import sys
from pathlib import Path

import pytest

from bbnode.cli import exits
from bbnode.cli.main import main
from bbnode.daemon import paths, units
from bbnode.daemon.access import files as access_files
from bbnode.daemon.config import sources
from bbnode.ir import installation
from bbnode.transport.identity import load_identity
from tests.daemon.inviting import Inviter, inviting
from tests.daemon.live import in_thread

UNITS = Path(units.__file__).parent
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="a service of the system needs root")
# Stands in for the service's own user, which only an installed machine has.
SOMEBODY = "nobody"


@pytest.fixture(autouse=True)
def _home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("STATE", "CACHE", "CONFIG"):
        monkeypatch.setenv(f"XDG_{name}_HOME", str(tmp_path / name.lower()))
    monkeypatch.setattr(paths, "SYSTEM_CONFIG_DIR", tmp_path / "etc")
    monkeypatch.setattr(paths, "SYSTEM_STATE_DIR", tmp_path / "var")
    monkeypatch.setattr(paths, "SYSTEM_CACHE_DIR", tmp_path / "var-cache")
    monkeypatch.setattr(paths, "SYSTEM_UNIT_DIRS", (tmp_path / "units",))
    monkeypatch.setattr(paths, "USER_UNIT_DIRS", ())
    monkeypatch.setattr(paths, "SYSTEM_USER", SOMEBODY)
    # As installed: a checkout may be where no service looks.
    program = Path("/opt/bbnode/bin/bbnode")
    monkeypatch.setattr(installation, "program", lambda: program)
    monkeypatch.setattr(sys, "executable", "/opt/bbnode/bin/python")
    monkeypatch.setattr(sys, "prefix", "/opt/bbnode")


async def join(host: Inviter, *words: str, ticket: str = "") -> int:
    return await in_thread(main, ["join", ticket or host.ticket(), "--yes", *words])


def peer_of(state_dir: Path) -> str:
    return str(load_identity(paths.identity_file(state_dir)).peer_id)


async def test_a_users_service_is_where_its_unit_looks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with inviting(tmp_path / "server") as host:
        assert await join(host, "--user", "--name", "lab", "--set", "node.log_level=warning") == 0
    err = capsys.readouterr().err
    file = tmp_path / "config" / "bbnode" / "lab.toml"
    state_dir = tmp_path / "state" / "bbnode" / "lab"
    assert f"wrote {file}; start the node with: systemctl --user enable --now" in err
    assert err.rstrip().endswith("bbnode-user@lab")
    assert err.count(str(file)) == 2  # shown, and written
    resolved = sources.resolve(file, environ={})
    assert resolved.config.node.name == "lab"
    assert resolved.config.node.log_level == "warning"
    assert resolved.state_dir == state_dir
    artifact = resolved.config.artifact.path
    assert artifact is not None
    assert resolved.absolute(artifact).read_bytes()
    peer = load_identity(paths.identity_file(state_dir)).peer_id
    assert access_files.load_node(state_dir, peer).membership is not None
    for kept in state_dir.iterdir():
        assert stat.S_IMODE(kept.stat().st_mode) == 0o600, kept
    # The unit is there, with its own paths.
    unit = (tmp_path / "config" / "systemd" / "user" / "bbnode-user@.service").read_text("utf-8")
    assert "ExecStart=/opt/bbnode/bin/bbnode run" in unit
    assert "%h/.config/bbnode/%i.toml" in unit
    assert "reload --state-dir %h/.local/state/bbnode/%i\n" in unit


@pytest.mark.parametrize("folder_mode", [0o700, 0o775])
async def test_a_service_that_is_joined_under_any_umask_can_start(
    folder_mode: int, tmp_path: Path
) -> None:
    made = tmp_path / "state" / "bbnode" / "lab"
    before = os.umask(0o002)
    try:
        async with inviting(tmp_path / "server") as host:
            if folder_mode != 0o700:  # as an earlier release left it
                made.mkdir(parents=True)
                made.chmod(folder_mode)
            assert await join(host, "--user", "--name", "lab") == 0
    finally:
        os.umask(before)
    assert stat.S_IMODE(made.stat().st_mode) == 0o700
    paths.make_socket_dir(paths.control_socket(made))


async def test_a_node_that_was_joined_becomes_a_service_and_stays_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with inviting(tmp_path / "server") as host:
        ticket = host.ticket()  # good for one peer: another identity would be refused
        assert await join(host, "--no-run", ticket=ticket) == 0
        (made,) = (tmp_path / "state" / "bbnode").iterdir()
        peer = peer_of(made / "state")
        (made / "state" / "checkpoint").write_bytes(b"state")
        with (made / "node.toml").open("a") as file:
            file.write('\n[control]\ntcp = "127.0.0.1:0"\n')
        assert await join(host, "--user", ticket=ticket) == 0
        config = tmp_path / "config" / "bbnode" / f"{made.name}.toml"
        resolved = sources.resolve(config, environ={})
        assert resolved.state_dir == made
        assert resolved.config.control.tcp == "127.0.0.1:0"
        assert peer_of(made) == peer
        assert (made / "checkpoint").read_bytes() == b"state"
        assert not {"node.toml", "artifact.onnx", "state"} & {f.name for f in made.iterdir()}

        # Once more: of the service that it is by now.
        assert await join(host, "--user", "--set", "node.log_level=error", ticket=ticket) == 0
        resolved = sources.resolve(config, environ={})
        assert (resolved.config.node.log_level, peer_of(made)) == ("error", peer)
        assert resolved.config.control.tcp == "127.0.0.1:0"
    assert "systemctl --user enable --now bbnode-user@" in capsys.readouterr().err


async def test_a_node_that_runs_is_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with inviting(tmp_path / "server") as host:
        ticket = host.ticket()
        assert await join(host, "--no-run", ticket=ticket) == 0
        (made,) = (tmp_path / "state" / "bbnode").iterdir()
        with paths.lock_state_dir(made / "state"):
            assert await join(host, "--user", ticket=ticket) == exits.FAILURE
        assert "in use by process" in capsys.readouterr().err
        assert paths.identity_file(made / "state").exists()
        assert not (tmp_path / "config").exists()


@needs_root
async def test_a_service_of_the_system_belongs_to_its_user(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    owner = pwd.getpwnam(SOMEBODY)
    before = os.umask(0o077)
    try:
        async with inviting(tmp_path / "server") as host:
            assert await join(host, "--system", "--name", "lab") == 0
            # Root looks again, and what it touches stays the service's.
            assert await join(host, "--system", "--name", "lab") == 0
    finally:
        os.umask(before)
    assert "systemctl enable --now bbnode@lab" in capsys.readouterr().err
    unit = tmp_path / "units" / "bbnode@.service"
    assert stat.S_IMODE(unit.stat().st_mode) == 0o644
    assert unit.read_text("utf-8") == units.MARK + (UNITS / unit.name).read_text("utf-8")
    state_dir = tmp_path / "var" / "lab"
    for path in (state_dir, *state_dir.iterdir()):
        found = path.stat()
        assert (found.st_uid, found.st_gid) == (owner.pw_uid, owner.pw_gid), path
        assert found.st_mode & 0o077 == 0, path
    for path in (tmp_path / "etc", state_dir.parent):
        assert stat.S_IMODE(path.stat().st_mode) == 0o755, path
    for path in (tmp_path / "etc").iterdir():
        found = path.stat()
        assert (found.st_uid, stat.S_IMODE(found.st_mode)) == (0, 0o644), path
    resolved = sources.resolve(tmp_path / "etc" / "lab.toml", environ={})
    assert resolved.state_dir == state_dir


@needs_root
async def test_what_is_planted_in_the_state_is_not_followed(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("root's")
    async with inviting(tmp_path / "server") as host:
        ticket = host.ticket()
        assert await join(host, "--no-run", "--dir", str(tmp_path / "mine"), ticket=ticket) == 0
        (tmp_path / "mine" / "state" / "blocked").symlink_to(secret)
        words = ("--system", "--name", "lab", "--dir", str(tmp_path / "mine"))
        assert await join(host, *words, ticket=ticket) == 0
    assert not (tmp_path / "var" / "lab" / "blocked").exists()
    assert secret.read_text() == "root's"
    assert secret.stat().st_uid == 0


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--user", "--system"), "give one of the two"),
        (("--user", "--name", "../x"), "--name '../x'"),
        (("--system", "--name", "lab"), "systemd-sysusers|made by root"),
    ],
)
async def test_what_cannot_be_made_is_said_before_anybody_is_dialled(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    words: tuple[str, ...],
    told: str,
) -> None:
    monkeypatch.setattr(paths, "SYSTEM_USER", "bbnode-nobody-has-this-name")
    async with inviting(tmp_path / "server") as host:
        assert await join(host, *words) != 0
        assert host.came == []
    err = capsys.readouterr().err
    assert re.search(told, err), err
    assert not (tmp_path / "state").exists()
