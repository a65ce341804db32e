"""Programs whose peers send on their own, in a network: joins, barriers, restarts, floods."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import ModelProto

from bbnode.compiler import Compiler
from bbnode.compiler.errors import TypeConstraintFailed
from bbnode.components import ConnectedView, FedAvg, OrtBackend
from bbnode.dsl import AggregatorSlot, Graph, Module, Output, PeerSelectorSlot, syscalls, types
from bbnode.ir.values import TRIGGER, Metadata, ResponseBatch
from bbnode.sim import Network

S = 1_000_000_000


class Contributions(Module):
    """Workers send when they have trained; the server averages whenever three have."""

    home = "worker"

    def __init__(self, *, bundled: bool = True, wanted: bool = False) -> None:
        self.bundled = bundled
        self.wanted = wanted

    def body(self, g: Graph) -> None:
        weights = g.input("weights", types.TENSOR_FLOAT)
        wanted = g.input("wanted", types.TENSOR_BOOL) if self.wanted else None
        servers = PeerSelectorSlot("servers", peer_class="server").sample(g, n=1, after=weights)
        parts: list[Output] = [weights, g.constant(Metadata(num_samples=10))]
        if wanted is not None:
            parts.append(wanted)
        update = g.bundle(parts) if self.bundled else weights
        received = g.net_out("update", servers, update)
        after = None
        if wanted is not None:
            kinds = [types.TENSOR_FLOAT, types.METADATA, types.TENSOR_BOOL]
            tensor, metadata, says = g.unbundle(received, kinds)
            received, after = g.bundle([tensor, metadata]), g.when(says)
        batch = g.collect(received, n=3, until=60.0, after=after)
        mean = AggregatorSlot("mean")
        averaged, _ = mean.aggregate(g, after=mean.contribute_all(g, batch))
        g.output("mean", averaged)
        g.output("batch", batch)


def compiled(module: Module) -> ModelProto:
    compiler = Compiler().bind_peer_selector("servers", ConnectedView)
    compiler = compiler.bind_aggregator("mean", FedAvg).bind_backend("compute", OrtBackend)
    return compiler.compile(module.build())


def network_of(model: ModelProto, workers: int) -> Network:
    network = Network(seed=0)
    network.add("server", model, ["server"])
    for number in range(workers):
        network.add(f"w{number}", model, ["worker"])
    network.run(1 * S)
    return network


def contribute(network: Network, *workers: int, **more: object) -> None:
    for number in workers:
        weights = np.full(2, number, np.float32)
        network[f"w{number}"].invoke("worker", {"weights": weights, **more})
    network.run(network.now_ns + 2 * S)


def test_an_aggregator_takes_a_batch_of_deliveries() -> None:
    network = network_of(compiled(Contributions()), 4)
    contribute(network, 0, 1, 2)
    contribute(network, 3, 0, 1)
    server = network["server"]
    assert [float(mean[0]) for mean in server.values("mean")] == [1.0, pytest.approx(4 / 3)]
    for batch in server.values("batch"):
        assert isinstance(batch, ResponseBatch)
        assert list(batch.peers) == sorted(batch.peers)
    assert server.failures() == []


def test_what_the_aggregator_does_not_take_is_refused_at_compile() -> None:
    with pytest.raises(TypeConstraintFailed, match="takes answers of a bundle"):
        compiled(Contributions(bundled=False))


def test_a_condition_lets_only_some_deposit() -> None:
    network = network_of(compiled(Contributions(wanted=True)), 4)
    contribute(network, 0, 1, wanted=np.array(True))
    contribute(network, 2, wanted=np.array(False))
    assert network["server"].values("mean") == []
    contribute(network, 3, wanted=np.array(True))
    assert [float(mean[0]) for mean in network["server"].values("mean")] == [pytest.approx(4 / 3)]
    assert network["server"].failures() == []


def test_a_server_that_crashes_goes_on_with_what_had_come() -> None:
    network = network_of(compiled(Contributions()), 3)
    contribute(network, 0, 1)
    network["server"].checkpoint()
    network.crash("server")
    network.run(network.now_ns + 5 * S)
    network.restart("server")
    network.run(network.now_ns + 2 * S)
    (waiting,) = network["server"].node.waiting()
    assert waiting.whom.startswith("2 of 3 came")
    contribute(network, 2)
    assert [float(mean[0]) for mean in network["server"].values("mean")] == [1.0]


def test_a_worker_that_leaves_is_named_when_the_time_is_over() -> None:
    network = network_of(compiled(Contributions()), 3)
    contribute(network, 0, 1)
    network.crash("w2")
    network.run_until_idle()
    (failure,) = network["server"].failures()
    assert failure.kind == "JoinIncomplete"
    assert failure.line.startswith("test_joins.py:")
    for name in ("w0", "w1"):
        assert str(network.peer_id(name)) in failure.detail
    assert str(network.peer_id("w2")) not in failure.detail
    assert network["server"].node.counters()["ingress.bytes"] == 0


def test_a_worker_that_floods_does_not_fill_a_batch() -> None:
    network = network_of(compiled(Contributions()), 3)
    for _ in range(20):
        contribute(network, 0)
    assert network["server"].values("mean") == []
    assert {each.kind for each in network["server"].failures()} == {"AlreadyGathered"}
    contribute(network, 1, 2)
    assert [float(mean[0]) for mean in network["server"].values("mean")] == [1.0]


class Together(Module):
    """All workers go on when all are done."""

    home = "worker"

    def body(self, g: Graph) -> None:
        done = g.input("done", types.TRIGGER)
        servers = PeerSelectorSlot("servers", peer_class="server").sample(g, n=1, after=done)
        worker_done = g.net_out("done", servers, done)
        everybody = syscalls.threshold(g, worker_done, n=5)
        workers = PeerSelectorSlot("workers", peer_class="worker").current_view(g, after=everybody)
        g.output("go", g.net_out("go", workers, everybody))


def test_a_barrier_over_five_deliveries() -> None:
    compiler = Compiler().bind_peer_selector("servers", ConnectedView)
    model = compiler.bind_peer_selector("workers", ConnectedView).compile(Together().build())
    network = network_of(model, 5)
    for rounds in (1, 2):
        for number in range(5):
            assert all(len(network[f"w{n}"].values("go")) < rounds for n in range(5))
            network[f"w{number}"].invoke("worker", {"done": TRIGGER})
            network.run(network.now_ns + 2 * S)
        assert [network[f"w{n}"].values("go") for n in range(5)] == [[TRIGGER] * rounds] * 5
