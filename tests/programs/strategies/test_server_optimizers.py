"""The server's optimizers: their state, their settings, and clients that lie."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from bbnode.components import OnnxModel, concrete, register_component
from bbnode.components.errors import ParameterMismatch
from bbnode.dsl import BadArgument, ModelSlot
from bbnode.programs import FedAdagrad, FedAdam, FedAvgM, FederatedTraining, FedOpt, FedYogi
from bbnode.verify.reference import adaptive
from tests.programs.strategies.federation import SOFTMAX, Federation, close, normalised


def made(base: type[FederatedTraining], **given: Any) -> FederatedTraining:
    return base(**{**SOFTMAX, **given})


def test_running_statistics_are_the_mean_of_clients_whatever_the_optimizer(tmp_path: Path) -> None:
    """A step leaves them alone; at a rate of 1, plain descent is FedAvg with them too."""
    programs = [
        made(base, model=normalised(), mode="train", **more)
        for base, more in ((FederatedTraining, {}), (FedOpt, {}), (FedOpt, {"deltas": True}))
    ]
    plain, *stepped = ([*Federation(tmp_path, each).rounds(2)][-1]["model"] for each in programs)
    for found in stepped:
        close(found, plain, 2e-6)
    adam = made(FedAdam, model=normalised(), mode="train")
    (found,) = Federation(tmp_path, adam).rounds(1)
    (mean,) = Federation(tmp_path, programs[0]).rounds(1)
    assert adam.size - adam.trained_size == 10
    close(found["model"][adam.trained_size :], mean["model"][adam.trained_size :])
    assert not np.allclose(found["model"][: adam.trained_size], mean["model"][: adam.trained_size])


def test_the_state_survives_a_restart(tmp_path: Path) -> None:
    """A server that is killed and started again goes on as one that was not."""
    through, restarted = (Federation(tmp_path, made(FedAdam, tau=1e-2)) for _ in range(2))
    (expected,) = [*through.rounds(4)][-1:]
    [*restarted.rounds(2)]
    restarted.server.checkpoint()
    restarted.net.crash("server")
    restarted.net.restart("server")
    (found,) = [*restarted.rounds(2)][-1:]
    assert found["model"].tobytes() == expected["model"].tobytes()


def test_settings_of_the_clients_are_not_the_servers(tmp_path: Path) -> None:
    given = {"optimizer": "adamw", "schedule": "cosine", "decay_steps": 3, "clip_norm": 0.1}
    program = made(FedAvgM, **given)
    federation = Federation(tmp_path, program)
    federation.net.run_until_idle()
    server, client = (
        node.component(slot).config
        for node, slot in ((federation.server, "global"), (federation.nodes[0], "local"))
    )
    assert (client.optimizer, client.schedule, client.clip_norm) == ("adamw", "cosine", 0.1)
    assert (server.optimizer, server.schedule, server.clip_norm) == ("sgd", "constant", 0.0)


@register_component
class LyingTrainer(OnnxModel):
    """A model whose parameters are what a liar says, once they are trained."""

    TYPE_NAME = "tests.LyingTrainer"
    lie: ClassVar[np.ndarray] = np.zeros(0, np.float32)

    def params(self, ctx: Any) -> Any:
        return self.lie


@pytest.mark.parametrize(
    "lie",
    ["short", *(pytest.param(lie, marks=pytest.mark.slow) for lie in ("nan", "infinite", "huge"))],
)
def test_a_liar_is_refused_and_the_state_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lie: str
) -> None:
    class Liar(FedAdam):
        name = "FedAdam"

        @property
        def client_model(self) -> ModelSlot:
            return ModelSlot("local", concrete=concrete(LyingTrainer, self._config))

    honest = made(FedAdam, tau=1e-2)
    lies = {"nan": np.nan, "infinite": np.inf, "short": 1.0, "huge": 1e30}
    size = 1 if lie == "short" else honest.size
    monkeypatch.setattr(LyingTrainer, "lie", np.full(size, lies[lie], np.float32))
    federation = Federation(tmp_path, honest, (None, None, Liar(**SOFTMAX, tau=1e-2)))
    w, state = federation.start, {}
    step = adaptive("adam", 0.1, 1e-2)
    for found in federation.rounds(3):
        assert (found["stats"]["contributors"], found["stats"]["refused"]) == (2, 1)
        few = federation.clients[:2]
        moved = sum(c.count * (c.trained(w) - w) for c in few) / sum(c.count for c in few)
        w = w + step(moved, state)
        close(found["model"], w)


def test_a_client_that_is_late_does_not_stop_the_optimizer(tmp_path: Path) -> None:
    federation = Federation(tmp_path, made(FedYogi, quorum=2, deadline_s=5.0))
    [*federation.rounds(1)]
    federation.net.crash("c1")
    (found,) = federation.rounds(1)
    assert found["stats"]["contributors"] == 2
    assert np.isfinite(found["model"]).all()


def test_a_step_that_would_overflow_leaves_the_state(tmp_path: Path) -> None:
    federation = Federation(tmp_path, made(FedAdagrad))
    model = federation.server.component("global")
    before = federation.start
    huge = np.full(before.size, 1e30, np.float32)
    with pytest.raises(ParameterMismatch, match="the optimizer's state after this step"):
        model.step(None, huge)
    close(model.params(None), before)


@pytest.mark.parametrize(
    ("base", "given", "said"),
    [
        (FedOpt, {"server_learning_rate": 0}, "server_learning_rate=0 has to be a number above 0"),
        (FedAvgM, {"server_momentum": 1.0}, "server_momentum=1.0 has to be .* below 1"),
        (FedAvgM, {"server_momentum": "0.9"}, "server_momentum='0.9' has to be"),
        (FedAvgM, {"server_nesterov": 1}, "server_nesterov=1 has to be true or false"),
        (FedAvgM, {"server_nesterov": True, "server_momentum": 0}, "server_momentum, which is 0"),
        (FedAdam, {"beta2": 1.5}, "beta2=1.5 has to be"),
        (FedAdam, {"tau": -1e-3}, "tau=-0.001 has to be a number above 0"),
        (FedYogi, {"tau": 1e-30}, "tau=1e-30 has to be a number whose square"),
        (FedAdagrad, {"tau": float("nan")}, "tau=nan has to be"),
    ],
)
def test_wrong_arguments_are_refused(
    base: type[FederatedTraining], given: dict[str, Any], said: str
) -> None:
    with pytest.raises(BadArgument, match=said):
        made(base, **given).build()
