"""What of a changed configuration takes effect while a node runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from bbnode.daemon.config import keys
from bbnode.daemon.config.reload import RELOADABLE, compare
from bbnode.daemon.config.sources import ResolvedConfig, resolve

_BASE = """
[artifact]
path = "a.onnx"
targets = ["client"]
"""


def _config(tmp_path: Path, text: str) -> ResolvedConfig:
    file = tmp_path / "node.toml"
    file.write_text(_BASE + text)
    return resolve(file, environ={})


@pytest.mark.parametrize(
    ("text", "applied", "needs_restart"),
    [
        ("", (), ()),
        ('[node]\nlog_level = "debug"\n', ("node.log_level",), ()),
        ('[node]\nlog_level = "info"\n', (), ()),  # its default
        ('[node]\nname = "x"\n', (), ("node.name",)),
        ("[limits]\nframes = 3\n[node]\nstop_grace_s = 9.0\n",
         ("node.stop_grace_s",), ("limits.frames",)),
        ("[slots.model]\nhidden = 3\n", (), ("slots", "slots.model.hidden")),
    ],
)  # fmt: skip
def test_changes_are_told_apart(
    tmp_path: Path, text: str, applied: tuple[str, ...], needs_restart: tuple[str, ...]
) -> None:
    changes = compare(_config(tmp_path, ""), _config(tmp_path, text))
    assert (changes.applied, changes.needs_restart) == (applied, needs_restart)
    assert bool(changes) is bool(applied or needs_restart)


def test_a_change_can_be_asked_for_by_its_table(tmp_path: Path) -> None:
    changes = compare(_config(tmp_path, ""), _config(tmp_path, '[node]\nlog_level = "debug"\n'))
    assert changes.touch("node.log_")
    assert not changes.touch("network.")


def test_every_key_that_reloads_exists() -> None:
    known = {".".join(path) for path, _ in keys()}
    for name in RELOADABLE:
        assert any(key == name or (name.endswith(".") and key.startswith(name)) for key in known)
