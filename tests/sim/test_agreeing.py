"""Simulated nodes whose data mean different things, compared by the class that daemons use."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bbnode.compiler import Compiler
from bbnode.engine.planning.data_slots import data_slots_of
from bbnode.ir.errors import DeploymentError
from bbnode.ir.values import TRIGGER
from bbnode.programs import (
    FederatedStatistics,
    FederatedTraining,
    FederatedTrees,
    GossipTraining,
    HierarchicalTraining,
)
from bbnode.sim import Network


@cache
def line(**more: Any) -> Any:
    program = FederatedTraining(
        model=(2, 1), data="bbnode.TableDataSource", loss="mse", learning_rate=0.2, clients=3,
        epochs=3, evaluate="clients", **more,
    )  # fmt: skip
    return Compiler().bind_all(program.bindings()).compile(program.build())


@cache
def gossip() -> Any:
    program = GossipTraining(model=(2, 1), data="bbnode.TableDataSource", loss="mse")
    return Compiler().bind_all(program.bindings()).compile(program.build())


def config(folder: Path, order: str) -> dict[str, dict[str, str]]:
    path = folder / f"{order}.csv"
    a, b = np.random.default_rng(0).uniform(size=(2, 60))
    values = {"a": a, "b": b, "y": 3 * a - 2 * b}
    rows = np.stack([values.get(name, a) for name in order.split(",")], 1)
    np.savetxt(path, rows, delimiter=",", header=order, comments="", fmt="%.4f")
    of = {"path": str(path), "label": "y"}
    return {"data": of, "held_out": of}


def test_columns_in_another_order_are_mapped(tmp_path: Path) -> None:
    network = Network()
    server = network.add("server", line(), ["server"])
    for at, order in enumerate(("a,b,y", "a,b,y", "b,a,y")):
        network.add(f"client-{at}", line(), ["client"], config=config(tmp_path, order))
    found = 1.0
    for _ in range(20):
        execution = server.invoke("server", {"tick": TRIGGER})
        network.run_until_idle()
        found = float(np.asarray(server.outputs(execution)["loss"]))
    assert found < 0.01
    assert network["client-2"].component("data").schema().names == ("a", "b")


def test_who_differs_is_held_with_one_line_until_it_comes_back_mended(tmp_path: Path) -> None:
    network = Network()
    server = network.add("server", line(), ["server"])
    network.add("first", line(), ["client"], config=config(tmp_path, "a,b,y"))
    wrong = network.add("wrong", line(), ["client"], config=config(tmp_path, "b,c,y"))
    network.run_until_idle()
    assert server.node.connected_peers("client") == (network["first"].peer_id,)
    (said,) = server.node.peers_not_ready().values()
    assert said.reason == "columns b, c; the federation has a, b"
    source = wrong.component("data")
    source.config.__dict__["path"] = str(tmp_path / "mended.csv")
    (tmp_path / "mended.csv").write_text((tmp_path / "b,c,y.csv").read_text().replace("c", "a"))
    held = wrong.component("held_out")
    held.config.__dict__["path"] = str(tmp_path / "mended.csv")
    source.forget()
    held.forget()
    network.cut(server, wrong)
    network.heal(server, wrong)
    network.run_until_idle()
    assert len(server.node.connected_peers("client")) == 2
    assert server.node.peers_not_ready() == {}


def test_a_crash_of_the_server_loses_no_reference(tmp_path: Path) -> None:
    network = Network()
    server = network.add("server", line(), ["server"])
    network.add("first", line(), ["client"], config=config(tmp_path, "a,b,y"))
    network.run_until_idle()
    network.crash(server)
    network.crash("first")
    network.restart(server)
    late = network.add("late", line(), ["client"], config=config(tmp_path, "b,a,y"))
    network.run_until_idle()
    assert late.component("data").schema().names == ("a", "b")


def test_held_out_examples_mean_what_the_others_do(tmp_path: Path) -> None:
    network = Network()
    server = network.add("server", line(), ["server"])
    own, other = config(tmp_path, "a,b,y"), config(tmp_path, "a,c,y")
    network.add(
        "mixed", line(), ["client"], config={"data": own["data"], "held_out": other["held_out"]}
    )
    network.run_until_idle()
    (said,) = server.node.peers_not_ready().values()
    assert said.reason == "columns a, c; the federation has a, b"
    # It has left no trace: the next one defines what they mean.
    network.add("first", line(), ["client"], config=config(tmp_path, "b,a,y"))
    network.run_until_idle()
    assert server.agreement.references.kept["client/data"].places == ("b", "a")


@pytest.mark.parametrize("first", ["server", "client"])
def test_statistics_go_to_the_columns_that_they_are_of(tmp_path: Path, first: str) -> None:
    program = FederatedStatistics(clients=1, test=True, data="bbnode.TableDataSource")
    model = Compiler().bind_all(program.bindings()).compile(program.build())
    network = Network()
    of = {"standardize": "federated", "label": "y"}
    config_of = {
        name: {**config(tmp_path, order)["data"], **of, "statistics": str(tmp_path / name)}
        for name, order in {"server": "a,b,y", "client": "b,a,y"}.items()
    }
    for name in sorted(config_of, key=lambda name: name != first):
        slot = "test" if name == "server" else "data"
        network.add(name, model, [name], config={slot: config_of[name]})
    execution = network["server"].invoke("server", {"tick": TRIGGER})
    network.run_until_idle()
    assert network["server"].outputs(execution)["told"] == 1
    written = [json.loads((tmp_path / name).read_text()) for name in config_of]
    server, client = (dict(zip(each["columns"], each["mean"], strict=True)) for each in written)
    a, b = np.random.default_rng(0).uniform(size=(2, 60))
    assert server == client == pytest.approx({"a": a.mean(), "b": b.mean()}, abs=1e-4)


@pytest.mark.parametrize(
    "program",
    [
        FederatedTraining(model=(2, 1), data="bbnode.TableDataSource", loss="mse"),
        HierarchicalTraining(model=(2, 1), data="bbnode.TableDataSource", loss="mse"),
        FederatedTrees(features=2, data="bbnode.TableDataSource"),
        FederatedStatistics(data="bbnode.TableDataSource", test=True),
    ],
    ids=lambda each: type(each).__name__,
)
def test_examples_of_the_servers_test_mean_what_those_of_the_clients_do(program: Any) -> None:
    model = Compiler().bind_all(program.bindings()).compile(program.build())
    slots = data_slots_of(model)
    assert slots.groups["server"]["test"] == slots.groups["client"]["data"]
    assert slots.keepers["client"] == slots.keepers.get("server", "server")


def test_a_model_slot_with_something_else_is_left_to_the_install() -> None:
    """A stranger's artifact may name any component for a model."""
    for wrong in ("bbnode.TableDataSource", "bbnode.OrtBackend", "nobody.Knows"):
        model = type(line())()
        model.CopyFrom(line())
        for entry in model.metadata_props:
            role, *rest = entry.value.split("|")
            if role == "Model":
                entry.value = f"{role}|{wrong}|{rest[-1]}"
        assert "client" in data_slots_of(model).groups
        network = Network()
        with pytest.raises(DeploymentError):
            network.add("client", model, ["client"])


def test_gossiping_nodes_follow_the_oldest_through_others(tmp_path: Path) -> None:
    network = Network(mesh=False)
    nodes = [
        network.add(f"peer-{at}", gossip(), ["peer"], config=config(tmp_path, order))
        for at, order in enumerate(("b,a,y", "a,b,y", "a,b,y", "a,c,y"))
    ]
    network.connect(nodes[1], nodes[2])
    network.run_until_idle()
    assert nodes[2].component("data").schema().names == ("a", "b")
    network.connect(nodes[0], nodes[1])
    network.connect(nodes[1], nodes[3])
    network.run_until_idle()
    for node in nodes[:3]:
        assert node.component("data").schema().names == ("b", "a")
    assert nodes[1].node.connected_peers("peer") == tuple(
        sorted((nodes[0].peer_id, nodes[2].peer_id))
    )
    assert [*nodes[3].node.peers_not_ready()] == [nodes[1].peer_id]
