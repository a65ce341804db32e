"""Frames: whatever way the bytes are cut, and whatever is not a frame."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bbnode.transport.errors import FrameError
from bbnode.transport.links.framing import (
    FRAME_CAPS,
    HEADER_BYTES,
    ChunkData,
    FrameDecoder,
    FrameType,
    Lane,
    LinkFrame,
    Open,
    Position,
    Resume,
    decode_ack,
    decode_open,
    decode_resume,
    encode_ack,
    encode_header,
    encode_open,
    encode_resume,
)

_control = st.lists(
    st.one_of(
        st.builds(
            LinkFrame,
            type=st.just(FrameType.ENVELOPE),
            number=st.integers(0, 2**64 - 1),
            body=st.binary(max_size=200),
        ),
        st.builds(
            LinkFrame,
            type=st.sampled_from([FrameType.PING, FrameType.PONG, FrameType.BYE_ACK]),
            number=st.integers(0, 2**64 - 1),
            body=st.just(b""),
        ),
    ),
    max_size=8,
)


@given(_control, st.integers(1, 64))
def test_round_trip_in_any_pieces(frames, piece):
    raw = b"".join(encode_header(f.type, len(f.body), f.number) + f.body for f in frames)
    decoder = FrameDecoder(Lane.CONTROL)
    decoded = []
    for start in range(0, len(raw), piece):
        decoded += decoder.feed(raw[start : start + piece])
    assert decoded == frames
    assert not decoder.mid_frame


@given(st.binary(max_size=64), st.sampled_from(Lane))
def test_garbage_is_a_frame_error_or_frames(raw, lane):
    decoder = FrameDecoder(lane)
    try:
        frames = list(decoder.feed(raw))
    except FrameError:
        return
    for frame in frames:
        if isinstance(frame, LinkFrame):
            assert len(frame.body) <= FRAME_CAPS[lane, frame.type]


@pytest.mark.parametrize("frame_type", [FrameType.CHUNK, FrameType.BYE])
def test_every_cut_inside_a_frame_is_a_truncation(frame_type):
    raw = encode_header(frame_type, 3, 1) + b"abc"
    for length in range(1, len(raw)):
        decoder = FrameDecoder(Lane.BULK)
        got = b"".join(bytes(each.data) for each in decoder.feed(raw[:length]))
        assert got == (raw[HEADER_BYTES:length] if frame_type is FrameType.CHUNK else b"")
        assert decoder.mid_frame


@given(st.lists(st.binary(min_size=1, max_size=300), min_size=1, max_size=5), st.integers(1, 64))
def test_chunks_pass_through_in_whatever_pieces_they_come(bodies, piece):
    raw = b"".join(encode_header(FrameType.CHUNK, len(b), n) + b for n, b in enumerate(bodies))
    decoder = FrameDecoder(Lane.BULK)
    got = [b""] * len(bodies)
    for start in range(0, len(raw), piece):
        for each in decoder.feed(raw[start : start + piece]):
            assert isinstance(each, ChunkData)
            got[each.number] += bytes(each.data)
    assert got == bodies
    assert not decoder.mid_frame


_NUMBERS = st.integers(0, 2**64 - 1)
_WINDOWS = st.integers(2**17, 2**32 - 1)


@given(_NUMBERS, _NUMBERS, _NUMBERS, _NUMBERS, _NUMBERS, _WINDOWS, _WINDOWS)
def test_resume_and_ack_round_trip(number, record, control, bulk, offset, window, other):
    resume = Resume(
        round=number,
        record=record,
        control=Position(number=control),
        bulk=Position(number=bulk, offset=offset),
        control_window=window,
        bulk_window=other,
    )
    position = Position(number=bulk, offset=offset)
    raw = encode_resume(resume) + encode_ack(Lane.BULK, position)
    first, second = FrameDecoder(Lane.CONTROL).feed(raw)
    assert decode_resume(first) == resume
    assert decode_ack(second) == (Lane.BULK, position)


def test_open_says_how_much_comes_from_where_and_what_is_its_largest_part():
    (only,) = FrameDecoder(Lane.BULK).feed(encode_open(7, 100_000, 300, 37))
    assert (only.type, only.number) == (FrameType.OPEN, 7)
    assert decode_open(only) == Open(total=100_000, offset=300, anchor=37)


@pytest.mark.parametrize(
    ("decode", "frame_type", "body"),
    [
        (decode_ack, FrameType.ACK, b"\x00" * 8),
        (decode_ack, FrameType.ACK, b"\x02" + b"\x00" * 8),
        (decode_resume, FrameType.RESUME, b"\x00" * 39),
        (decode_resume, FrameType.RESUME, b"\x00" * 40),
        (decode_open, FrameType.OPEN, b""),
        (decode_open, FrameType.OPEN, b"\x00" * 16),
        (decode_open, FrameType.OPEN, b"\x00" * 24),
        (decode_open, FrameType.OPEN, struct.pack(">QQQ", 5, 5, 0)),
        (decode_open, FrameType.OPEN, struct.pack(">QQQ", 5, 0, 5)),
    ],
)
def test_bodies_that_say_nothing_sensible(decode, frame_type, body):
    with pytest.raises(FrameError):
        decode(LinkFrame(type=frame_type, number=1, body=body))


@pytest.mark.parametrize(("lane", "frame_type"), sorted(FRAME_CAPS))
def test_length_is_checked_before_the_body_comes(lane, frame_type):
    cap = FRAME_CAPS[lane, frame_type]
    whole = [LinkFrame(type=frame_type, number=0, body=b"")] if not cap else []
    assert list(FrameDecoder(lane).feed(encode_header(frame_type, cap))) == whole
    with pytest.raises(FrameError, match="at most"):
        list(FrameDecoder(lane).feed(encode_header(frame_type, cap + 1)))


def test_types_that_have_no_place_on_a_lane():
    for lane in Lane:
        for frame_type in FrameType:
            if (lane, frame_type) not in FRAME_CAPS:
                with pytest.raises(FrameError, match="does not belong"):
                    list(FrameDecoder(lane).feed(encode_header(frame_type, 0)))


def test_reserved_bits_and_empty_chunks():
    header = bytearray(encode_header(FrameType.PING, 0))
    header[1] = 1
    with pytest.raises(FrameError, match="reserved"):
        list(FrameDecoder(Lane.CONTROL).feed(bytes(header)))
    with pytest.raises(FrameError, match="empty CHUNK"):
        list(FrameDecoder(Lane.BULK).feed(encode_header(FrameType.CHUNK, 0)))
    assert HEADER_BYTES == 16
