"""Records that components of different peers send each other, and the readers of their fields.

Rule: a record is a msgpack list of its fields in order, of bounded size, without maps and ext
types. Reading checks every field and raises `UnusableMessage`, whatever the bytes are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, fields
from typing import Any, Final, Self

import msgpack
from multiaddr import Multiaddr

from bbnode.components.errors import ComponentError
from bbnode.ir.address import address_from_bytes
from bbnode.ir.caps import (
    MAX_ADDRESS_BYTES,
    MAX_CLAIMED_ADDRESSES,
    MAX_MESSAGE_DEPTH,
    MAX_PAGE_BYTES,
    MAX_PAGE_ROWS,
)
from bbnode.ir.decoding import Boundary, shown, unpack
from bbnode.ir.errors import PeerError
from bbnode.ir.peer import PeerId

_MAX_MESSAGE_BYTES: Final = MAX_PAGE_BYTES + 4096
_MAX_U64: Final = (1 << 64) - 1
# Of a page of a registry, the largest record: its head, and in each row four fields and the
# addresses.
_MAX_VALUES: Final = 16 + MAX_PAGE_ROWS * (5 + MAX_CLAIMED_ADDRESSES)


class UnusableMessage(ComponentError, PeerError):
    """A message of another peer's component cannot be read."""


class WireRecord:
    """Base of what is packed as a list; a field's metadata has its reader and its packer."""

    __slots__ = ()

    def encode(self) -> bytes:
        """Return the bytes of the message."""
        return bytes(msgpack.packb(self.pack()))

    @classmethod
    def decode(cls, payload: bytes) -> Self:
        """Return the message in these bytes; raises UnusableMessage."""
        if len(payload) > _MAX_MESSAGE_BYTES:
            raise UnusableMessage(
                f"{cls.__name__}: a message of {len(payload)} bytes; up to {_MAX_MESSAGE_BYTES} "
                "are read"
            )
        with Boundary(f"{cls.__name__}: the message can't be read", UnusableMessage):
            plain = unpack(
                payload,
                max_bytes=_MAX_MESSAGE_BYTES,
                max_values=_MAX_VALUES,
                max_depth=MAX_MESSAGE_DEPTH,
            )
            return cls.read(plain)

    def pack(self) -> list[Any]:
        """Return the fields as msgpack takes them."""
        return [each.metadata["pack"](getattr(self, each.name)) for each in _fields(type(self))]

    @classmethod
    def read(cls, plain: Any) -> Self:
        """Return the record of such a list; raises UnusableMessage."""
        known = _fields(cls)
        if not isinstance(plain, list) or len(plain) != len(known):
            raise UnusableMessage(f"{cls.__name__} is a list of {len(known)} fields")
        values = zip(known, plain, strict=True)
        return cls(**{each.name: each.metadata["read"](value) for each, value in values})


_FIELDS: Final[dict[type[WireRecord], tuple[Field[Any], ...]]] = {}  # of each class, once


def _fields(cls: type[WireRecord]) -> tuple[Field[Any], ...]:
    if cls not in _FIELDS:
        _FIELDS[cls] = fields(cls)  # type: ignore[arg-type]
    return _FIELDS[cls]


def wire(
    read: Callable[[Any], Any], pack: Callable[[Any], Any] = lambda value: value
) -> Mapping[str, Callable[[Any], Any]]:
    """Return the metadata of a field that `read` checks and makes, and `pack` makes plain."""
    return {"read": read, "pack": pack}


def records(of: type[WireRecord], at_most: int) -> Mapping[str, Callable[[Any], Any]]:
    """Return the metadata of a field that is a tuple of records."""

    def read(plain: Any) -> tuple[WireRecord, ...]:
        if not isinstance(plain, list) or len(plain) > at_most:
            raise UnusableMessage(f"a list of up to {at_most} {of.__name__} is missing")
        return tuple(of.read(row) for row in plain)

    return wire(read, lambda rows: [row.pack() for row in rows])


def text(what: str, max_chars: int) -> Mapping[str, Callable[[Any], Any]]:
    """Return the metadata of a field that is a printable text."""

    def read(plain: Any) -> str:
        well_formed = isinstance(plain, str) and plain.isprintable()
        if not well_formed or len(plain) > max_chars:
            raise UnusableMessage(f"{what} is a text of up to {max_chars} characters")
        return str(plain)

    return wire(read)


def count(at_most: int = _MAX_U64) -> Mapping[str, Callable[[Any], Any]]:
    """Return the metadata of a field that is an integer of 0 to `at_most`."""

    def read(plain: Any) -> int:
        if type(plain) is not int or not 0 <= plain <= at_most:
            raise UnusableMessage(f"{shown(plain)} in a message is no count of up to {at_most}")
        return plain

    return wire(read)


def _flag(plain: Any) -> bool:
    if not isinstance(plain, bool):
        raise UnusableMessage(f"{shown(plain)} is neither true nor false")
    return plain


def _peer(plain: Any) -> PeerId:
    with Boundary("a record names no peer", UnusableMessage):
        return PeerId.from_bytes(plain if isinstance(plain, bytes) else b"")


def addresses(at_most: int) -> Mapping[str, Callable[[Any], Any]]:
    """Return the metadata of a field that is a tuple of multiaddrs, of which so many are packed.

    Those that are too long are left out.
    """

    def read(plain: Any) -> tuple[Multiaddr, ...]:
        if not isinstance(plain, list) or len(plain) > at_most:
            raise UnusableMessage(f"addresses are a list of up to {at_most}")
        if not all(isinstance(raw, bytes) and len(raw) <= MAX_ADDRESS_BYTES for raw in plain):
            raise UnusableMessage(f"an address is up to {MAX_ADDRESS_BYTES} bytes")
        with Boundary("a message has an invalid address", UnusableMessage):
            return tuple(address_from_bytes(raw) for raw in plain)

    def pack(found: Sequence[Multiaddr]) -> list[bytes]:
        raws = [bytes(address.to_bytes()) for address in found]
        return [raw for raw in raws if len(raw) <= MAX_ADDRESS_BYTES][:at_most]

    return wire(read, pack)


COUNT: Final = count()
FLAG: Final = wire(_flag)
PEER: Final = wire(_peer, PeerId.to_bytes)
ADDRESSES: Final = addresses(MAX_CLAIMED_ADDRESSES)
