"""Refusals on the wire: their bytes, and what is taken for one."""

from __future__ import annotations

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bbnode.ir import codec, types
from bbnode.ir.address import REFUSED_SUFFIX, address_from_bytes, parse_component_suffix
from bbnode.ir.errors import DecodeError
from bbnode.ir.peer import PeerId
from bbnode.ir.refusal import MAX_REFUSAL_BYTES, WireRefusal, decode_refusal, encode_refusal
from bbnode.ir.texts import without_folders
from bbnode.ir.values import ResponseBatch

KINDS = st.from_regex(r"\A[A-Za-z][A-Za-z0-9_]{0,40}\Z")


def test_its_place_is_an_address_that_names_no_component() -> None:
    assert str(address_from_bytes(REFUSED_SUFFIX)) == "/op/refused"
    assert parse_component_suffix(REFUSED_SUFFIX) is None


@given(KINDS, st.text(), st.text())
def test_a_refusal_comes_back_within_its_bounds(kind: str, detail: str, where: str) -> None:
    refusal = WireRefusal(kind, detail, where)
    raw = encode_refusal(refusal)
    assert len(raw) <= MAX_REFUSAL_BYTES
    again = decode_refusal(raw)
    assert again == refusal.bounded()
    assert str(again).isprintable()
    assert encode_refusal(again) == raw


def test_a_long_text_is_cut_between_characters() -> None:
    refusal = WireRefusal("OpError", "ü" * 400, "é" * 400).bounded()
    assert (refusal.detail, refusal.where) == ("ü" * 128, "é" * 64)


@pytest.mark.parametrize(
    "item",
    [
        b"bytes",
        [],
        {},
        {"kind": "A", "detail": ""},
        {"kind": "A", "detail": "", "where": "", "more": ""},
        {"kind": "", "detail": "", "where": ""},
        {"kind": "two words", "detail": "", "where": ""},
        {"kind": "A\n", "detail": "", "where": ""},
        {"kind": 5, "detail": "", "where": ""},
        {"kind": "A", "detail": "x" * 257, "where": ""},
        {"kind": "A", "detail": "", "where": "x" * 129},
        {"kind": "A", "detail": [["x"]], "where": ""},
    ],
)
def test_nothing_else_is_taken_for_one(item: object) -> None:
    with pytest.raises(DecodeError):
        decode_refusal(msgpack.packb(item))


@given(st.binary(max_size=600))
def test_random_bytes_are_a_refusal_or_a_decode_error(raw: bytes) -> None:
    try:
        made = decode_refusal(raw)
    except DecodeError:
        return
    assert made.kind


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("No such file: '/home/me/data/x.npz'", "No such file: '…/x.npz'"),
        (r"at C:\Users\me\x.txt, line 3", r"at …\x.txt, line 3"),
        ("loss is 3/4 of a/b", "loss is 3/4 of a/b"),
    ],
)
def test_folders_of_this_machine_are_left_out(text: str, told: str) -> None:
    assert without_folders(text) == told


# -- reasons in a batch of answers -------------------------------------------------------------


def batch(**more: object) -> ResponseBatch:
    fields = {
        "responses": ((PeerId.from_seed(1), b"yes"),),
        "missing": (PeerId.from_seed(2), PeerId.from_seed(3)),
        "reasons": ((PeerId.from_seed(3), WireRefusal("GateDenied", "no", "op")),),
    }
    return ResponseBatch(**{**fields, **more})


@pytest.mark.parametrize("reasons", [batch().reasons, ()])
def test_a_batch_keeps_its_reasons(reasons: tuple) -> None:
    made = batch(reasons=reasons)
    raw = codec.encode_value(made)
    assert codec.decode_value(types.RESPONSE_BATCH, raw) == made
    # Without reasons it is what it always was: nodes that know none read it.
    assert (b"reasons" in raw) is bool(reasons)


@pytest.mark.parametrize(
    "reasons",
    [
        ((PeerId.from_seed(1), WireRefusal("A")),),  # it has answered
        ((PeerId.from_seed(3), WireRefusal("A")),) * 2,
        ((PeerId.from_seed(3), WireRefusal("not a kind")),),
        ((PeerId.from_seed(3), WireRefusal("A", "x" * 300)),),
    ],
)
def test_a_batch_with_impossible_reasons_is_refused(reasons: tuple) -> None:
    with pytest.raises(DecodeError):
        codec.decode_value(types.RESPONSE_BATCH, codec.encode_value(batch(reasons=reasons)))
