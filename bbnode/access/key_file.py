"""Private key files: of a node's identity, and of a network's owner.

Rule: the file is the 36-byte protobuf private key that libp2p's own tools write (type 1, then
the 32-byte seed), created with mode 0600 from its first moment on, never replaced, and
refused when others may read it.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from bbnode.access.errors import IdentityError
from bbnode.access.signing import SEED_BYTES

# PrivateKey{Type=Ed25519(1), Data=32 bytes} in protobuf, from libp2p's peer-ids spec.
_PRIVATE_KEY_PREFIX = b"\x08\x01\x12\x20"
KEY_FILE_BYTES = len(_PRIVATE_KEY_PREFIX) + SEED_BYTES
_PRIVATE_MODE = 0o600


def read_key_file(path: str | os.PathLike[str]) -> bytes:
    """The 32-byte Ed25519 seed kept in `path`.

    Raises IdentityError when the file is missing, unreadable, no regular file, readable by
    others, or not the 36 bytes of an Ed25519 key.
    """
    file = Path(path)
    try:
        # Opened before it is looked at, so that what is judged is what is read; a FIFO in
        # its place must not block the start.
        descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise IdentityError(
            f"cannot read the key file {file}: {error.strerror}; check its path and its owner"
        ) from error
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise IdentityError(f"the key file {file} is not a regular file; point to another")
        mode = stat.S_IMODE(status.st_mode)
        if mode & 0o077:
            raise IdentityError(
                f"the key file {file} is open to others (mode {mode:04o}); "
                f"run: chmod 600 {file}, and replace the key if it may have been read"
            )
        # A regular file gives as much as it has at once; one byte more shows a longer one.
        raw = os.read(descriptor, KEY_FILE_BYTES + 1)
    except OSError as error:
        raise IdentityError(f"cannot read the key file {file}: {error.strerror}") from error
    finally:
        os.close(descriptor)
    if len(raw) != KEY_FILE_BYTES or not raw.startswith(_PRIVATE_KEY_PREFIX):
        size = f"{len(raw)}" if len(raw) <= KEY_FILE_BYTES else f"over {KEY_FILE_BYTES}"
        raise IdentityError(
            f"the key file {file} is not an Ed25519 key of {KEY_FILE_BYTES} bytes "
            f"({size} bytes found); restore it, or move it away to get a new one"
        )
    return raw[len(_PRIVATE_KEY_PREFIX) :]


def create_key_file(path: str | os.PathLike[str], seed: bytes) -> None:
    """Write a seed to `path`, which must not exist; raises IdentityError.

    The bytes go to a private file beside it first and are linked into place whole, so that
    a crash never leaves half a key under the name that the next start reads.
    """
    file = Path(path)
    draft = file.with_name(f".{file.name}.{os.getpid()}.new")
    try:
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise IdentityError(
            f"cannot create the directory of the key file {file}: {error.strerror}"
        ) from error
    try:
        draft.unlink(missing_ok=True)
        descriptor = os.open(
            draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, _PRIVATE_MODE
        )
        try:
            with os.fdopen(descriptor, "wb") as handle:
                handle.write(_PRIVATE_KEY_PREFIX + seed)
                handle.flush()
                os.fsync(handle.fileno())
            # link() and not rename(): it fails where another process was first.
            os.link(draft, file)
        finally:
            draft.unlink(missing_ok=True)
    except FileExistsError as error:
        raise IdentityError(f"the key file {file} exists already; it is never replaced") from error
    except OSError as error:
        raise IdentityError(
            f"cannot create the key file {file}: {error.strerror}; check the directory"
        ) from error
