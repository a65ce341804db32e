"""The Noise XX handshake: three messages that yield two session keys and the peer's static key.

Rule: it follows Noise, revision 34, as `Noise_XX_25519_ChaChaPoly_SHA256`; the payloads are the
caller's (`handshake`). Nothing here waits: `write` and `read` go through the messages of PATTERN in
turn, and anything but the peer's next message is a HandshakeError, after which the handshake is
dead. `tests/transport/test_noise_xx.py` compares it with published vectors and another library.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections.abc import Callable
from typing import Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from bbnode.ir.decoding import Boundary
from bbnode.transport.errors import HandshakeError

# The tokens of each message; the dialling side writes the first message (Noise, 7.5).
PATTERN: Final = (("e",), ("e", "ee", "s", "es"), ("s", "se"))
_FAILED: Final = len(PATTERN) + 1
# The name has 32 bytes, so it is the initial hash itself (Noise, 5.2).
_NAME: Final = b"Noise_XX_25519_ChaChaPoly_SHA256"
_KEY_BYTES: Final = 32
_TAG_BYTES: Final = 16
_NONCE: Final = struct.Struct("<4xQ")


class NoiseXX:
    """One side of a Noise XX handshake."""

    __slots__ = (
        "_chain", "_initiator", "_key", "_make_key", "_next", "_nonce", "_ours", "_static",
        "_theirs", "hash",
    )  # fmt: skip

    def __init__(
        self,
        static: X25519PrivateKey,
        *,
        initiator: bool,
        prologue: bytes = b"",
        make_key: Callable[[], X25519PrivateKey] = X25519PrivateKey.generate,
    ) -> None:
        """Start a handshake; both sides must use the same `prologue`.

        `make_key` creates our ephemeral key, which is used once: only the published vectors have
        fixed ones.
        """
        self._initiator = initiator
        self._make_key = make_key
        self._static = static.public_key().public_bytes_raw()
        # Our private keys and the peer's public ones, by their letters in the pattern.
        self._ours = {"s": static}
        self._theirs: dict[str, bytes] = {}
        self._chain = self.hash = _NAME
        self._key: ChaCha20Poly1305 | None = None
        self._nonce = 0
        # Index of the next message of the pattern.
        self._next = 0
        self._mix_hash(prologue)

    @property
    def writes(self) -> bool:
        """True if the next message is ours to write."""
        return self._next < len(PATTERN) and (self._next % 2 == 0) == self._initiator

    @property
    def done(self) -> bool:
        """True after the last message."""
        return self._next == len(PATTERN)

    @property
    def has_key(self) -> bool:
        """True if the payload of the next written message will be encrypted."""
        return self._next > 0

    @property
    def static(self) -> bytes | None:
        """The peer's static key, 32 bytes, which its payload must prove; None before it arrived."""
        return self._theirs.get("s")

    def fail(self) -> None:
        """Abort the handshake, when the payload of the peer's message was refused."""
        self._next = _FAILED

    def write(self, payload: bytes = b"") -> bytes:
        """Return our next message; the payload of the first one is not encrypted.

        Raises HandshakeError for a weak key of the peer, which yields no secret.
        """
        if not self.writes:
            raise RuntimeError("it is not our turn in the handshake")
        step, self._next = self._next, _FAILED
        message = b""
        for token in PATTERN[step]:
            if token == "e":
                self._ours[token] = key = self._make_key()
                public = key.public_key().public_bytes_raw()
                self._mix_hash(public)
                message += public
            elif token == "s":
                message += self._seal(self._static)
            else:
                self._agree(token)
        message += self._seal(payload)
        self._next = step + 1
        return message

    def read(self, message: bytes) -> bytes:
        """Process the peer's next message and return its payload; raises HandshakeError."""
        if self.writes or self._next >= len(PATTERN):
            raise RuntimeError("it is not the peer's turn in the handshake")
        # Set first, so that the handshake is dead after an error.
        step, self._next = self._next, _FAILED
        with Boundary("no message of the handshake", HandshakeError):
            at = 0
            for token in PATTERN[step]:
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
            payload = self._open(message[at:])
        self._next = step + 1
        return payload

    def split(self) -> tuple[bytes, bytes]:
        """Return the keys for sending and for receiving, after the last message."""
        if not self.done:
            raise RuntimeError("the handshake is not done")
        to_listener, to_dialler = _derive(self._chain, b"")
        return (to_listener, to_dialler) if self._initiator else (to_dialler, to_listener)

    # -- Noise, section 5 --------------------------------------------------------------------

    def _mix_hash(self, data: bytes) -> None:
        self.hash = hashlib.sha256(self.hash + data).digest()

    def _agree(self, token: str) -> None:
        """Mix in the Diffie-Hellman result of two keys; the dialler's is named first."""
        first, second = token[0], token[1]
        ours, theirs = (first, second) if self._initiator else (second, first)
        try:
            shared = self._ours[ours].exchange(
                X25519PublicKey.from_public_bytes(self._theirs[theirs])
            )
        except ValueError as error:
            # A point of low order, whose result everybody can compute.
            raise HandshakeError("a key that keeps nothing secret") from error
        self._chain, key = _derive(self._chain, shared)
        self._key, self._nonce = ChaCha20Poly1305(key), 0

    def _seal(self, plain: bytes) -> bytes:
        """Encrypt, or return `plain` while there is no key; hash the result."""
        sealed = plain
        if self._key is not None:
            sealed = self._key.encrypt(_NONCE.pack(self._nonce), plain, self.hash)
            self._nonce += 1
        self._mix_hash(sealed)
        return sealed

    def _open(self, sealed: bytes) -> bytes:
        """Decrypt, or return `sealed` while there is no key; hash the input."""
        plain = sealed
        if self._key is not None:
            try:
                plain = self._key.decrypt(_NONCE.pack(self._nonce), sealed, self.hash)
            except InvalidTag:
                raise HandshakeError("a message that is not of this handshake") from None
            self._nonce += 1
        self._mix_hash(sealed)
        return plain


def _derive(chain: bytes, secret: bytes) -> tuple[bytes, bytes]:
    """Return two keys by Noise's HKDF, section 4.3."""
    base = hmac.digest(chain, secret, "sha256")
    first = hmac.digest(base, b"\x01", "sha256")
    return first, hmac.digest(base, first + b"\x02", "sha256")
