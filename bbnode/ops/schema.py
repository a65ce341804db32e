"""The schema of a custom op, read from the annotations of its function.

Rule: positional parameters are inputs, keyword-only ones attributes, and the return annotation says
the outputs. A tensor is annotated as numpy does: `NDArray[np.float32]` (or `np.ndarray[tuple[int,
int], np.dtype[np.float32]]` for one with two axes), `NDArray[T]` for any dtype, the same wherever T
stands; every other value by its class, such as `Metadata` or `PeerId`.
"""

from __future__ import annotations

import ctypes
import inspect
import types as python_types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

import numpy as np
from onnx import AttributeProto

from bbnode.ir import types, values
from bbnode.ir.errors import AuthorError
from bbnode.ir.opset import REQUIRED, Port
from bbnode.ir.types import TypeNode

# Keyword arguments of a call that are not the op's.
RESERVED = frozenset({"after"})

_SCALAR_KINDS: dict[Any, tuple[int, int]] = {  # kind of one, and of a list
    int: (AttributeProto.INT, AttributeProto.INTS),
    bool: (AttributeProto.INT, AttributeProto.INTS),
    float: (AttributeProto.FLOAT, AttributeProto.FLOATS),
    str: (AttributeProto.STRING, AttributeProto.STRINGS),
}
_DTYPES = {values.dtype_of(node).type: node for node in types.TENSOR_BY_ELEM.values()}


