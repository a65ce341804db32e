"""The simulator alone: what a node takes, and what an envelope takes.

Rule: as in `engine.py`, whose table of metrics these are part of: one process, one thread,
virtual time. Memory is counted by tracemalloc, which slows everything down; nothing is timed
while it runs.

Metrics:
    sim_bytes_per_idle_node: bytes that are there more for each of 10,000 nodes, all of one
        compiled program of two classes, connected in pairs and polled once; the link, its two
        wires and what both nodes know of each other are included.
    sim_seconds_per_million_envelopes: seconds, by what it takes that 100 pairs
        of nodes return a ball to each other. Each is delivered, passes the three receive
        gates and a PassThrough, and makes its receiver send the next one: what `envelope_us`
        measures of the engine, and on top of it the simulator's own work.
"""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable
from time import perf_counter_ns

import numpy as np
from onnx import ModelProto

from bbnode.compiler import Compiler
from bbnode.components import ConnectedView
from bbnode.dsl import Graph, Module, PeerSelectorSlot, types
from bbnode.dsl import syscalls as sys
from bbnode.sim import MS, Network

NODES = 10_000
PAIRS = 100
# What issue and design promise.
MOST = {"sim_bytes_per_idle_node": 10_000.0, "sim_seconds_per_million_envelopes": 20.0}


class PingPong(Module):
    """A ball goes there and back for ever: every delivery sends the next envelope."""

    home = "left"

    def body(self, g: Graph) -> None:
        ball = g.input("ball", types.TENSOR_FLOAT)
        there = g.net_out(
            "there", PeerSelectorSlot("peers", peer_class="right").sample(g, n=1), ball
        )
        back = g.net_out("back", there.sender, sys.pass_through(g, there))
        g.net_out("there", back.sender, sys.pass_through(g, back))


def compile_program() -> ModelProto:
    """The program of both metrics."""
    return Compiler().bind_peer_selector("peers", ConnectedView).compile(PingPong().build())


def build_pairs(compiled: ModelProto, pairs: int) -> Network:
    """Nodes by twos, each two connected, polled once and idle."""
    network = Network(mesh=False)
    for i in range(pairs):
        left = network.add(f"left-{i}", compiled, ["left"])
        right = network.add(f"right-{i}", compiled, ["right"])
        network.connect(left, right)
    network.run_until_idle()
    return network


def bytes_per_idle_node(nodes: int = NODES) -> float:
    """The metric of that name."""
    compiled = compile_program()
    build_pairs(compiled, 1)  # whatever is made once
    gc.collect()
    tracemalloc.start()
    network = build_pairs(compiled, nodes // 2)
    gc.collect()
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return taken / len(network.nodes)


def envelope_cost() -> Callable[[], float]:
    """One run: 20 turns of `PAIRS` balls, in nanoseconds per delivered envelope."""
    network = build_pairs(compile_program(), PAIRS)
    for i in range(PAIRS):
        network[f"left-{i}"].invoke("left", {"ball": np.ones(4, np.float32)})
    network.run(until=network.now_ns + 10 * MS)

    def once() -> float:
        before = network.counters()["envelopes.delivered"]
        started = perf_counter_ns()
        network.run(until=network.now_ns + 20 * MS)
        spent = perf_counter_ns() - started
        return spent / (network.counters()["envelopes.delivered"] - before)

    return once
