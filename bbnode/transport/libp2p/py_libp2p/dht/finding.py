"""The routing of one node, by KadDHT on our host.

Rule: it looks up peers and content by querying others; a node that answers others also makes
itself known to them. The error of a failed search gives the number of queried peers.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, cast

import trio
from libp2p import kad_dht
from libp2p.abc import IHost
from libp2p.kad_dht.kad_dht import DHTMode, KadDHT
from libp2p.peer.id import ID
from libp2p.peer.peerinfo import PeerInfo
from libp2p.records.validator import NamespacedValidator
from multiaddr import Multiaddr

from bbnode.ir.caps import (
    FIND_S,
    PROVIDE_EVERY_S,
    ROUTING_REFRESH_S,
    ROUTING_SETTLE_S,
)
from bbnode.ir.peer import PeerId
from bbnode.transport.libp2p.py_libp2p.dht.host import DhtHost, Reach, Release
from bbnode.transport.libp2p.py_libp2p.dht.peers import ours, theirs
from bbnode.transport.libp2p.py_libp2p.dht.stores import BoundedTable, Claims, KnownPeers, Providers
from bbnode.transport.libp2p.py_libp2p.host import PyLibp2p
from bbnode.transport.libp2p.py_libp2p.swarm import NodeSwarm, without_peer
from bbnode.transport.routing import (
    Located,
    NobodyToAsk,
    NotFound,
    Routing,
    RoutingFault,
    RoutingSetup,
    dht_protocol,
)

# It warns of each peer's misbehaviour, which is counted here instead.
logging.getLogger(kad_dht.__name__).setLevel(logging.ERROR)

# Prefix of a multihash (code and length) for SHA-256.
_SHA256: Final = bytes([0x12, 0x20])

# Intervals between checks for a new peer's addresses: 13 s in all.
_IDENTIFY_S: Final = (0.0, *(0.1 * 2**n for n in range(7)))


class Dht(Routing):
    """The routing of one node, by KadDHT on its host."""

    def __init__(
        self,
        other: PyLibp2p,
        setup: RoutingSetup,
        *,
        addresses: Callable[[], Sequence[Multiaddr]],
        claims: Claims,
        reach: Reach,
        release: Release,
        unix_s: Callable[[], float] = time.time,
    ) -> None:
        """Create the routing; nothing is queried or answered before `run`.

        Args:
            other: the host of py-libp2p.
            setup: the node's parameters.
            addresses: returns this node's announced addresses.
            claims: returns the addresses that a connected peer claims and that may be dialled.
            reach: connects with a peer by our own transport; raises DialError.
            release: closes such a connection, if nothing else uses it.
            unix_s: the clock for records.
        """
        self._setup = setup
        self._swarm = cast("NodeSwarm", other.host.get_network())
        self._counts: Counter[str] = Counter()
        own, protocol = other.host.get_id(), dht_protocol(setup.network)
        self._store = KnownPeers(own, self._swarm, claims, protocol, setup.admits)
        host = DhtHost(other, setup, self._store, self._counts, addresses)
        host.reach, host.release = reach, release
        self._checks = host.checks
        mode = DHTMode.SERVER if setup.serves else DHTMode.CLIENT
        self._kad = KadDHT(
            cast("IHost", host),
            mode,
            # Without validators every value is refused, so none is stored.
            validator=NamespacedValidator({}, strict_validation=True),
            validator_changed=True,
            strict_validation=True,
        )
        # Members of a private network may well share a subnet.
        per_subnet = None if setup.network is None else 0
        table = BoundedTable(own, cast("IHost", host), max_peers_per_subnet=per_subnet)
        self._kad.routing_table = self._kad.peer_routing.routing_table = table
        self._providers = Providers(cast("IHost", host), self._kad.peer_routing, unix_s)
        self._kad.provider_store = self._checks.providers = self._providers
        host.answer = self._kad.handle_stream
        self._host = host
        self._own = own
        self._keys: tuple[bytes, ...] = ()
        self._told_of: dict[bytes, int] = {}
        self._wake = trio.Event()

    async def run(self) -> None:
        self._host.joined = self._met
        self._swarm.register_notifee(self._host)
        try:
            self._host.serve()
            async with trio.open_nursery() as nursery:
                for peer in list(self._swarm.connections):
                    nursery.start_soon(self._met, peer)
                nursery.start_soon(self._host.tidy)
                if self._setup.serves:
                    nursery.start_soon(self._be_known)
                await trio.sleep_forever()
        finally:
            self._swarm.remove_notifee(self._host)
            self._host.stop_serving()

    async def _be_known(self) -> None:
        """Search repeatedly for near keys, so that others learn of this node.

        A node that only queries does so when it has a query.
        """
        wait_s, looked_s = ROUTING_SETTLE_S, -math.inf
        while True:
            with trio.move_on_at(looked_s + PROVIDE_EVERY_S):
                await self._wake.wait()
            if trio.current_time() - looked_s > ROUTING_REFRESH_S:
                wait_s = ROUTING_SETTLE_S
            # Peers tend to join in groups, and a search queries many of them.
            await trio.sleep(wait_s)
            wait_s = min(2 * wait_s, ROUTING_REFRESH_S)
            self._wake = trio.Event()
            await self._look_around()
            looked_s = trio.current_time()

    async def _met(self, peer: ID) -> None:
        """Add a connected peer to the table, once its addresses are known."""
        # A hello has arrived by now; an identify may still be in flight.
        for wait_s in (0.0,) if self._setup.network is not None else _IDENTIFY_S:
            await trio.sleep(wait_s)
            if peer not in self._swarm.connections or not self._setup.admits(ours(peer)):
                return
            if self._store.addrs_or_none(peer):
                await self._add(peer)
                return

    async def _add(self, peer: ID) -> None:
        if not self._kad.routing_table.peer_in_table(peer) and await self._kad.add_peer(peer):
            self._wake.set()

    async def _look_around(self) -> None:
        """Make this node known to the nearest peers, and announce its keys to those near them."""
        for peer in list(self._swarm.connections):
            if self._store.speaks(peer):
                await self._add(peer)
        self._providers.cleanup_expired()
        if not self._kad.routing_table.size():
            return
        with self._host.searching(), trio.move_on_after(FIND_S):
            await self._kad.peer_routing.refresh_routing_table()
        for key in self._keys:
            with self._host.searching(), trio.move_on_after(FIND_S):
                self._told_of[key] = await self._providers.tell(key)

    # -- Routing ---------------------------------------------------------------------------

    async def find_peer(self, peer: PeerId) -> Located:
        self._counts["searches"] += 1
        wanted, before = theirs(peer), self._counts["asked"]
        with self._host.searching(), trio.move_on_after(FIND_S):
            await self._kad.peer_routing.find_closest_peers_network(wanted.to_bytes())
        located = self._located(wanted, ())
        if not located.addresses:
            self._counts["not_found"] += 1
            raise self._not_found(f"where {peer} is", self._counts["asked"] - before)
        return located

    async def find_providers(self, key: bytes) -> list[Located]:
        self._counts["searches"] += 1
        before = self._counts["asked"]
        providers: list[PeerInfo] = []
        with self._host.searching(), trio.move_on_after(FIND_S):
            providers = await self._providers.find_providers(_SHA256 + key)
        located = [self._located(each.peer_id, each.addrs) for each in providers]
        admitted = [each for each in located if each.addresses and self._setup.admits(each.peer)]
        if not admitted:
            self._counts["not_found"] += 1
            raise self._not_found(f"who has {key.hex()}", self._counts["asked"] - before)
        return admitted

    def provide(self, keys: Sequence[bytes]) -> None:
        self._keys = tuple(_SHA256 + key for key in keys)
        self._told_of = {key: n for key, n in self._told_of.items() if key in self._keys}
        self._providers.provide_only(self._keys)
        self._wake.set()

    def counters(self) -> dict[str, int]:
        names = (
            *("searches", "not_found", "asked", "answered", "dialled", "over_budget"),
            *("dropped", "stale_records", "values", "streams_refused", "busy"),
            *(f"fault.{fault.value}" for fault in RoutingFault),
        )
        return {
            **{name: self._counts[name] for name in names},
            "peers": self._kad.routing_table.size(),
            "records": self._providers.size(),
            "providing": len(self._keys),
        }

    def as_json(self) -> dict[str, Any]:
        return {
            "protocol": dht_protocol(self._setup.network),
            "mode": "server" if self._setup.serves else "client",
            "peers": self._kad.routing_table.size(),
            "providing": {
                key[len(_SHA256) :].hex(): self._told_of.get(key, 0) for key in self._keys
            },
        }

    def _located(self, peer: ID, also: Iterable[Multiaddr]) -> Located:
        signed = self._store.get_peer_record(peer) is not None
        known = self._store.addrs_or_none(peer) or ()
        ways = list(dict.fromkeys(map(without_peer, (*known, *also))))
        sources = self._checks.told.get(peer, {})
        return Located(
            peer=ours(peer),
            addresses=tuple(ways),
            signed=signed,
            told_by={} if signed else {way: sources[way] for way in ways if way in sources},
        )

    def _not_found(self, what: str, asked: int) -> NotFound:
        if not asked:
            return NobodyToAsk(
                f"nobody to ask {what}: no connected peer answers on "
                f"{dht_protocol(self._setup.network)}; connect with one that has routing.dht on"
            )
        return NotFound(f"{asked} peers were asked {what}, and none knows")
