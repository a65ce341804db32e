"""Peer selectors that share work out: by turns, and by the less loaded of two.

Rule: they count what they give out themselves, so that no peer can claim anything; what is counted
is bounded, and in the snapshot.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from bbnode.components.contracts import OpContext
from bbnode.components.registry import register_component
from bbnode.components.selectors.views import ConnectedView, DrawingConfig
from bbnode.ir.caps import MAX_BOOK_PEERS
from bbnode.ir.peer import PeerId
from bbnode.ir.values import PeerIdVec, ResponseBatch

_WORD: Final = 1 << 64


def uniform(seed: int, counter: int, about: bytes) -> float:
    """Return a number between 0 and 1, both excluded, that follows from these three alone."""
    salt = seed.to_bytes(8, "big", signed=True) + counter.to_bytes(8, "big")
    word = int.from_bytes(hashlib.sha256(salt + about).digest()[:8], "big")
    return (word + 0.5) / _WORD


def forget_absent(table: dict[PeerId, Any], present: Collection[PeerId]) -> None:
    """Drop the oldest rows of peers that are not there, until MAX_BOOK_PEERS are left."""
    beyond = len(table) - MAX_BOOK_PEERS
    if beyond > 0:
        there = set(present)
        for peer in [peer for peer in table if peer not in there][:beyond]:
            del table[peer]


@register_component
class RoundRobin(ConnectedView):
    """Chooses those of the connected peers of its class whose last turn is the longest ago.

    A peer that is new goes to the end of the line; one that was away keeps its place in it. So
    among K known peers each that stays connected is chosen within ceil(K / n) draws of n, whoever
    comes and goes. Peers that were met together take their first turns in a drawn order.
    """

    TYPE_NAME: ClassVar[str] = "bbnode.RoundRobin"

    def __init__(self, config: DrawingConfig) -> None:
        super().__init__(config)
        self._line: dict[PeerId, None] = {}  # those whose turn is next come first

    def current_view(self, ctx: OpContext) -> PeerIdVec:
        self._meet(ctx, self._all(ctx))
        return super().current_view(ctx)

    def drawn(self, ctx: OpContext, peers: Sequence[PeerId], n: int) -> PeerIdVec:
        self._meet(ctx, peers)
        present = set(peers)
        chosen = [peer for peer in self._line if peer in present][:n]
        for peer in chosen:
            del self._line[peer]
            self._line[peer] = None
        return self.counted(chosen)

    def _meet(self, ctx: OpContext, candidates: Sequence[PeerId]) -> None:
        new = [peer for peer in candidates if peer not in self._line]
        new.sort(key=lambda peer: uniform(self.seed(ctx), 0, peer.to_bytes()))
        self._line.update(dict.fromkeys(new))
        forget_absent(self._line, candidates)

    def state(self) -> dict[str, Any]:
        return {"line": [peer.to_bytes() for peer in self._line]}

    def load_state(self, saved: Mapping[str, Any]) -> None:
        self._line = dict.fromkeys(map(PeerId.from_bytes, saved["line"]))


@dataclass(frozen=True, kw_only=True)
class PowerOfTwoChoicesConfig:
    """Settings of `PowerOfTwoChoices`.

    Attributes:
        choices: peers that are drawn for each one that is taken.
        min_peers: peers that there have to be for a draw; with fewer it fails.
        seed: of the draws.
    """

    choices: int = 2
    min_peers: int = 1
    seed: int = 0


@dataclass(slots=True)
class _Load:
    outstanding: int = 0  # choices of which nothing was heard yet
    given: int = 0  # all choices


@register_component
class PowerOfTwoChoices(ConnectedView):
    """Draws two peers for each that it takes, and takes the less loaded (Mitzenmacher, 2001,
    doi:10.1109/71.963420): n draws over n peers give the busiest about ln ln n / ln 2 of them more
    than the mean, where single draws give it ln n / ln ln n.

    A peer's load is how often it was chosen and `observed` has not told of it yet; among equals,
    how often it was chosen at all. A peer that is new begins with the least that any other one has
    been given. Where a program never tells of answers, every choice counts as under way.
    """

    TYPE_NAME: ClassVar[str] = "bbnode.PowerOfTwoChoices"
    Config: ClassVar[type] = PowerOfTwoChoicesConfig
    observes: ClassVar[str] = "answers"

    def __init__(self, config: PowerOfTwoChoicesConfig) -> None:
        super().__init__(config)
        self.require(2 <= config.choices <= 64, "choices has to be in 2 .. 64")
        self._loads: dict[PeerId, _Load] = {}

    def observed(self, ctx: OpContext, responses: ResponseBatch) -> None:
        """Count those that answered, or will not, as done with what they were chosen for."""
        for peer in (*responses.peers, *responses.missing):
            known = self._loads.get(peer)
            if known is not None and known.outstanding > 0:
                known.outstanding -= 1

    def drawn(self, ctx: OpContext, peers: Sequence[PeerId], n: int) -> PeerIdVec:
        self._meet(ctx, peers)
        left, chosen = list(peers), []
        for turn in range(min(n, len(left))):
            count = min(self.config.choices, len(left))
            for at in range(count):
                label = f"{turn}.{at}".encode()
                other = at + int(uniform(self.seed(ctx), self._draws, label) * (len(left) - at))
                left[at], left[other] = left[other], left[at]
            # The first of equals: a draw by itself.
            taken = min(left[:count], key=self._load)
            self._loads[taken].outstanding += 1
            self._loads[taken].given += 1
            left.remove(taken)
            chosen.append(taken)
        return self.counted(chosen)

    def _meet(self, ctx: OpContext, candidates: Sequence[PeerId]) -> None:
        known = [self._loads[peer].given for peer in candidates if peer in self._loads]
        least = min(known, default=0)
        for peer in candidates:
            self._loads.setdefault(peer, _Load(given=least))
        forget_absent(self._loads, candidates)

    def _load(self, peer: PeerId) -> tuple[int, int]:
        known = self._loads[peer]
        return known.outstanding, known.given

    def state(self) -> dict[str, Any]:
        rows = ([p.to_bytes(), load.outstanding, load.given] for p, load in self._loads.items())
        return {"loads": list(rows)}

    def load_state(self, saved: Mapping[str, Any]) -> None:
        self._loads = {
            PeerId.from_bytes(raw): _Load(int(outstanding), int(given))
            for raw, outstanding, given in saved["loads"]
        }
