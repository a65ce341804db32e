"""Keys and random bytes of simulated nodes, derived from names and seeds.

Rule: a run is repeatable, so nothing here is secret. A restarted node draws from another stream, so
that none of its lives repeats the keys of an earlier one.
"""

from __future__ import annotations

import hashlib
from functools import cache

from bbnode.access.keys import SigningKey
from bbnode.access.secrets import NodeSecrets


@cache
def key_of(name: str) -> SigningKey:
    """Return the Ed25519 key of a node by name."""
    return SigningKey.from_seed(hashlib.sha256(f"bbnode-sim-key-{name}".encode()).digest())


class SimSecrets:
    """The key (if it `signs`) and the randomness for a node's components, in one of its lives."""

    __slots__ = ("_calls", "_incarnation", "_name", "_seed", "_signs")

    def __init__(self, name: str, seed: int, incarnation: int, *, signs: bool) -> None:
        self._name = name
        self._seed = seed
        self._incarnation = incarnation
        self._signs = signs
        self._calls = 0

    def random_bytes(self, count: int) -> bytes:
        """Return the next bytes of this life."""
        stream = f"{self._calls}/{self._seed}/{self._incarnation}/{self._name}"
        self._calls += 1
        return hashlib.shake_256(stream.encode()).digest(count)

    def sign(self, component: str, body: bytes) -> bytes:
        """Return a signature by the node's key; raises IdentityError if it has none."""
        key = key_of(self._name) if self._signs else None
        return NodeSecrets(key).sign(component, body)
