"""The stores of a DHT: addresses of peers, and provider records.

Rule: a connected peer's own addresses count; for others the latest information does, until it
expires. Only the provider itself can give a provider record; an answer about others is none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import trio
from libp2p.abc import IHost
from libp2p.kad_dht.common import ALPHA, PROTOCOL_ID, QUERY_TIMEOUT
from libp2p.kad_dht.provider_store import ProviderRecord, ProviderStore
from libp2p.kad_dht.routing_table import RoutingTable
from libp2p.kad_dht.utils import sort_peer_ids_by_distance
from libp2p.peer.id import ID
from libp2p.peer.peerinfo import PeerInfo
from libp2p.peer.peerstore import PeerStoreError
from multiaddr import Multiaddr

from bbnode.ir.caps import (
    MAX_CLOSER_PEERS,
    MAX_KEY_PROVIDERS,
    MAX_PROVIDER_RECORDS,
    MAX_PROVIDER_RECORDS_PER_PEER,
    MAX_ROUTING_PEERS,
    PROVIDER_RECORD_S,
)
from bbnode.ir.peer import PeerId
from bbnode.transport.hints import dialable
from bbnode.transport.libp2p.py_libp2p.dht.peers import ours
from bbnode.transport.libp2p.py_libp2p.peerstore import BoundedPeerStore
from bbnode.transport.libp2p.py_libp2p.swarm import NodeSwarm, without_peer

Claims = Callable[[PeerId], Sequence[Multiaddr]]


class KnownPeers(BoundedPeerStore):
    """Addresses and records of peers known to the DHT; connected peers' own claims come first."""

    def __init__(
        self,
        own: ID,
        swarm: NodeSwarm,
        claims: Claims,
        protocol: str,
        admits: Callable[[PeerId], bool] = lambda _peer: True,
    ) -> None:
        """Create an empty store; peers that `admits` refuses are not revealed to others."""
        super().__init__(own, lambda peer: peer in swarm.connections)
        self.own = own
        self._swarm = swarm
        self._claims = claims
        self._protocol = protocol
        self._admits = admits

    def addrs(self, peer_id: ID) -> list[Multiaddr]:
        """Return the addresses of a peer, empty if unknown."""
        return self.addrs_or_none(peer_id) or []

    def addrs_or_none(self, peer: ID) -> list[Multiaddr] | None:
        """Return the addresses of a peer: its own claims if it is connected, else from others."""
        if not self._admits(ours(peer)):
            return None
        if peer in self._swarm.connections:
            own = list(self._claims(ours(peer)) or self._identified(peer))
            if own:
                return own
        try:
            return list(super().addrs(peer))
        except PeerStoreError:
            return None

    def _identified(self, peer: ID) -> Sequence[Multiaddr]:
        """Return the addresses that a peer without a hello gave by identify."""
        try:
            claimed = self._swarm.peerstore.addrs(peer)
        except PeerStoreError:
            return ()
        connection = self._swarm.get_connections(peer)[0]
        way = connection.muxed_conn.get_transport_addresses()[0]
        return dialable(map(without_peer, claimed), seen=way, good=True)

    def get_protocols(self, peer_id: ID) -> list[str]:
        """Return the known protocols of a peer, with our DHT also under KadDHT's name."""
        try:
            protocols = self._swarm.peerstore.get_protocols(peer_id)
        except PeerStoreError:
            return []
        return [*protocols, PROTOCOL_ID] if self._protocol in protocols else protocols

    def speaks(self, peer: ID) -> bool:
        """Return True for a peer whose identify lists our DHT protocol."""
        return PROTOCOL_ID in self.get_protocols(peer)


class BoundedTable(RoutingTable):
    """The routing table, with at most MAX_ROUTING_PEERS peers.

    It is bounded since a query sorts all of them, and identities are free. A peer in the table
    stays while it answers.
    """

    async def add_peer(
        self,
        peer_obj: PeerInfo | ID,
        *,
        skip_server_mode_check: bool = False,  # noqa: ARG002 - clients ask as well as servers
    ) -> bool:
        """Add a peer unless it is known not to answer; return False if it is left out."""
        peer = peer_obj.peer_id if isinstance(peer_obj, PeerInfo) else peer_obj
        if self.size() >= MAX_ROUTING_PEERS and not self.peer_in_table(peer):
            return False
        return await super().add_peer(peer_obj)


