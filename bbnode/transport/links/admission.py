"""The places that a node has for connections, and which connections get one.

Rule: only this module decides if a connection is accepted and which one is dropped for it. It does
no I/O and reads no clock. A connection waits from the accepted socket to its hello, and then stays
with a standing; one with a host that speaks no protocol of bbnode stays only in otherwise unused
places. Waiting connections have a bound of their own, so that silent sockets take no places from
others; strangers never get the last places, which are reserved for members and known peers. A
connection that is dropped for a newcomer belongs to the most crowded prefix and is past its grace
period. Prefixes are counted at two lengths: IPv4 as /32 and /24, IPv6 as /64 and /48. Addresses
that are not global (this machine, and private networks, as in test beds and containers) have no
bound per prefix, since many peers may share one.
"""

from __future__ import annotations

import enum
import ipaddress
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

from bbnode.access.decision import Decision, Reason, Standing
from bbnode.ir.caps import MAX_OFFENDERS
from bbnode.ir.peer import PeerId
from bbnode.transport.base import Authorizer, Counters, Direction, Hello
from bbnode.transport.limits import TransportLimits
from bbnode.transport.links.shares import CoreShare, CoreShares

# IP version -> lengths of the two prefixes that are counted: one host, and one site.
PREFIX_BITS: Final[dict[int, tuple[int, int]]] = {4: (32, 24), 6: (64, 48)}


class Stage(enum.Enum):
    """The stages of a connection."""

    SILENT = "silent"
    SPEAKING = "speaking"
    SECURED = "secured"
    # It has used no protocol of bbnode yet, and may still send its hello.
    FOREIGN = "foreign"
    SETTLED = "settled"
    GONE = "gone"


# Seconds for which a connection keeps its place before a newcomer may take it. A handshake takes
# tens of milliseconds of our CPU and three round trips.
GRACE_S: Final[dict[Stage, float]] = {
    Stage.SILENT: 0.5,
    Stage.SPEAKING: 1.5,
    Stage.SECURED: 1.5,
}


@dataclass(slots=True, eq=False)
class Place:
    """One connection, from its socket to its end."""

    prefixes: tuple[str, ...]
    # True if the bounds per prefix apply to it.
    bounded: bool
    since_s: float
    # Ends the connection at once, with a reason. Does not block.
    drop: Callable[[str], None]
    share: CoreShare
    stage: Stage = Stage.SILENT
    peer: PeerId | None = None
    standing: Standing = Standing.STRANGER
    # True if we dialled, so that we want this peer.
    dialled: bool = False
    # Returns True if there are bytes that we have not read yet, so that no connection is dropped
    # because this machine is busy.
    has_spoken: Callable[[], bool] = lambda: False


@dataclass(slots=True)
class _Group:
    """Places that share a bound."""

    places: dict[Place, None] = field(default_factory=dict)
    by_prefix: Counter[str] = field(default_factory=Counter)

    def add(self, place: Place) -> None:
        self.places[place] = None
        self.by_prefix.update(place.prefixes)

    def remove(self, place: Place) -> None:
        if place not in self.places:
            return
        del self.places[place]
        for prefix in place.prefixes:
            self.by_prefix[prefix] -= 1
            if not self.by_prefix[prefix]:
                del self.by_prefix[prefix]

    def full_prefix(self, place: Place, bounds: tuple[int, int]) -> str:
        """Return the prefix of a newcomer that has reached its bound; "" if none has."""
        if place.bounded:
            for prefix, bound in zip(place.prefixes, bounds, strict=True):
                if self.by_prefix[prefix] >= bound:
                    return prefix
        return ""

    def crowd(self, place: Place) -> int:
        """Return the number of places that share the wider prefix of this one."""
        return self.by_prefix[place.prefixes[-1]]


