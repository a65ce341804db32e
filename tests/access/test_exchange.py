"""The words of the access protocol: round trips, and everything else refused."""

from __future__ import annotations

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bbnode.access.errors import AccessRefused, Refusal
from bbnode.access.exchange import (
    MESSAGE,
    Member,
    Redeem,
    Refused,
    Revocations,
    decode_message,
    encode_message,
)
from bbnode.access.statement import MAX_MEMBERSHIP_BYTES
from bbnode.ir.caps import MAX_DETAIL_BYTES

DATA = st.binary(max_size=200)
MESSAGES = (
    st.builds(Redeem, ticket=DATA)
    | st.builds(Member, membership=DATA, revocations=DATA)
    | st.builds(Revocations, revocations=DATA)
    | st.builds(
        Refused,
        reason=st.sampled_from(Refusal),
        detail=st.text(st.characters(categories=["L", "N"]), max_size=50),
    )
)


@given(MESSAGES)
def test_round_trip(message):
    assert decode_message(encode_message(message)) == message


@given(DATA)
def test_garbage_is_refused(raw):
    with pytest.raises(AccessRefused):
        decode_message(raw)


@pytest.mark.parametrize(
    "fields",
    [
        [],
        ["redeem"],
        ["redeem", "text"],
        ["member", b"m" * (MAX_MEMBERSHIP_BYTES + 1), b""],
        ["refused", "because", "x"],
        ["refused", "expired", "\x1b[31m"],
        ["unknown", b""],
        [["redeem"], b""],
        {"redeem": b""},
    ],
)
def test_other_fields_are_refused(fields):
    with pytest.raises(AccessRefused) as caught:
        decode_message(msgpack.packb(fields))
    assert caught.value.reason is Refusal.MALFORMED


def test_bounds():
    with pytest.raises(AccessRefused) as caught:
        decode_message(b"\0" * (MESSAGE.max_bytes + 1))
    assert caught.value.reason is Refusal.TOO_LARGE
    long = Refused(reason=Refusal.USED_UP, detail="é\n" * 5000)
    again = decode_message(encode_message(long))
    assert isinstance(again, Refused)
    assert 0 < len(again.detail.encode()) <= MAX_DETAIL_BYTES
