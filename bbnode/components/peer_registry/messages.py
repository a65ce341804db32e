"""The messages between a registry's server and its clients.

Rule: those of `wire_records`; times are durations in nanoseconds, since no two clocks agree.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from multiaddr import Multiaddr

from bbnode.components.wire_records import (
    ADDRESSES,
    COUNT,
    FLAG,
    PEER,
    WireRecord,
    records,
    text,
    wire,
)
from bbnode.ir.caps import MAX_PAGE_ROWS, MAX_REGISTRY_CLASS_CHARS
from bbnode.ir.peer import PeerId

_CLASS = text("a class", MAX_REGISTRY_CLASS_CHARS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Announcement(WireRecord):
    """The request of a peer to be entered, under a class (empty: any) with its addresses."""

    as_class: str = field(metadata=_CLASS)
    addresses: tuple[Multiaddr, ...] = field(metadata=ADDRESSES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Handshake(WireRecord):
    """The answer: how long the entry is valid (0: no room), and when to announce again."""

    ttl_ns: int = field(metadata=COUNT)
    heartbeat_ns: int = field(metadata=COUNT)
    addresses: tuple[Multiaddr, ...] = field(metadata=ADDRESSES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cookie(WireRecord):
    """The position of a reader: `version` counts the changes of one life of a server.

    Peers removed up to the version `since` were gone before the reader began, so they are not sent.
    """

    life: int = field(metadata=COUNT)
    version: int = field(metadata=COUNT)
    since: int = field(metadata=COUNT)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadRequest(WireRecord):
    """Asks for what changed since the cookie (n is 0), or for n peers drawn."""

    cookie: Cookie | None = field(
        metadata=wire(
            lambda plain: None if plain is None else Cookie.read(plain),
            lambda cookie: None if cookie is None else cookie.pack(),
        ),
        default=None,
    )
    n: int = field(metadata=COUNT, default=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row(WireRecord):
    """One change: a peer with its class, or (`gone`) one that is no longer there."""

    peer: PeerId = field(metadata=PEER)
    as_class: str = field(metadata=_CLASS, default="")
    addresses: tuple[Multiaddr, ...] = field(metadata=ADDRESSES, default=())
    gone: bool = field(metadata=FLAG, default=False)

    @property
    def max_bytes(self) -> int:
        """An upper bound of the bytes that it takes in a page."""
        return 128 + len(self.as_class) * 4 + sum(8 + len(a.to_bytes()) for a in self.addresses)


@dataclass(frozen=True, slots=True, kw_only=True)
class Page(WireRecord):
    """Changes after a cookie, oldest first. `reset`: forget what was read; `more`: ask again.

    A peer that is not reported as gone counts as present for `ttl_ns`.
    """

    cookie: Cookie = field(metadata=wire(Cookie.read, Cookie.pack))
    ttl_ns: int = field(metadata=COUNT)
    reset: bool = field(metadata=FLAG)
    more: bool = field(metadata=FLAG)
    rows: tuple[Row, ...] = field(metadata=records(Row, MAX_PAGE_ROWS))
