"""Other peers that have the artifact, for when the inviting one does not answer.

Rule: the peers of `--via` are asked over the network's DHT for providers of the digest, and for the
current addresses of the inviting peer. None of them is trusted: each is dialled like an inviting
peer, and the file that it sends must have the digest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import trio
from multiaddr import Multiaddr

from bbnode.daemon.build import full_version
from bbnode.daemon.config import RoutingSection
from bbnode.daemon.join.dial import connecting
from bbnode.daemon.join.invitation import NobodyProvides, Source, ViaUnreachable
from bbnode.daemon.network.routing import PeerFinder
from bbnode.ir.address import peer_of_address
from bbnode.ir.caps import MAX_CLAIMED_ADDRESSES
from bbnode.ir.peer import PeerId
from bbnode.transport import Hello, Identity, RelaySettings, Transport, TransportSetup
from bbnode.transport.registry import make_transport
from bbnode.transport.routing import Located, NobodyToAsk, NotFound

# For one of the peers of `--via` to be connected, and to take part in the DHT.
CONNECT_S: Final = 15.0
READY_S: Final = 5.0
_LOOK_EVERY_S: Final = 0.05


async def other_sources(
    identity: Identity, source: Source, sha256: str, credentials: bytes
) -> list[Source]:
    """Return peers that may have the artifact `sha256`, the inviting peer first if it has moved.

    `credentials` are this node's, of a member if the network is private. Raises ViaUnreachable,
    NobodyProvides, Libp2pMissing.
    """
    backend = make_transport(
        "libp2p",
        TransportSetup(
            identity=identity,
            relay=RelaySettings(use=True),
            hello=Hello(agent_version=f"bbnode-join/{full_version()}", credentials=credentials),
        ),
    )
    finder = PeerFinder(
        backend,
        RoutingSection(dht="client"),
        network=source.network,
        authorizer=None,
        on_fault=lambda _peer, _fault: None,
    )
    async with connecting(backend) as nursery:
        nursery.start_soon(finder.run)
        await _meet(backend, source.via)
        moved = await _moved(finder, source)
        providers = await _providers(finder, sha256)
    sources = [
        _source(source, each) for each in (*moved, *providers) if each.peer != identity.peer_id
    ]
    if not sources:
        raise NobodyProvides(
            f"{source.inviter} does not answer, and no peer that was asked knows another one with "
            f'the artifact {sha256[:8]}…: its nodes need routing.dht = "server"'
        )
    return sources


async def _meet(backend: Transport, via: Sequence[Multiaddr]) -> None:
    """Connect with one of the peers of `--via`."""
    by_peer: dict[PeerId, list[Multiaddr]] = {}
    for address in via:
        by_peer.setdefault(peer_of_address(address), []).append(address)
    for peer, addresses in by_peer.items():
        backend.keep_connected(peer, addresses)
    with trio.move_on_after(CONNECT_S):
        while not backend.peers():  # noqa: ASYNC110 - its events are for links that carry messages
            await trio.sleep(_LOOK_EVERY_S)
    if not backend.peers():
        why = "; ".join(f"{each.peer.short}: {each.last_error}" for each in backend.wanted())
        raise ViaUnreachable(
            f"none of the peers to ask (--via) lets this one in: {why or 'no answer'}; give another"
        )


async def _moved(finder: PeerFinder, source: Source) -> list[Located]:
    """Return the current addresses of the inviting peer of a ticket, if they are known."""
    if source.ticket is None:
        return []
    try:
        return [await finder.locate(source.inviter)]
    except NotFound:
        return []


async def _providers(finder: PeerFinder, sha256: str) -> list[Located]:
    with trio.move_on_after(READY_S):
        while True:
            try:
                return await finder.find_providers(bytes.fromhex(sha256))
            except NobodyToAsk:
                # The connection is new: py-libp2p may not have it yet.
                await trio.sleep(_LOOK_EVERY_S)
            except NotFound:
                break
    return []


def _source(source: Source, located: Located) -> Source:
    ways = [Multiaddr(f"{way}/p2p/{located.peer}") for way in located.addresses]
    return replace(source, inviter=located.peer, addresses=tuple(ways[:MAX_CLAIMED_ADDRESSES]))
