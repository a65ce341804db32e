"""One simulation in one process, and the same in two: when it pays to split it.

Rule: both run in turn, step by step, and the best step of each counts; the digests of their traces
have to be the same. A step is timed by the wall, since two processes are to make it shorter: it
takes a machine with two cores that nobody else uses. Starting the processes and adding the nodes is
left out, and the start measured alone.

Metrics:
    sim_split_2_speedup: seconds of a step in one process over those in two, where nodes work: a
        federated round of 16 clients, each of which trains for some 7 ms, below four edges
        and a server (links of 1 ms, an edge and its clients in one process).
    sim_split_2_speedup_pairs: the same where nodes do nothing but send: 100 pairs return a ball to
        each other, over links of 1 ms, for 20 ms; each pair in one process.
    sim_split_2_speedup_messages: the same, with every pair apart: each envelope goes from one
        process to the other.
    sim_split_2_start_s: seconds until two processes are there, without nodes.
"""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import _sim_metrics
import numpy as np
from onnx import ModelProto

from bbnode.compiler import Compiler
from bbnode.components import values
from bbnode.programs import HierarchicalTraining
from bbnode.sim import MS, Network, SimNode, SplitNetwork

PROCESSES = 2
EDGES, PER_EDGE = 4, 4
EXAMPLES, FEATURES, HIDDEN, CLASSES = 2000, 32, 128, 10
PAIRS = 100
TURNS_NS = 20 * MS
# What makes a network go on, by as much each time.
Step = Callable[[], object]


def add(
    network: Network,
    process: int,
    name: str,
    model: ModelProto,
    targets: Sequence[str],
    **more: Any,
) -> SimNode:
    """Add a node, in one of the processes if there are several."""
    if isinstance(network, SplitNetwork):
        return network.add(name, model, targets, process=process % PROCESSES, **more)
    return network.add(name, model, targets, **more)


def training(examples: Path, network: Network) -> Step:
    """Clients that train: a step is a round, after a first one that prepares what all use."""
    drawn = np.random.default_rng(0)
    np.savez_compressed(
        examples,
        x=drawn.normal(size=(EXAMPLES, FEATURES)).astype(np.float32),
        y=drawn.integers(0, CLASSES, EXAMPLES),
    )
    program = HierarchicalTraining(
        model=(FEATURES, HIDDEN, CLASSES), edges=EDGES, clients=PER_EDGE, evaluate="none"
    )
    model = Compiler().bind_all(program.bindings()).compile(program.build())
    server = add(network, 0, "server", model, ["server"])
    for i in range(EDGES):
        edge = add(network, i, f"edge-{i}", model, ["edge"])
        network.connect(server, edge)
        for j in range(PER_EDGE):
            config = {"data": {"path": str(examples)}}
            client = add(network, i, f"client-{i}-{j}", model, ["client"], config=config)
            network.connect(edge, client)
    network.run_until_idle()

    def step() -> None:
        server.invoke("server", {"tick": values.TRIGGER})
        network.run_until_idle()

    step()
    return step


def messages(network: Network, *, apart: int) -> Step:
    """Pairs that return a ball to each other; those of a pair are `apart` processes apart."""
    model = _sim_metrics.compile_program()
    for i in range(PAIRS):
        left = add(network, i, f"left-{i}", model, ["left"])
        right = add(network, i + apart, f"right-{i}", model, ["right"])
        network.connect(left, right)
        left.invoke("left", {"ball": np.ones(4, np.float32)})
    network.run(until=10 * MS)
    return lambda: network.run(until=network.now_ns + TURNS_NS)


def speedup(build: Callable[[Network], Step], runs: int) -> float:
    """Return the best time of a step in one process, over that in several."""
    whole = Network(mesh=False)
    with SplitNetwork(mesh=False, processes=PROCESSES) as split:
        steps = [build(whole), build(split)]
        taken: list[list[float]] = [[], []]
        for _ in range(runs):
            for times, step in zip(taken, steps, strict=True):
                gc.collect()
                started = perf_counter()
                step()
                times.append(perf_counter() - started)
        if whole.trace.digest != split.trace.digest:
            raise SystemExit("a simulation and the same in two processes have other traces")
    return min(taken[0]) / min(taken[1])


def start_s() -> float:
    """Return the seconds until the processes are there and have answered."""
    started = perf_counter()
    with SplitNetwork(processes=PROCESSES) as split:
        split.run_until_idle()
        return perf_counter() - started


def measure(runs: int) -> dict[str, float]:
    """All metrics of the module's docstring."""
    with tempfile.TemporaryDirectory() as folder:
        trains = partial(training, Path(folder) / "examples.npz")
        return {
            "sim_split_2_speedup": speedup(trains, runs),
            "sim_split_2_speedup_pairs": speedup(partial(messages, apart=0), runs),
            "sim_split_2_speedup_messages": speedup(partial(messages, apart=1), runs),
            "sim_split_2_start_s": min(start_s() for _ in range(3)),
        }
