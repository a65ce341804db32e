"""The handshake that secures a connection: Noise XX, and who is at the other end.

Rule: to the letter of Noise, revision 34, as `Noise_XX_25519_ChaChaPoly_SHA256`, and of libp2p's
Noise specification, whose payload proves the peer: its public key, and its signature over the
static key. Nothing here waits: `write` and `read` go through the messages of PATTERN in turn, and
what a peer sends instead of the next one is a HandshakeError, after which nothing goes on. What
libp2p sends besides (early data, extensions) is not used, and left out of account.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from typing import Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from bbnode.ir.decoding import Boundary
from bbnode.ir.peer import PeerId
from bbnode.transport.errors import OTHER_KEY, HandshakeError
from bbnode.transport.identity import Identity
from bbnode.transport.libp2p.keys import (
    KeyType,
    decode_fields,
    decode_public_key,
    encode_field,
    encode_public_key,
)
from bbnode.transport.libp2p.noise_channel import NoiseChannel

NOISE_ID: Final = "/noise"

# The tokens of each message, the first of which the side that dialled writes (Noise, 7.5).
PATTERN: Final = (("e",), ("e", "ee", "s", "es"), ("s", "se"))
_FAILED: Final = len(PATTERN) + 1
# Of 32 bytes, and so the first hash itself (Noise, 5.2).
_NAME: Final = b"Noise_XX_25519_ChaChaPoly_SHA256"
_KEY_BYTES: Final = 32
_TAG_BYTES: Final = 16
_NONCE: Final = struct.Struct("<4xQ")
_SIGNED: Final = b"noise-libp2p-static-key:"
# Fields of the payload.
_IDENTITY_KEY, _IDENTITY_SIGNATURE = 1, 2


class NoiseKeys:
    """The static key of a node, with the proof that it is its own; one for all its connections."""

    __slots__ = ("payload", "private", "public")

    def __init__(self, identity: Identity) -> None:
        self.private = X25519PrivateKey.generate()
        self.public = self.private.public_key().public_bytes_raw()
        owner = Ed25519PrivateKey.from_private_bytes(identity.seed)
        key = encode_public_key(KeyType.ED25519, owner.public_key().public_bytes_raw())
        self.payload = encode_field(_IDENTITY_KEY, key) + encode_field(
            _IDENTITY_SIGNATURE, owner.sign(_SIGNED + self.public)
        )


def decode_payload(payload: bytes, static: bytes) -> PeerId:
    """Return the peer that a payload proves to own a static key; raises HandshakeError."""
    with Boundary("no proof of a peer", HandshakeError):
        fields = decode_fields(payload)
        encoded, signature = fields.get(_IDENTITY_KEY), fields.get(_IDENTITY_SIGNATURE)
        if not isinstance(encoded, bytes) or not isinstance(signature, bytes):
            raise HandshakeError("a payload without a public key and its signature")
        key = decode_public_key(encoded)
        if not key.verifies(_SIGNED + static, signature):
            raise HandshakeError("the signature of the static key is not that peer's")
        return key.peer_id


class NoiseHandshake:
    """One side of a handshake."""

    __slots__ = (
        "_chain", "_expected", "_hash", "_initiator", "_key", "_keys", "_next", "_nonce",
        "_ours", "_peer", "_theirs",
    )  # fmt: skip

    def __init__(self, keys: NoiseKeys, *, initiator: bool, expected: PeerId | None = None) -> None:
        """Begin; `expected` is the peer that has to be there, None for any."""
        self._keys = keys
        self._initiator = initiator
        self._expected = expected
        # Our private keys, and their public ones, by their letters in the pattern.
        self._ours = {"s": keys.private}
        self._theirs: dict[str, bytes] = {}
        self._chain = self._hash = _NAME
        self._key: ChaCha20Poly1305 | None = None
        self._nonce = 0
        # Of the messages of the pattern.
        self._next = 0
        # Who is at the other end, once it is proved.
        self._peer: PeerId | None = None
        # There is no prologue.
        self._mix_hash(b"")

    @property
    def writes(self) -> bool:
        """True if the next message is ours to write."""
        return self._next < len(PATTERN) and (self._next % 2 == 0) == self._initiator

    def write(self) -> bytes:
        """Return our next message."""
        if not self.writes:
            raise RuntimeError("it is not our turn in the handshake")
        step, self._next = self._next, _FAILED
        message = b""
        for token in PATTERN[step]:
            if token == "e":
                self._ours[token] = made = X25519PrivateKey.generate()
                public = made.public_key().public_bytes_raw()
                self._mix_hash(public)
                message += public
            elif token == "s":
                message += self._seal(self._keys.public)
            else:
                self._agree(token)
        message += self._seal(self._keys.payload if self._key is not None else b"")
        self._next = step + 1
        return message

    def read(self, message: bytes) -> None:
        """Take the peer's next message; raises HandshakeError."""
        if self.writes or self._next >= len(PATTERN):
            raise RuntimeError("it is not the peer's turn in the handshake")
        # Nothing goes on after an error.
        step, self._next = self._next, _FAILED
        tokens = PATTERN[step]
        with Boundary("no message of the handshake", HandshakeError):
            at = 0
            for token in tokens:
                if token not in ("e", "s"):
                    self._agree(token)
                    continue
                end = at + _KEY_BYTES + (_TAG_BYTES if token == "s" else 0)
                if len(message) < end:
                    raise HandshakeError(f"a message of {len(message)} bytes is cut short")
                part, at = message[at:end], end
                if token == "e":
                    self._mix_hash(part)
                self._theirs[token] = part if token == "e" else self._open(part)
            # That of the first message nobody has proved: it says nothing.
            payload = self._open(message[at:])
            if "s" in tokens:
                self._peer = decode_payload(payload, self._theirs["s"])
        if None not in (self._expected, self._peer) and self._peer != self._expected:
            raise HandshakeError(f"{OTHER_KEY}: {self._peer}")
        self._next = step + 1

    def finish(self) -> tuple[PeerId, NoiseChannel]:
        """Return the peer and the packets of the connection, after the last message."""
        if self._next != len(PATTERN) or self._peer is None:
            raise RuntimeError("the handshake is not done")
        to_listener, to_dialler = _derive(self._chain, b"")
        if self._initiator:
            return self._peer, NoiseChannel(to_listener, to_dialler)
        return self._peer, NoiseChannel(to_dialler, to_listener)

    # -- Noise, section 5 --------------------------------------------------------------------

    def _mix_hash(self, data: bytes) -> None:
        self._hash = hashlib.sha256(self._hash + data).digest()

    def _agree(self, token: str) -> None:
        """Mix in what both sides compute of a key of each; the dialler's stands first."""
        first, second = token[0], token[1]
        ours, theirs = (first, second) if self._initiator else (second, first)
        try:
            shared = self._ours[ours].exchange(
                X25519PublicKey.from_public_bytes(self._theirs[theirs])
            )
        except ValueError as error:
            # A point of low order, with which everybody computes the same.
            raise HandshakeError("a key that keeps nothing secret") from error
        self._chain, key = _derive(self._chain, shared)
        self._key, self._nonce = ChaCha20Poly1305(key), 0

    def _seal(self, plain: bytes) -> bytes:
        """Encrypt, once there is a key."""
        sealed = plain
        if self._key is not None:
            sealed = self._key.encrypt(_NONCE.pack(self._nonce), plain, self._hash)
            self._nonce += 1
        self._mix_hash(sealed)
        return sealed

    def _open(self, sealed: bytes) -> bytes:
        """Decrypt, once there is a key."""
        plain = sealed
        if self._key is not None:
            try:
                plain = self._key.decrypt(_NONCE.pack(self._nonce), sealed, self._hash)
            except InvalidTag:
                raise HandshakeError("a message that is not of this handshake") from None
            self._nonce += 1
        self._mix_hash(sealed)
        return plain


def _derive(chain: bytes, secret: bytes) -> tuple[bytes, bytes]:
    """Return two keys: HKDF of Noise, section 4.3."""
    base = hmac.digest(chain, secret, "sha256")
    first = hmac.digest(base, b"\x01", "sha256")
    return first, hmac.digest(base, first + b"\x02", "sha256")
