"""Hosts of py-libp2p as it comes, with Noise and Yamux alone: strangers to our own code.

Its connections are bounded by a resource manager that loses a slot with each cancelled dial, a
failed dial is repeated, and it dials whom it knows: all are off, for whoever tests or attacks with
hundreds of connections.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from libp2p import new_host
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.crypto.x25519 import create_new_key_pair as create_x25519_pair
from libp2p.custom_types import TProtocol
from libp2p.network.config import RetryConfig
from libp2p.peer.id import ID
from libp2p.security.noise.transport import PROTOCOL_ID as NOISE_ID
from libp2p.security.noise.transport import Transport as NoiseTransport
from libp2p.stream_muxer.yamux.yamux import PROTOCOL_ID as YAMUX_ID
from libp2p.stream_muxer.yamux.yamux import Yamux
from multiaddr import Multiaddr

from bbnode.ir.peer import PeerId

# Of an address: `/p2p/…`.
_P2P = 0x01A5

logging.getLogger("libp2p").addHandler(logging.NullHandler())


def plain_host(seed: bytes) -> Any:
    """A host of py-libp2p."""
    pair = create_new_key_pair(seed)
    host = new_host(
        key_pair=pair,
        sec_opt={NOISE_ID: NoiseTransport(pair, noise_privkey=create_x25519_pair().private_key)},
        muxer_opt={TProtocol(YAMUX_ID): Yamux},
    )
    network: Any = host.get_network()
    network.set_resource_manager(None)
    network.retry_config = RetryConfig(max_retries=0)

    async def dial_nobody() -> None:
        return

    network.auto_connector.maybe_connect = dial_nobody
    return host


@asynccontextmanager
async def plain_running(host: Any, listen: list[Multiaddr]) -> AsyncIterator[None]:
    """Run a host, and close the sockets of its connections before it ends."""
    async with host.run(listen_addrs=listen):
        try:
            yield
        finally:
            for connection in host.get_network().get_connections():
                with contextlib.suppress(Exception):
                    await connection.muxed_conn.secured_conn.close()


async def plain_dial(host: Any, address: Multiaddr, peer: PeerId) -> Any:
    """Connect py-libp2p with a peer; returns its connection, raises its SwarmException."""
    if "p2p" in [protocol.name for protocol in address.protocols()]:
        address = address.decapsulate_code(_P2P)
    return await host.get_network().dial_addr(address, ID(peer.to_bytes()))
