"""Graphs over a list of peers, and the weights by which each mixes what its neighbours have.

Rule: a graph is a function of the sorted list of members, so that peers who know the same members
know the same graph. Weights are Metropolis-Hastings': 1 / (1 + the greater degree) for an edge, the
rest with oneself, which is symmetric and sums to 1 both ways (Xiao, Boyd and Kim, 2007,
doi:10.1016/j.jpdc.2006.08.010).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final, TypeAlias

from bbnode.components.errors import ComponentError, NotEnoughPeers
from bbnode.ir.errors import DeploymentError
from bbnode.ir.peer import PeerId

Neighbours: TypeAlias = Callable[[int, int], set[int]]  # (place, members) -> places


class TooManyPeers(ComponentError, DeploymentError):
    """More peers take part than a grid has places."""


def ring(place: int, count: int) -> set[int]:
    """Return the places before and behind, in a circle."""
    return {(place - 1) % count, (place + 1) % count} - {place}


def complete(place: int, count: int) -> set[int]:
    """Return all other places."""
    return {*range(count)} - {place}


def torus(place: int, count: int) -> set[int]:
    """Return the places around, on the squarest full rectangle; of a prime number it is a ring."""
    rows = next(n for n in range(math.isqrt(count), 0, -1) if count % n == 0)
    columns = count // rows
    row, column = divmod(place, columns)
    around = {(row + up, column + right) for up, right in ((0, 1), (0, -1), (1, 0), (-1, 0))}
    return {(r % rows) * columns + c % columns for r, c in around} - {place}


GRAPHS: Final[Mapping[str, Neighbours]] = {"ring": ring, "torus": torus, "complete": complete}


def metropolis(
    peer: PeerId, neighbours: Callable[[PeerId], Collection[PeerId]]
) -> dict[PeerId, float]:
    """Return the weights of a peer's neighbours, without its own."""
    mine = neighbours(peer)
    degrees = {other: len(neighbours(other)) for other in mine}
    return {other: 1 / (1 + max(len(mine), degrees[other])) for other in mine}


def on_graph(graph: str, peer: PeerId, members: Sequence[PeerId]) -> dict[PeerId, float]:
    """Return the weights of a peer's neighbours on one of `GRAPHS`, over sorted members."""
    at = {each: place for place, each in enumerate(members)}

    def neighbours(one: PeerId) -> Collection[PeerId]:
        return [members[place] for place in GRAPHS[graph](at[one], len(members))]

    return metropolis(peer, neighbours)


def on_edges(edges: Collection[tuple[PeerId, PeerId]], peer: PeerId) -> dict[PeerId, float]:
    """Return the weights of a peer's neighbours by a list of edges."""

    def neighbours(one: PeerId) -> Collection[PeerId]:
        return {b if a == one else a for a, b in edges if one in (a, b)}

    return metropolis(peer, neighbours)


def on_grid(
    side: int, axes: int, round_: int, peer: PeerId, members: Sequence[PeerId]
) -> dict[PeerId, float]:
    """Return the weights of a peer's group in a round, without its own.

    Members fill a grid of `side` places along each of `axes` in their order. In round r a group is
    the line along axis r mod `axes`. (Ryabinin et al., 2021, arXiv:2103.03239.) With `side` 0 it is
    as long as it takes.

    Raises:
        TooManyPeers: there are more members than places.
    """
    count = len(members)
    side = side or next(n for n in range(1, count + 1) if n**axes >= count)
    if count > side**axes:
        raise TooManyPeers(
            f"{count} peers and {side}^{axes} = {side**axes} places on the grid; make side at "
            f"least {next(n for n in range(side, count + 1) if n**axes >= count)}"
        )
    step = side ** (round_ % axes)
    place = members.index(peer)
    first = place - place // step % side * step
    group = [members[n] for n in range(first, first + side * step, step) if n < count]
    return {other: 1 / len(group) for other in group if other != peer}


def enough(component: str, members: Sequence[PeerId]) -> None:
    """Raise NotEnoughPeers for fewer than two members."""
    if len(members) < 2:
        raise NotEnoughPeers(
            component=component, available=len(members), needed=2, peer_class="peer"
        )
