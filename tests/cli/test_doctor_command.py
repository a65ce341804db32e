"""`bbnode doctor` as a user sees it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bbnode.cli.main import main


def test_lines_json_and_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "node.toml"
    file.write_text(
        '[node]\nstate_dir = "state"\n[artifact]\ntargets = ["server"]\n'
        'module = "bbnode.examples.federated_digits:FederatedRound"\n'
    )
    assert main(["doctor", "-c", str(file)]) == 0
    assert "PASSED   components" in capsys.readouterr().out
    wrong = ["--set", 'artifact.targets=["nobody"]']
    assert main(["doctor", "-c", str(file), *wrong]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-3].startswith("FAILED   components")
    assert lines[-2].strip().startswith("-> ")
    assert lines[-1].startswith("SKIPPED  data")
    assert main(["doctor", "-c", str(file), "--json", *wrong]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["schema"] == "bbnode/doctor/1"
    assert (told["ok"], told["checks"][-2]["verdict"]) == (False, "FAILED")
