"""Where the other implementations are, and what happens to their tests where they are not.

`BBNODE_JS` names a folder in which the packages of `package.json` are installed, and `BBNODE_P2PD`
go-libp2p's daemon; without them `.venv/interop` has both, if `BBNODE_INTEROP=required scripts/test`
has put them there (`setup_interop` in scripts/lib.sh). One that is missing skips its tests, and
fails them under BBNODE_INTEROP=required, which continuous integration sets.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

_INSTALLED = Path(__file__).parents[2] / ".venv" / "interop"
# Read here: no test sees these variables.
_REQUIRED = os.environ.get("BBNODE_INTEROP") == "required"


def _path(variable: str, default: str) -> str:
    """Return the path in a variable, or of what is installed; "" without either."""
    installed = _INSTALLED / default
    return os.environ.get(variable, "") or (str(installed) if installed.exists() else "")


JS_FOLDER = _path("BBNODE_JS", "js") if shutil.which("node") else ""
P2PD = _path("BBNODE_P2PD", "go/hivemind/hivemind_cli/p2pd")


def needs(name: str, found: str) -> pytest.MarkDecorator:
    """Return the mark of tests that need another implementation; fails where it is required."""
    missing = f"{name} is not installed: BBNODE_INTEROP=required scripts/test installs it"
    if not found and _REQUIRED:
        pytest.fail(missing, pytrace=False)
    return pytest.mark.skipif(not found, reason=missing)
