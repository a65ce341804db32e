"""FedProx, SCAFFOLD, FedNova and q-FedAvg: restarts, stragglers, liars and wrong arguments.

Their numbers by the formulas of their papers are checks of `bbnode.verify`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from bbnode.components import (
    OnnxModel,
    StateVector,
    StateVectorConfig,
    concrete,
    register_component,
)
from bbnode.components.contracts import ComponentError
from bbnode.components.errors import InvalidComponentConfig, ParameterMismatch, UnsupportedByModel
from bbnode.daemon.state.weights import models_of
from bbnode.dsl import BadArgument, ModelSlot
from bbnode.ir.values import Metadata
from bbnode.programs import (
    FedAdam,
    FederatedTraining,
    FedNova,
    FedProx,
    QFedAvg,
    Scaffold,
    SecureTraining,
)
from tests.components.fakes import CTX
from tests.programs.strategies.federation import RATE, SOFTMAX, Client, Federation, close

FEWER = {"c1": {"local": {"max_steps": 1}}}  # a straggler: one epoch of three
STEPS = (3, 1, 3)


def made(base: type[FederatedTraining], **given: Any) -> Any:
    return base(**{**SOFTMAX, **given})


# --- FedProx ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_fedprox_without_its_term_is_fedavg(tmp_path: Path) -> None:
    found = [
        [*Federation(tmp_path, program).rounds(2)][-1]["model"]
        for program in (made(FedProx, proximal=0.0), made(FederatedTraining))
    ]
    close(found[0], found[1])


# --- SCAFFOLD ---------------------------------------------------------------------------------


def scaffold(
    clients: list[Client], w: Any, c: Any, own: list[Any], all_of: int, rate: float
) -> Any:
    """One round of algorithm 1, option II; returns w, c and the c_i."""
    moves, turns = [], []
    for at, client in enumerate(clients):
        y = client.trained(w, correction=c - own[at])
        new = own[at] - c + (w - y) / (3 * RATE)
        moves.append(y - w)
        turns.append(new - own[at])
        own[at] = new
    w = w + rate * np.mean(moves, axis=0)
    return w, c + len(clients) / all_of * np.mean(turns, axis=0), own


def test_control_variates_survive_a_restart(tmp_path: Path) -> None:
    through, restarted = (Federation(tmp_path, made(Scaffold)) for _ in range(2))
    expected = [*through.rounds(4)][-1]["model"]
    [*restarted.rounds(2)]
    for name in ("server", "c0", "c1", "c2"):
        restarted.net.find(name).checkpoint()
        restarted.net.crash(name)
        restarted.net.restart(name)
    restarted.net.run_until_idle()
    assert [*restarted.rounds(2)][-1]["model"].tobytes() == expected.tobytes()


def test_vectors_are_no_models_to_export(tmp_path: Path) -> None:
    federation = Federation(tmp_path, made(Scaffold))
    federation.net.run_until_idle()
    assert [each.slot for each in models_of(federation.server.node)] == ["global"]
    assert [each.slot for each in models_of(federation.nodes[0].node)] == ["local"]


def test_a_client_that_is_away_changes_no_control_variate(tmp_path: Path) -> None:
    federation = Federation(tmp_path, made(Scaffold, quorum=2, deadline_s=5.0, clients=3))
    w, c, own = federation.start, 0.0, [0.0, 0.0, 0.0]
    federation.net.crash("c1")
    (found,) = federation.rounds(1)
    few = [federation.clients[0], federation.clients[2]]
    w, c, _ = scaffold(few, w, c, own[:2], 3, 1.0)
    close(found["model"], w)
    close(federation.server.component("control").params(None), c, 2e-6)


@register_component
class WildTrainer(OnnxModel):
    """A model that says that it trained to NaN."""

    TYPE_NAME = "tests.WildTrainer"
    work: ClassVar[Any] = np.ones(3, np.float32)

    def train_adjusted(self, ctx: Any, *_: Any, **__: Any) -> Any:
        self._params = np.full(self.size, np.nan, np.float32)
        return Metadata(num_samples=7), self.work


@pytest.mark.parametrize("base", [Scaffold, FedNova], ids=lambda base: base.__name__)
def test_a_client_that_answers_nonsense_is_refused_by_name(
    tmp_path: Path, base: type[FederatedTraining]
) -> None:
    class Liar(base):  # type: ignore[misc, valid-type]
        name = base.__name__

        @property
        def client_model(self) -> ModelSlot:
            return ModelSlot("local", concrete=concrete(WildTrainer, self._config))

    federation = Federation(tmp_path, made(base), (None, None, made(Liar)))
    w = federation.start
    [found, after] = federation.rounds(2)
    for each in (found, after):
        assert (each["stats"]["contributors"], each["stats"]["refused"]) == (2, 1)
        assert np.isfinite(each["model"]).all()
    if base is Scaffold:  # the control variate moves by those that count
        own, c = [0.0, 0.0], 0.0
        for _ in range(2):
            w, c, own = scaffold(federation.clients[:2], w, c, own, 3, 1.0)
        close(after["model"], w)
        close(federation.server.component("control").params(None), c, 2e-6)


def test_control_variates_travel_as_codes(tmp_path: Path) -> None:
    """Those whose decoded answers count are told so."""
    program = made(Scaffold, codec="bbnode.Float16Codec", codec_down="bbnode.BFloat16Codec")
    federation = Federation(tmp_path, program)
    w = federation.start
    (found,) = federation.rounds(1)
    expected, _, own = scaffold(federation.clients, w, 0.0, [0.0, 0.0, 0.0], 3, 1.0)
    close(found["model"], expected, 5e-3)
    for node, kept in zip(federation.nodes, own, strict=True):
        close(node.component("own_control").params(None), kept, 5e-2)


# --- FedNova ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_fednova_of_equal_work_is_fedavg(tmp_path: Path) -> None:
    found = [
        [*Federation(tmp_path, program).rounds(2)][-1]["model"]
        for program in (made(FedNova), made(FederatedTraining))
    ]
    close(found[0], found[1])


# --- q-FedAvg ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_client_that_fares_worst_gains_by_q(tmp_path: Path) -> None:
    """One client has other labels: with q its loss comes nearer to the others'."""
    spread = []
    for q in (0.0, 5.0):
        federation = Federation(tmp_path, made(QFedAvg, q=q))
        held = np.load(tmp_path / "c0.npz")
        np.savez(tmp_path / "c0.npz", x=held["x"], y=(held["y"] + 1) % 3)
        w = [*federation.rounds(20)][-1]["model"].astype(np.float64)
        odd = Client(held["x"].astype(np.float64), (held["y"] + 1) % 3)
        losses = [each.loss(w) for each in (odd, *federation.clients[1:])]
        spread.append(np.std(losses))
        np.savez(tmp_path / "c0.npz", x=held["x"], y=held["y"])
    assert spread[1] < spread[0]


