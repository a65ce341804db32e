"""`GlobalRegistryServer`: the directory of a network, as a peer selector.

Rule: an entry lasts from a peer's announcement until a TTL later, in the node's own time, which
stops while the node is down. Every read drops expired entries first. Each change has a version;
changes up to a reader's cookie are not sent again. A cookie is valid for one life of the server,
since a restored snapshot may repeat versions.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

import msgpack

from bbnode.components.contracts import OpContext, inbound
from bbnode.components.errors import ExchangeRefused
from bbnode.components.peer_registry import messages as messages
from bbnode.components.peer_registry.messages import Cookie, Page, Row
from bbnode.components.registry import register_component
from bbnode.components.selectors.records import subnet_at
from bbnode.components.selectors.views import DrawingSelector, draw
from bbnode.components.wire_records import WireRecord
from bbnode.ir.caps import MAX_BOOK_PEERS, MAX_PAGE_BYTES, MAX_PAGE_ROWS
from bbnode.ir.decoding import shown
from bbnode.ir.ids import fnv1a_64
from bbnode.ir.peer import PeerId

S: Final = 1_000_000_000
DEFAULT_TTL_S: Final = 90.0
MIN_TTL_S: Final = 30.0
MAX_TTL_S: Final = 300.0
# A heartbeat may be lost twice before its peer is.
HEARTBEATS_PER_TTL: Final = 3
_SHARE: Final = 4  # of the registry, the part of one subnet


@dataclass(frozen=True, kw_only=True)
class GlobalRegistryServerConfig:
    """Settings of `GlobalRegistryServer`.

    Attributes:
        ttl_s: seconds that an announcement is valid, 30 to 300.
        max_peers: peers in the registry, a quarter at most of one public subnet (IPv4 /24,
            IPv6 /48); beyond it a new one has to wait until one has expired.
        min_peers: peers that there have to be for a draw; with fewer it fails.
        seed: of the draws.
    """

    ttl_s: float = DEFAULT_TTL_S
    max_peers: int = 4096
    min_peers: int = 1
    seed: int = 0


@dataclass(slots=True)
class _Registration:
    row: Row
    expires_ns: int
    subnet: str = ""  # public, that its peer was seen in


@register_component
class GlobalRegistryServer(DrawingSelector):
    """Chooses among the peers of the slot's class that announced themselves here.

    Peers call `Announce`, `CurrentView` and `Sample` of its slot; `GlobalRegistryClient` does.
    """

    TYPE_NAME: ClassVar[str] = "bbnode.GlobalRegistryServer"
    Config: ClassVar[type] = GlobalRegistryServerConfig
    config: GlobalRegistryServerConfig

    def __init__(self, config: GlobalRegistryServerConfig) -> None:
        super().__init__(config)
        self.require(
            MIN_TTL_S <= config.ttl_s <= MAX_TTL_S and 1 <= config.max_peers <= MAX_BOOK_PEERS,
            f"ttl_s has to be in {MIN_TTL_S:g} .. {MAX_TTL_S:g} and max_peers in 1 .. "
            f"{MAX_BOOK_PEERS}",
        )
        self._ttl_ns = int(config.ttl_s * S)
        # In the order in which they expire: an announcement moves its peer to the end.
        self._entries: OrderedDict[PeerId, _Registration] = OrderedDict()
        # The version of each peer's last change, oldest first; removed peers included.
        self._changes: OrderedDict[PeerId, int] = OrderedDict()
        self._of_subnet: Counter[str] = Counter()  # entries, by where their peers were seen
        self._version = 0
        self._forgotten = 0  # up to this version those that went are no longer known
        self._life: int | None = None

    def __len__(self) -> int:
        return len(self._entries)

    # -- what peers call ---------------------------------------------------------------------

    @inbound("Announce")
    def announce(self, ctx: OpContext, payload: bytes) -> bytes | None:
        """Enter the caller, or renew its entry; answer a Handshake.

        Raises UnusableMessage, and ExchangeRefused for a class that the caller does not play.
        """
        said = messages.Announcement.decode(payload)
        self._drop_expired(ctx.now_ns)
        peer = ctx.source_peer or ctx.self_peer
        if said.as_class and ctx.source_peer and said.as_class not in ctx.source_classes:
            reason = f"it announces itself as {shown(said.as_class)}, which it does not play"
            ctx.refuse(peer, reason)
            raise ExchangeRefused(component=self.TYPE_NAME, reason=reason)
        subnet = subnet_at(ctx.source_seen_at) if ctx.source_seen_at else ""
        entered = peer in self._entries or self._has_room(subnet)
        if entered:
            row = Row(peer=peer, as_class=said.as_class, addresses=said.addresses)
            known = self._entries.pop(peer, None)
            if known is not None:
                self._uncount(known)
            self._entries[peer] = _Registration(row, ctx.now_ns + self._ttl_ns, subnet)
            self._of_subnet[subnet] += 1
            if known is None or known.row != row:
                self._changed(peer)
            if said.addresses and peer != ctx.self_peer:
                ctx.learn_addresses(peer, said.addresses)
        shake = messages.Handshake(
            ttl_ns=self._ttl_ns if entered else 0,
            heartbeat_ns=self._ttl_ns // HEARTBEATS_PER_TTL,
            addresses=tuple(ctx.addresses),
        )
        return _if_asked(ctx, shake)

    @inbound("CurrentView")
    def read_view(self, ctx: OpContext, payload: bytes) -> bytes | None:
        """Answer a page of what changed after a cookie. Raises UnusableMessage."""
        cookie = messages.ReadRequest.decode(payload).cookie
        self._drop_expired(ctx.now_ns)
        return _if_asked(ctx, self._page(cookie, self._life_of(ctx)))

    @inbound("Sample")
    def read_sample(self, ctx: OpContext, payload: bytes) -> bytes | None:
        """Answer some peers, drawn as `sample` does, without the caller. Raises UnusableMessage."""
        n = messages.ReadRequest.decode(payload).n
        self._drop_expired(ctx.now_ns)
        others = [peer for peer in self._entries if peer != ctx.source_peer]
        drawn = draw(sorted(others), min(n, MAX_PAGE_ROWS), self._seed, self._draws)
        self._draws += 1
        rows, _ = _fitting([self._entries[peer].row for peer in drawn])
        page = Page(
            cookie=Cookie(life=self._life_of(ctx), version=0, since=0),
            ttl_ns=self._ttl_ns,
            reset=True,
            more=False,
            rows=tuple(rows),
        )
        return _if_asked(ctx, page)

    # -- the selector ------------------------------------------------------------------------

    def candidates(self, ctx: OpContext) -> Sequence[PeerId]:
        self._drop_expired(ctx.now_ns)
        wanted = ctx.peer_class
        return sorted(
            peer
            for peer, entry in self._entries.items()
            if wanted is None or entry.row.as_class in ("", wanted)
        )

    # -- the table ---------------------------------------------------------------------------

    def _drop_expired(self, now_ns: int) -> None:
        while self._entries:
            peer, entry = next(iter(self._entries.items()))
            if entry.expires_ns > now_ns:
                return
            self._uncount(self._entries.pop(peer))
            self._changed(peer)
            self._forget_some()

    def _has_room(self, subnet: str) -> bool:
        """Return True if one more peer may be entered: one subnet can't fill the registry."""
        share = max(1, self.config.max_peers // _SHARE)
        crowded = subnet and self._of_subnet[subnet] >= share
        return not crowded and len(self._entries) < self.config.max_peers

    def _uncount(self, gone: _Registration) -> None:
        self._of_subnet[gone.subnet] -= 1
        if not self._of_subnet[gone.subnet]:
            del self._of_subnet[gone.subnet]

    def _changed(self, peer: PeerId) -> None:
        self._version += 1
        self._changes.pop(peer, None)
        self._changes[peer] = self._version

    def _forget_some(self) -> None:
        gone = len(self._changes) - len(self._entries)
        while gone > self.config.max_peers:
            peer = next(each for each in self._changes if each not in self._entries)
            self._forgotten = max(self._forgotten, self._changes.pop(peer))
            gone -= 1

    def _page(self, cookie: Cookie | None, life: int) -> Page:
        known, since = 0, self._version
        # A reader with an older cookie would miss removals that are forgotten by now.
        if (
            cookie is not None
            and cookie.life == life
            and max(cookie.version, cookie.since) >= self._forgotten
        ):
            known, since = cookie.version, cookie.since
        newer: list[Row] = []
        for peer, version in reversed(self._changes.items()):
            if version <= known:
                break
            entry = self._entries.get(peer)
            if entry is not None:
                newer.append(entry.row)
            elif known:
                newer.append(Row(peer=peer, gone=True))
        rows, more = _fitting(newer[::-1])
        read = self._changes[rows[-1].peer] if more else self._version
        return Page(
            cookie=Cookie(life=life, version=read, since=since),
            ttl_ns=self._ttl_ns,
            reset=known == 0,
            more=more,
            rows=tuple(rows),
        )

    def _life_of(self, ctx: OpContext) -> int:
        # The first call of a life names it: no peer uses an id of a message twice, so two lives
        # from one snapshot get different names.
        if self._life is None:
            peer = (ctx.source_peer or ctx.self_peer).to_bytes()
            said = 0 if ctx.correlation is None else ctx.correlation.wire_req_id
            self._life = fnv1a_64(peer + said.to_bytes(8, "big"))
        return self._life

    # -- snapshot ----------------------------------------------------------------------------

    def serialize(self) -> bytes:
        """Return seed, draws, version, and the entries with the times at which they expire."""
        rows = [
            [entry.row.pack(), entry.expires_ns, self._changes[peer]]
            for peer, entry in self._entries.items()
        ]
        return bytes(msgpack.packb([self._seed, self._draws, self._version, rows]))

    def restore(self, data: bytes) -> None:
        """Load a saved state, with its seed; ComponentError for bytes of anything else."""
        if not data:
            return
        with self.restoring():
            seed, draws, version, rows = msgpack.unpackb(data)
            found = [
                (Row.read(plain), int(expires_ns), int(changed))
                for plain, expires_ns, changed in rows
            ]
            self._seed, self._draws, self._version = int(seed), int(draws), int(version)
        # A smaller max_peers than before: those that expire last stay.
        found = found[-self.config.max_peers :]
        self._entries = OrderedDict(
            (row.peer, _Registration(row, until)) for row, until, _ in found
        )
        self._of_subnet = Counter({"": len(self._entries)})  # until they announce themselves again
        by_version = sorted(found, key=lambda item: item[2])
        self._changes = OrderedDict((row.peer, changed) for row, _, changed in by_version)
        self._forgotten = 0  # no cookie of another life is looked at
        self._life = None


def _fitting(rows: Sequence[Row]) -> tuple[list[Row], bool]:
    """Return the first rows, as many as a page holds, and True if some are left."""
    kept: list[Row] = []
    size = 0
    for row in rows:
        size += row.max_bytes
        if len(kept) == MAX_PAGE_ROWS or (kept and size > MAX_PAGE_BYTES):
            return kept, True
        kept.append(row)
    return kept, False


def _if_asked(ctx: OpContext, answer: WireRecord) -> bytes | None:
    """Return the bytes of an answer; None to a one-way message."""
    asked = ctx.correlation is not None and ctx.correlation.kind.name == "REQUEST"
    return answer.encode() if asked else None
