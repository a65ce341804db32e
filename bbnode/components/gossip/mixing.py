"""`RoundMixing`: rounds in which each peer takes a weighted mean of its neighbours' vectors.

Rule: a vector belongs to one round of its peer, and is mixed in that round only, or up to
`staleness` later. A neighbour that is late leaves its weight with the peer itself, so that weights
always sum to 1, and is named in the stats. (Lian et al., 2017, arXiv:1705.09056.) A peer that has
fallen behind goes on at the round that half of a round's neighbours are at, and no less than two:
no single peer pushes it forward.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from bbnode.components.contracts import OpContext
from bbnode.components.errors import InvalidComponentConfig, NothingToAggregate
from bbnode.components.gossip import ops as ops
from bbnode.components.gossip import topology
from bbnode.components.gossip.base import (
    GossipComponent,
    RoundUnderWay,
    StaleRound,
    Vector,
    frozen,
    listed,
    numbers_of,
    told,
)
from bbnode.components.registry import register_component
from bbnode.ir import codec, types
from bbnode.ir.errors import DecodeError
from bbnode.ir.peer import PeerId
from bbnode.ir.values import Composite, Metadata, PeerIdVec, Value


@dataclass(frozen=True, kw_only=True)
class RoundMixingConfig:
    """Settings of `RoundMixing`.

    Attributes:
        size: numbers of a vector.
        graph: "ring", "torus" or "complete", over `members`; "edges"; or "grid": groups of Moshpit.
        members: PeerIds as base58 text; none: the peers that the program selects, and this one.
        edges: of "edges": pairs of PeerIds.
        side: of "grid": places along each axis; 0: as many as it takes for all members.
        axes: of "grid": d; after as many rounds everybody has averaged with everybody.
        absent: who gets the weight of a neighbour that is late: "self", or "present": all that are
            there, by their weights.
        staleness: rounds that a vector may be behind.
        deadline_s: that a round waits for neighbours, seconds.
        max_abs: the largest absolute value in a vector.
        max_peers: peers whose vectors are kept, at most three of each.
    """

    size: int
    graph: Literal["ring", "torus", "complete", "edges", "grid"] = "ring"
    members: tuple[str, ...] = ()
    edges: tuple[tuple[str, str], ...] = ()
    side: int = 0
    axes: int = 2
    absent: Literal["self", "present"] = "self"
    staleness: int = 0
    deadline_s: float = 10.0
    max_abs: float = float(1 << 24)
    max_peers: int = 64


_MOST_ROUNDS = 3  # vectors of one peer: of this round, and of those that it is ahead


@register_component
class RoundMixing(GossipComponent):
    """The rounds of one peer, and what its neighbours have sent for them."""

    TYPE_NAME: ClassVar[str] = "bbnode.RoundMixing"
    Config: ClassVar[type] = RoundMixingConfig
    config: RoundMixingConfig
    positive: ClassVar[tuple[str, ...]] = ("deadline_s", "max_peers", "axes")

    def __init__(self, config: RoundMixingConfig) -> None:
        super().__init__(config)
        known = (*topology.GRAPHS, "edges", "grid")
        self.require(config.graph in known, f"graph is {config.graph!r}; one of {', '.join(known)}")
        self.require(config.absent in ("self", "present"), 'absent is neither "self" nor "present"')
        self.require(min(config.side, config.staleness) >= 0, "side and staleness are 0 or more")
        self.require(
            bool(config.edges) == (config.graph == "edges"),
            'edges go with graph="edges", and it with them',
        )
        try:
            self._members = tuple(sorted({PeerId.parse(text) for text in config.members}))
            self._edges = {
                (min(pair), max(pair))
                for pair in ((PeerId.parse(a), PeerId.parse(b)) for a, b in config.edges)
            }
        except DecodeError as error:
            raise InvalidComponentConfig(
                f"{self.TYPE_NAME}: members and edges are PeerIds: {error}"
            ) from error
        self.require(all(a != b for a, b in self._edges), "an edge leads from a peer to itself")
        self._round = 0
        self._open = False  # the round has begun, and is not mixed
        self._signalled = False  # somebody was told that it is full, or late
        self._until_ns = 0
        self._row: dict[PeerId, float] = {}  # weights of the round's neighbours
        self._awaited: set[PeerId] = set()
        self._own: Vector | None = None
        self._came: dict[PeerId, dict[int, Vector]] = {}
        # The last round that a peer has sent for, and when.
        self._newest: dict[PeerId, tuple[int, int]] = {}

    # -- a round ------------------------------------------------------------------------------

    def begin(self, ctx: OpContext, view: PeerIdVec) -> tuple[Value, Value]:
        """Begin the next round with the peers of `view`: its number, and who is a neighbour.

        Raises:
            RoundUnderWay: the last round has not ended.
            NotEnoughPeers: there is nobody else.
            TooManyPeers: a grid has fewer places.
            DeploymentError: this peer is none of the members, or has no edge.
        """
        if self._open and ctx.now_ns < self._until_ns:
            raise RoundUnderWay(
                f"{self.TYPE_NAME}: round {self._round} is not over; wait for its end, at most "
                f"{self.config.deadline_s:g} s, before the next one"
            )
        others = {*view, *self._members} - {ctx.self_peer}
        self._round = max(self._round + 1, self._reached(len(others), ctx.now_ns))
        self._row = self._weights(ctx.self_peer, view)
        self._open, self._signalled, self._own = True, False, None
        # What a crash or a failed training left behind ends so; twice, since training takes time.
        self._until_ns = ctx.now_ns + round(2e9 * self.config.deadline_s)
        self._awaited = {*self._row} & {*view}
        near = {*self._row, *view}
        self._newest = {peer: n for peer, n in self._newest.items() if peer in near}
        for peer in [*self._came]:
            self._forget_old(peer)
        mask = np.array([peer in self._awaited for peer in view], bool)
        return np.array([self._round], np.int64), mask

    def own(self, ctx: OpContext, weights: Value) -> Value:
        """Bring in this peer's vector, float32 [size]; True: nothing is awaited any more."""
        self._own = self.checked(ctx, weights)
        return np.array(self._is_full())

    def arrive(self, ctx: OpContext, weights: Value, round_: Value) -> Value:
        """Keep a neighbour's vector; True where it is the last that this peer's round waits for.

        Raises:
            StaleRound: of a round that is over here.
            ContributionRefused: it can't be averaged, is a second one for its round, or of a peer
                too many.
        """
        peer = ctx.source_peer or ctx.self_peer
        numbers, reason = numbers_of(round_, 1), self.problem(weights)
        if numbers is None or numbers[0] < 1:
            reason = "its round is no number from 1 on"
        elif self._members and peer not in self._members:
            reason = "it is none of the members"
        elif self._edges and not any(peer in edge for edge in self._edges):
            reason = "it has no edge"
        if reason is not None:
            raise self.refusal(peer, reason)
        assert numbers is not None
        assert isinstance(weights, np.ndarray)
        (number,) = numbers
        if peer not in self._newest and len(self._newest) >= self.config.max_peers:
            raise self.refusal(peer, f"{self.config.max_peers} peers send here (max_peers)")
        if number > self._newest.get(peer, (0, 0))[0]:
            self._newest[peer] = (number, ctx.now_ns)
        if number < self._first_kept():
            raise StaleRound(
                component=self.TYPE_NAME,
                peer=str(peer),
                reason=f"it is of round {number}, and now is {self._round} "
                f"(staleness={self.config.staleness})",
            )
        kept = self._came.setdefault(peer, {})
        if number in kept:
            raise self.refusal(peer, f"it has sent for round {number} already")
        kept[number] = weights
        while len(kept) > _MOST_ROUNDS + self.config.staleness:
            del kept[min(kept)]
        return np.array(self._is_full())

    def overdue(self, ctx: OpContext, round_: Value) -> Value:
        """Return True where the round of that number still waits: it has to do without the rest."""
        late = self._open and not self._signalled and numbers_of(round_, 1) == (self._round,)
        late = late and self._own is not None
        self._signalled |= late
        return np.array(late)

    def mix(self, ctx: OpContext) -> tuple[Value, Metadata]:
        """End the round: the weighted mean of the vectors that are there, float32 [size].

        The Metadata has `round`; `contributors`, with this peer; `missing`, and who that is in
        `missing_why`; `stale`: vectors of an earlier round; `own_share`: the weight of this peer's;
        `moved`: by how much the mean differs from it, in the L2 norm.
        """
        if self._own is None:
            raise NothingToAggregate(f"{self.TYPE_NAME}: nothing to mix; Own comes first")
        there: dict[PeerId, Vector] = {}
        stale = 0
        for peer in self._row:
            kept = {n: v for n, v in self._came.get(peer, {}).items() if n <= self._round}
            if kept:
                there[peer] = kept[max(kept)]
                stale += max(kept) < self._round
        missing = sorted({*self._row} - {*there})
        own_share = 1 - sum(self._row.values())
        scale = 1.0
        if self.config.absent == "present":
            scale = 1 / (own_share + sum(self._row[peer] for peer in there))
            own_share *= scale
        else:
            own_share += sum(self._row[peer] for peer in missing)
        mean = own_share * self._own.astype(np.float64)
        for peer in sorted(there):
            mean += scale * self._row[peer] * there[peer]
        stats = told(
            round=self._round, contributors=1 + len(there), missing=len(missing),
            missing_why=listed(missing), stale=stale, own_share=own_share,
            moved=float(np.linalg.norm(mean - self._own)),
        )  # fmt: skip
        self._open, self._own = False, None
        for peer in [*self._came]:
            self._forget_old(peer)
        return frozen(mean), stats

    # -- state --------------------------------------------------------------------------------

    def serialize(self) -> bytes:
        """Return the round, and what came for it and for later ones."""
        head = Metadata(
            round=self._round, open=self._open, signalled=self._signalled,
            until_ns=self._until_ns,
        )  # fmt: skip
        came = [
            Composite((peer, np.array(number, np.int64), vector))
            for peer, kept in self._came.items()
            for number, vector in kept.items()
        ]
        rows = [
            Composite((peer, np.array(weight), np.array(peer in self._awaited)))
            for peer, weight in self._row.items()
        ]
        newest = [Composite((p, np.array(n, np.int64))) for p, n in self._newest.items()]
        own = () if self._own is None else (self._own,)
        parts = (head, *map(Composite, (came, rows, newest, own)))
        return codec.encode_value(Composite(parts))

    def restore(self, data: bytes) -> None:
        """Load a saved state; ComponentError for bytes of anything else."""
        if not data:
            return
        with self.restoring():
            head, came, rows, newest, own = codec.decode_value(types.COMPOSITE, data)
            loaded: dict[PeerId, dict[int, Vector]] = {}
            for peer, number, vector in came:
                if self.problem(vector):
                    raise ValueError(self.problem(vector))
                loaded.setdefault(peer, {})[int(number)] = vector
            self._round, self._until_ns = int(head["round"]), int(head["until_ns"])
            self._open, self._signalled = bool(head["open"]), bool(head["signalled"])
            self._row = {peer: float(weight) for peer, weight, _ in rows}
            self._awaited = {peer for peer, _, awaited in rows if awaited}
            self._newest = {peer: (int(at[0]), int(at[1])) for peer, at in newest}
            self._came, self._own = loaded, own[0] if own else None

    # -- parts --------------------------------------------------------------------------------

    def _weights(self, me: PeerId, view: PeerIdVec) -> dict[PeerId, float]:
        config = self.config
        if config.graph == "edges":
            row = topology.on_edges(self._edges, me)
            self._deployed(bool(row), f"no edge leads to this node, {me}")
            return row
        members = self._members or sorted({*view, me})
        topology.enough(self.TYPE_NAME, members)
        self._deployed(me in members, f"this node, {me}, is none of the members")
        if config.graph == "grid":
            return topology.on_grid(config.side, config.axes, self._round, me, members)
        return topology.on_graph(config.graph, me, members)

    def _deployed(self, good: bool, problem: str) -> None:
        if not good:
            raise InvalidComponentConfig(f"{self.TYPE_NAME}: {problem}; add it, or leave it out")

    def _is_full(self) -> bool:
        """Return True, once, when the round has all that it waits for."""
        full = self._open and not self._signalled and self._own is not None
        full = full and all(self._round in self._came.get(peer, {}) for peer in self._awaited)
        self._signalled |= full
        return full

    def _first_kept(self) -> int:
        """Return the first round whose vectors are of use."""
        return self._round - self.config.staleness + (0 if self._open else 1)

    def _forget_old(self, peer: PeerId) -> None:
        first = self._first_kept()
        kept = {n: v for n, v in self._came[peer].items() if n >= first}
        if kept:
            self._came[peer] = kept
        else:
            del self._came[peer]

    def _reached(self, others: int, now_ns: int) -> int:
        """Return the round that enough peers are at: half of a round's neighbours, at least two.

        Who sent for a round a deadline ago is beyond it.
        """
        wait_ns = round(self.config.deadline_s * 1e9)
        rounds = sorted(
            (n + (now_ns - at_ns >= wait_ns) for n, at_ns in self._newest.values()), reverse=True
        )
        needed = min(max(2, (len(self._row) + 1) // 2), others)
        return rounds[needed - 1] if 1 <= needed <= len(rounds) else 0
