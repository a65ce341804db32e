"""Histograms and quantiles of all peers: those of the pooled data, whoever lies."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bbnode.components import ComponentError, PooledCounts, PooledRanges, register_component, values
from bbnode.components.data.arrays import ArrayDataSource
from bbnode.dsl import BadArgument
from bbnode.programs import FederatedHistograms, FederatedQuantiles
from bbnode.sim import Network, SimNode
from tests.components.fakes import PEERS, Context
from tests.programs.files import compiled

SHARES = (0.0, 0.1, 0.5, 0.99, 1.0)


def table(count: int, seed: int) -> np.ndarray:
    """Columns that are narrow and far away, of wide range, of integers, constant, with gaps."""
    random = np.random.default_rng(seed)
    x = np.stack(
        [
            random.normal(1e4, 0.5, count),
            random.lognormal(0, 4, count),
            random.integers(-3, 4, count),
            np.full(count, 7.0),
            np.where(random.random(count) < 0.3, np.nan, random.normal(size=count)),
        ],
        axis=1,
    )
    return x.astype(np.float32)


def network(
    program: Any, folder: Path, tables: list[np.ndarray], **settings: Any
) -> tuple[Network, SimNode]:
    artifact, made = compiled(program), Network(1)
    server = made.add("server", artifact, ["server"])
    for i, x in enumerate(tables):
        np.savez(folder / f"c{i}.npz", x=x, y=np.zeros(len(x), np.int64))
        data = {"path": str(folder / f"c{i}.npz"), "missing": "keep", **settings}
        made.add(f"client-{i}", artifact, ["client"], config={"data": data})
    return made, server


def measured(net: Network, server: SimNode) -> dict[str, Any]:
    execution = server.invoke("server", {"tick": values.TRIGGER})
    net.run_until_idle()
    return server.outputs(execution)


def columns(tables: list[np.ndarray]) -> list[np.ndarray]:
    pooled = np.concatenate(tables).astype(np.float64)
    return [column[np.isfinite(column)] for column in pooled.T]


def exact(column: np.ndarray, share: float) -> float:
    return np.sort(column)[max(1, int(np.ceil(share * len(column)))) - 1]


TABLES = [table(70, 0), table(1, 1), table(110, 2)]


@pytest.mark.parametrize("bins", [1, 7, 32])
def test_a_histogram_is_numpys_of_all_examples(tmp_path, bins) -> None:
    net, server = network(FederatedHistograms(clients=3, bins=bins), tmp_path, TABLES)
    found = measured(net, server)
    for at, column in enumerate(columns(TABLES)):
        counts, edges = np.histogram(column, bins)
        np.testing.assert_array_equal(found["edges"][:, at], edges)
        np.testing.assert_array_equal(found["counts"][:, at], counts)
        assert found["missing"][at] == 181 - len(column)
    assert found["counts"].dtype == np.int64
    assert not found["below"].any()
    assert not found["above"].any()
    assert (found["stats"]["num_samples"], found["stats"]["contributors"]) == (181, 3)


@pytest.mark.parametrize("ends", [(-1.0, 2.0), ((-1, -2, -3, 6, 0), (1, 2, 3, 8, 1))])
def test_given_ends_are_asked_of_nobody(tmp_path, ends) -> None:
    low, high = ends
    program = FederatedHistograms(clients=3, bins=5, low=low, high=high)
    assert "ranges" not in program.bindings()
    found = measured(*network(program, tmp_path, TABLES))
    lows, highs = (np.broadcast_to(end, 5) for end in ends)
    for at, column in enumerate(columns(TABLES)):
        counts, _ = np.histogram(column, 5, (lows[at], highs[at]))
        np.testing.assert_array_equal(found["counts"][:, at], counts)
        assert found["below"][at] == (column < lows[at]).sum()
        assert found["above"][at] == (column > highs[at]).sum()


@pytest.mark.parametrize(("bins", "tolerance"), [(64, 1e-6), (5, 1e-2), (50, 1.0)])
def test_quantiles_are_within_the_tolerance(tmp_path, bins, tolerance) -> None:
    program = FederatedQuantiles(clients=3, quantiles=SHARES, bins=bins, tolerance=tolerance)
    found = measured(*network(program, tmp_path, TABLES))
    for at, column in enumerate(columns(TABLES)):
        spread = (column.max() - column.min()) * tolerance
        assert (found["error"][:, at] <= spread * (1 + 1e-9)).all()
        for share, value, error in zip(
            SHARES, found["quantiles"][:, at], found["error"][:, at], strict=True
        ):
            assert 0 <= value - exact(column, share) <= error
    assert found["missing"].tolist() == [181 - len(column) for column in columns(TABLES)]


def test_a_quantile_beyond_given_ends_says_so(tmp_path) -> None:
    x = [np.arange(100, dtype=np.float32).reshape(-1, 1)]
    program = FederatedQuantiles(clients=1, quantiles=(0.1, 0.5, 0.9), low=20, high=80)
    found = measured(*network(program, tmp_path, x))
    np.testing.assert_allclose(found["quantiles"][:, 0], [20, 49, 80], atol=1e-4)
    np.testing.assert_array_equal(np.isinf(found["error"][:, 0]), [True, False, True])


def test_a_column_without_values_has_no_quantile(tmp_path) -> None:
    x = [np.array([[np.nan, 1], [np.nan, 2]], np.float32), np.array([[np.nan, 3]], np.float32)]
    found = measured(*network(FederatedQuantiles(clients=2), tmp_path, x))
    assert np.isnan(found["quantiles"][:, 0]).all()
    np.testing.assert_allclose(found["quantiles"][:, 1], [1, 2, 3], atol=1e-5)
    assert found["missing"].tolist() == [3, 0]


def test_an_owner_with_few_examples_gives_none_out(tmp_path) -> None:
    program = FederatedHistograms(clients=3, quorum=2)
    net, server = network(program, tmp_path, TABLES, min_examples=50)
    stats = measured(net, server)["stats"]
    assert (stats["contributors"], stats["num_samples"]) == (2, 180)
    (why,) = [step.detail for step in net["client-1"].failures() if "min_examples" in step.detail]
    assert "fewer examples than min_examples=50" in why


def test_a_client_that_goes_away_between_rounds_is_told_in_the_error(tmp_path) -> None:
    high = [np.full((9, 1), 5, np.float32), np.full((30, 1), 100, np.float32)]
    high[0][0] = 0
    program = FederatedQuantiles(clients=2, quorum=1, quantiles=(0.5,), deadline_s=1.0)
    net, server = network(program, tmp_path, high)
    execution = server.invoke("server", {"tick": values.TRIGGER})
    net.run_until(lambda: bool(server.component("counts").serialize()))
    net.cut("server", "client-1")
    net.run_until_idle()
    found = server.outputs(execution)
    assert found["stats"]["contributors"] == 1
    assert np.isinf(found["error"]).all()


@register_component
class LyingRows(ArrayDataSource):
    """A client whose counts or ranges are what a test makes of them."""

    TYPE_NAME = "tests.LyingRows"


def counts(*rows: list[int], dtype: Any = np.int64) -> np.ndarray:
    return np.array(rows, dtype)


HONEST = counts([1, 0], [3, 4], [0, 0], [0, 0])
NAN = np.nan


class TestLies:
    context: ClassVar = Context

    @pytest.mark.parametrize(
        ("lie", "why"),
        [
            (counts([-1, 4], [5, 0], [0, 0], [0, 0]), "below 0"),
            (counts([1 << 62, 1], [1 << 62, 1], [0, 0], [0, 0]), "above 1000000"),
            (counts([1, 1], [2, 3], [0, 0], [0, 0]), "different numbers of examples"),
            (counts([0, 0], [0, 0], [0, 0], [0, 0]), "counts 0 examples"),
            (counts([1, 1], [2, 2], [0, 0]), r"shape \[3, 2\]"),
            (counts([1, 1], [2, 2], [0, 0], [0, 0], dtype=np.float64), "float64, not int64"),
            (counts([1], [2], [0], [0]), r"shape \[4, 1\], not \[4, 2\]"),
            (np.zeros((), np.int64), r"shape \[\]"),
            (np.zeros((4, 0), np.int64), r"shape \[4, 0\]"),
            (values.Metadata(a=1), "Metadata, not int64"),
        ],
    )
    def test_counts_that_cannot_be_are_refused_by_name(self, lie, why) -> None:
        pool = PooledCounts(PooledCounts.Config(rows=4))
        self.refused(pool, [HONEST, HONEST], lie, why)
        total, told = self.result(pool)
        np.testing.assert_array_equal(total, 2 * HONEST)
        assert told["num_samples"] == 8

    @pytest.mark.parametrize(
        ("lie", "why"),
        [
            ([[2.0], [NAN], [1]], "NaN or infinity"),
            ([[2.0], [-np.inf], [1]], "NaN or infinity"),
            ([[-2.0], [0], [1]], "no whole numbers"),
            ([[1.5], [0], [1]], "no whole numbers"),
            ([[1e300], [0], [1]], "no whole numbers"),
            ([[1e7], [0], [1]], "max_samples"),
            ([[2.0], [1], [0]], "above the greatest"),
            ([[0.0], [1], [2]], "of no values"),
            ([[2.0], [0], [1e13]], r"beyond 1e\+12"),
            ([[2.0], [0]], r"shape \[2, 1\]"),
            ([[2.0, 2], [0, 0], [1, 1]], r"shape \[3, 2\], not \[3, 1\]"),
        ],
    )
    def test_ranges_that_cannot_be_are_refused_by_name(self, lie, why) -> None:
        pool = PooledRanges(PooledRanges.Config())
        honest = [np.array([[3.0], [-1], [2]]), np.array([[0.0], [0], [0]])]
        self.refused(pool, honest, np.array(lie), why)
        np.testing.assert_array_equal(self.result(pool)[0], honest[0])

    def refused(self, pool: Any, honest: list[np.ndarray], lie: Any, why: str) -> None:
        self.ctx = self.context()
        given = [*zip(PEERS, [*honest, lie], strict=False)]
        pool.contribute_all(self.ctx, values.ResponseBatch(responses=tuple(sorted(given))))
        again = type(pool)(pool.config)
        again.restore(pool.serialize())
        self.liar, self.why = PEERS[len(honest)], why
        assert again.serialize() == pool.serialize()

    def result(self, pool: Any) -> tuple[np.ndarray, Any]:
        found, told = pool.aggregate(self.ctx)
        assert (told["contributors"], told["refused"]) == (2, 1)
        assert str(self.liar) in told["refused_why"]
        assert re.search(self.why, told["refused_why"]), told["refused_why"]
        assert [*self.ctx.refused] == [self.liar]
        return found, told

    def test_a_state_of_others_is_refused(self) -> None:
        pool = PooledRanges(PooledRanges.Config())
        pool.contribute(self.context(), np.array([[3.0], [-1], [2]]), values.Metadata())
        with pytest.raises(ComponentError, match="not ours"):
            PooledCounts(PooledCounts.Config()).restore(pool.serialize())


@given(
    st.lists(
        st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=12), min_size=1, max_size=3
    ),
    st.floats(0, 1),
)
@pytest.mark.slow
def test_any_values_have_the_quantiles_that_sorting_finds(tmp_path_factory, parts, share) -> None:
    tables = [np.array(part, np.float32).reshape(-1, 1) for part in parts]
    program = FederatedQuantiles(clients=len(parts), quantiles=(share,), bins=16, tolerance=1e-4)
    found = measured(*network(program, tmp_path_factory.mktemp("any"), tables))
    (column,) = columns(tables)
    error = found["error"][0, 0]
    assert 0 <= found["quantiles"][0, 0] - exact(column, share) <= error
    assert error <= 1e-4 * (column.max() - column.min()) * (1 + 1e-9)


@pytest.mark.parametrize(
    ("program", "wrong"),
    [
        (FederatedHistograms, {"bins": 0}),
        (FederatedHistograms, {"bins": 1 << 20}),
        (FederatedHistograms, {"high": 1.0}),
        (FederatedHistograms, {"high": 1.0, "low": 1.0}),
        (FederatedHistograms, {"high": (1.0, 2.0), "low": (0.0,) * 3}),
        (FederatedHistograms, {"low": "a", "high": 1}),
        (FederatedHistograms, {"low": np.nan, "high": 1}),
        (FederatedQuantiles, {"quantiles": ()}),
        (FederatedQuantiles, {"quantiles": (1.5,)}),
        (FederatedQuantiles, {"quantiles": 0.5}),
        (FederatedQuantiles, {"bins": 1}),
        (FederatedQuantiles, {"tolerance": 0}),
        (FederatedQuantiles, {"tolerance": 2.0}),
        (FederatedQuantiles, {"bins": 2, "tolerance": 1e-100}),
        (FederatedQuantiles, {"clients": 0}),
        (FederatedQuantiles, {"quorum": 9}),
        (FederatedQuantiles, {"data": "nope"}),
    ],
)
def test_wrong_arguments_are_named(program, wrong) -> None:
    with pytest.raises(BadArgument, match="|".join(wrong)):
        program(**wrong).build()
