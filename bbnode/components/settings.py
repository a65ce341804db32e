"""Settings of components: those that name something of this machine, and those of an artifact.

Rule: an artifact may come from anybody. A setting that names a file, a URL, a command or a module
is taken only from the node's own configuration; `path_setting` and `local_setting` mark such
fields. A field with `Path` in its type is a path setting without a mark. Of a `content_setting`, a
path is taken from there alone, and bytes from an artifact, too.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from pathlib import PurePath
from typing import Any, Final, get_args, get_type_hints

from bbnode.ir.caps import MAX_MESSAGE_DEPTH, MAX_SETTINGS_VALUES
from bbnode.ir.decoding import shown, unpack
from bbnode.ir.errors import DecodeError, DeploymentError

# Key in a field's metadata, and its values.
_NAMES: Final = "bbnode.names"
_PATH: Final = "path"
_OTHER: Final = "other"
_CONTENT: Final = "content"
_READ: Final = "bbnode.read"
_UNSTORED: Final = "bbnode.unstored"

# Values of a setting that are searched for paths; a larger setting counts as one.
_MAX_LOOKED_AT: Final = 10_000


# A separator, a drive, a home directory, the directory above, a scheme, a suffix at the end.
_LIKE_A_PATH: Final = re.compile(
    r"[/\\]|^[A-Za-z]:|^~|^\.\.?$|^[A-Za-z][A-Za-z0-9+.-]*:|[^\s.]\.[A-Za-z][A-Za-z0-9]{0,7}$"
)


class UnreadableSettings(DeploymentError):
    """The settings that an artifact stores for a slot can't be read."""


class LocalSettingRefused(DeploymentError):
    """An artifact sets what only the node's own configuration may."""


def path_setting(default: Any = dataclasses.MISSING) -> Any:
    """Return a field of a Config that is a path on this machine, or several.

    `path: str = path_setting()` has to be given in `[slots.NAME]` of the node's configuration;
    with a default it may be.
    """
    return dataclasses.field(default=default, metadata={_NAMES: _PATH})


def local_setting(default: Any = dataclasses.MISSING) -> Any:
    """Return a field of a Config that names a URL, a command or a module of this machine."""
    return dataclasses.field(default=default, metadata={_NAMES: _OTHER})


def host_setting(default: Any) -> Any:
    """Return a field of a Config about the machine alone, as a `local_setting`.

    Artifacts don't hold it where it has its default: a program's bytes say nothing of machines.
    """
    return dataclasses.field(default=default, metadata={_NAMES: _OTHER, _UNSTORED: True})


def later_setting(default: Any) -> Any:
    """Return a field of a Config that a later release added, and that artifacts may set.

    They don't hold it where it has its default, so that the bytes of programs stay what they were.
    """
    return dataclasses.field(default=default, metadata={_UNSTORED: True})


def is_stored(field: dataclasses.Field[Any], value: Any) -> bool:
    """Return False for a `host_setting` or `later_setting` that has its default."""
    return not (field.metadata.get(_UNSTORED) and value == field.default)


def content_setting(
    read: Callable[[str | PurePath], bytes], default: Any = dataclasses.MISSING
) -> Any:
    """Return a field of a Config that is bytes, or the path of a file with them.

    `read` returns what an artifact holds in the place of a path: it is called where a program is
    written or compiled, and raises an AuthorError.
    """
    return dataclasses.field(default=default, metadata={_NAMES: _CONTENT, _READ: read})


def as_stored(field: dataclasses.Field[Any], value: Any) -> Any:
    """Return the value of a field as an artifact holds it. Raises what reading a file raises."""
    if field.metadata.get(_NAMES) == _CONTENT and isinstance(value, str | PurePath):
        return field.metadata[_READ](value)
    return value


