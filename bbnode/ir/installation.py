"""Command lines for a reader to type, that reach the installation which prints them.

Rule: a `pip` or `python` on PATH is often another environment's, or none. All advice to install a
package and all commands to run next are written here, with the interpreter that runs.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

# The file by which pipx marks an environment (pipx.pipx_metadata_file).
_PIPX_MARK = "pipx_metadata.json"
_SCRIPT = "bbnode"
# As pyproject.toml has them; libp2p pins a fastecdsa that has to be compiled, with GMP.
_LIBP2P = "libp2p>=0.8.1,<0.9"
_WITH_WHEELS = "fastecdsa>=4"
_COMPILER = ("gcc", "python3-dev", "libgmp-dev")


def python() -> str:
    """Return the command of this interpreter: "python" where PATH leads to it, else its path."""
    found = shutil.which("python")
    return "python" if found and _is_same(found, sys.executable) else shlex.quote(sys.executable)


def bbnode() -> str:
    """Return the command of this bbnode: as it was called, or with this interpreter."""
    script = program()
    if script is None:
        return f"{shlex.quote(sys.executable)} -m bbnode"
    found = shutil.which(_SCRIPT)
    return _SCRIPT if found and _is_same(found, str(script)) else shlex.quote(str(script))


def program() -> Path | None:
    """Return the absolute path of the script `bbnode` that runs, else that beside the interpreter.

    None if there is neither, as for `python -m bbnode` in a checkout. Links are kept: what they
    lead to moves with an upgrade.
    """
    called = shutil.which(sys.argv[0]) if sys.argv and sys.argv[0] else None
    if called is not None and Path(called).name == _SCRIPT:
        return Path(os.path.abspath(called))  # noqa: PTH100 - not through links
    beside = Path(sys.executable).parent / _SCRIPT
    return beside if os.access(beside, os.X_OK) else None


def install(*requirements: str, again: bool = False) -> str:
    """Return the command that installs requirements where this interpreter imports them.

    `again` replaces what is installed. An environment of pipx has a command of its own; into one
    without pip, as uv and the image have it, another's installs.
    """
    wanted = " ".join(f"'{each}'" for each in requirements)
    environment, exe = Path(sys.prefix), shlex.quote(sys.executable)
    if (environment / _PIPX_MARK).exists():
        return f"pipx inject {'--force ' if again else ''}{shlex.quote(environment.name)} {wanted}"
    if _is_of_uv(environment):
        return f"uv pip install {'--reinstall ' if again else ''}--python {exe} {wanted}"
    option = "--force-reinstall " if again else ""
    if find_spec("pip") is None:
        return f"python3 -m pip --python {exe} install {option}{wanted}"
    return f"{exe} -m pip install {option}{wanted}"


def libp2p_ways() -> str:
    """Return how to install py-libp2p for this interpreter, in one line, for both kinds of machine.

    Of uv, which can leave a pin of it out of account, and of pip, which cannot.
    """
    exe = shlex.quote(sys.executable)
    return (
        f"without a compiler: echo '{_WITH_WHEELS}' | uv pip install --python {exe} --override - "
        f"'{_LIBP2P}' (uv comes by {exe} -m pip install uv); with one: apt-get install "
        f"{' '.join(_COMPILER)}, then {exe} -m pip install '{_LIBP2P}'"
    )


def _is_of_uv(environment: Path) -> bool:
    """Return True for an environment that uv made, which has no pip of its own."""
    try:
        lines = (environment / "pyvenv.cfg").read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return False
    return any(line.partition("=")[0].strip() == "uv" for line in lines)


def _is_same(one: str, other: str) -> bool:
    """Return True for two names of one file in one folder; environments share interpreters."""
    try:
        here, there = Path(one), Path(other)
        return here.parent.resolve() == there.parent.resolve() and here.samefile(there)
    except OSError:
        return False
