"""A mean whose contributions are added as they come, so that memory does not grow with them.

Rule: sums are of integers, which are exact: they do not depend on the order of arrival, though
nothing is kept until the others are there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import ClassVar, TypeAlias

import numpy as np
import numpy.typing as npt

from bbnode.components.aggregators.collecting import Contribution, Told
from bbnode.components.aggregators.columns import Tensor, flattened, slices
from bbnode.components.aggregators.fedavg import FedAvg, FedAvgConfig, clipped
from bbnode.components.contracts import OpContext
from bbnode.components.registry import register_component
from bbnode.ir import codec, types
from bbnode.ir.values import Composite, Metadata, Value

Integers: TypeAlias = npt.NDArray[np.int64]

_SUM_BITS = 62
_LEAST_BITS = 16  # behind the point; with fewer, a model's weights would not be told apart


@dataclass(frozen=True, kw_only=True)
class RunningMeanConfig(FedAvgConfig):
    """Settings of `RunningMean`.

    Attributes:
        shape: of every tensor; others are refused. It has to be given.
        max_contributors: peers that may contribute to one aggregate. The product of it,
            `max_samples` and `max_abs` is at most 2^46, and what it is below 2^62 are the bits
            behind the point that count: 26 with these defaults.
    """

    max_abs: float = 64.0


@register_component
class RunningMean(FedAvg):
    """`FedAvg` of contributions that peers send one-way, each added as it comes.

    Each value is rounded to a multiple of 2^-b and added, times its number of examples, to 64 bits;
    b follows from the settings. The memory is that of two contributions and of the one that is
    arriving; and of those that may still prove to be above `max_share`, which wait beside the sum
    (1.0: none). What one peer sends twice counts once, as it came first. Answers to a request are
    held by the node until all are there, and are added to the same sum in `aggregate`.
    """

    TYPE_NAME: ClassVar[str] = "bbnode.RunningMean"
    Config: ClassVar[type] = RunningMeanConfig

    def __init__(self, config: RunningMeanConfig) -> None:
        super().__init__(config)
        self.require(config.shape is not None, "its setting shape has to be given")
        most = config.max_abs * config.max_samples * config.max_contributors
        bits = _SUM_BITS - math.ceil(math.log2(most))
        self.require(
            bits >= _LEAST_BITS,
            f"max_abs x max_samples x max_contributors is {most:g}, above "
            f"2^{_SUM_BITS - _LEAST_BITS}; lower one of them",
        )
        self._scale = math.ldexp(1.0, bits)
        self._size = math.prod(config.shape or ())
        self._place = np.broadcast_to(np.float32(0), config.shape or ())  # has no memory
        self._sum: Integers | None = None

    def contribute(self, ctx: OpContext, tensor: Value, metadata: Metadata) -> None:
        """Add the contribution of the sender to the sum; see `FedAvg.contribute`.

        Raises:
            ContributionRefused: it cannot be counted, or the sender has contributed already.
        """
        peer = ctx.source_peer
        if peer is None:
            super().contribute(ctx, tensor, metadata)
            return
        waiting = self._sent_in.contributions
        if peer in waiting:
            raise self._refusal(peer, "it has contributed already; what came first counts")
        super().contribute(ctx, tensor, metadata)
        limit = _settled([each.num_samples for each in waiting.values()], self.config.max_share)
        for part in waiting.values():
            if part.tensor is not self._place and part.num_samples <= limit:
                self._add(part.tensor, part.num_samples)
                waiting[part.peer] = replace(part, tensor=self._place)

    def aggregate(self, ctx: OpContext) -> tuple[Value, Metadata]:
        """Return the weighted mean; see `FedAvg.aggregate`. Of a peer's, what came one-way counts.

        Raises:
            NothingToAggregate: nobody contributed.
        """
        own = self._rounds.get(ctx.execution)
        for peer in sorted(self._sent_in.contributions):
            if own is not None and own.contributions.pop(peer, None) is not None:
                why = own.refused[peer] = "it has contributed one-way already, which counts"
                ctx.refuse(peer, why)
        try:
            return super().aggregate(ctx)
        finally:
            self._sum = None

    def combine(
        self, ctx: OpContext, parts: Sequence[Contribution], weights: Sequence[int]
    ) -> tuple[Tensor, Told]:
        """Return the weighted mean; `clipped`: how many weigh less than they claimed."""
        for part, weight in zip(parts, weights, strict=True):
            if part.tensor is not self._place:
                self._add(part.tensor, weight)
        return self._mean(sum(weights)), clipped(parts, weights)

    def freeze(self) -> Callable[[], bytes]:
        """Capture the state; the sum is changed in place, so that it is encoded at once."""
        waiting = self._sent_in.contributions
        added = {p: part for p, part in waiting.items() if part.tensor is self._place}
        said = [
            Composite((p, Metadata({"num_samples": added[p].num_samples, **_loss(added[p].loss)})))
            for p in sorted(added)
        ]
        total = () if self._sum is None else (self._sum,)
        self._sent_in.contributions = {p: waiting[p] for p in waiting if p not in added}
        try:
            base = codec.decode_value(types.COMPOSITE, super().freeze()())
        finally:
            self._sent_in.contributions = waiting
        running = Composite((Composite(said), Composite(total)))
        data = codec.encode_value(Composite((*base, running)))
        return lambda: data

    def restore(self, data: bytes) -> None:
        """Load a saved state, of this class or of FedAvg; ComponentError for anything else."""
        super().restore(data)
        self._sum = None
        if not data:
            return
        with self.restoring():
            _, _, _, _, *more = codec.decode_value(types.COMPOSITE, data)
            if not more:
                return
            said, total = more[0]
            for peer, meta in said:
                count, loss = int(meta["num_samples"]), meta.get("loss")
                part = Contribution(peer, self._place, count, loss)
                self._sent_in.contributions[peer] = part
            self._sum = self._restored(total[0]) if total else None

    def _restored(self, saved: Value) -> Integers:
        if not isinstance(saved, np.ndarray) or saved.dtype != np.int64:
            raise ValueError("the sum is not of integers")
        if saved.shape != (self._size,):
            raise ValueError(f"the sum has {saved.size} values, not {self._size}")
        return saved.copy()

    def _add(self, tensor: Tensor, weight: int) -> None:
        """Add a tensor's multiples of 2^-b, times a weight, to the sum."""
        if self._sum is None:
            self._sum = np.zeros(self._size, np.int64)
        (row,) = flattened((tensor,))
        for block in slices(self._size):
            scaled = row[block].astype(np.float64)
            np.multiply(scaled, self._scale, out=scaled)
            np.rint(scaled, out=scaled)
            whole = scaled.astype(np.int64)
            np.multiply(whole, weight, out=whole)
            np.add(self._sum[block], whole, out=self._sum[block])

    def _mean(self, weight: int) -> Tensor:
        """Return the sum over its weight, in the memory of the sum: the front half of it."""
        total, self._sum = self._sum, None
        assert total is not None
        into = total.view(np.float32)
        by = 1.0 / (self._scale * weight)
        for block in slices(self._size):
            # Blocks behind this one are not read yet, and this one is, before it is written.
            into[block] = total[block].astype(np.float64) * by
        del into
        total.resize((self._size + 1) // 2, refcheck=False)
        return total.view(np.float32)[: self._size].reshape(self.config.shape or ())


def _loss(loss: float | None) -> dict[str, int | float]:
    return {} if loss is None else {"loss": loss}


def _settled(counts: Sequence[int], max_share: float) -> float:
    """Return the count up to which nobody will be cut to `max_share`, whoever else contributes.

    It only grows as others come. See `capped`, whose limit it is, without the share 1/N.
    """
    if max_share >= 1:
        return math.inf
    share, rest = Fraction(max_share), Fraction(sum(counts))
    limit = share * rest
    for above, count in enumerate(sorted(counts, reverse=True), 1):
        if count <= limit:
            break
        if above * share >= 1:
            return math.inf
        rest -= count
        limit = share * rest / (1 - above * share)
    return float(limit)
