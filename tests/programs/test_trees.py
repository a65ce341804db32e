"""Boosted trees over all peers: the mean of what LightGBM grows on each, whoever lies."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bbnode.components import (
    BackendUnavailable,
    BoostedTrees,
    ContributionRefused,
    HeldTrees,
    NotExportable,
    ParameterMismatch,
    PooledTrees,
    TrainingFailed,
    UnsupportedByModel,
    values,
)
from bbnode.components.models.trees import COLUMNS, checked_trees, ensemble_model
from bbnode.dsl import BadArgument
from bbnode.programs import FederatedTrees
from bbnode.sim import Network, SimNode
from tests.components.fakes import PEERS, Context
from tests.programs.files import compiled

lightgbm = pytest.importorskip("lightgbm")

FEATURES, LEAVES = 4, 4
NODES = 2 * LEAVES - 1
COUNTS = (300, 60, 200)


def table(count: int, classes: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    x = random.normal(size=(count, FEATURES)).astype(np.float32)
    values = x[:, 0] ** 2 + np.sin(3 * x[:, 1]) + 5
    x[random.random(count) < 0.1, 2] = np.nan
    if not classes:
        return x, values.astype(np.float32)
    return x, np.digitize(values, (5.2, 6.5)[: classes - 1]).astype(np.int64)


def network(program: FederatedTrees, folder: Path, clients: int = 3) -> tuple[Network, SimNode]:
    artifact, made = compiled(program), Network(1)

    def data(name: str, count: int, seed: int) -> dict[str, Any]:
        x, y = table(count, program.classes, seed)
        np.savez(folder / f"{name}.npz", x=x, y=y)
        return {"path": str(folder / f"{name}.npz"), "missing": "keep"}

    on_server = program.evaluate in ("server", "both")
    test = {"test": data("test", 150, 9)} if on_server else {}
    server = made.add("server", artifact, ["server"], config=test)
    for i in range(clients):
        own = data(f"c{i}", COUNTS[i], i)
        config = {"data": own}
        if program.evaluate in ("clients", "both"):
            config["held_out"] = own
        made.add(f"client-{i}", artifact, ["client"], config=config)
    return made, server


def rounds(net: Network, server: SimNode, times: int) -> list[dict[str, Any]]:
    found = []
    for _ in range(times):
        execution = server.invoke("server", {"tick": values.TRIGGER})
        net.run_until_idle()
        assert server.failures() == []
        found.append(server.outputs(execution))
    return found


def exported(server: SimNode) -> onnxruntime.InferenceSession:
    twin = server.component("global").twin()
    twin.restore(server.component("global").serialize())
    model = twin.export()
    onnx.checker.check_model(model)
    return onnxruntime.InferenceSession(model.SerializeToString())


def settings(**more: Any) -> dict[str, Any]:
    return {
        "num_leaves": LEAVES, "learning_rate": 0.3, "min_data_in_leaf": 5, "verbosity": -1,
        "num_threads": 1, "deterministic": True, "force_row_wise": True,
        "feature_pre_filter": False, **more,
    }  # fmt: skip


SAME = {"features": FEATURES, "leaves": LEAVES, "learning_rate": 0.3, "min_leaf": 5}


def test_one_client_grows_what_lightgbm_does(tmp_path) -> None:
    program = FederatedTrees(clients=1, evaluate="none", trees=2, **SAME)
    net, server = network(program, tmp_path, clients=1)
    rounds(net, server, 4)
    x, y = table(COUNTS[0], 0, 0)
    own = lightgbm.train(settings(objective="regression"), lightgbm.Dataset(x, y), 6)
    (found,) = exported(server).run(None, {"x": x})
    np.testing.assert_allclose(found[:, 0], own.predict(x), rtol=1e-4)


def test_a_round_adds_the_mean_of_what_clients_grow(tmp_path) -> None:
    net, server = network(FederatedTrees(clients=3, evaluate="none", **SAME), tmp_path)
    parts = [table(count, 0, seed) for seed, count in enumerate(COUNTS)]
    constant = np.concatenate([y for _, y in parts]).mean()
    x = table(40, 0, 5)[0]
    stats = rounds(net, server, 1)[0]["stats"]
    np.testing.assert_allclose(exported(server).run(None, {"x": x})[0], constant, rtol=1e-6)
    assert (stats["num_samples"], stats["trees"]) == (sum(COUNTS), 3)
    rounds(net, server, 1)
    wanted = np.full(len(x), constant, np.float64)
    for own_x, own_y in parts:
        data = lightgbm.Dataset(own_x, own_y, init_score=np.full(len(own_y), constant))
        own = lightgbm.train(settings(objective="regression", boost_from_average=False), data, 1)
        wanted += own.predict(x) * len(own_y) / sum(COUNTS)
    np.testing.assert_allclose(exported(server).run(None, {"x": x})[0][:, 0], wanted, rtol=1e-5)


@pytest.mark.parametrize(("classes", "trees"), [(2, 1), (3, 3)])
def test_classes_are_learnt_and_measured_where_it_is_said(tmp_path, classes, trees) -> None:
    metrics = ("accuracy", "auc") if classes == 2 else ("accuracy",)
    program = FederatedTrees(clients=3, classes=classes, evaluate="both", metrics=metrics, **SAME)
    net, server = network(program, tmp_path)
    first, *_, last = rounds(net, server, 10)
    for where in ("", "clients_"):
        assert last[f"{where}loss"] < 0.7 * first[f"{where}loss"]
        assert last[f"{where}accuracy"] > 0.8
    assert last["stats"]["trees"] == 3 * trees
    x, y = table(150, classes, 9)
    probabilities, label = exported(server).run(None, {"x": x})
    assert (label == y).mean() == pytest.approx(float(last["accuracy"]))
    chosen = probabilities[np.arange(len(y)), y]
    assert -np.log(chosen).mean() == pytest.approx(float(last["loss"]), rel=1e-4)

    again = rounds(*network(program, tmp_path), 2)[-1]
    wanted = again["model"].size
    np.testing.assert_array_equal(again["model"], last["model"][:wanted])


def tree(*nodes: tuple[float, ...]) -> np.ndarray:
    made = np.zeros((NODES, COLUMNS), np.float32)
    made[:, 0] = -2
    made[: len(nodes)] = nodes
    return made


GOOD = tree(
    (1, 0.5, 1, 2, 1), (-1, 3, 0, 0, 0), (0, -1, 3, 4, 0), (-1, -1, 0, 0, 0), (-1, 7, 0, 0, 0)
)


def changed(node: int, column: int, value: float) -> np.ndarray:
    made = GOOD.copy()
    made[node, column] = value
    return made


LIES = [
    (changed(0, 1, np.nan), "NaN or infinity"),
    (changed(4, 1, np.inf), "NaN or infinity"),
    (changed(0, 0, 4), "a feature is none of 0 to 3"),
    (changed(0, 0, 0.5), "a feature is none of 0 to 3"),
    (changed(0, 0, -3), "a feature is none of 0 to 3"),
    (changed(0, 0, -2), "not at the end"),
    (changed(3, 0, -2), "not at the end"),
    (changed(5, 3, 1), "has something behind it"),
    (changed(1, 2, 3), "has something behind it"),
    (changed(0, 4, 2), "neither 0 nor 1"),
    (changed(0, 2, 0), "not in its tree"),
    (changed(2, 2, 1), "not in its tree"),
    (changed(2, 3, 5), "not in its tree"),
    (changed(2, 3, 1e30), "not in its tree"),
    (changed(2, 2, 3.5), "not in its tree"),
    (changed(2, 3, 3), "no parent, or two"),
    (changed(4, 1, 1e7), "beyond 1e\\+06"),
    (np.concatenate([GOOD] * 3), "at most"),
    (GOOD[:-1], "are no trees of 4 leaves"),
    (GOOD[:0], "at most"),
]


@pytest.mark.parametrize(("lie", "why"), LIES)
def test_trees_that_cannot_be_are_refused_by_name(lie, why) -> None:
    config = PooledTrees.Config(features=FEATURES, leaves=LEAVES, trees=2)
    pool, ctx = PooledTrees(config), Context()
    answers = [
        values.Composite((each.reshape(-1), values.Metadata(num_samples=n, loss=1.0)))
        for each, n in ((GOOD, 30), (GOOD, 10), (lie, 50))
    ]
    pool.contribute_all(ctx, values.ResponseBatch(responses=(*zip(PEERS, answers, strict=False),)))
    again = PooledTrees(config)
    again.restore(pool.serialize())
    added, told = again.aggregate(ctx)
    assert (told["contributors"], told["refused"], told["trees"]) == (2, 1, 2)
    assert f"{PEERS[2]}: " in told["refused_why"]
    assert re.search(why, told["refused_why"]), told["refused_why"]
    assert added.reshape(2, NODES, COLUMNS)[:, 4, 1].tolist() == [5.25, 1.75]
    if "at most" not in why:
        model = HeldTrees(HeldTrees.Config(features=FEATURES, leaves=LEAVES))
        for call in (model.load_parameters, model.apply_delta):
            with pytest.raises(ParameterMismatch, match=why):
                call(ctx, lie.reshape(-1))


@pytest.mark.parametrize(
    ("metadata", "why"),
    [
        ({}, "num_samples is None"),
        ({"num_samples": 0}, "num_samples is 0"),
        ({"num_samples": 1 << 40}, "max_samples"),
        ({"num_samples": 1, "loss": float("nan")}, "loss is nan"),
    ],
)
def test_what_a_client_says_of_its_examples_is_checked(metadata, why) -> None:
    pool = PooledTrees(PooledTrees.Config(features=FEATURES, leaves=LEAVES))
    answer = values.Composite((GOOD.reshape(-1), values.Metadata(**metadata)))
    with pytest.raises(ContributionRefused, match=why):
        pool.contribute_all(Context(), values.ResponseBatch(responses=((PEERS[0], answer),)))


def walked(trees: np.ndarray, row: np.ndarray) -> float:
    total = 0.0
    for each in trees:
        at = 0
        while each[at, 0] >= 0:
            value = row[int(each[at, 0])]
            left = each[at, 4] if np.isnan(value) else value <= each[at, 1]
            at = int(each[at, 2] if left else each[at, 3])
        total += each[at, 1]
    return total


@given(
    st.lists(
        st.tuples(
            st.integers(0, NODES - 1),
            st.integers(0, COLUMNS - 1),
            st.integers(-3, 7) | st.floats(width=32),
        ),
        max_size=3,
    )
)
def test_what_is_taken_runs_and_all_else_is_refused(edits) -> None:
    made = GOOD.copy()
    for node, column, value in edits:
        made[node, column] = value
    try:
        trees = checked_trees(made.reshape(-1), FEATURES, LEAVES, 1, 1e6)
    except ValueError:
        return
    x = np.array([[0, 0, 0, 0], [-2, 1, 0, 0], [np.nan, np.nan, 1, 1], [0, 0.5, 9, 9]], np.float32)
    model = ensemble_model(trees, FEATURES, 0).SerializeToString()
    (found,) = onnxruntime.InferenceSession(model).run(None, {"x": x})
    np.testing.assert_allclose(found[:, 0], [walked(trees, row) for row in x], rtol=1e-6)


def test_a_client_with_other_features_or_labels_is_missing_and_says_why(tmp_path) -> None:
    program = FederatedTrees(clients=3, quorum=1, classes=2, evaluate="none", **SAME)
    net, server = network(program, tmp_path)
    for name, x, y in (("c1", np.ones((9, 3)), np.zeros(9)), ("c2", np.ones((9, 4)), np.ones(9))):
        np.savez(tmp_path / f"{name}.npz", x=x, y=y.astype(np.int64) * 7)
    (found,) = rounds(net, server, 1)
    assert found["stats"]["contributors"] == 1
    why = "none of the classes 0 to 1"
    assert any(why in step.detail for step in net["client-2"].failures())
    (said,) = server.node.peers_not_ready().values()  # it is not even asked
    assert said.reason == "features float32[3]; the federation has float32[4]"


class TestTheModel:
    config = BoostedTrees.Config(features=FEATURES, leaves=LEAVES, max_trees=2)
    ctx = Context()

    def test_it_holds_so_many_trees(self) -> None:
        model = HeldTrees(self.config)
        model.apply_delta(self.ctx, GOOD.reshape(-1))
        model.apply_delta(self.ctx, GOOD.reshape(-1))
        with pytest.raises(ParameterMismatch, match="more than 2 trees"):
            model.apply_delta(self.ctx, GOOD.reshape(-1))
        assert model.params(self.ctx).size == 2 * GOOD.size
        again = HeldTrees(self.config)
        again.restore(model.serialize())
        np.testing.assert_array_equal(again.params(self.ctx), model.params(self.ctx))

    @pytest.mark.parametrize("wrong", [np.zeros(3), np.zeros((1, 35), np.float32), values.TRIGGER])
    def test_what_is_no_vector_is_refused(self, wrong) -> None:
        with pytest.raises(ParameterMismatch, match="float32"):
            HeldTrees(self.config).load_parameters(self.ctx, wrong)

    def test_what_it_cannot_do_is_refused(self, monkeypatch) -> None:
        model = HeldTrees(self.config)
        with pytest.raises(NotExportable, match="no trees yet"):
            model.export()
        for call in (
            lambda: model.step(self.ctx, None),
            lambda: model.backward(self.ctx, GOOD),
            lambda: model.train(self.ctx, epochs=1, batch=1),
        ):
            with pytest.raises(UnsupportedByModel):
                call()
        with pytest.raises(TrainingFailed, match="no tensor"):
            model.forward(self.ctx, np.zeros(3, np.float32))
        monkeypatch.setitem(sys.modules, "lightgbm", None)
        grower = BoostedTrees(self.config)
        with pytest.raises(BackendUnavailable, match=r"pip install 'lightgbm>="):
            grower._grown(np.zeros((3, 4)), np.zeros(3), np.zeros((3, 1), np.float32), 1)

    def test_few_or_constant_examples_grow_a_leaf(self) -> None:
        grower = BoostedTrees(self.config)
        for count in (1, 50):
            x, y = np.ones((count, FEATURES), np.float32), np.arange(count, dtype=float)
            grown = grower._grown(x, y, np.zeros((count, 1), np.float32), 1)
            checked_trees(grown.reshape(-1), FEATURES, LEAVES, 1, 1e6)
            assert grown.shape[1:] == (NODES, COLUMNS)


@pytest.mark.parametrize(
    "wrong",
    [
        {"features": 0}, {"classes": 1}, {"classes": 5000}, {"trees": 0}, {"leaves": 1},
        {"learning_rate": 0}, {"l2": -1}, {"max_leaf": float("inf")}, {"evaluate": "here"},
        {"metrics": ("auc",)}, {"metrics": "mae"}, {"metrics": ("accuracy",)}, {"clients": 0},
        {"data": "nope"},
    ],
)  # fmt: skip
def test_wrong_arguments_are_named(wrong) -> None:
    with pytest.raises(BadArgument, match="|".join(wrong)):
        FederatedTrees(**{"features": 3, **wrong}).build()
