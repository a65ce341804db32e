"""The handshake, its keys and the negotiations before it: every message bent, cut and repeated."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from hypothesis import given
from hypothesis import strategies as st
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.crypto.rsa import create_new_key_pair as create_rsa_pair
from libp2p.crypto.secp256k1 import create_new_key_pair as create_secp256k1_pair
from libp2p.peer.id import ID
from noise.connection import Keypair, NoiseConnection

from bbnode.ir.caps import MAX_NEGOTIATION_BYTES, MAX_NEGOTIATION_MESSAGES
from bbnode.ir.errors import DecodeError
from bbnode.ir.peer import PeerId
from bbnode.transport.errors import OTHER_KEY, HandshakeError, NegotiationError
from bbnode.transport.identity import Identity
from bbnode.transport.libp2p.handshake import NoiseHandshake, NoiseKeys, decode_payload
from bbnode.transport.libp2p.keys import (
    KeyType,
    decode_fields,
    decode_public_key,
    encode_field,
    encode_public_key,
)
from bbnode.transport.libp2p.negotiation import Choice, Proposal, encode_message
from bbnode.transport.libp2p.noise_channel import NoiseChannel
from tests.transport.peer_keys import key_pairs

OURS, THEIRS = Identity.from_seed(b"o" * 32), Identity.from_seed(b"t" * 32)
OUR_KEYS, THEIR_KEYS = NoiseKeys(OURS), NoiseKeys(THEIRS)
SIGNED = b"noise-libp2p-static-key:"
# RFC 7748, and curve25519's page: points of which everybody computes the same secret.
LOW_ORDER = [
    bytes(32),
    b"\x01" + bytes(31),
    bytes.fromhex("e0eb7a7c3b41b8ae1656e3faf19fc46ada098deb9c32b1fd866205165f49b800"),
    bytes.fromhex("5f9c95bca3508c24b1d0b1559c83ef5b04445cc4581c8e86d8224eddd09f1157"),
    bytes.fromhex("ecffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f"),
]


def sides(expected: PeerId | None = None) -> tuple[NoiseHandshake, NoiseHandshake]:
    return (
        NoiseHandshake(OUR_KEYS, initiator=True, expected=expected),
        NoiseHandshake(THEIR_KEYS, initiator=False),
    )


def passed(channel: NoiseChannel, other: NoiseChannel, plain: bytes) -> bytes:
    """What the other side makes of a packet."""
    packet, got = memoryview(bytearray(len(plain) + 18)), []
    end = channel.seal(plain, packet, 0)
    other.open(packet[:end], memoryview(bytearray(end)), lambda part: not got.append(bytes(part)))
    return b"".join(got)


# -- two of ours -----------------------------------------------------------------------------


def test_both_sides_know_each_other_and_have_the_same_keys():
    dialler, listener = sides(THEIRS.peer_id)
    listener.read(dialler.write())
    dialler.read(listener.write())
    listener.read(dialler.write())
    (there, out), (here, back) = dialler.finish(), listener.finish()
    assert (there, here) == (THEIRS.peer_id, OURS.peer_id)
    assert passed(out, back, b"to the listener") == b"to the listener"
    assert passed(back, out, b"to the dialler") == b"to the dialler"


def test_who_is_not_expected_hears_nothing_of_us():
    dialler, listener = sides(OURS.peer_id)
    listener.read(dialler.write())
    with pytest.raises(HandshakeError, match=f"{OTHER_KEY}: {THEIRS.peer_id}"):
        dialler.read(listener.write())
    with pytest.raises(RuntimeError):
        dialler.write()


def test_steps_out_of_turn_are_our_own_fault():
    dialler, listener = sides()
    for wrong in (listener.write, dialler.finish, lambda: dialler.read(b"")):
        with pytest.raises(RuntimeError):
            wrong()
    listener.read(dialler.write())
    dialler.read(listener.write())
    listener.read(dialler.write())
    for wrong in (listener.write, dialler.write, lambda: listener.read(b"")):
        with pytest.raises(RuntimeError):
            wrong()


# -- bent messages ---------------------------------------------------------------------------


def bent(message: bytes, how: str, at: int, more: bytes) -> bytes:
    at %= len(message)
    match how:
        case "flipped":
            return message[:at] + bytes([message[at] ^ (1 << len(more) % 8)]) + message[at + 1 :]
        case "cut":
            return message[:at]
        case "longer":
            return message + (more or b"\0")
        case "filled":
            return message[:at] + more
        case _:
            return more


@given(
    st.integers(0, 2),
    st.sampled_from(["flipped", "cut", "longer", "filled", "other"]),
    st.integers(0, 1000),
    st.binary(max_size=300),
)
def test_a_bent_message_is_never_taken(step, how, at, more):
    """In whichever message: at the latest the next one shows it."""
    with pytest.raises(HandshakeError):
        shake_hands(
            lambda number, message: bent(message, how, at, more) if number == step else message
        )


def shake_hands(bend: Callable[[int, bytes], bytes]) -> None:
    """Shake hands, with each message as `bend` returns it; it has to change one."""
    writer, reader = sides()
    changed = False
    for number in range(3):
        message = writer.write()
        given = bend(number, message)
        changed |= given != message
        reader.read(given)
        reader, writer = writer, reader
    if not changed:
        raise HandshakeError("nothing was bent")


def test_messages_of_another_handshake_are_refused():
    first, other = sides(), sides()
    for dialler, listener in (first, other):
        listener.read(dialler.write())
    old = first[1].write()
    first[0].read(old)
    with pytest.raises(HandshakeError, match="not of this handshake"):
        other[0].read(old)
    other_listener = other[1]
    other_listener.write()
    with pytest.raises(HandshakeError, match="not of this handshake"):
        other_listener.read(first[0].write())


@pytest.mark.parametrize("point", LOW_ORDER)
def test_a_point_of_low_order_ends_it(point):
    listener = NoiseHandshake(THEIR_KEYS, initiator=False)
    listener.read(point)
    with pytest.raises(HandshakeError, match="keeps nothing secret"):
        listener.write()
    dialler = NoiseHandshake(OUR_KEYS, initiator=True)
    dialler.write()
    with pytest.raises(HandshakeError, match="keeps nothing secret"):
        dialler.read(point + bytes(200))


# -- against another library -----------------------------------------------------------------


def other_library(identity: Identity, payload: bytes | None = None, *, initiator: bool):
    """The noiseprotocol library with a key of `identity`, and its payload."""
    static = X25519PrivateKey.generate()
    public = static.public_key().public_bytes_raw()
    pair = create_new_key_pair(identity.seed)
    proof = payload or (
        encode_field(1, pair.public_key.serialize())
        + encode_field(2, pair.private_key.sign(SIGNED + public))
    )
    made = NoiseConnection.from_name(b"Noise_XX_25519_ChaChaPoly_SHA256")
    made.set_keypair_from_private_bytes(Keypair.STATIC, static.private_bytes_raw())
    (made.set_as_initiator if initiator else made.set_as_responder)()
    made.start_handshake()
    # With extensions (field 4), which we do not use.
    return made, proof + encode_field(4, encode_field(2, b"/yamux/1.0.0"))


@pytest.mark.parametrize("ours_dials", [True, False])
def test_another_library_shakes_hands_with_ours(ours_dials):
    theirs, payload = other_library(THEIRS, initiator=not ours_dials)
    ours = NoiseHandshake(OUR_KEYS, initiator=ours_dials)
    if ours_dials:
        theirs.read_message(ours.write())
        ours.read(bytes(theirs.write_message(payload)))
        heard = theirs.read_message(ours.write())
    else:
        ours.read(bytes(theirs.write_message(b"early data that nobody has proved")))
        heard = theirs.read_message(ours.write())
        ours.read(bytes(theirs.write_message(payload)))
    # It says who we are: our key has signed our static key.
    assert decode_payload(bytes(heard), OUR_KEYS.public) == OURS.peer_id
    peer, channel = ours.finish()
    assert peer == THEIRS.peer_id
    packet = memoryview(bytearray(100))
    end = channel.seal(b"hello", packet, 0)
    (size,) = struct.unpack(">H", packet[:2])
    assert theirs.decrypt(bytes(packet[2:end])) == b"hello"
    assert size == end - 2
    answer = theirs.encrypt(b"answer")
    got: list[bytes] = []
    whole = memoryview(struct.pack(">H", len(answer)) + answer)
    channel.open(whole, memoryview(bytearray(len(whole))), lambda part: not got.append(bytes(part)))
    assert got == [b"answer"]


# -- who signed ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(key_pairs()))
def test_keys_of_every_kind_prove_a_peer(name):
    encoded, sign = key_pairs()[name]
    static = b"s" * 32
    proof = encode_field(1, encoded) + encode_field(2, sign(SIGNED + static))
    assert decode_payload(proof, static) == decode_public_key(encoded).peer_id
    for bad in (
        encode_field(1, encoded) + encode_field(2, sign(static)),
        encode_field(1, encoded) + encode_field(2, b""),
        encode_field(1, encoded) + encode_field(2, b"\xff" * 64),
        encode_field(1, encoded),
        encode_field(2, sign(SIGNED + static)),
        encode_field(1, 7) + encode_field(2, sign(SIGNED + static)),
        b"",
    ):
        with pytest.raises(HandshakeError):
            decode_payload(bad, static)
    with pytest.raises(HandshakeError, match="signature"):
        decode_payload(proof, b"x" * 32)


@pytest.mark.parametrize(
    "public",
    [
        create_new_key_pair(b"k" * 32).public_key,
        create_secp256k1_pair(b"k" * 32).public_key,
        create_rsa_pair(2048).public_key,
    ],
)
def test_peer_ids_are_those_of_libp2p(public):
    peer = decode_public_key(public.serialize()).peer_id
    assert peer.to_bytes() == ID.from_pubkey(public).to_bytes()
    assert str(peer) == ID.from_pubkey(public).to_base58()


# The test vectors of libp2p's peer-ids specification.
VECTORS = {
    "ed25519": "080112201ed1e8fae2c4a144b8be8fd4b47bf3d3b34b871c3cacf6010f0e42d474fce27e",
    "secp256k1": "08021221037777e994e452c21604f91de093ce415f5432f701dd8cd1a7a6fea0e630bfca99",
    "ecdsa": "0803125b3059301306072a8648ce3d020106082a8648ce3d03010703420004de3d300fa36ae0e8f5d530"
    "899d83abab44abf3161f162a4bc901d8e6ecda020e8b6d5f8da30525e71d6851510c098e5c47c646a597fb4dcec034"
    "e9f77c409e62",
}


@pytest.mark.parametrize("name", list(VECTORS))
def test_the_specifications_own_keys_are_read_and_written_alike(name):
    encoded = bytes.fromhex(VECTORS[name])
    peer = decode_public_key(encoded).peer_id
    assert (peer.to_bytes()[2:] == encoded) is (name != "ecdsa")


def test_a_key_has_one_name_however_it_is_written():
    encoded, _ = key_pairs()["secp256k1"]
    fields = decode_fields(encoded)
    compressed = fields[2]
    assert isinstance(compressed, bytes)
    point = ec.EllipticCurvePublicKey.from_encoded_point(ec.SECP256K1(), compressed)
    long = point.public_bytes(Encoding.X962, PublicFormat.UncompressedPoint)
    name = decode_public_key(encoded).peer_id
    for other in (
        encode_public_key(KeyType.SECP256K1, long),
        encode_field(2, compressed) + encode_field(1, KeyType.SECP256K1),
        encoded + encode_field(9, b"more"),
    ):
        assert decode_public_key(other).peer_id == name


def test_keys_that_are_too_weak_too_slow_or_of_another_kind_are_refused():
    pkix = (Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    small = rsa.generate_private_key(65_537, 1024).public_key()
    slow = rsa.RSAPublicNumbers(2**31 + 11, small.public_numbers().n ** 2).public_key()
    curve = ec.generate_private_key(ec.SECP256R1()).public_key()
    for kind, data in (
        (KeyType.RSA, small.public_bytes(*pkix)),
        (KeyType.RSA, slow.public_bytes(*pkix)),
        (KeyType.RSA, curve.public_bytes(*pkix)),
        (KeyType.ECDSA, slow.public_bytes(*pkix)),
        (KeyType.ED25519, bytes(31)),
        (KeyType.SECP256K1, b"\x02" + b"\xff" * 32),
        (KeyType.RSA, b""),
    ):
        with pytest.raises(DecodeError):
            decode_public_key(encode_public_key(kind, data))
    for unknown in (4, 2**40):
        with pytest.raises(DecodeError):
            decode_public_key(encode_field(1, unknown) + encode_field(2, bytes(32)))


# -- negotiations ----------------------------------------------------------------------------

HEADER = encode_message("/multistream/1.0.0")
NA = encode_message("na")


def test_the_first_that_is_spoken_is_chosen_and_what_follows_is_kept():
    choice = Choice(("/a/1", "/b/1"))
    said = HEADER + encode_message("/x/1") + encode_message("/b/1") + b"what follows"
    assert choice.take(said) == HEADER + NA + encode_message("/b/1")
    assert (choice.chosen, choice.rest()) == ("/b/1", b"what follows")


def test_who_asks_for_a_list_gets_one():
    choice = Choice(("/a/1", "/b/1"))
    names = encode_message("/a/1") + encode_message("/b/1") + b"\n"
    assert choice.take(HEADER + encode_message("ls")) == HEADER + bytes([len(names)]) + names
    assert choice.chosen == ""


def test_a_proposal_is_agreed_on_or_not():
    proposal = Proposal("/a/1")
    assert proposal.opening == HEADER + encode_message("/a/1")
    proposal.take(HEADER)
    assert not proposal.agreed
    proposal.take(encode_message("/a/1") + b"rest")
    assert (proposal.agreed, proposal.rest()) == (True, b"rest")
    with pytest.raises(NegotiationError, match=r"does not speak /b/1$"):
        Proposal("/b/1").take(HEADER + NA)
    with pytest.raises(NegotiationError, match="it says '/c/1'"):
        Proposal("/b/1").take(HEADER + encode_message("/c/1"))


@given(st.lists(st.integers(0, 60), max_size=8))
def test_cuts_do_not_matter_to_negotiations(cuts):
    said = HEADER + encode_message("/no/1") + encode_message("ls") + encode_message("/a/1") + b"xy"
    ends = [0, *sorted(min(cut, len(said)) for cut in cuts), len(said)]
    choice, answer = Choice(("/a/1",)), b""
    for start, end in itertools.pairwise(ends):
        answer += choice.take(said[start:end])
    whole = Choice(("/a/1",))
    assert (answer, choice.chosen, choice.rest()) == (whole.take(said), "/a/1", b"xy")


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (encode_message("/a/1"), "begins with"),
        (HEADER + b"\x00", "of 0 bytes"),
        (b"\x81\x08", f"of {MAX_NEGOTIATION_BYTES + 1} bytes"),
        (b"\x80\x80\x01", "of a length"),
        (HEADER + b"\x03abc", "end of line"),
        (HEADER + b"\x03\xff\xfe\n", "no text"),
        (HEADER + NA * MAX_NEGOTIATION_MESSAGES, "does not come to an end"),
    ],
)
def test_what_is_no_negotiation_is_refused_before_it_is_read(said, why):
    with pytest.raises(NegotiationError, match=why):
        Choice(("/a/1",)).take(said)
    if "does not come" not in why:
        with pytest.raises(NegotiationError, match=why):
            Proposal("/z/1").take(said)
