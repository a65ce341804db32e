"""Keys, masks and sealed letters: X25519, HKDF-SHA256, AES-128 in counter mode, AES-128-GCM.

Rule: every key is derived for one purpose, one round and one ordered pair of peers, and used once,
so that a fixed nonce repeats under no key. A mask is the key stream of AES in counter mode over
zeros (the generator that Bonawitz et al. 2017, section 7, use), read as words.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from bbnode.components.secure_aggregation.ring import Words

KEY_BYTES: Final = 32  # of X25519, and of the seed of a client's own mask
TAG_BYTES: Final = 16
_STREAM_KEY_BYTES: Final = 16
_ONCE_NONCE: Final = bytes(12)
_COUNTER: Final = bytes(16)
# Of the key stream that is made and added at once: it stays in the processor's cache.
_CHUNK_BYTES: Final = 1 << 17
_ZEROS: Final = bytes(_CHUNK_BYTES)


class WeakKey(ValueError):
    """A public key with which every agreement has the same result."""


def public_key(private: bytes) -> bytes:
    """Return the X25519 public key of 32 secret bytes."""
    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def agreed(private: bytes, public: bytes) -> bytes:
    """Return the 32 bytes that both sides of an X25519 agreement have; raises WeakKey."""
    try:
        return X25519PrivateKey.from_private_bytes(private).exchange(
            X25519PublicKey.from_public_bytes(public)
        )
    except ValueError as error:
        raise WeakKey("a public key of X25519 that agrees on nothing") from error


def derived(secret: bytes, purpose: bytes) -> bytes:
    """Return the 16-byte key of a secret for one purpose (HKDF, RFC 5869)."""
    return HKDF(
        algorithm=hashes.SHA256(), length=_STREAM_KEY_BYTES, salt=None, info=purpose
    ).derive(secret)


def add_mask(words: Words, key: bytes, *, subtract: bool = False) -> None:
    """Add the mask of a key to `words`, modulo their ring, in place; or subtract it."""
    stream = Cipher(algorithms.AES(key), modes.CTR(_COUNTER)).encryptor()
    per_chunk = _CHUNK_BYTES // words.itemsize
    mask = np.empty(min(per_chunk, words.size), words.dtype)
    raw = memoryview(mask.data).cast("B")
    apply = np.subtract if subtract else np.add
    for at in range(0, words.size, per_chunk):
        part = words[at : at + per_chunk]
        if part.size < mask.size:
            mask, raw = mask[: part.size], raw[: part.nbytes]
        stream.update_into(_ZEROS[: part.nbytes], raw)
        apply(part, mask, out=part)


def seal(key: bytes, letter: bytes, about: bytes) -> bytes:
    """Return a letter encrypted under a key that is used once, bound to `about` (AES-GCM)."""
    return AESGCM(key).encrypt(_ONCE_NONCE, letter, about)


def unseal(key: bytes, sealed: bytes, about: bytes) -> bytes | None:
    """Return the letter, or None where it was not sealed under that key about that."""
    try:
        return AESGCM(key).decrypt(_ONCE_NONCE, sealed, about)
    except (InvalidTag, ValueError):
        return None
