"""The network: what bbnode adds to a bare py-libp2p stream between two processes.

Rule: loopback, two processes, both figures of a ratio measured in turn within one run, the best
of several each, since whatever else the machine does can only slow one down. The bare stream is
a default py-libp2p host restricted to Noise and Yamux, written in its best size and read to
nowhere; ours is an envelope through the queue of one transport to the inbox of the other.

What takes a whole node is noisier, and its best against the bare stream's best is mostly luck:
there the ratio is taken of each pair of transfers that follow each other, and the median of those
counts. All processes of both sides are there all the time, and one side rests while the other
moves.

Metrics:
    bulk_vs_bare_stream: 64 MiB in one message, until its receiver has said that it has it: our
        rate over that of a bare stream.
    rtt_vs_bare_stream: a small message and its answer, median: our time over that of a bare
        stream that is open already.
    small_p99_ms_under_bulk: the same round trip while 256 MB are on their way, 99th percentile.
    bulk_vs_lean, rtt_vs_lean: the transport libp2p against lean, which is the same without
        py-libp2p: its rate, and its time, over lean's; the rate is the median of pairs.
    accept_cpu_vs_lean: the processor time of a connection that is accepted, over lean's.
    bulk_mb_s, bare_mb_s, lean_bulk_mb_s, rtt_ms, bare_rtt_ms, lean_rtt_ms, accept_cpu_ms,
        lean_accept_cpu_ms: what the ratios are made of.
    round_overhead_ms_40kb: a federated round of four clients that do nothing, 40 KB of weights.
    round_40mb_vs_bare: such a round with 40 MB: its time over that of the same bytes on bare
        streams, to four processes at once and back.
    bulk_op_to_op_vs_bare: a 64 MiB tensor from an op of one daemon to an op of another, from the
        command that starts it to the answer of the other's op at whoever gave it: its rate over
        that of a bare stream between two processes. Median of pairs.
    bulk_op_to_op_s, bulk_op_to_op_bare_s: the medians of what that ratio is made of.
    round_40mb_s, bare_40mb_s: what that ratio is made of.
    ready_s, lean_ready_s: from `bbnode run` to ready, the best of three, on each transport.
    idle_rss_mb, idle_cpu_percent, lean_idle_rss_mb, lean_idle_cpu_percent: a server with four
        connected clients and nothing to do.
"""

from __future__ import annotations

import argparse
import json
import logging
import secrets
import statistics
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from time import perf_counter
from typing import Any

import _accepting
import _daemon_metrics
import _processes
import trio
from libp2p import new_host
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.crypto.x25519 import create_new_key_pair as create_x25519_pair
from libp2p.custom_types import TProtocol
from libp2p.peer.id import ID
from libp2p.security.noise.transport import PROTOCOL_ID as NOISE_ID
from libp2p.security.noise.transport import Transport as NoiseTransport
from libp2p.stream_muxer.yamux.yamux import PROTOCOL_ID as YAMUX_ID
from libp2p.stream_muxer.yamux.yamux import Yamux
from multiaddr import Multiaddr

from bbnode.ir.address import peer_of_address
from bbnode.transport.base import ConnectionOpened, EnvelopeReceived
from bbnode.transport.libp2p.transport import Libp2pTransport

