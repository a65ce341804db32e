"""`bbnode init`: what it writes, what it refuses, and from where paths and modules count."""

from __future__ import annotations

from pathlib import Path

import pytest

from bbnode.cli.main import main
from bbnode.daemon.config import sources
from bbnode.daemon.lifecycle import assembly


def made(*more: str) -> int:
    """Make a node that plays the client, whose answers come from its data."""
    what = ["--module", "tests.cli.asking:Ask", "--set", "artifact.args={data=true}"]
    return main(["init", "n", *what, "--target", "client", *more])


def test_init_takes_the_settings_of_slots_whose_paths_count_from_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert made("--set", "slots.data.path=d.npz", "--set", "slots.data.batch_size=2") == 0
    resolved = sources.resolve(tmp_path / "n" / "node.toml", environ={})
    assert resolved.config.slots == {"data": {"path": "../d.npz", "batch_size": 2}}
    artifact = assembly.find_artifact(resolved)
    settings = assembly.slot_settings(resolved, artifact)
    assert Path(settings["data"]["path"]).resolve() == tmp_path / "d.npz"
    # Elsewhere too; and what is typed on a command line counts from where it is typed.
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    assert assembly.slot_settings(resolved, artifact) == settings
    typed = sources.resolve(resolved.file, environ={}, flags={"slots.data.path": "e.npz"})
    assert assembly.slot_settings(typed, artifact)["data"]["path"] == str(elsewhere / "e.npz")


def test_a_slot_that_lacks_settings_is_named_with_what_to_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert made() == 0
    told = capsys.readouterr().err
    assert "slot 'data': bbnode.ArrayDataSource needs 'path'; write path = … under" in told
    assert "[slots.data] in node.toml, or give --set slots.data.path=…" in told


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (["--target", "clinet"], "clinet"),
        (["--set", "slots.data.pth=x"], "has no setting 'pth'; did you mean 'path'?"),
        (["--set", "slots.dta.path=x"], "slot 'dta'"),
        (["--set", "slots.data.path=x", "--set", "slots.data.batch_size=many"], "'many'"),
        (["--set", "node.nam=x"], "did you mean 'name'?"),
        (["--set", "slots.data.path"], "is not KEY=VALUE"),
    ],
)
def test_what_the_artifact_does_not_have_is_refused_and_nothing_is_written(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    more: list[str],
    told: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert made(*more) == 2
    assert told in capsys.readouterr().err
    assert not (tmp_path / "n").exists()


def test_a_module_beside_the_configuration_is_found_from_everywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a_program_here.py").write_text(
        "from tests.cli.asking import Ask\n\n\nclass Mine(Ask): ...\n"
    )
    monkeypatch.chdir(tmp_path)
    given = ["--module", "a_program_here.py:Mine", "--target", "server"]
    assert main(["init", "n", *given]) == 0
    (tmp_path / "x").mkdir()
    monkeypatch.chdir(tmp_path / "x")
    resolved = sources.resolve(tmp_path / "n" / "node.toml", environ={})
    assert resolved.config.artifact.module == "../a_program_here.py:Mine"
    assert len(assembly.find_artifact(resolved).targets) == 2


def test_a_missing_file_is_wrong_usage_in_every_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "node.toml").write_text('[artifact]\npath = "none.onnx"\ntargets = ["server"]\n')
    (tmp_path / "reads.py").write_text(
        "from bbnode.dsl import Module, OnnxModule\n\n\n"
        "class Reads(Module):\n    def body(self, g):\n        OnnxModule('none.onnx')\n"
    )
    for command in (
        ["inspect", "none.onnx"],
        ["compile", "none.py:Program"],
        ["compile", "reads.py:Reads"],
        ["init", "n", "--artifact", "none.onnx", "--target", "client"],
        ["run", "-c", "none.toml"],
        ["run", "--set", "node.state_dir=state"],
        ["join", "@none"],
        ["replay", "none.record"],
        ["invoke", "server", "-i", "x=@none.npy"],
        ["status", "-c", "none.toml"],
    ):
        assert main(command) == 2, command
        assert "none." in capsys.readouterr().err or "@none" in command