class Providers(ProviderStore):
    """The records given by the providers themselves, kept for a day, within bounds.

    Information about others in an answer is not stored as a record.
    """

    def __init__(self, host: IHost, peer_routing: Any, unix_s: Callable[[], float]) -> None:
        super().__init__(host, peer_routing)
        self._unix_s = unix_s
        self._of_peer: Counter[str] = Counter()
        self._count = 0

    def has_room(self, key: bytes, peer: ID) -> bool:
        """Return True if there is room for a record of this peer."""
        self._drop_expired(key)
        known, name = self.providers.get(key, {}), str(peer)
        return name in known or (
            len(known) < MAX_KEY_PROVIDERS
            and self._of_peer[name] < MAX_PROVIDER_RECORDS_PER_PEER
            and self._count < MAX_PROVIDER_RECORDS
        )

    def add_provider(self, key: bytes, provider: PeerInfo) -> None:
        """Store a record of a provider, if there is room."""
        if not self.has_room(key, provider.peer_id):
            return
        name, records = str(provider.peer_id), self.providers.setdefault(key, {})
        if name not in records:
            self._of_peer[name] += 1
            self._count += 1
        records[name] = ProviderRecord(provider, self._unix_s())

    def get_providers(self, key: bytes) -> list[PeerInfo]:
        """Return the providers of a key whose records have not expired."""
        self._drop_expired(key)
        return [each.provider_info for each in self.providers.get(key, {}).values()]

    def cleanup_expired(self) -> None:
        """Drop all records that have expired."""
        for key in list(self.providers):
            self._drop_expired(key)

    def size(self) -> int:
        """Return the number of records."""
        return self._count

    def _drop_expired(self, key: bytes) -> None:
        records, now_s = self.providers.get(key, {}), self._unix_s()
        for name, each in list(records.items()):
            if now_s - each.timestamp > PROVIDER_RECORD_S:
                self._drop(key, name)

    def _drop(self, key: bytes, name: str) -> None:
        records = self.providers[key]
        del records[name]
        if not records:
            del self.providers[key]
        self._count -= 1
        self._of_peer[name] -= 1
        if not self._of_peer[name]:
            del self._of_peer[name]

    async def _republish_provider_records(self) -> None:
        """Do nothing: `Dht.run` announces them, as peers come and go."""

    def provide_only(self, keys: Sequence[bytes]) -> None:
        """Keep records of this node for these keys only."""
        for key in self.get_provided_keys(self.local_peer_id):
            if key not in keys:
                self._drop(key, str(self.local_peer_id))

    async def tell(self, key: bytes) -> int:
        """Announce to the nearest peers that we provide a key; return the number that accepted."""
        ways = self.host.get_addrs()
        if not ways:
            # Without an address of ours nobody could fetch it.
            return 0
        self.add_provider(key, PeerInfo(self.local_peer_id, ways))
        nearest = [
            each
            for each in await self.peer_routing.find_closest_peers_network(key)
            if each != self.local_peer_id
        ]
        took = await _in_turn(nearest, lambda peer: self._send_add_provider(peer, key))
        return sum(took)

    async def find_providers(self, key: bytes, count: int = MAX_KEY_PROVIDERS) -> list[PeerInfo]:
        """Return providers of a key, starting with this node's own records."""
        providers = {
            each.peer_id: each
            for each in self.get_providers(key)
            if each.peer_id != self.local_peer_id
        }
        asked = {self.local_peer_id}
        candidates = list(await self.peer_routing.find_closest_peers_network(key))

        async def ask(peer: ID) -> Sequence[ID]:
            said, nearer = await self._get_providers_from_peer_with_closers(peer, key)
            for each in said:
                providers.setdefault(each.peer_id, each)
            return nearer

        while len(providers) < count:
            batch = [each for each in candidates if each not in asked][:ALPHA]
            if not batch:
                break
            asked.update(batch)
            nearer = [each for more in await _in_turn(batch, ask) for each in more]
            candidates = sort_peer_ids_by_distance(key, list({*candidates, *nearer}))[
                :MAX_CLOSER_PEERS
            ]
        return list(providers.values())[:count]


async def _in_turn(peers: Sequence[ID], ask: Callable[[ID], Awaitable[Any]]) -> list[Any]:
    """Query ALPHA peers at a time; return the answers that arrived in time."""
    answers: list[Any] = []
    slots = trio.Semaphore(ALPHA)

    async def one(peer: ID) -> None:
        try:
            with trio.move_on_after(QUERY_TIMEOUT):
                answers.append(await ask(peer))
        finally:
            slots.release()

    async with trio.open_nursery() as nursery:
        for peer in peers:
            await slots.acquire()
            nursery.start_soon(one, peer)
    return answers
