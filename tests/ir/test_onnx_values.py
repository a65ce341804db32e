"""Texts, sequences and optionals of ONNX as values: types, carriers, payloads."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import helper

from bbnode.engine.admission import adopt
from bbnode.ir import codec, types
from bbnode.ir.caps import MAX_TEXTS
from bbnode.ir.decoding import Budget
from bbnode.ir.errors import AuthorError, DecodeError
from bbnode.ir.values import OptionalValue, TensorSequence, size_of, type_of

TEXTS = st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=5), max_size=6)
NUMBERS = st.lists(st.floats(width=32, allow_nan=False), max_size=4)
ARRAYS = st.one_of(
    TEXTS.map(lambda texts: np.array(texts, object)),
    NUMBERS.map(lambda numbers: np.array(numbers, np.float32)),
)


def sequences() -> st.SearchStrategy[TensorSequence]:
    return st.one_of(
        st.lists(TEXTS.map(lambda t: np.array(t, object)), max_size=4).map(
            lambda found: TensorSequence(found, types.TENSOR_STRING)
        ),
        st.lists(NUMBERS.map(lambda n: np.array(n, np.float32)), max_size=4).map(
            lambda found: TensorSequence(found, types.TENSOR_FLOAT)
        ),
    )


VALUES = st.one_of(
    ARRAYS,
    sequences(),
    st.one_of(ARRAYS, sequences()).map(OptionalValue),
    st.sampled_from(list(types.OPTIONAL_OF)).map(lambda node: OptionalValue(None, node)),
)


def equal(a: Any, b: Any) -> bool:
    return np.array_equal(a, b) if isinstance(a, np.ndarray) else bool(a == b)


@given(VALUES)
def test_values_come_back_from_the_wire(value: Any) -> None:
    node = type_of(value)
    payload = codec.encode_value(value)
    again = codec.decode_value(node, payload)
    assert type_of(again) is node
    assert equal(value, again)
    assert codec.encode_value(again) == payload
    assert size_of(again) > 0 or not getattr(value, "size", 1)
    assert equal(adopt(value), value)


@given(VALUES, st.data())
def test_a_payload_that_somebody_changed_is_refused_or_another_value(value: Any, data: Any) -> None:
    node = type_of(value)
    payload = bytearray(codec.encode_value(value))
    for _ in range(data.draw(st.integers(1, 3))):
        if payload:
            at = data.draw(st.integers(0, len(payload) - 1))
            payload[at] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(payload)))
    for changed in (bytes(payload), bytes(payload[:cut]), bytes(payload) + b"\0"):
        try:
            found = codec.decode_value(node, changed)
        except DecodeError:
            continue
        assert type_of(found) is node


def head(*shape: int, elem: int = onnx.TensorProto.STRING) -> bytes:
    return struct.pack("<BB6x", elem, len(shape)) + struct.pack(f"<{len(shape)}Q", *shape)


@pytest.mark.parametrize(
    ("node", "payload"),
    [
        (types.TENSOR_STRING, head(1 << 60)),
        (types.TENSOR_STRING, head(MAX_TEXTS + 1) + bytes(4 * (MAX_TEXTS + 1))),
        (types.TENSOR_STRING, head(0, 1 << 63)),
        (types.TENSOR_STRING, head(1) + struct.pack("<I", 0xFFFFFFFF)),
        (types.TENSOR_STRING, head(1) + struct.pack("<I", 1) + b"\xff"),
        (types.TENSOR_STRING, head(1) + struct.pack("<I", 1) + b"ab"),
        (types.TENSOR_STRING, head(1, elem=1) + bytes(4)),
        (types.SEQUENCE_OF[types.TENSOR_FLOAT], struct.pack("<I", 0xFFFFFFFF)),
        (types.SEQUENCE_OF[types.TENSOR_FLOAT], struct.pack("<IQ", 1, 1 << 62)),
        (types.SEQUENCE_OF[types.TENSOR_FLOAT], struct.pack("<IQ", 1, 16) + head(0)),
        (types.OPTIONAL_OF[types.TENSOR_FLOAT], b"\x02"),
        (types.OPTIONAL_OF[types.TENSOR_FLOAT], b"\x00\x00"),
        (types.OPTIONAL_OF[types.TENSOR_FLOAT], b""),
    ],
)
def test_hostile_payloads_are_refused(node: types.TypeNode, payload: bytes) -> None:
    with pytest.raises(DecodeError):
        codec.decode_value(node, payload)


def test_texts_count_to_the_budget_of_a_payload() -> None:
    payload = codec.encode_value(np.array(["a"] * 100, object))
    with pytest.raises(DecodeError):
        codec.decode_value(types.TENSOR_STRING, payload, Budget(99, 0))
    assert codec.cost_of(types.TENSOR_STRING, payload, 1 << 20) > 1


def test_what_is_no_value_is_refused() -> None:
    for wrong in (
        lambda: type_of(np.array(["a", 1], object)),
        lambda: type_of(np.array([b"a"])),
        lambda: TensorSequence([]),
        lambda: TensorSequence([np.zeros(1, np.float32), np.zeros(1)]),
        lambda: TensorSequence([], types.TRIGGER),
        lambda: OptionalValue(),
        lambda: OptionalValue(np.zeros(1), types.TENSOR_FLOAT),
        lambda: OptionalValue(OptionalValue(np.zeros(1))),
    ):
        with pytest.raises(AuthorError):
            wrong()
    with pytest.raises(DecodeError, match="UTF-8"):
        codec.encode_value(np.array(["\ud800"], object))
    with pytest.raises(DecodeError, match="at most"):
        codec.encode_value(np.full(MAX_TEXTS + 1, "a", object))


@pytest.mark.parametrize("node", [*types.SEQUENCE_OF.values(), *types.OPTIONAL_OF.values()])
def test_types_are_those_of_onnx(node: types.TypeNode) -> None:
    proto = types.type_to_proto(node)
    assert types.type_from_proto(proto) is node
    bare = type(proto).FromString(proto.SerializeToString())
    bare.ClearField("denotation")
    assert types.type_from_proto(bare) is node
    assert node.is_a(types.SEQUENCE) != node.is_a(types.OPTIONAL)
    assert types.is_onnx(node)
    assert not types.is_onnx(types.PEER_ID_VEC)


def test_open_types_stay_open() -> None:
    sequence = helper.make_sequence_type_proto(helper.make_tensor_type_proto(0, None))
    assert types.type_from_proto(sequence) is types.SEQUENCE
    optional = helper.make_optional_type_proto(sequence)
    assert types.type_from_proto(optional) is types.OPTIONAL


def test_widths_of_text_arrays_do_not_count() -> None:
    assert type_of(np.array(["a"])) is type_of(np.array(["abc"])) is types.TENSOR_STRING
    assert type_of(np.array(["abc"])[0]) is types.TENSOR_STRING
