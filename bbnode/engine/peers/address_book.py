"""Where peers are.

Rule: an entry is an ordered, deduplicated list of addresses with a reference count. Unknown
and empty are both "cannot route". What was only heard of (claimed or observed) has no
reference, and gives way, oldest first, when the book is full; what the program or the host
added stays until it is dropped. A node's own addresses are the entry under its own id.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from multiaddr import Multiaddr

from bbnode.engine.errors import AddressBookFull, InvalidOperand
from bbnode.ir.address import address_from_bytes
from bbnode.ir.caps import MAX_ADDRESSES_PER_PEER, MAX_BOOK_PEERS
from bbnode.ir.errors import DecodeError
from bbnode.ir.peer import PeerId

if TYPE_CHECKING:
    from bbnode.engine.snapshot.codec import LoadedNames, SavedNames


@dataclass(slots=True)
class _Entry:
    addresses: list[Multiaddr] = field(default_factory=list)
    references: int = 0
    claimed: tuple[bytes, ...] = ()  # the last claim, so that an unchanged one costs nothing
    observed: Multiaddr | None = None  # the last one that was observed, likewise
    routed: tuple[tuple[Multiaddr, ...], bytes] | None = None  # until an address changes


class AddressBook:
    """The addresses of all peers that this node knows."""

    def __init__(self, max_peers: int = MAX_BOOK_PEERS) -> None:
        self._entries: dict[PeerId, _Entry] = {}
        self._max_peers = max_peers

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, peer: object) -> bool:
        return peer in self._entries

    def add_peer(self, peer: PeerId, addresses: Sequence[Multiaddr]) -> None:
        """One reference more, and these addresses.

        Raises InvalidOperand for an empty list and AddressBookFull.
        """
        if not addresses:
            raise InvalidOperand(f"add_peer {peer.short}: no address given; give at least one")
        entry = self._entry(peer)
        for address in addresses:
            _append(peer, entry, address)
        entry.references += 1

    def drop_peer(self, peer: PeerId) -> None:
        """One reference less; the entry goes with the last one."""
        entry = self._entries.get(peer)
        if entry is None:
            return
        entry.references -= 1
        if entry.references <= 0:
            del self._entries[peer]

    def register_address(self, peer: PeerId, address: Multiaddr) -> None:
        """Append an address; AddressBookFull when there is no room."""
        _append(peer, self._entry(peer), address)

    def forget_address(self, peer: PeerId, address: Multiaddr) -> None:
        """Remove an address and keep the entry."""
        entry = self._entries.get(peer)
        if entry is not None and address in entry.addresses:
            entry.addresses.remove(address)
            entry.routed = entry.observed = None

    def lookup(self, peer: PeerId) -> tuple[Multiaddr, ...]:
        """All addresses of a peer, in order; empty when it can't be routed."""
        entry = self._entries.get(peer)
        return () if entry is None else tuple(entry.addresses)

    def has_address(self, peer: PeerId) -> bool:
        """Whether `lookup` gives anything."""
        entry = self._entries.get(peer)
        return entry is not None and bool(entry.addresses)

    def routed(
        self, peer: PeerId, encode: Callable[[Sequence[Multiaddr]], bytes]
    ) -> tuple[tuple[Multiaddr, ...], bytes]:
        """What `lookup` gives, and what `encode` (always the same) makes of it, kept."""
        entry = self._entries.get(peer)
        if entry is None:
            return (), encode(())
        if entry.routed is None:
            addresses = tuple(entry.addresses)
            entry.routed = (addresses, encode(addresses))
        return entry.routed

    def set_own(self, peer: PeerId, addresses: Iterable[Multiaddr]) -> None:
        """Replace the node's own entry."""
        unique = list(dict.fromkeys(addresses))[:MAX_ADDRESSES_PER_PEER]
        self._entries[peer] = _Entry(unique, references=1)

    def has_claimed(self, peer: PeerId, claimed: tuple[bytes, ...]) -> bool:
        """Whether these are what the peer said of itself the last time."""
        entry = self._entries.get(peer)
        return entry is not None and entry.claimed == claimed

    def merge_claimed(self, peer: PeerId, claimed: tuple[bytes, ...]) -> int:
        """Take over what a peer says of itself; returns how many claims were unusable."""
        entry = self._entries.get(peer)
        if entry is not None and entry.claimed == claimed:
            return 0
        refused = 0
        for raw in claimed:
            try:
                address = address_from_bytes(raw)
                entry = self._entry(peer)
                _append(peer, entry, address)
            except (DecodeError, AddressBookFull):
                refused += 1
        if entry is not None:
            entry.claimed = claimed
        return refused

    def observe(self, peer: PeerId, address: Multiaddr) -> bool:
        """Take over where an envelope came from; False when there is no room."""
        entry = self._entries.get(peer)
        if entry is not None and address is entry.observed:
            return True
        try:
            entry = self._entry(peer)
            _append(peer, entry, address)
        except AddressBookFull:
            return False
        entry.observed = address
        return True

    def state(self, names: SavedNames) -> Any:
        """For a snapshot: all entries, in the order in which they give way."""
        return [
            [
                names.peer(peer),
                entry.references,
                [names.address(address) for address in entry.addresses],
                list(entry.claimed),
                None if entry.observed is None else names.address(entry.observed),
            ]
            for peer, entry in self._entries.items()
        ]

    def load(self, plain: Any, names: LoadedNames) -> None:
        """Take up what `state` gave, in place of what is there."""
        fresh: dict[PeerId, _Entry] = {}
        for peer, references, addresses, claimed, observed in plain:
            if len(fresh) >= self._max_peers or len(addresses) > MAX_ADDRESSES_PER_PEER:
                raise DecodeError("an address book with more entries than fit")
            fresh[names.peer(peer)] = _Entry(
                addresses=[names.address(raw) for raw in addresses],
                references=references,
                claimed=tuple(claimed),
                observed=None if observed is None else names.address(observed),
            )
        self._entries = fresh

    def _entry(self, peer: PeerId) -> _Entry:
        entry = self._entries.get(peer)
        if entry is None:
            if len(self._entries) >= self._max_peers:
                self._make_room(peer)
            entry = self._entries[peer] = _Entry()
        return entry

    def _make_room(self, peer: PeerId) -> None:
        for known, entry in self._entries.items():
            if entry.references == 0:
                del self._entries[known]
                return
        raise AddressBookFull(
            f"no room for {peer.short}: {self._max_peers} peers are referenced; drop some"
        )


def _append(peer: PeerId, entry: _Entry, address: Multiaddr) -> None:
    if address in entry.addresses:
        return
    if len(entry.addresses) >= MAX_ADDRESSES_PER_PEER:
        raise AddressBookFull(
            f"{peer.short} has {MAX_ADDRESSES_PER_PEER} addresses; forget one first"
        )
    entry.addresses.append(address)
    entry.routed = None
