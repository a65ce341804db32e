"""The demo's report: report.json and accuracy.png.

Rule: every number comes from what the server said about a round; nothing is filled in.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from bbnode.daemon import paths

_PACKAGES = (
    "bbnode", "libp2p", "trio", "onnx", "onnxruntime", "numpy", "scikit-learn", "protobuf",
)  # fmt: skip


def round_row(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row of the report from a round as the server reports it."""
    outputs = record["outputs"]
    model = outputs.get("model")
    return {
        "round": record["round"],
        "ok": record["ok"],
        "accuracy": outputs.get("accuracy"),
        "loss": outputs.get("loss"),
        "seconds": record["seconds"],
        "bytes": record["bytes"],
        "responded": record["responded"],
        "missing": record["missing"],
        "missing_why": record["missing_why"],
        "failures": record["failures"],
        "model_sha256": model.get("sha256") if isinstance(model, dict) else None,
    }


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that did the work."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def write_report(
    out: Path,
    *,
    options: Mapping[str, Any],
    rounds: Sequence[Mapping[str, Any]],
    peers: Sequence[Mapping[str, Any]],
    artifact_sha256: str,
    seconds: float,
) -> Path:
    """Write report.json; returns its path."""
    done = [row for row in rounds if row["ok"]]
    report = {
        "schema": "bbnode/demo-report/1",
        "options": dict(options),
        "rounds": list(rounds),
        "peers": list(peers),
        "versions": versions(),
        "artifact_sha256": artifact_sha256,
        "model_sha256": done[-1]["model_sha256"] if done else None,
        "final_accuracy": done[-1]["accuracy"] if done else None,
        "seconds": round(seconds, 3),
    }
    path = out / "report.json"
    paths.write_atomically(path, (json.dumps(report, indent=2) + "\n").encode(), mode=0o644)
    return path


def draw_accuracy(out: Path, rounds: Sequence[Mapping[str, Any]]) -> Path:
    """Draw accuracy and loss over the rounds into accuracy.png; returns its path."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import MaxNLocator

    done = [row for row in rounds if row["ok"]]
    numbers = [row["round"] for row in done]
    figure, axis = plt.subplots(figsize=(8, 4.5), layout="constrained")
    axis.plot(numbers, [100 * row["accuracy"] for row in done], "o-", color="tab:blue")
    axis.set_xlabel("round")
    axis.set_ylabel("test accuracy (%)", color="tab:blue")
    axis.grid(alpha=0.3)
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    losses = axis.twinx()
    losses.plot(numbers, [row["loss"] for row in done], ".--", color="tab:orange")
    losses.set_ylabel("test loss", color="tab:orange")
    for row in done:
        if row["missing"]:
            axis.axvline(row["round"], color="tab:red", alpha=0.3)
    axis.set_title("Federated averaging of digits, one daemon a peer")
    path = out / "accuracy.png"
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path
