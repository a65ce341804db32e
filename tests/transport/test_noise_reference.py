"""Our Noise beside the published vectors, and beside another implementation of it, bent alike."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st
from noise.connection import Keypair, NoiseConnection

from bbnode.transport.errors import HandshakeError
from bbnode.transport.identity import Identity
from bbnode.transport.libp2p import handshake
from bbnode.transport.libp2p.handshake import NoiseHandshake, NoiseKeys
from bbnode.transport.libp2p.noise_channel import NoiseChannel

NAME = b"Noise_XX_25519_ChaChaPoly_SHA256"
PEER = Identity.from_seed(b"v" * 32).peer_id

# The vectors of this name of noise-c and github.com/flynn/noise (vectors.txt), which go-libp2p,
# js-libp2p and swift-libp2p test theirs by: without payloads, and with one in each message.
STATICS = bytes(range(32)), bytes(range(1, 33))
EPHEMERALS = bytes(range(32, 64)), bytes(range(65, 97))
FIRST = "358072d6365880d1aeea329adf9121383851ed21a28e3b75e965d0d2cd166254"
SECOND = (
    "64b101b1d0be5a8704bd078f9895001fc03e8e9f9522f188dd128d9846d48466"
    "3414af878d3e46a2f58911a816d6e8346d4ea17a6f2a0bb4ef4ed56c133cff45"
)
THIRD = "87f864c11ba449f46a0a4f4e2eacbb7b0457784f4fca1937f572c93603e9c4d9"
VECTORS = {
    "without payloads": (
        (b"", b"", b""),
        FIRST,
        SECOND + "60a34e36ea82109f26cf2e5a5caf992b608d55c747f615e5a3425a7a19eefb8f",
        THIRD + "7e5ea11b16f3968710b23a3be3202dc1b5e1ce3c963347491e74f5c0768a9b42",
    ),
    "with payloads": (
        (b"test_msg_0", b"test_msg_1", b"test_msg_2"),
        FIRST + b"test_msg_0".hex(),
        SECOND
        + "72e7a2ba5123ac30618b3d205f5c2d17f50cbca216483ac56bcc78e33bf520303278db641e5e731b2e3a",
        THIRD
        + "f27e318e43ba630594c4d08eeb3b36d97c7377a2f4f9144b2f0c8095ad92140505b2ab53eff244b14138",
    ),
}
SEALED = (
    (b"yellowsubmarine", "a52ef02ba60e12696d1d6b9ef4245c88fca757b6134ad6e76b56e310a6adf6"),
    (b"submarineyellow", "2445aa438ebd649281c636cc7269ca82f1d9023d72520943aeabf909cdf521"),
)


def keys(static: bytes, payload: bytes) -> NoiseKeys:
    made = NoiseKeys.__new__(NoiseKeys)  # it would draw them
    made.private = X25519PrivateKey.from_private_bytes(static)
    made.public = made.private.public_key().public_bytes_raw()
    made.payload = payload
    return made


@contextmanager
def fixed(*ephemerals: bytes) -> Iterator[None]:
    """Draw these ephemeral keys in turn, and take any payload for the proof of a peer."""
    drawn = iter(ephemerals)

    class Drawn:
        @staticmethod
        def generate() -> X25519PrivateKey:
            return X25519PrivateKey.from_private_bytes(next(drawn))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(handshake, "X25519PrivateKey", Drawn)
        patch.setattr(handshake, "decode_payload", lambda _payload, _static: PEER)
        yield


def sealed(channel: NoiseChannel, plain: bytes) -> bytes:
    into = memoryview(bytearray(len(plain) + 18))
    return bytes(into[2 : channel.seal(plain, into, 0)])  # behind the length of libp2p's packets


def opened(channel: NoiseChannel, packet: bytes) -> bytes:
    whole = memoryview(len(packet).to_bytes(2, "big") + packet)
    got: list[bytes] = []
    channel.open(whole, memoryview(bytearray(whole)), lambda part: not got.append(bytes(part)))
    return b"".join(got)


@pytest.mark.parametrize("case", VECTORS)
def test_the_published_vectors_of_the_one_who_answers(case: str) -> None:
    payloads, *messages = VECTORS[case]
    first, second, third = map(bytes.fromhex, messages)
    with fixed(EPHEMERALS[1]):
        listener = NoiseHandshake(keys(STATICS[1], payloads[1]), initiator=False)
        listener.read(first)
        assert listener.write() == second
        listener.read(third)
        _, channel = listener.finish()
    (to_it, its), (from_it, our) = SEALED
    assert opened(channel, bytes.fromhex(its)) == to_it
    assert sealed(channel, from_it).hex() == our


def test_the_published_vectors_of_the_one_who_dials() -> None:
    """Our first message has no payload, since nobody has proved anything by then."""
    payloads, *messages = VECTORS["without payloads"]
    first, second, third = map(bytes.fromhex, messages)
    with fixed(EPHEMERALS[0]):
        dialler = NoiseHandshake(keys(STATICS[0], payloads[2]), initiator=True)
        assert dialler.write() == first
        dialler.read(second)
        assert dialler.write() == third
        _, channel = dialler.finish()
    (from_it, our), (to_it, its) = SEALED
    assert sealed(channel, from_it).hex() == our
    assert opened(channel, bytes.fromhex(its)) == to_it


# -- beside noiseprotocol, which py-libp2p uses -----------------------------------------------


class Other:
    """A side of noiseprotocol's, with the keys of ours."""

    def __init__(self, static: bytes, ephemeral: bytes, payload: bytes, *, initiator: bool) -> None:
        self.side: Any = NoiseConnection.from_name(NAME)
        (self.side.set_as_initiator if initiator else self.side.set_as_responder)()
        self.side.set_keypair_from_private_bytes(Keypair.STATIC, static)
        self.side.set_keypair_from_private_bytes(Keypair.EPHEMERAL, ephemeral)
        self.side.start_handshake()
        self.payload, self.initiator, self.step = payload, initiator, 0

    def write(self) -> bytes:
        payload = b"" if self.initiator and self.step == 0 else self.payload
        self.step += 1
        return bytes(self.side.write_message(payload))

    def read(self, message: bytes) -> None:
        self.step += 1
        self.side.read_message(message)