class Admission:
    """The places of all connections; `known` is True for a peer that we want or have dealt with."""

    def __init__(
        self, limits: TransportLimits, counters: Counters, known: Callable[[PeerId], bool]
    ) -> None:
        self._limits = limits
        self._counters = counters
        self._known = known
        self._waiting = _Group()
        self._strangers = _Group()
        # Members, peers that we know, and those that we dialled.
        self._others = _Group()
        self._guests: dict[Place, None] = {}
        # Hosts that speak no protocol of bbnode: inbound ones, and those that we dialled.
        self._foreign = _Group()
        self._visited: dict[Place, None] = {}
        self._settled_of: Counter[PeerId] = Counter()
        self._shares = CoreShares(limits, counters, known)
        # Narrow prefixes from which strangers flooded us, the latest last -> end and duration of
        # the ban in which they get no connection.
        self._cooling: OrderedDict[str, tuple[float, float]] = OrderedDict()

    @property
    def waiting(self) -> int:
        """The number of connections that have not sent their hello."""
        return len(self._waiting.places)

    @property
    def sockets(self) -> int:
        """The number of waiting connections whose handshake is not finished."""
        return sum(each.stage is not Stage.SECURED for each in self._waiting.places)

    @property
    def settled(self) -> int:
        """The number of connections that have sent their hello."""
        return len(self._strangers.places) + len(self._others.places) + len(self._guests)

    @property
    def strangers(self) -> int:
        """The number of settled connections of peers that are neither members nor known."""
        return len(self._strangers.places)

    @property
    def foreign(self) -> int:
        """The number of connections with hosts that speak no protocol of bbnode."""
        return len(self._foreign.places) + len(self._visited)

    # -- life cycle of a connection ----------------------------------------------------------

    def accept(self, address: str, now_s: float, drop: Callable[[str], None]) -> Place | None:
        """Return a place for a connection from an IP address ("": a relay), or None."""
        prefixes, bounded = prefixes_of(address)
        if bounded and self._is_cooling(prefixes[0], now_s):
            self._counters.add("sockets.cooling")
            return None
        place = Place(prefixes, bounded, now_s, drop, CoreShare(self._shares))
        limits, waiting = self._limits, self._waiting
        bounds = (limits.waiting_per_address, limits.waiting_per_network)
        while full := waiting.full_prefix(place, bounds):
            if not self._drop_waiting((p for p in waiting.places if full in p.prefixes), now_s):
                self._counters.add("sockets.refused")
                return None
        if len(waiting.places) >= limits.max_waiting and not self._drop_waiting(
            waiting.places, now_s
        ):
            self._counters.add("sockets.refused")
            return None
        waiting.add(place)
        return place

    def dial(self, peer: PeerId, now_s: float, drop: Callable[[str], None]) -> Place:
        """Return the place of a connection that we dialled, which does not wait."""
        share = CoreShare(self._shares)
        share.admit()
        return Place(("dialled",), False, now_s, drop, share, Stage.SECURED, peer, dialled=True)

    def visit(self, peer: PeerId, now_s: float, drop: Callable[[str], None]) -> Place | None:
        """Return a place for a connection that we dialled for libp2p's services, or None."""
        if len(self._visited) >= self._limits.max_foreign_dialled:
            self._counters.add("foreign.refused")
            return None
        place = Place(
            ("visited",), False, now_s, drop, CoreShare(self._shares), Stage.FOREIGN, peer
        )
        place.share.visit()
        self._visited[place] = None
        return place

    def take_foreign(self, place: Place, now_s: float) -> bool:
        """Admit a connection whose peer speaks no protocol of bbnode; return False without room.

        It may replace one that has been silent for `idle_foreign_s`.
        """
        if place.stage is Stage.FOREIGN:
            return True
        limits = self._limits
        if place.stage is not Stage.SECURED or not limits.foreign_hosts:
            return False
        if not self._room_for_foreign(place, now_s):
            self._counters.add("foreign.refused")
            return False
        self._waiting.remove(place)
        self._foreign.add(place)
        place.stage = Stage.FOREIGN
        place.share.visit()
        self._counters.add("foreign.taken")
        return True

    def flooded(self, place: Place, now_s: float) -> None:
        """Ban the prefix of a stranger that flooded us, for a while."""
        if not place.bounded or place.share.is_admitted:
            return
        limits, prefix = self._limits, place.prefixes[0]
        until_s, last_s = self._cooling.pop(prefix, (-math.inf, 0.0))
        if now_s < until_s:
            next_s = last_s  # the ban still runs: do not extend it
        elif now_s < until_s + limits.max_cooling_s:
            next_s = min(2 * last_s, limits.max_cooling_s)
        else:
            next_s = limits.cooling_s
        self._cooling[prefix] = (max(until_s, now_s + next_s), next_s)
        if len(self._cooling) > MAX_OFFENDERS:
            self._cooling.popitem(last=False)

    def _is_cooling(self, prefix: str, now_s: float) -> bool:
        until_s, _ = self._cooling.get(prefix, (-math.inf, 0.0))
        return now_s < until_s and not self._others.by_prefix[prefix]

    def heard(self, place: Place) -> None:
        """Record that the first bytes have arrived."""
        if place.stage is Stage.SILENT:
            place.stage = Stage.SPEAKING

    def secured(self, place: Place, peer: PeerId) -> None:
        """Record that the handshake has proved the peer."""
        if place.stage in (Stage.SILENT, Stage.SPEAKING):
            place.stage, place.peer = Stage.SECURED, peer

    def hello(self, place: Place, peer: PeerId, standing: Standing, now_s: float) -> str:
        """Settle a connection with an acceptable hello; return the reason to refuse it, or ""."""
        if place.stage is Stage.GONE:
            return "its place went to another connection"
        self._waiting.remove(place)
        self._leave_foreign(place)
        place.peer, place.standing = peer, standing
        if place.dialled or (standing is Standing.STRANGER and self._known(peer)):
            place.standing = Standing.MEMBER
        reason = self._room_for(place, now_s)
        if reason:
            place.stage = Stage.GONE
            return reason
        place.stage = Stage.SETTLED
        self._settled_of[peer] += 1
        if place.standing is Standing.GUEST:
            self._guests[place] = None
        elif place.standing is Standing.STRANGER:
            place.share.settle(peer)
            self._strangers.add(place)
        else:
            place.share.admit()
            self._others.add(place)
        return ""

    def left(self, place: Place) -> None:
        """Release the place of a closed connection. Idempotent."""
        if place.stage is Stage.SETTLED and place.peer is not None:
            self._settled_of[place.peer] -= 1
            if not self._settled_of[place.peer]:
                del self._settled_of[place.peer]
        place.stage = Stage.GONE
        self._waiting.remove(place)
        self._strangers.remove(place)
        self._others.remove(place)
        self._guests.pop(place, None)
        self._leave_foreign(place)

    def _leave_foreign(self, place: Place) -> None:
        place.share.stay()
        self._foreign.remove(place)
        self._visited.pop(place, None)

    # -- making room -------------------------------------------------------------------------

    def _drop_waiting(self, places: Iterable[Place], now_s: float) -> bool:
        """Drop a waiting connection; return False if all are within their grace, or known.

        It belongs to the most crowded prefix: silent ones go before others, then the oldest.
        """
        there = list(places)
        while True:
            worst = max(
                (
                    place
                    for place in there
                    if now_s - place.since_s >= GRACE_S[place.stage]
                    and not (place.peer is not None and self._known(place.peer))
                ),
                key=lambda place: (
                    self._waiting.crowd(place),
                    place.stage is Stage.SILENT,
                    -place.since_s,
                ),
                default=None,
            )
            if worst is None:
                return False
            if worst.stage is not Stage.SILENT or not worst.has_spoken():
                break
            worst.stage = Stage.SPEAKING
        self._counters.add("sockets.dropped")
        self._evict(worst, "it was silent for too long while others wait")
        return True

    def _room_for(self, place: Place, now_s: float) -> str:
        limits = self._limits
        if place.peer is not None and self._settled_of[place.peer]:
            # It may replace the peer's other connection; the transport bounds them per peer.
            return ""
        if place.standing is Standing.GUEST:
            full = len(self._guests) >= limits.max_guests
            return "there are as many guests as may be; try again in a minute" if full else ""
        if place.standing is Standing.STRANGER:
            return self._room_for_stranger(place, now_s)
        while self.settled >= limits.max_connections:
            # Without a grace, since it is a stranger's.
            if not self._drop_stranger(self._strangers.places, now_s, 0.0):
                return "all connections are taken by members and peers we know"
        return ""

    def _room_for_foreign(self, place: Place, now_s: float) -> bool:
        limits, foreign = self._limits, self._foreign
        bounds = (limits.foreign_per_address, limits.foreign_per_network)
        while full := foreign.full_prefix(place, bounds):
            there = (each for each in foreign.places if full in each.prefixes)
            if not self._drop_foreign(there, now_s):
                return False
        while len(foreign.places) >= limits.max_foreign:
            if not self._drop_foreign(foreign.places, now_s):
                return False
        return True

    def _drop_foreign(self, places: Iterable[Place], now_s: float) -> bool:
        """Close the longest silent connection of the most crowded prefix."""
        worst = max(
            (
                each
                for each in places
                if now_s - max(each.since_s, each.share.active_at_s) >= self._limits.idle_foreign_s
            ),
            key=lambda each: (self._foreign.crowd(each), -each.share.active_at_s),
            default=None,
        )
        if worst is None:
            return False
        self._counters.add("foreign.dropped")
        self._evict(worst, "it was silent for long, and its place is needed for another host")
        return True

    def _room_for_stranger(self, place: Place, now_s: float) -> str:
        limits, strangers = self._limits, self._strangers
        most = limits.max_connections - reserved(limits)
        bounds = (limits.strangers_per_address, limits.strangers_per_network)
        after_s = limits.idle_stranger_s
        if len(strangers.places) >= most or strangers.full_prefix(place, bounds):
            self._recognise()
        while full := strangers.full_prefix(place, bounds):
            there = (each for each in strangers.places if full in each.prefixes)
            if not self._drop_stranger(there, now_s, after_s):
                return f"there are as many strangers of {full} as may be"
        while len(strangers.places) >= most or self.settled >= limits.max_connections:
            if not self._drop_stranger(strangers.places, now_s, after_s):
                return "the places for strangers are taken"
        return ""

    def _drop_stranger(self, places: Iterable[Place], now_s: float, after_s: float) -> bool:
        """Close the oldest connection of the most crowded prefix of strangers."""
        worst = max(
            (each for each in places if now_s - each.since_s >= after_s),
            key=lambda each: (self._strangers.crowd(each), -each.since_s),
            default=None,
        )
        if worst is None:
            return False
        self._counters.add("links.evicted")
        self._evict(worst, "its place is needed for another peer")
        return True

    def _recognise(self) -> None:
        """Reclassify strangers that have become known."""
        for place in list(self._strangers.places):
            if place.peer is not None and self._known(place.peer):
                self._strangers.remove(place)
                place.standing = Standing.MEMBER
                place.share.admit()
                self._others.add(place)

    def _evict(self, place: Place, reason: str) -> None:
        self.left(place)
        place.drop(reason)


