"""A report that lets others understand a node: versions, configuration, state, log; no secrets.

Rule: it contains no key, token, ticket or membership. Files are listed only with name, size and
mode, and settings whose name marks them as secret are left out. A part that can't be collected is
replaced by its error.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import stat
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bbnode.daemon import paths
from bbnode.daemon.build import full_version
from bbnode.daemon.config.sources import ResolvedConfig, shown
from bbnode.daemon.control.client import ControlClient
from bbnode.daemon.observing import doctor
from bbnode.ir.errors import BbnodeError

# Lines from the end of the log.
LOG_LINES = 500
# A daemon that hangs is reported as one that does not answer.
TIMEOUT_S = 5.0
REDACTED = "(removed)"

_SECRET = re.compile(r"secret|token|password|passwd|credential|api_?key|private", re.IGNORECASE)
# Any text in the form of our tickets, statements or lists.
_SIGNED = re.compile(r"\bbb[a-z]*[0-9]+:[A-Za-z0-9_-]{16,}")
_PACKAGES = (
    "bbnode", "onnx", "onnxruntime", "numpy", "trio", "protobuf", "multiaddr",
    "cryptography", "pydantic", "msgpack",
)  # fmt: skip


def collect(resolved: ResolvedConfig) -> dict[str, Any]:
    """Return the report as one JSON object; takes a few seconds if the daemon does not answer."""
    parts: dict[str, Callable[[], Any]] = {
        "versions": _versions,
        "machine": _machine,
        "config": lambda: _config(resolved),
        "files": lambda: _files(resolved.state_dir),
        "doctor": lambda: [finding.as_json() for finding in doctor.examine(resolved)],
        "daemon": lambda: _daemon(resolved.state_dir),
    }
    report: dict[str, Any] = {"made": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
    for name, part in parts.items():
        try:
            report[name] = part()
        except (BbnodeError, OSError) as error:
            report[name] = {"error": f"{type(error).__name__}: {error}"}
    cleaned: dict[str, Any] = redact(report)
    return cleaned


def redact(value: Any, key: str = "") -> Any:
    """Return a value without secrets, as its keys mark them, and without signed texts."""
    if isinstance(value, dict):
        named = value.get("key")  # a row that names its key beside the value
        return {
            name: redact(item, named if name == "value" and isinstance(named, str) else str(name))
            for name, item in value.items()
        }
    if isinstance(value, list):
        return [redact(item, key) for item in value]
    if _SECRET.search(key) and value not in (None, False, True):
        return REDACTED
    return _SIGNED.sub(REDACTED, value) if isinstance(value, str) else value


def _versions() -> dict[str, str]:
    versions = {"bbnode": full_version(), "python": sys.version.split()[0]}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return versions


def _machine() -> dict[str, Any]:
    return {
        "platform": platform.platform(),
        "cores": os.cpu_count(),
        "libc": " ".join(platform.libc_ver()),
    }


def _config(resolved: ResolvedConfig) -> dict[str, Any]:
    rows = [{"key": k, "value": value, "origin": origin} for k, value, origin in shown(resolved)]
    return {"file": str(resolved.file), "keys": rows}


def _files(state_dir: Path) -> list[dict[str, Any]]:
    files = []
    for path in sorted(state_dir.iterdir()):
        entry = path.lstat()
        files.append(
            {
                "name": path.name,
                "bytes": entry.st_size,
                "mode": stat.filemode(entry.st_mode),
                "owner": entry.st_uid,
                "modified": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(entry.st_mtime)),
            }
        )
    return files


def _daemon(state_dir: Path) -> dict[str, Any]:
    with ControlClient(paths.control_socket(state_dir), timeout_s=TIMEOUT_S) as client:
        answers: dict[str, Any] = {"status": client.get("/v1/status")}
        answers["executions"] = client.get("/v1/executions")
        status, metrics = client.fetch("GET", "/metrics")
        answers["metrics"] = {"status": status, "lines": metrics.decode().splitlines()}
        answers["log"] = list(client.stream("/v1/logs", {"last": LOG_LINES, "follow": 0}))
    return answers
