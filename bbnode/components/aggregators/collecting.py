"""The intake of aggregators: contributions are taken, checked, refused, saved and restored here.

Rule: an aggregator is a rule that combines the contributions that it is given, in PeerId order; so
its result depends on contributions and their peers, never on the order of arrival. A contribution
is untrusted: it is checked before it is kept, and a refusal names its peer. A result that is not
finite is discarded, and the last one stays. What an execution requested itself (its cohort's
answers, a contribution of this node) belongs to that execution, so that concurrent rounds never
mix; one-way contributions of peers belong to the execution that aggregates next.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

import numpy as np

from bbnode.components.aggregators.columns import Tensor, flattened, short_slices
from bbnode.components.contracts import Aggregator, OpContext, is_offloaded
from bbnode.components.errors import (
    ContributionRefused,
    MismatchedShapes,
    NonFiniteAggregate,
    NotEnoughContributions,
    NothingToAggregate,
)
from bbnode.ir import codec, types
from bbnode.ir.peer import PeerId
from bbnode.ir.values import Composite, Metadata, ResponseBatch, Value

Told: TypeAlias = dict[str, int | float | str]

# The largest loss that is believed: the largest float32.
_MAX_ABS_LOSS = float(np.finfo(np.float32).max)
_NO_HEAD = Metadata()
# Refusals that the metadata of an aggregate spells out: it is shown to people.
_MOST_TOLD = 8


@dataclass(frozen=True, kw_only=True)
class CollectingConfig:
    """Settings of every aggregator of contributions.

    Attributes:
        max_contributors: peers that may contribute to one aggregate; each one's tensor is held.
        max_samples: the highest `num_samples`, in examples, that is believed of one peer; a
            contribution with more is refused.
        max_abs: the largest absolute value in a tensor; a contribution with a larger one is
            refused.
        shape: of every tensor; others are refused. None: that of more than half of the peers.
        max_rounds: executions whose contributions are held at once; beyond, the oldest one is
            dropped.
    """

    max_contributors: int = 1024
    max_samples: int = 1_000_000
    max_abs: float = float(1 << 24)  # up to here a float32 still tells whole numbers apart
    shape: tuple[int, ...] | None = None
    max_rounds: int = 4


@dataclass(frozen=True, slots=True)
class Contribution:
    """One peer's part, checked: a finite float32 tensor, its examples, and its loss.

    `spent`: epsilon and delta of its private training, where it tells them.
    """

    peer: PeerId
    tensor: Tensor
    num_samples: int
    loss: float | None
    spent: tuple[float, float] | None = None


class _Intake:
    """The contributions to one aggregate, the refused ones with their reasons, and who is missing.

    `missing_why` lists the latter, as far as reasons are known.
    """

    __slots__ = ("contributions", "missing", "missing_why", "refused")

    def __init__(self) -> None:
        self.contributions: dict[PeerId, Contribution] = {}
        self.refused: dict[PeerId, str] = {}
        self.missing = 0
        self.missing_why = ""


class CollectingAggregator(Aggregator):
    """Takes float32 contributions of any shape; a concrete class overrides `combine`.

    `weights` says what each contribution weighs: its number of examples, unless overridden.

    Attributes:
        of_deltas: contributions have to be changes of the weights that all began with.
    """

    of_deltas: ClassVar[bool] = False
    config: Any  # a CollectingConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        counts = (config.max_contributors, config.max_samples, config.max_rounds)
        self.require(
            min(counts) >= 1, "max_contributors, max_samples and max_rounds have to be 1 or more"
        )
        largest = config.max_abs
        self.require(0 < largest < math.inf, f"max_abs {largest} is not a positive number")
        self.require(min(config.shape or (0,)) >= 0, f"{config.shape} is not a valid shape")
        self._sent_in = _Intake()  # what peers sent one-way
        self._rounds: dict[int, _Intake] = {}  # execution -> its own, oldest first
        self._current: Tensor | None = None

    @abstractmethod
    def combine(
        self, ctx: OpContext, parts: Sequence[Contribution], weights: Sequence[int]
    ) -> tuple[Tensor, Told]:
        """Return one tensor of the shape of all, and what the metadata tells besides.

        `parts` are one or more, of one shape, in PeerId order, with the weight of each. Neither
        they nor an array in them may be changed.
        """

    def weights(self, parts: Sequence[Contribution]) -> list[int]:
        """Return what each contribution weighs, 1 or more."""
        return [part.num_samples for part in parts]

    def loss(self, losses: Sequence[float], weights: Sequence[int]) -> float:
        """Return the loss that is told, of those that were reported: their weighted mean."""
        total = sum(weights)
        parts = zip(losses, weights, strict=True)
        return math.fsum(loss * (weight / total) for loss, weight in parts)

    def contribute(self, ctx: OpContext, tensor: Value, metadata: Metadata) -> None:
        """Add the contribution of the sender, or of this node if there is no sender.

        `tensor` is float32 of any shape; `metadata` holds `num_samples` and may hold `loss`. Of
        several that a peer sends, the last one counts.

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
        metadata of the aggregate. Of several answers of a peer, the first one counts and the others
        are refused.

        Raises:
            ContributionRefused: there were answers, and none of them can be counted.
        """
        taken = 0
        first: tuple[PeerId, str] | None = None
        to = self._round_of(ctx.execution)
        to.missing += len(responses.missing)
        to.missing_why = _listed({peer: str(why) for peer, why in responses.reasons})
        for peer, answer in responses.responses:
            reason: str | None = "the answer is not a composite of (tensor, metadata)"
            if peer in to.contributions and peer != ctx.self_peer:
                reason = "it has answered in this round already; its first answer counts"
            elif isinstance(answer, Composite) and len(answer) == 2:
                reason = self._take(to, peer, answer[0], answer[1])
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
        """Return what `combine` makes, and its `num_samples`, `contributors`, `refused` and `loss`.

        `num_samples` is the sum of the weights. If some were refused, `refused_why` names them. If
        peers of the cohort did not answer, `missing` is their number, and `missing_why` says why,
        where that is known. If peers tell what private training has spent, `epsilon` is the most
        of them, and `delta` likewise. The contributions of this execution and the one-way ones are
        used up, whether this succeeds or fails. If a peer made both, the former counts.

        Raises:
            NothingToAggregate: nobody contributed.
            MismatchedShapes: shapes differ and none is that of more than half of the peers.
            NonFiniteAggregate: the result is not finite; the last one stays.
        """
        own, sent_in = self._rounds.pop(ctx.execution, _Intake()), self._sent_in
        self._sent_in = _Intake()
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
        parts = [kept[peer] for peer in sorted(kept)]
        weights = self.weights(parts)
        try:
            with np.errstate(over="ignore", invalid="ignore"):  # what is not finite is found below
                result, told = self.combine(ctx, parts, weights)
        except NotEnoughContributions as error:
            raise error.beside(_listed(refused)) from None
        if not _within(result, float(np.finfo(np.float32).max)):
            raise NonFiniteAggregate(
                f"{self.TYPE_NAME}: the result of {len(parts)} contributions holds NaN or "
                f"infinity; lower max_abs ({self.config.max_abs:g})"
            )
        result.flags.writeable = False  # values are immutable, and this one is kept here too
        self._current = result
        summary: Told = {
            "num_samples": sum(weights),
            "contributors": len(parts),
            "refused": len(refused),
        }
        if refused:
            summary["refused_why"] = _listed(refused)
        if own.missing:
            summary["missing"] = own.missing
        if own.missing_why:
            summary["missing_why"] = own.missing_why
        said = [(p.loss, w) for p, w in zip(parts, weights, strict=True) if p.loss is not None]
        if said:
            summary["loss"] = self.loss([loss for loss, _ in said], [weight for _, weight in said])
        spent = [part.spent for part in parts if part.spent is not None]
        if spent:
            summary["epsilon"], summary["delta"] = (max(each) for each in zip(*spent, strict=True))
        return result, Metadata({**summary, **told})

    def current_tensor(self, ctx: OpContext) -> Value:
        """Return the last aggregate; NothingToAggregate before the first."""
        if self._current is None:
            raise NothingToAggregate(f"{self.TYPE_NAME}: nothing has been aggregated yet")
        return self._current

    def serialize(self) -> bytes:
        """Return the contributions that wait, the refusals, and the last aggregate."""
        return self.freeze()()

    def freeze(self) -> Callable[[], bytes]:
        """Capture the state: tensors are never changed in place."""
        current = () if self._current is None else (self._current,)
        rounds = [
            Composite((_head(execution, kept), *_saved(kept)))
            for execution, kept in self._rounds.items()
        ]
        state = Composite((*_saved(self._sent_in), Composite(current), Composite(rounds)))
        return lambda: codec.encode_value(state)

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

    def _round_of(self, execution: int) -> _Intake:
        """Return the intake of an execution; the oldest other one goes when there are too many."""
        found = self._rounds.get(execution)
        if found is None:
            if len(self._rounds) >= self.config.max_rounds:
                del self._rounds[next(iter(self._rounds))]
            found = self._rounds[execution] = _Intake()
        return found

    def _take(self, to: _Intake, peer: PeerId, tensor: Value, metadata: Value) -> str | None:
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
        epsilon, delta = metadata.get("epsilon"), metadata.get("delta", 0.0)
        spent = None if epsilon is None else _spent(epsilon, delta)
        if epsilon is not None and spent is None:
            return f"epsilon {_scalar(epsilon)} at delta {_scalar(delta)} is no budget"
        if not _within(tensor, self.config.max_abs):
            low, high = float(tensor.min()), float(tensor.max())
            if not (math.isfinite(low) and math.isfinite(high)):
                return "its tensor holds NaN or infinity"
            return f"its tensor holds a value beyond {self.config.max_abs:g} (max_abs)"
        full = len(to.contributions) >= self.config.max_contributors
        if full and peer not in to.contributions:
            return f"{self.config.max_contributors} peers contributed already (max_contributors)"
        kept_loss = None if loss is None else float(loss)
        to.contributions[peer] = Contribution(peer, tensor, count, kept_loss, spent)
        to.refused.pop(peer, None)
        return None

    def _of_majority_shape(
        self, taken: dict[PeerId, Contribution]
    ) -> tuple[dict[PeerId, Contribution], dict[PeerId, str]]:
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

    def _refusal(self, peer: PeerId, reason: str) -> ContributionRefused:
        return ContributionRefused(component=self.TYPE_NAME, peer=str(peer), reason=reason)


def _within(tensor: Tensor, bound: float) -> bool:
    """Return True if no value is NaN, infinite, or beyond a bound, in one pass over the memory.

    Squares that add up to less than the bound's own square leave no room for one. With NaN, min and
    max are NaN, and comparisons are false.
    """
    (flat,) = flattened((tensor,))
    enough = bound * bound / 2  # with what rounding may add
    with np.errstate(over="ignore", invalid="ignore"):
        for block in (flat[at] for at in short_slices(flat.size)):
            if float(block @ block) <= enough:
                continue
            if not (-bound <= float(block.min()) and float(block.max()) <= bound):
                return False
    return True


def _saved(kept: _Intake) -> tuple[Composite, Composite]:
    """Return an intake as values, in PeerId order."""
    waiting: list[Value] = []
    for peer in sorted(kept.contributions):
        part = kept.contributions[peer]
        known: dict[str, int | float] = {"num_samples": part.num_samples}
        if part.loss is not None:
            known["loss"] = part.loss
        if part.spent is not None:
            known["epsilon"], known["delta"] = part.spent
        waiting.append(Composite((peer, part.tensor, Metadata(known))))
    refused = (
        Composite((peer, Metadata(reason=kept.refused[peer]))) for peer in sorted(kept.refused)
    )
    return Composite(waiting), Composite(refused)


def _head(execution: int, kept: _Intake) -> Metadata:
    """Return what is saved of a round besides contributions; who is missing only if somebody is."""
    if not kept.missing:
        return Metadata(execution=execution)
    return Metadata(execution=execution, missing=kept.missing, missing_why=kept.missing_why)


def _loaded(waiting: Composite, refused: Composite, head: Metadata = _NO_HEAD) -> _Intake:
    kept = _Intake()
    kept.missing = int(head.get("missing", 0))
    kept.missing_why = str(head.get("missing_why", ""))
    for peer, tensor, meta in waiting:
        count, loss = int(meta["num_samples"]), meta.get("loss")
        spent = (meta["epsilon"], meta["delta"]) if "epsilon" in meta else None
        kept.contributions[peer] = Contribution(peer, tensor, count, loss, spent)
    kept.refused = {peer: str(meta["reason"]) for peer, meta in refused}
    return kept


def _is_loss(value: object) -> bool:
    return (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and abs(value) <= _MAX_ABS_LOSS
    )


def _spent(epsilon: object, delta: object) -> tuple[float, float] | None:
    """Return what a peer says that its private training has spent; None for no such numbers."""
    if not isinstance(epsilon, int | float) or not isinstance(delta, int | float):
        return None
    good = _is_loss(epsilon) and _is_loss(delta) and epsilon >= 0 and delta >= 0
    return (float(epsilon), float(delta)) if good else None


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