class _Wrong(Exception):
    """An annotation does not give a schema; never leaves this file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PortSchema:
    """One input or output; `shape` has None for an axis of any length."""

    port: Port
    shape: tuple[int | None, ...] | None = None

    def misfit(self, value: Any, variables: dict[str, TypeNode]) -> str:
        """Return what is wrong with a value, or "".

        `variables` holds the dtypes that type variables stand for, and gets those of this value.
        """
        wanted = self.port.type
        try:
            actual = values.type_of(value)
        except AuthorError as error:
            return str(error)
        if isinstance(wanted, str):
            if not actual.is_a(types.TENSOR):
                return f"is {actual.name}, not a tensor"
            wanted = variables.setdefault(wanted, actual)
        if not actual.is_a(wanted):
            return f"is {actual.name}, not {wanted.name}"
        if self.shape is not None:
            shape = np.shape(value)
            if len(shape) != len(self.shape) or any(
                given not in (None, length) for given, length in zip(self.shape, shape, strict=True)
            ):
                listed = ", ".join("?" if axis is None else str(axis) for axis in self.shape)
                return f"has the shape {list(shape)}, not [{listed}]"
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttributeSchema:
    """One attribute; `scalar` is int, bool, float or str, of a list that of its items."""

    default: Any
    scalar: type
    is_list: bool

    @property
    def kind(self) -> int:
        """ONNX's number of the kind."""
        return _SCALAR_KINDS[self.scalar][self.is_list]

    def read(self, value: Any) -> Any:
        """Return a stored value, or one of a call, as the function gets it; ValueError otherwise.

        A number becomes a float32, as ONNX stores it, so that a direct call gives the same result.
        """
        if not self.is_list:
            return self._item(value)
        if isinstance(value, Sequence | np.ndarray) and not isinstance(value, str | bytes):
            return tuple(self._item(item) for item in value)
        raise ValueError(f"a list of {self.scalar.__name__}")

    def _item(self, value: Any) -> Any:
        if self.scalar is str and isinstance(value, str | bytes):
            return value if isinstance(value, str) else value.decode("utf-8")
        if self.scalar is float and isinstance(value, float | int | np.floating | np.integer):
            return ctypes.c_float(float(value)).value
        is_whole = self.scalar in (int, bool) and isinstance(value, int | np.integer | np.bool_)
        if is_whole and -(1 << 63) <= int(value) < 1 << 63:
            return self.scalar(value)
        raise ValueError(self.scalar.__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Schema:
    """Inputs, outputs and attributes of a custom op; `is_single`: it returns no tuple."""

    inputs: tuple[PortSchema, ...]
    outputs: tuple[PortSchema, ...]
    attributes: Mapping[str, AttributeSchema]
    is_single: bool

    def input_at(self, index: int) -> PortSchema | None:
        """Return the port of the input at a position, or None; a variadic one takes the rest."""
        port = self.inputs[min(index, len(self.inputs) - 1)] if self.inputs else None
        return port if port and (index < len(self.inputs) or port.port.variadic) else None

    def read_attributes(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return all attributes as the function gets them; AuthorError for what does not fit."""
        unknown = given.keys() - self.attributes.keys()
        if unknown:
            known = ", ".join(self.attributes) or "none"
            raise AuthorError(f"has no attribute {min(unknown)!r:.80}; it has: {known}")
        found: dict[str, Any] = {}
        for name, attribute in self.attributes.items():
            value = given.get(name, attribute.default)
            if value is REQUIRED:
                raise AuthorError(f"needs the attribute {name}=…")
            try:
                found[name] = attribute.read(value)
            except (ValueError, OverflowError) as error:
                raise AuthorError(
                    f"has {value!r:.80} as attribute {name!r}, which has to be {error}"
                ) from error
        return found


def schema_of(function: Callable[..., Any]) -> Schema:
    """Return the schema in the annotations of a function; raises AuthorError without one."""
    where = f"custom op {function.__qualname__}"
    try:
        hints = typing.get_type_hints(function)
    except Exception as error:
        raise AuthorError(
            f"{where}: its annotations can't be read ({type(error).__name__}: {error}); name types "
            "that its module imports, and not under TYPE_CHECKING"
        ) from error
    inputs: list[PortSchema] = []
    attributes: dict[str, AttributeSchema] = {}
    named = where
    try:
        for parameter in inspect.signature(function).parameters.values():
            named = f"{where}: parameter {parameter.name!r}"
            if parameter.kind is parameter.VAR_KEYWORD or parameter.name in RESERVED:
                raise _Wrong("may not be there; name each attribute, and none of them 'after'")
            if parameter.name not in hints:
                raise _Wrong("has no annotation")
            hint = hints[parameter.name]
            if parameter.kind is parameter.KEYWORD_ONLY:
                attributes[parameter.name] = _attribute(parameter, hint)
            else:
                inputs.append(_input(parameter, hint))
        named = f"{where}: its return value"
        outputs, is_single = _outputs(hints.get("return"))
        bound = {each.port.type for each in inputs}
        for each in outputs:
            kind = each.port.type
            if kind not in bound if isinstance(kind, str) else not kind.is_leaf:
                raise _Wrong(
                    "needs a dtype, or a type variable of an input: a program knows all its types"
                )
    except _Wrong as error:
        raise AuthorError(f"{named} {error}") from error
    return Schema(
        inputs=tuple(inputs), outputs=tuple(outputs), attributes=attributes, is_single=is_single
    )


def _input(parameter: inspect.Parameter, hint: Any) -> PortSchema:
    is_optional = parameter.default is not parameter.empty
    if is_optional:
        if parameter.default is not None:
            raise _Wrong(
                "has a default; an attribute stands behind `*`, and an optional input "
                "has the default None"
            )
        hint = _without_none(hint)
    kind, shape = _value_type(hint)
    port = Port(
        name=parameter.name,
        type=kind,
        optional=is_optional,
        variadic=parameter.kind is parameter.VAR_POSITIONAL,
    )
    return PortSchema(port=port, shape=shape)


def _without_none(hint: Any) -> Any:
    if get_origin(hint) in (Union, python_types.UnionType):
        rest = [each for each in get_args(hint) if each is not type(None)]
        if len(rest) == 1:
            return rest[0]
    raise _Wrong("has the default None; annotate it as `… | None`")


def _outputs(hint: Any) -> tuple[list[PortSchema], bool]:
    listed: dict[str, Any] = {"out": hint}
    is_single = True
    if isinstance(hint, type) and issubclass(hint, tuple) and hasattr(hint, "_fields"):
        listed, is_single = typing.get_type_hints(hint), False
    elif get_origin(hint) is tuple:
        listed = {f"out_{index}": each for index, each in enumerate(get_args(hint))}
        is_single = False
    if hint is None or hint is type(None) or not listed or Ellipsis in listed.values():
        raise _Wrong("has to be annotated with a value, or a tuple of as many as there are")
    found = []
    for name, each in listed.items():
        kind, shape = _value_type(each)
        found.append(PortSchema(port=Port(name=name, type=kind), shape=shape))
    return found, is_single


def _value_type(hint: Any) -> tuple[TypeNode | str, tuple[int | None, ...] | None]:
    """Return the type of an annotation, or the name of its type variable, and a shape."""
    hint = _without_alias(hint)
    if hint is np.ndarray:
        return types.TENSOR, None
    if get_origin(hint) is np.ndarray:
        shape, dtype = map(_without_alias, get_args(hint))
        return _tensor_type(get_args(dtype)[0] if get_args(dtype) else Any), _shape(shape)
    node = values.type_of_class(hint) if isinstance(hint, type) else None
    if node is None:
        raise _Wrong(f"is annotated with {hint!r:.120}, which is neither a tensor nor a value")
    return node, None


def _without_alias(hint: Any) -> Any:
    """Return what an alias stands for; numpy's NDArray is one that is not expanded, from 2.5 on."""
    alias = hint if hasattr(hint, "__value__") else get_origin(hint)
    if not hasattr(alias, "__value__"):
        return hint
    arguments = get_args(hint)
    return alias.__value__[arguments] if arguments else alias.__value__


def _tensor_type(element: Any) -> TypeNode | str:
    if isinstance(element, TypeVar):
        return element.__name__
    if element is Any:
        return types.TENSOR
    if element not in _DTYPES:
        raise _Wrong(f"has the dtype {element!r:.80}, of which no tensor travels")
    return _DTYPES[element]


def _shape(hint: Any) -> tuple[int | None, ...] | None:
    axes = get_args(hint)
    if hint is Any or Ellipsis in axes or get_origin(hint) is not tuple:
        return None
    return tuple(_axes(axes))


def _axes(hints: Sequence[Any]) -> Iterator[int | None]:
    for hint in hints:
        literal = get_args(hint) if get_origin(hint) is Literal else ()
        if len(literal) == 1 and type(literal[0]) is int:
            yield literal[0]
        elif hint is int or hint is Any:
            yield None
        else:
            raise _Wrong(f"has the axis {hint!r:.80}; expected int or Literal[number]")


def _attribute(parameter: inspect.Parameter, hint: Any) -> AttributeSchema:
    is_list = get_origin(hint) is tuple and get_args(hint)[1:] == (Ellipsis,)
    scalar = get_args(hint)[0] if is_list else hint
    if scalar not in _SCALAR_KINDS:
        raise _Wrong("is an attribute: int, bool, float, str, or tuple[one of these, ...]")
    default = REQUIRED if parameter.default is parameter.empty else parameter.default
    made = AttributeSchema(default=default, scalar=scalar, is_list=is_list)
    if default is not REQUIRED:
        try:
            made = AttributeSchema(default=made.read(default), scalar=scalar, is_list=is_list)
        except (ValueError, OverflowError) as error:
            raise _Wrong(f"has the default {default!r:.80}, which has to be {error}") from error
    return made
