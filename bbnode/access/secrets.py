"""Secrets of a node, as far as its components may use them: signatures of its key, and randomness.

Rule: a component signs under its own type name alone, so that no signature of a component is one of
another component, of a document of access control, or of libp2p's.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field

from bbnode.access.errors import IdentityError
from bbnode.access.keys import SigningKey, verifies
from bbnode.ir.peer import PeerId

_CONTEXT = b"bbnode-component:"


@dataclass(frozen=True, slots=True)
class NodeSecrets:
    """The key of a node, None where it has none, and its source of random bytes."""

    key: SigningKey | None
    random_bytes: Callable[[int], bytes] = field(default=os.urandom, repr=False)

    def sign(self, component: str, body: bytes) -> bytes:
        """Return the 64-byte signature of `body` for components of that type name.

        Raises IdentityError where the node has no key.
        """
        if self.key is None:
            raise IdentityError(
                "this node has no Ed25519 key to sign with; in the simulator: Network(keys=True)"
            )
        return self.key.sign(_CONTEXT + component.encode(), body)


def signed_as(component: str, peer: PeerId, body: bytes, signature: bytes) -> bool:
    """Return True if a component of that type name signed `body` on `peer`.

    False also for a PeerId that holds no Ed25519 key.
    """
    return verifies(peer, _CONTEXT + component.encode(), body, signature)
