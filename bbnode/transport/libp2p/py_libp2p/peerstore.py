"""A bounded peer store for py-libp2p.

Rule: information from a peer, about itself or others, is bounded per peer, and the oldest peers are
forgotten first; never this node itself, and never a connected peer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from libp2p.peer.envelope import Envelope
from libp2p.peer.id import ID
from libp2p.peer.peerstore import PeerStore
from multiaddr import Multiaddr

from bbnode.ir.caps import (
    MAX_KNOWN_ADDRESSES,
    MAX_KNOWN_PEERS,
    MAX_KNOWN_PROTOCOLS,
    MAX_NEGOTIATION_BYTES,
    MAX_PEER_RECORD_BYTES,
)


class BoundedPeerStore(PeerStore):
    """A PeerStore with bounds; py-libp2p's own forgets this node's key at its bound of peers."""

    def __init__(self, own: ID, is_connected: Callable[[ID], bool]) -> None:
        """Create an empty store for this node."""
        super().__init__(max_records=MAX_KNOWN_PEERS, max_peers=MAX_KNOWN_PEERS)
        self._own = own
        self._is_connected = is_connected

    def add_addrs(self, peer_id: ID, addrs: Sequence[Multiaddr], ttl: int = 0) -> None:
        """Add addresses of a peer; those beyond the bound are left out."""
        known = self.peer_data_map.get(peer_id)
        room = MAX_KNOWN_ADDRESSES - (0 if known is None else len(known.get_addrs()))
        fresh = [each for each in addrs if known is None or each not in known.get_addrs()]
        super().add_addrs(peer_id, fresh[: max(0, room)], ttl)

    def add_protocols(self, peer_id: ID, protocols: Sequence[str]) -> None:
        """Add protocols of a peer; those beyond the bound are left out."""
        known = self.peer_data_map.get(peer_id)
        room = MAX_KNOWN_PROTOCOLS - (0 if known is None else len(known.get_protocols()))
        super().add_protocols(peer_id, _short(protocols)[: max(0, room)])
        self._enforce_peer_limit()

    def set_protocols(self, peer_id: ID, protocols: Sequence[str]) -> None:
        """Replace the protocols of a peer; those beyond the bound are left out."""
        super().set_protocols(peer_id, _short(protocols)[:MAX_KNOWN_PROTOCOLS])
        self._enforce_peer_limit()

    def consume_peer_record(self, envelope: Envelope, ttl: int) -> bool:
        """Keep a signed record unless it is too large, forged or older; return True if kept."""
        if len(envelope.marshal_envelope()) > MAX_PEER_RECORD_BYTES:
            return False
        return super().consume_peer_record(envelope, ttl)

    def _enforce_peer_limit(self) -> None:
        """Forget the oldest peers beyond the bound, with their records."""
        over = len(self.peer_data_map) - self.max_peers
        if over <= 0:
            return
        for peer in list(self.peer_data_map):
            if peer != self._own and not self._is_connected(peer):
                del self.peer_data_map[peer]
                self.peer_record_map.pop(peer, None)
                over -= 1
                if not over:
                    return


def _short(protocols: Sequence[str]) -> list[str]:
    return [each for each in protocols if len(each) <= MAX_NEGOTIATION_BYTES]
