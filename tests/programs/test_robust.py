"""Robust aggregators in the rounds of federated training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bbnode.components import (
    ArrayDataSource,
    Median,
    NormClipping,
    TrimmedMean,
    concrete,
    values,
)
from bbnode.dsl import BadArgument
from bbnode.programs import FederatedTraining, FLTrustTraining
from tests.programs.files import compiled, examples
from tests.programs.strategies.federation import SOFTMAX, Client, Federation, close


def training(base: type[FederatedTraining] = FederatedTraining, **arguments: Any) -> Any:
    return type("Training", (base,), {})(**{**SOFTMAX, **arguments})


@pytest.mark.parametrize("aggregator", [Median, concrete(TrimmedMean, byzantine=1)])
def test_one_line_makes_the_round_robust(tmp_path: Path, aggregator: Any) -> None:
    federation = Federation(tmp_path, training(aggregator=aggregator))
    weights = federation.start
    for outputs in federation.rounds(2):
        weights = np.median([client.trained(weights) for client in federation.clients], axis=0)
        close(outputs["model"], weights)
        assert outputs["stats"]["contributors"] == 3


def test_too_few_clients_for_so_many_liars_fail_the_round(tmp_path: Path) -> None:
    federation = Federation(tmp_path, training(aggregator=concrete(TrimmedMean, byzantine=2)))
    federation.server.invoke("server", {"tick": values.TRIGGER})
    federation.net.run_until_idle()
    (failure,) = federation.server.failures()
    assert "NotEnoughContributions" in str(failure)
    assert "3 contribution(s)" in str(failure)


def test_norm_clipping_takes_changes(tmp_path: Path) -> None:
    clipping = concrete(NormClipping, max_norm=0.05, max_share=1.0)
    federation = Federation(tmp_path, training(aggregator=clipping, deltas=True))
    weights = federation.start
    for outputs in federation.rounds(2):
        moves = [client.trained(weights) - weights for client in federation.clients]
        short = [move * min(1, 0.05 / np.linalg.norm(move)) for move in moves]
        weights = weights + federation.mean(short)
        close(outputs["model"], weights)
        assert outputs["stats"]["shortened"] == 3
    with pytest.raises(BadArgument, match=r"deltas=False has to be true.*NormClipping"):
        compiled(training(aggregator=clipping))


def test_fltrust_trusts_by_what_the_server_learns(tmp_path: Path) -> None:
    root = {"path": examples(tmp_path, "root", 12, seed=9)}
    # The third client trains on labels that it made up: its moves point elsewhere.
    liar = {"path": examples(tmp_path, "liar", 50, seed=2)}
    held = dict(np.load(liar["path"]))
    held["y"] = (held["y"] + 1) % 3
    np.savez(liar["path"], **held)
    federation = Federation(
        tmp_path,
        training(FLTrustTraining),
        settings={"c2": {"data": liar}},
        server={"data": root},
    )
    federation.clients[2] = Client(held["x"].astype(np.float64), held["y"])
    own = np.load(root["path"])
    server = Client(own["x"].astype(np.float64), own["y"])
    weights = federation.start
    for outputs in federation.rounds(2):
        move = server.trained(weights) - weights
        others = [client.trained(weights) - weights for client in federation.clients]
        sizes = [np.linalg.norm(each) for each in others]
        length = np.linalg.norm(move)
        trust = [max(each @ move / (s * length), 0) for each, s in zip(others, sizes, strict=True)]
        scaled = [t * length / s * e for t, s, e in zip(trust, sizes, others, strict=True)]
        weights = weights + sum(scaled) / sum(trust)
        close(outputs["model"], weights)
        assert outputs["stats"]["trusted"] == sum(each > 0 for each in trust)
        assert outputs["stats"]["contributors"] == 4


def test_fltrust_takes_no_other_aggregator() -> None:
    with pytest.raises(BadArgument, match="aggregator"):
        compiled(training(FLTrustTraining, aggregator=Median))
    with pytest.raises(BadArgument, match="evaluate"):
        compiled(training(FLTrustTraining, evaluate="both", data=ArrayDataSource))
