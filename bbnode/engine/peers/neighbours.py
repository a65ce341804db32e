"""The neighbours of a node: connections to other peers, and all tables about them.

Rule: a new connection clears a peer's record. A failed send and an unreadable envelope are failures
(a bad fill is not, because other fills of the envelope may be fine); an expected answer is a
success. Anything else that a peer sends is neither, or flooding would end its cooldown. A peer that
is down can be chosen again after its cooldown: otherwise nobody would notice that it is back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from multiaddr import Multiaddr

from bbnode.engine import steps
from bbnode.engine.empty import EMPTY
from bbnode.engine.errors import AddressBookFull, InvalidOperand
from bbnode.engine.peers.address_book import AddressBook
from bbnode.engine.peers.backoff_table import BackoffTable
from bbnode.engine.peers.governor import BlockReason, Change, Health, PeerGovernor
from bbnode.engine.snapshot.codec import (
    PEER,
    PLAIN,
    UNFIT,
    SnapshotReader,
    SnapshotWriter,
    many,
    mapping,
)
from bbnode.ir.crossing import Unfit
from bbnode.ir.peer import PeerId


@dataclass(frozen=True, slots=True)
class PeersSnapshot:
    """Usable peers at one moment; fulfils the contract `PeersView`."""

    everyone: tuple[PeerId, ...]
    by_class: dict[str, tuple[PeerId, ...]]

    def connected(self, peer_class: str | None = None) -> Sequence[PeerId]:
        """Return usable peers in PeerId order; of one class if given."""
        return self.everyone if peer_class is None else self.by_class.get(peer_class, ())


@dataclass(frozen=True, slots=True)
class PeersWithSelf:
    """The same with the node itself, for a selector that may choose it."""

    others: PeersSnapshot
    self_peer: PeerId
    own_classes: tuple[str, ...]

    def connected(self, peer_class: str | None = None) -> Sequence[PeerId]:
        """Return usable peers, and this node if it plays the class, in PeerId order."""
        others = self.others.connected(peer_class)
        if peer_class is not None and peer_class not in self.own_classes:
            return others
        return tuple(sorted({*others, self.self_peer}))


_CLASSES = mapping(PEER, many(PLAIN))
_NOT_TAKEN = mapping(PEER, many(PLAIN))
_NOT_READY = mapping(PEER, PLAIN)
_UNFIT = mapping(PEER, UNFIT)


# Why nothing is sent to a site that the peer's hello does not name.
VERSION_REASON = "version: the peer runs a version of the program that does not take this"


class ConnectedPeers:
    """Connected peers, with the classes they play.

    A component sees a snapshot in PeerId order that never changes, not even in a worker thread; it
    is made anew only after something changed.
    """

    __slots__ = (
        "_snapshot",
        "classes",
        "held",
        "not_ready",
        "not_taken",
        "unfit",
    )

    def __init__(self) -> None:
        self.classes: dict[PeerId, tuple[str, ...]] = {}
        # Suffixes of sites that this node sends to and a peer's program has not; empty for most.
        self.not_taken: dict[PeerId, frozenset[bytes]] = EMPTY
        # What peers say of themselves: classes for which they do not work now, and why.
        self.not_ready: dict[PeerId, tuple[tuple[str, ...], str]] = EMPTY
        # Peers that state sizes which do not fit ours.
        self.unfit: dict[PeerId, Unfit] = EMPTY
        # What the host says of them: likewise, whatever they say. A peer may be held before it is
        # connected.
        self.held: dict[PeerId, tuple[tuple[str, ...], str]] = EMPTY
        self._snapshot: PeersSnapshot | None = None

    def __contains__(self, peer: object) -> bool:
        return peer in self.classes

    def __len__(self) -> int:
        return len(self.classes)

    def connect(self, peer: PeerId, classes: Iterable[str]) -> bool:
        """Add a peer; True when it was not there, or plays other classes now."""
        fresh = tuple(classes)
        if len(fresh) > 1:  # one is shared with all that play it
            fresh = tuple(dict.fromkeys(fresh))
        changed = self.classes.get(peer) != fresh
        self.classes[peer] = fresh
        if changed:
            self._snapshot = None
        return changed

    def disconnect(self, peer: PeerId) -> bool:
        """Remove a peer; True when it was there."""
        self._snapshot = None
        self.not_taken.pop(peer, None)
        self.not_ready.pop(peer, None)
        self.unfit.pop(peer, None)
        self.held.pop(peer, None)
        return self.classes.pop(peer, None) is not None

    def now_lacks(self, peer: PeerId, sites: frozenset[bytes]) -> None:
        """Record that the program of a peer has not these sites."""
        if self.not_taken is EMPTY:
            self.not_taken = {}
        self.not_taken[peer] = sites

    def now_not_ready(self, peer: PeerId, classes: tuple[str, ...], reason: str) -> bool:
        """Choose a peer for none of these classes; False if that was so, or it is not connected."""
        if peer not in self.classes or self.not_ready.get(peer) == (classes, reason):
            return False
        if self.not_ready is EMPTY:
            self.not_ready = {}
        self.not_ready[peer] = classes, reason
        self._snapshot = None
        return True

    def now_unfit(self, peer: PeerId, found: Unfit) -> bool:
        """Choose a peer for none of these classes while it is connected; False if it is not."""
        if peer not in self.classes:
            return False
        if self.unfit is EMPTY:
            self.unfit = {}
        self.unfit[peer] = found
        self._snapshot = None
        return True

    def now_ready(self, peer: PeerId) -> bool:
        """Choose a peer for all of its classes again; False if that was so."""
        self._snapshot = None
        return self.not_ready.pop(peer, None) is not None

    def now_held(self, peer: PeerId, held: tuple[tuple[str, ...], str] | None) -> None:
        """Choose a peer for none of the classes with that reason; None: for all again."""
        self._snapshot = None
        if held is None:
            self.held.pop(peer, None)
            return
        if self.held is EMPTY:
            self.held = {}
        self.held[peer] = held

    def classes_of(self, peer: PeerId) -> tuple[str, ...]:
        """Return the classes that a connected peer plays."""
        return self.classes.get(peer, ())

    def invalidate(self) -> None:
        """Forget the snapshot: other peers are usable now."""
        self._snapshot = None

    def snapshot(self, usable: Callable[[PeerId], bool], *, fresh: bool) -> PeersSnapshot:
        """Return the usable peers; `fresh`: ask again even if nothing changed here."""
        if self._snapshot is None or fresh:
            everyone = tuple(sorted(peer for peer in self.classes if usable(peer)))
            by_class: dict[str, list[PeerId]] = {}
            for peer in everyone:
                not_ready = self.not_ready.get(peer, ((), ""))[0]
                if peer in self.unfit:
                    not_ready = (*not_ready, *self.unfit[peer].classes)
                held = self.held.get(peer, ((), ""))[0]
                for name in self.classes[peer]:
                    if name not in not_ready and name not in held:
                        by_class.setdefault(name, []).append(peer)
            self._snapshot = PeersSnapshot(
                everyone, {name: tuple(peers) for name, peers in by_class.items()}
            )
        return self._snapshot

    def everyone(self) -> tuple[PeerId, ...]:
        """Return all connected peers, in the order of coming."""
        return tuple(self.classes)

    def state(self, writer: SnapshotWriter) -> Any:
        """Return what a snapshot saves: all connected peers, their classes, what they lack."""
        lacking = {peer: tuple(sorted(sites)) for peer, sites in self.not_taken.items()}
        return [
            _CLASSES.save(self.classes, writer),
            _NOT_TAKEN.save(lacking, writer),
            _NOT_READY.save(self.not_ready, writer),
            # Last, and only if there is any: earlier releases read three.
            *(
                [_UNFIT.save(self.unfit, writer), _NOT_READY.save(self.held, writer)]
                if self.unfit or self.held
                else ()
            ),
        ]

    def load(self, plain: Any, reader: SnapshotReader) -> None:
        """Load what `state` returned."""
        classes, lacking, not_ready, *more = plain
        self.classes = _CLASSES.load(classes, reader)
        loaded_reasons = _NOT_READY.load(not_ready, reader)
        self.not_ready = {
            peer: (tuple(names), why) for peer, (names, why) in loaded_reasons.items()
        }
        self.held = EMPTY
        for peer, (names, why) in (_NOT_READY.load(more[1], reader) if more else {}).items():
            self.now_held(peer, (tuple(names), why))
        loaded = _NOT_TAKEN.load(lacking, reader)
        self.not_taken = {peer: frozenset(sites) for peer, sites in loaded.items()}
        self.unfit = _UNFIT.load(more[0], reader) if more else EMPTY
        self._snapshot = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerStanding:
    """The standing of a peer at one moment; `retry_in_ns` 0: it may be tried now."""

    connected: bool
    classes: tuple[str, ...]
    addresses: tuple[Multiaddr, ...]
    health: Health
    denied: BlockReason | None
    failures: int
    retry_in_ns: int
    usable: bool


class Neighbours:
    """Address book, backoff, governor and connections of one node, which plays `own_classes`."""

    __slots__ = (
        "backoff",
        "book",
        "governor",
        "own_addresses",
        "own_classes",
        "peers",
        "ready_classes",
        "self_peer",
    )

    def __init__(
        self,
        self_peer: PeerId,
        addresses: Sequence[Multiaddr],
        own_classes: Sequence[str] = (),
    ) -> None:
        self.self_peer = self_peer
        self.own_classes = tuple(own_classes)
        # Those of them for which this node works now.
        self.ready_classes = self.own_classes
        self.book = AddressBook()
        self.backoff = BackoffTable()
        self.governor = PeerGovernor()
        self.peers = ConnectedPeers()
        self.set_addresses(addresses)

    def set_addresses(self, addresses: Sequence[Multiaddr]) -> None:
        """Replace the node's own addresses."""
        self.book.set_own(self.self_peer, addresses)
        self.own_addresses = self.book.lookup(self.self_peer)

    def not_ready(self, classes: Sequence[str]) -> None:
        """Set the own classes for which this node does not work now."""
        self.ready_classes = tuple(name for name in self.own_classes if name not in classes)

    def connected(
        self, peer: PeerId, classes: Sequence[str], addresses: Sequence[Multiaddr],
        not_taken: Sequence[bytes] = (),
    ) -> list[steps.Step]:  # fmt: skip
        """Handle a connection with a peer; `not_taken` are suffixes of sites that it has not."""
        for address in addresses:
            try:
                self.book.register_address(peer, address)
            except (AddressBookFull, InvalidOperand):
                break  # the book is full, but the connection is enough to reach it
        self.backoff.record_success(peer)
        self.governor.record_success(peer)
        changed = self.peers.connect(peer, classes)
        self.peers.not_taken.pop(peer, None)
        self.peers.not_ready.pop(peer, None)
        self.peers.unfit.pop(peer, None)
        if not_taken:
            self.peers.now_lacks(peer, frozenset(not_taken))
        self.peers.invalidate()
        return [steps.PeerUp(peer=peer, classes=tuple(classes))] if changed else []

    def disconnected(self, peer: PeerId, reason: str) -> list[steps.Step]:
        """Handle the loss of the last connection with a peer."""
        if not self.peers.disconnect(peer):
            return []
        return [steps.PeerDown(peer=peer, reason=reason)]

    def failed(self, peer: PeerId, reason: str, now_ns: int) -> list[steps.Step]:
        """Handle a failure of a peer."""
        self.backoff.record_failure(peer, now_ns)
        change = self.governor.record_failure(peer)
        self.peers.invalidate()
        if change is Change.WENT_DOWN and peer in self.peers:
            return [steps.PeerDown(peer=peer, reason=reason)]
        return []

    def succeeded(self, peer: PeerId) -> list[steps.Step]:
        """Handle a success of a peer."""
        self.backoff.record_success(peer)
        if self.governor.record_success(peer) is Change.CAME_UP and peer in self.peers:
            self.peers.invalidate()
            return [steps.PeerUp(peer=peer, classes=self.peers.classes_of(peer))]
        return []

    def usable(self, peer: PeerId, now_ns: int) -> bool:
        """Return True if a connected peer may be chosen."""
        if self.governor.check_inbound(peer) is not None:
            return False
        if self.governor.health(peer) is not Health.DOWN:
            return True
        return self.backoff.should_retry(peer, now_ns)

    def standing(self, peer: PeerId, now_ns: int) -> PeerStanding:
        """Return everything that decides whether a peer is used."""
        failed = self.backoff.get(peer)
        return PeerStanding(
            connected=peer in self.peers,
            classes=self.peers.classes_of(peer),
            addresses=self.book.lookup(peer),
            health=self.governor.health(peer),
            denied=self.governor.check_inbound(peer),
            failures=0 if failed is None else failed.attempts,
            retry_in_ns=0 if failed is None else max(0, failed.next_retry_ns - now_ns),
            usable=peer in self.peers and self.usable(peer, now_ns),
        )

    def view(self, now_ns: int) -> PeersSnapshot:
        """Return the peers that a component may use now."""
        return self.peers.snapshot(
            lambda peer: self.usable(peer, now_ns), fresh=self.governor.any_down()
        )

    def unreachable(self, peer: PeerId, suffix: bytes = b"") -> str | None:
        """Return why nothing can be sent to a peer, or to a site of it; None: it can."""
        lacking = self.peers.not_taken
        if lacking and suffix in lacking.get(peer, ()):
            return VERSION_REASON
        unfit = self.peers.unfit.get(peer) if self.peers.unfit else None
        if unfit is not None and suffix in unfit.suffixes:
            return f"size: {unfit.reason}"
        governor = self.governor
        reason = governor.check_inbound(peer) if governor.denies else None
        if reason is None:
            if peer in self.peers.classes or self.book.has_address(peer) or peer == self.self_peer:
                return None
            return "no address is known and it is not connected"
        return None if peer == self.self_peer else reason.value
