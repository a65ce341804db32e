"""What the registry's server and its clients say to each other, and how it is written.

Rule: msgpack lists of bounded size, without maps and ext types. Whoever reads checks everything
and raises `UnusableMessage`; times are durations in nanoseconds, since no two clocks agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

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
    """A peer said to a registry, or a registry to a peer, what is no message of theirs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Announcement:
    """A peer enters itself: under a class (empty: any), reachable at its addresses."""

    as_class: str
    addresses: tuple[Multiaddr, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Handshake:
    """The answer: for how long it stands (0: there was no room), and when to come again."""

    ttl_ns: int
    heartbeat_ns: int
    addresses: tuple[Multiaddr, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cookie:
    """How far a reader has read: `version` counts the changes of one life of a server.

    Who went up to the version `since` was gone before the reader began, and is no news.
    """

    life: int
    version: int
    since: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One change: a peer with its class, or (`gone`) one that is no longer there."""

    peer: PeerId
    as_class: str = ""
    addresses: tuple[Multiaddr, ...] = ()
    gone: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """Changes after a cookie, oldest first. `reset`: forget what was read; `more`: ask again.

    What is not told to be gone may be believed for `ttl_ns`.
    """

    cookie: Cookie
    ttl_ns: int
    reset: bool
    more: bool
    rows: tuple[Row, ...]


def encode_announcement(message: Announcement) -> bytes:
    """[class, addresses]; of more than MAX_CLAIMED_ADDRESSES the first."""
    return _pack([message.as_class, pack_addresses(message.addresses)])


def decode_announcement(payload: bytes) -> Announcement:
    """Raises UnusableMessage."""
    as_class, addresses = _unpack(payload, 2)
    return Announcement(as_class=_class(as_class), addresses=read_addresses(addresses))


def encode_handshake(message: Handshake) -> bytes:
    """[ttl, heartbeat, addresses]."""
    return _pack([message.ttl_ns, message.heartbeat_ns, pack_addresses(message.addresses)])


def decode_handshake(payload: bytes) -> Handshake:
    """Raises UnusableMessage."""
    ttl_ns, heartbeat_ns, addresses = _unpack(payload, 3)
    return Handshake(
        ttl_ns=_number(ttl_ns),
        heartbeat_ns=_number(heartbeat_ns),
        addresses=read_addresses(addresses),
    )


def encode_read(cookie: Cookie | None, n: int) -> bytes:
    """[cookie or nil, n]: what changed since the cookie (n is 0), or n peers drawn."""
    return _pack([None if cookie is None else _plain(cookie), n])


def decode_read(payload: bytes) -> tuple[Cookie | None, int]:
    """Raises UnusableMessage."""
    cookie, n = _unpack(payload, 2)
    return None if cookie is None else _cookie(cookie), _number(n)


def encode_page(page: Page) -> bytes:
    """[[life, version, since], ttl, reset, more, rows]; a row is [peer, class, addresses, gone]."""
    rows = [pack_row(row) for row in page.rows]
    return _pack([_plain(page.cookie), page.ttl_ns, page.reset, page.more, rows])


def decode_page(payload: bytes) -> Page:
    """Raises UnusableMessage."""
    cookie, ttl_ns, reset, more, rows = _unpack(payload, 5)
    if not isinstance(rows, list) or len(rows) > MAX_PAGE_ROWS:
        raise UnusableMessage(f"a page of a registry holds a list of up to {MAX_PAGE_ROWS} rows")
    return Page(
        cookie=_cookie(cookie),
        ttl_ns=_number(ttl_ns),
        reset=_flag(reset),
        more=_flag(more),
        rows=tuple(read_row(row) for row in rows),
    )


def pack_row(row: Row) -> list[Any]:
    """A row as a page and a saved state hold it."""
    return [row.peer.to_bytes(), row.as_class, pack_addresses(row.addresses), row.gone]


def read_row(plain: Any) -> Row:
    """Raises UnusableMessage."""
    peer, as_class, addresses, gone = _list(plain, 4)
    with Boundary("a row of a registry names no peer", UnusableMessage):
        found = PeerId.from_bytes(peer if isinstance(peer, bytes) else b"")
    return Row(
        peer=found,
        as_class=_class(as_class),
        addresses=read_addresses(addresses),
        gone=_flag(gone),
    )


def row_bytes(row: Row) -> int:
    """About what a row takes in a page, never less."""
    return 128 + len(row.as_class) * 4 + sum(8 + len(a.to_bytes()) for a in row.addresses)


def pack_addresses(addresses: Sequence[Multiaddr]) -> list[bytes]:
    """The first MAX_CLAIMED_ADDRESSES that are not too long, as bytes."""
    raws = [bytes(address.to_bytes()) for address in addresses]
    return [raw for raw in raws if len(raw) <= MAX_ADDRESS_BYTES][:MAX_CLAIMED_ADDRESSES]


def read_addresses(plain: Any) -> tuple[Multiaddr, ...]:
    """Raises UnusableMessage."""
    if not isinstance(plain, list) or len(plain) > MAX_CLAIMED_ADDRESSES:
        raise UnusableMessage(f"addresses are a list of up to {MAX_CLAIMED_ADDRESSES}")
    found = []
    for raw in plain:
        if not isinstance(raw, bytes) or len(raw) > MAX_ADDRESS_BYTES:
            raise UnusableMessage(f"an address is up to {MAX_ADDRESS_BYTES} bytes")
        with Boundary("what a registry was told is no address", UnusableMessage):
            found.append(address_from_bytes(raw))
    return tuple(found)


def _pack(plain: list[Any]) -> bytes:
    return bytes(msgpack.packb(plain))


def _unpack(payload: bytes, count: int) -> list[Any]:
    if len(payload) > _MAX_MESSAGE_BYTES:
        raise UnusableMessage(
            f"a message of {len(payload)} bytes; a registry's have up to {_MAX_MESSAGE_BYTES}"
        )
    with _boundary():
        return _list(
            unpack(
                payload,
                max_bytes=_MAX_MESSAGE_BYTES,
                max_values=_MAX_VALUES,
                max_depth=MAX_MESSAGE_DEPTH,
            ),
            count,
        )


def _boundary() -> Boundary:
    return Boundary("a registry's message can't be read", UnusableMessage)


def _list(plain: Any, count: int) -> list[Any]:
    if not isinstance(plain, list) or len(plain) != count:
        raise UnusableMessage(f"a registry's message has no list of {count} where one has to be")
    return plain


def _cookie(plain: Any) -> Cookie:
    life, version, since = _list(plain, 3)
    return Cookie(life=_number(life), version=_number(version), since=_number(since))


def _plain(cookie: Cookie) -> list[int]:
    return [cookie.life, cookie.version, cookie.since]


def _number(plain: Any) -> int:
    if type(plain) is not int or not 0 <= plain <= _MAX_U64:
        raise UnusableMessage(f"{shown(plain)} is no count of a registry's message")
    return plain


def _flag(plain: Any) -> bool:
    if not isinstance(plain, bool):
        raise UnusableMessage(f"{shown(plain)} is neither true nor false")
    return plain


def _class(plain: Any) -> str:
    if (
        not isinstance(plain, str)
        or len(plain) > MAX_REGISTRY_CLASS_CHARS
        or not plain.isprintable()
    ):
        raise UnusableMessage(f"a class is a text of up to {MAX_REGISTRY_CLASS_CHARS} characters")
    return plain
