"""Compile time: programs of 50 to 20,000 ops, and how time grows with size.

Rule: only `Compiler.compile` is timed, on programs that were recorded before, in one process
that has compiled already, so that imports and ONNX's schema tables are not counted. Two
families of programs: a `chain` lives on one class and is all tensor ops; a `federated` one is
a row of rounds between a server and its clients, each with a request, a gated answer, training,
an aggregate and some tensor ops on either side.

Time is CPU time of the process: a compile waits for nothing, so that is what it takes on an idle
machine, whatever else runs on this one. Sizes take turns, so that a machine whose speed changes
over the minute changes it for all of them.

One more program is a model of 200 MB in 16 weights: it is read by `OnnxModule`, recorded and
compiled. What is done with weights ought to be to copy and to hash them once or twice.

Metrics (milliseconds unless the name says otherwise):
    chain_ms_<n>, federated_ms_<n>: median of the runs for a program of <n> recorded ops.
    ms_500_ops: the slower family at 500 ops.
    per_op_ratio_20000_vs_500: time per op at 20,000 ops over that at 500, the worse family's.
    weights_200mb_s: compiling the model of 200 MB, in seconds.
    weights_200mb_read_s: making a Module of it and recording it, in seconds.
    weights_200mb_vs_hash: compiling it over one SHA-256 of as many bytes.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import statistics
from collections.abc import Callable, Sequence
from time import process_time_ns
from typing import Any

import numpy as np
from onnx import ModelProto, TensorProto, helper, numpy_helper

from bbnode.compiler import Compiler
from bbnode.components import (
    ArrayDataSource,
    ConnectedView,
    FedAvg,
    OnnxModel,
    OnnxModelConfig,
    OrtBackend,
    concrete,
    mlp_forward,
)
from bbnode.dsl import (
    AggregatorSlot,
    BackendSlot,
    ConcreteSpec,
    Graph,
    ModelSlot,
    Module,
    OnnxModule,
    Output,
    PeerSelectorSlot,
    types,
)

SIZES = (50, 500, 5_000, 20_000)
BASE, LARGE = 500, 20_000
# What issue and design promise.
MAX_MS_500_OPS = 20.0
MAX_PER_OP_RATIO = 1.2
MAX_WEIGHTS_S = 1.0

# Enough runs for a steady median, few enough for the whole benchmark to take a minute or two.
TURNS = 3
RUNS_PER_TURN = {50: 11, 500: 7, 5_000: 2}  # every other size: 1
NS_PER_MS = 1_000_000
NS_PER_S = 1_000_000_000

WEIGHTS = 16
WEIGHT_SHAPE = (1024, 3200)  # of float32: 12.5 MiB

ROUND_OPS = 20  # recorded by one round of `Federated`
TENSOR_OPS_PER_SIDE = 4


class Chain(Module):
    """`ops` recorded ops in a row on one class."""

    def __init__(self, ops: int) -> None:
        self.ops = ops

    def body(self, g: Graph) -> None:
        compute = BackendSlot("compute")
        value = g.input("x", types.TENSOR_FLOAT)
        g.output("y", _tensor_ops(g, compute, value, self.ops - 1))


class Federated(Module):
    """As many rounds as fit into `ops` recorded ops, then tensor ops on the server."""

    home = "server"

    def __init__(self, ops: int) -> None:
        self.ops = ops

    def body(self, g: Graph) -> None:
        cohort = PeerSelectorSlot("cohort", peer_class="client")
        weights = ModelSlot("global", concrete=_model())
        local = ModelSlot("local", concrete=_model())
        fedavg = AggregatorSlot("fedavg")
        here, there = BackendSlot("compute"), BackendSlot("edge")
        start: Output = g.input("tick", types.TRIGGER)
        peers = cohort.sample(g, n=4, after=start)
        mean = weights.params(g, after=peers)
        rounds = (self.ops - 3) // ROUND_OPS
        for index in range(rounds):
            sent = _tensor_ops(g, here, mean, TENSOR_OPS_PER_SIDE)
            r = g.request(f"round{index}", peers, sent, quorum=3, deadline=10.0)
            local.load_parameters(g, _tensor_ops(g, there, r.received, TENSOR_OPS_PER_SIDE))
            trained = local.train(g)
            update = _tensor_ops(g, there, local.params(g), TENSOR_OPS_PER_SIDE - 2)
            r.respond(g.bundle([update, trained]))
            fedavg.contribute_all(g, r.responses)
            mean, _ = fedavg.aggregate(g)
            loaded = weights.load_parameters(g, mean)
            mean = weights.params(g, after=loaded)
        g.output("model", _tensor_ops(g, here, mean, self.ops - 3 - rounds * ROUND_OPS))


def _tensor_ops(g: Graph, compute: BackendSlot, value: Output, count: int) -> Output:
    for index in range(count):
        value = compute.add(g, value, value) if index % 2 else compute.relu(g, value)
    return value


def _model() -> ConcreteSpec:
    forward = mlp_forward((4, 2), "Relu", seed=0)
    config = OnnxModelConfig(model=forward.SerializeToString(deterministic=True), loss="mse")
    return concrete(OnnxModel, config)


FAMILIES: dict[str, Callable[[int], Module]] = {"chain": Chain, "federated": Federated}


def compiler() -> Compiler:
    """What fills the slots of both families."""
    return (
        Compiler()
        .bind_peer_selector("cohort", ConnectedView)
        .bind_aggregator("fedavg", FedAvg)
        .bind_data_source("data", ArrayDataSource)
        .bind_backend("compute", OrtBackend)
        .bind_backend("edge", OrtBackend)
    )


def times_ms(model: ModelProto, runs: int) -> list[float]:
    """Compile times of one recorded model."""
    times = []
    for _ in range(runs):
        gc.collect()
        started = process_time_ns()
        compiler().compile(model)
        times.append((process_time_ns() - started) / NS_PER_MS)
    return times


def weighty_model() -> ModelProto:
    """A model of 200 MB: a sum of products with 16 weights."""
    random = np.random.default_rng(0)
    weights = [
        numpy_helper.from_array(random.standard_normal(WEIGHT_SHAPE, np.float32), f"w{index}")
        for index in range(WEIGHTS)
    ]
    nodes = [
        helper.make_node("MatMul", ["x", f"w{index}"], [f"p{index}"]) for index in range(WEIGHTS)
    ]
    nodes.append(helper.make_node("Sum", [f"p{index}" for index in range(WEIGHTS)], ["y"]))
    ports = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", length])
        for name, length in zip("xy", WEIGHT_SHAPE, strict=True)
    ]
    graph = helper.make_graph(nodes, "weights", ports[:1], ports[1:], weights)
    return helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10, producer_name="bench"
    )


def times_of_weights_s() -> dict[str, float]:
    """The metrics of the model of 200 MB."""
    model = weighty_model()
    found: dict[str, list[float]] = {}

    def timed(name: str, work: Callable[[], Any]) -> Any:
        started = process_time_ns()
        made = work()
        found.setdefault(name, []).append((process_time_ns() - started) / NS_PER_S)
        return made

    for _ in range(TURNS):
        recorded = timed("read_s", lambda: OnnxModule(model).build())
        compiled = timed("s", lambda made=recorded: compiler().compile(made))
        del recorded
        content = compiled.SerializeToString()
        del compiled
        timed("hash_s", lambda data=content: hashlib.sha256(data).digest())
        del content
    median = {name: statistics.median(times) for name, times in found.items()}
    return {
        "weights_200mb_s": median["s"],
        "weights_200mb_read_s": median["read_s"],
        "weights_200mb_vs_hash": median["s"] / median["hash_s"],
    }


def measure(sizes: Sequence[int], families: Sequence[str]) -> dict[str, float]:
    """All metrics of the module's docstring that these sizes give."""
    times: dict[tuple[str, int], list[float]] = {}
    for family in families:
        models = {size: FAMILIES[family](size).build() for size in sizes}
        compiler().compile(models[min(sizes)])  # warm
        for _ in range(TURNS):
            for size, model in models.items():
                runs = RUNS_PER_TURN.get(size, 1)
                times.setdefault((family, size), []).extend(times_ms(model, runs))
    median = {key: statistics.median(found) for key, found in times.items()}
    metrics = {f"{family}_ms_{size}": ms for (family, size), ms in median.items()}
    if BASE in sizes:
        metrics["ms_500_ops"] = max(median[family, BASE] for family in families)
        if LARGE in sizes:
            metrics["per_op_ratio_20000_vs_500"] = max(
                (median[family, LARGE] / LARGE) / (median[family, BASE] / BASE)
                for family in families
            )
            metrics |= times_of_weights_s()
    return {name: round(value, 3) for name, value in metrics.items()}


