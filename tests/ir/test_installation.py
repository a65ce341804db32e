"""Commands that are printed for a reader reach the installation that prints them."""

from __future__ import annotations

import importlib.util
import re
import shlex
import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from bbnode.ir import installation
from tests.patience import PATIENCE_S

PACKAGE = Path(installation.__file__).parent.parent


def environment(folder: Path, *, cfg: str = "") -> Path:
    """A virtual environment's interpreter and script, as far as commands need them."""
    (folder / "bin").mkdir(parents=True)
    (folder / "pyvenv.cfg").write_text(f"home = /usr/bin\n{cfg}")
    for name in ("python", "bbnode"):
        file = folder / "bin" / name
        file.write_text("#!/bin/sh\n")
        file.chmod(0o755)
    return folder / "bin" / "python"


@pytest.fixture
def inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Run in an environment whose folder has a blank, and which is not on PATH."""
    exe = environment(tmp_path / "an env")
    monkeypatch.setattr(sys, "executable", str(exe))
    monkeypatch.setattr(sys, "prefix", str(exe.parent.parent))
    monkeypatch.setattr(sys, "argv", [str(exe.parent / "bbnode")])
    monkeypatch.setenv("PATH", "/nonexistent")
    return exe


def test_pip_is_that_of_the_interpreter(inside: Path) -> None:
    words = shlex.split(installation.install("a>=1", "b[c]"))
    assert words == [str(inside), "-m", "pip", "install", "a>=1", "b[c]"]
    words = shlex.split(installation.install("a>=1", again=True))
    assert words == [str(inside), "-m", "pip", "install", "--force-reinstall", "a>=1"]


def test_pipx_and_uv_have_commands_of_their_own(inside: Path) -> None:
    folder = inside.parent.parent
    (folder / "pyvenv.cfg").write_text("home = /usr/bin\nuv = 0.5.1\n")
    assert shlex.split(installation.install("a>=1")) == [
        *("uv", "pip", "install", "--python", str(inside), "a>=1")
    ]
    (folder / "pipx_metadata.json").write_text("{}")
    assert installation.install("a>=1") == "pipx inject 'an env' 'a>=1'"
    assert installation.install("a", again=True) == "pipx inject --force 'an env' 'a'"


def test_an_environment_without_pip_takes_another_ones(
    inside: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = importlib.util.find_spec

    def none(name: str, package: str | None = None) -> ModuleSpec | None:
        return None if name == "pip" else real(name, package)

    monkeypatch.setattr(installation, "find_spec", none)
    assert shlex.split(installation.install("a")) == [
        *("python3", "-m", "pip", "--python", str(inside), "install", "a")
    ]


def test_names_are_short_where_path_leads_to_them(
    inside: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert shlex.split(installation.python()) == [str(inside)]
    assert shlex.split(installation.bbnode()) == [str(inside.parent / "bbnode")]
    monkeypatch.setenv("PATH", str(inside.parent))
    assert (installation.python(), installation.bbnode()) == ("python", "bbnode")


def test_another_environment_on_path_is_not_ours(
    inside: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = environment(tmp_path / "other")
    # Environments share the interpreter that they lead to.
    other.unlink()
    other.symlink_to(inside)
    monkeypatch.setenv("PATH", str(other.parent))
    assert shlex.split(installation.python()) == [str(inside)]
    assert shlex.split(installation.bbnode()) == [str(inside.parent / "bbnode")]


def test_a_link_on_path_is_how_it_was_called(
    inside: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = tmp_path / "bin" / "bbnode"
    link.parent.mkdir()
    link.symlink_to(inside.parent / "bbnode")
    monkeypatch.setenv("PATH", str(link.parent))
    monkeypatch.setattr(sys, "argv", [str(link)])
    assert installation.program() == link
    assert installation.bbnode() == "bbnode"


def test_without_a_script_the_module_is_run(inside: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (inside.parent / "bbnode").unlink()
    monkeypatch.setattr(sys, "argv", ["/somewhere/bbnode/__main__.py"])
    assert shlex.split(installation.bbnode()) == [str(inside), "-m", "bbnode"]


def test_what_is_printed_runs_here() -> None:
    for command, shown in (
        (f"{installation.python()} -c 'import sys; print(sys.prefix)'", sys.prefix),
        (f"{installation.bbnode()} --version", "bbnode "),
    ):
        done = subprocess.run(
            ["/bin/sh", "-c", command],
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=True,
        )
        assert done.stdout.startswith(shown)


def test_no_message_names_a_pip_or_python_of_its_own() -> None:
    # Of messages: not of docstrings and comments, which speak to whoever reads the source.
    typed = re.compile(r"(?<!`)\b(?:pip3? install|python3? -m pip)\b")
    for file in PACKAGE.rglob("*.py"):
        if file.name != "installation.py":
            assert typed.search(file.read_text("utf-8")) is None, file
