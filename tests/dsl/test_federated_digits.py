"""The example program: what it records, and what it says of bad settings."""

from __future__ import annotations

import msgpack
import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from bbnode.components.registry import build_config, component_class
from bbnode.dsl import BadArgument
from bbnode.examples.federated_digits import FederatedRound
from tests import protos
from tests.dsl.programs import meta


@pytest.fixture(scope="module")
def function():
    return FederatedRound().build().functions[0]


def test_it_is_checkable_onnx_and_reproducible() -> None:
    model = FederatedRound().build()
    onnx.checker.check_model(model, full_check=True)
    assert model.SerializeToString() == FederatedRound().build().SerializeToString()
    assert model.graph.name == "FederatedRound"


def test_its_ports_and_home(function) -> None:
    assert list(function.input) == ["tick"]
    assert list(function.output) == ["accuracy", "loss", "stats", "model"]
    assert meta(function, "home") == "server"


def test_its_slots(function) -> None:
    roles = {n: meta(function, f"slot_role.{n}").partition("|")[0] for n in function.attribute}
    assert roles == {
        "cohort": "PeerSelector", "fedavg": "Aggregator", "data": "DataSource",
        "compute": "Backend",
    }  # fmt: skip
    assert {a.name for a in function.attribute_proto} == {"global", "local"}


def test_every_generic_slot_is_bound_to_a_component_of_its_role(function) -> None:
    bindings = FederatedRound().bindings()
    assert set(bindings) == set(function.attribute)
    for slot, component in bindings.items():
        assert meta(function, f"slot_role.{slot}").startswith(f"{component.ROLE}|")
        assert component_class(component.TYPE_NAME) is component


@pytest.mark.parametrize(("clients", "quorum"), [(1, 1), (2, 1), (3, 2), (4, 3), (8, 6), (10, 8)])
def test_the_quorum_is_three_of_four_and_not_all_unless_given(clients, quorum) -> None:
    def request(**settings):
        nodes = FederatedRound(clients=clients, **settings).build().functions[0].node
        return next(n for n in nodes if n.op_type == "SendReqBatched")

    node = request(deadline_s=1.5)
    assert protos.get_attr(node, "quorum") == quorum
    assert protos.get_attr(node, "deadline_ns") == 1_500_000_000
    assert protos.get_attr(request(quorum=1), "quorum") == 1


def weights(**settings) -> list[np.ndarray]:
    function = FederatedRound(**settings).build().functions[0]
    stored = [msgpack.unpackb(protos.octets(a)) for a in function.attribute_proto]
    assert stored[0] == stored[1]  # both sides hold the same network
    graph = onnx.load_from_string(stored[0]["model"]).graph
    assert [list(t.dims) for t in graph.initializer] == [[64, 64], [64], [64, 10], [10]]
    return [numpy_helper.to_array(t) for t in graph.initializer]


def test_the_initial_weights_ride_in_the_program_and_follow_the_seed() -> None:
    for first, second in zip(weights(seed=1), weights(seed=1), strict=True):
        np.testing.assert_array_equal(first, second)
    assert not np.array_equal(weights(seed=1)[0], weights(seed=2)[0])


def test_settings_reach_the_ops_and_the_models() -> None:
    function = FederatedRound(epochs=2, batch=16, learning_rate=0.25).build().functions[0]
    train = next(n for n in function.node if n.op_type == "Train")
    assert (protos.get_attr(train, "epochs"), protos.get_attr(train, "batch")) == (2, 16)
    assert msgpack.unpackb(protos.octets(function.attribute_proto[0]))["learning_rate"] == 0.25


def test_the_data_settings_fit_the_data_source() -> None:
    program = FederatedRound(clients=3, seed=5, split="shards")
    source = program.bindings()["data"]
    server = build_config(source, "data", b"", program.data_config())
    assert (server.split, server.seed, server.shards) == ("test", 5, 1)
    client = build_config(source, "data", b"", program.data_config(2))
    assert (client.split, client.partition, client.shard, client.shards) == (
        "train", "shards", 2, 3,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"clients": 0}, "clients=0 has to be"),
        ({"clients": "4"}, "clients='4' has to be"),
        ({"quorum": 5}, "quorum=5 has to be an integer between 0"),
        ({"quorum": True}, "quorum=True"),
        ({"seed": -1}, "seed=-1"),
        ({"epochs": 1.5}, "epochs=1.5"),
        ({"batch": 0}, "batch=0"),
        ({"deadline_s": 0}, "deadline_s=0"),
        ({"learning_rate": "fast"}, "learning_rate='fast'"),
        ({"learning_rate": float("inf")}, "learning_rate=inf"),
        ({"split": "random"}, "one of iid, shards"),
    ],
)
def test_bad_settings_are_named(settings, text) -> None:
    with pytest.raises(BadArgument, match=text) as caught:
        FederatedRound(**settings).build()
    assert caught.value.module == "FederatedRound"