# --- with others, and arguments -----------------------------------------------------------------


def test_strategies_of_clients_go_with_those_of_the_server(tmp_path: Path) -> None:
    class Both(FedProx, FedAdam):
        proximal = 0.5
        tau = 1e-2

    federation = Federation(tmp_path, made(Both))
    w = federation.start
    (found,) = federation.rounds(1)
    d = federation.mean([each.trained(w, proximal=0.5) - w for each in federation.clients])
    square = 0.99 * 1e-4 + 0.01 * d**2
    close(found["model"], w + 0.1 * 0.1 * d / (np.sqrt(square) + 1e-2))


@pytest.mark.parametrize(
    ("base", "given", "said"),
    [
        (FedProx, {"proximal": -0.1}, "proximal=-0.1 has to be a number of at least 0"),
        (FedProx, {"proximal": "1"}, "proximal='1' has to be"),
        (Scaffold, {"optimizer": "adam"}, "optimizer='adam' has to be \"sgd\""),
        (Scaffold, {"momentum": 0.9}, "momentum=0.9 has to be 0"),
        (Scaffold, {"deltas": False}, "deltas=False has to be true"),
        (Scaffold, {"population": 2}, "population=2 has to be 0 or at least clients=3"),
        (FedNova, {"optimizer": "adamw"}, "optimizer='adamw' has to be"),
        (FedNova, {"momentum": 0.9, "proximal": 0.1}, "proximal=0.1 has to be 0 beside"),
        (FedNova, {"proximal": 10.0}, "proximal=10.0 has to be below 1 / learning_rate"),
        (FedNova, {"momentum": 0.9, "nesterov": True}, "nesterov=True has to be false"),
        (
            FedNova,
            {"momentum": 0.9, "keep_optimizer_state": True},
            "keep_optimizer_state=True has to be false beside a momentum",
        ),
        (QFedAvg, {"q": float("inf")}, "q=inf has to be"),
        (QFedAvg, {"weighted": True}, "weighted=True has to be false"),
        (QFedAvg, {"qq": 1}, "qq"),
        (QFedAvg, {"codec": "bbnode.Int8Codec"}, "codec= would bend the numbers"),
        (FedNova, {"aggregator": "bbnode.NormClipping"}, "NormClipping.* would bend the numbers"),
    ],
)
def test_wrong_arguments_are_refused(
    base: type[FederatedTraining], given: dict[str, Any], said: str
) -> None:
    with pytest.raises((BadArgument, TypeError), match=said):
        made(base, **given).build()


