"""Hosts of py-libp2p as it comes, with Noise and Yamux alone: strangers to our own muxer."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from libp2p import new_host
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.crypto.x25519 import create_new_key_pair as create_x25519_pair
from libp2p.custom_types import TProtocol
from libp2p.security.noise.transport import PROTOCOL_ID as NOISE_ID
from libp2p.security.noise.transport import Transport as NoiseTransport
from libp2p.stream_muxer.yamux.yamux import PROTOCOL_ID as YAMUX_ID
from libp2p.stream_muxer.yamux.yamux import Yamux
from multiaddr import Multiaddr

from bbnode.transport.libp2p.workarounds import (
    bound_handshakes,
    dial_nobody_unasked,
    drop_resource_manager,
    quiet_logging,
)


def plain_host(seed: bytes) -> Any:
    """A host whose secure session and muxer are libp2p's own."""
    quiet_logging()
    pair = create_new_key_pair(seed)
    host = new_host(
        key_pair=pair,
        sec_opt={NOISE_ID: NoiseTransport(pair, noise_privkey=create_x25519_pair().private_key)},
        muxer_opt={TProtocol(YAMUX_ID): Yamux},
    )
    drop_resource_manager(host)
    dial_nobody_unasked(host)
    bound_handshakes(host)
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
