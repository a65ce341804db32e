"""Which peers are connected, and of which class.

Rule: what a component sees is a snapshot in PeerId order that never changes under its hands,
not even in a worker thread; it is made anew only after something changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bbnode.ir.peer import PeerId

if TYPE_CHECKING:
    from bbnode.engine.snapshot.codec import LoadedNames, SavedNames


@dataclass(frozen=True, slots=True)
class PeersSnapshot:
    """Usable peers at one moment; fulfils the contract `PeersView`."""

    everyone: tuple[PeerId, ...]
    by_class: dict[str, tuple[PeerId, ...]]

    def connected(self, peer_class: str | None = None) -> Sequence[PeerId]:
        """Usable peers in PeerId order; of one class if given."""
        return self.everyone if peer_class is None else self.by_class.get(peer_class, ())


class ConnectedPeers:
    """Peers that the transport says are there, with the classes they play."""

    def __init__(self) -> None:
        self._classes: dict[PeerId, tuple[str, ...]] = {}
        self._snapshot: PeersSnapshot | None = None

    def __contains__(self, peer: object) -> bool:
        return peer in self._classes

    def __len__(self) -> int:
        return len(self._classes)

    def connect(self, peer: PeerId, classes: Iterable[str]) -> bool:
        """A peer is there; True when it was not, or plays other classes now."""
        fresh = tuple(dict.fromkeys(classes))
        changed = self._classes.get(peer) != fresh
        self._classes[peer] = fresh
        if changed:
            self._snapshot = None
        return changed

    def disconnect(self, peer: PeerId) -> bool:
        """A peer is gone; True when it was there."""
        self._snapshot = None
        return self._classes.pop(peer, None) is not None

    def classes_of(self, peer: PeerId) -> tuple[str, ...]:
        """The classes that a connected peer plays."""
        return self._classes.get(peer, ())

    def invalidate(self) -> None:
        """Forget the snapshot: who is usable has changed."""
        self._snapshot = None

    def snapshot(self, usable: Callable[[PeerId], bool], *, fresh: bool) -> PeersSnapshot:
        """The usable peers; `fresh` asks again even if nothing changed here."""
        if self._snapshot is None or fresh:
            everyone = tuple(sorted(peer for peer in self._classes if usable(peer)))
            by_class: dict[str, list[PeerId]] = {}
            for peer in everyone:
                for name in self._classes[peer]:
                    by_class.setdefault(name, []).append(peer)
            self._snapshot = PeersSnapshot(
                everyone, {name: tuple(peers) for name, peers in by_class.items()}
            )
        return self._snapshot

    def state(self, names: SavedNames) -> Any:
        """For a snapshot: who is connected, and as what."""
        return [[names.peer(peer), list(classes)] for peer, classes in self._classes.items()]

    def load(self, plain: Any, names: LoadedNames) -> None:
        """Take up what `state` gave."""
        self._classes = {names.peer(peer): tuple(classes) for peer, classes in plain}
        self._snapshot = None

    def everyone(self) -> tuple[PeerId, ...]:
        """All connected peers, those that came first first."""
        return tuple(self._classes)
