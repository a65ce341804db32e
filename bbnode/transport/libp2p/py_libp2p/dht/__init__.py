"""py-libp2p's Kademlia DHT, with our checks at its interfaces.

Rule: KadDHT has the routing table, the search and the answers. It gets our host and streams, so
that each message of a peer is read within bounds and checked before KadDHT sees it, and only peers
are dialled that the node would dial. Our stores replace those that it would grow without a bound;
values are not stored at all.
"""
