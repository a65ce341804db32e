"""Key pairs of every kind that a libp2p peer may have."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from cryptography.hazmat.primitives.asymmetric import ec, padding, rsa
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from bbnode.transport.libp2p.keys import KeyType, encode_public_key

Sign = Callable[[bytes], bytes]


@cache
def key_pairs() -> dict[str, tuple[bytes, Sign]]:
    """An encoded public key, and what signs for it, by a name."""
    edwards = Ed25519PrivateKey.generate()
    koblitz = ec.generate_private_key(ec.SECP256K1())
    curves = {
        name: ec.generate_private_key(getattr(ec, name)()) for name in ("SECP256R1", "SECP384R1")
    }
    large = rsa.generate_private_key(65_537, 2048)
    pkix = (Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    hashed = ec.ECDSA(SHA256())
    return {
        "ed25519": (
            encode_public_key(KeyType.ED25519, edwards.public_key().public_bytes_raw()),
            edwards.sign,
        ),
        "secp256k1": (
            encode_public_key(
                KeyType.SECP256K1,
                koblitz.public_key().public_bytes(Encoding.X962, PublicFormat.CompressedPoint),
            ),
            lambda data: koblitz.sign(data, hashed),
        ),
        **{
            name: (
                encode_public_key(KeyType.ECDSA, key.public_key().public_bytes(*pkix)),
                lambda data, key=key: key.sign(data, hashed),
            )
            for name, key in curves.items()
        },
        "rsa": (
            encode_public_key(KeyType.RSA, large.public_key().public_bytes(*pkix)),
            lambda data: large.sign(data, padding.PKCS1v15(), SHA256()),
        ),
    }
