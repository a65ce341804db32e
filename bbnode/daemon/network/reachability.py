"""Reachability of this node, as connected peers report it.

Rule: a few peers are asked to dial back, when there are some and at intervals after that. Their
reports are for people; they decide nothing here. A node that listens only on this machine asks no
peer.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import trio
from multiaddr import Multiaddr

from bbnode.daemon.network.dial_back import MAX_ASKED, Ask, DialBack, DialResult
from bbnode.ir.address import is_relayed
from bbnode.ir.caps import REACHABILITY_EVERY_S
from bbnode.ir.errors import BbnodeError
from bbnode.ir.peer import PeerId
from bbnode.transport.base import Transport
from bbnode.transport.hints import Scope, ip_of, scope_of

logger = logging.getLogger(__name__)

# The pause until there are peers to ask, and after all of them have refused.
RETRY_S: Final = 60.0
# The time for the first peers to connect.
SETTLE_S: Final = 10.0


class Reachability:
    """Asks peers to dial this node, and keeps their last reports."""

    def __init__(
        self, backend: Transport, ask: Ask, publish: Callable[[Mapping[str, Any]], None]
    ) -> None:
        """Create it; `ask` has one peer dial back; nothing is asked before `run`."""
        self._backend = backend
        self._ask = ask
        self._publish = publish
        self._counts: Counter[str] = Counter()
        self._said: dict[PeerId, DialBack] = {}
        self._checked_s: float | None = None

    async def run(self) -> None:
        """Ask at intervals, until cancelled."""
        await trio.sleep(SETTLE_S)
        while True:
            asked = await self.check()
            await trio.sleep(REACHABILITY_EVERY_S if asked else RETRY_S)

    async def check(self) -> bool:
        """Ask up to MAX_ASKED peers; return True if one has tried an address."""
        if not self._own():
            return False
        before, reports = self.can_be_dialled, {}
        peers = [info.peer for info in self._backend.peers() if not is_relayed(info.address)]
        for peer in peers[:MAX_ASKED]:
            self._counts["asked"] += 1
            try:
                answer = await self._ask(peer)
            except BbnodeError as error:
                self._counts["refused"] += 1
                logger.debug("no dial-back", extra={"peer": str(peer), "reason": str(error)})
                continue
            if _verdict(answer) is not None:
                reports[peer] = answer
        if not reports:
            return False
        self._said, self._checked_s = reports, trio.current_time()
        now = self.can_be_dialled
        if now != before:
            logger.log(
                logging.INFO if now else logging.WARNING,
                "peers can dial this node" if now else "no peer can dial this node",
                extra={"addresses": ",".join(self._reached()) or "none", "asked": len(reports)},
            )
            self._publish({"type": "reachability", "can_be_dialled": now})
        return True

    @property
    def can_be_dialled(self) -> bool | None:
        """True if most of the asked peers reached it; None if no peer has tried."""
        verdicts = [_verdict(answer) for answer in self._said.values()]
        if not verdicts:
            return None
        return 2 * sum(map(bool, verdicts)) >= len(verdicts)

    def _own(self) -> Sequence[Multiaddr]:
        """Return the addresses of this node that another machine could dial."""
        addresses = []
        for address in self._backend.listen_addresses():
            ip = ip_of(address)
            if not is_relayed(address) and (ip is None or scope_of(ip) is not Scope.LOOPBACK):
                addresses.append(address)
        return addresses

    def _reached(self) -> list[str]:
        ways = dict.fromkeys(
            str(tried.address)
            for answer in self._said.values()
            for tried in answer.tried
            if tried.outcome is DialResult.REACHED
        )
        return list(ways)

    def counters(self) -> dict[str, int]:
        """Return the counters by dotted name; all names are always there."""
        return {f"reachability.{name}": self._counts[name] for name in ("asked", "refused")}

    def as_json(self) -> dict[str, Any]:
        """Return the last reports of peers, and their age."""
        now_s = trio.current_time()
        return {
            "can_be_dialled": self.can_be_dialled,
            "addresses": self._reached(),
            "seen_at": list(dict.fromkeys(each.seen_at for each in self._said.values())),
            "said_by": {str(peer): _verdict(answer) for peer, answer in self._said.items()},
            "age_s": None if self._checked_s is None else round(now_s - self._checked_s, 1),
        }


def _verdict(answer: DialBack) -> bool | None:
    """Return True if a peer reached an address, False if none, None if it tried none."""
    outcomes = {tried.outcome for tried in answer.tried}
    if DialResult.REACHED in outcomes:
        return True
    return False if DialResult.FAILED in outcomes else None
