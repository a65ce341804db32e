"""Component classes by TYPE_NAME.

Rule: a class registers under its TYPE_NAME when its module is imported; the modules of shipped
and of installed components are found through the entry-point group `bbnode.components` (entry
name = TYPE_NAME), and imported only when the type is asked for. A peer on the network can name
a type, never send code.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from functools import cache
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import msgpack
from pydantic import TypeAdapter, ValidationError

from bbnode.components import settings
from bbnode.components.contracts import CONTRACTS, Component
from bbnode.components.errors import InvalidComponentConfig
from bbnode.ir import plugins
from bbnode.ir.decoding import shown
from bbnode.ir.errors import AuthorError, DeploymentError
from bbnode.ir.slots import ConcreteSpec

ENTRY_POINT_GROUP = "bbnode.components"

_REGISTERED: dict[str, type[Component]] = {}


C = TypeVar("C", bound=type[Component])


class UnknownComponentType(DeploymentError):
    """An artifact names a component type that is not installed here."""


class ConfigTypeMismatch(DeploymentError):
    """A slot's config does not fit the component's Config."""


def register_component(cls: C) -> C:
    """Register a component class under its TYPE_NAME (class decorator)."""
    name = cls.__dict__.get("TYPE_NAME")
    if not isinstance(name, str) or not name or "|" in name:
        raise AuthorError(f"{cls.__qualname__} needs its own TYPE_NAME, without '|'")
    if not dataclasses.is_dataclass(cls.Config):
        raise AuthorError(f"{name}.Config has to be a dataclass")
    roles_of(cls)
    known = _REGISTERED.setdefault(name, cls)
    if known is not cls:
        raise AuthorError(
            f"component type {name!r} is registered by {known.__module__}.{known.__qualname__}"
        )
    return cls


def roles_of(cls: type[Component]) -> tuple[str, ...]:
    """Return the roles whose contracts a class implements; raises AuthorError without any."""
    roles = tuple(role for role, contract in CONTRACTS.items() if issubclass(cls, contract))
    if not roles:
        raise AuthorError(f"{cls.__qualname__} implements no contract of {', '.join(CONTRACTS)}")
    return roles


def component_class(type_name: str) -> type[Component]:
    """Return the class registered as `type_name`, importing its module if a package brings it.

    Raises UnknownComponentType, with the nearest known name.
    """
    cls = _REGISTERED.get(type_name)
    if cls is not None:
        return cls
    brought_by = plugins.names(ENTRY_POINT_GROUP).get(type_name)
    if brought_by is not None:
        before = set(_REGISTERED)
        try:
            plugins.load(ENTRY_POINT_GROUP, type_name)
        except plugins.BrokenPlugin as error:
            # A module that fails half way has registered what stands above the fault.
            for half in _REGISTERED.keys() - before:
                del _REGISTERED[half]
            raise UnknownComponentType(f"component type {type_name!r}: {error}") from error
        cls = _REGISTERED.get(type_name)
    if cls is None and brought_by is not None:
        raise UnknownComponentType(
            f"component type {type_name!r}: the package {brought_by} has an entry point of this "
            "name, but its module registers no such class; decorate it with @register_component"
        )
    if cls is None:
        near = difflib.get_close_matches(type_name, known_types(), n=1)
        hint = f"did you mean {near[0]!r}? Otherwise install" if near else "install"
        raise UnknownComponentType(
            f"component type {type_name!r} is not installed here; {hint} the package that provides "
            "it, or name its module under `components` in the config"
        )
    return cls


def known_types() -> tuple[str, ...]:
    """Return all type names that `component_class` can find, sorted."""
    return tuple(sorted({*_REGISTERED, *plugins.names(ENTRY_POINT_GROUP)}))


def concrete(cls: type[Component], config: Any = None, **some: Any) -> ConcreteSpec:
    """Return a component type with its config, as the `concrete` of a DSL slot.

    Either a whole Config, or some of its fields by name: each node gives the others, and may give
    these too.
    """
    if some:
        fields = {f.name: f for f in dataclasses.fields(cls.Config)}
        unknown = [name for name in some if name not in fields]
        if config is not None or unknown:
            what = f"no setting {unknown[0]!r}" if unknown else "a Config already"
            raise AuthorError(f"{cls.TYPE_NAME} has {what}; it has: {', '.join(fields)}")
        given = {name: settings.as_stored(fields[name], value) for name, value in some.items()}
        stored = bytes(msgpack.packb(given))
        return ConcreteSpec(role=roles_of(cls)[0], type_name=cls.TYPE_NAME, config=stored)
    config = cls.Config() if config is None else config
    if not isinstance(config, cls.Config):
        raise AuthorError(
            f"{cls.TYPE_NAME} takes a {cls.Config.__qualname__}, got {type(config).__name__}"
        )
    return ConcreteSpec(
        role=roles_of(cls)[0], type_name=cls.TYPE_NAME, config=encode_config(config)
    )


def encode_config(config: Any) -> bytes:
    """Return a Config dataclass as a msgpack map of its fields, in field order.

    In the place of a path of a `content_setting` is what is read there.
    """
    fields = {
        f.name: settings.as_stored(f, getattr(config, f.name))
        for f in dataclasses.fields(config)
        if settings.is_stored(f, getattr(config, f.name))
    }
    return bytes(msgpack.packb(fields, default=_nested))


def _nested(value: Any) -> Any:
    """Return a setting that is a dataclass as the table that the artifact holds."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    raise TypeError(f"a setting can't be a {type(value).__name__}")


