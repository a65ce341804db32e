"""All tables about other peers, and what events mean for them.

Rule: a connection clears a peer's record; a failed send and an envelope that can't be read are
failures (a bad fill is not: its siblings in the same envelope must not suffer); an answer that
was waited for is a success. Anything else that a peer sends is neither, or a flood would buy
itself out of its cooldown. A peer that is down can be chosen again once its cooldown is over:
otherwise nobody would ever find out that it is back.
"""

from __future__ import annotations

from collections.abc import Sequence

from multiaddr import Multiaddr

from bbnode.engine import steps
from bbnode.engine.address_book import AddressBook
from bbnode.engine.backoff_table import BackoffTable
from bbnode.engine.errors import AddressBookFull, InvalidOperand
from bbnode.engine.peer_governor import Change, Health, PeerGovernor
from bbnode.engine.peers import ConnectedPeers, PeersSnapshot
from bbnode.ir.peer import PeerId


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

    def view(self, now_ns: int) -> PeersSnapshot:
        """What a component may know of other peers now."""
        return self.peers.snapshot(
            lambda peer: self.usable(peer, now_ns), fresh=self.governor.any_down()
        )

    def unreachable(self, peer: PeerId) -> str | None:
        """Why nothing can be sent to a peer, or None."""
        if peer == self.self_peer:
            return None
        reason = self.governor.check_inbound(peer)
        if reason is not None:
            return reason.value
        if peer in self.peers or self.book.lookup(peer):
            return None
        return "no address is known and it is not connected"
