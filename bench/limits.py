"""The transport against its limits: what the cipher, TLS and other libp2ps do on this machine.

Rule: loopback, two processes a contender, all measured in turn within one run and the best of
several each, since whatever else the machine does can only slow one down. 64 MiB one way until the
receiver has said that it has it; round trips of 64 bytes. A contender that is not there gives null,
and `absent` says why.

Metrics:
    bulk_vs_cipher: 64 MiB from an op of one daemon to an op of another, which says that it has it:
        our rate over that at which one core encrypts.
    bulk_vs_tls, bulk_vs_js, bulk_vs_go: 64 MiB in one envelope from transport to transport: our
        rate over that of Python's ssl, of js-libp2p, and of go-libp2p behind p2pd's two sockets.
    rtt_vs_tls, rtt_vs_js, rtt_vs_go: an envelope and its answer, median of the best turn: our time
        over that of theirs.
    envelope_us: what an envelope takes in the engine, as `engine` measures it.
    small_p99_ms_under_bulk: round trips of envelopes while 256 MB are on their way.
    cpu_us_per_rtt, cpu_ms_per_bulk: processor time of both sides, for an envelope and its answer
        and for 64 MiB.
    cipher_mb_s, op_to_op_mb_s, bulk_mb_s, tls_mb_s, js_mb_s, go_mb_s, rtt_us, stream_rtt_us,
        tls_rtt_us, js_rtt_us, go_rtt_us: what the ratios are made of; `stream_rtt_us` is that of a
        stream of another protocol on our connection.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager
from time import perf_counter
from typing import Any

import _daemon_metrics
import _limit_peers
import _processes
import engine
import network
import trio

from bbnode.ir.address import peer_of_address
from bbnode.transport.base import ConnectionOpened, EnvelopeReceived, ProtocolStream
from bbnode.transport.identity import Identity
from bbnode.transport.libp2p.transport import Libp2pTransport

BULK_BYTES = _daemon_metrics.BULK_BYTES
SMALL = network.SMALL
ECHO = "/limit/echo/1"
RUNS = 8
ROUND_TRIPS = 300
ENGINE_RUNS = 40
# Asks the other process for its processor time.
CPU = b"cpu"
LEAST = {
    "bulk_vs_cipher": 0.3,
    "bulk_vs_tls": 0.6,
    "bulk_vs_js": 1.5,
    "bulk_vs_go": 1.2,
}
MOST = {
    "rtt_vs_tls": 3.0,
    "rtt_vs_js": 1.2,
    "envelope_us": 15.0,
    "small_p99_ms_under_bulk": 15.0,
}


def cpu_s() -> float:
    """Processor time of this process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


# -- the other process of ours ----------------------------------------------------------------


async def answer(backend: Libp2pTransport) -> None:
    """Give back small envelopes, and say of large ones that they are here."""
    while True:
        event = await backend.events.receive()
        if isinstance(event, EnvelopeReceived):
            small: Any = b"have it" if len(event.data) > len(SMALL) else event.data
            reply = repr(cpu_s()).encode() if small == CPU else small
            backend.send(event.peer, reply, tag=0)


async def echo(stream: ProtocolStream) -> None:
    """Give back what comes on a stream."""
    while data := await stream.read(len(SMALL)):
        await stream.write(data)


async def serve() -> None:
    """Be the other side until standard input ends."""
    backend = Libp2pTransport(Identity.from_seed(b"d" * 32), listen=[network.LOOPBACK])
    backend.register_protocol(ECHO, echo)
    async with trio.open_nursery() as nursery:
        await nursery.start(backend.run)
        nursery.start_soon(answer, backend)
        print(json.dumps([str(backend.listen_addresses()[0])]), flush=True)
        await trio.to_thread.run_sync(sys.stdin.read)
        nursery.cancel_scope.cancel()


# -- this process -------------------------------------------------------------------------------


class OurSide(network.Ours):
    """A transport that is connected with the other process, and a stream between them."""

    def __init__(self, backend: Libp2pTransport, address: Any, stream: ProtocolStream) -> None:
        super().__init__(backend, address)
        self._stream = stream

    async def stream_rtt_s(self) -> float:
        """Seconds for one round trip on the stream."""
        started = perf_counter()
        await self._stream.write(SMALL)
        await self._stream.read(len(SMALL))
        return perf_counter() - started

    async def both_cpu_s(self) -> float:
        """Processor time of both sides."""
        self._backend.send(self._peer, CPU, tag=0)
        return cpu_s() + float(await self.next_data())


@asynccontextmanager
async def our_side() -> AsyncIterator[OurSide]:
    """Two processes of ours that are connected."""
    async with (
        _processes.process(__file__, "--serve") as (address,),
        trio.open_nursery() as nursery,
    ):
        backend = Libp2pTransport(Identity.from_seed(b"b" * 32), listen=[])
        await nursery.start(backend.run)
        peer = peer_of_address(address)
        backend.keep_connected(peer, [address])
        while not isinstance(await backend.events.receive(), ConnectionOpened):
            pass
        # The other side serves streams once it has our hello too.
        await network.Ours(backend, address).rtt_s()
        async with backend.open_stream(peer, ECHO) as stream:
            yield OurSide(backend, address, stream)
        nursery.cancel_scope.cancel()


