"""Signed documents: their encoding as bytes and as a line of text, and readers of their fields.

Rule: bytes are msgpack `[body, signature]`, the body is a msgpack list whose first item is its
version. Each value has exactly one encoding: what was decoded is packed again and has to give the
same bytes, so a change of any byte is refused. Text is
`<prefix>:<base64url without padding>`, with the same rule.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import msgpack

from bbnode.access.errors import AccessRefused, GrantError, Refusal
from bbnode.access.keys import SIGNATURE_BYTES, SigningKey, verifies
from bbnode.ir.caps import MAX_CLASSES, MAX_MESSAGE_DEPTH, MAX_NAME_BYTES
from bbnode.ir.decoding import Boundary, clip, unpack
from bbnode.ir.errors import DecodeError
from bbnode.ir.peer import PeerId

# The last second of the year 9999: beyond it no date can be shown.
MAX_UNIX_S = 253_402_300_799
_CLASS = re.compile(r"[A-Za-z_@][A-Za-z0-9_.@-]*\Z")


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One kind of signed document: its name in messages, signature context, bounds, and fields.

    `fields` has a reader for each field, by the name of the attribute that it becomes.
    """

    name: str
    context: bytes = b""
    prefix: str = ""
    version: int = 1
    fields: Mapping[str, Reader] = field(default_factory=dict)
    max_bytes: int
    error: type[AccessRefused]

    def refuse(self, reason: Refusal, message: str) -> AccessRefused:
        """Return the error of this kind."""
        return self.error(reason, f"{self.name}: {message}")

    def read(self, values: Sequence[Any], fields: Mapping[str, Reader]) -> dict[str, Any]:
        """Return checked values by name; raises the kind's error."""
        return {
            name: reader(self, name.replace("_", " "), value)
            for (name, reader), value in zip(fields.items(), values, strict=True)
        }


# A kind, the name of a field for messages, and its value: returns it checked or raises.
Reader: TypeAlias = Callable[[Kind, str, Any], Any]


def seal(kind: Kind, values: Sequence[Any], key: SigningKey) -> bytes:
    """Sign `values` (without the version) with `key`; raises GrantError beyond the bound."""
    body: bytes = msgpack.packb([kind.version, *values])
    raw: bytes = msgpack.packb([body, key.sign(kind.context, body)])
    if len(raw) > kind.max_bytes:
        raise GrantError(
            f"{kind.name}: {len(raw)} bytes are over the bound of {kind.max_bytes}; "
            "put less into it"
        )
    return raw


@dataclass(frozen=True, slots=True)
class Sealed:
    """Decoded bytes whose signature is not checked yet."""

    kind: Kind
    values: Sequence[Any]
    body: bytes
    signature: bytes

    def read(self) -> dict[str, Any]:
        """Return all fields, checked, by name; raises the kind's error."""
        return self.kind.read(self.values, self.kind.fields)

    def peer(self, index: int) -> PeerId:
        """Return one field as a PeerId, before the signature is checked."""
        return take_peer(self.kind, "a peer", self.values[index])

    def check_signature(self, signer: PeerId) -> None:
        """Raise the kind's error with BAD_SIGNATURE unless `signer` signed the body."""
        if not verifies(signer, self.kind.context, self.body, self.signature):
            raise self.kind.refuse(
                Refusal.BAD_SIGNATURE,
                f"the signature is not one of {signer}; ask its maker for a new one",
            )


def unseal(kind: Kind, raw: bytes) -> Sealed:
    """Decode bytes strictly; raises the kind's error.

    Checks the number of fields, not yet their types.
    """
    if len(raw) > kind.max_bytes:
        raise kind.refuse(
            Refusal.TOO_LARGE, f"{len(raw)} bytes; at most {kind.max_bytes} are taken"
        )
    outer = unpack_list(kind, raw)
    if len(outer) != 2 or not all(isinstance(part, bytes) for part in outer):
        raise malformed(kind, "it is not a body and a signature")
    body, signature = outer
    fields = unpack_list(kind, body)
    version = fields[0] if fields else None
    if type(version) is not int:
        raise malformed(kind, "it has no version")
    if version != kind.version:
        raise kind.refuse(
            Refusal.UNKNOWN_VERSION,
            f"version {version} is not known here (we know {kind.version}); "
            "run the same release on both sides",
        )
    if len(fields) != len(kind.fields) + 1 or len(signature) != SIGNATURE_BYTES:
        raise malformed(kind, "it does not have the fields of its version")
    return Sealed(kind, fields[1:], body, signature)


def to_text(kind: Kind, raw: bytes) -> str:
    """Return the line of text for `raw`."""
    return f"{kind.prefix}:{base64.urlsafe_b64encode(raw).decode('ascii').rstrip('=')}"


def from_text(kind: Kind, text: str) -> bytes:
    """Return the bytes that a line of text stands for; raises the kind's error."""
    with boundary(kind):
        return _from_text(kind, text.strip())


