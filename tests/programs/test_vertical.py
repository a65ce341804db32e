"""Parties with other columns of the same rows train what one model of all columns would be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bbnode.components import (
    ArrayDataSource,
    ArrayDataSourceConfig,
    values,
)
from bbnode.dsl import BadArgument
from bbnode.programs import VerticalLearning
from bbnode.sim import Network
from tests.components.fakes import CTX
from tests.programs.files import CLASSES, compiled
from tests.programs.test_split import LIES, close, patched

ROWS, WIDTHS = 40, (4, 3)


class Vertical(VerticalLearning):
    model = (9, 8, CLASSES)
    bottoms = ((4, 6, 5), (3, 6, 4))
    batch = 10
    deadline_s = 5.0


class Run:
    """A server and two parties, and the same parts beside them."""

    def __init__(self, folder: Path, program: VerticalLearning) -> None:
        rng = np.random.default_rng(0)
        self.net, self.columns = Network(1), []
        artifact = compiled(program)
        y = rng.integers(0, CLASSES, ROWS)
        np.savez(folder / "server.npz", x=np.arange(ROWS), y=y)
        served = {"path": str(folder / "server.npz")}
        self.server = self.net.add("server", artifact, ["server"], config={"data": served})
        self.parties = []
        for at, width in enumerate(WIDTHS):
            x = rng.normal(size=(ROWS, width)).astype(np.float32)
            path = str(folder / f"party{at}.npz")
            np.savez(path, x=x, y=np.zeros(ROWS, np.int64))
            own = {"table": {"path": path}}
            self.parties.append(self.net.add(f"p{at}", artifact, [f"party{at}"], config=own))
            self.columns.append(x)
        self.net.run_until_idle()
        self.source = ArrayDataSource(ArrayDataSourceConfig(**served, batch_size=10))

    def step(self) -> float:
        execution = self.server.invoke("server", {"tick": values.TRIGGER})
        self.net.run_until_idle()
        assert [node.failures() for node in (self.server, *self.parties)] == [[]] * 3
        return float(self.server.outputs(execution)["loss"])

    @property
    def weights(self) -> dict[str, Any]:
        homes = zip(("top", "bottom0", "bottom1"), (self.server, *self.parties), strict=True)
        return {name: np.array(node.component(name).params(CTX)) for name, node in homes}


def numpy_step(w: dict[str, Any], columns: Any, y: Any, rate: float) -> tuple[float, Any]:
    """One step of SGD of the whole model in float64: loss and new weights."""

    def taken(flat: Any, sizes: Any) -> Any:
        a, h, b = sizes
        cuts = np.cumsum([a * h, h, h * b])
        one, two, three, four = np.split(flat.astype(np.float64), cuts)
        return one.reshape(a, h), two, three.reshape(h, b), four

    def back(x: Any, part: Any, hidden: Any, grad: Any) -> tuple[Any, Any]:
        a, _, b, _ = part
        inner = (grad @ b.T) * (hidden > 0)
        found = [x.T @ inner, inner.sum(0), hidden.T @ grad, grad.sum(0)]
        return np.concatenate([each.reshape(-1) for each in found]), inner @ a.T

    bottoms = [taken(w[f"bottom{i}"], sizes) for i, sizes in enumerate(Vertical().bottoms)]
    hidden = [np.maximum(x @ p[0] + p[1], 0) for x, p in zip(columns, bottoms, strict=True)]
    joined = np.concatenate([h @ p[2] + p[3] for h, p in zip(hidden, bottoms, strict=True)], 1)
    top = taken(w["top"], Vertical().model)
    inner = np.maximum(joined @ top[0] + top[1], 0)
    scores = inner @ top[2] + top[3]
    shares = np.exp(scores) / np.exp(scores).sum(1, keepdims=True)
    loss = -np.log(shares[np.arange(len(y)), y]).mean()
    found = {}
    found["top"], by_joined = back(joined, top, inner, (shares - np.eye(CLASSES)[y]) / len(y))
    for i, (x, part, grad) in enumerate(
        zip(columns, bottoms, np.split(by_joined, [5], axis=1), strict=True)
    ):
        found[f"bottom{i}"], _ = back(x, part, hidden[i], grad)
    return float(loss), {name: w[name] - rate * found[name] for name in w}


def test_a_step_is_that_of_all_columns(tmp_path: Path) -> None:
    run = Run(tmp_path, Vertical(learning_rate=0.2))
    expected: dict[str, Any] = run.weights
    for _ in range(5):
        rows, y = run.source.next_batch(CTX)
        loss, expected = numpy_step(expected, [x[rows] for x in run.columns], y, 0.2)
        assert run.step() == pytest.approx(loss, abs=1e-6)
    for name, found in run.weights.items():
        close(found, expected[name])


@pytest.mark.parametrize("lie", LIES)
def test_a_party_that_lies_leaves_all_as_they_are(tmp_path: Path, lie: str) -> None:
    run = Run(tmp_path, Vertical())
    before = run.weights
    part = run.parties[1].component("bottom1")
    part.forward = patched(LIES[lie], part.forward)
    execution = run.server.invoke("server", {"tick": values.TRIGGER})
    run.net.run_until_idle()
    assert run.server.failures() != []
    assert "loss" not in run.server.outputs(execution)
    for name, found in run.weights.items():
        np.testing.assert_array_equal(found, before[name])


def test_a_party_that_is_away_ends_the_step(tmp_path: Path) -> None:
    run = Run(tmp_path, Vertical())
    before = run.weights["top"]
    run.net.crash(run.parties[0])
    run.server.invoke("server", {"tick": values.TRIGGER})
    run.net.run_until_idle()
    assert run.server.failures() != []
    np.testing.assert_array_equal(run.server.component("top").params(CTX), before)


def test_rows_that_a_party_does_not_have_are_refused(tmp_path: Path) -> None:
    run = Run(tmp_path, Vertical())
    data = run.server.component("data")
    data.next_batch = patched(lambda batch: (batch[0] + ROWS, batch[1]), data.next_batch)
    run.server.invoke("server", {"tick": values.TRIGGER})
    run.net.run_until_idle()
    assert run.parties[0].failures() != []
    assert run.server.failures() != []


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"bottoms": ()}, "a list of models"),
        ({"bottoms": ((4, 6, 5),)}, "takes 9 columns, and the bottoms make 5"),
        ({"trainable": ("layer0.*",)}, "names are of one model"),
        ({"clip_norm": 1.0}, "take clip_value"),
        ({"precision": "mixed"}, "a form of its own"),
    ],
    ids=str,
)
def test_an_argument_that_is_wrong_is_named(given: dict[str, Any], said: str) -> None:
    with pytest.raises(BadArgument, match=said):
        Vertical(**given).build()
