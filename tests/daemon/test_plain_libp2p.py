"""A node as any host of libp2p: an unpatched py-libp2p uses its services, on its one port."""

from __future__ import annotations

import contextlib

import pytest
import trio
from libp2p.host.ping import PingService
from libp2p.kad_dht.kad_dht import DHTMode, KadDHT
from libp2p.peer.peerinfo import PeerInfo
from libp2p.pubsub.gossipsub import GossipSub
from libp2p.pubsub.pubsub import Pubsub
from libp2p.tools.anyio_service import background_trio_service
from multiaddr import Multiaddr

import bbnode
from bbnode.transport.libp2p.transport import Libp2pTransport
from tests.api.programs import Batches
from tests.daemon import inviting
from tests.patience import PATIENCE_S
from tests.transport.plain import plain_host, plain_running


def gossip() -> GossipSub:
    return GossipSub(
        protocols=["/meshsub/1.1.0"],
        degree=3,
        degree_low=1,
        degree_high=4,
        heartbeat_interval=0.1,
        heartbeat_initial_delay=0.1,
    )


async def test_an_unpatched_py_libp2p_uses_a_node_as_any_host():
    plain = plain_host(b"p" * 32)
    async with contextlib.AsyncExitStack() as stack:
        stack.enter_context(trio.fail_after(2 * PATIENCE_S))
        node = await stack.enter_async_context(bbnode.on_trio.open(Batches, transport="libp2p"))
        ours = node.libp2p_host
        await stack.enter_async_context(plain_running(plain, []))
        routers = [gossip(), gossip()]
        pubsubs = [Pubsub(ours, routers[0]), Pubsub(plain, routers[1])]
        dhts = [KadDHT(ours, DHTMode.SERVER), KadDHT(plain, DHTMode.SERVER)]
        for service in (dhts[0], pubsubs[0], routers[0]):
            await ours.start_service(service)
        for service in (dhts[1], pubsubs[1], routers[1]):
            await stack.enter_async_context(background_trio_service(service))
        await plain.connect(
            PeerInfo(ours.get_id(), [Multiaddr(node.addresses[0]).decapsulate_code(0x01A5)])
        )
        assert await PingService(plain).ping(ours.get_id(), ping_amt=3)
        await dhts[1].add_peer(ours.get_id())
        await dhts[1].put_value("/here", b"found")
        assert await dhts[0].get_value("/here") == b"found"
        there = await pubsubs[0].subscribe("news")
        await pubsubs[1].subscribe("news")
        while True:
            await pubsubs[1].publish("news", b"news")
            with trio.move_on_after(0.2):
                assert (await there.get()).data == b"news"
                break
        await plain.disconnect(ours.get_id())


@pytest.mark.parametrize(
    ("private", "flags", "stay"),
    [
        (False, {}, True),
        (True, {}, False),
        (False, {"network.guests": False}, False),
        (True, {"network.guests": True}, True),
    ],
)
def test_guests_stay_in_open_networks_unless_the_file_says_otherwise(
    tmp_path, private, flags, stay
):
    node = inviting.make(tmp_path / "node", private=private, **flags)
    assert isinstance(node.backend, Libp2pTransport)
    assert node.backend._limits.foreign_hosts == stay
