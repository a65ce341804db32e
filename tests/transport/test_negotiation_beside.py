"""Negotiations and protobuf fields beside other decoders, on the same bytes.

Rule: what py-libp2p's multistream-select refuses ours refuses, in both roles; else both choose the
same, have answered the same, and leave the same bytes to what comes next. What protobuf's own
library takes for no message ours refuses, and the fields of the rest are the same.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import trio
import trio.testing
from google.protobuf.empty_pb2 import Empty
from google.protobuf.message import DecodeError as ProtobufError
from google.protobuf.unknown_fields import UnknownFieldSet
from hypothesis import example, given, settings
from hypothesis import strategies as st
from libp2p.custom_types import TProtocol
from libp2p.identity.identify.pb.identify_pb2 import Identify
from libp2p.protocol_muxer.multiselect import Multiselect
from libp2p.protocol_muxer.multiselect_client import MultiselectClient
from libp2p.protocol_muxer.multiselect_communicator import MultiselectCommunicator
from libp2p.utils.varint import decode_varint_with_size
from multiaddr import Multiaddr

from bbnode.ir.errors import DecodeError
from bbnode.transport.errors import NegotiationError
from bbnode.transport.identity import Identity
from bbnode.transport.libp2p.identify import identify_message
from bbnode.transport.libp2p.keys import decode_all_fields, encode_field
from bbnode.transport.libp2p.negotiation import MULTISTREAM_ID, Choice, Proposal, encode_message
from tests.transport.test_yamux_beside import PlainConn, settle

SPOKEN = ("/a/1", "/b/1")
HEADER, NA = encode_message(MULTISTREAM_ID), encode_message("na")

# -- negotiations ----------------------------------------------------------------------------

# What was chosen, "" for nothing yet, None for a refusal; what was answered; what is left.
State = tuple[str | None, bytes, bytes]


def ours_of(pieces: list[bytes], *, proposes: bool) -> State:
    side: Any = Proposal(SPOKEN[0]) if proposes else Choice(SPOKEN)
    answered = side.opening if proposes else b""
    try:
        for piece in pieces:
            answered += side.take(piece) or b""
    except NegotiationError:
        return None, answered, b""
    chosen = (SPOKEN[0] if side.agreed else "") if proposes else side.chosen
    return chosen, answered, side.rest()


def theirs_of(pieces: list[bytes], *, proposes: bool) -> State:
    async def run() -> State:
        connection = PlainConn(is_initiator=proposes)
        communicator = MultiselectCommunicator(connection)  # type: ignore[arg-type]
        chosen: str | None = ""

        async def negotiate() -> None:
            nonlocal chosen
            try:
                if proposes:
                    client = MultiselectClient()
                    chosen = await client.select_one_of([TProtocol(SPOKEN[0])], communicator)
                else:
                    made = Multiselect({TProtocol(each): None for each in SPOKEN})
                    chosen, _ = await made.negotiate(communicator)
            except Exception:  # noqa: BLE001 - it raises what the text and the parsers raise
                chosen = None

        async with trio.open_nursery() as nursery:
            nursery.start_soon(negotiate)
            await settle()
            for piece in pieces:
                connection.bring(piece)
                await settle()
            nursery.cancel_scope.cancel()
        return chosen, bytes(connection.outgoing), bytes(connection.incoming)

    return trio.run(run, clock=trio.testing.MockClock())


messages = st.one_of(
    st.sampled_from(
        [HEADER, HEADER, NA, *map(encode_message, (*SPOKEN, "/c/1", "/a/1 ", "", "/"))]
    ),
    st.builds(encode_message, st.text(max_size=20).filter(lambda text: text != "ls")),
    # A length in more bytes than it takes, none at all, and one that is too large.
    st.sampled_from([b"\x86\x00/a/1\n", b"\x00", b"\xff\xff\x7f", b"\x80\x80\x80\x80\x00"]),
    st.builds(lambda body: bytes([len(body)]) + body, st.binary(max_size=20)),
    st.binary(max_size=8),
)


@st.composite
def negotiations(draw: st.DrawFn) -> list[bytes]:
    """What a peer says, in pieces; most begin as they have to."""
    said = draw(st.lists(messages, max_size=5))
    plain = (HEADER if draw(st.integers(0, 4)) else b"") + b"".join(said)
    cuts = sorted(draw(st.lists(st.integers(0, len(plain)), max_size=3)))
    return [plain[start:end] for start, end in itertools.pairwise([0, *cuts, len(plain)])]


def compare(pieces: list[bytes], *, proposes: bool) -> None:
    (ours, answered, rest), theirs = (
        ours_of(pieces, proposes=proposes),
        theirs_of(pieces, proposes=proposes),
    )
    if ours is None:
        return
    assert ours == theirs[0]
    # Ours says nothing before the peer does, and both of its messages at once where it proposes.
    assert answered.startswith(theirs[1]) or theirs[1] == HEADER
    if ours:
        assert (answered, rest) == theirs[1:]


@pytest.mark.parametrize("proposes", [False, True])
@settings(max_examples=60)
@given(negotiations())
@example([HEADER, b"\x86\x00/a/1\n"])
@example([HEADER + encode_message("/c/1") + encode_message("/b/1") + b"rest"])
def test_a_negotiation_ends_as_with_py_libp2p(proposes, pieces):
    compare(pieces, proposes=proposes)


@pytest.mark.slow
@pytest.mark.parametrize("proposes", [False, True])
@settings(max_examples=2500)
@given(negotiations())
def test_a_negotiation_ends_as_with_py_libp2p_at_length(proposes, pieces):
    compare(pieces, proposes=proposes)


# -- protobuf ----------------------------------------------------------------------------------


def fields_of_protobuf(data: bytes) -> list[tuple[int, int | bytes]] | None:
    """Number and value of each field that is a number or bytes; None for no message."""
    message = Empty()
    try:
        message.ParseFromString(data)
    except ProtobufError:
        return None
    return [
        (each.field_number, each.data)
        for each in UnknownFieldSet(message)
        if each.wire_type in (0, 2)
    ]


parts = st.one_of(
    st.builds(encode_field, st.integers(1, 2**29 + 1), st.binary(max_size=20)),
    st.builds(encode_field, st.integers(1, 20), st.integers(0, 2**65)),
    # Keys with a kind that there is, or not, and what may follow.
    st.builds(lambda key, more: bytes([key]) + more, st.integers(0, 255), st.binary(max_size=12)),
)


@settings(max_examples=300)
@given(st.lists(parts, max_size=4).map(b"".join))
@example(b"\x00\x00")
@example(b"\x08" + b"\xff" * 9 + b"\x7f")
@example(b"\x08" + b"\x80" * 9 + b"\x00")
@example(b"\x88\x80\x80\x80\x80\x00\x01")
def test_fields_are_those_of_protobufs_own_library(data):
    try:
        ours = decode_all_fields(data)
    except DecodeError:
        return
    theirs = fields_of_protobuf(data)
    assert theirs is not None
    fixed = [(number, value) for number, value in ours if (number, value) not in theirs]
    assert [each for each in ours if each not in fixed] == theirs
    assert all(isinstance(value, bytes) and len(value) in (4, 8) for _, value in fixed)


ports = st.integers(1, 65_535)
addresses = st.builds("/ip4/127.0.0.1/tcp/{}".format, ports) | st.builds(
    "/ip6/::1/udp/{}".format, ports
)


@settings(max_examples=50)
@given(
    st.binary(min_size=32, max_size=32),
    st.lists(addresses, max_size=5),
    st.lists(st.text(max_size=30), max_size=40),
    addresses,
)
def test_py_libp2p_reads_our_identify(seed, listening, protocols, observed):
    own = Identity.from_seed(seed).peer_id
    said = identify_message(own, list(map(Multiaddr, listening)), protocols, Multiaddr(observed))
    message = decode_varint_prefixed(said)
    read = Identify.FromString(message)
    assert read.public_key == own.to_bytes()[2:]
    assert [str(Multiaddr(each)) for each in read.listen_addrs] == listening
    assert list(read.protocols) == protocols
    assert str(Multiaddr(read.observed_addr)) == observed
    assert (read.protocol_version, read.agent_version) == ("ipfs/0.1.0", "bbnode")


def decode_varint_prefixed(said: bytes) -> bytes:
    """The message behind its length."""
    size, taken = decode_varint_with_size(said)
    assert len(said) == taken + size
    return said[taken:]
