"""`SwarmRounds`: rounds in which another peer combines the updates each time.

Rule: who coordinates a round is a function of the round's number, a seed and the peers: they are
ranked by SHA-256 over these (rendezvous hashing, so that views which differ by a peer mostly
agree), the first one coordinates, and when it has not answered in time the second one, and so on.
New weights are taken from a peer that may coordinate that round, once for a round, and never of one
that is over; one peer alone can't say that this one has fallen behind. (As swarm learning:
Warnat-Herresthal et al., 2021, doi:10.1038/s41586-021-03583-3.)
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from bbnode.components.contracts import OpContext
from bbnode.components.errors import NotEnoughPeers, NothingToAggregate
from bbnode.components.gossip import ops as ops
from bbnode.components.gossip.base import (
    GossipComponent,
    RoundUnderWay,
    StaleRound,
    Vector,
    numbers_of,
    told,
)
from bbnode.components.registry import register_component
from bbnode.ir import codec, types
from bbnode.ir.peer import PeerId
from bbnode.ir.values import Composite, Metadata, PeerIdVec, Value


@dataclass(frozen=True, kw_only=True)
class SwarmRoundsConfig:
    """Settings of `SwarmRounds`.

    Attributes:
        size: numbers of the weights.
        attempts: coordinators that a round tries, one after the other.
        collect_s: that a coordinator waits for updates after the first one, seconds.
        deadline_s: that a peer waits for a coordinator's weights, seconds.
        seed: of the order of coordinators.
        max_abs: the largest absolute value in weights.
    """

    size: int
    attempts: int = 2
    collect_s: float = 5.0
    deadline_s: float = 10.0
    seed: int = 0
    max_abs: float = float(1 << 24)


def ranked(peers: Sequence[PeerId], round_: int, seed: int) -> list[PeerId]:
    """Return the peers in the order in which they coordinate a round."""
    salt = seed.to_bytes(8, "big", signed=True) + round_.to_bytes(8, "big")
    return sorted(peers, key=lambda peer: hashlib.sha256(salt + peer.to_bytes()).digest())


@register_component
class SwarmRounds(GossipComponent):
    """The rounds of one peer, and those that it coordinates."""

    TYPE_NAME: ClassVar[str] = "bbnode.SwarmRounds"
    Config: ClassVar[type] = SwarmRoundsConfig
    config: SwarmRoundsConfig
    positive: ClassVar[tuple[str, ...]] = ("attempts", "collect_s", "deadline_s")

    def __init__(self, config: SwarmRoundsConfig) -> None:
        super().__init__(config)
        self._round = 0
        self._open = False
        self._until_ns = 0
        self._attempt = 0
        self._update: tuple[Vector, Metadata] | None = None
        self._weights: Vector | None = None  # the newest that this peer knows
        self._stats = Metadata()
        self._published = 0  # the round of these
        self._ahead: dict[PeerId, int] = {}  # who sent weights of a later round, and of which
        self._collecting: tuple[int, int] | None = None  # a batch's round, and until when
        self._coordinated = 0  # the last round that this peer published

    # -- a peer -------------------------------------------------------------------------------

    def begin(self, ctx: OpContext, view: PeerIdVec, initial: Value) -> tuple[Value, Value, Value]:
        """Begin the next round: the newest weights, its number, and who of `view` coordinates it.

        Raises:
            RoundUnderWay: the last round has not ended.
            NotEnoughPeers: there is nobody else.
        """
        if self._open and ctx.now_ns < self._until_ns:
            raise RoundUnderWay(
                f"{self.TYPE_NAME}: round {self._round} is not over; wait for its end before the "
                "next one"
            )
        if len(view) < 2:
            raise NotEnoughPeers(
                component=self.TYPE_NAME, available=len(view), needed=2, peer_class="peer"
            )
        if self._weights is None:
            self._weights = self.checked(ctx, initial)
        self._round = max(self._round, self._published) + 1
        whole_s = self.config.deadline_s * self.config.attempts
        self._open, self._attempt, self._update = True, 0, None
        # A training that failed leaves a round behind; twice, since training takes time.
        self._until_ns = ctx.now_ns + round(2e9 * whole_s)
        return self._weights, np.array([self._round], np.int64), self._mask(view)

    def keep(self, ctx: OpContext, weights: Value, metadata: Metadata) -> None:
        """Keep the update of the round until that is over."""
        self._update = (self.checked(ctx, weights), metadata)

    def next(
        self, ctx: OpContext, view: PeerIdVec, round_: Value
    ) -> tuple[Value, Value, Value, Metadata, Value, Value]:
        """Pass a coordinator over, if the round of that number still waits.

        Returns, as bools, if there is another one to send to, and who that is in `view`; the
        update; its round; and, as a bool, if the round has failed with this: it ends without
        anybody's.
        """
        nobody = np.zeros(len(view), bool)
        waits = self._open and numbers_of(round_, 1) == (self._round,)
        if not waits or self._update is None:
            empty = np.zeros(0, np.float32)
            return np.array(False), nobody, empty, Metadata(), round_, np.array(False)
        self._attempt += 1
        weights, metadata = self._update
        failed = self._attempt >= min(self.config.attempts, len(view))
        if failed:
            self._weights, self._open = weights, False
            self._stats = told(round=self._round, contributors=1, attempt=self._attempt, alone=1)
        mask = nobody if failed else self._mask(view)
        return np.array(not failed), mask, weights, metadata, round_, np.array(failed)

    def accept(
        self, ctx: OpContext, view: PeerIdVec, mean: Value, stats: Metadata, round_: Value
    ) -> Value:
        """Take a coordinator's weights; True where this ends the round that waits here.

        Raises:
            StaleRound: of a round that is over here.
            ContributionRefused: they are no weights, not from a coordinator, or of a round that is
                ahead and that this peer has heard of from nobody else.
        """
        peer = ctx.source_peer or ctx.self_peer
        number = self._number(peer, mean, round_)
        done = max(self._published, self._round - self._open)
        if number <= done:
            raise self._stale(peer, number, done)
        allowed = ranked(sorted({*view, peer}), number, self.config.seed)[: self.config.attempts]
        if peer not in allowed:
            raise self.refusal(peer, f"it does not coordinate round {number}")
        self._ahead = {each: n for each, n in self._ahead.items() if each in view and n > done}
        self._ahead[peer] = number
        # Where this peer has fallen behind, two of the others have to say so.
        said = sorted(self._ahead.values(), reverse=True)[1:2]
        if number > max(done, *said, 0) + 1:
            raise self.refusal(
                peer, f"round {number} is ahead of {done} here, and no other peer has said so yet"
            )
        assert isinstance(mean, np.ndarray)
        ends = self._open and number >= self._round
        self._weights, self._published = mean, number
        self._stats = told(
            round=number, attempt=allowed.index(peer), alone=0, coordinator=str(peer),
            **{
                name: value
                for name, value in stats.items()
                if name in ("contributors", "num_samples", "missing", "refused", "loss")
                and isinstance(value, int | float)
            },
        )  # fmt: skip
        self._open = self._open and not ends
        return np.array(ends)

    def result(self, ctx: OpContext) -> tuple[Value, Metadata]:
        """Return the weights that the round ended with, float32 [size].

        The Metadata has `round`; `coordinator`; `attempt`, the number of those passed over;
        `alone`: 1 where none answered, and the weights are this peer's own; and of the combined
        update `contributors`, `num_samples` and so on.
        """
        if self._weights is None:
            raise NothingToAggregate(f"{self.TYPE_NAME}: no round has ended; Begin comes first")
        return self._weights, self._stats

    # -- a coordinator ------------------------------------------------------------------------

    def admit(
        self, ctx: OpContext, view: PeerIdVec, weights: Value, metadata: Metadata, round_: Value
    ) -> Value:
        """Return True for an update of the round that is being collected; the first one begins it.

        Raises:
            StaleRound: of a round that is over, or of another one than is being collected.
            ContributionRefused: it is no update, or this peer does not coordinate that round.
        """
        peer = ctx.source_peer or ctx.self_peer
        number = self._number(peer, weights, round_)
        done = max(self._published, self._coordinated)
        if number <= done:
            raise self._stale(peer, number, done)
        if number > max(done, self._round) + 1:
            raise self.refusal(peer, f"round {number} is ahead of {self._round} here")
        members = sorted({*view, ctx.self_peer})
        if ctx.self_peer not in ranked(members, number, self.config.seed)[: self.config.attempts]:
            raise self.refusal(peer, f"this peer does not coordinate round {number}")
        if self._collecting is None or ctx.now_ns >= self._collecting[1]:
            until_ns = ctx.now_ns + round(1e9 * self.config.collect_s)
            self._collecting = (number, until_ns)
        if number != self._collecting[0]:
            raise self._stale(peer, number, self._collecting[0])
        return np.array(True)

    def publish(self, ctx: OpContext, mean: Value) -> Value:
        """End the batch; int64 [1]: the round that it was of."""
        if self._collecting is None:
            raise NothingToAggregate(f"{self.TYPE_NAME}: no batch to publish; Admit comes first")
        self._coordinated, self._collecting = self._collecting[0], None
        return np.array([self._coordinated], np.int64)

    # -- state --------------------------------------------------------------------------------

    def serialize(self) -> bytes:
        """Return the round, its update, the newest weights, and the batch."""
        collecting = self._collecting or (0, 0)
        head = Metadata(
            round=self._round, open=self._open, until_ns=self._until_ns, attempt=self._attempt,
            published=self._published, coordinated=self._coordinated, batch=collecting[0],
            batch_until_ns=collecting[1],
        )  # fmt: skip
        weights = () if self._weights is None else (self._weights,)
        parts = (head, self._stats, Composite(weights), Composite(self._update or ()))
        return codec.encode_value(Composite(parts))

    def restore(self, data: bytes) -> None:
        """Load a saved state; ComponentError for bytes of anything else."""
        if not data:
            return
        with self.restoring():
            head, stats, weights, update = codec.decode_value(types.COMPOSITE, data)
            for vector in (*weights, *update[:1]):
                if self.problem(vector):
                    raise ValueError(self.problem(vector))
            self._round, self._open = int(head["round"]), bool(head["open"])
            self._until_ns, self._attempt = int(head["until_ns"]), int(head["attempt"])
            self._published = int(head["published"])
            self._coordinated = int(head["coordinated"])
            batch = (int(head["batch"]), int(head["batch_until_ns"]))
            self._collecting = batch if batch[0] else None
            self._stats, self._weights = stats, weights[0] if weights else None
            self._update = (update[0], update[1]) if update else None

    # -- parts --------------------------------------------------------------------------------

    def _mask(self, view: PeerIdVec) -> Value:
        order = ranked(view, self._round, self.config.seed)
        return np.array([peer == order[self._attempt] for peer in view], bool)

    def _number(self, peer: PeerId, weights: Value, round_: Value) -> int:
        numbers, reason = numbers_of(round_, 1), self.problem(weights)
        if numbers is None or numbers[0] < 1:
            reason = "its round is no number from 1 on"
        if reason is not None:
            raise self.refusal(peer, reason)
        assert numbers is not None
        return numbers[0]

    def _stale(self, peer: PeerId, number: int, now: int) -> StaleRound:
        reason = f"it is of round {number}, and {now} is the last one here"
        return StaleRound(component=self.TYPE_NAME, peer=str(peer), reason=reason)
