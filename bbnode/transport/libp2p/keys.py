"""The public keys that prove a peer's identity: their PeerIds and signatures.

Rule: a key is the protobuf PublicKey{Type=1, Data=2} of libp2p's peer-ids specification. A PeerId
is derived from the canonical encoding of a key, in whatever form it was received, so that no key
has two ids. Our own keys are Ed25519; those of others may be any kind in that specification.
"""

from __future__ import annotations

import enum
import hashlib
from dataclasses import dataclass
from typing import Final, TypeAlias

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import ec, padding, rsa
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.hashes import SHA256

from bbnode.access.keys import ed25519_public_key
from bbnode.ir.decoding import Boundary, shown
from bbnode.ir.envelope import varint
from bbnode.ir.errors import DecodeError
from bbnode.ir.peer import IDENTITY_MULTIHASH, SHA2_256_MULTIHASH, PeerId

_NUMBER, _BYTES = 0, 2
# Wire types of fixed size -> bytes.
_FIXED: Final = {1: 8, 5: 4}
_VARINT_BYTES: Final = 10
_MOST_U64: Final = 2**64 - 1
_TAG_BYTES: Final = 5
_MOST_FIELD: Final = 2**29 - 1
# A key whose encoding is as short as this is its own PeerId (peer-ids specification).
_INLINED_BYTES: Final = 42
# Same range as go-libp2p. An exponent beyond 2**31 would make signature checks slow.
_RSA_BITS: Final = range(2048, 8193)
_MOST_EXPONENT: Final = 2**31 - 1

# The curves of libp2p's other implementations that are at least as strong as Ed25519.
_CURVES: Final = (ec.SECP256R1, ec.SECP384R1, ec.SECP521R1)

Key: TypeAlias = Ed25519PublicKey | ec.EllipticCurvePublicKey | rsa.RSAPublicKey


class KeyType(enum.IntEnum):
    """The kinds of keys."""

    RSA = 0
    ED25519 = 1
    SECP256K1 = 2
    ECDSA = 3


# -- protobuf ------------------------------------------------------------------------------------


def encode_field(number: int, value: bytes | int) -> bytes:
    """Return one field of a protobuf message."""
    if isinstance(value, int):
        return varint(number << 3 | _NUMBER) + varint(value)
    return varint(number << 3 | _BYTES) + varint(len(value)) + value


def decode_fields(data: bytes) -> dict[int, int | bytes]:
    """Return the last value of each field of a protobuf message; raises DecodeError."""
    return dict(decode_all_fields(data))


def decode_all_fields(data: bytes) -> list[tuple[int, int | bytes]]:
    """Return number and value of each field of a protobuf message; raises DecodeError."""
    fields: list[tuple[int, int | bytes]] = []
    at = 0
    while at < len(data):
        key, at = _varint_at(data, at, _TAG_BYTES)
        kind = key & 7
        if not 0 < key >> 3 <= _MOST_FIELD:
            raise DecodeError(f"a protobuf field of number {key >> 3}, which no message has")
        if kind == _NUMBER:
            value, at = _varint_at(data, at)
            fields.append((key >> 3, value))
            continue
        if kind == _BYTES:
            size, at = _varint_at(data, at)
        elif kind in _FIXED:
            size = _FIXED[kind]
        else:
            raise DecodeError(f"a protobuf field of kind {kind}")
        if size > len(data) - at:
            raise DecodeError("a protobuf field that is cut short")
        fields.append((key >> 3, data[at : at + size]))
        at += size
    return fields


def _varint_at(data: bytes, at: int, most_bytes: int = _VARINT_BYTES) -> tuple[int, int]:
    """Return a varint and the offset of its end."""
    value = 0
    for index, byte in enumerate(data[at : at + most_bytes]):
        value |= (byte & 0x7F) << 7 * index
        if byte < 0x80:
            if value > _MOST_U64:
                raise DecodeError("a protobuf number of over 64 bits")
            return value, at + index + 1
    raise DecodeError("a protobuf number without an end")


# -- keys ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PublicKey:
    """The public key of a peer."""

    type: KeyType
    key: Key

    @property
    def peer_id(self) -> PeerId:
        """The PeerId that this key proves."""
        encoded = encode_public_key(self.type, _data_of(self.type, self.key))
        if len(encoded) <= _INLINED_BYTES:
            return PeerId(bytes((IDENTITY_MULTIHASH, len(encoded))) + encoded)
        digest = hashlib.sha256(encoded).digest()
        return PeerId(bytes((SHA2_256_MULTIHASH, len(digest))) + digest)

    def verifies(self, data: bytes, signature: bytes) -> bool:
        """Return True if the owner of this key has signed `data`."""
        try:
            match self.key:
                case Ed25519PublicKey():
                    self.key.verify(signature, data)
                case rsa.RSAPublicKey():
                    self.key.verify(signature, data, padding.PKCS1v15(), SHA256())
                case ec.EllipticCurvePublicKey():
                    self.key.verify(signature, data, ec.ECDSA(SHA256()))
        except (InvalidSignature, ValueError):
            return False
        return True


def encode_public_key(kind: KeyType, data: bytes) -> bytes:
    """Return the canonical protobuf of a public key."""
    return encode_field(1, kind) + encode_field(2, data)


def decode_public_key(encoded: bytes) -> PublicKey:
    """Return the public key in a protobuf message; raises DecodeError."""
    fields = decode_fields(encoded)
    kind, data = fields.get(1), fields.get(2)
    if not isinstance(kind, int) or not isinstance(data, bytes):
        raise DecodeError(f"no public key: {shown(encoded)}")
    with Boundary("no public key"):
        return PublicKey(KeyType(kind), _key_of(KeyType(kind), data))


def _key_of(kind: KeyType, data: bytes) -> Key:
    if kind is KeyType.ED25519:
        return ed25519_public_key(data)
    if kind is KeyType.SECP256K1:
        return ec.EllipticCurvePublicKey.from_encoded_point(ec.SECP256K1(), data)
    # Imported here and in `_data_of`: it takes 10 ms of the start, for keys that few peers have.
    from cryptography.hazmat.primitives.serialization import load_der_public_key

    key = load_der_public_key(data)
    if kind is KeyType.RSA and isinstance(key, rsa.RSAPublicKey):
        if key.key_size not in _RSA_BITS or key.public_numbers().e > _MOST_EXPONENT:
            raise DecodeError(f"an RSA key of {key.key_size} bits, or with too large an exponent")
        return key
    if kind is KeyType.ECDSA and isinstance(key, ec.EllipticCurvePublicKey):
        if not isinstance(key.curve, _CURVES):
            raise DecodeError(
                f"an ECDSA key of the curve {shown(key.curve.name)}; P-256, P-384 and P-521 count"
            )
        return key
    raise DecodeError(f"a key that is not of the type that it says, {kind.name}")


def _data_of(kind: KeyType, key: Key) -> bytes:
    if isinstance(key, Ed25519PublicKey):
        return key.public_bytes_raw()
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    if kind is KeyType.SECP256K1:
        return key.public_bytes(Encoding.X962, PublicFormat.CompressedPoint)
    return key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
