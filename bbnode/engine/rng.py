"""Numbers that look random and are a pure function of a seed.

Rule: the engine draws nothing from outside; splitmix64 (Steele, Lea, Flood 2014,
doi:10.1145/2660193.2660195) over explicit state, so that a replay gives the same numbers.
"""

from __future__ import annotations

from typing import Any

from bbnode.ir.ids import fnv1a_64

_MASK = (1 << 64) - 1
_GOLDEN_GAMMA = 0x9E3779B97F4A7C15  # odd, 2^64 / golden ratio; the step of the paper
_WIRE_STREAM = 0x77697265  # "wire": keeps ids apart from what the program draws
_PROGRAM_STREAM = 0x70726F67  # "prog"


def mix64(z: int) -> int:
    """Apply splitmix64's finalizer, a bijection of 64-bit integers."""
    z = (z + _GOLDEN_GAMMA) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


class SplitMix64:
    """A stream: the k-th number is `mix64(base + k * gamma)`."""

    __slots__ = ("_base", "position")

    def __init__(self, base: int, position: int = 0) -> None:
        self._base = base & _MASK
        self.position = position

    def next_u64(self) -> int:
        """Return the next number, in 0 .. 2^64-1."""
        self.position += 1
        # `mix64` of it, written out: each message that is sent draws its id.
        z = (self._base + (self.position + 1) * _GOLDEN_GAMMA) & _MASK
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
        return z ^ (z >> 31)

    def restart(self, other: SplitMix64) -> None:
        """Go on as another stream, for all who hold this one."""
        self._base, self.position = other._base, other.position

    def state(self) -> Any:
        """Return which stream it is, and its position."""
        return [self._base, self.position]

    def load(self, plain: Any) -> None:
        """Load what `state` returned."""
        self._base, self.position = plain


def wire_ids(peer: bytes, incarnation: int) -> SplitMix64:
    """Return the ids for the wire: never twice on one node, and by chance apart from others'.

    mix64 is a bijection, so within (peer, incarnation) two positions never collide; across
    nodes 2^64 keeps the chance negligible.
    """
    return SplitMix64(mix64(mix64(fnv1a_64(peer) ^ _WIRE_STREAM) ^ incarnation))


def program_rng(seed: int, incarnation: int, peer: bytes) -> SplitMix64:
    """Return the stream of RngU64: of the node's seed, apart from the wire ids."""
    base = mix64(mix64((seed & _MASK) ^ _PROGRAM_STREAM) ^ mix64(incarnation))
    return SplitMix64(base ^ mix64(fnv1a_64(peer)))
