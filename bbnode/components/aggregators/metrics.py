"""The mean of what many peers measured, weighted by their numbers of examples.

Rule: measurements are untrusted like any contribution, and checked as `FedAvg` checks them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from bbnode.components.aggregators.fedavg import FedAvg, FedAvgConfig
from bbnode.components.contracts import OpContext
from bbnode.components.registry import register_component
from bbnode.ir.types import TENSOR, TENSOR_FLOAT, TypeNode
from bbnode.ir.values import Composite, Metadata, ResponseBatch, Value


@dataclass(frozen=True, kw_only=True)
class MetricsMeanConfig(FedAvgConfig):
    """Settings of `MetricsMean`.

    Attributes:
        max_abs: the largest absolute value of a metric; an answer with a larger one is refused.
    """

    max_abs: float = 1e30  # a squared error may be large; sums of these stay finite


@register_component
class MetricsMean(FedAvg):
    """Weighted mean of metrics [K], from answers [1 + K]: a number of examples, then the metrics.

    Up to 2^24 a float32 holds a number of examples exactly.
    """

    TYPE_NAME: ClassVar[str] = "bbnode.MetricsMean"
    Config: ClassVar[type] = MetricsMeanConfig
    storage: ClassVar[Mapping[str, TypeNode]] = {"*": TENSOR_FLOAT}
    answers: ClassVar[TypeNode | tuple[TypeNode, ...]] = TENSOR

    def contribute_all(self, ctx: OpContext, responses: ResponseBatch) -> None:
        """Add a cohort's answers, each float32 [1 + K]; see `FedAvg.contribute_all`."""
        opened = tuple((peer, _opened(answer)) for peer, answer in responses.responses)
        super().contribute_all(ctx, dataclasses.replace(responses, responses=opened))


def _opened(answer: Value) -> Value:
    """Return an answer as FedAvg takes it; one that is none is left for its refusal."""
    if not isinstance(answer, np.ndarray) or answer.dtype != np.float32:
        return Composite((answer, Metadata()))
    if answer.ndim != 1 or len(answer) < 2:
        return Composite((answer, Metadata(num_samples=f"not in {list(answer.shape)}")))
    count = float(answer[0])
    return Composite(
        (answer[1:], Metadata(num_samples=int(count) if count.is_integer() else count))
    )
