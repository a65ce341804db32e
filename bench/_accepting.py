"""The processor time of a connection at the side that accepts it, on each transport.

Rule: a process that serves and one that dials, with another identity each time, to the peer's hello
and what follows by itself. What is counted is the server's, as the system counts it.
"""

from __future__ import annotations

import json
import os
import statistics
import sys

import _daemon_metrics
import _processes
import trio
from multiaddr import Multiaddr

from bbnode.ir.address import peer_of_address
from bbnode.transport.base import ConnectionOpened
from bbnode.transport.identity import Identity
from bbnode.transport.libp2p.transport import Libp2pTransport

LOOPBACK = Multiaddr("/ip4/127.0.0.1/tcp/0")
CONNECTIONS = 100
# What follows a connection by itself is over.
SETTLE_S = 1.0


async def serve(transport: str) -> None:
    """Accept connections until standard input ends."""
    backend = made(transport, [LOOPBACK])
    async with trio.open_nursery() as nursery:
        await nursery.start(backend.run)
        nursery.start_soon(drain, backend)
        # The process's number, as an address.
        number = f"/ip4/127.0.0.1/tcp/{os.getpid() % 65536}/tcp/{os.getpid() // 65536}"
        print(json.dumps([str(backend.listen_addresses()[0]), number]), flush=True)
        await trio.to_thread.run_sync(sys.stdin.read)
        nursery.cancel_scope.cancel()


def made(transport: str, listen: list[Multiaddr]) -> Libp2pTransport:
    """A transport of either name."""
    return Libp2pTransport(Identity.generate(), listen=listen, py_libp2p=transport == "libp2p")


async def drain(backend: Libp2pTransport) -> None:
    """Take what comes."""
    while True:
        await backend.events.receive()


async def cpu_ms(transport: str) -> float:
    """Milliseconds of the server for one connection."""
    async with _processes.process(__file__, transport) as (address, number):
        parts = [int(part) for part in str(number).split("/") if part.isdigit()]
        pid = parts[0] + 65536 * parts[1]
        async with trio.open_nursery() as nursery:
            await connect(nursery, address)
            await trio.sleep(SETTLE_S)
            before = _daemon_metrics.cpu_s(pid)
            for _ in range(CONNECTIONS):
                await connect(nursery, address)
            await trio.sleep(SETTLE_S)
            spent = _daemon_metrics.cpu_s(pid) - before
            nursery.cancel_scope.cancel()
    return 1e3 * spent / CONNECTIONS


async def connect(nursery: trio.Nursery, address: Multiaddr) -> None:
    """Connect one more node."""
    backend = made("lean", [])
    await nursery.start(backend.run)
    backend.keep_connected(peer_of_address(address), [address])
    while not isinstance(await backend.events.receive(), ConnectionOpened):
        pass


async def measure(turns: int) -> dict[str, float]:
    """accept_cpu_ms, lean_accept_cpu_ms and accept_cpu_vs_lean, medians of turns."""
    ours, lean = [], []
    for _ in range(turns):
        lean.append(await cpu_ms("lean"))
        ours.append(await cpu_ms("libp2p"))
    return {
        "accept_cpu_vs_lean": statistics.median(a / b for a, b in zip(ours, lean, strict=True)),
        "accept_cpu_ms": statistics.median(ours),
        "lean_accept_cpu_ms": statistics.median(lean),
    }


if __name__ == "__main__":
    trio.run(serve, sys.argv[1])
