"""Aggregators: time beside numpy's and BLAS's own, and memory beside one contribution.

Rule: what is compared is measured in turn within one run, on the same arrays, with one thread of
BLAS on both sides; a ratio is the median over pairs of turns that follow each other. Contributions
have 10 M floats (`--values`), weights from 1 to 7 and values from a seed. Means are checked against
numpy's before anything is timed.

Metrics (ratios unless the name says otherwise):
    mean_vs_numpy_10, mean_vs_numpy_100: time in which a node takes 10 or 100 contributions, as
        envelopes that it has received, checks them, and invokes `FedAvg`, over that of
        `total += weight * x` for each of the same arrays.
    s_mean_100, s_numpy_100: seconds of either, the best turn.
    median_vs_partition, trimmed_vs_partition: time of `Median`, and of `TrimmedMean` without the
        two lowest and highest, of 10 contributions, over `numpy.partition` of the same values with
        those ranks: the faster one of along the first axis, and along the last of blocks.
    krum_vs_gram: time of `Krum` of 50 contributions over `x @ x.T` of the same, as one array.
    mean_peak_vs_one: growth of the resident set of a fresh process in which a node takes 100
        contributions one-way into `RunningMean`, in an order of arrival that is not that of their
        peers, at its peak, over the size of one; the envelope that arrives is among that.
    mean_peak_capped_vs_one: the same with `max_share` 0.5, where one that may be cut waits.
    secagg_100x1m_s: seconds of a round of secure aggregation of 100 clients with 1 M numbers, of
        whom 5 drop out, in the simulator.
    int8_bytes_vs_fp32: bytes of an answer's envelope through `Int8Codec`, over those without.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
from _codec_bytes import int8_bytes_vs_fp32
from _secure_aggregation import secagg_seconds

from bbnode.compiler import Compiler
from bbnode.components import (
    ConnectedView,
    FedAvg,
    Krum,
    Median,
    OrtBackend,
    RunningMean,
    TrimmedMean,
    concrete,
)
from bbnode.components.aggregators.collecting import CollectingAggregator
from bbnode.dsl import AggregatorSlot, Graph, Module, PeerSelectorSlot, types
from bbnode.engine import Limits, Node, install, steps
from bbnode.ir import codec
from bbnode.ir.address import site_suffix
from bbnode.ir.envelope import SlotFill, WireCorrelation, WireEnvelope, encode_envelope
from bbnode.ir.keys import SITE_ID_KEY
from bbnode.ir.onnx_file import function_of
from bbnode.ir.peer import PeerId
from bbnode.ir.values import Composite, Metadata, ResponseBatch

VALUES = 10_000_000
TURNS = 3
BYTES_PER_KIB = 1024
THREADS = "OPENBLAS_NUM_THREADS"
CUT = 2  # of a trimmed mean
BLOCK = 1 << 14  # columns that numpy.partition gets at once, as rows
MOST = {
    "mean_vs_numpy_10": 1.5,
    "mean_vs_numpy_100": 1.5,
    "median_vs_partition": 1.2,
    "trimmed_vs_partition": 1.2,
    "krum_vs_gram": 1.2,
    "mean_peak_vs_one": 3.0,
    "secagg_100x1m_s": 10.0,
    "int8_bytes_vs_fp32": 0.26,
}
FAULTS = (steps.OpFailed, steps.WireReceiveFailed)
SERVER = PeerId.from_seed(0)
Array = np.ndarray


@dataclass(eq=False)
class Pool(Module):
    """Clients send what they have when they like; the server combines what came."""

    home = "server"
    aggregator: Any = FedAvg

    def body(self, g: Graph) -> None:
        """Record it."""
        x = g.input("x", types.TENSOR_FLOAT)
        clients = PeerSelectorSlot("clients", peer_class="client").sample(g, n=1, after=x)
        asked = g.net_out("ask", clients, x)
        known = g.constant(Metadata(num_samples=1))
        answer = g.net_out("answer", asked.sender, g.bundle([asked, known]))
        slot = AggregatorSlot("pool", concrete=self.aggregator)
        slot.contribute(g, *g.unbundle(answer, [types.TENSOR_FLOAT, types.METADATA]))
        mean, _ = slot.aggregate(g, after=x)
        g.output("mean", mean)


@dataclass
class Server:
    """A node with the server's part of `Pool`."""

    node: Node
    site: int

    @classmethod
    def of(cls, aggregator: Any, values: int) -> Server:
        """Compile and install it, with room for all contributions."""
        compiler = Compiler().bind_peer_selector("clients", ConnectedView)
        compiled = compiler.bind_backend("compute", OrtBackend).compile(Pool(aggregator).build())
        parts = [f for f in compiled.functions if f.name.startswith("server#")]
        received = [n for f in parts for n in function_of(f).nodes if n.op_type == "Recv"]
        size = 4 * values + (1 << 16)
        limits = Limits(envelope_bytes=size, ingress_bytes=2 * size)
        node = install(compiled, ["server"], peer_id=SERVER, limits=limits)
        node.set_addresses([])
        (site,) = {int(each.metadata[SITE_ID_KEY]) for each in received}
        return cls(node, site)

    def meet(self, peers: Sequence[PeerId]) -> None:
        """Connect with clients."""
        for peer in peers:
            self.node.peer_connected(peer, ("client",))
        self.node.poll(0)

    def take(self, peer: PeerId, envelope: memoryview) -> None:
        """Deliver a contribution, and let the node take it."""
        self.node.deliver_inbound(peer, envelope)
        faults = [each for each in self.node.poll(0) if isinstance(each, FAULTS)]
        if faults:
            raise SystemExit(f"a contribution was not taken: {faults[0]}")

    def result(self) -> Array:
        """Combine what came."""
        self.node.invoke("server", {"x": np.zeros(1, np.float32)})
        for step in self.node.poll(0):
            if type(step) is steps.AppEvent:
                return np.asarray(step.value)
        raise SystemExit("the node gave no mean")


