"""`bbnode version`: the installed versions.

Rule: versions are read from the installed packages' metadata; nothing is imported. Two builds of
one version differ in `build`.
"""

from __future__ import annotations

import platform
from importlib import metadata

from bbnode import __version__
from bbnode.cli import output
from bbnode.cli.common import JsonOption
from bbnode.daemon.build import build_id

# The packages that decide how a node behaves towards others.
PACKAGES = ("cryptography", "onnx", "onnxruntime", "numpy", "trio", "protobuf")


def command(as_json: JsonOption = False) -> None:
    """Print the versions of bbnode and of what it runs on."""
    versions = {
        "bbnode": __version__,
        "build": build_id(),
        "python": platform.python_version(),
    }
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "not installed"
    if as_json:
        output.json_object(versions)
        return
    for name, version in versions.items():
        output.data(f"{name:<14}{version}")
