"""Records of peers that members of an overlay tell each other.

Rule: an address is a hint. Whoever answers there has to prove that it is the peer, so a lie costs
a dial that fails, within the bounds of discovery. DNS names, which may lead anywhere, are not
taken from others, and of a peer not more addresses than would be dialled.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final

from multiaddr import Multiaddr

from bbnode.components.contracts import OpContext
from bbnode.components.wire_records import PEER, WireRecord, addresses
from bbnode.ir.caps import MAX_HINTS
from bbnode.ir.peer import PeerId

_NAMES: Final = frozenset((0x35, 0x36, 0x37, 0x38))  # codes of dns, dns4, dns6 and dnsaddr

HINTS: Final = addresses(MAX_HINTS)


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerRecord(WireRecord):
    """A peer, and where it is said to be."""

    peer: PeerId = field(metadata=PEER)
    addresses: tuple[Multiaddr, ...] = field(metadata=HINTS, default=())


def hints(found: Sequence[Multiaddr]) -> tuple[Multiaddr, ...]:
    """Return the addresses that a peer passes on: the first few that are no names."""
    return tuple(each for each in found if each.to_bytes()[0] not in _NAMES)[:MAX_HINTS]


def own_record(ctx: OpContext) -> PeerRecord:
    """Return the record of this node."""
    return PeerRecord(peer=ctx.self_peer, addresses=hints(ctx.addresses))


def learn(ctx: OpContext, record: PeerRecord) -> None:
    """Put the addresses of another peer into the address book, so that it can be dialled."""
    found = hints(record.addresses)
    if found and record.peer != ctx.self_peer:
        ctx.learn_addresses(record.peer, found)


def faults(records: Sequence[PeerRecord], at_most: int, source: PeerId) -> str:
    """Return what is wrong with a list that `source` sent, or "".

    That is too many records, a peer twice, or `source` among its own neighbours.
    """
    peers = {record.peer for record in records}
    if len(records) > at_most:
        return f"{len(records)} peers in one exchange; {at_most} are taken"
    if len(peers) < len(records):
        return "a peer stands twice in one exchange"
    return "the sender names itself among its neighbours" if source in peers else ""


@lru_cache(maxsize=4096)
def subnet_at(address: Multiaddr) -> str:
    """Return the public subnet of an address, IPv4 /24 or IPv6 /48; "" where it is in none."""
    for name, bits in (("ip4", 24), ("ip6", 48)):
        try:
            found = ipaddress.ip_address(str(address.value_for_protocol(name)))
        except (LookupError, ValueError):
            continue
        if not found.is_global:
            return ""
        return str(ipaddress.ip_network((found, bits), strict=False))
    return ""


def subnet_of(record: PeerRecord) -> str:
    """Return the public subnet of the first address that is in one; "" of none."""
    return next(filter(None, map(subnet_at, record.addresses)), "")
