"""Keys in whose name anybody could sign, and keys with two names: nobody's."""

from __future__ import annotations

import pytest
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from bbnode.access.keys import SigningKey, can_sign, ed25519_public_key, verifies
from bbnode.ir.errors import DecodeError
from bbnode.ir.peer import PeerId
from bbnode.transport.libp2p.keys import KeyType, decode_public_key, encode_public_key

P = 2**255 - 19
D = -121665 * pow(121666, P - 2, P) % P


def _order_8_y() -> set[int]:
    """Return y of all points of order 8, by doubling: a point of order 4 is (x, 0), x^2 = -1."""
    # 2 (x, y) has the y-coordinate (y^2 + x^2) / (1 - d x^2 y^2) = 0, so x^2 = -y^2; on the curve
    # -x^2 + y^2 = 1 + d x^2 y^2 that is d y^4 + 2 y^2 - 1 = 0.
    root = pow(1 + D, (P + 3) // 8, P)
    if (root * root - (1 + D)) % P:
        root = root * pow(2, (P - 1) // 4, P) % P
    found = set()
    for sign in (1, -1):
        square = (-1 + sign * root) * pow(D, P - 2, P) % P
        y = pow(square, (P + 3) // 8, P)
        if (y * y - square) % P:
            y = y * pow(2, (P - 1) // 4, P) % P
        if not (y * y - square) % P:
            found |= {y, P - y}
    return found


def encodings() -> dict[str, bytes]:
    """Return each encoding of each of the eight points, with y below 2^255 and either sign."""
    made = {}
    for y in sorted({0, 1, P - 1, *_order_8_y()}):
        for number in (y, y + P):
            for sign in (0, 1):
                if number < 2**255:
                    raw = (number | sign << 255).to_bytes(32, "little")
                    made[f"{number:x}"[:12] + f"/{sign}" + f"+{len(made)}"] = raw
    return made


SMALL = encodings()


def test_there_are_all_of_them() -> None:
    assert len(_order_8_y()) == 2
    assert len(SMALL) == 14


@pytest.mark.parametrize("name", SMALL)
def test_a_key_of_small_order_signs_nothing(name: str) -> None:
    raw = SMALL[name]
    peer = PeerId.from_ed25519_public_key(raw)
    assert not can_sign(peer)
    # R = the identity and S = 0: what such a key "signed" of any message in libraries that take it.
    for forged in (b"\x01" + bytes(63), raw + bytes(32)):
        assert not verifies(peer, b"context", b"any message", forged)
    with pytest.raises(ValueError, match="small order"):
        ed25519_public_key(raw)
    with pytest.raises(DecodeError, match="small order"):
        decode_public_key(encode_public_key(KeyType.ED25519, raw))


def test_some_of_them_are_taken_by_the_library() -> None:
    """Why this is looked at here: the identity as key, R the identity, S = 0."""
    accepted = 0
    for raw in SMALL.values():
        try:
            Ed25519PublicKey.from_public_bytes(raw).verify(b"\x01" + bytes(63), b"any message")
            accepted += 1
        except (InvalidSignature, ValueError):
            pass
    assert accepted


@pytest.mark.parametrize("y", [P + 3, P + 4, P + 18])
def test_a_second_encoding_of_a_key_is_none(y: int) -> None:
    raw = y.to_bytes(32, "little")
    assert not can_sign(PeerId.from_ed25519_public_key(raw))
    with pytest.raises(DecodeError, match="another encoding"):
        decode_public_key(encode_public_key(KeyType.ED25519, raw))


def test_keys_of_people_are_taken() -> None:
    for seed in range(20):
        key = SigningKey.from_seed(bytes([seed]) * 32)
        assert can_sign(key.peer_id)
        assert verifies(key.peer_id, b"c", b"body", key.sign(b"c", b"body"))


@pytest.mark.parametrize(
    "curve", [ec.SECP192R1(), ec.SECP224R1(), ec.SECP256K1(), ec.BrainpoolP256R1()],
    ids=lambda curve: curve.name,
)  # fmt: skip
def test_ecdsa_keys_of_weak_or_foreign_curves_are_refused(curve: ec.EllipticCurve) -> None:
    try:
        key = ec.generate_private_key(curve).public_key()
    except Exception:  # noqa: BLE001 - what a library without that curve raises
        pytest.skip(f"this cryptography has no {curve.name}")
    der = key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    with pytest.raises(DecodeError, match=f"curve '{curve.name}'; P-256, P-384 and P-521 count"):
        decode_public_key(encode_public_key(KeyType.ECDSA, der))


@pytest.mark.parametrize("curve", [ec.SECP256R1(), ec.SECP384R1(), ec.SECP521R1()])
def test_ecdsa_keys_of_libp2p_are_taken(curve: ec.EllipticCurve) -> None:
    private = ec.generate_private_key(curve)
    der = private.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    assert decode_public_key(encode_public_key(KeyType.ECDSA, der)).type is KeyType.ECDSA
