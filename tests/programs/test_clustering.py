"""k-means over all peers: the steps of the pooled examples, whoever lies."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from sklearn.cluster import KMeans

from bbnode.components import PooledClusters, values
from bbnode.dsl import BadArgument
from bbnode.programs import FederatedKMeans
from bbnode.sim import Network, SimNode
from tests.components.fakes import PEERS, Context
from tests.programs.files import compiled

CLUSTERS, FEATURES = 4, 3
CENTRES = np.random.default_rng(4).normal(size=(CLUSTERS, FEATURES)) * 10 + 100


def table(count: int, seed: int, kinds: int = CLUSTERS) -> np.ndarray:
    """Examples of some of the clusters, far from 0."""
    random = np.random.default_rng(seed)
    x = CENTRES[random.integers(0, kinds, count)] + random.normal(size=(count, FEATURES))
    return x.astype(np.float32)


TABLES = [table(70, 0), table(30, 1, 2), table(110, 2)]
POOLED = np.concatenate(TABLES).astype(np.float64)


def network(program: Any, folder: Path, tables: list[np.ndarray]) -> tuple[Network, SimNode]:
    artifact, made = compiled(program), Network(1)
    server = made.add("server", artifact, ["server"])
    for i, x in enumerate(tables):
        np.savez(folder / f"c{i}.npz", x=x, y=np.zeros(len(x), np.int64))
        data = {"path": str(folder / f"c{i}.npz"), "missing": "keep"}
        made.add(f"client-{i}", artifact, ["client"], config={"data": data})
    return made, server


def stepped(net: Network, server: SimNode, times: int = 1) -> dict[str, Any]:
    for _ in range(times):
        execution = server.invoke("server", {"tick": values.TRIGGER})
        net.run_until_idle()
    return server.outputs(execution)


def lloyd(x: np.ndarray, centroids: np.ndarray) -> tuple[np.ndarray, float, np.ndarray]:
    squares = np.square(x[:, None] - centroids.astype(np.float64)).sum(axis=2)
    nearest = squares.argmin(axis=1)
    counts = np.bincount(nearest, minlength=len(centroids))
    means = [
        x[nearest == at].mean(axis=0) if counts[at] else centroids[at]
        for at in range(len(centroids))
    ]
    return np.array(means, np.float32), squares.min(axis=1).sum(), counts


def test_steps_are_those_of_the_pooled_examples(tmp_path) -> None:
    start = POOLED[:CLUSTERS].copy()
    start[-1] += 900  # it gets no examples
    program = FederatedKMeans(clients=3, clusters=CLUSTERS, start=start.tolist())
    net, server = network(program, tmp_path, TABLES)
    centroids = start.astype(np.float32)
    for _ in range(4):
        found = stepped(net, server)
        old = centroids
        centroids, inertia, counts = lloyd(POOLED, centroids)
        np.testing.assert_allclose(found["centroids"], centroids, rtol=1e-6)
        np.testing.assert_array_equal(found["counts"], counts)
        assert found["inertia"] == pytest.approx(inertia, rel=1e-6)
        longest = np.linalg.norm(centroids.astype(float) - old, axis=1).max()
        assert found["shift"] == pytest.approx(longest, rel=1e-4, abs=1e-5)
    np.testing.assert_array_equal(centroids[-1], start.astype(np.float32)[-1])
    assert (found["stats"]["num_samples"], found["stats"]["contributors"]) == (210, 3)


def test_a_start_is_found_and_the_steps_end_where_scikit_learns_do(tmp_path) -> None:
    program = FederatedKMeans(clients=3, clusters=CLUSTERS, features=FEATURES, seed=3)
    net, server = network(program, tmp_path, TABLES)
    first = stepped(net, server)
    assert np.isinf(first["shift"])
    assert first["counts"].sum() == 210
    found = stepped(net, server, 8)
    assert found["shift"] == 0
    assert found["inertia"] < first["inertia"]
    best = KMeans(CLUSTERS, n_init=10, random_state=0).fit(POOLED)
    assert found["inertia"] == pytest.approx(best.inertia_, rel=1e-5)

    again = stepped(*network(program, tmp_path, TABLES))
    np.testing.assert_array_equal(again["centroids"], first["centroids"])

    exported = server.component("centroids").twin()
    exported.restore(server.component("centroids").serialize())
    session = onnxruntime.InferenceSession(exported.export().SerializeToString())
    distances, cluster = session.run(None, {"x": TABLES[0]})
    wanted = np.square(TABLES[0][:, None] - found["centroids"]).sum(axis=2)
    np.testing.assert_allclose(distances, wanted, rtol=1e-3, atol=1e-2)
    np.testing.assert_array_equal(cluster, wanted.argmin(axis=1))


def test_fewer_different_examples_than_clusters(tmp_path) -> None:
    tables = [np.ones((1, 2), np.float32), np.array([[5, 5], [5, 5]], np.float32)]
    net, server = network(FederatedKMeans(clients=2, clusters=4, features=2), tmp_path, tables)
    found = stepped(net, server, 2)
    assert found["inertia"] == 0
    assert sorted(found["counts"].tolist()) == [0, 0, 1, 2]
    assert {tuple(each) for each in found["centroids"].tolist()} == {(1, 1), (5, 5)}


def test_a_client_without_a_value_is_refused_by_name(tmp_path) -> None:
    gap = TABLES[1].copy()
    gap[3, 1] = np.nan
    program = FederatedKMeans(clients=3, clusters=CLUSTERS, features=FEATURES)
    net, server = network(program, tmp_path, [TABLES[0], gap, TABLES[2]])
    stats = stepped(net, server)["stats"]
    assert (stats["contributors"], stats["refused"]) == (2, 1)
    assert f"{net.peer_id('client-1')}: its sums hold NaN" in stats["refused_why"]


def row(*, start: float = 0, count: float = 2, inertia: float = 1, sums: float = 2) -> np.ndarray:
    return np.array([[start, count, inertia, sums], [start, 1, 0, 5]], np.float64)


@pytest.mark.parametrize(
    ("lie", "why"),
    [
        (row(count=-1), "no whole number"),
        (row(count=1.5), "no whole number"),
        (row(count=1e9), "more than 1000000"),
        (row(inertia=-1), "no whole number from 0 on, or squared distances"),
        (row(inertia=1e300), "larger than max_abs"),
        (row(sums=np.nan), "NaN or infinity"),
        (row(sums=1e13), r"beyond 1e\+12"),
        (row(count=0, sums=1), "of no examples"),
        (row(start=0.5), "neither 0 nor 1"),
        (row(start=1), "of a start, and those of most of a step"),
        (row() * [[1], [0]] * 0, "counts no examples"),
        (row()[:1], r"shape \[1, 4\], not \[2, 4\]"),
        (row().astype(np.float32), "float32, not float64"),
        (values.Metadata(a=1), "Metadata, not float64"),
    ],
)
def test_lies_are_refused_by_name(lie, why) -> None:
    pool, ctx = PooledClusters(PooledClusters.Config(clusters=2, features=1)), Context()
    given = [*zip(PEERS, [row(), row(), lie], strict=False)]
    pool.contribute_all(ctx, values.ResponseBatch(responses=tuple(given)))
    again = PooledClusters(pool.config)
    again.restore(pool.serialize())
    total, told = again.aggregate(ctx)
    np.testing.assert_array_equal(total, [[0, 4, 2, 4], [0, 2, 0, 10]])
    liar = PEERS[2]
    told = told if "start" in why else pool.aggregate(ctx)[1]
    assert (told["contributors"], told["refused"]) == (2, 1)
    assert str(liar) in told["refused_why"]
    assert re.search(why, told["refused_why"]), told["refused_why"]
    assert [*ctx.refused] == [liar]


@pytest.mark.parametrize(
    "wrong",
    [
        {"clusters": 0},
        {"features": 0},
        {"features": -1},
        {"start": [[1.0], [2.0]], "features": 2, "clusters": 2},
        {"start": [[1.0]], "clusters": 2},
        {"start": [[0.0]], "clusters": 1},
        {"start": [[np.nan]], "clusters": 1},
        {"start": [[1.0], [1.0, 2.0]], "clusters": 2},
        {"start": "abc"},
        {"seed": -1},
        {"clients": 0},
    ],
)
def test_wrong_arguments_are_named(wrong) -> None:
    with pytest.raises(BadArgument, match="|".join(wrong)):
        FederatedKMeans(**{"features": 3 if "start" not in wrong else 0, **wrong}).build()
