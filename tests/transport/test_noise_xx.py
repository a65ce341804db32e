"""Noise XX against its published vectors, and beside another library on the same bytes.

Rule of the second part: both libraries have the same keys, so each message of one is a message of
the other, byte by byte; what is damaged both refuse, or only ours does.
"""

from __future__ import annotations

import struct

import pytest
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.utils import (
    decode_dss_signature,
    encode_dss_signature,
)
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from hypothesis import example, given, settings
from hypothesis import strategies as st
from libp2p.crypto.x25519 import X25519PublicKey
from libp2p.peer.id import ID
from libp2p.security.noise.messages import NoiseHandshakePayload, verify_handshake_payload_sig
from noise.connection import Keypair, NoiseConnection
from noise.exceptions import NoiseHandshakeError, NoiseInvalidMessage, NoiseValueError

from bbnode.ir.peer import PeerId
from bbnode.transport.errors import HandshakeError
from bbnode.transport.libp2p.handshake import decode_payload
from bbnode.transport.libp2p.keys import encode_field
from bbnode.transport.libp2p.noise_channel import NoiseChannel, PacketError
from bbnode.transport.libp2p.noise_xx import PATTERN, NoiseXX
from tests.transport.noise_vectors import VECTORS, Vector
from tests.transport.peer_keys import key_pairs
from tests.transport.test_handshake import LOW_ORDER, bent

# The other library does not like fixed ephemeral keys either.
pytestmark = pytest.mark.filterwarnings("ignore:One of ephemeral keypairs is already set")

# -- packets ---------------------------------------------------------------------------------


def packet(channel: NoiseChannel, plain: bytes) -> bytes:
    """A packet of ours without its length."""
    out = memoryview(bytearray(len(plain) + 64))
    end = channel.seal(plain, out, 0)
    assert struct.unpack(">H", out[:2]) == (end - 2,)
    return bytes(out[2:end])


def opened(channel: NoiseChannel, sealed: bytes) -> bytes:
    """What we make of a packet; raises PacketError."""
    whole, got = memoryview(struct.pack(">H", len(sealed)) + sealed), []
    channel.open(whole, memoryview(bytearray(len(whole))), lambda part: not got.append(bytes(part)))
    return b"".join(got)


def channel_of(side: NoiseXX) -> NoiseChannel:
    return NoiseChannel(*side.split())


# -- published vectors -----------------------------------------------------------------------


def private(text: str) -> X25519PrivateKey:
    return X25519PrivateKey.from_private_bytes(bytes.fromhex(text))


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: vector.name)
def test_both_sides_say_and_read_what_the_vectors_have(vector: Vector):
    prologue = bytes.fromhex(vector.prologue)
    sides = [
        NoiseXX(
            private(static),
            initiator=initiator,
            prologue=prologue,
            make_key=lambda ephemeral=ephemeral: private(ephemeral),
        )
        for static, ephemeral, initiator in (
            (vector.init_static, vector.init_ephemeral, True),
            (vector.resp_static, vector.resp_ephemeral, False),
        )
    ]
    messages = [tuple(map(bytes.fromhex, each)) for each in vector.messages]
    for number, (payload, sent) in enumerate(messages[: len(PATTERN)]):
        assert sides[number % 2].write(payload) == sent
        assert sides[1 - number % 2].read(sent) == payload
    assert sides[0].hash == sides[1].hash
    channels = [channel_of(side) for side in sides]
    for number, (payload, sent) in enumerate(messages[len(PATTERN) :], vector.next_is_initiator):
        assert packet(channels[1 - number % 2], payload) == sent
        assert opened(channels[number % 2], sent) == payload


# -- the same bytes to another library --------------------------------------------------------

REFUSALS = (InvalidTag, ValueError, NoiseInvalidMessage, NoiseHandshakeError, NoiseValueError)
keys = st.binary(min_size=32, max_size=32)
payloads = st.one_of(st.binary(max_size=80), st.binary(min_size=1000, max_size=1200))


