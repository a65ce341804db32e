"""The mean of what clients measured: their answers are checked like contributions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from bbnode.components import MetricsMean, MetricsMeanConfig, ReferenceBackend, values
from bbnode.components.errors import ContributionRefused
from tests.components.fakes import PEERS, Context


def mean_of(*answers: Any, **settings: Any) -> tuple[list[float], Any]:
    aggregator = MetricsMean(MetricsMeanConfig(**settings))
    aggregator.bind({"backend": ReferenceBackend(ReferenceBackend.Config())})
    responses = tuple(zip(sorted(PEERS)[: len(answers)], answers, strict=True))
    aggregator.contribute_all(Context(execution=1), values.ResponseBatch(responses=responses))
    mean, summary = aggregator.aggregate(Context(execution=1))
    return [float(value) for value in mean], summary


def told(count: float, *metrics: float) -> Any:
    return np.array([count, *metrics], np.float32)


def test_metrics_are_weighted_by_numbers_of_examples() -> None:
    mean, summary = mean_of(told(30, 1.0, 0.5), told(10, 3.0, 0.9))
    assert mean == pytest.approx([1.5, 0.6])
    assert (summary["num_samples"], summary["contributors"]) == (40, 2)


@pytest.mark.parametrize(
    ("lie", "why"),
    [
        (told(float("nan"), 0.0, 1.0), "num_samples is nan"),
        (told(float("inf"), 0.0, 1.0), "num_samples is inf"),
        (told(0, 0.0, 1.0), "outside 1"),
        (told(-5, 0.0, 1.0), "outside 1"),
        (told(1.5, 0.0, 1.0), "num_samples is 1.5"),
        (told(2_000_000, 0.0, 1.0), "max_samples"),
        (told(10, float("nan"), 1.0), "NaN or infinity"),
        (told(10, 1e38, 1.0), "max_abs"),
        (told(10), "num_samples is"),
        (np.float32(10), "its tensor is float32|num_samples is"),
        (np.ones((2, 2), np.float32), "num_samples is"),
        (np.array([10, 0, 1]), "int64, not float32"),
        (values.Metadata(num_samples=10), "Metadata, not float32"),
    ],
)
def test_an_answer_that_is_none_is_left_out_and_named(lie: Any, why: str) -> None:
    mean, summary = mean_of(told(10, 2.0, 0.5), lie, told(10, 4.0, 0.7))
    assert mean == pytest.approx([3.0, 0.6])
    assert summary["refused"] == 1
    assert any(part in summary["refused_why"] for part in why.split("|"))


def test_one_peer_does_not_outweigh_the_others() -> None:
    """A claim of many examples counts up to half of the mean."""
    mean, summary = mean_of(told(900_000, 0.0), told(10, 1.0), told(10, 1.0))
    assert mean == pytest.approx([0.5])
    assert summary["clipped"] == 1


def test_an_answer_with_more_metrics_is_outvoted() -> None:
    mean, summary = mean_of(told(10, 1.0), told(10, 3.0), told(10, 5.0, 5.0))
    assert mean == pytest.approx([2.0])
    assert summary["refused"] == 1


def test_nobody_who_can_be_counted_fails() -> None:
    with pytest.raises(ContributionRefused, match="num_samples"):
        mean_of(told(0, 1.0))
