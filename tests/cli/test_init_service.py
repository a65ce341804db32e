"""`bbnode init --user` and `--system`: configurations where services look for them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bbnode.cli.main import main
from bbnode.daemon import paths

WHAT = ["--module", "bbnode.examples.federated_digits:FederatedRound", "--target", "client"]


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(paths, "SYSTEM_CONFIG_DIR", tmp_path / "etc")
    (tmp_path / "etc").mkdir()


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
