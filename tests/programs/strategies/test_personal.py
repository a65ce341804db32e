"""What stays on a client: layers, normalisation, a model of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bbnode.dsl import BadArgument
from bbnode.programs import Ditto, FedAdam, FedBN, FederatedTraining, FedPer, FedRep
from tests.programs.files import CLASSES, FEATURES
from tests.programs.strategies.federation import SOFTMAX, Federation, close, normalised

BIAS = slice(FEATURES * CLASSES, None)


def made(base: type[FederatedTraining], **given: Any) -> Any:
    return base(**{**SOFTMAX, **given})


@pytest.mark.parametrize("deltas", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_personal_layers_never_leave_their_client(tmp_path: Path, deltas: bool) -> None:
    """The bias stays: each client trains with its own, and the weights alone are averaged."""
    program = made(FedPer, local=("*.bias",), deltas=deltas)
    assert program.answer_size == FEATURES * CLASSES
    federation = Federation(tmp_path, program)
    start = w = federation.start
    biases = [start[BIAS]] * 3
    for found in federation.rounds(3):
        trained = [
            client.trained(np.concatenate([w[: BIAS.start], bias]))
            for client, bias in zip(federation.clients, biases, strict=True)
        ]
        biases = [each[BIAS] for each in trained]
        w = np.concatenate([federation.mean(trained)[: BIAS.start], start[BIAS]])
        close(found["model"], w)
        for node, own in zip(federation.nodes, trained, strict=True):
            close(node.component("local").params(None), own)


def test_personal_layers_go_with_an_optimizer_on_the_server(tmp_path: Path) -> None:
    class Both(FedPer, FedAdam):
        local = ("*.bias",)
        tau = 1e-2

    federation = Federation(tmp_path, made(Both))
    w = federation.start
    (found,) = federation.rounds(1)
    d = federation.mean([client.trained(w) - w for client in federation.clients])
    d[BIAS] = 0
    close(found["model"], w + 0.01 * d / (np.sqrt(0.99 * 1e-4 + 0.01 * d**2) + 1e-2))
    assert np.array_equal(found["model"][BIAS], w[BIAS])


def test_each_client_evaluates_its_own_model(tmp_path: Path) -> None:
    program = made(FedPer, local=("*.bias",), evaluate="clients")
    federation = Federation(tmp_path, program, slots=("data", "held_out"))
    *_, found = federation.rounds(2)
    losses = []
    for node, client in zip(federation.nodes, federation.clients, strict=True):
        held = node.component("held_out").next_batch(None)
        loss = node.component("local").compute_loss(None, *held)
        losses.append((len(held[1]), float(loss)))
        close(node.component("local").params(None)[: BIAS.start], found["model"][: BIAS.start])
        assert client.count > len(held[1])
    expected = sum(n * each for n, each in losses) / sum(n for n, _ in losses)
    assert float(found["loss"]) == pytest.approx(expected, rel=1e-5)


def test_normalisation_stays_with_its_client(tmp_path: Path) -> None:
    program = made(FedBN, model=normalised())
    assert program.personal.kept(program) == {"bn.scale", "bn.bias", "bn.mean", "bn.var"}
    federation = Federation(tmp_path, program)
    start = federation.start
    *_, found = federation.rounds(3)
    spans, at = {}, 0
    for name, shape in program.layout.items():
        spans[name] = slice(at, at := at + int(np.prod(shape)))
    own = [node.component("local").params(None) for node in federation.nodes]
    for name, span in spans.items():
        if name in program.personal.kept(program):
            assert np.array_equal(found["model"][span], start[span].astype(np.float32))
            assert not np.allclose(own[0][span], own[1][span])
        else:
            close(found["model"][span], federation.mean(own)[span])


def test_what_clients_keep_survives_a_restart_and_a_missed_round(tmp_path: Path) -> None:
    federation = Federation(tmp_path, made(Ditto, quorum=2, deadline_s=5.0))
    [*federation.rounds(1)]
    node = federation.nodes[1]
    before = node.component("personal").params(None)
    node.checkpoint()
    federation.net.crash("c1")
    (found,) = federation.rounds(1)
    assert found["stats"]["contributors"] == 2
    federation.net.restart("c1")
    federation.net.run_until_idle()
    assert node.component("personal").params(None).tobytes() == before.tobytes()
    (found,) = federation.rounds(1)
    assert found["stats"]["contributors"] == 3


@pytest.mark.parametrize(
    ("base", "given", "said"),
    [
        (FedPer, {}, "local is empty"),
        (FedPer, {"local": ("*",)}, "local fits every parameter"),
        (FedPer, {"local": ("layer0.bia",)}, "'layer0.bia' fits no parameter.*layer0.bias"),
        (FedPer, {"local": "head"}, "local='head' has to be names"),
        (FedPer, {"local": ("*.bias",), "evaluate": "server"}, "evaluate='server' has to be"),
        (FedBN, {}, "no BatchNormalization"),
        (FedBN, {"model": normalised(), "mode": "as_written"}, "mode='as_written' has to be"),
        (FedRep, {"local": ("*.bias",), "clip_norm": 1.0}, "clip_norm=1.0 has to be 0"),
        (FedRep, {"local": ("*.bias",), "head_epochs": 0}, "head_epochs=0 has to be"),
        (Ditto, {"proximal": -1}, "proximal=-1 has to be"),
        (Ditto, {"personal_epochs": 0}, "personal_epochs=0 has to be"),
    ],
)
def test_wrong_arguments_are_refused(
    base: type[FederatedTraining], given: dict[str, Any], said: str
) -> None:
    with pytest.raises(BadArgument, match=said):
        made(base, **given).build()
