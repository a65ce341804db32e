"""Why discovery has no Kademlia: what py-libp2p 0.8.1's does over our host (docs/discovery.md).

Rule: each fact that keeps it out has a test here, that an upgrade of libp2p turns red where it
mends one. What works is tested as well: it is not for want of finding peers.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
import trio
from libp2p.kad_dht.common import BUCKET_SIZE
from libp2p.kad_dht.kad_dht import DHTMode, KadDHT
from libp2p.peer.id import ID
from libp2p.peer.peerinfo import PeerInfo
from libp2p.tools.anyio_service import background_trio_service
from multiaddr import Multiaddr

from bbnode.ir.peer import PeerId
from bbnode.transport.identity import Identity
from bbnode.transport.libp2p.tcp import BoundedTcp
from bbnode.transport.libp2p.workarounds import build_host, quiet_logging, running
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.slow

KEY = "bbnode/network/of-the-test"
LOOPBACK = Multiaddr("/ip4/127.0.0.1/tcp/0")


@asynccontextmanager
async def member() -> AsyncIterator[tuple[Any, KadDHT, PeerInfo]]:
    """A host of ours with a DHT in it, and where it is."""
    quiet_logging()
    host = build_host(
        Identity.generate(), BoundedTcp(), max_connections=64, max_per_peer=4, on_fault=_fault
    )
    dht = KadDHT(host, DHTMode.SERVER)
    async with running(host, [LOOPBACK]), background_trio_service(dht):
        addresses = [a for each in host.get_network().listeners.values() for a in each.get_addrs()]
        yield host, dht, PeerInfo(host.get_id(), addresses)


def _fault() -> None:
    raise AssertionError("a handler of the DHT failed")


async def test_five_hosts_find_each_other_but_it_dials_whom_we_never_asked_it_to() -> None:
    with trio.fail_after(PATIENCE_S):
        async with AsyncExitStack() as stack:
            first, *others = [await stack.enter_async_context(member()) for _ in range(5)]
            host, _, info = first
            for other, dht, _ in others:
                await other.get_network().dial_addr(info.addrs[0], info.peer_id)
                other.get_peerstore().add_addrs(info.peer_id, info.addrs, 3600)
                await dht.routing_table.add_peer(info)
            asked = others[3][0].get_network()
            assert {c.muxed_conn.peer_id for c in asked.get_connections()} == {info.peer_id}
            for _, dht, _ in others[:2]:
                assert await dht.provide(KEY)
            found = {each.peer_id for each in await others[3][1].find_providers(KEY)}
            assert found == {others[0][2].peer_id, others[1][2].peer_id}
            # Behind the back of our dialler, its bounds, its address book and its time-outs.
            connected = {c.muxed_conn.peer_id for c in asked.get_connections()}
            assert len(connected) > 1
            assert host.get_id() in connected


async def test_twenty_strangers_keep_everybody_else_out_of_a_key() -> None:
    async with member() as (_, dht, _):
        store = dht.provider_store
        for i in range(BUCKET_SIZE):
            store.add_provider(b"key", PeerInfo(_id(i), []))
        honest = _id(1000)
        store.add_provider(b"key", PeerInfo(honest, [LOOPBACK]))
        held = {each.peer_id for each in store.get_providers(b"key")}
        assert len(held) == BUCKET_SIZE
        assert honest not in held


async def test_keys_of_providers_have_no_bound() -> None:
    async with member() as (_, dht, _):
        store = dht.provider_store
        for i in range(5000):
            store.add_provider(i.to_bytes(8, "big"), PeerInfo(_id(0), []))
        assert len(store.providers) == 5000


async def test_it_answers_on_the_public_networks_protocol_whatever_its_prefix() -> None:
    host = build_host(
        Identity.generate(), BoundedTcp(), max_connections=8, max_per_peer=4, on_fault=_fault
    )
    KadDHT(host, DHTMode.SERVER, protocol_prefix="/bbnode")
    spoken = [str(each) for each in host.get_mux().get_protocols()]
    assert "/ipfs/kad/1.0.0" in spoken
    assert not any("bbnode" in each for each in spoken)


def _id(i: int) -> ID:
    return ID(PeerId.from_seed(i).to_bytes())