@dataclass(frozen=True)
class Arrived:
    """A contribution as it arrives: an envelope in one piece, and the tensor in it."""

    envelope: memoryview
    tensor: Array

    @classmethod
    def of(cls, server: Server, peer: PeerId, number: int, values: int) -> Arrived:
        """Draw a peer's values where they stand in its envelope, which nothing else holds."""
        unwritten = np.empty(values, np.float32)  # memory that is never touched takes no place
        value = Composite((unwritten, Metadata(num_samples=samples(number))))
        fill = SlotFill(
            dest_suffix=site_suffix(server.site),
            payload_parts=tuple(codec.encode_parts(value)),
            type_hash=types.COMPOSITE.wire_hash,
        )
        parts = encode_envelope(
            WireEnvelope(
                fills=(fill,),
                correlation=WireCorrelation(wire_req_id=(1 << 62) + number),
                src_peer_bytes=peer.to_bytes(),
            )
        )
        sizes = [memoryview(part).nbytes for part in parts]
        made = np.empty(sum(sizes), np.uint8)
        at = 0
        for part, size in zip(parts, sizes, strict=True):
            if size == unwritten.nbytes:
                begin = at
            else:
                made[at : at + size] = np.frombuffer(part, np.uint8)
            at += size
        tensor = made[begin : begin + unwritten.nbytes].view(np.float32)
        draw(number, tensor)
        return cls(memoryview(made).toreadonly(), tensor)


def samples(number: int) -> int:
    """Return how many examples a peer claims."""
    return 1 + number % 7


def draw(number: int, into: Array) -> Array:
    """Write a peer's values: normal, around 1."""
    rng = np.random.default_rng(number)
    for at in range(0, len(into), BLOCK):
        part = into[at : at + BLOCK]
        part[:] = 1 + np.float32(0.1) * rng.standard_normal(len(part), dtype=np.float32)
    return into


