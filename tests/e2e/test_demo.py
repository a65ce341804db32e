"""`bbnode demo` as a user runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

REPORT_KEYS = {"rounds", "peers", "versions", "artifact_sha256", "model_sha256"}
ROUND_KEYS = {"round", "accuracy", "loss", "seconds", "bytes", "responded"}


def demo(out: Path, *options: str) -> tuple[int, dict[str, Any], str]:
    done = subprocess.run(
        [sys.executable, "-m", "bbnode", "demo", "--out", str(out), *options],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    report = json.loads((out / "report.json").read_text()) if (out / "report.json").exists() else {}
    return done.returncode, report, done.stdout + done.stderr


def test_the_demo_trains_and_reports_and_repeats_itself(tmp_path: Path) -> None:
    code, first, said = demo(tmp_path / "a", "--rounds", "5", "--clients", "2")
    assert code == 0, said
    assert set(first) >= REPORT_KEYS
    assert [row["round"] for row in first["rounds"]] == [1, 2, 3, 4, 5]
    for row in first["rounds"]:
        assert set(row) >= ROUND_KEYS
        assert len(row["responded"]) == 2
        assert row["bytes"] > 2 * 2 * 4 * (64 * 64 + 64 + 64 * 10 + 10)  # weights, both ways
    assert len({p["pid"] for p in first["peers"]}) == 3
    assert len({p["peer"] for p in first["peers"]}) == 3
    assert first["rounds"][-1]["accuracy"] > 0.9
    assert (tmp_path / "a" / "accuracy.png").read_bytes().startswith(b"\x89PNG")
    assert "accuracy" in said

    code, second, said = demo(tmp_path / "b", "--rounds", "5", "--clients", "2", "--json")
    assert code == 0, said
    assert second["artifact_sha256"] == first["artifact_sha256"]
    assert second["model_sha256"] == first["model_sha256"]
    assert {p["peer"] for p in second["peers"]}.isdisjoint(p["peer"] for p in first["peers"])


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_twenty_rounds_reach_95_percent(tmp_path: Path, seed: int) -> None:
    code, report, said = demo(tmp_path / "out", "--seed", str(seed))
    assert code == 0, said
    assert report["final_accuracy"] >= 0.95


def test_label_sorted_shards_train_too(tmp_path: Path) -> None:
    code, report, said = demo(
        tmp_path / "out", "--rounds", "3", "--clients", "2", "--split", "shards", "--seed", "3"
    )
    assert code == 0, said
    assert len(report["peers"]) == 3
    assert report["rounds"][-1]["accuracy"] > report["rounds"][0]["accuracy"]


def test_a_folder_that_no_demo_made_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "nodes").mkdir()
    (tmp_path / "nodes" / "thesis.txt").write_text("mine")
    code, _, said = demo(tmp_path)
    assert code == 1
    assert "--out" in said
    assert (tmp_path / "nodes" / "thesis.txt").read_text() == "mine"
