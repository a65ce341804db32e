"""The components together, as one process plays server and clients: what the demo does."""

from __future__ import annotations

import numpy as np
import pytest

from bbnode.components.data.sklearn import SklearnDataSource, SklearnDataSourceConfig
from bbnode.components.models.mlp import mlp_forward
from bbnode.components.models.onnx_model import OnnxModelConfig
from bbnode.ir.values import Composite, ResponseBatch
from tests.components.fakes import CTX, PEERS, fedavg, onnx_model

CLIENTS = 4


def federated(seed: int, rounds: int, partition: str = "iid") -> tuple[list[float], bytes]:
    """Accuracy on the held-out part after each round, and the final parameters."""
    config = OnnxModelConfig(model=mlp_forward(seed=seed).SerializeToString())
    server, average = onnx_model(config), fedavg()
    shares = [
        SklearnDataSourceConfig(shard=i, shards=CLIENTS, partition=partition, seed=seed)
        for i in range(CLIENTS)
    ]
    clients = [onnx_model(config, SklearnDataSource(share)) for share in shares]
    x, y = SklearnDataSource(SklearnDataSourceConfig(split="test", seed=seed)).next_batch(CTX)
    accuracies = []
    for _ in range(rounds):
        answers = []
        for peer, client in zip(PEERS, clients, strict=False):
            client.load_parameters(CTX, server.params(CTX))
            stats = client.train(CTX, epochs=5, batch=32)
            answers.append((peer, Composite((client.params(CTX), stats))))
        average.contribute_all(CTX, ResponseBatch(responses=tuple(answers)))
        tensor, metadata = average.aggregate(CTX)
        assert metadata["contributors"] == CLIENTS
        server.load_parameters(CTX, tensor)
        accuracies.append(float((server.forward(CTX, x).argmax(axis=1) == y).mean()))
    return accuracies, server.params(CTX).tobytes()


@pytest.mark.parametrize("seed", range(5))
def test_twenty_iid_rounds_reach_95_percent(seed: int) -> None:
    accuracies, _ = federated(seed, rounds=20)
    assert accuracies[-1] >= 0.95


def test_the_same_seed_gives_the_same_bits() -> None:
    assert federated(3, rounds=2)[1] == federated(3, rounds=2)[1]
    assert federated(3, rounds=2)[1] != federated(4, rounds=2)[1]


def test_shards_learn_slower_but_learn() -> None:
    accuracies, _ = federated(0, rounds=8, partition="shards")
    iid, _ = federated(0, rounds=8)
    assert 0.5 < accuracies[-1] < iid[-1]
    assert np.mean(accuracies[:2]) < np.mean(accuracies[-2:])
