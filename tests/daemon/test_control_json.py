"""JSON of the control plane: what goes out is JSON, what comes in is an object or refused."""

from __future__ import annotations

import base64
import io
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from bbnode.daemon.control.errors import ControlProtocolError, Problem, error_of
from bbnode.daemon.control.inputs import to_value
from bbnode.daemon.control.json_lines import encode, parse_object

SCALARS = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.text(max_size=20)
OBJECTS = st.dictionaries(st.text(max_size=8), SCALARS | st.lists(SCALARS), max_size=4)


def test_numbers_that_are_not_json_become_null() -> None:
    line = encode({"a": float("nan"), "b": [float("inf")], "c": 1.5})
    assert json.loads(line) == {"a": None, "b": [None], "c": 1.5}


def test_what_has_no_form_is_refused() -> None:
    with pytest.raises(ControlProtocolError, match="not JSON"):
        encode({"a": object()})


@given(value=OBJECTS)
def test_a_line_reads_back_as_it_was_written(value: dict[str, object]) -> None:
    line = encode(value)
    assert line.count(b"\n") == 1
    assert line.endswith(b"\n")
    if not any(0xD800 <= ord(c) < 0xE000 for c in repr(value)):
        assert parse_object(line) == value


@given(data=st.binary(max_size=100))
def test_any_bytes_are_an_object_or_refused(data: bytes) -> None:
    try:
        assert isinstance(parse_object(data), dict)
    except ControlProtocolError as error:
        assert "JSON" in str(error)  # noqa: PT017 - both ends are right


def test_deep_nesting_is_refused() -> None:
    with pytest.raises(ControlProtocolError, match="not JSON"):
        parse_object(b"[" * 100_000)


@given(
    array=hnp.arrays(
        st.sampled_from([np.float32, np.int64, np.bool_, np.uint8, np.float64, ">i4"]),
        hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4),
    ),
    fortran=st.booleans(),
)
def test_an_npy_input_is_the_array_that_was_saved(array: np.ndarray, fortran: bool) -> None:
    given_array = np.asfortranarray(array) if fortran else array
    stream = io.BytesIO()
    np.save(stream, given_array)
    text = base64.b64encode(stream.getvalue()).decode()
    made = to_value("x", {"npy": text})
    assert isinstance(made, np.ndarray)
    np.testing.assert_array_equal(made, given_array)
    assert made.dtype == array.dtype.newbyteorder("=")
    assert made.shape == given_array.shape


@given(data=st.binary(max_size=200), magic=st.booleans())
def test_any_bytes_are_an_array_or_refused(data: bytes, magic: bool) -> None:
    text = base64.b64encode((b"\x93NUMPY\x01\x00" if magic else b"") + data).decode()
    try:
        assert isinstance(to_value("x", {"npy": text}), np.ndarray)
    except Problem as problem:
        assert problem.code == "InvalidInput"  # noqa: PT017 - both ends are right


@pytest.mark.parametrize("shape", [(-1, -1), (2**62, 2**62, 0), (-4,), (2**40,), (2,)])
def test_a_header_that_lies_about_its_shape_is_refused(shape: tuple[int, ...]) -> None:
    text = str({"descr": "<f4", "fortran_order": False, "shape": shape}).encode() + b"\n"
    header = b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text
    for content in (b"", b"\x00" * 4):
        with pytest.raises(Problem, match="does not hold"):
            to_value("x", {"npy": base64.b64encode(header + content).decode()})


def test_objects_are_never_unpickled() -> None:
    stream = io.BytesIO()
    np.save(stream, np.array([{}], dtype=object), allow_pickle=True)
    text = base64.b64encode(stream.getvalue()).decode()
    with pytest.raises(Problem, match="without objects"):
        to_value("x", {"npy": text})


def test_a_refusal_that_is_no_problem_is_an_error_all_the_same() -> None:
    error = error_of(502, {"code": 3})
    assert (error.kind, error.status) == ("Unknown", 502)
    assert "502" in str(error)
