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
    bulk_vs_lean, rtt_vs_lean, stream_rtt_vs_lean: the transport libp2p against lean, which is the
        same without py-libp2p: its rate, and its times, over lean's. Medians of pairs.
    cpu_us_per_rtt, cpu_ms_per_bulk: processor time of both sides, for an envelope and its answer
        and for 64 MiB.
    lean_cpu_us_per_rtt, lean_cpu_ms_per_bulk: the same of lean.
    cipher_mb_s, op_to_op_mb_s, bulk_mb_s, lean_bulk_mb_s, tls_mb_s, js_mb_s, go_mb_s, rtt_us,
        lean_rtt_us, stream_rtt_us, lean_stream_rtt_us, tls_rtt_us, js_rtt_us, go_rtt_us: what the
        ratios are made of; `stream_rtt_us` is that of a stream of another protocol.
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

import _accepting
import _daemon_metrics
import _limit_peers
import _processes
import engine
import network
import trio

from bbnode.ir.address import peer_of_address
from bbnode.transport.base import ConnectionOpened, EnvelopeReceived, ProtocolStream
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
    "bulk_vs_lean": 0.95,
}
MOST = {
    "rtt_vs_tls": 3.0,
    "rtt_vs_js": 1.2,
    "rtt_vs_lean": 1 / 0.95,
    "stream_rtt_vs_lean": 1 / 0.95,
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


async def serve(transport: str) -> None:
    """Be the other side until standard input ends."""
    backend = _accepting.made(transport, [network.LOOPBACK])
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
async def our_side(transport: str) -> AsyncIterator[OurSide]:
    """Two processes of ours that are connected over a transport."""
    async with (
        _processes.process(__file__, "--serve", transport) as (address,),
        trio.open_nursery() as nursery,
    ):
        backend = _accepting.made(transport, [])
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
        async with our_side("libp2p") as ours, our_side("lean") as lean:
            bulk, rtt, vs_lean = await in_turn(runs, ours, lean, op_to_op, contenders)
            used = {"": await used_by(ours, runs), "lean_": await used_by(lean, runs)}
            under_bulk = sorted(await ours.rtts_under_bulk_s())
    once = engine.envelope_cost()
    rates = {name: BULK_BYTES / seconds / 1e6 for name, seconds in bulk.items()}
    found: dict[str, float | None] = {"bulk_vs_cipher": rates["op_to_op"] / rates["cipher"]}
    for name in ("tls", "js", "go"):
        there = name in contenders
        found[f"bulk_vs_{name}"] = rates["bulk"] / rates[name] if there else None
        found[f"rtt_vs_{name}"] = rtt["rtt"] / rtt[f"{name}_rtt"] if there else None
    found |= vs_lean
    found |= {
        "envelope_us": min(once() for _ in range(ENGINE_RUNS)) / engine.NS_PER_US,
        "small_p99_ms_under_bulk": 1e3 * under_bulk[int(len(under_bulk) * 0.99)],
        **{f"{of}cpu_us_per_rtt": rtt_s * 1e6 for of, (rtt_s, _) in used.items()},
        **{f"{of}cpu_ms_per_bulk": bulk_s * 1e3 for of, (_, bulk_s) in used.items()},
        **{f"{name}_mb_s": rate for name, rate in rates.items()},
        **{f"{name}_us": seconds * 1e6 for name, seconds in rtt.items()},
    }
    rounded = {name: value and round(value, 3) for name, value in found.items()}
    return {**rounded, "absent": absent}


async def used_by(side: OurSide, runs: int) -> tuple[float, float]:
    """Processor seconds of both ends, for a round trip and for a transfer."""
    before = await side.both_cpu_s()
    for _ in range(ROUND_TRIPS):
        await side.rtt_s()
    between = await side.both_cpu_s()
    for _ in range(runs):
        await side.bulk_s()
    after = await side.both_cpu_s()
    return (between - before) / ROUND_TRIPS, (after - between) / runs


async def in_turn(
    runs: int,
    ours: OurSide,
    lean: OurSide,
    op_to_op: Callable[[], float],
    contenders: dict[str, _limit_peers.Contender],
) -> tuple[dict[str, float], dict[str, float], dict[str, float]]:
    """Return the least seconds of a transfer, and of a round trip, by name; and `…_vs_lean`."""
    bulk: dict[str, list[float]] = {
        name: [] for name in ("bulk", "lean_bulk", "op_to_op", "cipher", *contenders)
    }
    rtt: dict[str, list[float]] = {
        name: []
        for name in (
            *("rtt", "stream_rtt", "lean_rtt", "lean_stream_rtt"),
            *(f"{name}_rtt" for name in contenders),
        )
    }
    # What is blocking blocks the loop: ours rests meanwhile. The first turn warms windows and
    # memory.
    for _ in range(1 + runs):
        for of, side in (("", ours), ("lean_", lean)):
            bulk[f"{of}bulk"].append(await side.bulk_s())
            trips = [await side.rtt_s() for _ in range(ROUND_TRIPS)]
            rtt[f"{of}rtt"].append(statistics.median(trips))
            streamed = [await side.stream_rtt_s() for _ in range(ROUND_TRIPS)]
            rtt[f"{of}stream_rtt"].append(statistics.median(streamed))
        bulk["op_to_op"].append(op_to_op())
        bulk["cipher"].append(_limit_peers.cipher_s(BULK_BYTES))
        for name, contender in contenders.items():
            bulk[name].append(contender.bulk_s(BULK_BYTES))
            rtt[f"{name}_rtt"].append(statistics.median(contender.round_trips_s(ROUND_TRIPS)))
    pairs = {
        "bulk_vs_lean": zip(bulk["lean_bulk"], bulk["bulk"], strict=True),
        "rtt_vs_lean": zip(rtt["rtt"], rtt["lean_rtt"], strict=True),
        "stream_rtt_vs_lean": zip(rtt["stream_rtt"], rtt["lean_stream_rtt"], strict=True),
    }
    return (
        {name: min(seconds[1:]) for name, seconds in bulk.items()},
        {name: min(seconds[1:]) for name, seconds in rtt.items()},
        {name: statistics.median(a / b for a, b in list(each)[1:]) for name, each in pairs.items()},
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Print the metrics, as text or (`--json`) as one object of name to number."""
    parser = argparse.ArgumentParser(prog="scripts/bench limits", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--runs", type=int, default=RUNS, metavar="N", help="best of N runs")
    parser.add_argument("--serve", metavar="TRANSPORT", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.serve:
        trio.run(serve, options.serve)
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
