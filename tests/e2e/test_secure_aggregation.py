"""Secure aggregation between daemons: keys of their identities, real connections."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import PATIENCE_S
from tests.programs.files import examples

PROGRAM = """
from bbnode.programs import SecureTraining


class Training(SecureTraining):
    model = (4, 8, 3)
    clients = 4
    deadline_s = 30.0
"""


@pytest.mark.slow
def test_daemons_sum_their_updates_under_masks(tmp_path: Path) -> None:
    (tmp_path / "masked.py").write_text(PROGRAM)
    settings = ["--set", f"server.slots.test.path={examples(tmp_path, 'test', 40, seed=9)}"]
    for i in range(4):
        path = examples(tmp_path, f"c{i}", 40 + i, seed=i)
        settings += ["--set", f"client.{i}.slots.data.path={path}"]
    done = subprocess.run(
        [sys.executable, "-m", "bbnode", "up", "masked.py", "--nodes", "client=4",
         "--invoke", "server", "--times", "2", *settings],
        capture_output=True, text=True, timeout=PATIENCE_S, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "up-out" / "report.json").read_text())
    assert report["ok"]
    assert "secagg_unmask" not in done.stderr
    for log in (tmp_path / "up-out").glob("nodes/*/daemon.log"):
        assert "Error" not in log.read_text()
