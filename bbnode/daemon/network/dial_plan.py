"""The choice of peers to dial: bootstrap peers, and learned ones.

Rule: pure; times are arguments, in seconds of one monotonic clock. `BootstrapDialPlan` follows the
table below: it wants k peers, tries that many at a time and one more whenever its patience ends,
and dials no others once k are connected. A learned peer is dialled for a limited time, and
DIAL_RATES limit how many are dialled, by the source of the hint.
"""

from __future__ import annotations

import enum
import math
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from multiaddr import Multiaddr

from bbnode.ir.caps import MAX_LEARNED, MAX_WORDS, OWN_WORD_EVERY_S
from bbnode.ir.peer import PeerId

# The time for dialled peers before one more is tried. A dial with its handshakes takes 4.5 round
# trips; a live peer has answered by then on any link.
PATIENCE_S: Final = 5.0
# The time for which a learned peer is dialled after it was last wanted: about eight attempts.
GIVE_UP_S: Final = 60.0
# The time for which a peer that does not admit us is not dialled: the first time, and at most.
TURNED_AWAY_S: Final = 30.0
MAX_TURNED_AWAY_S: Final = 600.0
_ROUNDING_S: Final = 1e-6


class DialState(enum.Enum):
    """The state of one bootstrap peer."""

    LEFT = "left"  # not dialled
    DIALLED = "dialled"
    UP = "up"


class PeerChange(enum.Enum):
    """An event that changes the state of a bootstrap peer."""

    NEEDED = "needed"  # fewer than k are up, and it is its turn
    ENOUGH = "enough"  # k are up
    CONNECTED = "connected"
    LOST = "lost"


BOOTSTRAP_MOVES: Final[Mapping[tuple[DialState, PeerChange], DialState]] = {
    (DialState.LEFT, PeerChange.NEEDED): DialState.DIALLED,
    (DialState.LEFT, PeerChange.CONNECTED): DialState.UP,
    (DialState.DIALLED, PeerChange.CONNECTED): DialState.UP,
    (DialState.DIALLED, PeerChange.ENOUGH): DialState.LEFT,
    (DialState.UP, PeerChange.LOST): DialState.LEFT,
}


