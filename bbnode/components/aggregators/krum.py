"""Aggregators that withstand liars by choosing the contributions in the midst of the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from bbnode.components.aggregators.collecting import Contribution, Told
from bbnode.components.aggregators.columns import (
    MAX_SQUARED,
    Matrix,
    Tensor,
    near_median,
    squared_distances,
    weighted_mean,
)
from bbnode.components.aggregators.robust import ByzantineAggregator, ByzantineConfig
from bbnode.components.contracts import OpContext
from bbnode.components.registry import register_component
from bbnode.ir.texts import listed

_MOST_NAMED = 8


def krum_scores(squared: Matrix, byzantine: int) -> Matrix:
    """Return, of N points, the sum of squared distances to the nearest N - byzantine - 2, [N].

    Of at least one, where so many do not remain.
    """
    near = max(len(squared) - byzantine - 2, 1)
    # The smallest of each row is its distance from itself.
    nearest = np.sort(squared, axis=1)[:, 1 : near + 1]
    return np.asarray(nearest.sum(axis=1))


class DistanceAggregator(ByzantineAggregator):
    """Works on squared distances, which a float32 has to hold."""

    def __init__(self, config: ByzantineConfig) -> None:
        super().__init__(config)
        self.require(
            config.max_abs <= MAX_SQUARED,
            f"max_abs {config.max_abs:g} is above {MAX_SQUARED:g}, whose squares overflow",
        )

    def needed(self, byzantine: int) -> int:
        return 2 * byzantine + 3


@register_component
class Krum(DistanceAggregator):
    """The one contribution that is nearest to its n - f - 2 nearest others.

    Blanchard et al., 2017, arXiv:1703.02757, section 4: f is `byzantine`, and it takes
    n >= 2 f + 3 contributors. The metadata says who was `chosen`.
    """

    TYPE_NAME: ClassVar[str] = "bbnode.Krum"
    Config: ClassVar[type] = ByzantineConfig

    def combine(
        self, ctx: OpContext, parts: Sequence[Contribution], weights: Sequence[int]
    ) -> tuple[Tensor, Told]:
        """Return the chosen contribution."""
        liars = self.enough(parts)
        scores = krum_scores(squared_distances([part.tensor for part in parts]), liars)
        best = parts[int(scores.argmin())]
        return best.tensor.copy(), {"chosen": str(best.peer)}


@dataclass(frozen=True, kw_only=True)
class MultiKrumConfig(ByzantineConfig):
    """Settings of `MultiKrum`.

    Attributes:
        selected: contributions whose mean is taken, m in the paper; 0: n - f - 2 of n.
    """

    selected: int = 0


@register_component
class MultiKrum(DistanceAggregator):
    """Mean of the contributions with the best scores of `Krum`.

    Blanchard et al., 2017, arXiv:1703.02757, section 5. It takes n >= 2 f + 3 contributors, and of
    them more than `selected` + f + 1. The metadata says who was `left_out`.
    """

    TYPE_NAME: ClassVar[str] = "bbnode.MultiKrum"
    Config: ClassVar[type] = MultiKrumConfig
    config: MultiKrumConfig

    def __init__(self, config: MultiKrumConfig) -> None:
        super().__init__(config)
        self.require(config.selected >= 0, f"selected {config.selected} is below 0")

    def needed(self, byzantine: int) -> int:
        return max(super().needed(byzantine), self.config.selected + byzantine + 2)

    def combine(
        self, ctx: OpContext, parts: Sequence[Contribution], weights: Sequence[int]
    ) -> tuple[Tensor, Told]:
        """Return the mean of the chosen contributions."""
        liars = self.enough(parts)
        count = self.config.selected or len(parts) - liars - 2
        tensors = [part.tensor for part in parts]
        scores = krum_scores(squared_distances(tensors), liars)
        chosen = sorted(int(at) for at in np.argsort(scores, kind="stable")[:count])
        mean = weighted_mean([tensors[at] for at in chosen], [1.0] * count)
        return mean, _left_out(parts, chosen)


@register_component
class Bulyan(DistanceAggregator):
    """Mean of the values nearest to the median, of contributions that Krum chose one by one.

    El Mhamdi, Guerraoui and Rouault, 2018, arXiv:1802.07927, section 4: n - 2 f are chosen of
    n >= 4 f + 3, and of each coordinate n - 4 f values count. The metadata says who was `left_out`.
    """

    TYPE_NAME: ClassVar[str] = "bbnode.Bulyan"
    Config: ClassVar[type] = ByzantineConfig

    def needed(self, byzantine: int) -> int:
        return 4 * byzantine + 3

    def combine(
        self, ctx: OpContext, parts: Sequence[Contribution], weights: Sequence[int]
    ) -> tuple[Tensor, Told]:
        """Return the mean of what is near the median of the chosen contributions."""
        liars = self.enough(parts)
        tensors = [part.tensor for part in parts]
        squared = squared_distances(tensors)
        rest, chosen = list(range(len(parts))), []
        for _ in range(len(parts) - 2 * liars):
            best = rest[int(krum_scores(squared[np.ix_(rest, rest)], liars).argmin())]
            rest.remove(best)
            chosen.append(best)
        chosen.sort()
        kept = len(parts) - 4 * liars
        return near_median([tensors[at] for at in chosen], kept), _left_out(parts, chosen)


def _left_out(parts: Sequence[Contribution], chosen: Sequence[int]) -> Told:
    taken = frozenset(chosen)
    rows = [str(part.peer) for at, part in enumerate(parts) if at not in taken]
    return {"left_out": listed(rows, _MOST_NAMED)}
