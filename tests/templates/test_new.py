"""`bbnode new`: what it writes runs as it stands, and it writes over nothing."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest
import typer

from bbnode import templates
from bbnode.cli import values
from bbnode.cli.commands import up
from bbnode.cli.main import main
from bbnode.daemon.artifacts.build import compile_module
from bbnode.daemon.config import InvokeSection
from bbnode.ir import installation
from bbnode.templates import FolderNotWritten, FolderTaken, ProjectNameRefused
from tests import patience

ROOT = Path(__file__).parents[2]


def run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, *command], cwd=folder, env=environment, text=True,
        capture_output=True, check=False, timeout=patience.PATIENCE_S,
    )  # fmt: skip


@pytest.mark.parametrize("template", list(templates.TEMPLATES))
def test_what_is_written_is_clean_and_its_tests_pass(template: str, tmp_path: Path) -> None:
    folder = tmp_path / f"own-{template}"
    templates.write_project(folder, template)
    text = "".join(path.read_text() for path in folder.rglob("*") if path.is_file())
    assert not re.search(r"@\w+@", text)
    for command in (["check"], ["format", "--check"]):
        done = run(folder, "-m", "ruff", *command, "--no-cache", ".")
        assert done.returncode == 0, done.stdout
    done = run(folder, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "error")
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("template", list(templates.TEMPLATES))
def test_what_is_written_compiles_and_fits_what_up_is_told(
    template: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / f"compiled_{template}"
    templates.write_project(folder, template)
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    assert run(folder, "-m", f"compiled_{template}.data").returncode == 0
    up = tomllib.loads((folder / "pyproject.toml").read_text())["tool"]["bbnode"]["up"]
    model = compile_module(up["program"], {})
    classes = {name.partition("#")[0] for f in model.functions for name in [f.name] if "#" in name}
    asked = {part.partition("=")[0] for part in up["nodes"].split(",")}
    assert asked == classes
    for setting in up.get("set", []):
        key, _, path = setting.partition("=")
        slot = key.split(".")[2]
        assert any(f".{slot}" in entry.key for entry in model.metadata_props), slot
        assert (folder / path.format(i=0)).exists()


def test_the_program_is_short(tmp_path: Path) -> None:
    """Model, data, training and export: docs/from-flower.md counts these lines."""
    templates.write_project(tmp_path / "short", "federated")
    lines = [
        line
        for name in ("program.py", "data.py")
        for line in (tmp_path / "short" / "short" / name).read_text().splitlines()
        if line.strip()
    ]
    assert len(lines) < 45
    program = (tmp_path / "short" / "short" / "program.py").read_text()
    assert len(program.splitlines()) < 30


def test_the_component_of_the_project_is_found_by_its_entry_point(tmp_path: Path) -> None:
    templates.write_project(tmp_path / "found", "federated")
    project = tomllib.loads((tmp_path / "found" / "pyproject.toml").read_text())["project"]
    ((name, module),) = project["entry-points"]["bbnode.components"].items()
    code = (
        f"import {module}; from bbnode.components.registry import component_class; "
        f"assert component_class({name!r}).__module__ == {module!r}"
    )
    done = run(tmp_path / "found", "-c", code)
    assert done.returncode == 0, done.stderr


def test_an_array_becomes_lists_that_a_configuration_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    np.save("batch.npy", np.array([[1.5, 2.0], [3.0, 4.0]], np.float32))
    (read,) = up._inputs({"inputs": {"x": "@batch.npy"}}).values()
    assert up._numbers("x", read) == [[1.5, 2.0], [3.0, 4.0]]
    entry = InvokeSection(target="asker", inputs={"x": [[1.5, 2.0], [3.0, 4.0]]})
    assert entry.inputs["x"] == [[1.5, 2.0], [3.0, 4.0]]
    np.save("large.npy", np.zeros(up.MAX_INPUT_NUMBERS + 1))
    with pytest.raises(typer.BadParameter, match="4097 numbers is more than 4096"):
        up._numbers("x", values.parse_value("@large.npy"))
    deep: list[object] = []
    for _ in range(20):
        deep = [deep]
    with pytest.raises(ValueError, match="is not an input"):
        InvokeSection(target="asker", inputs={"x": deep})


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("1st", "letter first"),
        ("my training", "letters"),
        ("tëst", "letters"),
        ("a" * 65, "up to 64"),
        ("my.training", "letters"),
        ("-x", "letters"),
        ("x\n", "letters"),
        ("class", "word of Python"),
        ("match", "word of Python"),
        ("CON", "device on Windows"),
        ("lpt1", "device on Windows"),
        ("json", "module of Python"),
        ("numpy", "installed here"),
        ("bbnode", "installed here"),
        ("Tests", "folder of every project"),
    ],
)
def test_a_name_that_would_make_trouble_is_refused(name: str, why: str, tmp_path: Path) -> None:
    with pytest.raises(ProjectNameRefused, match=why):
        templates.write_project(tmp_path / name, "federated")
    assert list(tmp_path.iterdir()) == []


def test_nothing_that_is_there_is_written_over(tmp_path: Path) -> None:
    full = tmp_path / "full"
    full.mkdir()
    (full / "thesis.tex").write_text("years of work")
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name in ("full", "file", "link"):
        with pytest.raises(FolderTaken, match="is there and is"):
            templates.write_project(tmp_path / name, "gossip")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "full", "link"]
    assert [path.name for path in full.iterdir()] == ["thesis.tex"]


def test_an_empty_folder_and_folders_above_are_taken(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    templates.write_project(tmp_path / "empty", "pipeline")
    templates.write_project(tmp_path / "with a blank" / "inner", "pipeline")
    assert (tmp_path / "with a blank" / "inner" / "inner" / "program.py").exists()


def test_a_project_half_written_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full_disk(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full_disk)
    with pytest.raises(FolderNotWritten, match="No space left"):
        templates.write_project(tmp_path / "half", "federated")
    assert list(tmp_path.iterdir()) == []


def test_the_command_says_what_it_wrote_and_what_is_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["new", "mine"]) == 0
    said = capsys.readouterr()
    assert "mine/mine/program.py" in said.out.splitlines()
    python, bbnode = installation.python(), installation.bbnode()
    assert f"cd mine && {python} -m mine.data && {bbnode} up" in said.err
    assert main(["new", "other", "-t", "gossip", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["schema"], found["folder"]) == ("bbnode/new/1", str(tmp_path / "other"))
    assert "other/program.py" in found["files"]


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["new", "mine", "-t", "federate"], 2, "none of federated, pipeline, gossip"),
        (["new"], 2, "NAME"),
        (["new", "class"], 2, "word of Python"),
    ],
)
def test_the_command_refuses(
    arguments: list[str], code: int, said: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == code
    assert said in capsys.readouterr().err


def test_templates_are_in_the_wheel() -> None:
    """Hatch ships what git does not ignore."""
    files = [str(p) for p in (ROOT / "bbnode" / "templates").rglob("*.in")]
    assert len(files) >= 20
    done = subprocess.run(
        ["git", "check-ignore", *files], cwd=ROOT, text=True, capture_output=True, check=False
    )
    assert done.stdout == ""
