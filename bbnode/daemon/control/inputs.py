"""Inputs of an invoke as JSON.

Rule: a value is "trigger", a number, true or false, lists of them, {"text": "…"}, {"bytes": base64}
or {"npy": base64 of an .npy file}; for Metadata an object of scalars, for a MetadataVec a list of
them. Arrays are checked against their header before anything is allocated, and never unpickled.
"""

from __future__ import annotations

import base64
import contextlib
import io
import math
from typing import Any, Literal

import numpy as np

from bbnode.daemon.control.errors import Problem
from bbnode.daemon.control.json_lines import short
from bbnode.daemon.invoke.numbers import numbers
from bbnode.ir import types
from bbnode.ir.errors import AuthorError
from bbnode.ir.types import TypeNode
from bbnode.ir.values import TRIGGER, Value, metadata_of

EXPECTED = (
    '"trigger", a number, true or false, lists of them, {"text": "…"}, {"bytes": base64} or '
    '{"npy": base64 of an .npy file}'
)


def nanoseconds(seconds: float | None) -> int | None:
    """Return the time of an execution in the engine's unit; less than 1 ns becomes 1."""
    return None if seconds is None else max(round(seconds * 1e9), 1)


def to_value(name: str, value: Any, declared: TypeNode | None = None) -> Value:
    """Return a JSON input as a run-time value, numbers as a tensor of the `declared` dtype.

    Raises `Problem` (400) naming the input.
    """
    try:
        metadata = metadata_of(value, declared)
    except AuthorError as error:
        raise Problem(400, "InvalidInput", f"input {name!r}: {error}") from error
    if metadata is not None:
        return metadata
    match value:
        case "trigger":
            return TRIGGER
        case bool() | int() | float() | list():
            try:
                return numbers(value, declared)
            except ValueError as error:
                detail = f"input {name!r} is {short(value)}: {error}"
                raise Problem(400, "InvalidInput", detail) from error
        case {"text": str() as text} if len(value) == 1:
            if declared is types.TENSOR_STRING:
                return np.array(text, object)
            return text.encode("utf-8", "replace")
        case {"bytes": str() as text} if len(value) == 1:
            return _decode(name, text)
        case {"npy": str() as text} if len(value) == 1:
            return _array(name, _decode(name, text))
    raise Problem(400, "InvalidInput", f"input {name!r} is {short(value)}; give {EXPECTED}")


def _decode(name: str, text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except ValueError as error:
        raise Problem(400, "InvalidInput", f"input {name!r} is not base64: {error}") from error


def _array(name: str, data: bytes) -> Value:
    """Read an .npy file: its header comes first, and must claim exactly the bytes that follow."""
    stream = io.BytesIO(data)
    try:
        version = np.lib.format.read_magic(stream)
        read = {
            (1, 0): np.lib.format.read_array_header_1_0,
            (2, 0): np.lib.format.read_array_header_2_0,
        }[version]
        shape, fortran_order, dtype = read(stream)
    except (ValueError, KeyError, SyntaxError, TypeError, EOFError) as error:
        raise Problem(
            400, "InvalidInput", f"input {name!r} is no .npy file of version 1 or 2"
        ) from error
    left = len(data) - stream.tell()
    array = None
    if dtype.kind in "biufc" and math.prod(shape) * dtype.itemsize == left:
        # Extents may be negative or absurd although their product fits.
        with contextlib.suppress(ValueError, TypeError, OverflowError, MemoryError):
            order: Literal["F", "C"] = "F" if fortran_order else "C"
            array = np.ndarray(shape, dtype, buffer=data, offset=stream.tell(), order=order)
    if array is None:
        raise Problem(
            400,
            "InvalidInput",
            f"input {name!r}: an .npy file of {dtype} {shape} does not hold {left} bytes of "
            "numbers; save it with numpy.save, without objects",
        )
    # A copy, so that the array owns its memory, in this machine's byte order.
    return np.array(array, dtype.newbyteorder("="), order="C")
