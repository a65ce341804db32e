"""Access to an index by other peers: its owner's settings, and what they do to an answer.

Rule: an asker is the peer whose message started the search. Whatever it is not shown has no part in
its answer: neither ids and metadata nor the number of items, and not through filters. A search that
the node's own program starts has no asker, and is not restricted.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np

from bbnode.components.contracts import OpContext
from bbnode.components.indexes import filters
from bbnode.components.indexes.errors import FilterRefused, SearchRefused
from bbnode.components.indexes.searchers import Floats
from bbnode.components.settings import local_setting
from bbnode.ir.caps import MAX_BOOK_PEERS
from bbnode.ir.decoding import shown
from bbnode.ir.errors import DecodeError
from bbnode.ir.peer import PeerId
from bbnode.ir.values import Metadata, Scalar, SearchResults

Filter = Mapping[str, bool | int | float | str]
NOTHING: Final = "none"
EVERYONE_ELSE: Final = "*"  # the entry of `visible_to` for those that no other one names

_MINUTE_NS: Final = 60 * 10**9
_MOST_DECIMALS: Final = 9
_NOISE_OF: Final = b"bbnode.index.distance_noise "
_LIKE_A_PEER: Final = ("12D3Koo", "Qm", "16Uiu2")


@dataclass(frozen=True, kw_only=True)
class AccessConfig:
    """Settings of access by other peers, which count from the node's own configuration alone.

    Attributes:
        visible: a filter (as `where` is) that items have to match for any asker to find them.
        visible_to: filters by asker, {asker: filter}; an asker is a PeerId, a class that the asker
            plays, or "*" for those that no other entry names. A PeerId's own filter counts before
            those of its classes, of which any may match. {} is all that is visible; "none", and no
            entry where there are others, is nothing: the search is refused.
        searches_per_min: searches that a peer may make per minute, and at once; 0: any number.
        queries_per_min: queries, likewise: a batch of 10 counts 10.
        max_k: neighbours that a query may ask for; 0: any number.
        max_queries: queries of one batch; 0: any number.
        round_distances: decimals that distances are told with, -9 to 9.
        distance_noise: standard deviation of what is added to distances. It follows from a secret
            of the node, the item and the query, so that asking again tells nothing new; half of its
            variance is the item's own, so that asking with queries that differ a little does not
            average it out.
        hidden_metadata: names of entries that are not told, and can't be filtered by.
    """

    visible: Mapping[str, bool | int | float | str] | None = local_setting(None)
    visible_to: Mapping[str, Mapping[str, bool | int | float | str] | Literal["none"]] | None = (
        local_setting(None)
    )
    searches_per_min: float = local_setting(0.0)
    queries_per_min: float = local_setting(0.0)
    max_k: int = local_setting(0)
    max_queries: int = local_setting(0)
    round_distances: int | None = local_setting(None)
    distance_noise: float = local_setting(0.0)
    hidden_metadata: tuple[str, ...] = local_setting(())


@dataclass(slots=True)
class _Bucket:
    """Searches and queries that a peer has left, as of a moment."""

    searches: float
    queries: float
    at_ns: int


class AccessRules:
    """The settings of one index, and what each peer has asked so far."""

    def __init__(self, config: AccessConfig, require: Callable[[bool, str], None]) -> None:
        """Take the settings; `require(condition, problem)` raises for those that can't be."""
        self.config = config
        for name in ("searches_per_min", "queries_per_min", "distance_noise"):
            value = getattr(config, name)
            require(math.isfinite(value) and value >= 0, f"{name} is {value}, not 0 or more")
        for name in ("searches_per_min", "queries_per_min"):
            value = getattr(config, name)
            require(value == 0 or value >= 1, f"{name} is {value}; it is 0 (any number), or from 1")
        for name in ("max_k", "max_queries"):
            require(getattr(config, name) >= 0, f"{name} is {getattr(config, name)}, below 0")
        decimals = config.round_distances
        require(
            decimals is None or abs(decimals) <= _MOST_DECIMALS,
            f"round_distances is {decimals}, not -{_MOST_DECIMALS} to {_MOST_DECIMALS}",
        )
        self._by_peer: dict[PeerId, Filter | str] = {}
        self._by_class: dict[str, Filter | str] = {}
        for who, filter_ in (config.visible_to or {}).items():
            try:
                self._by_peer[PeerId.parse(who)] = filter_
            except DecodeError:
                require(
                    not who.startswith(_LIKE_A_PEER) or len(who) < 40,
                    f"visible_to names {shown(who)}, which is no PeerId; copy it whole",
                )
                self._by_class[who] = filter_
        for each in (config.visible, *(config.visible_to or {}).values()):
            try:
                filters.conditions(each if isinstance(each, Mapping) else {})
            except FilterRefused as error:
                require(False, f"visible or visible_to: {error}")
        self._hidden = frozenset(config.hidden_metadata)
        self._buckets: dict[PeerId, _Bucket] = {}
        self._secret = b""

    def admit(
        self, ctx: OpContext, asker: PeerId, queries: int, k: int, where: Metadata | None
    ) -> Sequence[Filter]:
        """Count a search, and return the filters of which an item has to match one.

        Raises SearchRefused, with what the asker may know, and FilterRefused.
        """
        config = self.config
        found = self._filters_of(asker, ctx.source_classes)
        if config.max_k and k > config.max_k:
            raise SearchRefused(f"a search for {k} neighbours; this index tells {config.max_k}")
        if config.max_queries and queries > config.max_queries:
            raise SearchRefused(
                f"a batch of {queries} queries; this index takes {config.max_queries} at a time"
            )
        for condition in filters.conditions(where or {}):
            if condition.name in self._hidden:
                # Said of the name alone, so that it does not tell if any item has it.
                raise SearchRefused(f"this index is not filtered by {shown(condition.name)}")
        self._count(asker, queries, ctx.now_ns)
        return found

    def _filters_of(self, asker: PeerId, classes: Sequence[str]) -> Sequence[Filter]:
        if not self.config.visible_to:
            return ({},)
        if asker in self._by_peer:
            named = [self._by_peer[asker]]
        else:
            named = [self._by_class[name] for name in classes if name in self._by_class]
        if not named and EVERYONE_ELSE in self._by_class:
            named = [self._by_class[EVERYONE_ELSE]]
        found = [each for each in named if isinstance(each, Mapping)]
        if not found:
            raise SearchRefused("this index tells you nothing")
        return found

    def _count(self, asker: PeerId, queries: int, now_ns: int) -> None:
        """Take one search and its queries from what the asker has left: a token bucket each."""
        searches_most, queries_most = self.config.searches_per_min, self.config.queries_per_min
        if not searches_most and not queries_most:
            return
        if queries_most and queries > queries_most:
            raise SearchRefused(
                f"a batch of {queries} queries; this index takes {queries_most:g} per minute"
            )
        bucket = self._buckets.pop(asker, None) or _Bucket(searches_most, queries_most, now_ns)
        passed = max(0, now_ns - bucket.at_ns) / _MINUTE_NS
        bucket.searches = min(searches_most, bucket.searches + passed * searches_most)
        bucket.queries = min(queries_most, bucket.queries + passed * queries_most)
        bucket.at_ns = now_ns
        self._buckets[asker] = bucket  # the one that asked last is last
        while len(self._buckets) > MAX_BOOK_PEERS:
            del self._buckets[next(iter(self._buckets))]
        if searches_most and bucket.searches < 1:
            raise SearchRefused(f"{searches_most:g} searches per minute are allowed here; wait")
        if queries_most and bucket.queries < queries:
            raise SearchRefused(f"{queries_most:g} queries per minute are allowed here; wait")
        bucket.searches -= 1
        bucket.queries -= queries

    # -- what is told -------------------------------------------------------------------------

    def told(
        self, ctx: OpContext, found: SearchResults, queries: Floats, metric: str
    ) -> SearchResults:
        """Return results as an asker sees them, again nearest first; `queries` are [Q, D]."""
        config = self.config
        decimals = config.round_distances
        if decimals is None and not config.distance_noise and not self._hidden:
            return found
        ids, distances = np.atleast_2d(found.ids), np.atleast_2d(found.distances)
        is_hit = ids >= 0
        far = distances.astype(np.float64)
        if config.distance_noise:
            far[is_hit] += config.distance_noise * self._noise(ctx, ids, queries)[is_hit]
            # No distance is impossible, which would tell that it is noise.
            least, most = {"l2": (0.0, np.inf), "cosine": (0.0, 2.0)}.get(metric, (-np.inf, np.inf))
            far = np.clip(far, least, most)
        if decimals is not None:
            far = np.round(far, decimals)
        with np.errstate(over="ignore"):
            near = np.where(is_hit, far, np.inf).astype(np.float32)
        places = np.where(is_hit, np.cumsum(is_hit).reshape(is_hit.shape) - 1, -1)
        order = np.lexsort((ids, near, ~is_hit))
        places = np.take_along_axis(places, order, 1)
        metadata: Sequence[Metadata] = ()
        if found.metadata:
            seen = [self._seen(found.metadata[at]) for at in places[places >= 0].tolist()]
            metadata = seen if any(seen) else ()
        shape = found.ids.shape
        return SearchResults(
            np.take_along_axis(ids, order, 1).reshape(shape),
            np.take_along_axis(near, order, 1).reshape(shape),
            metadata,
        )

    def _seen(self, metadata: Metadata) -> Metadata:
        shown_: dict[str, Scalar] = {n: v for n, v in metadata.items() if n not in self._hidden}
        return Metadata(shown_)

    def _noise(self, ctx: OpContext, ids: Any, queries: Floats) -> Any:
        """Return numbers of the standard normal distribution, [Q, k]."""
        if not self._secret:
            # Ed25519 is deterministic: one signature for all lives of the node, known to it alone.
            signed = ctx.sign(_NOISE_OF + ctx.slot.encode())
            self._secret = hashlib.blake2b(signed, digest_size=32).digest()
        made = np.empty(ids.shape)
        for row, query in enumerate(queries):
            asked = (query + np.float32(0)).astype("<f4").tobytes()  # -0 is 0
            for at, number in enumerate(ids[row].tolist()):
                item = struct.pack("<q", number)
                own, fresh = self._normal(item), self._normal(item + asked)
                made[row, at] = (own + fresh) / math.sqrt(2)
        return made

    def _normal(self, about: bytes) -> float:
        """Return a draw that follows from the secret (Box and Muller, 1958)."""
        drawn = hashlib.blake2b(about, key=self._secret, digest_size=16).digest()
        first, second = struct.unpack("<QQ", drawn)
        unit = ((first >> 11) + 1) * 2.0**-53  # above 0
        return math.sqrt(-2 * math.log(unit)) * math.cos(2 * math.pi * second * 2.0**-64)