LOOPBACK = Multiaddr("/ip4/127.0.0.1/tcp/0")
BULK_BYTES = _daemon_metrics.BULK_BYTES
BACKGROUND_BYTES = 256_000_000
# The best write size that was found for a bare stream, and all that a read returns at most.
BARE_WRITE_BYTES = 4 * 65_524
BARE_READ_BYTES = 65_536
SMALL = b"x" * 64
RUNS = 5
# A machine that does other things too takes more pairs for a median than a best takes runs.
PAIRS_A_RUN = 3
ROUND_TRIPS = 300
# Between two small messages under bulk: many in flight would stand behind each other.
PAUSE_S = 0.005
BULK_PROTOCOL = TProtocol("/bench/bulk")
ECHO_PROTOCOL = TProtocol("/bench/echo")
BACK_PROTOCOL = TProtocol("/bench/back")
# What issue and design promise: at least, at most.
LEAST = {"bulk_vs_bare_stream": 0.9, "bulk_op_to_op_vs_bare": 0.9, "bulk_vs_lean": 0.95}
MOST = {
    "rtt_vs_bare_stream": 1.5,
    "small_p99_ms_under_bulk": 15.0,
    "round_overhead_ms_40kb": 3.0,
    "round_40mb_vs_bare": 1.3,
    "rtt_vs_lean": 1 / 0.95,
    "accept_cpu_vs_lean": 1.5,
    "ready_s": 1.0,
    "lean_ready_s": 0.6,
    "idle_rss_mb": 140.0,
    "lean_idle_rss_mb": 100.0,
    "idle_cpu_percent": 1.0,
    "lean_idle_cpu_percent": 1.0,
}


def bare_host(seed: bytes) -> Any:
    """py-libp2p as it comes, with the security and the muxer that we have too."""
    pair = create_new_key_pair(seed)
    return new_host(
        key_pair=pair,
        sec_opt={NOISE_ID: NoiseTransport(pair, noise_privkey=create_x25519_pair().private_key)},
        muxer_opt={TProtocol(YAMUX_ID): Yamux},
    )


# -- the other process ---------------------------------------------------------------------


async def swallow(stream: Any) -> None:
    """Read bare bulk transfers, each of which is answered with one byte."""
    left = BULK_BYTES
    while data := await stream.read(BARE_READ_BYTES):
        left -= len(data)
        if left <= 0:
            left += BULK_BYTES
            await stream.write(b".")


async def echo(stream: Any) -> None:
    """Give back what comes."""
    while data := await stream.read(BARE_READ_BYTES):
        await stream.write(data)


async def send_back(stream: Any) -> None:
    """Give back 40 MB for each 40 MB that came."""
    await _daemon_metrics.send_back(stream, BARE_READ_BYTES, BARE_WRITE_BYTES)


async def answer(backend: Libp2pTransport) -> None:
    """Give back small envelopes, and say of large ones that they are here."""
    while True:
        event = await backend.events.receive()
        if isinstance(event, EnvelopeReceived):
            small = len(event.data) <= len(SMALL)
            backend.send(event.peer, event.data if small else b"have it", tag=0)


async def serve() -> None:
    """Be the other side until standard input ends."""
    # Not the same in all processes, or the connection with one would be taken for all.
    host = bare_host(secrets.token_bytes(32))
    host.set_stream_handler(BULK_PROTOCOL, swallow)
    host.set_stream_handler(ECHO_PROTOCOL, echo)
    host.set_stream_handler(BACK_PROTOCOL, send_back)
    both = [_accepting.made(name, [LOOPBACK]) for name in ("libp2p", "lean")]
    async with host.run(listen_addrs=[LOOPBACK]), trio.open_nursery() as nursery:
        for backend in both:
            await nursery.start(backend.run)
            nursery.start_soon(answer, backend)
        addresses = [str(host.get_addrs()[0]), *(str(b.listen_addresses()[0]) for b in both)]
        print(json.dumps(addresses), flush=True)
        await trio.to_thread.run_sync(sys.stdin.read)
        nursery.cancel_scope.cancel()


# -- this process --------------------------------------------------------------------------


class Bare:
    """Two bare streams to the other process."""

    def __init__(self, bulk: Any, echoing: Any) -> None:
        self._bulk = bulk
        self._echo = echoing
        self._data = bytes(BARE_WRITE_BYTES)

    async def bulk_s(self) -> float:
        """Seconds for one bulk transfer, until its receiver has said that it has it."""
        started = perf_counter()
        left = BULK_BYTES
        while left > 0:
            await self._bulk.write(self._data[: min(left, BARE_WRITE_BYTES)])
            left -= BARE_WRITE_BYTES
        await self._bulk.read(1)
        return perf_counter() - started

    async def rtt_s(self) -> float:
        """Seconds for one round trip."""
        started = perf_counter()
        await self._echo.write(SMALL)
        await self._echo.read(len(SMALL))
        return perf_counter() - started