def _from_text(kind: Kind, line: str) -> bytes:
    prefix, colon, data = line.partition(":")
    if not colon or prefix != kind.prefix:
        stem = kind.prefix.rstrip("0123456789")
        if colon and prefix.rstrip("0123456789") == stem:
            raise kind.refuse(
                Refusal.UNKNOWN_VERSION,
                f"'{clip(prefix)}' is of another version (we know '{kind.prefix}'); "
                "run the same release on both sides",
            )
        raise malformed(kind, f"it does not begin with '{kind.prefix}:'")
    # 4 characters for 3 bytes.
    if len(data) > kind.max_bytes * 4 // 3 + 4:
        raise kind.refuse(Refusal.TOO_LARGE, f"a line of {len(line)} characters is too long")
    try:
        raw = base64.b64decode(data + "=" * (-len(data) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError) as error:
        raise malformed(kind, "it holds characters that do not belong there") from error
    if to_text(kind, raw) != line:
        raise malformed(kind, "it is cut short or changed")
    return raw


def malformed(kind: Kind, what: str) -> AccessRefused:
    """Return the error for bytes or text that are not of this kind."""
    return kind.refuse(
        Refusal.MALFORMED, f"{what}; copy all of it, from its first to its last character"
    )


# --- readers of fields ------------------------------------------------------------------------


def integer(maximum: int, minimum: int = 0) -> Reader:
    """Return a reader of whole numbers from `minimum` to `maximum`."""

    def read(kind: Kind, name: str, value: Any) -> int:
        if type(value) is not int or not minimum <= value <= maximum:
            raise malformed(kind, f"{name} is not a whole number from {minimum} to {maximum}")
        return value

    return read


def octets(maximum: int, minimum: int = 0) -> Reader:
    """Return a reader that accepts `minimum` to `maximum` bytes."""

    def read(kind: Kind, name: str, value: Any) -> bytes:
        if not isinstance(value, bytes) or not minimum <= len(value) <= maximum:
            raise malformed(kind, f"{name} is not bytes of the right length")
        return value

    return read


def text(maximum: int, minimum: int = 0) -> Reader:
    """Return a reader of printable text of `minimum` to `maximum` bytes."""

    def read(kind: Kind, name: str, value: Any) -> str:
        good = isinstance(value, str) and value.isprintable()
        if not good or not minimum <= len(value.encode("utf-8", "replace")) <= maximum:
            raise malformed(kind, f"{name} is not a printable text of at most {maximum} bytes")
        return str(value)

    return read


def listed(reader: Reader, maximum: int, minimum: int = 0) -> Reader:
    """Return a reader of tuples of `minimum` to `maximum` items; `reader` reads each item."""

    def read(kind: Kind, name: str, value: Any) -> tuple[Any, ...]:
        if not isinstance(value, list) or not minimum <= len(value) <= maximum:
            raise malformed(kind, f"{name} is not a list of {minimum} to {maximum}")
        return tuple(reader(kind, f"one of {name}", item) for item in value)

    return read


def optional(reader: Reader) -> Reader:
    """Return a reader of a field that may be None."""
    return lambda kind, name, value: None if value is None else reader(kind, name, value)


def flag(kind: Kind, name: str, value: Any) -> bool:
    """Read true or false."""
    if not isinstance(value, bool):
        raise malformed(kind, f"{name} is not true or false")
    return value


def take_peer(kind: Kind, name: str, value: Any) -> PeerId:
    """Read a PeerId."""
    raw = octets(66)(kind, name, value)
    try:
        return PeerId.from_bytes(raw)
    except DecodeError as error:
        raise malformed(kind, f"{name} is not a PeerId") from error


def take_classes(kind: Kind, name: str, value: Any) -> tuple[str, ...] | None:
    """Read sorted, distinct names of classes; None is all of them."""
    if value is None:
        return None
    names = listed(text(MAX_NAME_BYTES), MAX_CLASSES, 1)(kind, name, value)
    if not all(map(is_class, names)) or list(names) != sorted(set(names)):
        raise malformed(kind, f"{name} are not sorted names of classes")
    return tuple(names)


def classes_to_sign(classes: Iterable[str] | None) -> tuple[str, ...] | None:
    """Return sorted classes for a document to be signed, None for all; raises GrantError."""
    if classes is None:
        return None
    names = tuple(sorted(set(classes)))
    bad = [name for name in names if not is_class(name)]
    if bad:
        raise GrantError(f"'{clip(bad[0])}' is not the name of a class of peers, like 'client'")
    if not 0 < len(names) <= MAX_CLASSES:
        raise GrantError(
            f"{len(names)} classes: name 1 to {MAX_CLASSES}, or leave them out for all"
        )
    return names


def is_class(name: str) -> bool:
    """Return True if a text can be the name of a class of peers."""
    return len(name) <= MAX_NAME_BYTES and _CLASS.match(name) is not None


def unpack_list(kind: Kind, raw: bytes) -> list[Any]:
    """Return the list of which these bytes are the one encoding; raises the kind's error."""
    with boundary(kind):
        value = unpack(raw, max_bytes=len(raw), max_values=len(raw), max_depth=MAX_MESSAGE_DEPTH)
        if not isinstance(value, list):
            raise malformed(kind, "it is not a list of fields")
        # Each value has one encoding: a longer one is refused.
        if msgpack.packb(value) != raw:
            raise malformed(kind, "it is not in its one form")
        return value


def boundary(kind: Kind) -> Boundary:
    """Return a boundary for decoders of a kind: an error within becomes the kind's error."""
    return Boundary("it does not decode", lambda what: malformed(kind, what), AccessRefused)
