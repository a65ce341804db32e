"""Inputs of an execution: from what Python has to values of a program, and to JSON for a daemon.

Rule: an array is checked against what the target declares and never cast; numbers and lists of them
get the declared dtype where nothing is lost.
"""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from bbnode.api.errors import InputRefused
from bbnode.daemon.invoke.numbers import numbers
from bbnode.ir import types
from bbnode.ir.caps import MAX_DEADLINE_S
from bbnode.ir.errors import BbnodeError
from bbnode.ir.peer import PeerId
from bbnode.ir.types import TypeNode
from bbnode.ir.values import TRIGGER, MetadataVec, Trigger, Value, metadata_of, type_of

_EXPECTED = (
    'give an array, a number or true and false, lists of them, a text, bytes, "trigger", a dict '
    "for Metadata, or a list of dicts for a MetadataVec"
)


def named(inputs: Any) -> Mapping[str, Any]:
    """Return the inputs of a call. Raises InputRefused if they are no mapping."""
    if inputs is not None and not isinstance(inputs, Mapping):
        raise InputRefused(f"inputs is a {type(inputs).__name__}; give a dict of them by name")
    return {} if inputs is None else inputs


def seconds(timeout_s: Any) -> float:
    """Return the seconds that a call waits. Raises InputRefused for a value that is no time."""
    if not isinstance(timeout_s, int | float) or not math.isfinite(timeout_s):
        raise InputRefused(f"timeout_s is {timeout_s!r}; give a number of seconds")
    return max(float(timeout_s), 0.0)


def deadline(deadline_s: Any) -> float | None:
    """Return the seconds of an execution's deadline. Raises InputRefused if they are no time."""
    if deadline_s is None:
        return None
    is_number = isinstance(deadline_s, int | float) and not isinstance(deadline_s, bool)
    if not is_number or not 0 < deadline_s <= MAX_DEADLINE_S:
        raise InputRefused(
            f"deadline_s is {deadline_s!r:.40}; give seconds, more than 0 and a month at most, or "
            "None"
        )
    return float(deadline_s)


def to_values(
    inputs: Mapping[str, Any], declared: Mapping[str, TypeNode | None]
) -> dict[str, Value]:
    """Return inputs as values of a program. Raises InputRefused, which names the input."""
    return {name: to_value(name, value, declared.get(name)) for name, value in inputs.items()}


def to_value(name: str, value: Any, declared: TypeNode | None) -> Value:
    """Return one input as a value of a program. Raises InputRefused."""
    try:
        metadata = metadata_of(value, declared)
    except BbnodeError as error:
        raise InputRefused(f"input {name!r}: {error}") from error
    if metadata is not None:
        return metadata
    match value:
        case np.ndarray() | np.generic():
            return _array(name, np.asarray(value))
        case "trigger" | Trigger():
            return TRIGGER
        case bool() | int() | float() | list() | tuple() if type(value) in _NUMBERS:
            try:
                return numbers(_lists(value), declared)
            except ValueError as error:
                raise InputRefused(f"input {name!r}: {error}") from error
        case str() if declared is types.PEER_ID:
            try:
                return PeerId.parse(value)
            except BbnodeError as error:
                raise InputRefused(f"input {name!r}: {error}") from error
        case str() if declared is types.TENSOR_STRING:
            return np.array(value, object)
        case str():
            return value.encode("utf-8", "replace")
        case bytes() | bytearray() | memoryview():
            return bytes(value)
    try:
        type_of(value)
    except BbnodeError as error:
        raise InputRefused(f"input {name!r} is a {type(value).__name__}; {_EXPECTED}") from error
    return value


def to_json(name: str, value: Any) -> Any:
    """Return one input as the control plane takes it. Raises InputRefused."""
    match value:
        case np.ndarray() | np.generic():
            array = _array(name, np.asarray(value))
            if array.dtype == object:
                return array.tolist() if array.ndim else {"text": array.item()}
            stream = io.BytesIO()
            np.save(stream, array, allow_pickle=False)
            return {"npy": base64.b64encode(stream.getvalue()).decode("ascii")}
        case "trigger" | Trigger():
            return "trigger"
        case bool() | int() | float() | list() | tuple() if type(value) in _NUMBERS:
            return _lists(value)
        case PeerId():
            return {"text": str(value)}
        case Mapping():
            return dict(value)
        case MetadataVec():
            return [dict(each) for each in value]
        case str():
            return {"text": value}
        case bytes() | bytearray() | memoryview():
            return {"bytes": base64.b64encode(value).decode("ascii")}
    raise InputRefused(f"input {name!r} is a {type(value).__name__}; {_EXPECTED}")


# Exact types only: U64 and its like are subclasses of int, and values of their own.
_NUMBERS = (bool, int, float, list, tuple)


def _lists(value: Any) -> Any:
    return [_lists(item) for item in value] if isinstance(value, list | tuple) else value


def _array(name: str, array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return an array that a program can hold: texts as objects, numbers in this byte order."""
    if array.dtype.kind in "UT":
        return array.astype(object)
    texts = array.dtype == object and all(isinstance(text, str) for text in array.flat)
    if not texts and array.dtype.kind not in "biufcV":
        raise InputRefused(
            f"input {name!r} is an array of {array.dtype}; give numbers, or texts alone"
        )
    return array.astype(array.dtype.newbyteorder("="), copy=False)
