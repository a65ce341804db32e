"""What the scripts prepare: a start of a node compiles nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

LIBRARY = Path(__file__).parents[2] / "scripts" / "lib.sh"


def compile_package(root: Path) -> None:
    """Run the function of the scripts on a checkout with this Python."""
    venv = root / ".venv" / "bin"
    venv.mkdir(parents=True, exist_ok=True)
    if not (venv / "python").exists():
        (venv / "python").symlink_to(sys.executable)
    script = f". {LIBRARY}; BBNODE_ROOT={root} BBNODE_VENV={root}/.venv; compile_package"
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    subprocess.run(["bash", "-euc", script], check=True, env=environment)


def compiled(root: Path) -> set[str]:
    """Return the names of the modules that have bytecode."""
    return {path.name.partition(".")[0] for path in root.glob("bbnode/**/*.pyc")}


def test_the_package_is_compiled_whatever_the_environment_says(tmp_path: Path) -> None:
    package = tmp_path / "bbnode" / "part"
    package.mkdir(parents=True)
    (package / "one.py").write_text("ONE = 1\n")
    compile_package(tmp_path)
    assert compiled(tmp_path) == {"one"}
    before = next(package.rglob("*.pyc")).stat().st_mtime_ns
    # Half an edit is told where it is imported, and stops no script.
    (package / "two.py").write_text("TWO = (\n")
    compile_package(tmp_path)
    assert compiled(tmp_path) == {"one"}
    assert next(package.rglob("*.pyc")).stat().st_mtime_ns == before
