"""The intake of aggregators that pool what peers found in their examples.

Rule: what a peer says is checked before it counts, and a refusal names the peer. The result
depends on the contributions and their peers, never on the order of arrival: they are merged in
PeerId order. Contributions belong to the execution that asked for them. Tensors have the dtype
that the concrete class says, so that counts are exact and sums are in float64.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from bbnode.components.aggregators.collecting import Told
from bbnode.components.contracts import Aggregator, OpContext
from bbnode.components.errors import ContributionRefused, MismatchedShapes, NothingToAggregate
from bbnode.ir import codec, types
from bbnode.ir.peer import PeerId
from bbnode.ir.texts import listed
from bbnode.ir.types import TENSOR, TypeNode
from bbnode.ir.values import Composite, Metadata, ResponseBatch, Value

# Refusals that the metadata of a result spells out: it is shown to people.
_MOST_TOLD = 8
_NOTHING = Metadata()


@dataclass(frozen=True, kw_only=True)
class PoolingConfig:
    """Settings of every aggregator that pools.

    Attributes:
        max_contributors: peers that may contribute to one result.
        max_samples: the highest number of examples that is believed of one peer.
        max_rounds: executions whose contributions are held at once; beyond, the oldest is dropped.
    """

    max_contributors: int = 1024
    max_samples: int = 1_000_000
    max_rounds: int = 4


@dataclass(slots=True)
class _Gathering:
    """Checked contributions to one execution, refusals, and who is missing, and why."""

    answers: dict[PeerId, tuple[Value, Metadata]] = field(default_factory=dict)
    refused: dict[PeerId, str] = field(default_factory=dict)
    missing: int = 0
    missing_why: str = ""


class PoolingAggregator(Aggregator):
    """Takes what peers say, checks it, and merges it; a concrete class says how.

    It overrides `checked` and `merge`, and `sort` where another size than the tensor's shape has to
    be that of most peers. An answer is a tensor, or where `answers` says two parts a composite of
    a tensor and its Metadata.
    """

    Config: ClassVar[type] = PoolingConfig
    answers: ClassVar[TypeNode | tuple[TypeNode, ...]] = TENSOR
    config: Any  # a PoolingConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        counts = (config.max_contributors, config.max_samples, config.max_rounds)
        self.require(
            min(counts) >= 1, "max_contributors, max_samples and max_rounds have to be 1 or more"
        )
        self._pools: dict[int, _Gathering] = {}  # by execution, oldest first
        self._current: Value | None = None

    @abstractmethod
    def checked(self, tensor: Value, metadata: Metadata) -> None:
        """Check what a peer says; ValueError, which says what is wrong with it."""

    @abstractmethod
    def merge(self, parts: Sequence[tuple[Any, Metadata]]) -> tuple[npt.NDArray[Any], int, Told]:
        """Return the result, the number of examples, and what else the metadata tells.

        `parts` are one or more, checked, of one `sort`, in PeerId order; they may not be changed.
        """

    def result_checked(self, tensor: Value) -> None:
        """Check a result that was saved; ValueError. By default as a contribution."""
        self.checked(tensor, _NOTHING)

    def sort(self, tensor: Any) -> tuple[int, ...]:
        """Return what has to be alike of all contributions: their shape."""
        return tuple(tensor.shape)

    def misfit(self, found: tuple[int, ...], wanted: tuple[int, ...]) -> str:
        """Return why a contribution of another `sort` than most is refused."""
        return f"its tensor has the shape {list(found)}, not {list(wanted)}"

    def contribute(self, ctx: OpContext, tensor: Value, metadata: Metadata) -> None:
        """Add what the sender, or this node, says; ContributionRefused."""
        peer = ctx.source_peer or ctx.self_peer
        why = self._take(self._pool(ctx.execution), peer, tensor, metadata)
        if why is not None:
            raise self._refusal(peer, why)

    def contribute_all(self, ctx: OpContext, responses: ResponseBatch) -> None:
        """Add a cohort's answers.

        Those that are refused are left out, reported to the host, and listed in the result.

        Raises:
            ContributionRefused: there were answers, and none of them can be counted.
        """
        pool = self._pool(ctx.execution)
        pool.missing += len(responses.missing)
        why_missing = dict(responses.reasons)
        rows = [f"{peer}: {why_missing[peer]}" for peer in sorted(why_missing)]
        pool.missing_why = listed(rows, _MOST_TOLD) if rows else ""
        for peer, answer in responses.responses:
            why: str | None = "the answer is not a composite of (tensor, metadata)"
            if self.answers is TENSOR:
                why = self._take(pool, peer, answer, _NOTHING)
            elif isinstance(answer, Composite) and len(answer) == 2:
                why = self._take(pool, peer, answer[0], answer[1])
            if why is not None:
                pool.refused[peer] = why
                ctx.refuse(peer, why)
        if pool.refused and not pool.answers:
            raise self._refusal(*min(pool.refused.items()))

    def aggregate(self, ctx: OpContext) -> tuple[Value, Metadata]:
        """Return what `merge` makes, and what it is of.

        The metadata has `num_samples`, `contributors`, `refused`, `missing`, where there is reason
        `refused_why` and `missing_why`, and what `merge` tells.

        Raises:
            NothingToAggregate: nobody contributed in this execution.
            MismatchedShapes: contributions differ in size, and no size has the majority.
        """
        pool = self._pools.pop(ctx.execution, _Gathering())
        if not pool.answers:
            raise NothingToAggregate(
                f"{self.TYPE_NAME}: nothing to merge; let a ContributeAll of the same slot "
                "come before, in the same execution"
            )
        counts = Counter(self.sort(tensor) for tensor, _ in pool.answers.values())
        sort, votes = counts.most_common(1)[0]
        if votes * 2 <= len(pool.answers):
            raise MismatchedShapes(
                component=self.TYPE_NAME,
                shapes={str(peer): pool.answers[peer][0].shape for peer in sorted(pool.answers)},
            )
        for peer in sorted(pool.answers):
            if (found := self.sort(pool.answers[peer][0])) != sort:
                why = self.misfit(found, sort)
                del pool.answers[peer]
                pool.refused[peer] = why
                ctx.refuse(peer, why)
        merged, samples, more = self.merge([pool.answers[peer] for peer in sorted(pool.answers)])
        merged.flags.writeable = False
        self._current = merged
        told: Told = {
            "num_samples": samples,
            "contributors": len(pool.answers),
            "refused": len(pool.refused),
            "missing": pool.missing,
        }
        if pool.refused:
            rows = [f"{peer}: {pool.refused[peer]}" for peer in sorted(pool.refused)]
            told["refused_why"] = listed(rows, _MOST_TOLD)
        if pool.missing_why:
            told["missing_why"] = pool.missing_why
        return merged, Metadata({**told, **more})

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
                    Metadata(
                        execution=execution, missing=pool.missing, missing_why=pool.missing_why
                    ),
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
                pool.missing_why = str(head.get("missing_why", ""))
                for peer, tensor, metadata in answers:
                    why = self._take(pool, peer, tensor, metadata)
                    if why is not None:
                        raise ValueError(why)
                pool.refused = {peer: str(why["reason"]) for peer, why in refused}
            last = current[0] if current else None
            if last is not None:
                self.result_checked(last)
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
        if not isinstance(metadata, Metadata):
            return f"its metadata is {type(metadata).__name__}"
        try:
            self.checked(tensor, metadata)
        except ValueError as error:
            return str(error)
        if len(to.answers) >= self.config.max_contributors and peer not in to.answers:
            return f"{self.config.max_contributors} peers contributed already (max_contributors)"
        to.answers[peer] = np.asarray(tensor), metadata
        to.refused.pop(peer, None)
        return None

    def _refusal(self, peer: PeerId, reason: str) -> ContributionRefused:
        return ContributionRefused(component=self.TYPE_NAME, peer=str(peer), reason=reason)


def need_tensor(tensor: Value, dtype: npt.DTypeLike, rows: int | None = None) -> npt.NDArray[Any]:
    """Return a peer's tensor of a dtype, with so many rows and any columns; ValueError."""
    if not isinstance(tensor, np.ndarray) or tensor.dtype != dtype:
        kind = tensor.dtype if isinstance(tensor, np.ndarray) else type(tensor).__name__
        raise ValueError(f"its tensor is {kind}, not {np.dtype(dtype)}")
    if rows is not None and (tensor.ndim != 2 or len(tensor) != rows or tensor.shape[1] < 1):
        raise ValueError(f"its tensor has the shape {list(tensor.shape)}, not [{rows}, columns]")
    return tensor
