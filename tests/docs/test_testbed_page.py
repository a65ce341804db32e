"""The project of docs/testbed.md, as a user would have it: its program and its pyproject.toml."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from bbnode.cli.commands import up
from bbnode.daemon.testbed.up import DEFAULT_OUT

PAGE = (Path(__file__).parents[2] / "docs" / "testbed.md").read_text(encoding="utf-8")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder with the files that the page shows."""
    for _, name, text in re.findall(r"```(python|toml)\n# (\S+)\n(.*?)```", PAGE, re.DOTALL):
        (tmp_path / name).write_text(text)
    assert {path.name for path in tmp_path.iterdir()} == {"squares.py", "pyproject.toml"}
    return tmp_path


def test_the_project_runs_with_bbnode_up_alone(project: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bbnode", "up", "--json"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        cwd=project,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["schema"] == "bbnode/up/1"
    assert [node["name"] for node in report["nodes"]] == ["asker", "worker-0", "worker-1"]
    assert [(row["round"], row["ok"]) for row in report["rounds"]] == [(1, True), (2, True)]
    outputs = [row["outputs"].get("squares") for row in report["rounds"]]
    assert [4.0, 9.0] in [*outputs, report["values"].get("asker", {}).get("squares")]
    assert report == json.loads((project / DEFAULT_OUT / "report.json").read_text())
    for node in report["nodes"]:
        assert Path(node["log"]).exists()
        assert 'log_level = "warning"' in Path(node["config"]).read_text()


def test_the_page_names_all_keys_of_the_table() -> None:
    (told,) = re.findall(r"Its keys are (.*?)\.\n", PAGE, re.DOTALL)
    assert set(re.findall(r"`(\w+)`", told)) == set(up.KEYS)