def build_config(
    cls: type[Component],
    slot: str,
    stored: bytes,
    overrides: Mapping[str, Any],
    *,
    own_artifact: bool = False,
) -> Any:
    """Return the Config of `cls`: its defaults, the artifact's settings, this node's overrides.

    Settings that name something of this machine are taken only from the overrides, unless the
    artifact is the user's own (`own_artifact`).

    Raises ConfigTypeMismatch naming slot, key and what was expected, and LocalSettingRefused.
    """
    try:
        merged = settings.stored_settings(stored)
    except settings.UnreadableSettings as error:
        raise ConfigTypeMismatch(f"slot {slot!r}: {error}") from error
    if not own_artifact:
        merged = settings.accepted(cls.Config, cls.TYPE_NAME, slot, merged, overrides)
    merged.update(overrides)
    names = [f.name for f in dataclasses.fields(cls.Config)]
    for key in merged:
        if key not in names:
            near = difflib.get_close_matches(key, names, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; it has: {', '.join(names)}"
            raise ConfigTypeMismatch(f"slot {slot!r}: {cls.TYPE_NAME} has no setting {key!r}{hint}")
    try:
        return _adapter(cls.Config).validate_python(merged)
    except ValidationError as error:
        faults = error.errors()
        absent = [str(each["loc"][0]) for each in faults if each["type"] == "missing"]
        if absent:
            needed = " and ".join(map(repr, absent))
            lines = ", ".join(f"{name} = …" for name in absent)
            raise ConfigTypeMismatch(
                f"slot {slot!r}: {cls.TYPE_NAME} needs {needed}; write {lines} under "
                f"[slots.{slot}] in node.toml, or give --set slots.{slot}.{absent[0]}=…"
            ) from error
        where = ".".join(str(part) for part in faults[0]["loc"])
        raise ConfigTypeMismatch(
            f"slot {slot!r}: setting {where!r} of {cls.TYPE_NAME}: {faults[0]['msg']}, it is "
            f"{shown(faults[0]['input'])}; correct {where} under [slots.{slot}] in node.toml, or "
            f"--set slots.{slot}.{where}=…"
        ) from error


def checked_config(cls: type[Component], config: Any) -> Any:
    """Return the settings that somebody made in Python, as their annotations want them.

    Raises InvalidComponentConfig, which names the setting.
    """
    if not isinstance(config, cls.Config):
        raise InvalidComponentConfig(
            f"{cls.TYPE_NAME} takes a {cls.Config.__qualname__}, got {type(config).__name__}"
        )
    made: Any = type(config)  # it may have more settings than `cls.Config`
    given = {field.name: getattr(config, field.name) for field in dataclasses.fields(made)}
    hints = get_type_hints(made)
    if all(_fits(value, hints[name]) for name, value in given.items()):
        return config
    try:
        return _adapter(made).validate_python(given)
    except ValidationError as error:
        fault = error.errors()[0]
        where = ".".join(str(part) for part in fault["loc"])
        raise InvalidComponentConfig(
            f"{cls.TYPE_NAME}: setting {where!r}: {fault['msg']}, it is {shown(fault['input'])}"
        ) from error


def _fits(value: Any, hint: Any) -> bool:
    """Return True for a value that needs no conversion; pydantic takes 0.1 s to get ready."""
    origin, among = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return any(_fits(value, each) for each in among)
    if origin is Literal:
        return any(value == each and type(value) is type(each) for each in among)
    if origin is tuple and isinstance(value, tuple):
        if among[-1] is Ellipsis:
            among = among[:1] * len(value)
        return len(among) == len(value) and all(map(_fits, value, among))
    if origin is not None or not isinstance(hint, type):
        return False
    return isinstance(value, hint) and not (isinstance(value, bool) and hint is not bool)


@cache
def _adapter(config: type) -> TypeAdapter[Any]:
    return TypeAdapter(config)