def local_settings(config: type) -> tuple[str, ...]:
    """Return the names of a Config's fields that count from the node's own configuration alone."""
    typed = _typed_as_paths(config)
    return tuple(
        field.name
        for field in dataclasses.fields(config)
        if field.metadata.get(_NAMES, _PATH if field.name in typed else _CONTENT) != _CONTENT
    )


def path_settings(config: type) -> tuple[str, ...]:
    """Return the names of a Config's fields that are paths, or may be."""
    typed = _typed_as_paths(config)
    return tuple(
        field.name
        for field in dataclasses.fields(config)
        if field.metadata.get(_NAMES) in (_PATH, _CONTENT) or field.name in typed
    )


def _typed_as_paths(config: type) -> frozenset[str]:
    try:
        hints = get_type_hints(config)
    except (NameError, TypeError, AttributeError):
        return frozenset()  # pydantic says what is wrong with them
    found = set()
    for name, hint in hints.items():
        todo = [hint]
        while todo:
            each = todo.pop()
            todo.extend(get_args(each))
            if isinstance(each, type) and issubclass(each, PurePath):
                found.add(name)
    return frozenset(found)


def stored_settings(raw: bytes) -> dict[str, Any]:
    """Return the settings that an artifact stores for a slot. Raises UnreadableSettings."""
    if not raw:
        return {}
    try:
        found = unpack(
            raw,
            max_bytes=len(raw),  # bounded with the artifact; a model may be among them
            max_values=MAX_SETTINGS_VALUES,
            max_depth=MAX_MESSAGE_DEPTH,
        )
    except DecodeError as error:
        why = f"the config stored in the artifact can't be read: {error}"
        raise UnreadableSettings(why) from error
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found):
        raise UnreadableSettings("the config stored in the artifact is not a table of settings")
    return found


def accepted(
    config: type, type_name: str, slot: str, stored: Mapping[str, Any], given: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the settings of an artifact that apply, besides the node's own.

    Raises LocalSettingRefused for a setting that names something of this machine, unless it has its
    default or the node sets it itself.
    """
    taken = dict(stored)
    paths = [name for name in _content_settings(config) if not isinstance(taken.get(name), bytes)]
    for name in (*local_settings(config), *paths):
        if name not in taken:
            continue
        value = taken.pop(name)
        if name in given or _is_default(config, name, value):
            continue
        raise LocalSettingRefused(
            f"slot {shown(slot)}: the artifact sets '{name}' of {type_name} to {shown(value)}, "
            "which names something of this machine; to use it, write "
            f"{name} = … under [slots.{slot}] in the node's configuration "
            f"(--set slots.{slot}.{name}=…)"
        )
    return taken


def _content_settings(config: type) -> list[str]:
    fields = dataclasses.fields(config)
    return [field.name for field in fields if field.metadata.get(_NAMES) == _CONTENT]


def _is_default(config: type, name: str, value: Any) -> bool:
    field = next(f for f in dataclasses.fields(config) if f.name == name)
    if field.default is not dataclasses.MISSING:
        default = field.default
    elif field.default_factory is not dataclasses.MISSING:
        default = field.default_factory()
    else:
        return False
    # Stored settings went through msgpack, which has no tuples.
    if isinstance(default, tuple):
        default = list(default)
    return type(value) is type(default) and bool(value == default)


def names_files(config: type | None, stored: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the stored settings that name a file, or seem to.

    `config` is None for a component that is not installed here.
    """
    said = () if config is None else local_settings(config)
    return tuple(
        name
        for name, value in stored.items()
        if (name in said and value) or _looks_like_path(value)
    )


def _looks_like_path(value: Any) -> bool:
    todo = [value]
    looked_at = 0
    while todo:
        each = todo.pop()
        looked_at += 1
        if looked_at > _MAX_LOOKED_AT:
            return True
        if isinstance(each, str):
            if _LIKE_A_PATH.search(each[:4096]):
                return True
        elif isinstance(each, list):
            todo.extend(each)
        elif isinstance(each, dict):
            todo.extend(each)
            todo.extend(each.values())
    return False
