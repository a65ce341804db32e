"""The packages of `docs/extending.md` can be installed, and do what the page says.

Rule: a section (`## …`) is a package. A block after a line "`NAME`:" is the file of that name; a
`python` block without a name is a program, which prints the `text` block after it; a `console`
block is commands (`$ …`), each with what it prints. Entry points are those of its pyproject.toml.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.patience import PATIENCE_S

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "extending.md"
BLOCK = re.compile(r"(?:^`([\w./-]+)`:\n\n)?^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
MOST_LINES = 60  # of pyproject.toml and modules: what a reader copies


@dataclass
class Package:
    files: dict[str, str] = field(default_factory=dict)
    runs: list[tuple[str, str]] = field(default_factory=list)  # shell command, what it prints


def packages() -> dict[str, Package]:
    found = {}
    for section in PAGE.read_text(encoding="utf-8").split("\n## ")[1:]:
        package = found[section.partition("\n")[0]] = Package()
        for name, language, text in BLOCK.findall(section):
            if name:
                package.files[name] = text
            elif language == "python":
                program = f"program_{len(package.runs)}.py"
                package.files[program] = text
                package.runs.append((f"{sys.executable} -W error {program}", ""))
            elif language == "text":
                package.runs[-1] = (package.runs[-1][0], text)
            elif language == "console":
                for command, printed in re.findall(r"^\$ (.*)\n((?:[^$].*\n|\n)*)", text, re.M):
                    package.runs.append((command, printed))
    return {title: package for title, package in found.items() if package.files}


PACKAGES = packages()


def install(package: Package, folder: Path) -> dict[str, dict[str, str]]:
    """Write the files and the `.dist-info` that pip would make; the entry points by group."""
    for name, text in package.files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    project = tomllib.loads(package.files["pyproject.toml"])["project"]
    info = folder / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    )
    groups: dict[str, dict[str, str]] = project["entry-points"]
    (info / "entry_points.txt").write_text(
        "\n".join(
            f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in entries.items())
            for group, entries in groups.items()
        )
    )
    return groups


def shell(command: str, folder: Path) -> str:
    bins = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    path = os.pathsep.join((str(folder), str(ROOT)))
    made = subprocess.run(
        command, shell=True, cwd=folder, env={**os.environ, "PATH": bins, "PYTHONPATH": path},
        capture_output=True, text=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert made.returncode == 0, f"{command}\n{made.stdout}{made.stderr}"
    return made.stdout


def test_the_page_has_packages() -> None:
    assert len(PACKAGES) >= 12


@pytest.mark.parametrize("title", PACKAGES)
def test_the_package_does_what_the_page_says(title: str, tmp_path: Path) -> None:
    package = PACKAGES[title]
    groups = install(package, tmp_path)
    copied = [text for name, text in package.files.items() if not name.startswith("program_")]
    assert sum(len(text.splitlines()) for text in copied) < MOST_LINES
    # The package's own entry points are found and load, and each component is of its name.
    loads = "; ".join(
        f"component_class({name!r})"
        if group == "bbnode.components"
        else f"load({group!r}, {name!r})"
        for group, entries in groups.items()
        for name in entries
    )
    imports = (
        "from bbnode.ir.plugins import load; "
        "from bbnode.components.registry import component_class; "
    )
    shell(f'{sys.executable} -W error -c "{imports}{loads}"', tmp_path)
    assert package.runs, "the section shows no use of the package"
    for command, printed in package.runs:
        assert printed, f"the page does not say what {command} prints"
        assert shell(command, tmp_path) == printed
