"""Keys and random bytes of simulated nodes, which follow from names and seeds.

Rule: a run is repeatable, so nothing here is secret. A node that restarts draws from another
stream: no life of it repeats the keys of an earlier one.
"""

from __future__ import annotations

import hashlib
import itertools
from functools import cache

from bbnode.access.keys import SigningKey
from bbnode.access.secrets import NodeSecrets


@cache
def key_of(name: str) -> SigningKey:
    """Return the Ed25519 key of the node of that name."""
    return SigningKey.from_seed(hashlib.sha256(f"bbnode-sim-key-{name}".encode()).digest())


def secrets_of(name: str, seed: int, incarnation: int, *, signs: bool) -> NodeSecrets:
    """Return what a node's components sign with, if it `signs`, and draw from."""
    stream = f"{seed}/{incarnation}/{name}"
    calls = itertools.count()

    def random_bytes(count: int) -> bytes:
        return hashlib.shake_256(f"{next(calls)}/{stream}".encode()).digest(count)

    return NodeSecrets(key_of(name) if signs else None, random_bytes)
