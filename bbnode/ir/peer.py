"""PeerId: the identity of a peer.

Rule: a PeerId is the multihash of its public key, exactly as in libp2p (peer-ids spec):
Ed25519 keys are the identity multihash (code 0x00) of the 36-byte protobuf public key,
others the sha2-256 multihash (code 0x12). Text form is base58btc without a prefix.
"""

from __future__ import annotations

import hashlib
from functools import total_ordering

import base58

from bbnode.ir.caps import MAX_DIGEST_BYTES, MAX_PEER_ID_CHARS
from bbnode.ir.decoding import clip, refused
from bbnode.ir.errors import DecodeError

IDENTITY_MULTIHASH = 0x00
SHA2_256_MULTIHASH = 0x12


# PublicKey{Type=Ed25519(1), Data=32 bytes} in protobuf, from libp2p's peer-ids spec.
_ED25519_PUBLIC_KEY_PREFIX = b"\x08\x01\x12\x20"


@total_ordering
class PeerId:
    """An immutable multihash PeerId; ordered and hashed by its bytes.

    Order matters: reductions over peers run in PeerId order on every node. `raw` is the result of
    `to_bytes`, as an attribute for hot paths.
    """

    __slots__ = ("_hash", "_text", "raw")

    def __init__(self, multihash: bytes) -> None:
        """Raise DecodeError unless `multihash` is `<code><length><digest>`, fully used."""
        raw = bytes(multihash)
        if (
            len(raw) < 3
            or raw[0] not in (IDENTITY_MULTIHASH, SHA2_256_MULTIHASH)
            or raw[1] != len(raw) - 2
            or raw[1] > MAX_DIGEST_BYTES
            or (raw[0] == SHA2_256_MULTIHASH and raw[1] != 32)
        ):
            raise DecodeError(
                f"not a PeerId: {raw[:8].hex()}… ({len(raw)} bytes); expected a multihash with "
                "code 0x00 (identity) or 0x12 (sha2-256) and its exact length"
            )
        self.raw = raw
        self._hash = hash(raw)
        self._text: str | None = None

    @classmethod
    def from_bytes(cls, raw: bytes) -> PeerId:
        """Return the PeerId with these multihash bytes."""
        return cls(raw)

    @classmethod
    def from_ed25519_public_key(cls, public_key: bytes) -> PeerId:
        """Return the PeerId of a raw 32-byte Ed25519 public key."""
        if len(public_key) != 32:
            raise DecodeError(f"an Ed25519 public key has 32 bytes, got {len(public_key)}")
        inlined = _ED25519_PUBLIC_KEY_PREFIX + public_key
        return cls(bytes((IDENTITY_MULTIHASH, len(inlined))) + inlined)

    @classmethod
    def from_seed(cls, seed: int | str) -> PeerId:
        """Return a well-formed PeerId that belongs to no key: for tests and simulations."""
        digest = hashlib.sha256(f"bbnode-peer-{seed}".encode()).digest()
        return cls(bytes((SHA2_256_MULTIHASH, 32)) + digest)

    @classmethod
    def parse(cls, text: str) -> PeerId:
        """Parse base58btc text; raises DecodeError, which quotes it, for anything else."""
        if len(text) > MAX_PEER_ID_CHARS:  # base58 takes quadratic time
            raise DecodeError(f"not a PeerId: {len(text)} characters")
        try:
            raw = base58.b58decode(text)
        except Exception as error:
            raise refused(f"not a PeerId: '{clip(text)}' is not base58btc", error) from error
        return cls(raw)

    def to_bytes(self) -> bytes:
        """Return the canonical multihash bytes."""
        return self.raw

    @property
    def short(self) -> str:
        """The last six characters, for display in tables."""
        return str(self)[-6:]

    def __str__(self) -> str:
        if self._text is None:
            self._text = base58.b58encode(self.raw).decode("ascii")
        return self._text

    def __repr__(self) -> str:
        return f"PeerId({self!s})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PeerId) and self.raw == other.raw

    def __lt__(self, other: PeerId) -> bool:
        return self.raw < other.raw

    def __hash__(self) -> int:
        return self._hash
