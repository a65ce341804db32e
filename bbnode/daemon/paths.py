"""The files of a node: their places, and how they are written.

Rule: every path of a node is derived from its state directory here and nowhere else; a file is
written completely or not at all; one process owns a state directory at a time.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import itertools
import os
import pwd
import re
import stat
import sys
import tempfile
import time
from collections.abc import Container, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from bbnode.ir.caps import MAX_STATE_ENTRIES
from bbnode.ir.errors import DeploymentError, EnvironmentFault

# sockaddr_un.sun_path: 108 bytes on Linux and 104 on the BSDs and macOS, with its final NUL.
SOCKET_PATH_MAX_BYTES = 107 if sys.platform.startswith("linux") else 103

# No command takes this long to write one of its small files beside a daemon.
MAX_WRITING_S = 3600.0
# The temporary files of `write_atomically` and `create_key_file`.
_DRAFT = re.compile(r"\.(?P<name>[^/]+)\.(?:[a-z0-9_]{8}|[0-9]+\.new)")

# Directories of services (file-hierarchy(7)); users have those of the XDG specification.
SYSTEM_CONFIG_DIR = Path("/etc/bbnode")
SYSTEM_STATE_DIR = Path("/var/lib/bbnode")
SYSTEM_RUNTIME_DIR = Path("/run/bbnode")
SYSTEM_CACHE_DIR = Path("/var/cache/bbnode")
# Search path of systemd's units (systemd.unit(5)); the first is the administrator's.
SYSTEM_UNIT_DIRS = tuple(
    Path(folder, "systemd/system") for folder in ("/etc", "/usr/local/lib", "/usr/lib", "/lib")
)
USER_UNIT_DIRS = tuple(
    Path(folder, "systemd/user") for folder in ("/etc", "/usr/local/lib", "/usr/lib")
)
# The user of the system's nodes (bbnode/daemon/units).
SYSTEM_USER = "bbnode"


class StorageError(EnvironmentFault):
    """A file or directory cannot be made, read or written; the message names it."""


class StateDirInUse(DeploymentError):
    """Another daemon runs on this state directory."""


class SocketPathError(DeploymentError):
    """The directory of the control socket is not safe to use."""


def config_dirs() -> tuple[Path, ...]:
    """Return the search path of configurations: first the user's folder, then the system's."""
    return _xdg("XDG_CONFIG_HOME", ".config"), SYSTEM_CONFIG_DIR


def unit_dirs(*, system: bool) -> tuple[Path, ...]:
    """Return the search path of systemd's units: first the folder of this user, or of root."""
    if system:
        return SYSTEM_UNIT_DIRS
    return _xdg("XDG_CONFIG_HOME", ".config").parent / "systemd" / "user", *USER_UNIT_DIRS


def has_system_user() -> bool:
    """Return True if this machine has the user that the system's nodes run as."""
    try:
        pwd.getpwnam(SYSTEM_USER)
    except KeyError:
        return False
    return True


def find_config(file: Path) -> Path:
    """Return `file`, or if it does not exist and is a bare name, the first match in `config_dirs`.

    Returns `file` if there is no match.
    """
    if _is_there(file) or len(file.parts) != 1:
        return file
    return next((d / file.name for d in config_dirs() if _is_there(d / file.name)), file)


def _is_there(file: Path) -> bool:
    """Return True if a file exists; False also if this user may not enter its folder."""
    try:
        return file.exists()
    except OSError:
        return False


def is_system_config(file: Path | None) -> bool:
    """Return True if a configuration is the system's, and with it the node's files."""
    return file is not None and file.absolute().parent == SYSTEM_CONFIG_DIR


def default_state_dir(name: str, *, system: bool = False) -> Path:
    """Return `/var/lib/bbnode/<name>` for the system, else `$XDG_STATE_HOME/bbnode/<name>`."""
    if system:
        return SYSTEM_STATE_DIR / name
    return _xdg("XDG_STATE_HOME", ".local/state") / name