def main(argv: Sequence[str] | None = None) -> None:
    """Print the metrics, as text or (`--json`) as one object of name to number."""
    parser = argparse.ArgumentParser(prog="scripts/bench compiler", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, metavar="OPS")
    parser.add_argument("--family", nargs="+", choices=tuple(FAMILIES), default=tuple(FAMILIES))
    options = parser.parse_args(argv)
    if min(options.sizes) < ROUND_OPS + 3:
        parser.error(f"a federated program has at least {ROUND_OPS + 3} ops")
    found = measure(options.sizes, options.family)
    if options.json:
        print(json.dumps(found))
        return
    print(f"{'':<12}{'ops':>8}{'ms':>12}{'us per op':>12}")
    for family in options.family:
        for size in options.sizes:
            ms = found[f"{family}_ms_{size}"]
            print(f"{family:<12}{size:>8}{ms:>12.2f}{1000 * ms / size:>12.1f}")
    for name, most in (
        ("ms_500_ops", MAX_MS_500_OPS),
        ("per_op_ratio_20000_vs_500", MAX_PER_OP_RATIO),
        ("weights_200mb_s", MAX_WEIGHTS_S),
    ):
        if name in found:
            print(f"{name}: {found[name]:g} (at most {most:g})")


if __name__ == "__main__":
    main()
