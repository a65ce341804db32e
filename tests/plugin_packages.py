"""Packages with entry points, installed into a folder for the time of a test."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from bbnode.ir import plugins

Install = Callable[..., None]


@contextmanager
def package_folder(folder: Path, monkeypatch: pytest.MonkeyPatch, group: str) -> Iterator[Install]:
    """Hand out `install(package, source, **entries)`: one module `<package>_plugin`, and entry
    points of the group that name it. Nothing of them is left behind."""
    monkeypatch.syspath_prepend(str(folder))
    installed: list[str] = []

    def install(package: str, source: str, **entries: str) -> None:
        info = folder / f"{package}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        listed = "".join(f"{name} = {value}\n" for name, value in entries.items())
        (info / "entry_points.txt").write_text(f"[{group}]\n{listed}")
        (folder / f"{package}_plugin.py").write_text(source)
        installed.append(f"{package}_plugin")
        plugins.rescan()

    yield install
    for module in installed:
        sys.modules.pop(module, None)
    monkeypatch.undo()
    plugins.rescan()
