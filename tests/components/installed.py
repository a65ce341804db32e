"""Packages that a test installs into a folder: modules, and a `.dist-info` with entry points."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from bbnode.components import registry
from bbnode.ir import plugins


@contextmanager
def installed(
    folder: Path, package: str, modules: Mapping[str, str], entries: Mapping[str, Mapping[str, str]]
) -> Iterator[None]:
    """Install a package while the block runs; `entries` are entry points by group and name."""
    info = folder / f"{package}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    groups = (
        f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in listed.items())
        for group, listed in entries.items()
    )
    (info / "entry_points.txt").write_text("\n".join(groups))
    for name, source in modules.items():
        (folder / f"{name}.py").write_text(source)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        plugins.rescan()
        try:
            yield
        finally:
            for type_name, cls in list(registry._REGISTERED.items()):
                if cls.__module__ in modules:
                    del registry._REGISTERED[type_name]
            for name in modules:
                sys.modules.pop(name, None)
            patch.undo()
            plugins.rescan()
