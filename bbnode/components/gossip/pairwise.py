"""`PairwiseMean`: a vector that moves towards a peer's as much as that one moves back.

Rule: **the sum over all peers is what they have contributed.** An exchange is one move d: the peer
that was asked adds d, the one that asked subtracts the same float32 numbers, each of them once or
neither. Who was asked moves first and remembers d until the other one has said how it ended: done,
or not (the answer was late, or lost). A move that was not done is taken back, at the latest with
the next offer of that peer, which says which exchange was the last that it has done; so neither a
late answer nor a lost message changes the sum. Who waits for an answer answers nobody, so a pair
takes its mean (Boyd et al., 2006, doi:10.1109/TIT.2006.874516); with `overlapping`, it answers one
other peer meanwhile (push-pull: Jelasity, Montresor and Babaoglu, 2005,
doi:10.1145/1082469.1082470), and all of them together still take weighted means of each other. Of
two that ask each other at once the greater PeerId gives way. What remains: a peer that is gone for
good takes what it held along, and one that restarts from a snapshot is back at what it held then.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass, replace
from typing import Any, ClassVar

import numpy as np

from bbnode.components.contracts import OpContext
from bbnode.components.errors import NothingToAggregate
from bbnode.components.gossip import ops as ops
from bbnode.components.gossip.base import (
    GossipComponent,
    RoundUnderWay,
    Vector,
    Wide,
    frozen,
    numbers_of,
    told,
)
from bbnode.components.registry import register_component
from bbnode.ir import codec, types
from bbnode.ir.peer import PeerId
from bbnode.ir.values import Composite, Metadata, PeerIdVec, ResponseBatch, Value

_NOTHING: Vector = np.zeros(0, np.float32)
_NONE = -1  # no exchange


@dataclass(frozen=True, kw_only=True)
class PairwiseMeanConfig:
    """Settings of `PairwiseMean`.

    Attributes:
        size: numbers of the vector.
        overlapping: answer one peer while an exchange of one's own is open.
        deadline_s: after which an exchange that has no end counts as failed, seconds.
        max_abs: the largest absolute value that a peer may offer, or an exchange may lead to.
        max_undecided: exchanges whose end is unknown, each of which keeps a vector; beyond, the
            oldest one counts as done.
        max_peers: peers whose last exchange is known; beyond, the oldest one is forgotten.
    """

    size: int
    overlapping: bool = False
    deadline_s: float = 10.0
    max_abs: float = float(1 << 24)
    max_undecided: int = 4
    max_peers: int = 4096


@dataclass(frozen=True)
class _Exchange:
    """One that this peer began."""

    peer: PeerId
    number: int
    execution: int
    until_ns: int
    overlapped: bool = False  # this peer has answered another one since


@register_component
class PairwiseMean(GossipComponent):
    """A vector, float64 [size] inside, and the exchanges that it is in. 16 bytes a number."""

    TYPE_NAME: ClassVar[str] = "bbnode.PairwiseMean"
    Config: ClassVar[type] = PairwiseMeanConfig
    config: PairwiseMeanConfig
    positive: ClassVar[tuple[str, ...]] = ("deadline_s", "max_undecided", "max_peers")

    def __init__(self, config: PairwiseMeanConfig) -> None:
        super().__init__(config)
        self._held: Wide | None = None
        self._given: Wide | None = None  # what the next contribution is a change of
        self._open: _Exchange | None = None
        self._number = 0
        self._done: dict[PeerId, int] = {}  # the last exchange that was done with a peer
        self._undecided: dict[PeerId, tuple[int, Vector]] = {}  # answered: its number, its move
        self._counts = dict.fromkeys(("answered", "busy", "taken_back", "presumed"), 0)

    @property
    def held(self) -> Wide:
        """The vector that is held, [size]. Raises NothingToAggregate before any contribution."""
        if self._held is None:
            raise NothingToAggregate(f"{self.TYPE_NAME}: nothing is held; contribute a value first")
        return self._held

    def take(self, ctx: OpContext, initial: Value) -> Value:
        """Return what is held, float32 [size]; the next contribution is a change of that."""
        if self._held is None:
            self._held = self.checked(ctx, initial).astype(np.float64)
        current = frozen(self._held)
        self._given = current.astype(np.float64)
        return current

    def contribute(self, ctx: OpContext, value: Value) -> None:
        """Add what `value`, float32 [size], changed by. Raises ContributionRefused."""
        new = self.checked(ctx, value).astype(np.float64)
        if self._held is None or self._given is None:
            self._held = new
        else:
            self._held = self._held + (new - self._given)
        self._given = new

    def offer(self, ctx: OpContext, peers: PeerIdVec) -> tuple[Value, Value]:
        """Begin an exchange with one peer; int64 [2]: its number, the last one done with it.

        Raises:
            RoundUnderWay: the last exchange has neither ended nor failed.
            NothingToAggregate: nothing is held, or there is no peer.
        """
        if self._open is not None and ctx.now_ns < self._open.until_ns:
            raise RoundUnderWay(
                f"{self.TYPE_NAME}: the exchange with {self._open.peer} is not over; wait for the "
                f"end of a round, at most {self.config.deadline_s:g} s, before the next one"
            )
        if len(peers) != 1:
            raise NothingToAggregate(f"{self.TYPE_NAME}: an exchange with {len(peers)} peers; 1")
        offered = frozen(self.held)
        (peer,) = peers
        self._number += 1
        until_ns = ctx.now_ns + round(self.config.deadline_s * 1e9)
        self._open = _Exchange(peer, self._number, ctx.execution, until_ns)
        return offered, np.array([self._number, self._done.get(peer, _NONE)], np.int64)

    def answer(self, ctx: OpContext, offer: Value, head: Value) -> Value:
        """Move by half of the way to `offer` and return that move; no numbers: not now.

        Raises ContributionRefused for an offer that can't be averaged.
        """
        peer = ctx.source_peer or ctx.self_peer
        if peer == ctx.self_peer:
            return _NOTHING
        numbers = numbers_of(head, 2)
        reason = self.problem(offer)
        if numbers is None:
            reason = "its exchange has no numbers"
        if reason is not None:
            raise self.refusal(peer, reason)
        assert numbers is not None
        assert isinstance(offer, np.ndarray)
        if peer in self._undecided:
            self._decide(peer, done=self._undecided[peer][0] == numbers[1])
        if self._held is None or self._is_busy(ctx, peer):
            self._counts["busy"] += 1
            return _NOTHING
        move = frozen((offer.astype(np.float64) - self._held) / 2)
        self._held = self._held + move
        self._counts["answered"] += 1
        if self._open is not None:
            self._open = replace(self._open, overlapped=True)
        while len(self._undecided) >= self.config.max_undecided:
            self._counts["presumed"] += 1
            self._decide(next(iter(self._undecided)), done=True)
        self._undecided[peer] = (numbers[0], move)
        return move

    def settle(self, ctx: OpContext, answers: ResponseBatch) -> tuple[Value, Value, Metadata]:
        """End the exchange of this execution; int64 [2]: its number, 1 if it was done.

        The Metadata has `exchanged` (0 or 1), `why` where it was not, and since the last time:
        `answered` and `busy` (offers of others), `taken_back` (answered, and not done there),
        `presumed` (done for all that is known).
        """
        exchange = self._open
        if exchange is None or exchange.execution != ctx.execution:
            closing, why = np.array([0, 0], np.int64), "its time was over"
        else:
            self._open = None
            why = self._settled(ctx, exchange, answers)
            closing = np.array([exchange.number, int(not why)], np.int64)
        counts, self._counts = self._counts, dict.fromkeys(self._counts, 0)
        stats = told(exchanged=int(not why), why=why, **counts)
        return closing, frozen(self.held), stats

    def close(self, ctx: OpContext, closing: Value) -> None:
        """Learn how an exchange that was answered ended."""
        peer = ctx.source_peer or ctx.self_peer
        numbers = numbers_of(closing, 2)
        if numbers is None:
            raise self.refusal(peer, "its exchange has no numbers")
        if peer in self._undecided and self._undecided[peer][0] == numbers[0]:
            self._decide(peer, done=bool(numbers[1]))

    # -- state --------------------------------------------------------------------------------

    def serialize(self) -> bytes:
        """Return what is held, and the exchanges."""
        opened = self._open
        parts = (
            Metadata(number=self._number, **self._counts),
            Composite(each for each in (self._held, self._given) if each is not None),
            Composite(Composite((p, np.array(n, np.int64))) for p, n in self._done.items()),
            Composite(
                Composite((p, np.array(n, np.int64), move))
                for p, (n, move) in self._undecided.items()
            ),
            Composite(
                (opened.peer, np.array([*astuple(opened)[1:]], np.int64))
                if opened is not None
                else ()
            ),
        )
        return codec.encode_value(Composite(parts))

    def restore(self, data: bytes) -> None:
        """Load a saved state; ComponentError for bytes of anything else."""
        if not data:
            return
        with self.restoring():
            head, vectors, done, undecided, opened = codec.decode_value(types.COMPOSITE, data)
            held, given = [*vectors, None, None][:2]
            for vector in (held, given):
                if vector is not None and self.problem(frozen(vector)):
                    raise ValueError(self.problem(frozen(vector)))
            loaded = {peer: int(number) for peer, number in done}
            moves = {peer: (int(number), move) for peer, number, move in undecided}
            counts = {name: int(head[name]) for name in self._counts}
            self._open = _exchange(*opened) if opened else None
            self._number, self._counts = int(head["number"]), counts
            self._held, self._given, self._done, self._undecided = held, given, loaded, moves

    # -- parts --------------------------------------------------------------------------------

    def _is_busy(self, ctx: OpContext, peer: PeerId) -> bool:
        """Return True if this peer waits for an answer and can't answer another one meanwhile."""
        opened = self._open
        if opened is None or ctx.now_ns >= opened.until_ns:
            return False
        if opened.peer == peer:
            return ctx.self_peer < peer or opened.overlapped
        return opened.overlapped or not self.config.overlapping

    def _decide(self, peer: PeerId, *, done: bool) -> None:
        _, move = self._undecided.pop(peer)
        if not done and self._held is not None:
            self._held = self._held - move
            self._counts["taken_back"] += 1

    def _settled(self, ctx: OpContext, exchange: _Exchange, answers: ResponseBatch) -> str:
        """Move as the answer says; return why not, or nothing."""
        found: dict[PeerId, Any] = dict(answers.responses)
        move = found.get(exchange.peer)
        if move is None:
            return f"{exchange.peer}: {dict(answers.reasons).get(exchange.peer, 'no answer')}"
        if isinstance(move, np.ndarray) and move.shape == (0,):
            return f"{exchange.peer} is in another exchange, or holds nothing yet"
        reason = self.problem(move)
        if reason is None and np.abs(self.held - move).max() > self.config.max_abs:
            reason = f"its move leads beyond {self.config.max_abs:g} (max_abs)"
        if reason is not None:
            ctx.refuse(exchange.peer, reason)
            return f"{exchange.peer}: {reason}"
        self._held = self.held - move
        self._done.pop(exchange.peer, None)
        while len(self._done) >= self.config.max_peers:
            del self._done[next(iter(self._done))]
        self._done[exchange.peer] = exchange.number
        return ""


def _exchange(peer: PeerId, numbers: Any) -> _Exchange:
    number, execution, until_ns, overlapped = map(int, numbers)
    return _Exchange(peer, number, execution, until_ns, bool(overlapped))
