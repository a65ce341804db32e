"""Every value round-trips, and no bytes do anything but decode or raise DecodeError."""

from __future__ import annotations

import contextlib
from typing import Any

import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bbnode.ir import codec, types, values
from bbnode.ir.caps import MAX_COMPOSITE_DEPTH
from bbnode.ir.errors import AuthorError, DecodeError
from bbnode.ir.peer import PeerId

U64 = st.integers(0, 2**64 - 1)
PEERS = st.integers(0, 50).map(PeerId.from_seed)
SCALARS = st.one_of(
    st.booleans(), U64, st.floats(allow_nan=False), st.text(max_size=20), st.binary(max_size=20)
)
METADATA = st.dictionaries(st.text(max_size=10), SCALARS, max_size=5).map(values.Metadata)
TENSORS = st.one_of(
    hnp.arrays(dtype, hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4))
    for dtype in ("f4", "f8", "f2", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "?", ">f4")
)


@st.composite
def search_results(draw: st.DrawFn) -> values.SearchResults:
    """Results of one query, or of a batch, with and without metadata and senders."""
    leading = draw(st.sampled_from([(), (0,), (1,), (3,)]))
    width = draw(st.integers(0, 3))
    found = draw(hnp.arrays("i1", leading, elements=st.integers(0, width)))
    is_hit = np.arange(width) < np.asarray(found)[..., None]
    ids = draw(hnp.arrays("i8", is_hit.shape, elements=st.integers(0, 2**63 - 1)))
    far = draw(hnp.arrays("f4", is_hit.shape))
    hits = int(is_hit.sum())
    return values.SearchResults(
        np.where(is_hit, ids, -1),
        far,
        draw(st.one_of(st.just([]), st.lists(METADATA, min_size=hits, max_size=hits))),
        draw(st.one_of(st.just([]), st.lists(PEERS, min_size=hits, max_size=hits))),
    )


LEAVES = st.one_of(
    st.just(values.TRIGGER),
    PEERS,
    METADATA,
    TENSORS,
    st.binary(max_size=30),
    U64.map(values.U64),
    U64.map(values.RequestId),
    U64.map(values.Timestamp),
    st.lists(PEERS, max_size=4).map(values.PeerIdVec),
    st.lists(METADATA, max_size=3).map(values.MetadataVec),
    search_results(),
)
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=4).map(values.Composite), max_leaves=8
)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray):
        return a.dtype.newbyteorder("=") == b.dtype and np.array_equal(
            a, b, equal_nan=a.dtype.kind == "f"
        )
    if isinstance(a, values.Composite):
        return len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and bool(a == b)


@given(VALUES)
def test_every_value_round_trips(value: values.Value) -> None:
    node = values.type_of(value)
    assert same(value, codec.decode_value(node, codec.encode_value(value)))


@given(st.lists(st.tuples(PEERS, VALUES), max_size=4), st.lists(PEERS, max_size=3))
def test_response_batches_round_trip(answers: list[Any], missing: list[PeerId]) -> None:
    batch = values.ResponseBatch(responses=tuple(answers), missing=tuple(missing))
    back = codec.decode_value(types.RESPONSE_BATCH, codec.encode_value(batch))
    assert back.peers == batch.peers
    assert back.missing == batch.missing
    assert all(same(a, b) for (_, a), (_, b) in zip(batch.responses, back.responses, strict=True))


@given(st.sampled_from([t for t in types.registered_types() if t.is_leaf]), st.binary(max_size=120))
@settings(max_examples=500)
def test_garbage_decodes_or_raises_decode_error(node: types.TypeNode, raw: bytes) -> None:
    try:
        value = codec.decode_value(node, raw)
    except DecodeError:
        return
    assert values.type_of(value) is node


@given(VALUES, st.data())
def test_a_cut_payload_is_refused_or_another_value(
    value: values.Value, data: st.DataObject
) -> None:
    raw = codec.encode_value(value)
    cut = data.draw(st.integers(0, max(0, len(raw) - 1)))
    with contextlib.suppress(DecodeError):
        codec.decode_value(values.type_of(value), raw[:cut])


def test_a_decoded_tensor_is_a_read_only_view_of_the_payload() -> None:
    payload = codec.encode_value(np.arange(1000, dtype=np.float32))
    array = codec.decode_value(types.TENSOR_FLOAT, payload)
    assert not array.flags.writeable
    assert np.shares_memory(array, np.frombuffer(payload, np.uint8))


def test_encoding_does_not_copy_a_contiguous_tensor() -> None:
    array = np.arange(1000, dtype=np.float32)
    body = codec.encode_parts(array)[-1]
    assert np.shares_memory(array, np.frombuffer(body, np.uint8))


def test_huge_announcements_are_refused_before_allocation() -> None:
    header = bytes((1, 2)) + bytes(6) + (2**40).to_bytes(8, "little") * 2
    with pytest.raises(DecodeError, match="does not fit"):
        codec.decode_value(types.TENSOR_FLOAT, header)
    with pytest.raises(DecodeError, match="children"):
        codec.decode_value(types.COMPOSITE, b"\xff\xff\xff\x7f")


def test_nesting_is_bounded() -> None:
    value = values.Composite((b"x",))
    for _ in range(MAX_COMPOSITE_DEPTH + 1):
        value = values.Composite((value,))
    with pytest.raises(DecodeError, match="deeper"):
        codec.encode_value(value)


@pytest.mark.parametrize("thing", [object(), "text", 3, np.array([b"a"]), [1, 2]])
def test_what_is_no_value_is_named(thing: object) -> None:
    with pytest.raises(AuthorError, match=r"value|dtype"):
        values.type_of(thing)


@pytest.mark.parametrize("dims", [(0, 2**64 - 1), (2**40, 0), (0,) * 33])
def test_an_empty_tensor_of_odd_sizes_raises_nothing_but_decode_errors(
    dims: tuple[int, ...],
) -> None:
    header = bytes((1, len(dims))) + bytes(6) + b"".join(d.to_bytes(8, "little") for d in dims)
    try:
        value = codec.decode_value(types.TENSOR_FLOAT, header)
    except DecodeError:
        return
    assert value.shape == dims


def test_a_decoded_tensor_over_a_buffer_that_can_change_is_read_only_all_the_same() -> None:
    buffer = bytearray(codec.encode_value(np.arange(4, dtype=np.float32)))
    array = codec.decode_value(types.TENSOR_FLOAT, memoryview(buffer))
    assert not array.flags.writeable
