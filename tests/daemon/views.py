"""Compiled programs to look at, each compiled once."""

from __future__ import annotations

from functools import cache

import onnx

from bbnode.compiler import Compiler, CompileReport
from bbnode.components import (
    ConnectedView,
    FedAvg,
    OnnxModel,
    OnnxModelConfig,
    OrtBackend,
    SklearnDataSource,
    concrete,
    mlp_forward,
)
from bbnode.daemon.artifacts.build import compiler_for
from bbnode.dsl import (
    AggregatorSlot,
    BackendSlot,
    Graph,
    ModelSlot,
    Module,
    PeerSelectorSlot,
    syscalls,
    types,
)
from bbnode.examples.federated_digits import FederatedRound
from bbnode.programs import Scaffold
from bbnode.programs.retrieval.store import VectorStore


class Relay(Module):
    """Three classes, a gossip among one of them, and two values side by side on a wire."""

    home = "coordinator"

    def body(self, g: Graph) -> None:
        edge = BackendSlot("edge")
        model = OnnxModelConfig(
            model=mlp_forward((4, 2), "Relu", seed=0).SerializeToString(deterministic=True),
            loss="mse",
        )
        local, fedavg = ModelSlot("local", concrete=concrete(OnnxModel, model)), AggregatorSlot("f")
        tick = g.input("tick", types.TRIGGER)
        start = g.input("start", types.TENSOR_FLOAT)
        workers = PeerSelectorSlot("workers", peer_class="worker").sample(g, n=8, after=tick)
        got = g.net_out("weights", workers, start)
        local.load_parameters(g, got)
        stats = local.train(g)
        update = edge.clip(g, edge.sub(g, local.params(g), got))
        mates = PeerSelectorSlot("mates", peer_class="worker").sample(g, n=2, after=stats)
        local.apply_delta(g, g.net_out("gossip", mates, update))
        relays = PeerSelectorSlot("relays", peer_class="relay").sample(g, n=1, after=update)
        both = g.net_out("update", relays, g.bundle([update, stats]))
        fedavg.contribute(g, *g.unbundle(both, [types.TENSOR_FLOAT, types.METADATA]))
        syscalls.record(g, g.net_out("n", relays, stats), name="n")
        mean, _ = fedavg.aggregate(g)
        home = PeerSelectorSlot("home", peer_class="coordinator").sample(g, n=1, after=mean)
        g.output("mean", g.net_out("mean", home, mean))


@cache
def relay() -> onnx.ModelProto:
    compiler = Compiler().bind_backend("edge", OrtBackend).bind_aggregator("f", FedAvg)
    compiler = compiler.bind_data_source("data", SklearnDataSource)
    compiler = compiler.bind_backend("compute", OrtBackend)
    for slot in ("workers", "mates", "relays", "home"):
        compiler = compiler.bind_peer_selector(slot, ConnectedView)
    return compiler.compile(Relay().build())


@cache
def federated() -> tuple[onnx.ModelProto, CompileReport]:
    program = FederatedRound()
    return compiler_for(program).compile_with_report(program.build(), explain=True)


@cache
def store() -> onnx.ModelProto:
    """One class with a partition and a bootstrap."""
    program = VectorStore()
    return compiler_for(program).compile(program.build())


@cache
def scaffold() -> onnx.ModelProto:
    """A round with constants, and with a second delivery at the class "client"."""
    program = Scaffold(model=(4, 3), clients=2)
    return compiler_for(program).compile(program.build())
