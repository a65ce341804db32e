"""The release of memory of peers that came and went.

Rule: everything that a node keeps of a peer that is neither named by the configuration nor
connected is removed once the peer was quiet for `FORGOTTEN_AFTER_S`. The tables are bounded without
this; with it they are small again after a flood of identities. The removal is an input of the node,
so that a record of its life contains it.
"""

from __future__ import annotations

import ctypes
import logging
import time
from collections.abc import Callable
from typing import Final

import trio

from bbnode.access.policy import Policy
from bbnode.engine import Node
from bbnode.ir.address import forget_parsed
from bbnode.ir.caps import FORGOTTEN_AFTER_S
from bbnode.ir.envelope import forget_senders
from bbnode.ir.peer import PeerId

logger = logging.getLogger(__name__)

_LOOK_S: Final = 600.0
_NS: Final = 1_000_000_000
# From this number of peers on, their freed memory is worth being returned to the system.
_MANY: Final = 1000


class PassingPeers:
    """Forgets peers that came and went."""

    def __init__(
        self,
        node: Node,
        policy: Policy,
        monotonic_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._node = node
        self._policy = policy
        self._monotonic_ns = monotonic_ns
        self._since_ns: dict[PeerId, int] = {}
        self.forgotten = 0  # in total

    async def run(self) -> None:
        """Forget quiet peers every ten minutes."""
        while True:
            await trio.sleep(_LOOK_S)
            self.look()

    def look(self) -> int:
        """Forget the peers that have been quiet for long; return their number."""
        now_ns, after_ns = self._monotonic_ns(), int(FORGOTTEN_AFTER_S * _NS)
        self._since_ns = {
            peer: max(self._since_ns.get(peer, now_ns), self._policy.heard_ns(peer))
            for peer in self._node.passing_peers()
        }
        quiet = [peer for peer, since in self._since_ns.items() if now_ns - since >= after_ns]
        for peer in quiet:
            self._node.forget_peer(peer)
        if quiet:  # rebuilt, since a dictionary keeps its size when entries are deleted
            gone_now = frozenset(quiet)
            self._since_ns = {p: at for p, at in self._since_ns.items() if p not in gone_now}
        connected = frozenset(self._node.everyone_connected())
        gone = max(len(quiet), self._policy.forget_quiet(now_ns, after_ns, connected))
        self.forgotten += gone
        if gone >= _MANY:
            _give_back()
            logger.info("memory given back", extra={"peers": gone})
        return gone


def _give_back() -> None:
    """Clear caches of peers' claims, and return free memory to the system if it can be."""
    forget_senders()
    forget_parsed()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
