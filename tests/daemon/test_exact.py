"""Values as JSON that says all of them."""

from __future__ import annotations

import json
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from bbnode.daemon.invoke.exact import Encoder, ValueOmitted, decoded
from bbnode.ir import types
from bbnode.ir.errors import DecodeError
from bbnode.ir.peer import PeerId
from bbnode.ir.refusal import WireRefusal
from bbnode.ir.values import (
    TRIGGER,
    U64,
    CommandId,
    Composite,
    Metadata,
    MetadataVec,
    OptionalValue,
    PeerIdVec,
    ResponseBatch,
    SearchResults,
    TensorSequence,
    Value,
    type_of,
)

A, B = (PeerId.from_seed(i) for i in range(2))


def back(value: Value) -> Value:
    """A value there and back, over JSON as the control plane writes it."""
    return decoded(json.loads(json.dumps(Encoder()(value), allow_nan=False)))


@given(
    arrays.arrays(
        st.one_of(
            *(arrays.integer_dtypes(), arrays.unsigned_integer_dtypes()),
            *(arrays.floating_dtypes(sizes=(16, 32, 64)), arrays.boolean_dtypes()),
        ),
        arrays.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4),
    )
)
def test_an_array_comes_back_as_it_was(array: np.ndarray[Any, Any]) -> None:
    made = back(array)
    assert made.dtype == array.dtype.newbyteorder("=")
    assert made.shape == array.shape
    np.testing.assert_array_equal(made, array)


@pytest.mark.parametrize(
    "value",
    [
        *(TRIGGER, A, PeerIdVec((A, B)), b"\x00\xff", U64(2**64 - 1), CommandId(3)),
        Metadata(loss=float("inf"), n=3, name="x", raw=b"\x01", good=True),
        SearchResults([1, 2], [0.5, float("inf")], [Metadata(a=b"x"), Metadata()], [A, B]),
        SearchResults([[1], [-1]], [[0.5], [np.inf]]),
        MetadataVec([Metadata(a=1), Metadata(b="x")]),
        Composite((np.float32([1, 2]), Metadata(n=1))),
        TensorSequence([np.int64([1])]),
        TensorSequence([], types.TENSOR_FLOAT),
        OptionalValue(np.float32(1)),
        OptionalValue(None, types.TENSOR_FLOAT),
        np.array([["a", "ü"]], object),
        np.array([1.5, -2], ml_dtypes.bfloat16),
    ],
    ids=lambda value: type(value).__name__,
)
def test_every_value_comes_back_as_it_was(value: Value) -> None:
    made = back(value)
    assert type_of(made) is type_of(value)
    if isinstance(value, Composite):
        assert np.array_equal(made[0], value[0])
        assert made[1:] == value[1:]
    else:
        assert np.array_equal(made, value)


def test_a_batch_of_answers_comes_back_with_the_reasons() -> None:
    batch = ResponseBatch(
        responses=((A, Metadata(n=1)),),
        missing=(B,),
        reasons=((B, WireRefusal("DataMissing", "no shard", "train")),),
    )
    assert back(batch) == batch


def test_what_no_longer_fits_is_told_without_its_content() -> None:
    encode = Encoder(max_bytes=100)
    assert "omitted" not in encode(np.zeros(20, np.float32))
    told = encode(np.zeros(20, np.float32))
    assert (told["dtype"], told["shape"]) == ("float32", [20])
    with pytest.raises(ValueOmitted, match="80 bytes"):
        decoded(told)


@pytest.mark.parametrize(
    "told",
    [
        *(None, {}, [], {"type": "Nothing"}, {"type": "PeerId", "value": "x"}),
        {"type": "Tensor.FLOAT", "dtype": "float32", "shape": [2], "data": "AAAA"},
        {"type": "Tensor.FLOAT", "dtype": "float32", "shape": [-1], "data": "AAAAAA=="},
        {"type": "Tensor.FLOAT", "dtype": "float32", "shape": ["x"], "data": ""},
        {"type": "Metadata", "value": [1]},
        {"type": "ResponseBatch", "value": []},
    ],
)
def test_what_is_no_value_is_refused(told: Any) -> None:
    if isinstance(told, dict) and told.get("shape") == [-1]:
        assert decoded(told).shape == (1,)  # numpy reads -1 as "the rest"
        return
    with pytest.raises(DecodeError):
        decoded(told)
