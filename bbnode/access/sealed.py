"""The one shape of everything that is signed here: bytes, and a line of text.

Rule: bytes are msgpack `[body, signature]`, the body is a msgpack list whose first item is its
version. There is exactly one encoding of each value: what decodes is packed again and has to
give the same bytes, so no byte can change without being refused. Text is
`<prefix>:<base64url without padding>`, with the same rule.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgpack

from bbnode.access.errors import AccessRefused, GrantError, Refusal
from bbnode.access.keys import SIGNATURE_BYTES, SigningKey, verifies
from bbnode.ir.caps import MAX_CLASSES, MAX_MESSAGE_DEPTH, MAX_NAME_BYTES
from bbnode.ir.decoding import Boundary, clip, unpack
from bbnode.ir.errors import DecodeError
from bbnode.ir.peer import PeerId

Fields: TypeAlias = list[Any]

# The last second of the year 9999: beyond it no date can be shown.
MAX_UNIX_S = 253_402_300_799
_CLASS = re.compile(r"[A-Za-z_@][A-Za-z0-9_.@-]*\Z")


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One kind of signed thing: its name in messages, signature context, and bounds."""

    name: str
    context: bytes
    prefix: str
    version: int
    fields: int
    max_bytes: int
    error: type[AccessRefused]

    def refuse(self, reason: Refusal, message: str) -> AccessRefused:
        """Return the error of this kind."""
        return self.error(reason, f"{self.name}: {message}")


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
    fields: Fields
    body: bytes
    signature: bytes

    def check_signature(self, signer: PeerId) -> None:
        """Raise the kind's error with BAD_SIGNATURE unless `signer` signed the body."""
        if not verifies(signer, self.kind.context, self.body, self.signature):
            raise self.kind.refuse(
                Refusal.BAD_SIGNATURE,
                f"the signature is not one of {signer}; ask its maker for a new one",
            )


def unseal(kind: Kind, raw: bytes) -> Sealed:
    """Decode bytes strictly; raises the kind's error.

    The fields are counted, not yet typed.
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
    if len(fields) != kind.fields + 1 or len(signature) != SIGNATURE_BYTES:
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


def take_int(kind: Kind, name: str, value: object, maximum: int, minimum: int = 0) -> int:
    """Return a whole number in its range; raises the kind's error."""
    if type(value) is not int or not minimum <= value <= maximum:
        raise malformed(kind, f"{name} is not a whole number from {minimum} to {maximum}")
    return value


def take_bytes(kind: Kind, name: str, value: object, maximum: int, minimum: int = 0) -> bytes:
    """Return bytes of a length in its range; raises the kind's error."""
    if not isinstance(value, bytes) or not minimum <= len(value) <= maximum:
        raise malformed(kind, f"{name} is not bytes of the right length")
    return value


def take_text(kind: Kind, name: str, value: object, maximum: int) -> str:
    """Return printable text of up to `maximum` bytes; raises the kind's error."""
    if (
        not isinstance(value, str)
        or len(value.encode("utf-8", "replace")) > maximum
        or not value.isprintable()
    ):
        raise malformed(kind, f"{name} is not a printable text of at most {maximum} bytes")
    return value


def take_peer(kind: Kind, name: str, value: object) -> PeerId:
    """Return a PeerId; raises the kind's error."""
    raw = take_bytes(kind, name, value, 66)
    try:
        return PeerId.from_bytes(raw)
    except DecodeError as error:
        raise malformed(kind, f"{name} is not a PeerId") from error


def take_list(kind: Kind, name: str, value: object, maximum: int) -> list[Any]:
    """Return a list of up to `maximum` items; raises the kind's error."""
    if not isinstance(value, list) or len(value) > maximum:
        raise malformed(kind, f"{name} is not a list of at most {maximum}")
    return value


def take_classes(kind: Kind, value: object) -> tuple[str, ...] | None:
    """Return sorted, distinct names of classes, None for all of them; raises the kind's error."""
    if value is None:
        return None
    names = take_list(kind, "the classes", value, MAX_CLASSES)
    if not names or not all(isinstance(n, str) and is_class(n) for n in names):
        raise malformed(kind, "the classes are not names of classes")
    if names != sorted(set(names)):
        raise malformed(kind, "the classes are not sorted")
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
        raise GrantError(f"{len(names)} classes: name 1 to {MAX_CLASSES}, or none for all of them")
    return names


def is_class(name: str) -> bool:
    """Return True if a text can be the name of a class of peers."""
    return len(name) <= MAX_NAME_BYTES and _CLASS.match(name) is not None


def unpack_list(kind: Kind, raw: bytes) -> list[Any]:
    """Return the list that these bytes are the one encoding of; raises the kind's error."""
    with boundary(kind):
        return _unpacked(kind, raw)


def boundary(kind: Kind) -> Boundary:
    """Return a boundary for decoders of a kind: an error within becomes the kind's error."""
    return Boundary("it does not decode", lambda what: malformed(kind, what), AccessRefused)


def _unpacked(kind: Kind, raw: bytes) -> list[Any]:
    value = unpack(raw, max_bytes=len(raw), max_values=len(raw), max_depth=MAX_MESSAGE_DEPTH)
    if not isinstance(value, list):
        raise malformed(kind, "it is not a list of fields")
    # One value, one encoding: anything longer than need be is refused.
    if msgpack.packb(value) != raw:
        raise malformed(kind, "it is not in its one form")
    return value