def data_dir() -> Path:
    """Return the folder of a user's own data, independent of nodes: the keys of networks."""
    return _xdg("XDG_DATA_HOME", ".local/share")


def cache_dir(state_dir: Path) -> Path:
    """Return the folder for files that can be fetched again: artifacts by their digest."""
    if state_dir.parent == SYSTEM_STATE_DIR:
        return SYSTEM_CACHE_DIR
    return _xdg("XDG_CACHE_HOME", ".cache")


def _xdg(variable: str, default: str) -> Path:
    home = os.environ.get(variable, "")
    # The XDG rules: a relative value is ignored.
    return (Path(home) if Path(home).is_absolute() else Path.home() / default) / "bbnode"


def identity_file(state_dir: Path) -> Path:
    """Return the file of the node's private key."""
    return state_dir / "identity.key"


def lock_file(state_dir: Path) -> Path:
    """Return the lock file, held while a daemon runs on the directory."""
    return state_dir / "lock"


def make_state_dir(state_dir: Path) -> None:
    """Create the directory, readable only by its owner. Raises `StorageError`."""
    try:
        # Regardless of the umask, only the owner may write the parents: another writer could
        # replace it.
        for parent in reversed(state_dir.parents):
            if not parent.exists():
                parent.mkdir(mode=0o755, exist_ok=True)
        state_dir.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise StorageError(
            f"state directory {state_dir}: {error.strerror}; set node.state_dir to a "
            "directory that this user can write"
        ) from error


def enter_empty_dir(state_dir: Path) -> None:
    """Make an empty folder in the state directory the working directory.

    So code that is tricked into reading a relative path finds nothing. Raises `StorageError`.
    """
    path = state_dir / "empty"
    make_state_dir(state_dir)
    try:
        # Not writable, so that it stays empty.
        path.mkdir(mode=0o500, exist_ok=True)
        if path.is_symlink():
            raise StorageError(f"{path} is a link; remove it")
        os.chdir(path)
    except OSError as error:
        raise StorageError(f"{path}: {error.strerror}; remove what has that name") from error


def control_socket(state_dir: Path) -> Path:
    """Return the path of the control socket.

    It is `<state_dir>/control.sock`; for the system's nodes, `/run/bbnode/<name>/control.sock`. If
    that is longer than a unix socket's path can be, it is `<runtime directory>/<hash of the state
    directory>.sock` in the first of `_runtime_dirs` that is short enough, which daemon and client
    both compute. Raises `SocketPathError` if others could replace the content of that directory.
    """
    direct = state_dir.absolute() / "control.sock"
    if direct.parent.parent == SYSTEM_STATE_DIR:
        direct = SYSTEM_RUNTIME_DIR / state_dir.name / "control.sock"
    if _fits_socket(direct):
        return direct
    name = f"{hashlib.sha256(os.fsencode(state_dir.absolute())).hexdigest()[:16]}.sock"
    short = next(p for d in _runtime_dirs() if _fits_socket(p := d / name))
    if short.parent.is_symlink() or short.parent.exists():
        # Others may create directories there, and could wait in one for our clients.
        _check_socket_dir(short.parent)
    return short


def _fits_socket(path: Path) -> bool:
    return len(os.fsencode(path)) <= SOCKET_PATH_MAX_BYTES


def make_socket_dir(socket: Path) -> None:
    """Create the directory of a control socket, and refuse one that others could replace.

    Raises `StorageError` or `SocketPathError`.
    """
    make_state_dir(socket.parent)
    _check_socket_dir(socket.parent)


def _check_socket_dir(directory: Path) -> None:
    info = directory.lstat()
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.geteuid() or info.st_mode & 0o022:
        raise SocketPathError(
            f"control socket: {directory} has to be a directory of this user that nobody "
            "else can write; fix its owner and mode (0700)"
        )


