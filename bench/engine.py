"""The engine alone: the cost of an op, and of an envelope in to an envelope out.

Rule: one process, one thread, virtual time, no transport. Each figure is the best of several
runs, since whatever else the machine does can only add to it; figures that are compared with
each other are measured in turn, within one run (fused graphs: pair by pair).

Metrics (microseconds unless the name says otherwise):
    us_per_op: one op of a 10,000-op program, the worse of two: a `chain` (each op wakes the
        next), and `fans` (each op wakes 99, which wake one). Invoking and ending the execution
        are included, compiling is not.
    us_per_op_<family>: the same of one family.
    us_per_op_bare_loop: the same chain in a Python loop without an engine: per op it pops a deque,
        calls the op's function with a value from a list slot, writes what it returns to another,
        and appends the op's consumers to the deque. No frames, no counts of what is pending, no
        failures.
    per_op_ratio_vs_bare_loop: us_per_op over that.
    envelope_us: a small fill (4 floats) comes in as bytes, passes the three receive gates and a
        PassThrough, and goes out as an envelope to its sender; with one claimed address on
        either side and an observed one. Each envelope has a poll of its own.
    fused_mlp_vs_ort, fused_cnn_vs_ort, tensor_64mib_copies_in, tensor_64mib_copies_out and the
        times of fused graphs: see `_graph_metrics.py`.
    sim_bytes_per_idle_node, sim_seconds_per_million_envelopes: see `_sim_metrics.py`.
"""

from __future__ import annotations

import argparse
import gc
import json
from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise
from time import perf_counter_ns

import _graph_metrics
import _sim_metrics
import numpy as np
from multiaddr import Multiaddr
from onnx import ModelProto

from bbnode.compiler import Compiler
from bbnode.components import ConnectedView
from bbnode.dsl import Graph, Module, Output, PeerSelectorSlot, types
from bbnode.dsl import syscalls as sys
from bbnode.engine import Node, install, steps
from bbnode.ir import codec
from bbnode.ir.address import site_suffix
from bbnode.ir.envelope import SlotFill, WireCorrelation, WireEnvelope, encode_envelope
from bbnode.ir.keys import SITE_ID_KEY
from bbnode.ir.onnx_file import function_of
from bbnode.ir.peer import PeerId
from bbnode.ir.values import TRIGGER

OPS = 10_000
FAN = 99
RUNS = 60
ENVELOPES = 250  # short enough to fall between what else the machine does
NS_PER_US = 1_000
# What issue and design promise.
MOST = {
    "us_per_op": 2.0,
    "per_op_ratio_vs_bare_loop": 2.5,
    "envelope_us": 15.0,
    **_graph_metrics.MOST,
    **_sim_metrics.MOST,
}
LEAST = _graph_metrics.LEAST


class Chain(Module):
    """Ops in a row."""

    def body(self, g: Graph) -> None:
        value = g.input("x", types.TRIGGER)
        for _ in range(OPS - 1):
            value = sys.on_trigger(g, value)
        g.output("y", value)


