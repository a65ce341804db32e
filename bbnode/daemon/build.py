"""The id of this build: a digest of the package's files, the same wherever they are installed.

Rule: two builds of one version differ in it exactly if a file of the package differs. It uses a
wheel's list of digests (RECORD) if that describes the package that runs; otherwise, as in a
checkout, it reads the files.
"""

from __future__ import annotations

import base64
import csv
import hashlib
from functools import cache
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from bbnode import __version__

_PACKAGE = Path(__file__).parent.parent
_DIGITS = 12
# Left by the interpreter beside the files; no file of ours has it in its path.
_COMPILED = "__pycache__"
UNKNOWN = "unknown"


@cache
def build_id() -> str:
    """Return 12 hexadecimal digits; "unknown" if the files cannot be read."""
    digests = _recorded(_PACKAGE) or _computed(_PACKAGE)
    if not digests:
        return UNKNOWN
    lines = "".join(f"{name} {digest}\n" for name, digest in sorted(digests.items()))
    return hashlib.sha256(lines.encode()).hexdigest()[:_DIGITS]


@cache
def full_version() -> str:
    """Return the version with its build, as "0.1.0+0123456789ab"."""
    return f"{__version__}+{build_id()}"


def _recorded(package: Path) -> dict[str, str]:
    """Return the digest of each file by name from the installed wheel's list; empty if none."""
    try:
        installed: Distribution = distribution(package.name)
        # The installed package may be another one than the package that runs.
        if not Path(str(installed.locate_file(package.name))).samefile(package):
            return {}
        record = installed.read_text("RECORD")
    except (PackageNotFoundError, OSError, UnicodeDecodeError):
        return {}
    digests: dict[str, str] = {}
    for row in csv.reader((record or "").splitlines()):
        name, digest = (*row, "", "")[:2]
        kind, _, value = digest.partition("=")
        if kind == "sha256" and _is_ours(name, package):
            digests[name] = value
    return digests


def _computed(package: Path) -> dict[str, str]:
    """Return the digest of each file as a wheel would list it; empty if one can't be read."""
    digests: dict[str, str] = {}
    try:
        for file in package.rglob("*"):
            name = file.relative_to(package.parent).as_posix()
            if _is_ours(name, package) and file.is_file():
                digest = hashlib.sha256(file.read_bytes()).digest()
                digests[name] = base64.urlsafe_b64encode(digest).rstrip(b"=").decode()
    except OSError:
        return {}
    return digests


def _is_ours(name: str, package: Path) -> bool:
    return name.startswith(f"{package.name}/") and f"/{_COMPILED}/" not in name
