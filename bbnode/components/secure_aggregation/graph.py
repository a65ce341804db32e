"""The graph of those who share a mask: complete, or a random Harary graph (SecAgg+).

Rule: the graph is a function of a seed and of the clients, which each of them can compute. They
stand in a ring, in an order that the seed draws, and each has `degree`/2 neighbours on either side
(Bell et al. 2020, doi:10.1145/3372297.3417885, section 3).
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Collection, Sequence
from typing import Final

from bbnode.ir.peer import PeerId

# Bits of statistical security (sigma of the paper), and against failures of honest clients (eta).
SECURITY_BITS: Final = 40
CORRECTNESS_BITS: Final = 20


class MaskGraph:
    """The graph of some clients: their neighbours, and if those that are left hang together."""

    def __init__(self, peers: Sequence[PeerId], degree: int, seed: bytes) -> None:
        """Draw the graph; all are neighbours of all where `degree` is 0, or as many as there are.

        Args:
            peers: the clients, in any order.
            degree: neighbours of each, an even number.
            seed: of the order in the ring.
        """
        count = len(peers)
        self._half = degree // 2 if 0 < degree < count - 1 else count
        self._order = sorted(peers, key=lambda p: hashlib.sha256(seed + p.to_bytes()).digest())
        self._places = {peer: place for place, peer in enumerate(self._order)}

    def neighbours(self, peer: PeerId) -> list[PeerId]:
        """Return the neighbours of one of the clients, sorted."""
        if self._half >= len(self._order):
            return sorted(other for other in self._order if other != peer)
        place, half = self._places[peer], self._half
        steps = (step for step in range(-half, half + 1) if step)
        return sorted(self._order[(place + step) % len(self._order)] for step in steps)

    def is_connected(self, among: Collection[PeerId]) -> bool:
        """Return True if those `among` the clients reach each other through one another alone.

        Along the ring one reaches the next unless `degree`/2 or more between them are gone; two
        such gaps cut it.
        """
        places = sorted(self._places[peer] for peer in among)
        around = itertools.pairwise([*places, *(place + len(self._order) for place in places[:1])])
        return sum(next_one - one > self._half for one, next_one in around) < 2


def groups_of(peers: Sequence[PeerId], count: int, seed: bytes) -> list[list[PeerId]]:
    """Return the clients in so many groups whose sizes differ by one at most, as a seed deals them.

    Each group is sorted.
    """
    order = sorted(peers, key=lambda p: hashlib.sha256(b"group" + seed + p.to_bytes()).digest())
    return [sorted(order[at::count]) for at in range(count)]


def share_threshold(clients: int, corrupt: int, degree: int) -> int | None:
    """Return how many of a client's shares give its secret back; None where no number is safe.

    The least t with 2 t > `degree` + c, where c bounds the `corrupt` neighbours of every client but
    for a chance of 2^-(SECURITY_BITS + 1): a hypergeometric tail, times the number of clients.
    Then two sets of t neighbours have an honest one in common, so that a server that tells
    neighbours different things gains nothing (section 4 of the paper).
    """
    tails = _tails(clients - 1, corrupt, degree)
    for bound in range(degree + 1):
        if clients * tails[bound + 1] <= 2.0 ** -(SECURITY_BITS + 1):
            threshold = (degree + bound) // 2 + 1
            return threshold if threshold <= degree else None
    return None


def neighbours_for(clients: int, *, corrupt: float, dropouts: float) -> int:
    """Return the least even degree that is safe, and works, for such parts of the clients; or 0.

    `corrupt`: that collude with the server; `dropouts`: that are gone before the end; both from 0
    to 1. Conditions: the bound of `share_threshold` holds, and honest clients that stay are
    connected, but for a chance of 2^-SECURITY_BITS; each has that many neighbours that stay, but
    for 2^-CORRECTNESS_BITS. 0 (all others) where only the complete graph does. Raises ValueError.
    """
    if not (clients >= 2 and 0 <= corrupt < 1 and 0 <= dropouts < 1):
        raise ValueError(
            f"{clients} clients, corrupt={corrupt}, dropouts={dropouts}: give 2 clients or more "
            "and parts from 0 to below 1"
        )
    bad, gone = math.floor(corrupt * clients), math.floor(dropouts * clients)
    for degree in range(2, clients - 1, 2):
        if _splits(clients, bad + gone, degree) > 2.0 ** -(SECURITY_BITS + 1):
            continue
        threshold = share_threshold(clients, bad, degree)
        if threshold is None:
            continue
        fails = _tails(clients - 1, gone, degree)[degree - threshold + 1]
        if clients * fails <= 2.0**-CORRECTNESS_BITS:
            return degree
    return 0


def _tails(population: int, marked: int, drawn: int) -> list[float]:
    """Return the chances that at least 0, 1, … drawn + 1 of those drawn are marked.

    They are drawn without repetition: the hypergeometric distribution.
    """
    found = [0.0] * (drawn + 2)
    for k in range(drawn, -1, -1):
        possible = k <= marked and drawn - k <= population - marked
        chance = (
            math.exp(
                _log_ways(marked, k)
                + _log_ways(population - marked, drawn - k)
                - _log_ways(population, drawn)
            )
            if possible
            else 0.0
        )
        found[k] = found[k + 1] + chance
    return found


def _log_ways(things: int, chosen: int) -> float:
    """Return the logarithm of a binomial coefficient."""
    return math.lgamma(things + 1) - math.lgamma(chosen + 1) - math.lgamma(things - chosen + 1)


def _splits(clients: int, removed: int, degree: int) -> float:
    """Bound the chance that removing so many clients, at random, disconnects the ring graph.

    To cut it, degree/2 successive ones have to go at two places; the bound is the sum over all
    pairs of places.
    """
    if degree > removed:
        return 0.0
    pairs = clients * (clients - degree - 1) / 2
    ways = _log_ways(clients - degree, removed - degree) - _log_ways(clients, removed)
    return pairs * math.exp(ways)
