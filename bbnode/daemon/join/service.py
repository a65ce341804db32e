"""A joined node as a service of systemd: its files go where its unit looks for them.

Rule: the node stays the same one. Identity, membership and state are moved, the settings of its
node.toml are kept, and no peer is asked. Files are moved only once it is certain that the node can
be created. Only regular files are moved; files moved by root belong to the service's user.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import re
import stat
from dataclasses import dataclass
from pathlib import Path

from bbnode.daemon import paths, units
from bbnode.daemon.config.sources import ConfigError, ResolvedConfig
from bbnode.daemon.join.folder import Folder
from bbnode.daemon.join.prepare import Prepared

# The pattern of node.name, which is also the instance of the unit.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
# The modes of the unit (StateDirectoryMode); those of directories above by file-hierarchy(7).
_STATE_MODE, _FILE_MODE, _SHARED_MODE = 0o700, 0o600, 0o755
_ARTIFACT_MODE = 0o644
# Not moved: files that a node creates at each start, and those that mark a directory as in use.
_LEFT = ("lock", "access.lock", "control.sock")
# Moved last: while it is in the old place, the move can be repeated.
_LAST = "identity.key"


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """A service that a node becomes."""

    folder: Folder
    # True for a service of the machine, False for one of this user.
    system: bool

    @property
    def start(self) -> str:
        """The command that starts it now and with the machine."""
        who = "systemctl" if self.system else "systemctl --user"
        unit = "bbnode" if self.system else "bbnode-user"
        return f"{who} enable --now {unit}@{self.folder.name}"

    @property
    def exists(self) -> bool:
        """True if the node already is this service."""
        return paths.identity_file(self.folder.state_dir).exists()

    def check(self) -> None:
        """Raise ConfigError or StorageError if this service cannot be installed here."""
        if not _NAME.fullmatch(self.folder.name):
            raise ConfigError(
                f"--name {self.folder.name!r}: a service's name is 1 to 64 letters, digits, "
                "dots, dashes and underscores, and begins with a letter or digit"
            )
        units.wanted(system=self.system)
        if not self.system:
            return
        if os.geteuid() != 0:
            raise paths.StorageError("a service of the system is made by root; try sudo, or --user")
        self._owner()

    def establish(self, prepared: Prepared) -> ResolvedConfig:
        """Write the service's files and its unit, and move the node's stored files there.

        Raises ConfigError, StateDirInUse and StorageError.
        """
        before, folder = prepared.options.folder, self.folder
        resolved = folder.configure(
            prepared.options.source,
            sha256=prepared.obtained.artifact.sha256,
            target=prepared.plan.targets[0],
            settings=prepared.options.settings,
            earlier=before.config_file if before.config_file.exists() else None,
        )
        self._make_directories()
        with paths.lock_state_dir(before.state_dir):
            paths.write_atomically(
                folder.artifact_file, _read(prepared.obtained.file), mode=_ARTIFACT_MODE
            )
            if before.state_dir != folder.state_dir:
                with paths.lock_state_dir(folder.state_dir):
                    _move(before.state_dir, folder.state_dir)
            self.give()
            folder.write_config(resolved)
        if before.state_dir != folder.state_dir:
            _clear(before)
        units.install(system=self.system)
        return resolved

    def _owner(self) -> tuple[int, int]:
        if not self.system:
            return os.geteuid(), os.getegid()
        try:
            entry = pwd.getpwnam(paths.SYSTEM_USER)
        except KeyError as error:
            raise paths.StorageError(
                f"this machine has no user {paths.SYSTEM_USER!r}, which services run as; make it "
                f"with: {units.user_command()}"
            ) from error
        return entry.pw_uid, entry.pw_gid

    def _make_directories(self) -> None:
        try:
            if not self.system:
                paths.make_state_dir(self.folder.directory)
                paths.make_state_dir(self.folder.state_dir)
                # It may be the folder of the joined node.
                self.folder.state_dir.chmod(_STATE_MODE)
                return
            for directory, mode in (
                (self.folder.directory, _SHARED_MODE),
                (self.folder.state_dir.parent, _SHARED_MODE),
                (self.folder.state_dir, _STATE_MODE),
            ):
                if not directory.is_dir():
                    directory.mkdir(parents=True)
                    directory.chmod(mode)  # regardless of the umask
        except OSError as error:
            raise paths.StorageError(f"{error.filename}: {error.strerror}") from error

    def give(self) -> None:
        """Hand existing state over to the service's user. Raises StorageError."""
        if not self.system or not self.exists:
            return
        uid, gid = self._owner()
        try:
            descriptor = os.open(self.folder.state_dir, os.O_RDONLY | os.O_DIRECTORY)
            try:
                for entry in os.scandir(descriptor):
                    os.chown(entry.name, uid, gid, dir_fd=descriptor, follow_symlinks=False)
                os.fchown(descriptor, uid, gid)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise paths.StorageError(f"{self.folder.state_dir}: {error.strerror}") from error


def service(name: str, *, system: bool) -> Service:
    """Return the service of a name."""
    users, systems = paths.config_dirs()
    where = systems if system else users
    return Service(
        folder=Folder(
            name=name,
            config_file=where / f"{name}.toml",
            artifact_file=where / f"{name}.onnx",
            state_dir=paths.default_state_dir(name, system=system),
        ),
        system=system,
    )


def _move(before: Path, after: Path) -> None:
    """Move the files of a state; an interrupted move is finished by the next call.

    Raises StorageError.
    """
    for file in sorted(before.iterdir(), key=lambda file: (file.name == _LAST, file.name)):
        if file.name in _LEFT or not stat.S_ISREG(file.lstat().st_mode):
            continue
        # Copied, as the target may be on another file system, or belong to another user.
        paths.write_atomically(after / file.name, _read(file), mode=_FILE_MODE)
        with contextlib.suppress(OSError):
            file.unlink()


def _read(file: Path) -> bytes:
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as stream:
            return stream.read()
    except OSError as error:
        raise paths.StorageError(f"{file}: {error.strerror}") from error


def _clear(before: Folder) -> None:
    """Remove the node's old files, so that it is not run there again."""
    for file in (
        before.config_file,
        before.artifact_file,
        *(before.state_dir / name for name in _LEFT),
    ):
        with contextlib.suppress(OSError):
            file.unlink()
    for directory in (before.state_dir, before.directory):
        # The folder stays if it holds other files, such as the service's state.
        with contextlib.suppress(OSError):
            directory.rmdir()
