"""Peer records: addresses with a sequence number, signed by the peer that they belong to.

Rule: a record counts only for the peer whose key has signed it, and never replaces a newer one. Its
addresses are hints like any others: only those are kept that the forwarding peer may make us dial.
"""

from __future__ import annotations

from typing import Final

from libp2p.peer.envelope import Envelope, consume_envelope
from libp2p.peer.id import ID
from multiaddr import Multiaddr

from bbnode.ir.address import named_peer
from bbnode.ir.caps import MAX_KNOWN_ADDRESSES, MAX_PEER_RECORD_BYTES
from bbnode.ir.errors import DecodeError, PeerError
from bbnode.ir.peer import PeerId
from bbnode.transport.hints import dialable
from bbnode.transport.libp2p.py_libp2p.peerstore import BoundedPeerStore
from bbnode.transport.libp2p.py_libp2p.swarm import without_peer

_DOMAIN: Final = "libp2p-peer-record"
# Time to live of a record's addresses.
RECORD_TTL_S: Final = 2 * 3600


class RecordForged(PeerError):
    """A record is not what its peer has signed."""


class RecordStale(PeerError):
    """A newer record of the same peer is known."""


class SignedAddresses:
    """Stores the addresses of signed records."""

    def __init__(self, store: BoundedPeerStore) -> None:
        """Create it for a store, which holds the newest record of each peer."""
        self._store = store

    def take(self, raw: bytes, peer: ID, seen: Multiaddr) -> None:
        """Store a record of `peer`, forwarded by a peer at `seen`.

        Raises RecordForged, RecordStale.
        """
        if len(raw) > MAX_PEER_RECORD_BYTES:
            raise RecordForged(f"a record of {len(raw)} bytes")
        known = self._store.peer_record_map.get(peer)
        if known is not None and known.envelope.marshal_envelope() == raw:
            envelope = known.envelope
        else:
            envelope = _opened(raw, peer)
        if not self._store.consume_peer_record(envelope, RECORD_TTL_S):
            raise RecordStale(f"a newer record of {peer} is known")
        # The store would otherwise forget the record when its addresses expire.
        self._store.peer_data_map[peer].clear_addrs()
        claimed = envelope.record().addrs[:MAX_KNOWN_ADDRESSES]
        addresses = dialable(map(without_peer, claimed), seen=seen, good=True)
        self._store.add_addrs(peer, addresses, RECORD_TTL_S)


def _opened(raw: bytes, peer: ID) -> Envelope:
    """Return an envelope that `peer` has signed about itself; raises RecordForged."""
    try:
        envelope, record = consume_envelope(raw, _DOMAIN)
        signer = ID.from_pubkey(envelope.public_key)
    except Exception as error:  # the parsers of an envelope raise many types
        raise RecordForged(f"its record is not sound: {error!r}") from error
    if not record.peer_id == signer == peer:
        raise RecordForged(f"a record of {record.peer_id} stands for one of {peer}")
    ours = PeerId.from_bytes(peer.to_bytes())
    try:
        if any(named_peer(each) not in (None, ours) for each in record.addrs[:MAX_KNOWN_ADDRESSES]):
            raise RecordForged(f"{peer} has signed an address of another peer")
    except DecodeError as error:
        raise RecordForged(f"{peer} has signed what is no address") from error
    return envelope