def tensor(number: int, values: int) -> Array:
    """Return a peer's values."""
    return draw(number, np.empty(values, np.float32))


# --- the mean -----------------------------------------------------------------------------------


def means(count: int, values: int, turns: int) -> dict[str, float]:
    """`mean_vs_numpy_<count>` and the times behind it."""
    pool = concrete(FedAvg, shape=(values,), max_share=1.0)
    server = Server.of(pool, values)
    peers = sorted(PeerId.from_seed(n + 1) for n in range(count))
    arriving = [Arrived.of(server, peer, number, values) for number, peer in enumerate(peers)]
    weights = [np.float32(samples(n)) for n in range(count)]

    def fresh() -> Server:
        made = Server.of(pool, values)  # a node takes an envelope once
        made.meet(peers)
        return made

    def by_node(server: Server) -> Array:
        for peer, each in zip(peers, arriving, strict=True):
            server.take(peer, each.envelope)
        return server.result()

    def by_numpy() -> Array:
        total = np.zeros(values, np.float32)
        for weight, each in zip(weights, arriving, strict=True):
            total += weight * each.tensor
        total /= np.float32(sum(weights))
        return total

    if not np.allclose(by_node(fresh()), by_numpy(), atol=1e-5):
        raise SystemExit("the node's mean is not numpy's")
    pairs = [(timed(partial(by_node, fresh())), timed(by_numpy)) for _ in range(turns)]
    return {
        f"mean_vs_numpy_{count}": median(ours / its for ours, its in pairs),
        f"s_mean_{count}": min(ours for ours, _ in pairs),
        f"s_numpy_{count}": min(its for _, its in pairs),
    }


def timed(call: Callable[[], object]) -> float:
    """Return the seconds that a call takes."""
    started = perf_counter()
    call()
    return perf_counter() - started


# --- order and distance -------------------------------------------------------------------------


class Here:
    """The context of a node that calls an aggregator."""

    execution = 1
    self_peer = SERVER
    source_peer = None

    def refuse(self, peer: PeerId, reason: str) -> None:
        """Stop: nothing here is to be refused."""
        raise SystemExit(f"{peer}: {reason}")


def combined(made: CollectingAggregator, arrays: Sequence[Array]) -> Callable[[], Array]:
    """Return a call that combines arrays that were checked before."""
    answers = tuple(
        (PeerId.from_seed(n + 1), Composite((each, Metadata(num_samples=1))))
        for n, each in enumerate(arrays)
    )
    ctx: Any = Here()

    def call() -> Array:
        made.contribute_all(ctx, ResponseBatch(responses=answers))
        return np.asarray(made.aggregate(ctx)[0])

    return call