def test_masks_do_not_go_with_numbers_that_they_would_clip() -> None:
    class Both(SecureTraining, FedNova):
        pass

    with pytest.raises(BadArgument, match="the clip of masked answers would bend"):
        made(Both).build()


# --- StateVector --------------------------------------------------------------------------------


def test_a_vector_is_kept_and_saved() -> None:
    one, other = (StateVector(StateVectorConfig(size=3)) for _ in range(2))
    assert one.serialize() == b""
    assert np.array_equal(one.params(CTX), np.zeros(3))
    given = np.arange(3, dtype=np.float32)
    one.load_parameters(CTX, given)
    given[0] = 9
    one.apply_delta(CTX, np.ones(3, np.float32))
    other.restore(one.serialize())
    assert other.params(CTX).tolist() == [1, 2, 3]
    assert not other.params(CTX).flags.writeable


@pytest.mark.parametrize(
    "wrong",
    [
        np.ones(2, np.float32), np.ones((3, 1), np.float32), np.ones(3), "text",
        np.full(3, np.nan, np.float32), np.float32(1),
    ],
    ids=str,
)  # fmt: skip
def test_what_does_not_fit_a_vector_is_refused(wrong: Any) -> None:
    vector = StateVector(StateVectorConfig(size=3))
    for call in (vector.load_parameters, vector.apply_delta):
        with pytest.raises(ParameterMismatch):
            call(CTX, wrong)
    assert np.array_equal(vector.params(CTX), np.zeros(3))
    with pytest.raises(ComponentError):
        vector.restore(b"nonsense")


def test_a_vector_is_no_model() -> None:
    vector = StateVector(StateVectorConfig(size=3))
    huge = np.full(3, 3e38, np.float32)
    vector.load_parameters(CTX, huge)
    with pytest.raises(ParameterMismatch, match="NaN or infinity"):
        vector.apply_delta(CTX, huge)
    x = np.ones(3, np.float32)
    for call in (
        lambda: vector.forward(CTX, x), lambda: vector.compute_loss(CTX, x, x),
        lambda: vector.backward(CTX, x), lambda: vector.step(CTX, x),
        lambda: vector.train(CTX, epochs=1, batch=1),
    ):  # fmt: skip
        with pytest.raises(UnsupportedByModel):
            call()
    with pytest.raises(InvalidComponentConfig, match="size is 0"):
        StateVector(StateVectorConfig(size=0))
