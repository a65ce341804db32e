"""`bbnode init --user` and `--system`: configurations where services look for them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from bbnode.cli.main import main
from bbnode.daemon import paths, units
from bbnode.ir import installation

WHAT = ["--module", "bbnode.examples.federated_digits:FederatedRound", "--target", "client"]


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(paths, "SYSTEM_CONFIG_DIR", tmp_path / "etc")
    monkeypatch.setattr(paths, "SYSTEM_UNIT_DIRS", (tmp_path / "units", tmp_path / "vendor"))
    monkeypatch.setattr(paths, "USER_UNIT_DIRS", ())
    runs_from("/opt/bbnode", monkeypatch)
    (tmp_path / "etc").mkdir()


def runs_from(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As installed there; a checkout may be where no service looks."""
    monkeypatch.setattr(installation, "program", lambda: Path(place, "bin", "bbnode"))
    monkeypatch.setattr(sys, "executable", f"{place}/bin/python")
    monkeypatch.setattr(sys, "prefix", place)


def test_a_users_service(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", "--user", "--name", "peer", *WHAT]) == 0
    told = capsys.readouterr()
    file = tmp_path / "config" / "bbnode" / "peer.toml"
    assert "systemctl --user enable --now bbnode-user@peer" in told.err
    assert main(["id", "-c", str(file)]) == 0
    assert capsys.readouterr().out == told.out
    assert main(["paths", "-c", str(file), "--json"]) == 0
    state_dir = json.loads(capsys.readouterr().out)["state_dir"]
    assert state_dir == str(tmp_path / "state" / "bbnode" / "peer")
    assert paths.identity_file(Path(state_dir)).exists()


def test_the_systems_service_gets_its_key_at_its_first_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["init", "--system", "--name", "peer", *WHAT]) == 0
    assert "systemctl enable --now bbnode@peer" in capsys.readouterr().err
    text = (tmp_path / "etc" / "peer.toml").read_text()
    assert 'name = "peer"' in text
    assert "state_dir" not in text
    assert main(["init", "--system", "--name", "peer", *WHAT]) == 2
    assert "--force" in capsys.readouterr().err


@pytest.mark.parametrize("wrong", [["--user"], ["--user", "--system", "--name", "x"]])
def test_what_is_missing_is_said(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", *wrong, *WHAT]) == 2
    assert "--name" in capsys.readouterr().err


def test_without_a_directory_it_is_made_where_every_command_looks_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "volume" / "one.toml"
    monkeypatch.setenv("BBNODE_CONFIG", str(file))
    assert main(["init", "--announce", "/ip4/192.0.2.10/tcp/4001", *WHAT]) == 0
    assert '"/ip4/192.0.2.10/tcp/4001"' in file.read_text("utf-8")
    assert main(["id"]) == 0
    monkeypatch.delenv("BBNODE_CONFIG")
    monkeypatch.chdir(tmp_path)
    assert main(["init", *WHAT]) == 0
    assert (tmp_path / "node.toml").exists()


@pytest.mark.parametrize(
    ("option", "name", "folder"),
    [
        ("--system", "bbnode@.service", "units"),
        ("--user", "bbnode-user@.service", "config/systemd/user"),
    ],
)
def test_the_unit_is_written_with_the_program_that_runs(
    option: str,
    name: str,
    folder: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    runs_from("/srv/other", monkeypatch)
    unit = tmp_path / folder / name
    assert main(["init", option, "--name", "a", *WHAT]) == 0
    assert f"wrote {unit}" in capsys.readouterr().err
    text = unit.read_text("utf-8")
    assert "ExecStart=/srv/other/bin/bbnode run --config " in text
    assert "ExecReload=/srv/other/bin/bbnode reload --state-dir " in text
    # Of the others nothing is new; after a move all run the new program.
    assert main(["init", option, "--name", "b", *WHAT]) == 0
    assert str(unit) not in capsys.readouterr().err
    runs_from("/srv/new", monkeypatch)
    assert main(["init", option, "--name", "c", *WHAT]) == 0
    assert "ExecStart=/srv/new/bin/bbnode" in unit.read_text("utf-8")
    # Whoever takes the first line out has a unit of their own.
    unit.write_text(text.removeprefix(units.MARK))
    assert main(["init", option, "--name", "d", *WHAT]) == 0
    assert unit.read_text("utf-8") == text.removeprefix(units.MARK)


def test_a_unit_of_a_package_is_not_hidden(tmp_path: Path) -> None:
    (tmp_path / "vendor").mkdir()
    (tmp_path / "vendor" / "bbnode@.service").write_text("[Unit]\n")
    assert main(["init", "--system", "--name", "peer", *WHAT]) == 0
    assert not (tmp_path / "units").exists()


@pytest.mark.parametrize(
    ("option", "place"),
    [
        ("--system", "/home/ann/env"),
        ("--system", "/root/env"),
        ("--system", "/tmp/env"),
        ("--user", "/var/tmp/env"),
        ("--user", "/srv/an env"),
        ("--user", "/srv/50%"),
    ],
)
def test_a_program_that_no_service_could_run_is_refused(
    option: str,
    place: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    runs_from(place, monkeypatch)
    assert main(["init", option, "--name", "peer", *WHAT]) == 2
    assert "install bbnode elsewhere" in capsys.readouterr().err
    assert list(tmp_path.rglob("peer.toml")) == []


def test_without_the_services_user_the_command_that_makes_it_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(paths, "SYSTEM_USER", "bbnode-nobody-has-this-name")
    assert main(["init", "--system", "--name", "peer", *WHAT]) == 0
    command, file = capsys.readouterr().err.partition("systemd-sysusers ")[1:]
    assert command
    assert Path(file.split()[0]).read_text("utf-8").count("\nu bbnode ") == 1
