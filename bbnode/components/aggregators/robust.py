"""Aggregators that withstand liars, by the order of values in each coordinate.

Rule: every contributor weighs the same, whatever number of examples it claims: these rules count
peers. A node that may be many peers is kept out by membership, not here.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from bbnode.components.aggregators.collecting import (
    CollectingAggregator,
    CollectingConfig,
    Contribution,
    Told,
)
from bbnode.components.aggregators.columns import Tensor, between
from bbnode.components.contracts import OpContext, offload
from bbnode.components.errors import NotEnoughContributions
from bbnode.components.registry import register_component
from bbnode.ir.values import Metadata, Value


class EqualWeights(CollectingAggregator):
    """Counts every contributor alike: with the median number of examples, and the median loss."""

    def weights(self, parts: Sequence[Contribution]) -> list[int]:
        """Return the lower median of the numbers of examples, for each."""
        return [statistics.median_low(part.num_samples for part in parts)] * len(parts)

    def loss(self, losses: Sequence[float], weights: Sequence[int]) -> float:
        """Return the median of the losses, which a few liars cannot move far."""
        return statistics.median(losses)

    @offload
    def aggregate(self, ctx: OpContext) -> tuple[Value, Metadata]:
        """Return what `combine` makes; see `CollectingAggregator.aggregate`."""
        return super().aggregate(ctx)


@dataclass(frozen=True, kw_only=True)
class ByzantineConfig(CollectingConfig):
    """Settings of aggregators that withstand a number of liars.

    Attributes:
        byzantine: contributors that may lie, in any way and together; f in the papers. With too
            few contributors for so many, there is no result (NotEnoughContributions).
    """

    byzantine: int = 1


class ByzantineAggregator(EqualWeights):
    """Refuses to combine fewer contributions than `needed` says for its number of liars."""

    config: ByzantineConfig

    def __init__(self, config: ByzantineConfig) -> None:
        super().__init__(config)
        self.require(config.byzantine >= 0, f"byzantine {config.byzantine} is below 0")
        least, most = self.needed(config.byzantine), config.max_contributors
        self.require(
            least <= most,
            f"byzantine {config.byzantine} needs {least} contributors, max_contributors is {most}",
        )

    def needed(self, byzantine: int) -> int:
        """Return how many contributions it takes to withstand so many liars."""
        return 2 * byzantine + 1

    def enough(self, parts: Sequence[Contribution]) -> int:
        """Return the number of liars. Raises NotEnoughContributions."""
        liars = self.config.byzantine
        if len(parts) < self.needed(liars):
            raise NotEnoughContributions(
                component=self.TYPE_NAME, available=len(parts), needed=self.needed(liars),
                byzantine=liars,
            )  # fmt: skip
        return liars


@register_component
class Median(EqualWeights):
    """Median of each coordinate; of an even number, the mean of the two in the middle.

    Yin et al., 2018, arXiv:1803.01498, definition 1. Fewer than half of the contributors, whatever
    they send, move no coordinate beyond what the others say.
    """

    TYPE_NAME: ClassVar[str] = "bbnode.Median"
    Config: ClassVar[type] = CollectingConfig

    def combine(
        self, ctx: OpContext, parts: Sequence[Contribution], weights: Sequence[int]
    ) -> tuple[Tensor, Told]:
        """Return the median of each coordinate."""
        count = len(parts)
        return between([part.tensor for part in parts], (count - 1) // 2, count // 2), {}


@register_component
class TrimmedMean(ByzantineAggregator):
    """Mean of each coordinate without its `byzantine` lowest and highest values.

    Yin et al., 2018, arXiv:1803.01498, definition 2, with beta n = `byzantine`. It takes more than
    twice as many contributors.
    """

    TYPE_NAME: ClassVar[str] = "bbnode.TrimmedMean"
    Config: ClassVar[type] = ByzantineConfig

    def combine(
        self, ctx: OpContext, parts: Sequence[Contribution], weights: Sequence[int]
    ) -> tuple[Tensor, Told]:
        """Return the trimmed mean of each coordinate."""
        cut = self.enough(parts)
        return between([part.tensor for part in parts], cut, len(parts) - 1 - cut), {}
