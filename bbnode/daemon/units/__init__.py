"""Units of systemd, which come with the package and are written for services that need one.

Rule: a unit of another author, or one without our first line, is left alone; one of ours is written
again, as after an upgrade. It runs the program that writes it.
"""

from __future__ import annotations

import re
import shlex
import sys
from importlib import resources
from pathlib import Path

from bbnode.daemon import paths
from bbnode.daemon.config.sources import ConfigError
from bbnode.ir import installation

SYSTEM_UNIT = "bbnode@.service"
USER_UNIT = "bbnode-user@.service"
SYSUSERS = "bbnode.sysusers.conf"
MARK = "# Written by bbnode, which replaces it; for changes: systemctl edit, or remove this line.\n"

# The program in the files, as an installation by deploy/README.md has it.
_PROGRAM = re.compile(r"^(Exec(?:Start|Reload))=(\S+)", re.MULTILINE)
# Paths without characters that are special to systemd (systemd.service(5), "COMMAND LINES").
_PLAIN = re.compile(r"[A-Za-z0-9_/.,:+@=-]+")
# Folders that a unit does not see, or sees empty: PrivateTmp, ProtectHome.
_HIDDEN = ("/tmp", "/var/tmp")
_HIDDEN_FROM_SYSTEM = (*_HIDDEN, "/home", "/root", "/run/user")


def file(name: str) -> Path:
    """Return the path of a file of this package."""
    return Path(str(resources.files(__package__) / name))


def wanted(*, system: bool) -> tuple[Path, str] | None:
    """Return the destination of a service's unit, and its text; None if it exists.

    Raises ConfigError if the unit could not run this program.
    """
    name = SYSTEM_UNIT if system else USER_UNIT
    folders = paths.unit_dirs(system=system)
    ours = [_read(folder / name) for folder in folders]
    if any(each is not None and not each.startswith(MARK) for each in ours):
        return None
    text = MARK + _text(name, system=system)
    return None if ours[0] == text else (folders[0] / name, text)


def install(*, system: bool) -> Path | None:
    """Write the unit of a service where systemd looks for it; return its path if it was written.

    Raises ConfigError as `wanted`, and StorageError.
    """
    missing = wanted(system=system)
    if missing is None:
        return None
    target, text = missing
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise paths.StorageError(f"{target.parent}: {error.strerror}") from error
    paths.write_atomically(target, text.encode(), mode=0o644)
    return target


def user_command() -> str:
    """Return the command that creates the user of the system's services."""
    return f"systemd-sysusers {shlex.quote(str(file(SYSUSERS)))}"


def _text(name: str, *, system: bool) -> str:
    text = file(name).read_text("utf-8")
    script = installation.program()
    command = [str(script)] if script else [sys.executable, "-m", "bbnode"]
    hidden = _HIDDEN_FROM_SYSTEM if system else _HIDDEN
    # The script, and its dependencies: the environment, and the interpreter of that.
    for place in (command[0], sys.prefix, sys.executable):
        for seen in (Path(place), Path(place).resolve()):
            if any(seen.is_relative_to(folder) for folder in hidden):
                raise ConfigError(
                    f"{seen}: a service may not look there; install bbnode elsewhere, "
                    f"{'as in /opt/bbnode' if system else 'as with pipx'}, and run it from there"
                )
    if not _PLAIN.fullmatch(command[0]):
        raise ConfigError(
            f"{command[0]!r}: a unit is not written for a path with blanks or other signs of "
            "systemd's; install bbnode elsewhere"
        )
    return _PROGRAM.sub(lambda match: f"{match[1]}={' '.join(command)}", text)


def _read(unit: Path) -> str | None:
    """Return the text of a unit, "" if it is none; None without the file."""
    try:
        return unit.read_text("utf-8", "replace")
    except FileNotFoundError:
        return None
    except OSError:
        return ""  # not ours: a link to /dev/null masks a unit, and a folder is no unit
