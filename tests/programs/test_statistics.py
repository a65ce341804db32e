"""Statistics of all peers: equal to those of the pooled data, whoever lies."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bbnode.components import ConnectedView, register_component, values
from bbnode.components.data.arrays import ArrayDataSource
from bbnode.components.errors import StatisticsMissing
from bbnode.dsl import BadArgument, DataSourceSlot, Graph, Module, PeerSelectorSlot, types
from bbnode.programs import FederatedStatistics
from bbnode.sim import Network, SimNode
from tests.programs.files import compiled

FEATURES = 5
COUNTS = (70, 30, 110)
TEST = "test"


class Measured(FederatedStatistics):
    clients = 3


def write(folder: Path, name: str, count: int, seed: int) -> str:
    random = np.random.default_rng(seed)
    # A large mean with a small deviation: where sums of squares cancel out.
    x = random.normal(1e4 * (1 + np.arange(FEATURES)), 0.5 + seed, (count, FEATURES))
    x[:, -1] = 7.0
    np.savez(folder / f"{name}.npz", x=x.astype(np.float32), y=random.integers(0, 4, count))
    return str(folder / f"{name}.npz")


def network(
    program: FederatedStatistics, folder: Path, clients: int = 3, **settings: Any
) -> tuple[Network, SimNode]:
    artifact = compiled(program)
    made = Network(1)
    test = {TEST: {"path": write(folder, "test", 10, 9), "standardize": "federated"}}
    server = made.add("server", artifact, ["server"], config=test if program.test else {})
    for i in range(clients):
        data = {"path": write(folder, f"c{i}", COUNTS[i], i), "standardize": "federated"}
        config = {"data": {**data, **settings}}
        made.add(f"client-{i}", artifact, ["client"], config=config)
    return made, server


def pooled(folder: Path, *clients: int) -> tuple[np.ndarray, np.ndarray]:
    loaded = [np.load(folder / f"c{i}.npz") for i in clients]
    return np.concatenate([f["x"] for f in loaded]).astype(np.float64), np.concatenate(
        [f["y"] for f in loaded]
    )


def measured(net: Network, server: SimNode) -> dict[str, Any]:
    execution = server.invoke("server", {"tick": values.TRIGGER})
    net.run_until_idle()
    return server.outputs(execution)


def test_they_are_those_of_all_examples_together(tmp_path) -> None:
    net, server = network(Measured(test=True), tmp_path)
    client = net["client-0"].component("data")
    with pytest.raises(StatisticsMissing, match="run a program that sends them"):
        next(iter(client.epoch_batches(4)))
    found = measured(net, server)
    x, y = pooled(tmp_path, 0, 1, 2)
    np.testing.assert_allclose(found["mean"], x.mean(axis=0), rtol=1e-12)
    np.testing.assert_allclose(found["std"], x.std(axis=0), rtol=1e-6, atol=1e-12)
    np.testing.assert_array_equal(found["minimum"], x.min(axis=0))
    np.testing.assert_array_equal(found["maximum"], x.max(axis=0))
    assert found["stats"]["num_samples"] == len(x)
    assert found["stats"]["label_counts"] == ",".join(map(str, np.bincount(y)))
    assert (found["stats"]["contributors"], found["stats"]["refused"], found["told"]) == (3, 0, 3)

    std = np.where(x.std(axis=0) > 0, x.std(axis=0), 1)
    for source, path in (
        (client, tmp_path / "c0.npz"),
        (server.component(TEST), tmp_path / "test.npz"),
    ):
        batch, _ = source.next_batch(None)
        assert batch.dtype == np.float32
        wanted = (np.load(path)["x"].astype(np.float64) - x.mean(axis=0)) / std
        np.testing.assert_allclose(batch, wanted, rtol=1e-5, atol=1e-6)
        assert not batch[:, -1].any()


def test_clients_keep_them_in_a_file_for_other_programs(tmp_path) -> None:
    kept = tmp_path / "statistics.json"
    net, server = network(Measured(), tmp_path, standardize="none", statistics=str(kept))
    found = measured(net, server)
    x, _ = pooled(tmp_path, 0, 1, 2)
    written = json.loads(kept.read_text())
    np.testing.assert_array_equal(written["mean"], found["mean"])
    assert written["count"] == len(x)
    assert not net["client-0"].component("data").next_batch(None)[0].min() < 0  # as they are
    net, _ = network(Measured(), tmp_path, statistics=str(kept))
    batch, _ = net["client-1"].component("data").next_batch(None)
    assert np.abs(batch).max() < 10


@register_component
class Lying(ArrayDataSource):
    """A client that says what it is told to say."""

    TYPE_NAME = "tests.LyingAboutStatistics"
    lie: Any = None

    def statistics(self, ctx):
        tensor, metadata = super().statistics(ctx)
        return type(self).lie(tensor.copy(), dict(metadata))


def at(row: int, value: float):
    def lie(tensor, metadata):
        tensor[row, 1] = value
        return tensor, values.Metadata(metadata)

    return lie


def saying(**more: Any):
    return lambda tensor, metadata: (tensor, values.Metadata({**metadata, **more}))


@pytest.mark.parametrize(
    ("lie", "why"),
    [
        (at(0, 3.0), "their count is"),
        (lambda t, m: (t * [[-1], [1], [1], [1], [1]], values.Metadata(m)), "their count is -110"),
        (at(1, np.nan), "NaN or infinity"),
        (at(1, np.inf), "NaN or infinity"),
        (at(1, 1e300), "not between minimum and maximum"),
        (at(2, -1.0), "a variance is negative"),
        (at(2, 1e300), "larger than minimum and maximum allow"),
        (at(4, 1e300), r"beyond 1e\+12"),
        (at(3, 1e9), "not between"),
        (lambda t, m: (t[:4], values.Metadata(m)), r"shape \[4, 5\]"),
        (lambda t, m: (t[:, :4].copy(), values.Metadata(m)), r"of 4 feature\(s\), not 5"),
        (lambda t, m: (t[0], values.Metadata(m)), r"shape \[5\]"),
        (saying(num_samples=-5), "num_samples is -5"),
        (saying(num_samples=10**9), "num_samples is 1000000000"),
        (saying(num_samples=True), "num_samples is True"),
        (saying(num_samples=7), "their count is 110, of 7 examples"),
        (saying(label_counts="-3,113"), "label_counts is no list of counts"),
        (saying(label_counts="1,1"), "label_counts are 2 together, not 110"),
        (saying(label_counts="9" * 40), "label_counts is no list"),
        (saying(label_counts=3), "label_counts is no list"),
    ],
)
def test_a_client_that_lies_is_left_out_and_named(tmp_path, monkeypatch, lie, why) -> None:
    monkeypatch.setattr(Lying, "lie", staticmethod(lie))
    program = Measured()
    made, server = network(program, tmp_path, clients=2)
    liar = compiled(Measured(data="tests.LyingAboutStatistics"))
    node = made.add(
        "client-2", liar, ["client"], config={"data": {"path": write(tmp_path, "c2", 110, 2)}}
    )
    found = measured(made, server)
    stats = found["stats"]
    assert (stats["contributors"], stats["refused"]) == (2, 1)
    assert str(node.peer_id) in stats["refused_why"]
    assert re.search(why, stats["refused_why"]), stats["refused_why"]
    x, _ = pooled(tmp_path, 0, 1)
    np.testing.assert_allclose(found["mean"], x.mean(axis=0), rtol=1e-12)


def test_a_client_that_is_cut_off_does_not_hold_up_the_others(tmp_path) -> None:
    net, server = network(Measured(quorum=2, deadline_s=5.0), tmp_path)
    execution = server.invoke("server", {"tick": values.TRIGGER})
    net.run(until=1_000)
    net.cut("server", "client-1")
    net.run_until_idle()
    found = server.outputs(execution)
    stats = found["stats"]
    assert (stats["contributors"], stats["missing"], found["told"]) == (2, 1, 2)
    x, _ = pooled(tmp_path, 0, 2)
    np.testing.assert_allclose(found["mean"], x.mean(axis=0), rtol=1e-12)
    with pytest.raises(StatisticsMissing):
        net["client-1"].component("data").next_batch(None)


def test_a_client_that_has_them_keeps_them_over_a_restart(tmp_path) -> None:
    net, server = network(Measured(), tmp_path)
    measured(net, server)
    client = net["client-0"]
    before, _ = client.component("data").next_batch(None)
    client.checkpoint()
    net.crash("client-0")
    net.restart("client-0")
    after, _ = client.component("data").next_batch(None)
    np.testing.assert_array_equal(before, after)


class ThenBatches(Module):
    """A program of one's own: the statistics first, then what they standardise."""

    home = "server"

    def body(self, g: Graph) -> None:
        start = g.input("tick", types.TRIGGER)
        measured = FederatedStatistics(clients=3).call().input("tick", start).build(g)
        told = measured.output("told")
        peers = PeerSelectorSlot("again", peer_class="client").sample(g, n=3, after=told)
        asked = g.request("batches", peers, told, quorum=3, deadline=10.0)
        batch, _ = DataSourceSlot("data").next_batch(g, after=asked.received)
        asked.respond(g.expect(batch, types.TENSOR_FLOAT))
        g.output("all", asked.responses.concatenated())

    def bindings(self) -> dict[str, Any]:
        return {**FederatedStatistics().bindings(), "again": ConnectedView}


def test_a_program_of_ones_own_calls_it_first(tmp_path) -> None:
    artifact = compiled(ThenBatches())
    net = Network(1)
    server = net.add("server", artifact, ["server"])
    for i in range(3):
        data = {"path": write(tmp_path, f"c{i}", COUNTS[i], i), "standardize": "federated"}
        net.add(f"client-{i}", artifact, ["client"], config={"data": data})
    everything = measured(net, server)["all"]
    assert server.failures() == []
    np.testing.assert_allclose(everything.mean(axis=0), 0, atol=1e-4)
    np.testing.assert_allclose(everything.std(axis=0)[:-1], 1, rtol=1e-4)


@pytest.mark.parametrize(
    "wrong",
    [
        {"clients": 0}, {"quorum": 4}, {"deadline_s": 0}, {"data": "bbnode.FedAvg"},
        {"data": "nope"}, {"test": 1},
    ],
)  # fmt: skip
def test_wrong_arguments_are_named(wrong) -> None:
    with pytest.raises(BadArgument, match=next(iter(wrong))):
        Measured(**wrong).build()
