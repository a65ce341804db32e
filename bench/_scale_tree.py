"""A round of thousands of clients in two levels, in the simulator.

Rule: the program is the one that ships, `bbnode.programs.HierarchicalTraining`: edges ask their
clients, the server asks the edges. Clients train a small model on examples of one file.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from time import perf_counter

import numpy as np
from onnx import ModelProto

from bbnode.compiler import Compiler
from bbnode.components import values
from bbnode.programs import HierarchicalTraining
from bbnode.sim import Network

CLIENTS = 10_000
PER_EDGE = 100
EXAMPLES, FEATURES = 8, 4


def compile_program(edges: int, per_edge: int) -> ModelProto:
    """The program with so many edges, each of which asks so many clients."""
    program = HierarchicalTraining(
        model=(FEATURES, 2), edges=edges, clients=per_edge, evaluate="none"
    )
    return Compiler().bind_all(program.bindings()).compile(program.build())


def build(clients: int, examples: Path) -> Network:
    """A server, edges that it is connected to, and clients of whom each has one edge."""
    drawn = np.random.default_rng(0)
    # Compressed arrays are read; others are mapped, with three open files a client.
    np.savez_compressed(
        examples,
        x=drawn.normal(size=(EXAMPLES, FEATURES)).astype(np.float32),
        y=drawn.integers(0, 2, EXAMPLES),
    )
    per_edge = min(PER_EDGE, clients)
    edges = clients // per_edge
    compiled = compile_program(edges, per_edge)
    network = Network(mesh=False)
    server = network.add("server", compiled, ["server"])
    for i in range(edges):
        edge = network.add(f"edge-{i}", compiled, ["edge"])
        network.connect(server, edge)
        for j in range(per_edge):
            client = network.add(
                f"client-{i}-{j}", compiled, ["client"], config={"data": {"path": str(examples)}}
            )
            network.connect(edge, client)
    network.run_until_idle()
    return network


def round_s(clients: int = CLIENTS) -> float:
    """Return the seconds that a round takes, the second one: the first prepares what all use."""
    with tempfile.TemporaryDirectory() as folder:
        network = build(clients, Path(folder) / "examples.npz")
        server = network["server"]
        for _ in range(2):
            started = perf_counter()
            execution = server.invoke("server", {"tick": values.TRIGGER})
            network.run_until_idle()
            seconds = perf_counter() - started
            counted = server.outputs(execution)["stats"]["num_samples"]
            if counted != EXAMPLES * clients:
                raise SystemExit(f"{counted} examples counted; {EXAMPLES * clients} there are")
    return seconds