class Fans(Module):
    """Ops that wake many, which all have to be there for the next one."""

    def body(self, g: Graph) -> None:
        value = g.input("x", types.TRIGGER)
        for _ in range(OPS // (FAN + 1)):
            made: list[Output] = [sys.on_trigger(g, value) for _ in range(FAN)]
            value = sys.on_trigger(g, made[0], after=made)
        g.output("y", value)


class Echo(Module):
    """What comes to `right` goes back to whom it came from, at `left`."""

    home = "left"

    def body(self, g: Graph) -> None:
        x = g.input("x", types.TENSOR_FLOAT)
        sent = g.net_out("there", PeerSelectorSlot("peers", peer_class="right").sample(g, n=1), x)
        back = g.net_out("back", sent.sender, sys.pass_through(g, sent))
        g.output("y", back)


def op_cost(module: Module) -> Callable[[], float]:
    """One run of a program: nanoseconds per op."""
    node = install(Compiler().compile(module.build()), ["@self"], peer_id=PeerId.from_seed(0))
    node.poll(0)

    def once() -> float:
        before = node.counters()["ops.fired"]
        started = perf_counter_ns()
        node.invoke("@self", {"x": TRIGGER})
        node.poll(0)
        spent = perf_counter_ns() - started
        return spent / (node.counters()["ops.fired"] - before)

    return once


class BareOp:
    """What a loop has to know of an op: whom to call, with what, where to, and who is next."""

    __slots__ = ("consumers", "fire", "given", "made")

    def __init__(self, given: int, made: int) -> None:
        self.given = given
        self.made = made
        self.fire = _same
        self.consumers: tuple[BareOp, ...] = ()


def _same(value: object) -> object:
    return value


def bare_loop() -> Callable[[], float]:
    """One run of a chain without an engine: nanoseconds per op."""
    ops = [BareOp(index, index + 1) for index in range(OPS)]
    for op, following in pairwise(ops):
        op.consumers = (following,)

    def once() -> float:
        slots: list[object] = [TRIGGER] * (OPS + 1)
        waiting = deque(ops[:1])
        started = perf_counter_ns()
        while waiting:
            op = waiting.popleft()
            slots[op.made] = op.fire(slots[op.given])
            for consumer in op.consumers:
                waiting.append(consumer)
        return (perf_counter_ns() - started) / OPS

    return once


def echo_node() -> tuple[Node, int]:
    """A node that plays `right`, and the site of its Recv."""
    model: ModelProto = (
        Compiler().bind_peer_selector("peers", ConnectedView).compile(Echo().build())
    )
    main = next(f for f in model.functions if f.name.startswith("right#"))
    recv = next(node for node in function_of(main).nodes if node.op_type == "Recv")
    node = install(
        model,
        [main.name],
        peer_id=PeerId.from_seed(0),
        addresses=[Multiaddr("/ip4/10.0.0.1/tcp/4001")],
    )
    node.poll(0)
    return node, int(recv.metadata[SITE_ID_KEY])


def envelope_cost() -> Callable[[], float]:
    """One run over `ENVELOPES` envelopes: nanoseconds per envelope."""
    node, site = echo_node()
    sender = PeerId.from_seed(1)
    observed = Multiaddr("/ip4/10.0.0.2/tcp/50000")
    claimed = bytes(Multiaddr("/ip4/10.0.0.2/tcp/4001").to_bytes())
    value = np.ones(4, np.float32)
    fill = SlotFill(
        dest_suffix=site_suffix(site),
        payload=codec.encode_value(value),
        type_hash=types.TENSOR_FLOAT.wire_hash,
    )
    node.peer_connected(sender, ["left"])
    node.poll(0)
    sent = 0

    def once() -> float:
        nonlocal sent
        first, sent = sent + 1, sent + ENVELOPES
        arriving = [
            b"".join(
                encode_envelope(
                    WireEnvelope(
                        fills=(fill,),
                        # As large as ids of nodes are: nine bytes and more on the wire.
                        correlation=WireCorrelation(wire_req_id=(1 << 62) + number),
                        src_peer_bytes=sender.to_bytes(),
                        src_peer_addresses=(claimed,),
                    )
                )
            )
            for number in range(first, sent + 1)
        ]
        answered = 0
        started = perf_counter_ns()
        for data in arriving:
            node.deliver_inbound(sender, data, observed)
            for step in node.poll(0):
                answered += type(step) is steps.SendEnvelope
        spent = perf_counter_ns() - started
        if answered != ENVELOPES:
            raise SystemExit(f"{answered} of {ENVELOPES} envelopes were answered")
        return spent / ENVELOPES

    return once


def measure(runs: int) -> dict[str, float]:
    """All metrics of the module's docstring."""
    measured: dict[str, Callable[[], float]] = {
        "us_per_op_chain": op_cost(Chain()),
        "us_per_op_fans": op_cost(Fans()),
        "us_per_op_bare_loop": bare_loop(),
        "envelope_us": envelope_cost(),
        # Microseconds of one are seconds of a million.
        "sim_seconds_per_million_envelopes": _sim_metrics.envelope_cost(),
        **_graph_metrics.graph_turns(),
    }
    taken: dict[str, list[float]] = {name: [] for name in measured}
    for _ in range(runs):
        for name, once in measured.items():
            gc.collect()
            taken[name].append(once() / NS_PER_US)
    best = {name: min(times) for name, times in taken.items()}
    best["us_per_op"] = max(best["us_per_op_chain"], best["us_per_op_fans"])
    best["per_op_ratio_vs_bare_loop"] = best["us_per_op"] / best["us_per_op_bare_loop"]
    best |= _graph_metrics.graph_ratios(taken)
    best |= _graph_metrics.copies()
    best["sim_bytes_per_idle_node"] = _sim_metrics.bytes_per_idle_node()
    return {name: round(value, 3) for name, value in best.items()}


def main(argv: Sequence[str] | None = None) -> None:
    """Print the metrics, as text or (`--json`) as one object of name to number."""
    parser = argparse.ArgumentParser(prog="scripts/bench engine", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--runs", type=int, default=RUNS, metavar="N", help="best of N runs")
    options = parser.parse_args(argv)
    if options.runs < 1:
        parser.error("--runs takes 1 or more")
    found = measure(options.runs)
    if options.json:
        print(json.dumps(found))
        return
    for name, value in found.items():
        most = f"  (at most {MOST[name]:g})" if name in MOST else ""
        most = f"  (at least {LEAST[name]:g})" if name in LEAST else most
        print(f"{name:<36}{value:>10.3f}{most}")


if __name__ == "__main__":
    main()
