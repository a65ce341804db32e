"""FedAvg: the mean of many peers' tensors, weighted by their sample counts.

Rule: the result depends on the contributions and their peers, never on the order of arrival; so
shapes are compared and sums are made only in `aggregate`, in PeerId order. (McMahan et al., 2017,
arXiv:1602.05629, algorithm 1.) A contribution is untrusted: it is checked before it is added, a
refusal names its peer, and the config bounds the weight that a peer may claim. A mean that is not
finite is discarded, and the last one stays. What an execution requested itself (its cohort's
answers, a contribution of this node) belongs to that execution, so that concurrent rounds never
mix; one-way contributions of peers belong to the execution that aggregates next.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from bbnode.components.backends.graphs import quotient_model, scaled_sum_model
from bbnode.components.contracts import (
    Aggregator,
    OpContext,
    PreparedGraph,
    is_offloaded,
)
from bbnode.components.errors import (
    ContributionRefused,
    MismatchedShapes,
    NonFiniteAggregate,
    NothingToAggregate,
)
from bbnode.components.registry import register_component
from bbnode.ir import codec, types
from bbnode.ir.peer import PeerId
from bbnode.ir.values import Composite, Metadata, ResponseBatch, Value

# The largest loss that is believed: the largest float32.
_MAX_ABS_LOSS = float(np.finfo(np.float32).max)
NO_HEAD = Metadata()
# Refusals that the metadata of an aggregate spells out: it is shown to people.
_MOST_TOLD = 8


@dataclass(frozen=True, kw_only=True)
class FedAvgConfig:
    """Settings of `FedAvg`.

    Attributes:
        max_contributors: peers that may contribute to one aggregate; each one's tensor is held.
        max_samples: the highest `num_samples`, in examples, that is believed of one peer; a
            contribution with more is refused. It is the peer's weight in the mean.
        max_share: the largest part of a mean of three or more peers that one of them may have,
            from 0 to 1; its samples count only up to that. Of N peers each may have 1/N. 1.0: no
            such bound.
        max_abs: the largest absolute value in a tensor; a contribution with a larger one is
            refused.
        shape: of every tensor; others are refused. None: that of more than half of the peers.
        max_rounds: executions whose contributions are held at once; beyond, the oldest one is
            dropped.
    """

    max_contributors: int = 1024
    max_samples: int = 1_000_000
    max_share: float = 0.5
    max_abs: float = float(1 << 24)  # up to here a float32 still tells whole numbers apart
    shape: tuple[int, ...] | None = None
    max_rounds: int = 4


@dataclass(frozen=True, slots=True)
class _Contribution:
    tensor: npt.NDArray[np.float32]
    num_samples: int
    loss: float | None


class _Round:
    """The contributions to one aggregate, the refused ones with their reasons, and who is missing.

    `missing_why` lists the latter, as far as reasons are known.
    """

    __slots__ = ("contributions", "missing", "missing_why", "refused")

    def __init__(self) -> None:
        self.contributions: dict[PeerId, _Contribution] = {}
        self.refused: dict[PeerId, str] = {}
        self.missing = 0
        self.missing_why = ""


@register_component
class FedAvg(Aggregator):
    """Weighted mean over peers, reduced through the bound backend in PeerId order."""

    TYPE_NAME: ClassVar[str] = "bbnode.FedAvg"
    Config: ClassVar[type] = FedAvgConfig
    depends: ClassVar[Mapping[str, str]] = {"backend": "compute"}
    config: FedAvgConfig

    def __init__(self, config: FedAvgConfig) -> None:
        super().__init__(config)
        counts = (config.max_contributors, config.max_samples, config.max_rounds)
        self.require(
            min(counts) >= 1, "max_contributors, max_samples and max_rounds have to be 1 or more"
        )
        share, largest = config.max_share, config.max_abs
        self.require(0 < share <= 1, f"max_share {share} is not above 0 and at most 1")
        self.require(0 < largest < math.inf, f"max_abs {largest} is not a positive number")
        self.require(min(config.shape or (0,)) >= 0, f"{config.shape} is not a valid shape")
        self._sent_in = _Round()  # what peers sent one-way
        self._rounds: dict[int, _Round] = {}  # execution -> its own, oldest first
        self._current: npt.NDArray[np.float32] | None = None
        self._scaled_sum: PreparedGraph | None = None
        self._quotient: PreparedGraph | None = None

    def contribute(self, ctx: OpContext, tensor: Value, metadata: Metadata) -> None:
        """Add the contribution of the sender, or of this node if there is no sender.

        `tensor` is float32 of any shape; `metadata` holds `num_samples` and may hold `loss`.

        Raises:
            ContributionRefused: it cannot be counted, or there are too many contributors.
        """
        peer = ctx.source_peer or ctx.self_peer
        to = self._round_of(ctx.execution) if ctx.source_peer is None else self._sent_in
        reason = self._take(to, peer, tensor, metadata)
        if reason is not None:
            raise self._refusal(peer, reason)

    def contribute_all(self, ctx: OpContext, responses: ResponseBatch) -> None:
        """Add a cohort's answers, each a composite (tensor, metadata).

        Answers that cannot be counted are left out, reported to the host, and listed in the
        metadata of the aggregate.

        Raises:
            ContributionRefused: there were answers, and none of them can be counted.
        """
        taken = 0
        first: tuple[PeerId, str] | None = None
        to = self._round_of(ctx.execution)
        to.missing += len(responses.missing)
        to.missing_why = _listed({peer: str(why) for peer, why in responses.reasons})
        for peer, answer in responses.responses:
            if isinstance(answer, Composite) and len(answer) == 2:
                reason = self._take(to, peer, answer[0], answer[1])
            else:
                reason = "the answer is not a composite of (tensor, metadata)"
            if reason is None:
                taken += 1
            else:
                to.refused[peer] = reason
                ctx.refuse(peer, reason)
                first = first or (peer, reason)
        if first is not None and not taken:
            to.refused.clear()
            raise self._refusal(*first)

    def aggregate(self, ctx: OpContext) -> tuple[Value, Metadata]:
        """Return the weighted mean, and its `num_samples`, `contributors`, `refused` and `loss`.

        `num_samples` is the sum of the weights. If some were refused, `refused_why` names them; if
        some weigh less than they claimed, `clipped` is their number. If peers of the cohort did not
        answer, `missing` is their number, and `missing_why` says why, where that is known. The
        contributions of this execution and the one-way ones are used up, whether this succeeds or
        fails. If a peer made both, the former counts.

        Raises:
            NothingToAggregate: nobody contributed.
            MismatchedShapes: shapes differ and none is that of more than half of the peers.
            NonFiniteAggregate: the mean is not finite; the last one stays.
        """
        own, sent_in = self._rounds.pop(ctx.execution, _Round()), self._sent_in
        self._sent_in = _Round()
        taken = {**sent_in.contributions, **own.contributions}
        refused = {**sent_in.refused, **own.refused}
        if not taken:
            raise NothingToAggregate(
                f"{self.TYPE_NAME}: no contribution to aggregate; let a Contribute or "
                "ContributeAll of the same slot come before, in the same execution where it is "
                "this node's own (at most max_rounds executions may contribute at once)"
            )
        kept, outvoted = self._of_majority_shape(taken)
        refused.update(outvoted)
        if not is_offloaded(self.aggregate):  # where a subclass lets it, there is nobody to tell
            for peer in sorted(outvoted):
                ctx.refuse(peer, outvoted[peer])
        order = sorted(kept)
        parts = [kept[peer] for peer in order]
        counts = capped([part.num_samples for part in parts], self.config.max_share)
        mean = self._weighted_mean([part.tensor for part in parts], counts)
        if not bool(np.isfinite(mean).all()):
            raise NonFiniteAggregate(
                f"{self.TYPE_NAME}: the mean of {len(parts)} contributions holds NaN or infinity; "
                f"lower max_abs ({self.config.max_abs:g})"
            )
        self._current = mean
        summary: dict[str, int | float | str] = {
            "num_samples": sum(counts),
            "contributors": len(parts),
            "refused": len(refused),
        }
        if refused:
            summary["refused_why"] = _listed(refused)
        if own.missing:
            summary["missing"] = own.missing
        if own.missing_why:
            summary["missing_why"] = own.missing_why
        clipped = sum(c < part.num_samples for c, part in zip(counts, parts, strict=True))
        if clipped:
            summary["clipped"] = clipped
        reported = [(p.loss, c) for p, c in zip(parts, counts, strict=True) if p.loss is not None]
        if reported:
            weight = sum(count for _, count in reported)
            summary["loss"] = math.fsum(loss * (count / weight) for loss, count in reported)
        return self._current, Metadata(summary)

    def current_tensor(self, ctx: OpContext) -> Value:
        """Return the last aggregate; NothingToAggregate before the first."""
        if self._current is None:
            raise NothingToAggregate(f"{self.TYPE_NAME}: nothing has been aggregated yet")
        return self._current

    def serialize(self) -> bytes:
        """Return the contributions that wait, the refusals, and the last aggregate."""
        current = () if self._current is None else (self._current,)
        rounds = [
            Composite((_head(execution, kept), *_saved(kept)))
            for execution, kept in self._rounds.items()
        ]
        state = Composite((*_saved(self._sent_in), Composite(current), Composite(rounds)))
        return codec.encode_value(state)

    def restore(self, data: bytes) -> None:
        """Load a saved state; ComponentError for bytes of anything else."""
        if not data:
            return
        with self.restoring():
            # A state that was saved before there were rounds has none.
            waiting, refused, current, *more = codec.decode_value(types.COMPOSITE, data)
            sent_in = _loaded(waiting, refused)
            rounds = {
                int(head["execution"]): _loaded(parts, out, head)
                for head, parts, out in (more[0] if more else ())
            }
        self._sent_in, self._rounds = sent_in, rounds
        self._current = current[0] if current else None

    def _round_of(self, execution: int) -> _Round:
        """Return the round of an execution; the oldest other one goes when there are too many."""
        found = self._rounds.get(execution)
        if found is None:
            if len(self._rounds) >= self.config.max_rounds:
                del self._rounds[next(iter(self._rounds))]
            found = self._rounds[execution] = _Round()
        return found

    def _take(self, to: _Round, peer: PeerId, tensor: Value, metadata: Value) -> str | None:
        """Keep a contribution, or return why not. One that is refused replaces nothing."""
        if not isinstance(tensor, np.ndarray) or tensor.dtype != np.float32:
            kind = tensor.dtype if isinstance(tensor, np.ndarray) else type(tensor).__name__
            return f"its tensor is {kind}, not float32"
        if self.config.shape is not None and tensor.shape != self.config.shape:
            return f"its tensor has the shape {list(tensor.shape)}, not {list(self.config.shape)}"
        if not isinstance(metadata, Metadata):
            return f"its metadata is {type(metadata).__name__}"
        count = metadata.get("num_samples")
        if isinstance(count, bool) or not isinstance(count, int):
            return f"num_samples is {_scalar(count)}, not an integer"
        if not 1 <= count <= self.config.max_samples:
            return f"num_samples is {count}, outside 1 .. {self.config.max_samples} (max_samples)"
        loss = metadata.get("loss")
        if loss is not None and not _is_loss(loss):
            return f"loss is {_scalar(loss)}, not a number that a float32 holds"
        if tensor.size:
            # Without a copy. min and max of a tensor with NaN are NaN, which fails the check.
            low, high = float(tensor.min()), float(tensor.max())
            if not (math.isfinite(low) and math.isfinite(high)):
                return "its tensor holds NaN or infinity"
            if max(-low, high) > self.config.max_abs:
                return f"its tensor holds a value beyond {self.config.max_abs:g} (max_abs)"
        full = len(to.contributions) >= self.config.max_contributors
        if full and peer not in to.contributions:
            return f"{self.config.max_contributors} peers contributed already (max_contributors)"
        kept_loss = None if loss is None else float(loss)
        to.contributions[peer] = _Contribution(tensor, count, kept_loss)
        to.refused.pop(peer, None)
        return None

    def _of_majority_shape(
        self, taken: dict[PeerId, _Contribution]
    ) -> tuple[dict[PeerId, _Contribution], dict[PeerId, str]]:
        """Return the contributions of the majority shape, and why the others are refused.

        Without a majority the shape of the last aggregate counts, if some have it: otherwise one of
        two peers could stop all rounds.
        """
        counts = Counter(part.tensor.shape for part in taken.values())
        shape, votes = counts.most_common(1)[0]
        if votes * 2 <= len(taken):
            if self._current is None or self._current.shape not in counts:
                raise MismatchedShapes(
                    component=self.TYPE_NAME,
                    shapes={str(peer): taken[peer].tensor.shape for peer in sorted(taken)},
                )
            shape = self._current.shape
        kept = {peer: part for peer, part in taken.items() if part.tensor.shape == shape}
        outvoted = {
            peer: f"its tensor has the shape {list(part.tensor.shape)}, not {list(shape)}"
            for peer, part in taken.items()
            if peer not in kept
        }
        return kept, outvoted

    def _weighted_mean(
        self, tensors: list[npt.NDArray[np.float32]], counts: list[int]
    ) -> npt.NDArray[np.float32]:
        # One accumulating graph for cohorts of all sizes: one session, and two vectors of memory.
        # Weights are n/2^k, which a float32 holds as it is, and the sum is divided once: thirds
        # that were rounded before would pull the mean the same way in every round. The tensor of
        # a single peer comes out as it was.
        if self._scaled_sum is None or self._quotient is None:
            backend = self.dependency("backend")
            self._scaled_sum = backend.prepare(scaled_sum_model())
            self._quotient = backend.prepare(quotient_model())
        common = math.gcd(*counts)
        total = sum(counts) // common
        unit = 1 << (total - 1).bit_length()
        mean: Value = np.zeros(tensors[0].size, np.float32)
        for tensor, count in zip(tensors, counts, strict=True):
            weight = np.asarray(count // common / unit, dtype=np.float32)
            (mean,) = self._scaled_sum.run([mean, tensor.reshape(-1), weight])
        if unit != total:
            (mean,) = self._quotient.run([mean, np.asarray(total / unit, dtype=np.float32)])
        shaped: npt.NDArray[np.float32] = np.asarray(mean).reshape(tensors[0].shape)
        shaped.flags.writeable = False  # values are immutable, and this one is kept here too
        return shaped

    def _refusal(self, peer: PeerId, reason: str) -> ContributionRefused:
        return ContributionRefused(component=self.TYPE_NAME, peer=str(peer), reason=reason)


def _saved(kept: _Round) -> tuple[Composite, Composite]:
    """Return a round as values, in PeerId order."""
    waiting: list[Value] = []
    for peer in sorted(kept.contributions):
        part = kept.contributions[peer]
        known: dict[str, int | float] = {"num_samples": part.num_samples}
        if part.loss is not None:
            known["loss"] = part.loss
        waiting.append(Composite((peer, part.tensor, Metadata(known))))
    refused = (
        Composite((peer, Metadata(reason=kept.refused[peer]))) for peer in sorted(kept.refused)
    )
    return Composite(waiting), Composite(refused)


def _head(execution: int, kept: _Round) -> Metadata:
    """Return what is saved of a round besides contributions; who is missing only if somebody is."""
    if not kept.missing:
        return Metadata(execution=execution)
    return Metadata(execution=execution, missing=kept.missing, missing_why=kept.missing_why)


def _loaded(waiting: Composite, refused: Composite, head: Metadata = NO_HEAD) -> _Round:
    kept = _Round()
    kept.missing = int(head.get("missing", 0))
    kept.missing_why = str(head.get("missing_why", ""))
    for peer, tensor, meta in waiting:
        kept.contributions[peer] = _Contribution(tensor, int(meta["num_samples"]), meta.get("loss"))
    kept.refused = {peer: str(meta["reason"]) for peer, meta in refused}
    return kept


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


def _is_loss(value: object) -> bool:
    return (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and abs(value) <= _MAX_ABS_LOSS
    )


def _scalar(value: object) -> str:
    """Return a peer's scalar for a message: a number as it is, else only its type."""
    if value is None or isinstance(value, bool | float):
        return repr(value)
    if isinstance(value, int):
        return repr(value) if value.bit_length() <= 64 else "an integer beyond 64 bits"
    return type(value).__name__


def _listed(refused: Mapping[PeerId, str]) -> str:
    said = [f"{peer}: {refused[peer]}" for peer in sorted(refused)[:_MOST_TOLD]]
    more = len(refused) - len(said)
    return "; ".join([*said, f"{more} more"] if more else said)
