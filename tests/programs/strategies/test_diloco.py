"""DiLoCo by its paper's algorithm, in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bbnode.components import values
from bbnode.dsl import BadArgument
from bbnode.programs import DiLoCo
from tests.programs.strategies.federation import SOFTMAX, Client, Federation, close

STEPS, INNER_RATE, DECAY = 5, 0.01, 0.1


def made(**given: Any) -> DiLoCo:
    rest = {name: SOFTMAX[name] for name in ("model", "clients", "batch", "evaluate")}
    return DiLoCo(**{**rest, "inner_steps": STEPS, "learning_rate": INNER_RATE, **given})


class AdamW:
    """The inner optimizer of a client, whose state lasts."""

    def __init__(self, size: int) -> None:
        self.m, self.v, self.t = np.zeros(size), np.zeros(size), 0

    def trained(self, client: Client, w: np.ndarray) -> np.ndarray:
        for _ in range(STEPS):
            g = client.gradient(w)
            self.t += 1
            self.m = 0.9 * self.m + 0.1 * g
            self.v = 0.999 * self.v + 0.001 * g**2
            m, v = self.m / (1 - 0.9**self.t), self.v / (1 - 0.999**self.t)
            w = w - INNER_RATE * (m / (np.sqrt(v) + 1e-8) + DECAY * w)
        return w


def expected(federation: Federation, rounds: int) -> list[np.ndarray]:
    w = federation.start
    inner, v, found = [AdamW(len(w)) for _ in federation.clients], np.zeros(len(w)), []
    for _ in range(rounds):
        pairs = zip(inner, federation.clients, strict=True)
        d = np.mean([one.trained(client, w) - w for one, client in pairs], axis=0)
        v = 0.9 * v + d
        w = w + 0.7 * (d + 0.9 * v)
        found.append(w)
    return found


def test_rounds_follow_the_algorithm(tmp_path: Path) -> None:
    """Over rounds: a client's optimizer begins anew in none of them."""
    federation = Federation(tmp_path, made(codec=None))
    wanted = expected(federation, 4)
    for found, w in zip(federation.rounds(4), wanted, strict=True):
        close(found["model"], w, 3e-6)


def test_by_default_moves_travel_as_int8(tmp_path: Path) -> None:
    federation = Federation(tmp_path, made())
    (w,) = expected(federation, 1)
    start = federation.start
    (found,) = federation.rounds(1)
    off = np.abs(found["model"] - w).max()
    assert 1e-7 < off < 1.33 * np.abs(w - start).max() / 100


def test_a_client_that_restarts_has_its_optimizer_back(tmp_path: Path) -> None:
    federation = Federation(tmp_path, made(codec=None))
    wanted = expected(federation, 3)
    [*federation.rounds(2)]
    federation.nodes[1].checkpoint()
    federation.net.crash("c1")
    federation.net.restart("c1")
    federation.net.run_until_idle()
    execution = federation.server.invoke("server", {"tick": values.TRIGGER})
    federation.net.run_until_idle()
    found = federation.server.outputs(execution)
    assert found["stats"]["contributors"] == 3
    close(found["model"], wanted[2], 3e-6)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"inner_steps": 0}, "inner_steps"),
        ({"epochs": 3}, "inner_steps"),
        ({"max_steps": 7}, "max_steps"),
        ({"accumulate": 2}, "accumulate"),
        ({"deltas": False}, "deltas"),
    ],
)
def test_arguments_are_checked(given: dict[str, Any], says: str) -> None:
    with pytest.raises(BadArgument, match=says):
        made(**given).build()
