"""Shamir's secret sharing (1979, doi:10.1145/359168.359176), over the field of 2^256 + 297.

The prime is the first one above 2^256, so that every secret of 32 bytes is an element. Any
`threshold` shares give the secret back; fewer are independent of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Final

PRIME: Final = (1 << 256) + 297
SECRET_BYTES: Final = 32
SHARE_BYTES: Final = 33
# Bytes per coefficient; taken modulo the prime, they differ from uniform by less than 2^-120.
_DRAWN_BYTES: Final = 48


def split(
    secret: bytes, points: Sequence[int], threshold: int, random_bytes: Callable[[int], bytes]
) -> list[int]:
    """Return the shares of a 32-byte secret at `points`, different numbers from 1 on.

    Raises ValueError for a threshold beyond their number, or points that repeat.
    """
    if not 1 <= threshold <= len(points) or len(set(points)) != len(points) or min(points) < 1:
        raise ValueError(f"{len(points)} points, threshold {threshold}: no sharing")
    drawn = random_bytes(_DRAWN_BYTES * (threshold - 1))
    coefficients = [
        int.from_bytes(drawn[at : at + _DRAWN_BYTES], "big") % PRIME
        for at in range(0, len(drawn), _DRAWN_BYTES)
    ]
    constant = int.from_bytes(secret, "big")
    shares = []
    for point in points:
        value = 0
        for coefficient in coefficients:
            value = (value + coefficient) * point % PRIME
        shares.append((value + constant) % PRIME)
    return shares


@lru_cache(maxsize=1024)
def _weights(points: tuple[int, ...], at: int) -> tuple[int, ...]:
    """Return Lagrange's weights of `points` for the value of their polynomial at `at`."""
    found = []
    for point in points:
        over, under = 1, 1
        for other in points:
            if other != point:
                over = over * (at - other) % PRIME
                under = under * (point - other) % PRIME
        found.append(over * pow(under, -1, PRIME) % PRIME)
    return tuple(found)


def value_at(shares: Mapping[int, int], at: int) -> int:
    """Return the value at `at` of the polynomial through these shares, by point."""
    points = tuple(sorted(shares))
    weights = _weights(points, at)
    return sum(w * shares[p] for w, p in zip(weights, points, strict=True)) % PRIME


def recover(shares: Mapping[int, int]) -> bytes | None:
    """Return the secret of `threshold` shares, by point; None where it has not 32 bytes.

    Shares that were changed give another secret: compare it with something that is known of it.
    """
    found = value_at(shares, 0)
    return None if found >> 256 else found.to_bytes(SECRET_BYTES, "big")
