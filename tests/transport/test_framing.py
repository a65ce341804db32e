"""Frames: whatever way the bytes are cut, and whatever is not a frame."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bbnode.transport.errors import FrameError
from bbnode.transport.framing import (
    FRAME_CAPS,
    HEADER_BYTES,
    Frame,
    FrameDecoder,
    FrameType,
    Lane,
    encode_header,
)

_control = st.lists(
    st.one_of(
        st.builds(
            Frame,
            type=st.just(FrameType.ENVELOPE),
            number=st.integers(0, 2**64 - 1),
            body=st.binary(max_size=200),
        ),
        st.builds(
            Frame,
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
        assert len(frame.body) <= FRAME_CAPS[lane, frame.type]


def test_every_cut_inside_a_frame_is_a_truncation():
    raw = encode_header(FrameType.ENVELOPE, 3, 1) + b"abc"
    for length in range(1, len(raw)):
        decoder = FrameDecoder(Lane.BULK)
        assert list(decoder.feed(raw[:length])) == []
        assert decoder.mid_frame


@pytest.mark.parametrize(("lane", "frame_type"), sorted(FRAME_CAPS))
def test_length_is_checked_before_the_body_comes(lane, frame_type):
    cap = FRAME_CAPS[lane, frame_type]
    assert list(FrameDecoder(lane).feed(encode_header(frame_type, cap)))[:1] in (
        [],
        [Frame(type=frame_type, number=0, body=b"")],
    )
    with pytest.raises(FrameError, match="at most"):
        list(FrameDecoder(lane).feed(encode_header(frame_type, cap + 1)))


def test_types_that_have_no_place_on_a_lane():
    for lane in Lane:
        for frame_type in FrameType:
            if (lane, frame_type) not in FRAME_CAPS:
                with pytest.raises(FrameError, match="no place"):
                    list(FrameDecoder(lane).feed(encode_header(frame_type, 0)))


def test_reserved_bits_and_smaller_envelope_cap():
    header = bytearray(encode_header(FrameType.PING, 0))
    header[1] = 1
    with pytest.raises(FrameError, match="reserved"):
        list(FrameDecoder(Lane.CONTROL).feed(bytes(header)))
    with pytest.raises(FrameError, match="at most 10"):
        list(FrameDecoder(Lane.BULK, 10).feed(encode_header(FrameType.ENVELOPE, 11)))
    assert HEADER_BYTES == 16