class Twins:
    """One side of a handshake in both libraries, with the same keys."""

    def __init__(self, static: bytes, ephemeral: bytes, prologue: bytes, initiator: bool) -> None:
        self.ours = NoiseXX(
            X25519PrivateKey.from_private_bytes(static),
            initiator=initiator,
            prologue=prologue,
            make_key=lambda: X25519PrivateKey.from_private_bytes(ephemeral),
        )
        other = NoiseConnection.from_name(b"Noise_XX_25519_ChaChaPoly_SHA256")
        other.set_prologue(prologue)
        other.set_keypair_from_private_bytes(Keypair.STATIC, static)
        other.set_keypair_from_private_bytes(Keypair.EPHEMERAL, ephemeral)
        (other.set_as_initiator if initiator else other.set_as_responder)()
        other.start_handshake()
        self.theirs = other

    def write(self, payload: bytes) -> bytes | None:
        """The message of both; None if both refuse to write one."""
        try:
            theirs = bytes(self.theirs.write_message(payload))
        except REFUSALS:
            theirs = None
        try:
            ours = self.ours.write(payload)
        except HandshakeError:
            ours = None
        assert ours == theirs
        return ours

    def read(self, message: bytes) -> bytes | None:
        """The payload that both read; None if both refuse it, or ours alone."""
        try:
            theirs = bytes(self.theirs.read_message(message))
        except REFUSALS:
            theirs = None
        try:
            ours = self.ours.read(message)
        except HandshakeError:
            return None
        assert ours == theirs
        return ours

    def agree_at_the_end(self) -> NoiseChannel:
        assert self.theirs.handshake_finished
        assert self.theirs.get_handshake_hash() == self.ours.hash
        protocol = self.theirs.noise_protocol
        ours = self.ours.split()
        assert ours == (protocol.cipher_state_encrypt.k, protocol.cipher_state_decrypt.k)
        return NoiseChannel(*ours)


def twins(draw: st.DataObject) -> tuple[Twins, Twins]:
    """Both sides."""
    prologue = draw.draw(st.binary(max_size=40), label="prologue")
    dialler, listener = (
        Twins(draw.draw(keys), draw.draw(keys), prologue, initiator) for initiator in (True, False)
    )
    return dialler, listener


@settings(max_examples=20)
@given(
    st.data(),
    st.lists(payloads, min_size=3, max_size=3),
    st.lists(st.binary(min_size=1, max_size=300), max_size=4),
)
def test_each_message_and_packet_is_the_same_in_both_libraries(draw, said, packets):
    writer, reader = twins(draw)
    for payload in said:
        message = writer.write(payload)
        assert message is not None
        assert reader.read(message) == payload
        writer, reader = reader, writer
    # The listener has read last.
    here, there = reader.agree_at_the_end(), writer.agree_at_the_end()
    for plain in packets:
        sealed = packet(here, plain)
        assert sealed == reader.theirs.encrypt(plain)
        assert opened(there, sealed) == plain == writer.theirs.decrypt(sealed)


damages = st.one_of(
    st.tuples(
        st.sampled_from(["flipped", "cut", "longer", "filled", "other"]),
        st.integers(0, 1300),
        st.binary(max_size=120),
    ),
    # A point in the place of a key, and one whose highest bit is set, which means the same key.
    st.tuples(st.just("key"), st.just(0), st.sampled_from(LOW_ORDER)),
    st.tuples(st.just("high bit"), st.just(31), st.just(b"")),
)


def damaged(message: bytes, damage: tuple[str, int, bytes]) -> bytes:
    how, at, more = damage
    match how:
        case "key":
            return more + message[32:]
        case "high bit":
            return message[:at] + bytes([message[at] ^ 0x80]) + message[at + 1 :]
        case _:
            return bent(message, how, at, more)


def refuse_what_is_damaged(
    draw: st.DataObject, step: int, damage: tuple[str, int, bytes], said: list[bytes]
) -> None:
    """Shake hands, and damage one message.

    Damage that both take, in what nobody has proved yet, ends in a refusal of both.
    """
    writer, reader = twins(draw)
    changed = False
    for number, payload in enumerate(said):
        message = writer.write(payload)
        if message is None:
            return
        given_message = damaged(message, damage) if number == step else message
        changed |= given_message != message
        if reader.read(given_message) is None:
            assert changed
            return
        writer, reader = reader, writer
    assert not changed