async def measure(runs: int) -> dict[str, Any]:
    """All metrics of the module's docstring."""
    others, absent = {"tls": _limit_peers.tls}, {}
    for name, why, there in (
        ("js", _limit_peers.why_no_js(), _limit_peers.js),
        ("go", _limit_peers.why_no_go(), _limit_peers.go),
    ):
        if why:
            absent[name] = why
        else:
            others[name] = there
    with ExitStack() as stack:
        contenders = {name: stack.enter_context(there()) for name, there in others.items()}
        op_to_op = stack.enter_context(_daemon_metrics.op_to_op())
        async with our_side() as ours:
            bulk, rtt = await in_turn(runs, ours, op_to_op, contenders)
            before = await ours.both_cpu_s()
            for _ in range(ROUND_TRIPS):
                await ours.rtt_s()
            between = await ours.both_cpu_s()
            for _ in range(runs):
                await ours.bulk_s()
            bulk_used = (await ours.both_cpu_s() - between) / runs
            under_bulk = sorted(await ours.rtts_under_bulk_s())
    once = engine.envelope_cost()
    rates = {name: BULK_BYTES / seconds / 1e6 for name, seconds in bulk.items()}
    found: dict[str, float | None] = {"bulk_vs_cipher": rates["op_to_op"] / rates["cipher"]}
    for name in ("tls", "js", "go"):
        there = name in contenders
        found[f"bulk_vs_{name}"] = rates["bulk"] / rates[name] if there else None
        found[f"rtt_vs_{name}"] = rtt["rtt"] / rtt[f"{name}_rtt"] if there else None
    found |= {
        "envelope_us": min(once() for _ in range(ENGINE_RUNS)) / engine.NS_PER_US,
        "small_p99_ms_under_bulk": 1e3 * under_bulk[int(len(under_bulk) * 0.99)],
        "cpu_us_per_rtt": (between - before) / ROUND_TRIPS * 1e6,
        "cpu_ms_per_bulk": bulk_used * 1e3,
        **{f"{name}_mb_s": rate for name, rate in rates.items()},
        **{f"{name}_us": seconds * 1e6 for name, seconds in rtt.items()},
    }
    rounded = {name: value and round(value, 3) for name, value in found.items()}
    return {**rounded, "absent": absent}


async def in_turn(
    runs: int,
    ours: OurSide,
    op_to_op: Callable[[], float],
    contenders: dict[str, _limit_peers.Contender],
) -> tuple[dict[str, float], dict[str, float]]:
    """Return the least seconds of a transfer, and of a round trip, by name."""
    bulk: dict[str, list[float]] = {
        name: [] for name in ("bulk", "op_to_op", "cipher", *contenders)
    }
    rtt: dict[str, list[float]] = {
        name: [] for name in ("rtt", "stream_rtt", *(f"{name}_rtt" for name in contenders))
    }
    # What is blocking blocks the loop: ours rests meanwhile. The first turn warms windows and
    # memory.
    for _ in range(1 + runs):
        bulk["bulk"].append(await ours.bulk_s())
        bulk["op_to_op"].append(op_to_op())
        bulk["cipher"].append(_limit_peers.cipher_s(BULK_BYTES))
        rtt["rtt"].append(statistics.median([await ours.rtt_s() for _ in range(ROUND_TRIPS)]))
        streamed = [await ours.stream_rtt_s() for _ in range(ROUND_TRIPS)]
        rtt["stream_rtt"].append(statistics.median(streamed))
        for name, contender in contenders.items():
            bulk[name].append(contender.bulk_s(BULK_BYTES))
            rtt[f"{name}_rtt"].append(statistics.median(contender.round_trips_s(ROUND_TRIPS)))
    return (
        {name: min(seconds[1:]) for name, seconds in bulk.items()},
        {name: min(seconds[1:]) for name, seconds in rtt.items()},
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Print the metrics, as text or (`--json`) as one object of name to number."""
    parser = argparse.ArgumentParser(prog="scripts/bench limits", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--runs", type=int, default=RUNS, metavar="N", help="best of N runs")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.serve:
        trio.run(serve)
        return
    if options.runs < 1:
        parser.error("--runs takes 1 or more")
    found = trio.run(measure, options.runs)
    if options.json:
        print(json.dumps(found))
        return
    absent = found.pop("absent")
    for name, value in found.items():
        bound = f"  (at least {LEAST[name]:g})" if name in LEAST else ""
        bound = f"  (at most {MOST[name]:g})" if name in MOST else bound
        shown = f"{value:>12.3f}" if value is not None else f"{'-':>12}"
        print(f"{name:<26}{shown}{bound}")
    for name, why in absent.items():
        print(f"without {name}: {why}")


if __name__ == "__main__":
    main()