class Ours:
    """A transport that is connected with the other process."""

    def __init__(self, backend: Libp2pTransport, address: Multiaddr) -> None:
        self._backend = backend
        self._peer = peer_of_address(address)
        self._data = bytes(BULK_BYTES)
        self._background = bytes(BACKGROUND_BYTES)

    async def next_data(self) -> bytes:
        """The next envelope that comes."""
        while True:
            event = await self._backend.events.receive()
            if isinstance(event, EnvelopeReceived):
                return bytes(event.data)

    async def bulk_s(self) -> float:
        """Seconds for one bulk transfer, until its receiver has said that it has it."""
        started = perf_counter()
        self._backend.send(self._peer, self._data, tag=0)
        await self.next_data()
        return perf_counter() - started

    async def rtt_s(self) -> float:
        """Seconds for one round trip."""
        started = perf_counter()
        self._backend.send(self._peer, SMALL, tag=0)
        await self.next_data()
        return perf_counter() - started

    async def rtts_under_bulk_s(self) -> list[float]:
        """Seconds of the round trips that fit beside one large transfer."""
        self._backend.send(self._peer, self._background, tag=0)
        times = []
        while True:
            started = perf_counter()
            self._backend.send(self._peer, SMALL, tag=0)
            data = await self.next_data()
            if data != SMALL:
                await self.next_data()
                return times
            times.append(perf_counter() - started)
            await trio.sleep(PAUSE_S)


async def open_bare(host: Any, address: Multiaddr, protocol: TProtocol) -> Any:
    """A bare stream to a process, on the connection with it if there is one."""
    peer = ID.from_base58(address.value_for_protocol("p2p"))
    if not host.get_network().connections.get(peer):
        await host.get_network().dial_addr(address.decapsulate_code(0x01A5), peer)
    return await host.new_stream(peer, [protocol])


@asynccontextmanager
async def all_sides() -> AsyncIterator[tuple[Bare, Ours, Ours, list[Any]]]:
    """Connections of all kinds with another process, and a bare stream to each of four."""
    async with AsyncExitStack() as stack:
        found = [
            await stack.enter_async_context(_processes.process(__file__, "--serve"))
            for _ in range(_daemon_metrics.CLIENTS)
        ]
        bare_address, *our_addresses = found[0]
        host = bare_host(b"a" * 32)
        async with host.run(listen_addrs=[]), trio.open_nursery() as nursery:
            streams = [
                await open_bare(host, bare_address, p) for p in (BULK_PROTOCOL, ECHO_PROTOCOL)
            ]
            back = [await open_bare(host, bare, BACK_PROTOCOL) for bare, *_ in found]
            sides = []
            for name, address in zip(("libp2p", "lean"), our_addresses, strict=True):
                backend = _accepting.made(name, [])
                await nursery.start(backend.run)
                sides.append(Ours(backend, address))
                backend.keep_connected(peer_of_address(address), [address])
                while not isinstance(await backend.events.receive(), ConnectionOpened):
                    pass
            ours, lean = sides
            yield Bare(*streams), ours, lean, back
            nursery.cancel_scope.cancel()


