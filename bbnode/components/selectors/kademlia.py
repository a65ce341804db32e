"""`Kademlia`: the peers of a large network that are nearest to a key, found in logarithmic steps.

Rule: ids of nodes are the SHA-256 of their PeerIds, as keys are of their bytes, and nearness is the
XOR of two ids as a number (Maymounkov and Mazières, 2002, doi:10.1007/3-540-45748-8_5). Only peers
that spoke for themselves, over a connection that proves who they are, get into the table or into a
result; whom others name is asked first. Peers are counted by the subnet that they are seen in, as
soon as they are; until then by what is said of them. Members are nodes with this component in the
slot of the same name.
"""

from __future__ import annotations

import hashlib
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, ClassVar, Final

import numpy as np
from multiaddr import Multiaddr

from bbnode.components.contracts import PENDING, Completion, OpContext, inbound, waits
from bbnode.components.errors import ExchangeRefused, NotEnoughPeers, UnsupportedSelection
from bbnode.components.registry import register_component
from bbnode.components.selectors.records import (
    HINTS,
    PeerRecord,
    hints,
    learn,
    own_record,
    subnet_at,
    subnet_of,
)
from bbnode.components.selectors.views import DrawingSelector
from bbnode.components.wire_records import UnusableMessage, WireRecord, records, wire
from bbnode.ir.envelope import CorrelationKind
from bbnode.ir.peer import PeerId
from bbnode.ir.values import PeerIdVec, Value

S: Final = 1_000_000_000
ID_BITS: Final = 256
_ID_BYTES: Final = ID_BITS // 8
_MAX_K: Final = 32
_KEPT_IDS: Final = 1 << 16
# A node asks each other one once in a lookup, so that an honest one stays far below.
_CALLS_OF_ONE: Final = 512
_CALLS_WINDOW_NS: Final = 10 * S
_MAX_CALLERS: Final = 4096
_MAX_LOOKUPS: Final = 64
_MAX_FINISHED: Final = 64
_MAX_PASSED_OVER: Final = 512  # of one lookup
# Failures in a row of a peer for which there is no replacement.
_MAX_FAILURES: Final = 3
_ALONE_NS: Final = 1 * S  # between two attempts to get to know somebody, at first
# A peer that spoke within this time lives, and is not asked if it does.
_FRESH_NS: Final = 60 * S
_REFRESH = "refresh"


@lru_cache(maxsize=_KEPT_IDS)
def node_id(peer: PeerId) -> int:
    """Return where a peer is among keys: the SHA-256 of its multihash, as libp2p's DHT has it."""
    return int.from_bytes(hashlib.sha256(peer.to_bytes()).digest(), "big")


def key_id(key: Value) -> int:
    """Return where a key is: the SHA-256 of bytes, of a uint8 [N], or of a PeerId's multihash.

    Raises UnsupportedSelection for anything else.
    """
    if isinstance(key, PeerId):
        return node_id(key)
    if isinstance(key, np.ndarray) and key.dtype == np.uint8 and key.ndim == 1:
        key = key.tobytes()
    if not isinstance(key, bytes):
        raise UnsupportedSelection(
            f"Kademlia: a key is bytes, uint8 [N] or a PeerId, and no {type(key).__name__}"
        )
    return int.from_bytes(hashlib.sha256(key).digest(), "big")


def _target(plain: Any) -> int:
    if not isinstance(plain, bytes) or len(plain) != _ID_BYTES:
        raise UnusableMessage(f"the target of a lookup has {_ID_BYTES} bytes")
    return int.from_bytes(plain, "big")


