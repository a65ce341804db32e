"""The statistics of many peers' features, merged into those of all their examples together.

Rule: what a peer says is checked before it counts, and a refusal names the peer. The result
depends on the contributions and their peers, never on the order of arrival: they are merged in
PeerId order. Contributions belong to the execution that asked for them.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from bbnode.components.contracts import Aggregator, OpContext
from bbnode.components.data.statistics import Moments, Vector, merged_moments, read_label_counts
from bbnode.components.errors import ContributionRefused, MismatchedShapes, NothingToAggregate
from bbnode.components.registry import register_component
from bbnode.ir import codec, types
from bbnode.ir.decoding import shown
from bbnode.ir.peer import PeerId
from bbnode.ir.texts import listed
from bbnode.ir.types import TypeNode
from bbnode.ir.values import Composite, Metadata, ResponseBatch, Value

# Refusals that the metadata of a result spells out: it is shown to people.
_MOST_TOLD = 8


@dataclass(frozen=True, kw_only=True)
class PooledStatisticsConfig:
    """Settings of `PooledStatistics`.

    Attributes:
        max_contributors: peers that may contribute to one result.
        max_samples: the highest `num_samples`, in examples, that is believed of one peer.
        max_abs: the largest absolute value of a feature that is believed.
        features: how many there are; others are refused. None: as many as more than half of the
            peers say.
        max_rounds: executions whose contributions are held at once; beyond, the oldest is dropped.
    """

    max_contributors: int = 1024
    max_samples: int = 1_000_000
    max_abs: float = 1e12
    features: int | None = None
    max_rounds: int = 4


@dataclass(slots=True)
class _Gathering:
    """Checked contributions to one execution, refusals, and the number of the missing."""

    answers: dict[PeerId, tuple[Value, Metadata]] = field(default_factory=dict)
    refused: dict[PeerId, str] = field(default_factory=dict)
    missing: int = 0


@register_component
class PooledStatistics(Aggregator):
    """Merges what `DataSource.statistics` of each peer says, after checking it.

    A peer whose numbers fit each other is believed, as it is when it trains.
    """

    TYPE_NAME: ClassVar[str] = "bbnode.PooledStatistics"
    Config: ClassVar[type] = PooledStatisticsConfig
    storage: ClassVar[dict[str, TypeNode]] = {"*": types.TENSOR_DOUBLE}
    answers: ClassVar[TypeNode | tuple[TypeNode, ...]] = (types.TENSOR_DOUBLE, types.METADATA)
    config: PooledStatisticsConfig

    def __init__(self, config: PooledStatisticsConfig) -> None:
        super().__init__(config)
        counts = (config.max_contributors, config.max_samples, config.max_rounds)
        self.require(
            min(counts) >= 1, "max_contributors, max_samples and max_rounds have to be 1 or more"
        )
        self.require(0 < config.max_abs < math.inf, f"max_abs {config.max_abs} is not positive")
        self.require(
            config.features is None or config.features >= 1, "features has to be 1 or more"
        )
        self._pools: dict[int, _Gathering] = {}  # by execution, oldest first
        self._current: Vector | None = None

    def contribute(self, ctx: OpContext, tensor: Value, metadata: Metadata) -> None:
        """Add the statistics of the sender, or of this node; ContributionRefused."""
        peer = ctx.source_peer or ctx.self_peer
        why = self._take(self._pool(ctx.execution), peer, tensor, metadata)
        if why is not None:
            raise self._refusal(peer, why)

    def contribute_all(self, ctx: OpContext, responses: ResponseBatch) -> None:
        """Add a cohort's answers, each a composite (statistics, metadata).

        Those that are refused are left out, reported to the host, and listed in the result.

        Raises:
            ContributionRefused: there were answers, and none of them can be counted.
        """
        pool = self._pool(ctx.execution)
        pool.missing += len(responses.missing)
        for peer, answer in responses.responses:
            why: str | None = "the answer is not a composite of (statistics, metadata)"
            if isinstance(answer, Composite) and len(answer) == 2:
                why = self._take(pool, peer, answer[0], answer[1])
            if why is not None:
                pool.refused[peer] = why
                ctx.refuse(peer, why)
        if pool.refused and not pool.answers:
            raise self._refusal(*min(pool.refused.items()))

    def aggregate(self, ctx: OpContext) -> tuple[Value, Metadata]:
        """Return the statistics of all examples, float64 [5, F], and what they are of.

        The metadata has `num_samples`, `contributors`, `refused`, `missing`, where there is reason
        `refused_why`, and `label_counts` where every peer said some.

        Raises:
            NothingToAggregate: nobody contributed in this execution.
            MismatchedShapes: peers have different features, and no number of them the majority.
        """
        pool = self._pools.pop(ctx.execution, _Gathering())
        if not pool.answers:
            raise NothingToAggregate(
                f"{self.TYPE_NAME}: no statistics to merge; let a ContributeAll of the same slot "
                "come before, in the same execution"
            )
        counts = Counter(tensor.shape[1] for tensor, _ in pool.answers.values())
        features, votes = counts.most_common(1)[0]
        if votes * 2 <= len(pool.answers):
            raise MismatchedShapes(
                component=self.TYPE_NAME,
                shapes={str(peer): pool.answers[peer][0].shape for peer in sorted(pool.answers)},
            )
        for peer in sorted(pool.answers):
            if (found := pool.answers[peer][0].shape[1]) != features:
                why = f"its statistics are of {found} feature(s), not {features}"
                del pool.answers[peer]
                pool.refused[peer] = why
                ctx.refuse(peer, why)
        kept = [pool.answers[peer] for peer in sorted(pool.answers)]
        merged = merged_moments(Moments.read(tensor) for tensor, _ in kept).tensor()
        merged.flags.writeable = False
        self._current = merged
        samples = [int(metadata["num_samples"]) for _, metadata in kept]
        told: dict[str, int | str] = {
            "num_samples": sum(samples),
            "contributors": len(kept),
            "refused": len(pool.refused),
            "missing": pool.missing,
        }
        if pool.refused:
            rows = [f"{peer}: {pool.refused[peer]}" for peer in sorted(pool.refused)]
            told["refused_why"] = listed(rows, _MOST_TOLD)
        labels = [
            read_label_counts(metadata, n) for (_, metadata), n in zip(kept, samples, strict=True)
        ]
        if all(labels):
            longest = max(map(len, labels))
            padded = (each + [0] * (longest - len(each)) for each in labels)
            told["label_counts"] = ",".join(map(str, map(sum, zip(*padded, strict=True))))
        return merged, Metadata(told)

    def current_tensor(self, ctx: OpContext) -> Value:
        """Return the last result; NothingToAggregate before the first."""
        if self._current is None:
            raise NothingToAggregate(f"{self.TYPE_NAME}: nothing has been merged yet")
        return self._current

    def serialize(self) -> bytes:
        """Return the contributions that wait, the refusals, and the last result."""
        pools = [
            Composite(
                (
                    Metadata(execution=execution, missing=pool.missing),
                    Composite(
                        Composite((peer, *pool.answers[peer])) for peer in sorted(pool.answers)
                    ),
                    Composite(
                        Composite((peer, Metadata(reason=pool.refused[peer])))
                        for peer in sorted(pool.refused)
                    ),
                )
            )
            for execution, pool in self._pools.items()
        ]
        if not pools and self._current is None:
            return b""
        current = () if self._current is None else (self._current,)
        return codec.encode_value(Composite((Composite(current), Composite(pools))))

    def restore(self, data: bytes) -> None:
        """Load a saved state; ComponentError for bytes of anything else."""
        if not data:
            return
        with self.restoring():
            current, saved = codec.decode_value(types.COMPOSITE, data)
            pools: dict[int, _Gathering] = {}
            for head, answers, refused in saved:
                pool = pools[int(head["execution"])] = _Gathering(missing=int(head["missing"]))
                for peer, tensor, metadata in answers:
                    why = self._take(pool, peer, tensor, metadata)
                    if why is not None:
                        raise ValueError(why)
                pool.refused = {peer: str(why["reason"]) for peer, why in refused}
            last = Moments.read(current[0]).tensor() if current else None
        self._pools, self._current = pools, last

    def _pool(self, execution: int) -> _Gathering:
        """Return the pool of an execution; the oldest other one goes when there are too many."""
        found = self._pools.get(execution)
        if found is None:
            if len(self._pools) >= self.config.max_rounds:
                del self._pools[next(iter(self._pools))]
            found = self._pools[execution] = _Gathering()
        return found

    def _take(self, to: _Gathering, peer: PeerId, tensor: Value, metadata: Value) -> str | None:
        """Keep what a peer says of its examples, or return why not."""
        try:
            moments = Moments.read(tensor, self.config.max_abs)
            if not isinstance(metadata, Metadata):
                raise ValueError(f"its metadata is {type(metadata).__name__}")  # noqa: TRY004
            samples = metadata.get("num_samples")
            if type(samples) is not int or not 1 <= samples <= self.config.max_samples:
                raise ValueError(
                    f"num_samples is {shown(samples)}, not an integer in 1 .. "
                    f"{self.config.max_samples} (max_samples)"
                )
            if moments.count % samples:
                raise ValueError(f"their count is {moments.count}, of {samples} examples")
            read_label_counts(metadata, samples)
        except ValueError as error:
            return str(error)
        wanted = self.config.features
        if wanted is not None and len(moments.mean) != wanted:
            return f"its statistics are of {len(moments.mean)} feature(s), not {wanted}"
        if len(to.answers) >= self.config.max_contributors and peer not in to.answers:
            return f"{self.config.max_contributors} peers contributed already (max_contributors)"
        to.answers[peer] = np.asarray(tensor), metadata
        to.refused.pop(peer, None)
        return None

    def _refusal(self, peer: PeerId, reason: str) -> ContributionRefused:
        return ContributionRefused(component=self.TYPE_NAME, peer=str(peer), reason=reason)
