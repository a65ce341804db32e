"""FedAvg: the mean of many peers' tensors, weighted by their sample counts.

Rule: the config bounds the weight that a peer may claim. (McMahan et al., 2017, arXiv:1602.05629,
algorithm 1.)
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar

import numpy as np

from bbnode.components.aggregators.collecting import (
    CollectingAggregator,
    CollectingConfig,
    Contribution,
    Told,
)
from bbnode.components.aggregators.columns import Tensor, flattened
from bbnode.components.backends.graphs import running_mean_model
from bbnode.components.contracts import OpContext, PreparedGraph
from bbnode.components.registry import register_component
from bbnode.ir.values import Value

# What one run of the graph takes at most: values of each vector, and vectors.
_BLOCK = 32_000  # 128,000 bytes: from 128 KiB on, malloc maps every result anew
_AT_ONCE = 8


@dataclass(frozen=True, kw_only=True)
class FedAvgConfig(CollectingConfig):
    """Settings of `FedAvg`.

    Attributes:
        max_samples: the highest `num_samples`, in examples, that is believed of one peer; a
            contribution with more is refused. It is the peer's weight in the mean.
        max_share: the largest part of a mean of three or more peers that one of them may have,
            from 0 to 1; its samples count only up to that. Of N peers each may have 1/N. 1.0: no
            such bound.
    """

    max_share: float = 0.5


@register_component
class FedAvg(CollectingAggregator):
    """Weighted mean over peers, reduced through the bound backend in PeerId order."""

    TYPE_NAME: ClassVar[str] = "bbnode.FedAvg"
    Config: ClassVar[type] = FedAvgConfig
    depends: ClassVar[Mapping[str, str]] = {"backend": "compute"}
    config: FedAvgConfig

    def __init__(self, config: FedAvgConfig) -> None:
        super().__init__(config)
        share = config.max_share
        self.require(0 < share <= 1, f"max_share {share} is not above 0 and at most 1")
        self._graphs: dict[int, PreparedGraph] = {}

    def weights(self, parts: Sequence[Contribution]) -> list[int]:
        """Return the numbers of examples, none above `max_share` of their sum."""
        return capped([part.num_samples for part in parts], self.config.max_share)

    def combine(
        self, ctx: OpContext, parts: Sequence[Contribution], weights: Sequence[int]
    ) -> tuple[Tensor, Told]:
        """Return the weighted mean; `clipped`: how many weigh less than they claimed.

        It is a running mean, m + (x - m) w / (sum of w so far), so that what all agree on stays as
        it is, to the bit. Blocks stay in a core's cache; one run takes several vectors.
        """
        rows = flattened([part.tensor for part in parts])
        totals = itertools.accumulate(weights)
        shares = [np.asarray(w / t, np.float32) for w, t in zip(weights, totals, strict=True)]
        out = np.empty_like(rows[0])
        for at in range(0, out.size, _BLOCK):
            block = slice(at, at + _BLOCK)
            mean: Value = rows[0][block]
            done = 1
            while done < len(rows):
                count = min(len(rows) - done, _AT_ONCE)
                pairs = zip(rows[done : done + count], shares[done : done + count], strict=True)
                inputs = [value for row, share in pairs for value in (row[block], share)]
                (mean,) = self._steps(count).run([mean, *inputs])
                done += count
            out[block] = mean
        return out.reshape(parts[0].tensor.shape), clipped(parts, weights)

    def _steps(self, count: int) -> PreparedGraph:
        """Return the graph that takes so many vectors, at most `_AT_ONCE`, prepared once."""
        found = self._graphs.get(count)
        if found is None:
            found = self.dependency("backend").prepare(running_mean_model(count))
            self._graphs[count] = found
        return found


def clipped(parts: Sequence[Contribution], weights: Sequence[int]) -> Told:
    """Return `clipped`: how many weigh less than they claimed; nothing where it is nobody."""
    count = sum(w < part.num_samples for w, part in zip(weights, parts, strict=True))
    return {"clipped": count} if count else {}


def capped(counts: Sequence[int], max_share: float) -> list[int]:
    """Return sample counts, each at most `max_share` of their sum, or 1/N for N counts.

    No count is raised, and those within the bound keep their proportions. One or two counts stay as
    they are.
    """
    if len(counts) < 3:
        return list(counts)
    share = max(Fraction(max_share), Fraction(1, len(counts)))
    order = sorted(counts, reverse=True)
    rest = sum(order)
    limit = share * rest
    for above, count in enumerate(order, 1):
        if count <= limit:
            break
        # So many are cut to one limit, which is its share of them and of the rest together.
        rest -= count
        limit = share * rest / (1 - above * share)
    return [min(count, math.floor(limit)) for count in counts]
