"""py-libp2p's Kademlia DHT, with our checks at its seams.

Rule: KadDHT has the routing table, the search and the answers. It gets a host and streams of ours,
so that each message of a peer is read within bounds and checked before KadDHT sees it, and nobody
is dialled whom the node would not dial. What it would keep without a bound is ours; values are not
kept at all.
"""