class Ours(NoiseHandshake):
    """A side of ours, with the same arguments."""

    def __init__(self, static: bytes, ephemeral: bytes, payload: bytes, *, initiator: bool) -> None:
        self.ephemeral = ephemeral
        super().__init__(keys(static, payload), initiator=initiator)

    def write(self) -> bytes:
        with fixed(self.ephemeral):
            return super().write()

    def read(self, message: bytes) -> None:
        with fixed():
            super().read(message)


def outcome(make: tuple[type, type], drawn: Any, bend: Any) -> list[Any]:
    """Return all messages of a handshake, of which one is bent, and the step that refuses it."""
    (dial_keys, listen_keys), (at, how) = drawn, bend
    dialler = make[0](*dial_keys, initiator=True)
    listener = make[1](*listen_keys, initiator=False)
    told: list[Any] = []
    for step, (one, other) in enumerate([(dialler, listener), (listener, dialler)] * 2):
        if step == 3:
            break
        message = one.write()
        told.append(message)
        try:
            other.read(how(message) if step == at else message)
        except Exception as error:
            if isinstance(other, Ours) and not isinstance(error, HandshakeError):
                raise
            return [*told, f"refused at {step}"]
    return told


raw = st.binary(min_size=32, max_size=32)
side = st.tuples(raw, raw, st.binary(max_size=200))


def flipped(message: bytes, at: int, bits: int) -> bytes:
    at %= len(message)
    return message[:at] + bytes((message[at] ^ bits,)) + message[at + 1 :]


bends = st.one_of(
    st.builds(
        lambda at, bits: lambda message: flipped(message, at, bits),
        st.integers(0, 400), st.integers(1, 255),
    ),
    st.builds(lambda size: lambda message: message[:size], st.integers(0, 150)),
    st.builds(lambda more: lambda message: message + more, st.binary(min_size=1, max_size=40)),
    st.builds(lambda new: lambda _message: new, st.binary(max_size=200)),
)  # fmt: skip


@pytest.mark.filterwarnings("ignore:One of ephemeral keypairs is already set")
@given(st.tuples(side, side), st.tuples(st.sampled_from([None, 0, 1, 2]), bends))
def test_both_say_and_refuse_the_same_in_either_role(drawn: Any, bend: Any) -> None:
    ours = outcome((Ours, Ours), drawn, bend)
    assert outcome((Other, Other), drawn, bend) == ours
    assert outcome((Ours, Other), drawn, bend) == ours
    assert outcome((Other, Ours), drawn, bend) == ours


@pytest.mark.filterwarnings("ignore:One of ephemeral keypairs is already set")
@given(st.tuples(side, side), st.lists(st.binary(max_size=300), max_size=6))
def test_packets_are_the_same_after_the_handshake(drawn: Any, bodies: list[bytes]) -> None:
    dialler = Ours(*drawn[0], initiator=True)
    listener = Other(*drawn[1], initiator=False)
    for one, other in ((dialler, listener), (listener, dialler), (dialler, listener)):
        other.read(one.write())
    _, channel = dialler.finish()
    for body in bodies:
        if body:  # ours sends no empty packets
            assert bytes(listener.side.decrypt(sealed(channel, body))) == body
        assert opened(channel, bytes(listener.side.encrypt(body))) == body
