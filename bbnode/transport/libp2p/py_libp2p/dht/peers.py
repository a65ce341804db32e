"""Conversions between py-libp2p's peers and addresses and ours."""

from __future__ import annotations

from libp2p.abc import INetStream
from libp2p.peer.id import ID
from multiaddr import Multiaddr

from bbnode.ir.peer import PeerId


def way_of(stream: INetStream) -> Multiaddr:
    way: Multiaddr = stream.muxed_conn.get_transport_addresses()[0]
    return way


def ours(peer: ID) -> PeerId:
    return PeerId.from_bytes(peer.to_bytes())


def theirs(peer: PeerId) -> ID:
    return ID(peer.to_bytes())