async def measure(runs: int) -> dict[str, float]:
    """All metrics of the module's docstring."""
    async with all_sides() as (bare, ours, lean, back):
        # Yamux's windows grow with use: all streams have to be warm.
        for side in (bare, ours, lean):
            await side.bulk_s()
        bare_s, lean_s, vs_lean = float("inf"), list[float](), list[float]()
        our_s = list[float]()
        for _ in range(runs):
            bare_s = min(bare_s, await bare.bulk_s())
            for _ in range(PAIRS_A_RUN):
                our_s.append(await ours.bulk_s())
                lean_s.append(await lean.bulk_s())
                vs_lean.append(lean_s[-1] / our_s[-1])
        bare_rtt, our_rtt = await round_trips((bare, ours), runs * ROUND_TRIPS)
        lean_rtt, beside_lean = await round_trips((lean, ours), runs * ROUND_TRIPS)
        under_bulk = sorted(await ours.rtts_under_bulk_s())
        back_s = float("inf")
        for _ in range(runs):
            took_s = await _daemon_metrics.there_and_back_s(back, BARE_READ_BYTES, BARE_WRITE_BYTES)
            back_s = min(back_s, took_s)
        op_to_op = await op_to_op_in_turn(bare, runs * PAIRS_A_RUN)
    accepting = await _accepting.measure(runs)
    megabytes = BULK_BYTES / 1e6
    daemons = await trio.to_thread.run_sync(_daemon_metrics.measure, back_s)
    found = {
        "bulk_vs_bare_stream": bare_s / min(our_s),
        "rtt_vs_bare_stream": our_rtt / bare_rtt,
        "small_p99_ms_under_bulk": 1e3 * under_bulk[int(len(under_bulk) * 0.99)],
        "bulk_vs_lean": statistics.median(vs_lean),
        "rtt_vs_lean": beside_lean / lean_rtt,
        **accepting,
        "lean_bulk_mb_s": megabytes / min(lean_s),
        "lean_rtt_ms": lean_rtt * 1e3,
        "bulk_mb_s": megabytes / min(our_s),
        "bare_mb_s": megabytes / bare_s,
        "rtt_ms": our_rtt * 1e3,
        "bare_rtt_ms": bare_rtt * 1e3,
        **op_to_op,
        **daemons,
    }
    return {name: round(value, 3) for name, value in found.items()}


async def round_trips(sides: Sequence[Bare | Ours], count: int) -> list[float]:
    """The medians of round trips that are made in turn; who is first changes."""
    took: list[list[float]] = [[] for _ in sides]
    for turn in range(count):
        # What a side leaves behind is paid by the next one.
        order = list(zip(sides, took, strict=True))[:: 1 if turn % 2 else -1]
        for side, seconds in order:
            seconds.append(await side.rtt_s())
    return [statistics.median(seconds) for seconds in took]


async def op_to_op_in_turn(bare: Bare, pairs: int) -> dict[str, float]:
    """What a tensor takes between two daemons, each time after as much on the bare stream."""
    bare_s, ours_s = [], []
    with _daemon_metrics.op_to_op() as once:
        for _ in range(_daemon_metrics.WARM_UP):
            await trio.to_thread.run_sync(once)
        for _ in range(pairs):
            bare_s.append(await bare.bulk_s())
            ours_s.append(await trio.to_thread.run_sync(once))
    ratios = [bare / ours for bare, ours in zip(bare_s, ours_s, strict=True)]
    return {
        "bulk_op_to_op_vs_bare": statistics.median(ratios),
        "bulk_op_to_op_s": statistics.median(ours_s),
        "bulk_op_to_op_bare_s": statistics.median(bare_s),
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Print the metrics, as text or (`--json`) as one object of name to number."""
    parser = argparse.ArgumentParser(prog="scripts/bench network", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--runs", type=int, default=RUNS, metavar="N", help="best of N runs")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    logging.getLogger("libp2p").addHandler(logging.NullHandler())
    if options.serve:
        trio.run(serve)
        return
    if options.runs < 1:
        parser.error("--runs takes 1 or more")
    found = trio.run(measure, options.runs)
    if options.json:
        print(json.dumps(found))
        return
    for name, value in found.items():
        bound = f"  (at least {LEAST[name]:g})" if name in LEAST else ""
        bound = f"  (at most {MOST[name]:g})" if name in MOST else bound
        print(f"{name:<28}{value:>10.3f}{bound}")


if __name__ == "__main__":
    main()
