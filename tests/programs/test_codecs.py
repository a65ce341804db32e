"""Federated training with codecs: it learns, the bytes are fewer, and numpy says the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.datasets import load_digits

from bbnode.components import (
    ArrayDataSource,
    BFloat16Codec,
    FedAvg,
    Float16Codec,
    Int4Codec,
    Int8Codec,
    NF4Codec,
    PowerSGDCodec,
    ProductQuantizer,
    RandomKCodec,
    ScalarQuantizer,
    SignCodec,
    TopKCodec,
    ZstdCodec,
    concrete,
    values,
)
from bbnode.components.settings import stored_settings
from bbnode.dsl import BadArgument
from bbnode.engine import steps
from bbnode.programs import FedAdam, FederatedTraining, Scaffold
from bbnode.sim import Network
from tests.programs.files import compiled
from tests.programs.strategies.federation import SOFTMAX, Federation, close


def slow(*row: Any) -> Any:
    return pytest.param(*row, marks=pytest.mark.slow)


# Of each codec the settings that suit a small model, and its answers over those without a codec.
EACH: list[Any] = [
    slow(Float16Codec, 0.52),
    slow(BFloat16Codec, 0.52),
    (Int8Codec, 0.27),
    slow(Int4Codec, 0.17),
    (NF4Codec, 0.17),
    (concrete(TopKCodec, fraction=0.05), 0.12),
    (concrete(RandomKCodec, fraction=0.5), 0.53),
    (SignCodec, 0.06),
    (PowerSGDCodec, 0.35),
    slow(ProductQuantizer, 0.70),  # its codebooks of 4 KiB are as large as half of this model
    slow(ScalarQuantizer, 0.28),
    slow(ZstdCodec, 1.0),
]


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("digits")
    found = load_digits()
    x, y = (found.data / 16).astype(np.float32), found.target.astype(np.int64)
    order = np.random.default_rng(0).permutation(len(x))
    np.savez(folder / "test.npz", x=x[order[:297]], y=y[order[:297]])
    for i, part in enumerate(np.split(order[297:], 3)):
        np.savez(folder / f"c{i}.npz", x=x[part], y=y[part])
    return folder


def learned(folder: Path, rounds: int, **arguments: Any) -> tuple[float, list[int]]:
    """The accuracy after some rounds, and the bytes of each answer of a client."""
    sizes: list[int] = []

    def watch(_at: int, node: Any, step: Any) -> None:
        if isinstance(step, steps.SendEnvelope) and node.name.startswith("c") and step.size > 100:
            sizes.append(step.size)

    program = FederatedTraining(
        model=(64, 32, 10), clients=3, epochs=1, learning_rate=0.2, data=ArrayDataSource,
        deltas=True, **arguments,
    )  # fmt: skip
    net = Network(1, observe=watch)
    artifact = compiled(program)
    test = {"test": {"path": str(folder / "test.npz")}}
    server = net.add("server", artifact, ["server"], config=test)
    for i in range(3):
        data = {"data": {"path": str(folder / f"c{i}.npz")}}
        net.add(f"c{i}", artifact, ["client"], config=data)
    for _ in range(rounds):
        execution = server.invoke("server", {"tick": values.TRIGGER})
        net.run_until_idle()
    assert server.failures() == []
    return float(server.outputs(execution)["accuracy"]), sizes


@pytest.mark.parametrize(("codec", "part"), EACH)
def test_digits_are_learned_with_each_codec(digits: Path, codec: Any, part: float) -> None:
    accuracy, sizes = learned(digits, 6, codec=codec)
    assert accuracy > 0.85
    plain = 4 * (64 * 32 + 32 + 32 * 10 + 10)
    assert max(sizes) / plain < part + 350 / plain  # an envelope and its metadata


def test_weights_travel_down_as_bfloat16(digits: Path) -> None:
    accuracy, _ = learned(digits, 6, codec=Int8Codec, codec_down="bbnode.BFloat16Codec")
    assert accuracy > 0.85


@pytest.mark.parametrize("place", ["clients", "both"])
def test_a_program_with_codecs_compiles_wherever_it_evaluates(place: str) -> None:
    program = FederatedTraining(
        model=(4, 3), deltas=True, codec=PowerSGDCodec, codec_down=NF4Codec, evaluate=place
    )
    compiled(program)


def test_a_codec_of_matrices_is_told_those_of_each_part_of_an_answer() -> None:
    program = Scaffold(model=(64, 32, 10), deltas=True, codec=PowerSGDCodec)
    settings = stored_settings(program.codec_of_answers().concrete.config)
    one = [[64, 32], [1, 32], [32, 10], [1, 10]]
    assert settings["matrices"] == 2 * one
    assert sum(a * b for a, b in one) == program.size


def top_k(v: np.ndarray, k: int) -> np.ndarray:
    made = np.zeros_like(v)
    at = np.argsort(-np.abs(v), kind="stable")[:k]
    made[at] = v[at]
    return made


def test_top_k_with_error_feedback_is_that_of_numpy(tmp_path: Path) -> None:
    """Karimireddy et al., 2019, algorithm 1, over the clients of a round."""
    program = FederatedTraining(**SOFTMAX, deltas=True, codec=concrete(TopKCodec, fraction=0.4))
    federation = Federation(tmp_path, program)
    w, k = federation.start, -(-2 * program.size // 5)
    errors = [np.zeros_like(w) for _ in federation.clients]
    for found in federation.rounds(4):
        sent = []
        for i, client in enumerate(federation.clients):
            v = client.trained(w) - w + errors[i]
            sent.append(top_k(v, k))
            errors[i] = v - sent[i]
        w = w + federation.mean(sent)
        close(found["model"], w)


def test_signs_with_error_feedback_are_those_of_numpy(tmp_path: Path) -> None:
    federation = Federation(tmp_path, FederatedTraining(**SOFTMAX, deltas=True, codec=SignCodec))
    w = federation.start
    errors = [np.zeros_like(w) for _ in federation.clients]
    for found in federation.rounds(3):
        sent = []
        for i, client in enumerate(federation.clients):
            v = client.trained(w) - w + errors[i]
            sent.append(np.where(v >= 0, 1, -1) * np.abs(v).mean())
            errors[i] = v - sent[i]
        w = w + federation.mean(sent)
        close(found["model"], w)


def test_int8_is_that_of_numpy_within_a_step(tmp_path: Path) -> None:
    federation = Federation(tmp_path, FederatedTraining(**SOFTMAX, deltas=True, codec=Int8Codec))
    w = federation.start
    (found,) = federation.rounds(1)
    moved = [client.trained(w) - w for client in federation.clients]
    steps_of = [np.abs(d).max() / 127 for d in moved]
    rounded = [np.rint(d / s) * s for d, s in zip(moved, steps_of, strict=True)]
    exact = np.abs(np.asarray(found["model"]) - (w + federation.mean(rounded)))
    assert np.mean(exact > 1e-6) < 0.05  # a value that lies between two steps may go either way
    assert exact.max() <= max(steps_of)


def test_a_strategy_of_another_optimizer_takes_a_codec_too(tmp_path: Path) -> None:
    coded = Federation(tmp_path, FedAdam(**SOFTMAX, deltas=True, codec=Float16Codec))
    plain = Federation(tmp_path, FedAdam(**SOFTMAX, deltas=True))
    for a, b in zip(coded.rounds(2), plain.rounds(2), strict=True):
        close(a["model"], b["model"], 2e-3)


def test_an_error_memory_outlives_a_restart(tmp_path: Path) -> None:
    def models(restart: bool) -> np.ndarray:
        program = FederatedTraining(**SOFTMAX, deltas=True, codec=concrete(TopKCodec, fraction=0.1))
        federation = Federation(tmp_path, program)
        *_, _ = federation.rounds(2)
        if restart:
            node = federation.nodes[0]
            node.checkpoint()
            federation.net.crash(node.name)
            federation.net.restart(node.name)
            federation.net.run_until_idle()
        *_, found = federation.rounds(2)
        return np.asarray(found["model"])

    assert np.array_equal(models(restart=True), models(restart=False))


class Liar(TopKCodec):
    TYPE_NAME = "bbnode.TopKCodec"

    def encode(self, ctx: Any, tensor: Any) -> Any:
        code = np.array(super().encode(ctx, tensor))
        code[-4:] = np.frombuffer(np.float32(np.nan).tobytes(), np.uint8)
        return code


def test_a_client_whose_code_lies_is_left_out_by_name(tmp_path: Path) -> None:
    program = FederatedTraining(**SOFTMAX, deltas=True, codec=concrete(TopKCodec, fraction=1.0))
    federation = Federation(tmp_path, program)
    w = federation.start
    federation.nodes[1].component("codec").__class__ = Liar
    (found,) = federation.rounds(1)
    honest = [federation.clients[i] for i in (0, 2)]
    total = sum(client.count for client in honest)
    mean = sum(client.count / total * client.trained(w) for client in honest)
    close(found["model"], mean)
    assert found["stats"]["contributors"] == 2
    assert found["stats"]["missing"] == 1
    liar = str(federation.nodes[1].node.peer_id)
    assert f"{liar}: CodeRefused: bbnode.TopKCodec: the code" in found["stats"]["missing_why"]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"codec": Int8Codec, "deltas": False}, "set deltas=True as well"),
        ({"codec": "bbnode.Int8Codek"}, "did you mean"),
        ({"codec": FedAvg}, "has to be a Codec"),
        ({"codec": concrete(FedAvg)}, "has to be a Codec"),
        ({"codec": 8}, "has to be a Codec"),
        ({"codec_down": TopKCodec}, "this codec is for deltas"),
        ({"codec_down": concrete(SignCodec)}, "this codec is for deltas"),
    ],
)
def test_codecs_that_do_not_fit_are_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(BadArgument, match=said):
        FederatedTraining(**{"model": (4, 3), "deltas": True, **given}).build()