def orders(values: int, turns: int) -> dict[str, float]:
    """`median_vs_partition` and `trimmed_vs_partition`."""
    count = 10
    arrays = [tensor(n, values) for n in range(count)]
    found = {}
    middle = [(count - 1) // 2, count // 2]
    ends = [CUT, count - 1 - CUT]
    for name, made, ranks in (
        ("median", Median(Median.Config()), middle),
        ("trimmed", TrimmedMean(TrimmedMean.Config(byzantine=CUT)), ends),
    ):
        ours = combined(made, arrays)
        pairs = []
        for _ in range(turns):
            its = min(timed(partial(way, arrays, ranks)) for way in (along_rows, by_axis))
            pairs.append((timed(ours), its))
        found[f"{name}_vs_partition"] = median(ours / its for ours, its in pairs)
        found[f"s_{name}"] = min(ours for ours, _ in pairs)
        found[f"s_partition_{name}"] = min(its for _, its in pairs)
    return found


def by_axis(arrays: Sequence[Array], ranks: Sequence[int]) -> None:
    """Partition along the first axis, in parts that keep the memory small."""
    step = len(arrays[0]) // 4 or 1
    for at in range(0, len(arrays[0]), step):
        np.partition(np.stack([each[at : at + step] for each in arrays]), ranks, axis=0)


def along_rows(arrays: Sequence[Array], ranks: Sequence[int]) -> None:
    """Partition blocks of columns that were laid side by side before."""
    for at in range(0, len(arrays[0]), BLOCK):
        block = np.stack([each[at : at + BLOCK] for each in arrays], axis=1)
        block.partition(ranks, axis=1)


def krum(values: int, turns: int) -> dict[str, float]:
    """`krum_vs_gram`."""
    count = 50
    stacked = np.empty((count, values), np.float32)
    for number, row in enumerate(stacked):
        draw(number, row)
    ours = combined(Krum(Krum.Config(byzantine=3)), list(stacked))
    pairs = [(timed(ours), timed(lambda: stacked @ stacked.T)) for _ in range(turns)]
    return {
        "krum_vs_gram": median(ours / its for ours, its in pairs),
        "s_krum": min(ours for ours, _ in pairs),
        "s_gram": min(its for _, its in pairs),
    }


# --- memory -------------------------------------------------------------------------------------


def peak_here(count: int, values: int, share: float) -> float:
    """The growth of this process over the size of one contribution, as `count` of them arrive."""
    peers = [PeerId.from_seed(n + 1) for n in np.random.default_rng(0).permutation(count)]
    for size in (2 * BLOCK, values):  # the first for what a process needs in any case
        server = Server.of(concrete(RunningMean, shape=(size,), max_share=share), size)
        server.meet(peers)
        before = status_kib("VmRSS")
        for number, peer in enumerate(peers):
            server.take(peer, Arrived.of(server, peer, number, size).envelope)
        mean = server.result()
        # Of values around 1, each with the deviation 0.1.
        if not 0 < float(mean.std()) < 0.2 / count**0.5:
            raise SystemExit("the mean is not that of all contributions")
    return (status_kib("VmHWM") - before) * BYTES_PER_KIB / (4 * values)


def status_kib(name: str) -> int:
    """A figure of this process; VmHWM is its peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def measure(values: int, turns: int) -> dict[str, float]:
    """All metrics of the module's docstring."""
    found: dict[str, float] = {}
    for count in (10, 100):
        found |= means(count, values, turns)
    found |= orders(values, turns)
    found |= krum(values, turns)
    for name, share in (("mean_peak_vs_one", "1.0"), ("mean_peak_capped_vs_one", "0.5")):
        command = [sys.executable, __file__, "--peak", share, "--values", str(values)]
        told = subprocess.run(command, check=True, capture_output=True, text=True)
        found[name] = json.loads(told.stdout)
    found["int8_bytes_vs_fp32"] = int8_bytes_vs_fp32(values)
    found["secagg_100x1m_s"] = secagg_seconds()
    return {name: round(value, 4) for name, value in found.items()}


def main(argv: Sequence[str] | None = None) -> None:
    """Print the metrics, as text or (`--json`) as one object of name to number."""
    parser = argparse.ArgumentParser(prog="scripts/bench aggregate", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--values", type=int, default=VALUES, help="floats of a contribution")
    parser.add_argument("--turns", type=int, default=TURNS, help="pairs that a ratio is of")
    parser.add_argument("--peak", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if os.environ.get(THREADS) != "1":  # BLAS reads it when numpy is imported
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, THREADS: "1"})
    if options.values < 1000 or options.turns < 1:
        parser.error("--values takes 1000 or more, --turns 1 or more")
    if options.peak is not None:
        print(json.dumps(peak_here(100, options.values, options.peak)))
        return
    found = measure(options.values, options.turns)
    if options.json:
        print(json.dumps(found))
        return
    for name, value in found.items():
        most = f"  (at most {MOST[name]:g})" if name in MOST else ""
        print(f"{name:<36}{value:>10.3f}{most}")


if __name__ == "__main__":
    main()
