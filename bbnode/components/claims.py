"""What peers say of their contributions: how far it is believed, and how it is shown.

Rule: a number of a peer counts within bounds, and what is no number is not printed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction

import numpy as np

from bbnode.ir.peer import PeerId

# A loss beyond what a float32 holds was computed by nobody.
_MAX_ABS_LOSS = float(np.finfo(np.float32).max)
# Refusals that the metadata of an aggregate spells out: it is shown to people.
_MOST_TOLD = 8


def capped(counts: Sequence[int], max_share: float) -> list[int]:
    """Sample counts of which none is more than `max_share` of their sum, or 1/N of N.

    No count is raised, and those within the bound weigh among each other as before. One or two
    counts stay as they are.
    """
    if len(counts) < 3:
        return list(counts)
    share = max(Fraction(max_share), Fraction(1, len(counts)))
    order = sorted(counts, reverse=True)
    rest = sum(order)
    limit = share * rest
    for above, count in enumerate(order, 1):
        if count <= limit:
            break
        # So many are cut to one limit, which is its share of them and of the rest together.
        rest -= count
        limit = share * rest / (1 - above * share)
    return [min(count, math.floor(limit)) for count in counts]


def is_loss(value: object) -> bool:
    """Whether a scalar of a peer can be a loss."""
    return (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and abs(value) <= _MAX_ABS_LOSS
    )


def shown(value: object) -> str:
    """A scalar of a peer in a message: numbers as they are, of all else the type alone."""
    if value is None or isinstance(value, bool | float):
        return repr(value)
    if isinstance(value, int):
        return repr(value) if value.bit_length() <= 64 else "an integer beyond 64 bits"
    return type(value).__name__


def told(refused: Mapping[PeerId, str]) -> str:
    """Who was refused and why, the first few in PeerId order."""
    said = [f"{peer}: {refused[peer]}" for peer in sorted(refused)[:_MOST_TOLD]]
    more = len(refused) - len(said)
    return "; ".join([*said, f"{more} more"] if more else said)
