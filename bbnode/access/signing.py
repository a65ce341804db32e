"""Ed25519 keys that sign, and the PeerIds that verify.

Rule: a signature is over `<context> NUL <body>`. The context names the kind and version of
what is signed, so that a signature of one kind is never one of another kind, nor anything
that libp2p lets a peer sign with the same key.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Self

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from bbnode.access.errors import IdentityError
from bbnode.ir.peer import PeerId

SEED_BYTES = 32
SIGNATURE_BYTES = 64

# A PeerId that holds its Ed25519 key: identity multihash of 36 bytes, then the protobuf
# PublicKey{Type=Ed25519(1), Data=32 bytes} (libp2p's peer-ids spec).
_INLINED_KEY = b"\x00\x24\x08\x01\x12\x20"


@dataclass(frozen=True, slots=True)
class SigningKey:
    """An Ed25519 key and its PeerId. The seed is secret and stays out of `repr`."""

    peer_id: PeerId
    seed: bytes = field(repr=False)

    @classmethod
    def from_seed(cls, seed: bytes) -> Self:
        """The key of a 32-byte Ed25519 seed; raises IdentityError for another length."""
        if len(seed) != SEED_BYTES:
            raise IdentityError(f"an Ed25519 seed has {SEED_BYTES} bytes, got {len(seed)}")
        public = Ed25519PrivateKey.from_private_bytes(seed).public_key()
        return cls(peer_id=PeerId.from_ed25519_public_key(public.public_bytes_raw()), seed=seed)

    @classmethod
    def generate(cls) -> Self:
        """A new key from the operating system's randomness."""
        return cls.from_seed(Ed25519PrivateKey.generate().private_bytes_raw())

    def sign(self, context: bytes, body: bytes) -> bytes:
        """The 64-byte signature over `body` in that context."""
        return Ed25519PrivateKey.from_private_bytes(self.seed).sign(_message(context, body))


def verifies(signer: PeerId, context: bytes, body: bytes, signature: bytes) -> bool:
    """Whether `signer` signed that; False also for a PeerId that holds no Ed25519 key."""
    raw = signer.to_bytes()
    if not can_sign(signer):
        return False
    try:
        public = Ed25519PublicKey.from_public_bytes(raw[len(_INLINED_KEY) :])
        public.verify(signature, _message(context, body))
    except (InvalidSignature, ValueError):
        # ValueError: bytes that are no point of the curve.
        return False
    return True


def can_sign(peer: PeerId) -> bool:
    """Whether a PeerId holds an Ed25519 key, so that its signatures can be checked."""
    raw = peer.to_bytes()
    return raw.startswith(_INLINED_KEY) and len(raw) == len(_INLINED_KEY) + SEED_BYTES


def _message(context: bytes, body: bytes) -> bytes:
    return context + b"\0" + body
