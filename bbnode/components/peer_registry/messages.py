"""The messages between a registry's server and its clients.

Rule: a message is a msgpack list of its fields in order, of bounded size, without maps and ext
types. Reading checks every field and raises `UnusableMessage`; times are durations in nanoseconds,
since no two clocks agree.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
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
    MAX_REGISTRY_CLASS_CHARS,
)
from bbnode.ir.decoding import Boundary, shown, unpack
from bbnode.ir.errors import PeerError
from bbnode.ir.peer import PeerId

_MAX_MESSAGE_BYTES: Final = MAX_PAGE_BYTES + 4096
_MAX_U64: Final = (1 << 64) - 1
# Of a page: its head, and in each row its four fields and the addresses.
_MAX_VALUES: Final = 16 + MAX_PAGE_ROWS * (5 + MAX_CLAIMED_ADDRESSES)


class UnusableMessage(ComponentError, PeerError):
    """A message to or from a registry cannot be read."""


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
                f"a message of {len(payload)} bytes; a registry's have up to {_MAX_MESSAGE_BYTES}"
            )
        with Boundary("a registry's message can't be read", UnusableMessage):
            plain = unpack(
                payload,
                max_bytes=_MAX_MESSAGE_BYTES,
                max_values=_MAX_VALUES,
                max_depth=MAX_MESSAGE_DEPTH,
            )
            return cls.read(plain)

    def pack(self) -> list[Any]:
        """Return the fields as msgpack takes them."""
        return [each.metadata["pack"](getattr(self, each.name)) for each in fields(self)]  # type: ignore[arg-type]

    @classmethod
    def read(cls, plain: Any) -> Self:
        """Return the record of such a list; raises UnusableMessage."""
        known = fields(cls)  # type: ignore[arg-type]
        if not isinstance(plain, list) or len(plain) != len(known):
            raise UnusableMessage(f"a registry's message lacks a list of {len(known)} fields")
        values = zip(known, plain, strict=True)
        return cls(**{each.name: each.metadata["read"](value) for each, value in values})


def _count(plain: Any) -> int:
    if type(plain) is not int or not 0 <= plain <= _MAX_U64:
        raise UnusableMessage(f"{shown(plain)} in a registry's message is not a count")
    return plain


def _flag(plain: Any) -> bool:
    if not isinstance(plain, bool):
        raise UnusableMessage(f"{shown(plain)} is neither true nor false")
    return plain


def _class(plain: Any) -> str:
    well_formed = isinstance(plain, str) and plain.isprintable()
    if not well_formed or len(plain) > MAX_REGISTRY_CLASS_CHARS:
        raise UnusableMessage(f"a class is a text of up to {MAX_REGISTRY_CLASS_CHARS} characters")
    return str(plain)


def _peer(plain: Any) -> PeerId:
    with Boundary("a row of a registry names no peer", UnusableMessage):
        return PeerId.from_bytes(plain if isinstance(plain, bytes) else b"")


def _addresses(plain: Any) -> tuple[Multiaddr, ...]:
    if not isinstance(plain, list) or len(plain) > MAX_CLAIMED_ADDRESSES:
        raise UnusableMessage(f"addresses are a list of up to {MAX_CLAIMED_ADDRESSES}")
    if not all(isinstance(raw, bytes) and len(raw) <= MAX_ADDRESS_BYTES for raw in plain):
        raise UnusableMessage(f"an address is up to {MAX_ADDRESS_BYTES} bytes")
    with Boundary("a registry's message has an invalid address", UnusableMessage):
        return tuple(address_from_bytes(raw) for raw in plain)


def _pack_addresses(addresses: Sequence[Multiaddr]) -> list[bytes]:
    """Return the first MAX_CLAIMED_ADDRESSES that are not too long, as bytes."""
    raws = [bytes(address.to_bytes()) for address in addresses]
    return [raw for raw in raws if len(raw) <= MAX_ADDRESS_BYTES][:MAX_CLAIMED_ADDRESSES]


def _wire(
    read: Callable[[Any], Any], pack: Callable[[Any], Any] = lambda value: value
) -> Mapping[str, Callable[[Any], Any]]:
    return {"read": read, "pack": pack}


_COUNT: Final = _wire(_count)
_FLAG: Final = _wire(_flag)
_CLASS: Final = _wire(_class)
_ADDRESSES: Final = _wire(_addresses, _pack_addresses)


@dataclass(frozen=True, slots=True, kw_only=True)
class Announcement(WireRecord):
    """The request of a peer to be entered, under a class (empty: any) with its addresses."""

    as_class: str = field(metadata=_CLASS)
    addresses: tuple[Multiaddr, ...] = field(metadata=_ADDRESSES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Handshake(WireRecord):
    """The answer: how long the entry is valid (0: no room), and when to announce again."""

    ttl_ns: int = field(metadata=_COUNT)
    heartbeat_ns: int = field(metadata=_COUNT)
    addresses: tuple[Multiaddr, ...] = field(metadata=_ADDRESSES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cookie(WireRecord):
    """The position of a reader: `version` counts the changes of one life of a server.

    Peers removed up to the version `since` were gone before the reader began, so they are not sent.
    """

    life: int = field(metadata=_COUNT)
    version: int = field(metadata=_COUNT)
    since: int = field(metadata=_COUNT)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadRequest(WireRecord):
    """Asks for what changed since the cookie (n is 0), or for n peers drawn."""

    cookie: Cookie | None = field(
        metadata=_wire(
            lambda plain: None if plain is None else Cookie.read(plain),
            lambda cookie: None if cookie is None else cookie.pack(),
        ),
        default=None,
    )
    n: int = field(metadata=_COUNT, default=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row(WireRecord):
    """One change: a peer with its class, or (`gone`) one that is no longer there."""

    peer: PeerId = field(metadata=_wire(_peer, PeerId.to_bytes))
    as_class: str = field(metadata=_CLASS, default="")
    addresses: tuple[Multiaddr, ...] = field(metadata=_ADDRESSES, default=())
    gone: bool = field(metadata=_FLAG, default=False)

    @property
    def max_bytes(self) -> int:
        """An upper bound of the bytes that it takes in a page."""
        return 128 + len(self.as_class) * 4 + sum(8 + len(a.to_bytes()) for a in self.addresses)


def _rows(plain: Any) -> tuple[Row, ...]:
    if not isinstance(plain, list) or len(plain) > MAX_PAGE_ROWS:
        raise UnusableMessage(f"a page of a registry holds a list of up to {MAX_PAGE_ROWS} rows")
    return tuple(Row.read(row) for row in plain)


@dataclass(frozen=True, slots=True, kw_only=True)
class Page(WireRecord):
    """Changes after a cookie, oldest first. `reset`: forget what was read; `more`: ask again.

    A peer that is not reported as gone counts as present for `ttl_ns`.
    """

    cookie: Cookie = field(metadata=_wire(Cookie.read, Cookie.pack))
    ttl_ns: int = field(metadata=_COUNT)
    reset: bool = field(metadata=_FLAG)
    more: bool = field(metadata=_FLAG)
    rows: tuple[Row, ...] = field(metadata=_wire(_rows, lambda rows: [row.pack() for row in rows]))
