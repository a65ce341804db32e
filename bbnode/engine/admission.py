"""Admission of inputs of `invoke` and `deliver_event`: they are checked, counted and copied.

Rule: names are checked first, then counts, types and sizes; nothing is stored unless all are right.
Arrays are copied once, here, and are read-only from then on; the caller may reuse its buffers. An
array over `bytes`, which cannot change, is not copied.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from bbnode.engine.errors import (
    InputShapeMismatch,
    InputTypeMismatch,
    InvalidDeadline,
    MissingInput,
    OversizePayload,
    TooManyInputs,
    UnknownInput,
    did_you_mean,
)
from bbnode.engine.limits import Limits
from bbnode.ir.caps import MAX_COMPOSITE_DEPTH, MAX_DEADLINE_S
from bbnode.ir.errors import AuthorError
from bbnode.ir.shapes import Dim, shape_fits, shape_text
from bbnode.ir.types import TypeNode
from bbnode.ir.values import Composite, OptionalValue, TensorSequence, Value, size_of, type_of

_ARRAYS = (np.ndarray, np.generic)


class TakesInputs(Protocol):
    """A target, or a bootstrap."""

    @property
    def name(self) -> str:
        """For messages."""

    @property
    def inputs(self) -> Mapping[str, TypeNode | None]:
        """Names and declared types."""

    @property
    def shapes(self) -> Mapping[str, tuple[Dim, ...]]:
        """Declared shapes, of the inputs that have one."""


def adopt_inputs(
    target: TakesInputs, inputs: Mapping[str, Value], limits: Limits
) -> tuple[dict[str, Value], int]:
    """Return copies of the inputs of an invoke, and their size in bytes; not all need be there."""
    size = _checked_inputs(target, inputs, limits)
    adopted = {}
    for name in inputs:  # no comprehension: in Python 3.11 that is a call
        adopted[name] = adopt(inputs[name])
    return adopted, size


def check_inputs(target: TakesInputs, inputs: Mapping[str, Value], limits: Limits) -> int:
    """Return the size in bytes of all inputs; raises EntryError if the target refuses them."""
    for name in inputs:
        _check_name(target, name)
    missing = ", ".join(name for name in target.inputs if name not in inputs)
    if missing:
        raise MissingInput(f"{target.name}: no value for {missing}; give all inputs")
    return _checked_inputs(target, inputs, limits)


def _checked_inputs(target: TakesInputs, inputs: Mapping[str, Value], limits: Limits) -> int:
    if limits.invoke_inputs is not None and len(inputs) > limits.invoke_inputs:
        raise TooManyInputs(
            f"{target.name}: {len(inputs)} inputs; limit invoke_inputs is {limits.invoke_inputs}"
        )
    if inputs.keys() != target.inputs.keys():
        for name in inputs:
            _check_name(target, name)
    size = 0
    for name, value in inputs.items():
        size += _checked_size(target, name, value)
    if target.shapes:
        bindings: dict[str, int] = {}
        for name in target.shapes:
            if name in inputs:
                _check_shape(target, name, inputs[name], bindings)
    if limits.invoke_bytes is not None and size > limits.invoke_bytes:
        raise OversizePayload(
            f"{target.name}: {size} bytes of input; limit invoke_bytes is {limits.invoke_bytes}"
        )
    return size


def adopt_event(target: TakesInputs, name: str, value: Value, limits: Limits) -> tuple[Value, int]:
    """Return a copy of the value of one event, and its size in bytes."""
    _check_name(target, name)
    size = _checked_size(target, name, value)
    if name in target.shapes:
        _check_shape(target, name, value, {})
    if limits.app_event_bytes is not None and size > limits.app_event_bytes:
        raise OversizePayload(
            f"{target.name}.{name}: an event of {size} bytes; limit app_event_bytes is "
            f"{limits.app_event_bytes}"
        )
    return adopt(value), size


def checked_deadline(deadline_ns: int | None) -> int | None:
    """Return the time of an execution; raises InvalidDeadline."""
    if deadline_ns is None:
        return None
    if type(deadline_ns) is not int or not 0 < deadline_ns <= MAX_DEADLINE_S * 10**9:
        raise InvalidDeadline(
            f"a deadline of {deadline_ns!r:.40} ns; give an integer above 0, up to a month, or None"
        )
    return deadline_ns


def adopt(value: Value) -> Value:
    """Return the value itself where it is immutable, else a read-only copy."""
    if type(value) is np.ndarray and _is_over_bytes(value):
        return value
    if isinstance(value, _ARRAYS):
        array = np.array(value)
        array.flags.writeable = False
        return array
    if isinstance(value, Composite):
        return Composite(adopt(child) for child in value)
    if isinstance(value, TensorSequence):
        return TensorSequence((adopt(tensor) for tensor in value), value.type.element)
    if isinstance(value, OptionalValue) and value.value is not None:
        return OptionalValue(adopt(value.value), value.type.element)
    return value


def _is_over_bytes(array: np.ndarray[Any, Any]) -> bool:
    """Return True if the memory of an array is that of a `bytes` object, and so can't change."""
    base: Any = array
    while type(base) is np.ndarray:
        if base.flags.writeable:
            return False
        base = base.base
    return type(base.obj if type(base) is memoryview else base) is bytes


def check_parts(value: Value, depth: int = 0) -> None:
    """Raise AuthorError if a composite holds something that is not a value, or nests too deep."""
    if not isinstance(value, Composite):
        return
    if depth > MAX_COMPOSITE_DEPTH:
        raise AuthorError(f"composites nest deeper than {MAX_COMPOSITE_DEPTH}; flatten the value")
    for child in value:
        type_of(child)
        check_parts(child, depth + 1)


def _check_name(target: TakesInputs, name: str) -> None:
    if name not in target.inputs:
        known = ", ".join(target.inputs) or "none"
        near = did_you_mean(name, target.inputs, f"it has: {known}")
        raise UnknownInput(f"{target.name} has no input {name!r}{near}")


def _check_shape(target: TakesInputs, name: str, value: Value, bindings: dict[str, int]) -> None:
    declared = target.shapes[name]
    shape = np.shape(value) if isinstance(value, _ARRAYS) else None
    if shape is not None and not shape_fits(declared, shape, bindings):
        raise InputShapeMismatch(
            f"{target.name}.{name} takes {shape_text(declared, bindings)} and was given "
            f"{shape_text(shape)}"
        )


def _checked_size(target: TakesInputs, name: str, value: Value) -> int:
    try:
        actual = type_of(value)
        if type(value) is Composite:
            check_parts(value)
    except AuthorError as error:
        raise InputTypeMismatch(f"{target.name}.{name}: {error}") from error
    declared = target.inputs[name]
    if declared is not None and actual is not declared and not actual.is_a(declared):
        raise InputTypeMismatch(
            f"{target.name}.{name} takes {declared.name} and was given {actual.name}"
        )
    return size_of(value)
