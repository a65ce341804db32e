"""One side of a large transfer in a process of its own; prints how much memory it took.

Run as `large_peer.py receive BYTES` or `large_peer.py send BYTES ADDRESS`.
"""

from __future__ import annotations

import json
import random
import resource
import sys

import trio
from multiaddr import Multiaddr

from bbnode.ir.address import peer_of_address
from bbnode.transport.base import ConnectionOpened, EnvelopeReceived
from bbnode.transport.identity import Identity
from bbnode.transport.libp2p.transport import Libp2pTransport

LOOPBACK = Multiaddr("/ip4/127.0.0.1/tcp/0")
BLOCK = random.Random(1).randbytes(2**20)


def peak_bytes() -> int:
    """The most memory that this process ever had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


async def receive(size: int) -> None:
    backend = Libp2pTransport(Identity.from_seed(b"r" * 32), listen=[LOOPBACK])
    async with trio.open_nursery() as nursery:
        await nursery.start(backend.run)
        print(backend.listen_addresses()[0], flush=True)
        before = peak_bytes()
        while not isinstance(event := await backend.events.receive(), EnvelopeReceived):
            pass
        took = peak_bytes() - before
        right = len(event.data) == size and all(
            event.data[at : at + len(BLOCK)] == BLOCK for at in range(0, size, len(BLOCK))
        )
        backend.send(event.peer, b"have it", tag=1)
        print(json.dumps({"took": took, "right": right}), flush=True)
        await backend.stop(5)


async def send(size: int, address: Multiaddr) -> None:
    backend = Libp2pTransport(Identity.from_seed(b"s" * 32), listen=[])
    data = BLOCK * (size // len(BLOCK))
    async with trio.open_nursery() as nursery:
        await nursery.start(backend.run)
        peer = peer_of_address(address)
        backend.keep_connected(peer, [address])
        while not isinstance(await backend.events.receive(), ConnectionOpened):
            pass
        before = peak_bytes()
        backend.send(peer, data, tag=1)
        while not isinstance(await backend.events.receive(), EnvelopeReceived):
            pass
        print(json.dumps({"took": peak_bytes() - before, "right": True}), flush=True)
        await backend.stop(5)


if __name__ == "__main__":
    if sys.argv[1] == "receive":
        trio.run(receive, int(sys.argv[2]))
    else:
        trio.run(send, int(sys.argv[2]), Multiaddr(sys.argv[3]))
