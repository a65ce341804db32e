"""A relay: what the way through a third process costs, compared with the direct way.

Rule: loopback, three processes (one end, the relay, and the other end with a direct connection
as well), both figures of the ratio measured in turn within one run, the best of several each. A
relayed byte is enciphered twice and passes the system four times, on cores that are shared.

Metrics:
    relay_vs_direct: 64 MiB in one message, until its receiver has said that it has it: the rate
        through the relay over that of a direct connection.
    relay_rtt_vs_direct: a small message and its answer, median: the time through the relay over
        that of a direct connection.
    relay_mb_s, direct_mb_s, relay_rtt_ms, direct_rtt_ms: what the ratios are made of.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from time import perf_counter

import _processes
import trio
from multiaddr import Multiaddr

from bbnode.ir.address import peer_of_address
from bbnode.transport.base import ConnectionOpened, EnvelopeReceived
from bbnode.transport.identity import Identity
from bbnode.transport.libp2p.transport import Libp2pTransport
from bbnode.transport.limits import RelaySettings

LOOPBACK = Multiaddr("/ip4/127.0.0.1/tcp/0")
BULK_BYTES = 64 * 1024 * 1024
SMALL = b"x" * 64
RUNS = 3
ROUND_TRIPS = 200
# Between two looks for a reservation, which is there after some milliseconds.
LOOK_S = 0.005


def dial_only(seed: bytes) -> Libp2pTransport:
    """A node that nobody can dial."""
    return Libp2pTransport(Identity.from_seed(seed * 32), listen=[], relay=RelaySettings(use=True))


async def until_connected(backend: Libp2pTransport, address: Multiaddr) -> None:
    """Dial an address until its peer has said hello."""
    peer = peer_of_address(address)
    backend.keep_connected(peer, [address])
    while True:
        event = await backend.events.receive()
        if isinstance(event, ConnectionOpened) and event.peer == peer:
            return


# -- the other processes -------------------------------------------------------------------


async def relay() -> None:
    """Relay until standard input ends."""
    backend = Libp2pTransport(
        Identity.from_seed(b"r" * 32), listen=[LOOPBACK], relay=RelaySettings(serve=True)
    )
    async with trio.open_nursery() as nursery:
        await nursery.start(backend.run)
        print(json.dumps([str(backend.listen_addresses()[0])]), flush=True)
        await trio.to_thread.run_sync(sys.stdin.read)
        nursery.cancel_scope.cancel()


async def serve(relay_address: Multiaddr) -> None:
    """Be the other end, of both ways, until standard input ends."""
    open_node = Libp2pTransport(Identity.from_seed(b"d" * 32), listen=[LOOPBACK])
    hidden = dial_only(b"h")
    async with trio.open_nursery() as nursery:
        for each in (open_node, hidden):
            await nursery.start(each.run)
        await until_connected(hidden, relay_address)
        while not hidden.listen_addresses():  # noqa: ASYNC110 - a look every few milliseconds
            await trio.sleep(LOOK_S)
        for each in (open_node, hidden):
            nursery.start_soon(answer, each)
        addresses = [each.listen_addresses()[0] for each in (open_node, hidden)]
        print(json.dumps([str(each) for each in addresses]), flush=True)
        await trio.to_thread.run_sync(sys.stdin.read)
        nursery.cancel_scope.cancel()


async def answer(backend: Libp2pTransport) -> None:
    """Give back small envelopes, and say of large ones that they are here."""
    while True:
        event = await backend.events.receive()
        if isinstance(event, EnvelopeReceived):
            small = len(event.data) <= len(SMALL)
            backend.send(event.peer, event.data if small else b"have it", tag=0)


# -- this process --------------------------------------------------------------------------


class Way:
    """A connection with the other end."""

    def __init__(self, backend: Libp2pTransport, address: Multiaddr) -> None:
        self._backend = backend
        self._peer = peer_of_address(address)

    async def seconds(self, data: bytes) -> float:
        """Seconds until the answer to one message."""
        started = perf_counter()
        self._backend.send(self._peer, data, tag=0)
        while not isinstance(await self._backend.events.receive(), EnvelopeReceived):
            pass
        return perf_counter() - started


async def measure(runs: int) -> dict[str, float]:
    """All metrics of the module's docstring."""
    async with (
        _processes.process(__file__, "--relay") as (relay_address,),
        _processes.process(__file__, "--serve", str(relay_address)) as addresses,
        trio.open_nursery() as nursery,
    ):
        ways = []
        for seed, address in zip((b"a", b"b"), addresses, strict=True):
            backend = dial_only(seed)
            await nursery.start(backend.run)
            await until_connected(backend, address)
            ways.append(Way(backend, address))
        data = bytes(BULK_BYTES)
        bulk: list[list[float]] = [[], []]
        small: list[list[float]] = [[], []]
        for _ in range(runs):
            for way, times in zip(ways, bulk, strict=True):
                times.append(await way.seconds(data))
        for _ in range(ROUND_TRIPS):
            for way, times in zip(ways, small, strict=True):
                times.append(await way.seconds(SMALL))
        nursery.cancel_scope.cancel()
    direct_s, relay_s = (min(times) for times in bulk)
    direct_rtt, relay_rtt = (statistics.median(times) for times in small)
    found = {
        "relay_vs_direct": direct_s / relay_s,
        "relay_rtt_vs_direct": relay_rtt / direct_rtt,
        "relay_mb_s": BULK_BYTES / 1e6 / relay_s,
        "direct_mb_s": BULK_BYTES / 1e6 / direct_s,
        "relay_rtt_ms": relay_rtt * 1e3,
        "direct_rtt_ms": direct_rtt * 1e3,
    }
    return {name: round(value, 3) for name, value in found.items()}


def main(argv: Sequence[str] | None = None) -> None:
    """Print the metrics, as text or (`--json`) as one object of name to number."""
    parser = argparse.ArgumentParser(prog="scripts/bench relay", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--runs", type=int, default=RUNS, metavar="N", help="best of N runs")
    parser.add_argument("--relay", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--serve", type=Multiaddr, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.relay:
        trio.run(relay)
        return
    if options.serve:
        trio.run(serve, options.serve)
        return
    if options.runs < 1:
        parser.error("--runs takes 1 or more")
    found = trio.run(measure, options.runs)
    if options.json:
        print(json.dumps(found))
        return
    for name, value in found.items():
        print(f"{name:<28}{value:>10.3f}")


if __name__ == "__main__":
    main()