def _runtime_dirs() -> tuple[Path, ...]:
    runtime_dir = os.environ.get("XDG_RUNTIME_DIR", "")
    name = f"bbnode-{os.geteuid()}"
    own = (
        Path(runtime_dir) / "bbnode"
        if Path(runtime_dir).is_absolute()
        else Path(tempfile.gettempdir()) / name
    )
    # TMPDIR may be as deep as the state directory: in the scratch folder of a job, or of a test.
    return own, Path("/tmp") / name


def open_lock(path: Path) -> int:
    """Open a lock file, created with mode 0600 if it does not exist; return a descriptor.

    Raises `StorageError` for anything but a regular file, links included.
    """
    # Without O_NONBLOCK a FIFO would block the start.
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        descriptor = os.open(path, flags, 0o600)
    except OSError as error:
        why = "is a link; remove it" if error.errno == errno.ELOOP else error.strerror
        raise StorageError(f"{path}: {why}") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise StorageError(f"{path} is not a regular file; remove it")
    return descriptor


@contextmanager
def lock_state_dir(state_dir: Path) -> Iterator[None]:
    """Lock the directory while the block runs; the kernel unlocks it when the process dies.

    Raises `StateDirInUse` (naming the other process) or `StorageError`.
    """
    make_state_dir(state_dir)
    path = lock_file(state_dir)
    descriptor = open_lock(path)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise StorageError(f"{path}: cannot be locked: {error.strerror}") from error
            holder = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip() or "unknown"
            raise StateDirInUse(
                f"state directory {state_dir} is in use by process {holder}; stop that daemon, "
                "or give this one another node.state_dir"
            ) from error
        try:
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()}\n".encode("ascii"), 0)
        except OSError as error:
            raise StorageError(f"{path}: cannot be written: {error.strerror}") from error
        yield
    finally:
        # The file stays: removing it would let two daemons lock two different files.
        os.close(descriptor)


def write_atomically(path: Path, data: bytes | Iterable[bytes], *, mode: int) -> None:
    """Write a file so that a crash leaves the old one or the new one, never a part.

    `data` may come in pieces; an error of their iterator passes, and the old file stays. Raises
    `StorageError` naming the path.
    """
    try:
        # `remove_orphans` recognizes the name by its form.
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            _fill(descriptor, data, mode)
            Path(temporary).replace(path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
        sync_directory(path.parent)
    except OSError as error:
        raise StorageError(f"{path}: cannot be written: {error.strerror}") from error


def write_synced(path: Path, data: bytes, *, mode: int) -> None:
    """Write a file that is on disk at the return; a crash before may leave a part of it.

    For a file that only the caller knows. Raises OSError, and leaves no file then.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
    descriptor = os.open(path, flags, mode)
    try:
        _fill(descriptor, data, mode)
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def _fill(descriptor: int, data: bytes | Iterable[bytes], mode: int) -> None:
    """Write, sync and close an open file."""
    with os.fdopen(descriptor, "wb") as stream:
        for piece in (data,) if isinstance(data, bytes) else data:
            stream.write(piece)
        os.fchmod(stream.fileno(), mode)
        stream.flush()
        os.fsync(stream.fileno())


def sync_directory(directory: Path) -> None:
    """Make the renames in a directory survive a power cut. Raises OSError."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_orphans(state_dir: Path, own: Container[str]) -> list[Path]:
    """Remove temporary files of killed writers from a state directory; return their paths.

    `own` are the files that only the holder of the lock, the caller, writes. Other processes may
    be writing the rest right now, so only old temporary files of those are removed. Links, and
    files that can't be removed, are left alone.
    """
    removed = []
    oldest_s = time.time() - MAX_WRITING_S
    try:
        with os.scandir(state_dir) as listed:
            entries = list(itertools.islice(listed, MAX_STATE_ENTRIES))
    except OSError:
        return []
    for entry in entries:
        form = _DRAFT.fullmatch(entry.name)
        if form is None:
            continue
        with contextlib.suppress(OSError):
            info = entry.stat(follow_symlinks=False)
            if stat.S_ISREG(info.st_mode) and (form["name"] in own or info.st_mtime < oldest_s):
                path = Path(entry.path)
                path.unlink()
                removed.append(path)
    return removed
