"""The handshake that secures a connection: Noise XX, and the proof of the peer's identity.

Rule: it follows libp2p's Noise specification: `noise_xx` without a prologue, whose payload proves
the peer: its public key, and its signature over the static key. Nothing here waits, and anything
but the peer's next message is a HandshakeError, after which the handshake is dead. libp2p's
additional data (early data, extensions) must be well-formed, and is otherwise ignored.
"""

from __future__ import annotations

from typing import Final

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from bbnode.ir.decoding import Boundary
from bbnode.ir.peer import PeerId
from bbnode.transport.errors import OTHER_KEY, HandshakeError, OtherPeerError
from bbnode.transport.identity import Identity
from bbnode.transport.libp2p.keys import (
    KeyType,
    decode_all_fields,
    decode_fields,
    decode_public_key,
    encode_field,
    encode_public_key,
)
from bbnode.transport.libp2p.noise_channel import NoiseChannel
from bbnode.transport.libp2p.noise_xx import NoiseXX

NOISE_ID: Final = "/noise"

_SIGNED: Final = b"noise-libp2p-static-key:"
# Fields of the payload.
_IDENTITY_KEY, _IDENTITY_SIGNATURE, _EXTENSIONS = 1, 2, 4


class NoiseKeys:
    """A node's static key and the proof that it owns it; one for all its connections."""

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
        parts = decode_all_fields(payload)
        for number, value in parts:
            if number == _EXTENSIONS and isinstance(value, bytes):
                decode_fields(value)
        fields = dict(parts)
        encoded, signature = fields.get(_IDENTITY_KEY), fields.get(_IDENTITY_SIGNATURE)
        if not isinstance(encoded, bytes) or not isinstance(signature, bytes):
            raise HandshakeError("a payload without a public key and its signature")
        key = decode_public_key(encoded)
        if not key.verifies(_SIGNED + static, signature):
            raise HandshakeError("the signature of the static key is not that peer's")
        return key.peer_id


class NoiseHandshake:
    """One side of a handshake."""

    __slots__ = ("_expected", "_keys", "_noise", "_peer")

    def __init__(self, keys: NoiseKeys, *, initiator: bool, expected: PeerId | None = None) -> None:
        """Start a handshake; `expected` is the required peer, None for any."""
        self._keys = keys
        self._expected = expected
        self._noise = NoiseXX(keys.private, initiator=initiator)
        # The other end's PeerId, once it is proved.
        self._peer: PeerId | None = None

    @property
    def writes(self) -> bool:
        """True if the next message is ours to write."""
        return self._noise.writes

    def write(self) -> bytes:
        """Return our next message."""
        return self._noise.write(self._keys.payload if self._noise.has_key else b"")

    def read(self, message: bytes) -> None:
        """Process the peer's next message; raises HandshakeError."""
        payload = self._noise.read(message)
        if (static := self._noise.static) is None:
            # The payload of the first message is not authenticated: ignore it.
            return
        try:
            peer = decode_payload(payload, static)
            if self._expected not in (None, peer):
                raise OtherPeerError(f"{OTHER_KEY}: {peer}")
        except HandshakeError:
            self._noise.fail()
            raise
        self._peer = peer

    def finish(self) -> tuple[PeerId, NoiseChannel]:
        """Return the peer and the channel for its packets, after the last message."""
        if self._peer is None:
            raise RuntimeError("the handshake is not done")
        return self._peer, NoiseChannel(*self._noise.split())
