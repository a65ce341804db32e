"""The address book: where peers can be reached.

Rule: an entry is an ordered list of distinct addresses with a reference count. A peer without an
address cannot be routed. An entry of addresses that were only claimed or observed has no reference,
and such entries are dropped, oldest first, when the book is full; an entry that the program or the
host added stays until they drop it. A node's own addresses are the entry under its own id.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from multiaddr import Multiaddr

from bbnode.engine.errors import AddressBookFull, InvalidOperand
from bbnode.engine.snapshot.codec import (
    ADDRESS,
    PEER,
    PLAIN,
    RowForm,
    SnapshotReader,
    SnapshotWriter,
    many,
    mapping,
    optional,
)
from bbnode.ir.address import address_from_bytes
from bbnode.ir.caps import MAX_ADDRESSES_PER_PEER, MAX_BOOK_PEERS
from bbnode.ir.errors import DecodeError
from bbnode.ir.peer import PeerId


@dataclass(slots=True)
class _BookEntry:
    addresses: tuple[Multiaddr, ...] = ()
    references: int = 0
    claimed: tuple[bytes, ...] = ()  # the last claim, so that an unchanged one costs nothing
    observed: Multiaddr | None = None  # the last one that was observed, likewise
    routed: tuple[tuple[Multiaddr, ...], bytes] | None = None  # until an address changes


_ENTRIES = mapping(
    PEER,
    RowForm(
        _BookEntry,
        references=PLAIN,
        addresses=many(ADDRESS),
        claimed=many(PLAIN),
        observed=optional(ADDRESS),
    ),
)


class AddressBook:
    """The addresses of all peers that this node knows."""

    __slots__ = (
        "_entries",
        "_max_peers",
    )

    def __init__(self, max_peers: int = MAX_BOOK_PEERS) -> None:
        self._entries: dict[PeerId, _BookEntry] = {}
        self._max_peers = max_peers

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, peer: object) -> bool:
        return peer in self._entries

    def add_peer(self, peer: PeerId, addresses: Sequence[Multiaddr]) -> None:
        """Add a reference, and these addresses.

        Raises InvalidOperand for an empty list and AddressBookFull.
        """
        if not addresses:
            raise InvalidOperand(f"add_peer {peer.short}: no address given; give at least one")
        entry = self._entry(peer)
        for address in addresses:
            _append(peer, entry, address)
        entry.references += 1

    def keep(self, peer: PeerId, addresses: Sequence[Multiaddr]) -> None:
        """Add addresses, all or none, to an entry that does not give way; raises AddressBookFull.

        However often it is called, `forget` takes all of it back.
        """
        known = self.lookup(peer)
        if len(dict.fromkeys((*known, *addresses))) > MAX_ADDRESSES_PER_PEER:
            raise _too_many(peer)
        entry = self._entry(peer)
        for address in addresses:
            _append(peer, entry, address)
        entry.references = max(1, entry.references)

    def forget(self, peer: PeerId) -> bool:
        """Remove a peer with all of its addresses and references; return False if it is unknown."""
        return self._entries.pop(peer, None) is not None

    def peers(self) -> Iterator[tuple[PeerId, tuple[Multiaddr, ...]]]:
        """Yield all peers with their addresses, in the order in which they give way."""
        return ((peer, entry.addresses) for peer, entry in self._entries.items())

    def unreferenced(self) -> Iterator[PeerId]:
        """Yield the peers whose addresses were only claimed or observed."""
        return (peer for peer, entry in self._entries.items() if entry.references == 0)

    def drop_peer(self, peer: PeerId) -> None:
        """Remove a reference; the entry goes with the last one."""
        entry = self._entries.get(peer)
        if entry is None:
            return
        entry.references -= 1
        if entry.references <= 0:
            del self._entries[peer]

    def register_address(self, peer: PeerId, address: Multiaddr) -> None:
        """Append an address; raises AddressBookFull."""
        _append(peer, self._entry(peer), address)

    def forget_address(self, peer: PeerId, address: Multiaddr) -> None:
        """Remove an address and keep the entry."""
        entry = self._entries.get(peer)
        if entry is not None and address in entry.addresses:
            entry.addresses = tuple(known for known in entry.addresses if known != address)
            entry.routed = entry.observed = None

    def lookup(self, peer: PeerId) -> tuple[Multiaddr, ...]:
        """Return all addresses of a peer, in order; empty when it can't be routed."""
        entry = self._entries.get(peer)
        return () if entry is None else entry.addresses

    def has_address(self, peer: PeerId) -> bool:
        """Return True if an address of the peer is known."""
        entry = self._entries.get(peer)
        return entry is not None and bool(entry.addresses)

    def routed(
        self, peer: PeerId, encode: Callable[[Sequence[Multiaddr]], bytes]
    ) -> tuple[tuple[Multiaddr, ...], bytes]:
        """Return all addresses, and what `encode` (always the same) makes of them, cached."""
        entry = self._entries.get(peer)
        if entry is None:
            return (), encode(())
        if entry.routed is None:
            entry.routed = (entry.addresses, encode(entry.addresses))
        return entry.routed

    def set_own(self, peer: PeerId, addresses: Iterable[Multiaddr]) -> None:
        """Replace the node's own entry."""
        unique = tuple(dict.fromkeys(addresses))[:MAX_ADDRESSES_PER_PEER]
        self._entries[peer] = _BookEntry(unique, references=1)

    def has_claimed(self, peer: PeerId, claimed: tuple[bytes, ...]) -> bool:
        """Return True if these are the peer's last claim about itself."""
        entry = self._entries.get(peer)
        return entry is not None and entry.claimed == claimed

    def is_unchanged(
        self, peer: PeerId, claimed: tuple[bytes, ...], observed: Multiaddr | None
    ) -> bool:
        """Return True if claim and observation are the last ones, as for nearly every envelope."""
        entry = self._entries.get(peer)
        return entry is not None and entry.claimed == claimed and observed is entry.observed

    def merge_claimed(self, peer: PeerId, claimed: tuple[bytes, ...]) -> int:
        """Add what a peer claims of itself; returns how many claims were unusable."""
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

    def seen_at(self, peer: PeerId) -> Multiaddr | None:
        """Return where the peer's last envelope came from; None where that is not known."""
        entry = self._entries.get(peer)
        return None if entry is None else entry.observed

    def observe(self, peer: PeerId, address: Multiaddr) -> bool:
        """Add the address that an envelope came from; return False if there is no room."""
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

    def state(self, writer: SnapshotWriter) -> Any:
        """Return what a snapshot saves: all entries, in the order in which they give way."""
        return _ENTRIES.save(self._entries, writer)

    def load(self, plain: Any, reader: SnapshotReader) -> None:
        """Load what `state` returned, in place of what is there."""
        fresh = _ENTRIES.load(plain, reader)
        if len(fresh) > self._max_peers or any(
            len(entry.addresses) > MAX_ADDRESSES_PER_PEER for entry in fresh.values()
        ):
            raise DecodeError("an address book with more entries than fit")
        self._entries = fresh

    def _entry(self, peer: PeerId) -> _BookEntry:
        entry = self._entries.get(peer)
        if entry is None:
            if len(self._entries) >= self._max_peers:
                self._make_room(peer)
            entry = self._entries[peer] = _BookEntry()
        return entry

    def _make_room(self, peer: PeerId) -> None:
        for known, entry in self._entries.items():
            if entry.references == 0:
                del self._entries[known]
                return
        raise AddressBookFull(
            f"no room for {peer.short}: {self._max_peers} peers are referenced; drop some"
        )


def _too_many(peer: PeerId) -> AddressBookFull:
    return AddressBookFull(
        f"{peer.short} has {MAX_ADDRESSES_PER_PEER} addresses at most; forget one first"
    )


def _append(peer: PeerId, entry: _BookEntry, address: Multiaddr) -> None:
    if address in entry.addresses:
        return
    if len(entry.addresses) >= MAX_ADDRESSES_PER_PEER:
        raise _too_many(peer)
    entry.addresses = (*entry.addresses, address)
    entry.routed = None
