"""Rounds on real daemons: `bbnode up`, a process for each node on this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from reproduce._federation import RoundFailed, Slots
from reproduce.experiment import ROOT, Cell, Claim, Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NEAR = 0.02  # of an accuracy: means are summed in the order of PeerIds, which are others here


def rounds_on_daemons(
    program: str,
    arguments: Mapping[str, Any],
    clients: Sequence[Slots],
    server: Slots,
    count: int,
) -> list[dict[str, Any]]:
    """Return what the server put out, by round.

    `program` is "package.module:Class", `arguments` are its own; client i has the settings
    `clients[i]`. Raises RoundFailed where a node or a round failed.
    """
    settings = [("server", server)]
    settings += [(f"client.{number}", slots) for number, slots in enumerate(clients)]
    with TemporaryDirectory() as folder:
        command = [
            *(sys.executable, "-m", "bbnode", "up", program, "--json"),
            *("--out", folder, "--times", str(count)),
            *("--nodes", f"server=1,client={len(clients)}"),
        ]
        for name, value in arguments.items():
            command += ["--arg", f"{name}={json.dumps(value)}"]
        for node, slots in settings:
            for slot, keys in slots.items():
                for key, value in keys.items():
                    command += ["--set", f"{node}.slots.{slot}.{key}={json.dumps(value)}"]
        ended = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=False,
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(ROOT)},  # components of an experiment's own
        )
        report = Path(folder) / "report.json"
        if ended.returncode:
            raise RoundFailed(ended.stderr.strip().splitlines()[-1] if ended.stderr else "no word")
        return [row["outputs"] for row in json.loads(report.read_text("utf-8"))["rounds"]]


def beside_simulator(found: Mapping[str, tuple[list[float], list[float]]]) -> tuple[Table, Claim]:
    """Return accuracies by round, on daemons and in the simulator, and that they are the same."""
    rows: list[list[Cell]] = []
    for name, curves in found.items():
        rows += [[name, "daemons", *curves[0]], ["", "simulator", *curves[1]]]
    count = len(rows[0]) - 2
    apart = max(abs(a - b) for curves in found.values() for a, b in zip(*curves, strict=True))
    return (
        Table("accuracy by round", ["", "", *map(str, range(1, 1 + count))], rows),
        Claim(
            f"daemons learn what nodes in the simulator do, within {NEAR} in each round",
            apart <= NEAR,
            f"at most {apart:.4f} apart",
        ),
    )


def draw_curves(figure: Figure, found: Mapping[str, tuple[list[float], list[float]]]) -> None:
    """Draw accuracies by round: lines for daemons, dots for the simulator."""
    axes = figure.subplots()
    for number, (name, (real, simulated)) in enumerate(found.items()):
        rounds = range(1, 1 + len(real))
        axes.plot(rounds, real, label=name, color=f"C{number}")
        axes.plot(rounds, simulated, "o", color=f"C{number}", markersize=4)
    axes.set(xlabel="round", ylabel="accuracy", ylim=(0, 1))
    axes.legend()
