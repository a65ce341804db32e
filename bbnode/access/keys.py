"""Ed25519 keys: signing, the PeerIds that verify, and the files of private keys.

Rule: a signature is over `<context> NUL <body>`. The context names the kind and version of the
signed thing, so that a signature of one kind is never one of another kind, nor anything that
libp2p lets a peer sign with the same key. A key file is the 36-byte protobuf private key that
libp2p's own tools write (type 1, then the 32-byte seed), created with mode 0600 from its first
moment on, never replaced, and refused when others may read it.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from bbnode.access.errors import IdentityError
from bbnode.ir.peer import PeerId

SEED_BYTES = 32
SIGNATURE_BYTES = 64

# The y of Ed25519's points of order 1, 4, 2 and 8 (twice): a signature that one of these keys
# "made" is good for any message.
_PRIME = 2**255 - 19
_Y_OF_ORDER_8 = 0x7A03AC9277FDC74EC6CC392CFA53202A0F67100D760B3CBA4FD84D3D706A17C7
_SMALL_ORDER_Y = frozenset({1, 0, _PRIME - 1, _Y_OF_ORDER_8, _PRIME - _Y_OF_ORDER_8})

# A PeerId that holds its Ed25519 key: identity multihash of 36 bytes, then the protobuf
# PublicKey{Type=Ed25519(1), Data=32 bytes} (libp2p's peer-ids spec).
_INLINED_KEY = b"\x00\x24\x08\x01\x12\x20"
# PrivateKey{Type=Ed25519(1), Data=32 bytes} in protobuf, from libp2p's peer-ids spec.
_PRIVATE_KEY_PREFIX = b"\x08\x01\x12\x20"
KEY_FILE_BYTES = len(_PRIVATE_KEY_PREFIX) + SEED_BYTES
_PRIVATE_MODE = 0o600


@dataclass(frozen=True, slots=True)
class SigningKey:
    """An Ed25519 key and its PeerId. The seed is secret and stays out of `repr`."""

    peer_id: PeerId
    seed: bytes = field(repr=False)

    @classmethod
    def from_seed(cls, seed: bytes) -> Self:
        """Return the key of a 32-byte Ed25519 seed; raises IdentityError for another length."""
        if len(seed) != SEED_BYTES:
            raise IdentityError(f"an Ed25519 seed has {SEED_BYTES} bytes, got {len(seed)}")
        public = Ed25519PrivateKey.from_private_bytes(seed).public_key()
        return cls(peer_id=PeerId.from_ed25519_public_key(public.public_bytes_raw()), seed=seed)

    @classmethod
    def generate(cls) -> Self:
        """Return a new key from the operating system's randomness."""
        return cls.from_seed(Ed25519PrivateKey.generate().private_bytes_raw())

    def sign(self, context: bytes, body: bytes) -> bytes:
        """Return the 64-byte signature over `body` in that context."""
        return Ed25519PrivateKey.from_private_bytes(self.seed).sign(_message(context, body))


def verifies(signer: PeerId, context: bytes, body: bytes, signature: bytes) -> bool:
    """Return True if `signer` signed that; False also for a PeerId without an Ed25519 key."""
    raw = signer.to_bytes()
    if not can_sign(signer):
        return False
    try:
        public = ed25519_public_key(raw[len(_INLINED_KEY) :])
        public.verify(signature, _message(context, body))
    except (InvalidSignature, ValueError):
        # ValueError: the bytes are not a valid public key.
        return False
    return True


def can_sign(peer: PeerId) -> bool:
    """Return True if a PeerId holds an Ed25519 key, so that its signatures can be checked."""
    raw = peer.to_bytes()
    if not raw.startswith(_INLINED_KEY) or len(raw) != len(_INLINED_KEY) + SEED_BYTES:
        return False
    return not _why_no_key(raw[len(_INLINED_KEY) :])


def ed25519_public_key(raw: bytes) -> Ed25519PublicKey:
    """Return the public key of 32 bytes.

    Raises ValueError for other bytes, for a second encoding of a point, and for a point of small
    order, in whose name anybody could sign.
    """
    why = _why_no_key(raw)
    if why:
        raise ValueError(why)
    return Ed25519PublicKey.from_public_bytes(raw)


def _why_no_key(raw: bytes) -> str:
    if len(raw) != SEED_BYTES:
        return f"an Ed25519 key has {SEED_BYTES} bytes, not {len(raw)}"
    y = int.from_bytes(raw, "little") & (2**255 - 1)  # the last bit is the sign of x
    if y % _PRIME in _SMALL_ORDER_Y:
        return "an Ed25519 key of small order, in whose name anybody can sign"
    return "an Ed25519 key in another encoding than its own" if y >= _PRIME else ""


def _message(context: bytes, body: bytes) -> bytes:
    return context + b"\0" + body


def read_key_file(path: str | os.PathLike[str]) -> bytes:
    """Return the 32-byte Ed25519 seed in the file `path`.

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