handshakes = given(
    st.data(), st.integers(0, 2), damages, st.lists(payloads, min_size=3, max_size=3)
)


@settings(max_examples=40)
@handshakes
def test_what_is_damaged_both_libraries_refuse_or_only_ours(draw, step, damage, said):
    refuse_what_is_damaged(draw, step, damage, said)


@pytest.mark.slow
@settings(max_examples=1500)
@handshakes
def test_what_is_damaged_both_libraries_refuse_or_only_ours_at_length(draw, step, damage, said):
    refuse_what_is_damaged(draw, step, damage, said)


@settings(max_examples=20)
@given(st.data(), st.binary(min_size=1, max_size=200), st.integers(0, 2**16), st.integers(1, 255))
def test_a_damaged_packet_is_refused_by_both(draw, plain, at, bits):
    writer, reader = twins(draw)
    for _ in PATTERN:
        message = writer.write(b"")
        assert message is not None
        reader.read(message)
        writer, reader = reader, writer
    here, there = reader.agree_at_the_end(), writer.agree_at_the_end()
    sealed = bytearray(packet(here, plain))
    sealed[at % len(sealed)] ^= bits
    with pytest.raises(REFUSALS):
        writer.theirs.decrypt(bytes(sealed))
    with pytest.raises(PacketError):
        opened(there, bytes(sealed))


# -- whom a payload proves ---------------------------------------------------------------------

STATIC = bytes(range(32))
# Of the group of secp256k1.
ORDER = 0xFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFEBAAEDCE6AF48A03BBFD25E8CD0364141


def low(signature: bytes) -> bytes:
    """The one of both forms of a signature by secp256k1 that py-libp2p takes."""
    r, s = decode_dss_signature(signature)
    return encode_dss_signature(r, min(s, ORDER - s))


def proof_of(name: str) -> bytes:
    encoded, sign = key_pairs()[name]
    signature = sign(b"noise-libp2p-static-key:" + STATIC)
    if name == "secp256k1":
        signature = low(signature)
    return encode_field(1, encoded) + encode_field(2, signature)


# py-libp2p knows no others.
PROOFS = {name: proof_of(name) for name in ("ed25519", "secp256k1", "rsa")}
fields = st.builds(
    encode_field,
    st.integers(1, 6),
    st.one_of(st.binary(max_size=40), st.integers(0, 2**63)),
)


def theirs_proved(payload: bytes) -> bytes | None:
    """The PeerId that py-libp2p takes a payload for; None if it refuses it."""
    try:
        read = NoiseHandshakePayload.deserialize(payload)
        if not verify_handshake_payload_sig(read, X25519PublicKey.from_bytes(STATIC)):
            return None
        return ID.from_pubkey(read.id_pubkey).to_bytes()
    except Exception:  # noqa: BLE001 - it raises what the parsers below it raise
        return None


def ours_proved(payload: bytes) -> PeerId | None:
    try:
        return decode_payload(payload, STATIC)
    except HandshakeError:
        return None


@pytest.mark.parametrize("name", list(PROOFS))
@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.booleans(), st.one_of(fields, st.binary(max_size=12))), max_size=3),
    st.one_of(st.none(), damages),
)
# Fields of numbers that no message has, and extensions that are none.
@example([(True, b"\x00\x00")], None)
@example([(False, b"\x85\x80\x80\x80\x80\x00abcd")], None)
@example([(False, encode_field(4, b"\x0a\x05a"))], None)
def test_a_payload_proves_whom_it_proves_to_py_libp2p(name, others, damage):
    """Or nobody: what py-libp2p refuses we refuse."""
    before = b"".join(field for first, field in others if first)
    payload = before + PROOFS[name] + b"".join(field for first, field in others if not first)
    if damage is not None:
        payload = damaged(payload, damage)
    ours = ours_proved(payload)
    assert ours is None or ours.to_bytes() == theirs_proved(payload)


@pytest.mark.parametrize("name", list(PROOFS))
def test_an_undamaged_proof_is_one_to_both(name):
    payload = PROOFS[name]
    ours = ours_proved(payload)
    assert ours is not None
    assert ours.to_bytes() == theirs_proved(payload)
