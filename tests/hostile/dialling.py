"""Strangers that say they are at many places, and vanish: to have a node dial there."""

from __future__ import annotations

import os

import trio
from libp2p.exceptions import BaseLibp2pError
from multiaddr import Multiaddr

from bbnode.ir.address import peer_of_address
from bbnode.ir.envelope import WireEnvelope, encode_envelope
from bbnode.transport.base import Hello
from bbnode.transport.errors import NotConnectedError, QueueFullError
from tests.hostile.stranger import identity_of, liar

# The ports where the test listens, and the hosts of the addresses: the strangers' own and others.
PORTS_VARIABLE = "HOSTILE_PORTS"
HOSTS = ("127.0.0.1", "127.0.0.2")
STRANGERS = 60
AT_ONCE = 6
STAYS_S = 0.2
# A node that takes no more strangers is not waited for.
GIVES_UP_S = 10.0


def claims(seed: int) -> tuple[Multiaddr, ...]:
    """Eight addresses, as many as a hello or an envelope may carry."""
    peer = identity_of(seed).peer_id
    ports = os.environ[PORTS_VARIABLE].split(",")
    return tuple(
        Multiaddr(f"/ip4/{host}/tcp/{port}/p2p/{peer}") for host in HOSTS for port in ports[:4]
    )


async def vanish(address: Multiaddr) -> None:
    """Each comes, claims eight addresses in its hello and in an envelope, and is gone."""
    node = peer_of_address(address)
    limit = trio.CapacityLimiter(AT_ONCE)

    async def one(seed: int) -> None:
        claimed = claims(seed)
        async with limit:
            with trio.move_on_after(GIVES_UP_S):
                try:
                    hello = Hello(listen_addresses=claimed)
                    async with liar(address, seed, hello=hello) as (backend, identity):
                        told = WireEnvelope(
                            fills=(),
                            src_peer_bytes=identity.peer_id.to_bytes(),
                            src_peer_addresses=tuple(bytes(each.to_bytes()) for each in claimed),
                        )
                        try:
                            backend.send(node, b"".join(encode_envelope(told)), tag=0)
                        except (NotConnectedError, QueueFullError):
                            return
                        await trio.sleep(STAYS_S)
                except (BaseLibp2pError, OSError):
                    return

    async with trio.open_nursery() as nursery:
        for number in range(STRANGERS):
            nursery.start_soon(one, 1000 + number)
