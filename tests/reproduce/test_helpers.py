"""What experiments share: a federation, the data of its clients, and rounds to a target."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from bbnode.programs import FederatedSGD, FederatedTraining
from reproduce._data import Examples, written
from reproduce._federation import Federation, RoundFailed, rounds_to


@pytest.fixture
def examples(tmp_path: Path) -> Examples:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(60, 4)).astype(np.float32), np.arange(60) % 3
    return Examples(written(tmp_path, "train", x, y), written(tmp_path, "test", x[:12], y[:12]))


@pytest.mark.parametrize(
    ("curve", "rounds"),
    [
        ([0.5, 0.8, 1.0], 2.5),
        ([0.5, 0.7, 0.6, 0.9], 4.0),
        ([0.5, 0.6, 0.4, 1.0], 3.75),  # on the best so far, 0.6, and not on the 0.4
        ([0.95], 1.0),
        ([0.5, math.nan], math.inf),
        ([], math.inf),
    ],
)
def test_rounds_are_counted_on_the_best_so_far(curve: list[float], rounds: float) -> None:
    assert rounds_to(curve, 0.9) == pytest.approx(rounds)


@pytest.mark.parametrize("partition", ["iid", "shards", "dirichlet"])
def test_each_example_is_one_clients(examples: Examples, partition: str) -> None:
    from bbnode.components import ArrayDataSource, ArrayDataSourceConfig

    shares = examples.shares(5, partition, seed=3, alpha=0.5)
    sources = [ArrayDataSource(ArrayDataSourceConfig(**share)) for share in shares]
    taken = np.concatenate([np.asarray(source.next_batch(None)[0]) for source in sources])
    held = np.load(examples.train)["x"]
    assert sorted(map(tuple, taken)) == sorted(map(tuple, held))


def test_one_seed_gives_the_same_rounds_and_offline_clients_are_not_asked(
    examples: Examples,
) -> None:
    program = FederatedTraining(model=(4, 3), clients=2)
    clients = [{"data": share} for share in examples.shares(4, "iid")]

    def made(seed: int) -> list[float]:
        federation = Federation(program, clients, {"test": examples.tested}, seed=seed)
        federation.online({0, 3})
        models = [client.component("local") for client in federation.clients]
        before = [model.params(None) for model in models]
        found = list(federation.rounds(2))
        trained = [
            not np.array_equal(model.params(None), old)
            for model, old in zip(models, before, strict=True)
        ]
        assert trained == [True, False, False, True]
        return [float(each["loss"]) for each in found]

    assert made(0) == made(0)


def test_a_round_without_outputs_says_what_failed(examples: Examples) -> None:
    program = FederatedSGD(model=(4, 3), clients=2)
    clients = [{"data": share} for share in examples.shares(2, "iid")]
    federation = Federation(program, clients, {"test": examples.tested})
    federation.online(())
    with pytest.raises(RoundFailed, match="client"):
        federation.round()


def test_another_program_of_one_client_is_its_own(examples: Examples) -> None:
    program = FederatedTraining(model=(4, 3), clients=2, epochs=3)
    lazy = FederatedTraining(model=(4, 3), clients=2, epochs=1)
    clients = [{"data": share} for share in examples.shares(2, "iid")]
    plain = Federation(program, clients, {"test": examples.tested}).round()
    other = Federation(program, clients, {"test": examples.tested}, others={1: lazy}).round()
    assert float(plain["loss"]) != float(other["loss"])
