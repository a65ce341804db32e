"""All tables about other peers, and what events mean for them.

Rule: a connection clears a peer's record; a failed send and an envelope that can't be read are
failures (a bad fill is not: its siblings in the same envelope must not suffer); an answer that
was waited for is a success. Anything else that a peer sends is neither, or a flood would buy
itself out of its cooldown. A peer that is down can be chosen again once its cooldown is over:
otherwise nobody would ever find out that it is back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from multiaddr import Multiaddr

from bbnode.engine import steps
from bbnode.engine.errors import AddressBookFull, InvalidOperand
from bbnode.engine.peers.address_book import AddressBook
from bbnode.engine.peers.backoff_table import BackoffTable
from bbnode.engine.peers.connected import ConnectedPeers, PeersSnapshot
from bbnode.engine.peers.governor import BlockReason, Change, Health, PeerGovernor
from bbnode.ir.peer import PeerId


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerStanding:
    """What a node thinks of a peer at one moment; `retry_in_ns` 0: it may be tried now."""

    connected: bool
    classes: tuple[str, ...]
    addresses: tuple[Multiaddr, ...]
    health: Health
    denied: BlockReason | None
    failures: int
    retry_in_ns: int
    usable: bool


class Neighbours:
    """Address book, backoff, governor and connections of one node."""

    def __init__(self, self_peer: PeerId, addresses: Sequence[Multiaddr]) -> None:
        self.self_peer = self_peer
        self.book = AddressBook()
        self.backoff = BackoffTable()
        self.governor = PeerGovernor()
        self.peers = ConnectedPeers()
        self.set_addresses(addresses)

    def set_addresses(self, addresses: Sequence[Multiaddr]) -> None:
        """Replace the node's own addresses."""
        self.book.set_own(self.self_peer, addresses)
        self.own_addresses = self.book.lookup(self.self_peer)

    def connected(
        self, peer: PeerId, classes: Sequence[str], addresses: Sequence[Multiaddr]
    ) -> list[steps.Step]:
        """A connection with a peer is there."""
        for address in addresses:
            try:
                self.book.register_address(peer, address)
            except (AddressBookFull, InvalidOperand):
                break  # the connection itself is enough to reach it
        self.backoff.record_success(peer)
        self.governor.record_success(peer)
        changed = self.peers.connect(peer, classes)
        self.peers.invalidate()
        return [steps.PeerUp(peer=peer, classes=tuple(classes))] if changed else []

    def disconnected(self, peer: PeerId, reason: str) -> list[steps.Step]:
        """The last connection with a peer is gone."""
        if not self.peers.disconnect(peer):
            return []
        return [steps.PeerDown(peer=peer, reason=reason)]

    def failed(self, peer: PeerId, reason: str, now_ns: int) -> list[steps.Step]:
        """A peer failed us."""
        self.backoff.record_failure(peer, now_ns)
        change = self.governor.record_failure(peer)
        self.peers.invalidate()
        if change is Change.WENT_DOWN and peer in self.peers:
            return [steps.PeerDown(peer=peer, reason=reason)]
        return []

    def succeeded(self, peer: PeerId) -> list[steps.Step]:
        """A peer did what we waited for."""
        self.backoff.record_success(peer)
        if self.governor.record_success(peer) is Change.CAME_UP and peer in self.peers:
            self.peers.invalidate()
            return [steps.PeerUp(peer=peer, classes=self.peers.classes_of(peer))]
        return []

    def usable(self, peer: PeerId, now_ns: int) -> bool:
        """Whether a connected peer may be chosen."""
        if self.governor.check_inbound(peer) is not None:
            return False
        if self.governor.health(peer) is not Health.DOWN:
            return True
        return self.backoff.should_retry(peer, now_ns)

    def standing(self, peer: PeerId, now_ns: int) -> PeerStanding:
        """Everything that decides whether a peer is used."""
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
        """What a component may know of other peers now."""
        return self.peers.snapshot(
            lambda peer: self.usable(peer, now_ns), fresh=self.governor.any_down()
        )

    def unreachable(self, peer: PeerId) -> str | None:
        """Why nothing can be sent to a peer, or None."""
        reason = self.governor.check_inbound(peer)
        if reason is None:
            if peer in self.peers or self.book.has_address(peer) or peer == self.self_peer:
                return None
            return "no address is known and it is not connected"
        return None if peer == self.self_peer else reason.value
