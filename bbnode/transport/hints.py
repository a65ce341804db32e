"""The check of addresses that a peer claims for itself, before we dial them.

Rule: a peer must not make us dial, or probe, a third party. We dial a claimed address if its IP
address is the one that the peer's connection comes from. Another IP address is accepted only if the
peer is known to be good, and only in the scopes that MAY_CLAIM allows, none nearer to us than the
peer itself. DNS names, which may lead anywhere, are never dialled on a peer's word.
"""

from __future__ import annotations

import enum
import ipaddress
from collections.abc import Iterable, Mapping
from typing import Final

from multiaddr import Multiaddr

from bbnode.ir.address import is_relayed
from bbnode.ir.caps import MAX_HINTS

_Ip = ipaddress.IPv4Address | ipaddress.IPv6Address


class Scope(enum.Enum):
    """The scope from which an IP address can be reached."""

    LOOPBACK = "loopback"  # this machine
    LINK = "link"  # this network segment; also the metadata services of clouds
    PRIVATE = "private"
    PUBLIC = "public"
    NOWHERE = "nowhere"  # unspecified, multicast, reserved


_ANYWHERE: Final = frozenset({Scope.PUBLIC})

# Scope in which a good peer (or its relay) was seen -> scopes of further addresses it may claim.
MAY_CLAIM: Final[Mapping[Scope, frozenset[Scope]]] = {
    Scope.LOOPBACK: frozenset({Scope.LOOPBACK, Scope.PRIVATE}) | _ANYWHERE,
    Scope.LINK: frozenset({Scope.LINK, Scope.PRIVATE}) | _ANYWHERE,
    Scope.PRIVATE: frozenset({Scope.PRIVATE}) | _ANYWHERE,
    Scope.PUBLIC: _ANYWHERE,
    Scope.NOWHERE: frozenset(),
}


def ip_of(address: Multiaddr) -> _Ip | None:
    """Return the IP address at the beginning of a multiaddr, or None."""
    parts = str(address).split("/")
    if len(parts) < 3 or parts[1] not in ("ip4", "ip6"):
        return None
    ip = ipaddress.ip_address(parts[2])
    mapped = ip.ipv4_mapped if isinstance(ip, ipaddress.IPv6Address) else None
    return mapped or ip


def scope_of(ip: _Ip) -> Scope:
    """Return the scope of an IP address."""
    if ip.is_unspecified or ip.is_multicast:
        return Scope.NOWHERE
    if ip.is_loopback:
        return Scope.LOOPBACK
    if ip.is_link_local:
        return Scope.LINK
    if ip.is_private:
        return Scope.PRIVATE
    return Scope.NOWHERE if ip.is_reserved else Scope.PUBLIC


def dialable(
    claimed: Iterable[Multiaddr], *, seen: Multiaddr | None, good: bool
) -> tuple[Multiaddr, ...]:
    """Return the claimed addresses that may be dialled, in order, at most MAX_HINTS.

    `seen` is the address from which the peer's connection came.
    """
    if seen is None:
        return ()
    allowed = (each for each in dict.fromkeys(claimed) if _may_dial(each, seen, good=good))
    return tuple(each for each, _ in zip(allowed, range(MAX_HINTS), strict=False))


def _may_dial(address: Multiaddr, seen: Multiaddr, *, good: bool) -> bool:
    if address == seen:
        return True
    ip, own = ip_of(address), ip_of(seen)
    if ip is None or own is None:
        return False
    if not good:
        # An IP address of a relay is not the peer's own.
        return ip == own and not is_relayed(address) and not is_relayed(seen)
    return scope_of(ip) in MAY_CLAIM[scope_of(own)]
