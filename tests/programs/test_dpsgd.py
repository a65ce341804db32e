"""DPSGDTraining: rounds by the formula, budgets of nodes, and strategies that go with it or not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bbnode.components import epsilon_after, values
from bbnode.components.aggregators.collecting import _spent
from bbnode.dsl import BadArgument
from bbnode.ir.errors import DeploymentError
from bbnode.programs import (
    DiLoCo,
    Ditto,
    DPFedAvg,
    DPSGDTraining,
    FedAdam,
    FederatedTraining,
    FedProx,
    QFedAvg,
    Scaffold,
    SecureTraining,
)
from tests.programs.strategies.federation import RATE, SIZES, SOFTMAX, Client, Federation, close

QUIET: dict[str, Any] = {"example_noise": 1e-6, "example_epsilon": 1e30}


def made(base: type[FederatedTraining] = DPSGDTraining, **given: Any) -> Any:
    return base(**{**SOFTMAX, **given})


def privately(client: Client, w: np.ndarray, clip: float, steps: int = 3) -> np.ndarray:
    """Return the weights after steps with all examples in each batch, in float64."""
    for _ in range(steps):
        total = np.zeros_like(w)
        for x, y in zip(client.x, client.y, strict=True):
            g = Client(x[None], y[None]).gradient(w)
            total += g * min(1, clip / float(np.linalg.norm(g)))
        w = w - RATE * total / client.count
    return w


def test_a_round_is_the_mean_of_what_clients_train_by_the_formula(tmp_path: Path) -> None:
    federation = Federation(tmp_path, made(example_clip=0.4, **QUIET))
    w = federation.start
    for found in federation.rounds(2):
        w = federation.mean([privately(client, w, 0.4) for client in federation.clients])
        close(found["model"], w, 2e-6)
        assert found["stats"]["contributors"] == 3
        assert "loss" not in found["stats"]


def test_epsilon_is_shown_for_each_round_by_the_client_that_spent_most(tmp_path: Path) -> None:
    program = made(batch=10, epochs=1, example_epsilon=1e3, example_noise=2.0, example_delta=1e-4)
    federation = Federation(tmp_path, program)
    _ = federation.start
    for number, found in enumerate(federation.rounds(2), 1):
        spent = [
            epsilon_after(number * size // 10, noise=2.0, delta=1e-4, sampling=10 / size)
            for size in SIZES
        ]
        assert found["stats"]["epsilon"] == pytest.approx(max(spent))
        assert found["stats"]["delta"] == 1e-4


def test_a_node_s_own_budget_counts_and_it_is_missing_once_that_is_spent(tmp_path: Path) -> None:
    file = tmp_path / "ledger.json"
    own = {"local": {"epsilon": 4.0, "delta": 1e-5, "ledger": str(file)}}
    program = made(epochs=1, example_noise=2.0, example_epsilon=1e6, quorum=2)
    assert epsilon_after(1, noise=2.0, delta=1e-5) < 4 < epsilon_after(3, noise=2.0, delta=1e-5)
    federation = Federation(tmp_path, program, settings={"c1": own})
    _ = federation.start
    counts = [found["stats"]["contributors"] for found in federation.rounds(4)]
    assert counts[0] == 3
    assert counts[-1] == 2
    (first, *_) = federation.nodes[1].failures()
    assert "beyond the budget of 4" in str(first)
    assert federation.nodes[0].failures() == []
    # A crash gives nothing back.
    before = federation.nodes[1].component("local").charges
    federation.net.crash(federation.nodes[1])
    federation.net.restart(federation.nodes[1])
    federation.net.run_until_idle()
    assert federation.nodes[1].component("local").charges == before
    (found,) = federation.rounds(1)
    assert found["stats"]["contributors"] == 2


def test_a_node_with_a_budget_runs_no_program_that_keeps_to_none(tmp_path: Path) -> None:
    own = {"c1": {"local": {"epsilon": 4.0, "delta": 1e-5}}}
    with pytest.raises(DeploymentError, match="epsilon"):
        Federation(tmp_path, made(FederatedTraining), settings=own)


def test_it_goes_with_optimizers_of_the_server_and_training_of_clients(tmp_path: Path) -> None:
    class Private(DPSGDTraining, FedProx, FedAdam): ...

    program = made(Private, proximal=0.0, tau=1e-2, example_clip=0.4, **QUIET)
    federation = Federation(tmp_path, program)
    w = federation.start
    (found,) = federation.rounds(1)
    moves = [privately(client, w, 0.4) - w for client in federation.clients]
    d = federation.mean(moves)
    v = 0.99 * 1e-4 + 0.01 * d**2
    close(found["model"], w + program.server_learning_rate * 0.1 * d / (np.sqrt(v) + 1e-2), 5e-6)


def test_it_goes_with_secure_aggregation_and_with_privacy_of_clients(tmp_path: Path) -> None:
    class Masked(DPSGDTraining, SecureTraining): ...

    (tmp_path / "a").mkdir()
    program = made(Masked, example_clip=0.4, clip=4.0, weighted=True, max_samples=50, **QUIET)
    secure = Federation(tmp_path / "a", program, keys=True)
    w = secure.start
    (found,) = secure.rounds(1)
    wanted = secure.mean([privately(client, w, 0.4) for client in secure.clients])
    close(found["model"], wanted, 1e-3)

    class Both(DPFedAvg, DPSGDTraining): ...

    (tmp_path / "b").mkdir()
    both = Federation(
        tmp_path / "b", made(Both, noise=1e-4, epsilon=1e30, clip=9.0, example_clip=0.4, **QUIET)
    )
    w = both.start
    (found,) = both.rounds(1)
    close(found["model"], np.mean([privately(c, w, 0.4) for c in both.clients], axis=0), 5e-3)


@pytest.mark.parametrize("other", [DiLoCo, Scaffold])
def test_each_model_that_a_client_sends_of_is_private(other: type[FederatedTraining]) -> None:
    program = made(type("Mixed", (DPSGDTraining, other), {}), epochs=1, optimizer="sgd")
    program.check()
    assert program.client_model.concrete.type_name == "bbnode.PrivateModel"


@pytest.mark.parametrize("bases", [(DPSGDTraining, QFedAvg), (QFedAvg, DPSGDTraining)])
def test_a_strategy_that_sends_more_of_the_data_is_refused(bases: Any) -> None:
    with pytest.raises(
        BadArgument, match=r"DPSGDTraining and QFedAvg .* more than what was trained privately"
    ):
        made(type("Mixed", bases, {})).check()


@pytest.mark.parametrize(
    "given",
    [
        {"evaluate": "clients"}, {"example_noise": 0}, {"example_clip": -1},
        {"example_epsilon": float("inf")}, {"example_delta": 1.0}, {"accountant": "moments"},
        {"clip_norm": 1.0}, {"accumulate": 2}, {"precision": "mixed"}, {"max_train_s": 9.0},
        {"class_weights": (1.0,) * 4},
    ],
    ids=str,
)  # fmt: skip
def test_what_would_not_be_private_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(BadArgument):
        made(**given).check()


def test_evaluation_on_clients_of_a_personal_strategy_is_refused() -> None:
    with pytest.raises(BadArgument, match="evaluate"):
        made(type("Mixed", (DPSGDTraining, Ditto), {}), evaluate="clients").check()


def test_gradients_are_not_sent(tmp_path: Path) -> None:
    """A program that asks a private model for a gradient is refused, and would get no answer."""

    class Leaks(DPSGDTraining):
        _fenced = True

        def local_training(self, g: Any, weights: Any) -> Any:
            _, examples, labels = self.examples(g, self.train_data(), weights)
            grads, _ = self.client_model.gradient(g, examples, labels)
            return grads, g.constant(values.Metadata(num_samples=1), after=grads)

        def check_recorded(self, function: Any) -> None:
            if self._fenced:
                super().check_recorded(function)

    with pytest.raises(BadArgument, match="DPSGDTraining does not act in Leaks"):
        made(Leaks, **QUIET).build()
    Leaks._fenced = False
    federation = Federation(tmp_path, made(Leaks, **QUIET))
    _ = federation.start
    federation.server.invoke("server", {"tick": values.TRIGGER})
    federation.net.run_until_idle()
    assert any("without noise" in str(each) for each in federation.nodes[0].failures())
    assert any(each.kind == "QuorumNotReached" for each in federation.server.failures())


@pytest.mark.parametrize(
    ("told", "read"),
    [
        ((2, 1e-5), (2.0, 1e-5)), ((float("nan"), 0.1), None), ((float("inf"), 0.1), None),
        ((-1.0, 0.1), None), ((1.0, -0.1), None), (("much", 0.1), None), ((True, 0.1), None),
        ((1.0, b"x"), None), ((10**400, 0.1), None),
    ],
)  # fmt: skip
def test_what_a_peer_says_that_it_spent_has_to_be_numbers(told: Any, read: Any) -> None:
    assert _spent(*told) == read