@dataclass(frozen=True, slots=True, kw_only=True)
class FindNode(WireRecord):
    """Asks for the peers that are nearest to an id; `addresses` are the asker's."""

    target: int = field(metadata=wire(_target, lambda value: value.to_bytes(_ID_BYTES, "big")))
    addresses: tuple[Multiaddr, ...] = field(metadata=HINTS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Nearest(WireRecord):
    """The answer; `addresses` are those of who answers."""

    addresses: tuple[Multiaddr, ...] = field(metadata=HINTS)
    peers: tuple[PeerRecord, ...] = field(metadata=records(PeerRecord, _MAX_K))


@dataclass(frozen=True, slots=True, kw_only=True)
class LookupDone:
    """One lookup that has ended.

    Attributes:
        target: the id that was looked for.
        nearest: who answered, the nearest first, at most k.
        hops: from this node to the nearest one, each of which told of the next; 0: nobody answered.
        asked, failed: peers that were asked, and those of them without a usable answer.
        took_ns: nanoseconds of this node's time.
    """

    target: int
    nearest: tuple[PeerId, ...]
    hops: int
    asked: int
    failed: int
    took_ns: int


@dataclass(slots=True)
class _Found:
    """A peer that a lookup has heard of: where it is, its place, and how far it got."""

    record: PeerRecord
    distance: int
    hops: int
    subnet: str  # that it counts for; as it was named, and once it has answered, as it was seen
    # "asked", "answered", "failed", or "crowded": it answered from a subnet of which there are
    # enough.
    state: str = "new"


@dataclass(slots=True, kw_only=True)
class _Lookup:
    number: int
    target: int
    began_ns: int
    completion: Completion | None = None  # of the op that waits for it
    n: int = 0
    include_self: bool = False
    peer_class: str = ""
    found: dict[PeerId, _Found] = field(default_factory=dict)
    subnets: Counter[str] = field(default_factory=Counter)
    # Of a subnet of which there are enough: with the hops to them.
    passed_over: dict[str, list[tuple[PeerRecord, int]]] = field(default_factory=dict)

    def nearest(self, k: int) -> list[_Found]:
        """Return the nearest k that may count."""
        live = (each for each in self.found.values() if each.state not in ("failed", "crowded"))
        return sorted(live, key=lambda each: each.distance)[:k]

    def count(self, *states: str) -> int:
        """Return how many are in one of these states."""
        return sum(each.state in states for each in self.found.values())


@dataclass(frozen=True, kw_only=True)
class KademliaConfig:
    """Settings of `Kademlia`; all members should have the same.

    Attributes:
        k: peers of a bucket, of an answer and of a lookup's result at most, 1 to 32.
        alpha: peers that a lookup asks at the same time, 1 to 16.
        deadline_s: seconds that an answer is waited for.
        lookup_s: seconds after which a lookup ends with those that have answered.
        refresh_s: seconds between two refreshes of all buckets.
        lookups: "near_key" looks the network over; without, it takes the nearest in the table.
        max_per_subnet: peers of one public subnet (IPv4 /24, IPv6 /48) in a bucket, and in a
            lookup, by where they are seen; peers behind one relay are of its subnet. 0: any number.
        min_peers: peers that there have to be for a draw; with fewer it fails.
        seed: of draws and refreshes.
    """

    k: int = 20
    alpha: int = 3
    deadline_s: float = 5.0
    lookup_s: float = 20.0
    refresh_s: float = 600.0
    lookups: bool = True
    max_per_subnet: int = 2
    min_peers: int = 1
    seed: int = 0


@register_component
class Kademlia(DrawingSelector):
    """Chooses the members that are nearest to a key, or among those in its table of buckets."""

    TYPE_NAME: ClassVar[str] = "bbnode.Kademlia"
    Config: ClassVar[type] = KademliaConfig
    config: KademliaConfig

    def __init__(self, config: KademliaConfig) -> None:
        super().__init__(config)
        self.require(1 <= config.k <= _MAX_K, f"k has to be in 1 .. {_MAX_K}")
        self.require(1 <= config.alpha <= 16, "alpha has to be in 1 .. 16")
        for name, least, most in (
            ("deadline_s", 0.01, 300), ("lookup_s", 0.01, 3600), ("refresh_s", 1, 86_400),
        ):  # fmt: skip
            good = least <= getattr(config, name) <= most
            self.require(good, f"{name} has to be in {least} .. {most}")
        self.require(config.max_per_subnet >= 0, "max_per_subnet must not be negative")
        # Of each length of the prefix that ids share with this node's: least recently seen first.
        self._buckets: dict[int, dict[PeerId, PeerRecord]] = {}
        self._spare: dict[int, dict[PeerId, PeerRecord]] = {}  # who would take their places
        self._subnets: dict[PeerId, str] = {}  # that peers of either were seen in
        self._failures: Counter[PeerId] = Counter()
        self._heard_ns: dict[PeerId, int] = {}  # when a peer of a bucket last spoke
        self._pings: dict[int, int] = {}  # of a bucket: when it may ping again
        self._flat: dict[PeerId, PeerRecord] | None = None  # all buckets, until one changes
        self._saved: list[PeerRecord] = []  # of a snapshot, until it is known who this node is
        self._has_joined = False
        self._wait_ns = _ALONE_NS // 2  # until the next refresh; short while few others are known
        self._lookups: dict[int, _Lookup] = {}
        self._queue: list[int] = []  # targets of refreshes, one after the other
        self._number = 0
        self._armed = False  # in this life of the node
        self._calls: Counter[PeerId] = Counter()
        self._calls_until_ns = 0
        self.finished: deque[LookupDone] = deque(maxlen=_MAX_FINISHED)

    # -- the selector ------------------------------------------------------------------------

    def candidates(self, ctx: OpContext) -> Sequence[PeerId]:
        """Return the peers of the table; the connected ones of the class while there is none."""
        self._arm(ctx)
        return sorted(self.table(ctx)) or sorted(ctx.peers.connected(ctx.peer_class))

    @waits
    def select(self, ctx: OpContext, key: Value | None, *, mode: str, n: int) -> Any:
        """Return the peers that `mode` selects; "near_key" looks up the `n` nearest, at most k.

        Raises:
            UnsupportedSelection: another mode, no key or of another type, n below 1 or above k, or
                more lookups under way than a node has at once.
            NotEnoughPeers: fewer than `min_peers` can be chosen, or have answered the lookup.
        """
        if mode != "near_key":
            return super().select(ctx, key, mode=mode, n=n)
        if key is None or not 1 <= n <= self.config.k:
            raise UnsupportedSelection(
                f"{self.TYPE_NAME}: near_key needs a key, and n of 1 .. k={self.config.k}, not {n}"
            )
        target = key_id(key)
        self._arm(ctx)
        if not self.config.lookups:
            near = [record.peer for record in self._near(ctx, target, self.config.k)]
            return self._result(ctx.self_peer, target, near, n, ctx.include_self, ctx.peer_class)
        if len(self._lookups) >= _MAX_LOOKUPS:
            raise UnsupportedSelection(
                f"{self.TYPE_NAME}: {_MAX_LOOKUPS} lookups are under way; begin fewer at once"
            )
        lookup = self._new(ctx, target, n=n, completion=ctx.open_completion())
        lookup.include_self, lookup.peer_class = ctx.include_self, ctx.peer_class or ""
        self._go_on(ctx, lookup)
        return PENDING

    def _result(
        self, own: PeerId, target: int, near: Iterable[PeerId], n: int,
        include_self: bool, peer_class: str | None,
    ) -> PeerIdVec:  # fmt: skip
        peers = {*near, own} if include_self else {*near} - {own}
        if len(peers) < self.config.min_peers:
            raise NotEnoughPeers(
                component=self.TYPE_NAME,
                available=len(peers),
                needed=self.config.min_peers,
                peer_class=peer_class or "eligible",
            )
        return PeerIdVec(sorted(sorted(peers, key=lambda peer: node_id(peer) ^ target)[:n]))

    # -- the table ---------------------------------------------------------------------------

    def table(self, ctx: OpContext) -> dict[PeerId, PeerRecord]:
        """Return all peers of the buckets."""
        for record in self._saved:
            bucket = self._buckets.setdefault(self._place(ctx, record.peer), {})
            if len(bucket) < self.config.k and record.peer != ctx.self_peer:
                bucket[record.peer] = record
        if self._saved or self._flat is None:
            self._flat = {p: each for row in self._buckets.values() for p, each in row.items()}
        self._saved = []
        return self._flat

    def _place(self, ctx: OpContext, peer: PeerId) -> int:
        return ID_BITS - (node_id(ctx.self_peer) ^ node_id(peer)).bit_length()

    def _near(self, ctx: OpContext, target: int, n: int, but: PeerId | None = None) -> list[Any]:
        """Return the records of the `n` in the table that are nearest; who failed comes last."""
        found = [each for peer, each in self.table(ctx).items() if peer != but]
        found.sort(key=lambda each: (each.peer in self._failures, node_id(each.peer) ^ target))
        return found[:n]

    def _spoke(self, ctx: OpContext, record: PeerRecord) -> None:
        """Enter a peer that spoke for itself, or move it to the end of its bucket."""
        peer = record.peer
        if peer == ctx.self_peer:
            return
        self.table(ctx)
        self._failures.pop(peer, None)
        place = self._place(ctx, peer)
        bucket = self._buckets.setdefault(place, {})
        spare = self._spare.setdefault(place, {})
        known = bucket.pop(peer, None)
        if known is not None:
            self._subnets[peer] = _seen_in(ctx, record)
            bucket[peer] = record if record.addresses else known
            self._heard_ns[peer] = ctx.now_ns
            if bucket[peer] != known:
                self._flat = None
            return
        spare.pop(peer, None)
        self._subnets[peer] = _seen_in(ctx, record)
        if len(bucket) < self.config.k and self._has_room(bucket, peer):
            self._enter(ctx, bucket, record)
            self._heard_ns[peer] = ctx.now_ns
            return
        spare[peer] = record
        if not self._has_room(spare, peer, but=peer):
            # The newest of a subnet stand by, and leave the others room.
            first = next(each for each in spare if self._subnets[each] == self._subnets[peer])
            self._forget(spare, first)
        elif len(spare) > self.config.k:
            self._forget(spare, next(iter(spare)))
        if len(bucket) < self.config.k:
            return
        # Who is there stays while it lives: old members are more likely to stay, and a flood of
        # new ones does not push them out.
        oldest = next(iter(bucket))
        quiet = ctx.now_ns - self._heard_ns.get(oldest, -_FRESH_NS) >= _FRESH_NS
        if quiet and ctx.now_ns >= self._pings.get(place, 0):
            self._pings[place] = ctx.now_ns + self._deadline_ns
            ctx.request(oldest, ctx.slot, "Ping", b"", tag="ping", deadline_ns=self._deadline_ns)

    def _has_room(
        self, among: Iterable[PeerId], peer: PeerId, *, but: PeerId | None = None
    ) -> bool:
        most, subnet = self.config.max_per_subnet, self._subnets.get(peer, "")
        if not most or not subnet:
            return True
        return sum(self._subnets.get(each) == subnet for each in among if each != but) < most

    def _enter(self, ctx: OpContext, bucket: dict[PeerId, PeerRecord], record: PeerRecord) -> None:
        bucket[record.peer], self._flat = record, None
        learn(ctx, record)

    def _forget(self, table: dict[PeerId, PeerRecord], peer: PeerId) -> None:
        del table[peer]
        self._subnets.pop(peer, None)

    def _failed(self, ctx: OpContext, peer: PeerId) -> None:
        """Let a spare peer take the place of one that does not answer."""
        place = self._place(ctx, peer)
        bucket, spare = self._buckets.get(place, {}), self._spare.get(place, {})
        if peer in spare:
            self._forget(spare, peer)
        if peer not in bucket:
            return
        self._failures[peer] += 1
        rest = bucket.keys() - {peer}
        able = [each for each in reversed(spare) if self._has_room(rest, each)]
        if not able and self._failures[peer] < _MAX_FAILURES:
            return
        self._forget(bucket, peer)
        del self._failures[peer]
        self._heard_ns.pop(peer, None)
        self._flat = None
        if able:  # the newest
            self._enter(ctx, bucket, spare.pop(able[0]))

    # -- lookups -----------------------------------------------------------------------------

    @property
    def _deadline_ns(self) -> int:
        return int(self.config.deadline_s * S)

    def _new(
        self, ctx: OpContext, target: int, *, n: int = 0, completion: Completion | None = None
    ) -> _Lookup:
        self._number += 1
        lookup = _Lookup(
            number=self._number, target=target, began_ns=ctx.now_ns, n=n, completion=completion
        )
        self._lookups[lookup.number] = lookup
        # All of the table, so that there is somebody to ask where the nearest are gone. While it is
        # small, whom it knows may be newcomers too, who know nobody else.
        known = list(self.table(ctx).values())
        if len(known) < self.config.k:
            known += [PeerRecord(peer=peer) for peer in ctx.peers.connected()]
        for record in known:
            self._hear(ctx, lookup, record, 1, self._subnets.get(record.peer))
        ctx.set_timer(f"end:{lookup.number}", int(self.config.lookup_s * S))
        return lookup

    def _hear(
        self, ctx: OpContext, lookup: _Lookup, record: PeerRecord, hops: int,
        seen_in: str | None = None,
    ) -> None:  # fmt: skip
        if record.peer == ctx.self_peer or record.peer in lookup.found:
            return
        subnet = subnet_of(record) if seen_in is None else seen_in
        if not self._counted(lookup, subnet):
            waiting = lookup.passed_over.setdefault(subnet, [])
            if sum(map(len, lookup.passed_over.values())) < _MAX_PASSED_OVER:
                waiting.append((record, hops))
            return
        distance = node_id(record.peer) ^ lookup.target
        lookup.found[record.peer] = _Found(record, distance, hops, subnet)

    def _counted(self, lookup: _Lookup, subnet: str) -> bool:
        """Count one more peer of a subnet; False, and nothing changes, if there are enough."""
        most = self.config.max_per_subnet
        if subnet and most and lookup.subnets[subnet] >= most:
            return False
        lookup.subnets[subnet] += 1
        return True

    def _uncounted(self, ctx: OpContext, lookup: _Lookup, subnet: str) -> None:
        """Count one less, and hear those of the subnet again that were passed over."""
        lookup.subnets[subnet] -= 1
        for each in lookup.found.values():
            if each.state == "crowded" and each.subnet == subnet and self._counted(lookup, subnet):
                each.state = "answered"
        for record, hops in lookup.passed_over.pop(subnet, ()):
            self._hear(ctx, lookup, record, hops, subnet)

    def _saw(self, ctx: OpContext, lookup: _Lookup, found: _Found, subnet: str) -> None:
        """Count a peer that answered where it is, and no more where it was said to be."""
        found.state = "answered"
        if subnet == found.subnet:
            return
        if not self._counted(lookup, subnet):
            found.state = "crowded"
        before, found.subnet = found.subnet, subnet
        self._uncounted(ctx, lookup, before)

    def _go_on(self, ctx: OpContext, lookup: _Lookup) -> None:
        """Ask the nearest that were not asked, or end."""
        near = lookup.nearest(self.config.k)
        free = self.config.alpha - lookup.count("asked")
        payload = FindNode(target=lookup.target, addresses=own_record(ctx).addresses).encode()
        for each in [each for each in near if each.state == "new"][: max(0, free)]:
            each.state = "asked"
            learn(ctx, each.record)
            ctx.request(
                each.record.peer, ctx.slot, "FindNode", payload,
                tag=f"find:{lookup.number}", deadline_ns=self._deadline_ns,
            )  # fmt: skip
        if all(each.state == "answered" for each in near):
            self._end(ctx, lookup)

    def _end(self, ctx: OpContext, lookup: _Lookup) -> None:
        del self._lookups[lookup.number]
        ctx.cancel_timer(f"end:{lookup.number}")
        near = [each for each in lookup.nearest(len(lookup.found)) if each.state == "answered"]
        near = near[: self.config.k]
        peers = tuple(each.record.peer for each in near)
        self.finished.append(
            LookupDone(
                target=lookup.target,
                nearest=peers,
                hops=near[0].hops if near else 0,
                asked=lookup.count("asked", "answered", "failed", "crowded"),
                failed=lookup.count("failed"),
                took_ns=ctx.now_ns - lookup.began_ns,
            )
        )
        if lookup.completion is not None:
            try:
                result = self._result(
                    ctx.self_peer, lookup.target, peers, lookup.n, lookup.include_self,
                    lookup.peer_class,
                )  # fmt: skip
            except NotEnoughPeers as error:
                lookup.completion.fail(error)
            else:
                lookup.completion.complete(result)
        if lookup.completion is None and lookup.target == node_id(ctx.self_peer):
            # The nearest k of all are known now: what is further away than these is left, of which
            # a newcomer looks into the buckets alone that have hardly anybody yet.
            end = self._place(ctx, peers[-1]) if len(peers) == self.config.k else 0
            enough = self.config.k + 1 if self._has_joined else self.config.alpha
            self._has_joined = True
            self._queue = [
                self._within(ctx, place)
                for place in range(end)
                if len(self._buckets.get(place, ())) < enough
            ]
        self._refresh_next(ctx)

    # -- answers -----------------------------------------------------------------------------

    def on_answer(self, ctx: OpContext, tag: str, payload: bytes) -> None:
        """Take the answer to a ping or a step of a lookup."""
        peer = ctx.source_peer or ctx.self_peer
        if tag == "ping":
            self._spoke(ctx, PeerRecord(peer=peer))
            return
        lookup = self._lookups.get(int(tag.removeprefix("find:")))
        asked = None if lookup is None else lookup.found.get(peer)
        try:
            said = Nearest.decode(payload)
            named = {record.peer for record in said.peers}
            if len(named) < len(said.peers) or peer in named:
                raise UnusableMessage("a peer stands twice in an answer, or names itself")
        except UnusableMessage as error:
            ctx.refuse(peer, str(error))
            self.on_no_answer(ctx, tag, peer)
            return
        self._spoke(ctx, PeerRecord(peer=peer, addresses=hints(said.addresses)))
        if lookup is None or asked is None:
            return  # it has ended
        self._saw(ctx, lookup, asked, _seen_in(ctx, asked.record))
        nearest = sorted(said.peers, key=lambda record: node_id(record.peer) ^ lookup.target)
        for record in nearest[: self.config.k]:
            self._hear(ctx, lookup, record, asked.hops + 1)
        self._go_on(ctx, lookup)

    def on_no_answer(self, ctx: OpContext, tag: str, peer: PeerId) -> None:
        """Go on without a peer that does not answer, or not as it should."""
        self._failed(ctx, peer)
        lookup = None if tag == "ping" else self._lookups.get(int(tag.removeprefix("find:")))
        if lookup is not None and peer in lookup.found:
            lookup.found[peer].state = "failed"
            self._uncounted(ctx, lookup, lookup.found[peer].subnet)
            self._go_on(ctx, lookup)

    # -- what others ask -----------------------------------------------------------------------

    @inbound("FindNode")
    def find_node(self, ctx: OpContext, payload: bytes) -> bytes | None:
        """Answer the nearest in the table. Raises UnusableMessage and ExchangeRefused."""
        peer = self._caller(ctx)
        said = FindNode.decode(payload)
        near = self._near(ctx, said.target, self.config.k, but=peer)
        self._spoke(ctx, PeerRecord(peer=peer, addresses=hints(said.addresses)))
        good = tuple(record for record in near if record.peer not in self._failures)
        return Nearest(addresses=own_record(ctx).addresses, peers=good).encode()

    @inbound("Ping")
    def ping(self, ctx: OpContext, payload: bytes) -> bytes | None:
        """Answer that this node lives. Raises ExchangeRefused."""
        self._caller(ctx)
        return b""

    def _caller(self, ctx: OpContext) -> PeerId:
        peer, said = ctx.source_peer or ctx.self_peer, ctx.correlation
        self._arm(ctx)
        if ctx.now_ns >= self._calls_until_ns:
            self._calls_until_ns = ctx.now_ns + _CALLS_WINDOW_NS
            self._calls.clear()
        asks = said is not None and said.kind is CorrelationKind.REQUEST
        full = peer not in self._calls and len(self._calls) >= _MAX_CALLERS
        if not asks or full or self._calls[peer] >= _CALLS_OF_ONE:
            limit = f"{_CALLS_OF_ONE} of one peer, of up to {_MAX_CALLERS}"
            reason = f"too many calls in 10 s ({limit})" if asks else "a call without a request"
            ctx.refuse(peer, reason)
            raise ExchangeRefused(component=self.TYPE_NAME, reason=reason)
        self._calls[peer] += 1
        return peer

    # -- its own time --------------------------------------------------------------------------

    def bootstrap(self, ctx: OpContext) -> None:
        """Begin to get to know others, within the first second."""
        self._arm(ctx)

    def _arm(self, ctx: OpContext) -> None:
        if not self._armed:
            self._armed = True
            ctx.set_timer(_REFRESH, self._random(ctx) % _ALONE_NS)

    def on_timer(self, ctx: OpContext, key: str) -> None:
        """Refresh the buckets, or end a lookup whose time is over."""
        if key != _REFRESH:
            lookup = self._lookups.get(int(key.removeprefix("end:")))
            if lookup is not None:
                self._end(ctx, lookup)
            return
        self._armed = True
        refresh_ns = int(self.config.refresh_s * S)
        small = len(self.table(ctx)) < self.config.k
        self._wait_ns = min(2 * self._wait_ns, refresh_ns) if small else refresh_ns
        if not self.table(ctx):
            self._wait_ns = _ALONE_NS
        ctx.set_timer(_REFRESH, self._wait_ns)
        if not self.table(ctx) and not set(ctx.peers.connected()) - {ctx.self_peer}:
            return
        if not self._queue:
            # Its own id first, which finds its neighbours; then what is further away than these.
            self._queue = [node_id(ctx.self_peer)]
            self._refresh_next(ctx)

    def _refresh_next(self, ctx: OpContext) -> None:
        refreshing = any(each.completion is None for each in self._lookups.values())
        if not self._queue or refreshing or len(self._lookups) >= _MAX_LOOKUPS:
            return
        self._go_on(ctx, self._new(ctx, self._queue.pop(0)))

    def _within(self, ctx: OpContext, place: int) -> int:
        """Return a random id whose prefix shared with this node's has a length of `place`."""
        rest = ID_BITS - place - 1
        own = node_id(ctx.self_peer) >> rest
        return ((own ^ 1) << rest) | (self._random(ctx) & ((1 << rest) - 1))

    def _random(self, ctx: OpContext) -> int:
        """Return a number below 2^256 that follows from the seed, this node and the draw."""
        salt = self._seed.to_bytes(8, "big") + self._draws.to_bytes(8, "big")
        self._draws += 1
        return int.from_bytes(hashlib.sha256(salt + ctx.self_peer.to_bytes()).digest(), "big")

    # -- snapshot ----------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return the table; lookups that are under way are not kept."""
        kept = [record for row in self._buckets.values() for record in row.values()]
        rows = [record.pack() for record in (*kept, *self._saved)]
        seen = [[peer.to_bytes(), subnet] for peer, subnet in self._subnets.items() if subnet]
        return {"number": self._number, "table": rows, "seen": seen}

    def load_state(self, saved: Mapping[str, Any]) -> None:
        self._saved = [PeerRecord.read(row) for row in saved["table"][: ID_BITS * _MAX_K]]
        self._buckets, self._spare, self._flat = {}, {}, None
        self._number = int(saved["number"])
        there = {record.peer for record in self._saved}
        seen = ((PeerId(peer), str(subnet)) for peer, subnet in saved.get("seen", ()))
        self._subnets = {peer: subnet for peer, subnet in seen if peer in there}


def _seen_in(ctx: OpContext, record: PeerRecord) -> str:
    """Return the public subnet that the source peer is in; as `record` says where none is seen."""
    seen = ctx.source_seen_at
    return subnet_of(record) if seen is None else subnet_at(seen)