def reserved(limits: TransportLimits) -> int:
    """Return the number of connections that strangers never get, a quarter of all at most."""
    return min(limits.reserved_connections, limits.max_connections // 4)


def prefixes_of(address: str) -> tuple[tuple[str, ...], bool]:
    """Return the prefixes of an IP address, narrow and wide, and True if they are bounded."""
    if not address:
        return ("relayed",), False
    ip = ipaddress.ip_address(address.split("%")[0])
    if isinstance(ip, ipaddress.IPv6Address) and ip.ipv4_mapped is not None:
        ip = ip.ipv4_mapped
    networks = (ipaddress.ip_network((ip, bits), strict=False) for bits in PREFIX_BITS[ip.version])
    return tuple(map(str, networks)), ip.is_global


class Gate:
    """Calls the authorizer and counts its refusals; a decision is the reason to refuse, or ""."""

    def __init__(self, authorizer: Authorizer | None, counters: Counters) -> None:
        self._authorizer = authorizer
        self._counters = counters
        # Refusals by reason.
        self.denied: Counter[str] = Counter()

    def connection(self, peer: PeerId, direction: Direction, hello: Hello | None) -> str:
        """Decide on a connection, before or after its hello."""
        if self._authorizer is None:
            return ""
        if hello is not None:
            return self.hello(peer, direction, hello)[0]
        return self._reason(self._authorizer.connection(peer, direction))

    def hello(self, peer: PeerId, direction: Direction, hello: Hello) -> tuple[str, Standing]:
        """Return the reason to refuse a hello, or "", and the standing of the peer."""
        if self._authorizer is None:
            return "", Standing.STRANGER
        decision = self._authorizer.hello(peer, direction, hello)
        reason = self._reason(decision)
        if decision.reason is Reason.NOT_A_MEMBER:
            # Tell the peer if its membership has ended, was revoked, or is of another network.
            reason += f" ({decision.detail.partition(':')[0]})"
        return reason, decision.standing

    def envelope(self, peer: PeerId, direction: Direction, size: int) -> str:
        """Decide on one envelope from a peer or to it."""
        if self._authorizer is None:
            return ""
        return self._reason(self._authorizer.envelope(peer, direction, size))

    def admits_from(self, peer: PeerId) -> Callable[[int], float]:
        """Return a function from the size of an envelope to the seconds it has to wait, or inf."""
        authorizer = self._authorizer
        if authorizer is None:
            return lambda _size: 0.0

        def admit(size: int) -> float:
            decision = authorizer.envelope(peer, Direction.INBOUND, size)
            if decision.allowed:
                return 0.0
            if decision.wait_s > 0:
                return decision.wait_s  # delayed, not refused
            self._reason(decision)
            return math.inf

        return admit

    def is_known(self, peer: PeerId) -> bool:
        """Return True if a peer is known to be of use."""
        return self._authorizer is None or self._authorizer.is_known(peer)

    def _reason(self, decision: Decision) -> str:
        if decision.allowed:
            return ""
        reason = decision.reason or "not allowed"
        self.denied[reason] += 1  # bounded: Reason has few members
        self._counters.add("access.denied")
        return reason
