"""The report of a testbed: report.json.

Rule: every number comes from a node's record of a round; nothing is filled in.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from bbnode.daemon import paths
from bbnode.daemon.invoke.rounds import CODED_METRICS

SCHEMA = "bbnode/up/1"
_PACKAGES = (
    "bbnode", "trio", "onnx", "onnxruntime", "numpy", "scikit-learn", "protobuf",
)  # fmt: skip
_KEPT = (
    *("round", "ok", "seconds", "bytes", "responded", "missing", "lost", "missing_why", "refused"),
    *("failures", "outputs", "skipped"),
)


def round_row(node: str, record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row of the report from the invoking node's record of a round."""
    metrics = record.get("metrics", {})
    coded = {name: metrics[name] for name in CODED_METRICS if name in metrics}
    return {"node": node, **{key: record[key] for key in _KEPT if key in record}, **coded}


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that did the work."""
    installed = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            installed[package] = version(package)
        except PackageNotFoundError:
            installed[package] = "not installed"
    return installed


def write_report(out: Path, report: Mapping[str, Any]) -> Path:
    """Write report.json; returns its path. Raises StorageError."""
    path = out / "report.json"
    paths.write_atomically(path, (json.dumps(report, indent=2) + "\n").encode(), mode=0o644)
    return path
