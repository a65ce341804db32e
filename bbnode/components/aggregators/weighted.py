"""Robust aggregators in which a contribution's weight or length is bounded, not its order."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from bbnode.components.aggregators.collecting import (
    CollectingAggregator,
    CollectingConfig,
    Contribution,
    Told,
)
from bbnode.components.aggregators.columns import (
    MAX_SQUARED,
    Tensor,
    dot,
    squared_distances,
    weighted_mean,
)
from bbnode.components.aggregators.fedavg import capped, clipped
from bbnode.components.aggregators.robust import EqualWeights
from bbnode.components.contracts import OpContext, offload
from bbnode.components.errors import NobodyTrusted, NothingToAggregate
from bbnode.components.registry import register_component
from bbnode.ir.values import Metadata, Value

# Weiszfeld's steps end when no coefficient changes by more.
_SETTLED = 1e-12


class SharedWeights(CollectingAggregator):
    """Weighs by numbers of examples, none above `max_share` of their sum."""

    def __init__(self, config: GeometricMedianConfig | NormClippingConfig) -> None:
        super().__init__(config)
        share = config.max_share
        self.require(0 < share <= 1, f"max_share {share} is not above 0 and at most 1")
        _require_squares(self)

    def weights(self, parts: Sequence[Contribution]) -> list[int]:
        """Return the numbers of examples, none above `max_share` of their sum."""
        return capped([part.num_samples for part in parts], self.config.max_share)

    @offload
    def aggregate(self, ctx: OpContext) -> tuple[Value, Metadata]:
        """Return what `combine` makes; see `CollectingAggregator.aggregate`."""
        return super().aggregate(ctx)


@dataclass(frozen=True, kw_only=True)
class GeometricMedianConfig(CollectingConfig):
    """Settings of `GeometricMedian`.

    Attributes:
        max_share: the largest part of the weight of three or more peers that one of them has, from
            0 to 1; its samples count only up to that. Of N peers each may have 1/N. Liars are
            withstood while together they have less than half.
        smoothing: the least distance that is divided by, nu in the paper.
        iterations: steps at most; a step costs nothing beside the distances.
    """

    max_share: float = 0.1
    smoothing: float = 1e-6
    iterations: int = 100


@register_component
class GeometricMedian(SharedWeights):
    """The point whose distances from all contributions, times their weights, add up to the least.

    Smoothed Weiszfeld (Pillutla et al., 2019, arXiv:1912.13445, algorithm 2). Every step is a mean
    of the contributions, so that the steps need their mutual distances alone. The metadata has the
    number of `iterations`.
    """

    TYPE_NAME: ClassVar[str] = "bbnode.GeometricMedian"
    Config: ClassVar[type] = GeometricMedianConfig
    config: GeometricMedianConfig

    def __init__(self, config: GeometricMedianConfig) -> None:
        super().__init__(config)
        smoothing = config.smoothing
        self.require(0 < smoothing < math.inf, f"smoothing {smoothing} is not a positive number")
        self.require(config.iterations >= 1, "iterations has to be 1 or more")

    def combine(
        self, ctx: OpContext, parts: Sequence[Contribution], weights: Sequence[int]
    ) -> tuple[Tensor, Told]:
        """Return the geometric median."""
        tensors = [part.tensor for part in parts]
        squared = squared_distances(tensors)
        alpha = np.asarray(weights, np.float64) / sum(weights)
        mix, steps = alpha, 0
        for steps in range(1, self.config.iterations + 1):  # noqa: B007 - told below
            # |sum_j c_j x_j - x_i|^2, from |x_j - x_i|^2 and sum_j c_j = 1.
            by_row = squared @ mix
            away = np.sqrt(np.maximum(by_row - mix @ by_row / 2, 0))
            beta = alpha / np.maximum(away, self.config.smoothing)
            before, mix = mix, beta / beta.sum()
            if np.abs(mix - before).max() <= _SETTLED:
                break
        mean = weighted_mean(tensors, [float(share) for share in mix])
        return mean, {"iterations": steps, **clipped(parts, weights)}


@dataclass(frozen=True, kw_only=True)
class NormClippingConfig(CollectingConfig):
    """Settings of `NormClipping`.

    Attributes:
        max_norm: the Euclidean length to which longer contributions are shortened; 0: the median
            of the lengths of all.
        max_share: the largest part of a mean of three or more peers that one of them may have,
            from 0 to 1; its samples count only up to that. Of N peers each may have 1/N. 1.0: no
            such bound.
    """

    max_norm: float = 0.0
    max_share: float = 0.5


@register_component
class NormClipping(SharedWeights):
    """Weighted mean of changes, each shortened to a length at most.

    Sun et al., 2019, arXiv:1911.07963, section 3. Contributions are changes of the weights that all
    began with (`deltas = True` in a `FederatedTraining`). The metadata has the length, `max_norm`,
    and `shortened`, the number of those that were longer.
    """

    TYPE_NAME: ClassVar[str] = "bbnode.NormClipping"
    Config: ClassVar[type] = NormClippingConfig
    of_deltas: ClassVar[bool] = True
    config: NormClippingConfig

    def __init__(self, config: NormClippingConfig) -> None:
        super().__init__(config)
        largest = config.max_norm
        self.require(0 <= largest < math.inf, f"max_norm {largest} is not a number from 0 on")

    def combine(
        self, ctx: OpContext, parts: Sequence[Contribution], weights: Sequence[int]
    ) -> tuple[Tensor, Told]:
        """Return the mean of the shortened changes."""
        tensors = [part.tensor for part in parts]
        lengths = [math.sqrt(dot(each, each)) for each in tensors]
        bound = self.config.max_norm or statistics.median(lengths)
        scales = [1.0 if length <= bound else bound / length for length in lengths]
        told: Told = {"max_norm": bound, "shortened": sum(scale < 1 for scale in scales)}
        return weighted_mean(tensors, weights, scales), {**told, **clipped(parts, weights)}


@register_component
class FLTrust(EqualWeights):
    """Mean of changes, each trusted as far as it points the way of the node's own.

    Cao et al., 2021, arXiv:2012.13995, algorithm 2: the weight is the cosine with the own change,
    or 0 where that is negative, and each has the own one's length. The own change is what the node
    contributes itself (`g.contribute` without a sender), trained on examples that it trusts. It
    withstands any number of liars, as good as these examples are. Numbers of examples count for
    nothing. The metadata has `trusted`, the number of those with a weight.
    """

    TYPE_NAME: ClassVar[str] = "bbnode.FLTrust"
    Config: ClassVar[type] = CollectingConfig
    of_deltas: ClassVar[bool] = True

    def __init__(self, config: CollectingConfig) -> None:
        super().__init__(config)
        _require_squares(self)

    def combine(
        self, ctx: OpContext, parts: Sequence[Contribution], weights: Sequence[int]
    ) -> tuple[Tensor, Told]:
        """Return the mean by trust. NobodyTrusted, or NothingToAggregate without an own change."""
        own = next((part.tensor for part in parts if part.peer == ctx.self_peer), None)
        if own is None:
            raise NothingToAggregate(
                f"{self.TYPE_NAME}: this node contributed no change of its own, by which others "
                "are trusted; let it train on examples that it trusts, and contribute"
            )
        others = [part.tensor for part in parts if part.peer != ctx.self_peer]
        length = math.sqrt(dot(own, own))
        lengths = [math.sqrt(dot(each, each)) for each in others]
        trust = [
            max(dot(each, own) / (size * length), 0.0) if size and length else 0.0
            for each, size in zip(others, lengths, strict=True)
        ]
        if not any(trust):
            raise NobodyTrusted(
                f"{self.TYPE_NAME}: none of {len(others)} contribution(s) points the way of this "
                f"node's own change, whose length is {length:g}"
            )
        scales = [length / size if size else 0.0 for size in lengths]
        return weighted_mean(others, trust, scales), {"trusted": sum(each > 0 for each in trust)}


def _require_squares(component: CollectingAggregator) -> None:
    largest = component.config.max_abs
    component.require(
        largest <= MAX_SQUARED,
        f"max_abs {largest:g} is above {MAX_SQUARED:g}, whose squares overflow",
    )