class BootstrapDialPlan:
    """The bootstrap peers to keep connected; all of them if `min_peers` is None."""

    def __init__(self, peers: Iterable[PeerId], min_peers: int | None = None) -> None:
        # In the order of attempts; a lost peer goes to the end.
        self._stands = dict.fromkeys(peers, DialState.LEFT)
        self._min_peers = min_peers
        self._extra = 0
        self._waiting_since_s: float | None = None

    @property
    def enough(self) -> int:
        """The number k of wanted peers, at most as many as there are."""
        count = len(self._stands)
        return count if self._min_peers is None else min(self._min_peers, count)

    def stand(self, peer: PeerId) -> DialState | None:
        """Return the state of a peer; None for one that is not a bootstrap peer."""
        return self._stands.get(peer)

    def advance(self, connected: Collection[PeerId], now_s: float) -> list[PeerId]:
        """Update the connected peers; return the peers to keep connected, in the order of turns."""
        for peer, stand in list(self._stands.items()):
            if (peer in connected) != (stand is DialState.UP):
                self._happens(peer, PeerChange.CONNECTED if peer in connected else PeerChange.LOST)
        missing = self.enough - self._count(DialState.UP)
        if missing <= 0:
            self._extra, self._waiting_since_s = 0, None
            for peer in list(self._stands):
                self._happens(peer, PeerChange.ENOUGH)
        else:
            self._lose_patience(now_s)
            free = missing + self._extra - self._count(DialState.DIALLED)
            left = [peer for peer, stand in self._stands.items() if stand is DialState.LEFT]
            for peer in left[: max(free, 0)]:
                self._happens(peer, PeerChange.NEEDED)
        return [peer for peer, stand in self._stands.items() if stand is not DialState.LEFT]

    def next_s(self) -> float:
        """Return the time to advance at the latest if nothing happens; infinity for never."""
        if self._waiting_since_s is None or DialState.LEFT not in self._stands.values():
            return math.inf
        return self._waiting_since_s + PATIENCE_S

    def _lose_patience(self, now_s: float) -> None:
        if self._waiting_since_s is None:
            self._waiting_since_s = now_s
        while self._waiting_since_s + PATIENCE_S <= now_s and self._extra < len(self._stands):
            self._waiting_since_s += PATIENCE_S
            self._extra += 1

    def _happens(self, peer: PeerId, what: PeerChange) -> None:
        stand = BOOTSTRAP_MOVES.get((self._stands[peer], what))
        if stand is None:
            return
        if what is PeerChange.LOST:
            del self._stands[peer]
        self._stands[peer] = stand

    def _count(self, wanted: DialState) -> int:
        return sum(stand is wanted for stand in self._stands.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned:
    """A learned peer: dialled from `from_s` until `until_s`."""

    addresses: tuple[Multiaddr, ...]
    from_s: float
    until_s: float


class TurnedAway:
    """The peers that do not admit this node, and the time until which each is not dialled.

    Each repeated dial would show the node as connected for a moment.
    """

    def __init__(self) -> None:
        # The reason of each peer, the end of its pause, and the length of the next pause.
        self._peers: dict[PeerId, tuple[str, float, float]] = {}

    def note(self, peer: PeerId, reason: str, now_s: float) -> bool:
        """Pause dialling a peer, longer each time; return True if the reason is new."""
        before, _, wait_s = self._peers.get(peer, ("", 0.0, TURNED_AWAY_S))
        self._peers[peer] = reason, now_s + wait_s, min(2 * wait_s, MAX_TURNED_AWAY_S)
        return before != reason

    def stays_away(self, peer: PeerId, now_s: float) -> bool:
        """Return True while a peer is not to be dialled."""
        return peer in self._peers and now_s < self._peers[peer][1]

    def forgive(self, peer: PeerId | None = None) -> None:
        """Forget a peer that did admit us, or all of them after a change of credentials."""
        if peer is None:
            self._peers.clear()
        else:
            self._peers.pop(peer, None)

    def reasons(self) -> Mapping[PeerId, str]:
        """Return the reason of each peer that does not admit us."""
        return {peer: reason for peer, (reason, _, _) in self._peers.items()}

    def next_s(self, now_s: float) -> float:
        """Return the time when the next peer may be dialled again; infinity for never."""
        return min((t for _, t, _ in self._peers.values() if t > now_s), default=math.inf)


class HintSource(enum.Enum):
    """The source of the claim that a peer is at an address."""

    TOLD = "told"  # the program, for example by a registry, about a peer that was never connected
    # The peer itself, which was connected; `transport.hints` says which addresses count.
    OWN = "own"
    STRANGER = "stranger"  # the peer itself, without any exchange with it


@dataclass(frozen=True, slots=True, kw_only=True)
class DialRate:
    """A bound on dialling by hints of one source.

    It limits the peers at once, the peers a second in the long run, and the time for which each is
    dialled after it was last wanted.
    """

    burst: int
    per_second: float
    give_up_s: float


# A program that asks all of a registry's peers at once may dial as many as there is room for. Most
# lost peers dial us, and dialling for strangers is the most harmful.
DIAL_RATES: Final[Mapping[HintSource, DialRate]] = {
    HintSource.TOLD: DialRate(burst=MAX_LEARNED, per_second=8.0, give_up_s=GIVE_UP_S),
    HintSource.OWN: DialRate(burst=8, per_second=1.0, give_up_s=GIVE_UP_S),
    # Time for five attempts.
    HintSource.STRANGER: DialRate(burst=4, per_second=0.2, give_up_s=5.0),
}


class DialBudget:
    """A rate limit on dialling peers at addresses that others claim."""

    def __init__(self) -> None:
        # The time up to which the dials of each source are paid for.
        self._paid_s = dict.fromkeys(HintSource, -math.inf)
        # The time of the last dial by each peer's own hint, the oldest first.
        self._taken_s: OrderedDict[PeerId, float] = OrderedDict()

    def take(self, word: HintSource, peer: PeerId, now_s: float) -> bool:
        """Count one more dial; return False if that would be too many."""
        rate = DIAL_RATES[word]
        if (
            word is not HintSource.TOLD
            and now_s < self._taken_s.get(peer, -math.inf) + OWN_WORD_EVERY_S
        ):
            return False
        paid_s = max(self._paid_s[word], now_s) + 1 / rate.per_second
        if paid_s - now_s > rate.burst / rate.per_second + _ROUNDING_S:
            return False
        self._paid_s[word] = paid_s
        if word is not HintSource.TOLD:
            self._taken_s.pop(peer, None)
            self._taken_s[peer] = now_s
            if len(self._taken_s) > MAX_WORDS:
                self._taken_s.popitem(last=False)
        return True


class LearnedDialPlan:
    """The learned peers to dial: those wanted recently, and those that are still announced."""

    def __init__(self, max_peers: int = MAX_LEARNED) -> None:
        # The least recently wanted peer is first.
        self._peers: OrderedDict[PeerId, Learned] = OrderedDict()
        self._max_peers = max_peers

    def __len__(self) -> int:
        return len(self._peers)

    def __contains__(self, peer: object) -> bool:
        return peer in self._peers

    def want(
        self,
        peer: PeerId,
        addresses: Sequence[Multiaddr],
        now_s: float,
        *,
        wait_s: float = 0.0,
        give_up_s: float = GIVE_UP_S,
        until_dropped: bool = False,
    ) -> bool:
        """Plan to dial a peer, after `wait_s`; return False if it is already dialled there.

        If there is no room, the least recently wanted peer is dropped.
        """
        known = self._peers.get(peer)
        fresh = Learned(
            addresses=tuple(addresses),
            from_s=now_s + wait_s if known is None else known.from_s,
            until_s=math.inf
            if until_dropped or (known is not None and known.until_s == math.inf)
            else now_s + wait_s + give_up_s,
        )
        self._peers[peer] = fresh
        self._peers.move_to_end(peer)
        if len(self._peers) > self._max_peers:
            self._peers.popitem(last=False)
        return known is None or known.addresses != fresh.addresses

    def drop(self, peer: PeerId) -> None:
        """Stop dialling a peer."""
        self._peers.pop(peer, None)

    def advance(
        self, connected: Collection[PeerId], now_s: float
    ) -> dict[PeerId, tuple[Multiaddr, ...]]:
        """Return the addresses of peers to dial now; drop peers that connected or timed out."""
        for peer, learned in list(self._peers.items()):
            done = peer in connected and learned.until_s < math.inf
            if done or learned.until_s <= now_s:
                del self._peers[peer]
        return {p: each.addresses for p, each in self._peers.items() if each.from_s <= now_s}

    def next_s(self, now_s: float) -> float:
        """Return the time to advance at the latest if nothing happens; infinity for never."""
        times = [t for each in self._peers.values() for t in (each.from_s, each.until_s)]
        return min((t for t in times if t > now_s), default=math.inf)
