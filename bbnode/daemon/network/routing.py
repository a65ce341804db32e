"""Finding peers by asking others, through the transport's DHT.

Rule: the result of a search is a hint. Each address is tried by a handshake before it counts, and a
peer that gave one at which another peer answers is charged for it. Only `routing.dht` switches it
on; without it this node neither asks nor answers.
"""

from __future__ import annotations

import enum
import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import trio
from multiaddr import Multiaddr

from bbnode.daemon.config import RoutingSection
from bbnode.daemon.network.dial_plan import DialBudget, HintSource
from bbnode.daemon.network.discovery import Discovery
from bbnode.engine import steps
from bbnode.ir.address import is_relayed
from bbnode.ir.caps import (
    FOUND_EVERY_S,
    MAX_FIND_WAITING,
    MAX_FINDS,
    MAX_LEARNED,
    MAX_ROUTED_ADDRESSES,
)
from bbnode.ir.errors import BbnodeError
from bbnode.ir.peer import PeerId
from bbnode.transport.base import Authorizer, Direction, Transport
from bbnode.transport.errors import OTHER_KEY, DialError, NotSupportedError
from bbnode.transport.routing import Located, Routing, RoutingFault, RoutingSetup

logger = logging.getLogger(__name__)


class WayOutcome(enum.StrEnum):
    """The outcome of trying one address."""

    REACHED = "reached"  # the peer answered there, and proved its identity
    ANOTHER = "another peer"
    FAILED = "failed"
    UNTRIED = "untried"  # through a relay, which only a connection can test


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One address of a peer; `told_by` is the peer that gave it, None if its own peer signed it."""

    address: Multiaddr
    outcome: WayOutcome
    detail: str = ""
    told_by: PeerId | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The result of a search for a peer, with its claimed addresses."""

    peer: PeerId
    connected: bool
    signed: bool
    ways: tuple[Way, ...]

    @property
    def addresses(self) -> tuple[Multiaddr, ...]:
        """The addresses that may be dialled: those at which it answered, then those untried."""
        good = (WayOutcome.REACHED, WayOutcome.UNTRIED)
        return tuple(w.address for outcome in good for w in self.ways if w.outcome is outcome)

    def as_json(self) -> dict[str, Any]:
        """Return it for output."""
        return {
            "peer": str(self.peer),
            "connected": self.connected,
            "signed": self.signed,
            "addresses": [
                {
                    "address": str(way.address),
                    "outcome": way.outcome.value,
                    "detail": way.detail,
                    "told_by": None if way.told_by is None else str(way.told_by),
                }
                for way in self.ways
            ],
        }


class PeerFinder:
    """Searches for peers, and for providers of a program, on behalf of one node."""

    def __init__(
        self,
        backend: Transport,
        settings: RoutingSection,
        *,
        network: PeerId | None,
        authorizer: Authorizer | None,
        on_fault: Callable[[PeerId, RoutingFault], None],
        program: bytes = b"",
    ) -> None:
        """Create it; nothing is asked before `run`.

        `program` is the SHA-256 of this node's program. Raises NotSupportedError if the transport
        has no DHT and the settings want one.
        """
        self._backend = backend
        self._authorizer = authorizer
        self._on_fault = on_fault
        self._budget = DialBudget()
        self._counts: Counter[str] = Counter()
        self._wanted, self._asked = trio.open_memory_channel[PeerId](MAX_FIND_WAITING)
        # The times of searches for the peers of messages, the oldest first.
        self._missed_s: OrderedDict[PeerId, float] = OrderedDict()
        self._discovery: Discovery | None = None
        self.routing: Routing | None = None
        if settings.dht != "off":
            self.routing = backend.routing(
                RoutingSetup(
                    network=network,
                    serves=settings.dht == "server",
                    admits=self._admits,
                    may_dial=self._may_dial,
                    on_fault=on_fault,
                )
            )
            if settings.provide and program and settings.dht == "server":
                self.routing.provide([program])

    async def run(self, discovery: Discovery | None = None) -> None:
        """Route until cancelled; `discovery` dials the peers that messages are for."""
        self._discovery = discovery
        if self.routing is None:
            return
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._route, self.routing)
            for _ in range(MAX_FINDS):
                nursery.start_soon(self._look)

    async def _route(self, routing: Routing) -> None:
        try:
            await routing.run()
        except Exception:
            # The node continues without a DHT.
            self._counts["failed"] += 1
            logger.exception("the DHT has failed; this node goes on without")

    # -- finding -----------------------------------------------------------------------------

    async def find(self, peer: PeerId) -> Found:
        """Find a peer, and try its claimed addresses.

        Raises NotFound, and NotSupportedError if the DHT is off.
        """
        info = self._backend.peer_info(peer)
        if info is not None:
            ways = (Way(address=info.address, outcome=WayOutcome.REACHED),)
            return Found(peer=peer, connected=True, signed=False, ways=ways)
        return await self._tried(await self.locate(peer))

    async def locate(self, peer: PeerId) -> Located:
        """Return the addresses that others claim for a peer, untried. Raises as `find`."""
        return await self._router().find_peer(peer)

    async def find_providers(self, sha256: bytes) -> list[Located]:
        """Return the peers that claim to have a program, nearest first; raises as `find`."""
        return await self._router().find_providers(sha256)

    def _router(self) -> Routing:
        if self.routing is None:
            raise NotSupportedError(
                "this node asks no DHT: set routing.dht to client or server, and restart it"
            )
        return self.routing

    async def _tried(self, located: Located) -> Found:
        ways: dict[Multiaddr, Way] = {}

        async def look(address: Multiaddr) -> None:
            told_by = located.told_by.get(address)
            way = partial(Way, address=address, told_by=told_by)
            if is_relayed(address):
                ways[address] = way(outcome=WayOutcome.UNTRIED, detail="it goes through a relay")
                return
            try:
                await self._backend.probe(address, located.peer)
                ways[address] = way(outcome=WayOutcome.REACHED)
            except DialError as error:
                another = OTHER_KEY in str(error)
                outcome = WayOutcome.ANOTHER if another else WayOutcome.FAILED
                ways[address] = way(outcome=outcome, detail=str(error))
                if another:
                    self._misled(located.peer, told_by)

        tried = located.addresses[:MAX_ROUTED_ADDRESSES]
        async with trio.open_nursery() as nursery:
            for address in tried:
                nursery.start_soon(look, address)
        return Found(
            peer=located.peer,
            connected=False,
            signed=located.signed,
            ways=tuple(ways[address] for address in tried),
        )

    def _misled(self, peer: PeerId, told_by: PeerId | None) -> None:
        self._counts["misled"] += 1
        logger.info("somebody else answers", extra={"peer": str(peer), "said_by": str(told_by)})
        if told_by is not None:
            self._on_fault(told_by, RoutingFault.MISLED)

    # -- for the program ---------------------------------------------------------------------

    def observe(self, step: steps.Step) -> None:
        """Search for the peer of a message if it has no address."""
        if isinstance(step, steps.PeerResolveFailed) and self.routing is not None:
            now_s = trio.current_time()
            while self._missed_s and next(iter(self._missed_s.values())) + FOUND_EVERY_S <= now_s:
                self._missed_s.popitem(last=False)
            if step.peer in self._missed_s or len(self._missed_s) >= MAX_LEARNED:
                return
            try:
                self._wanted.send_nowait(step.peer)
            except trio.WouldBlock:
                return
            self._missed_s[step.peer] = now_s

    async def _look(self) -> None:
        while True:
            peer = await self._asked.receive()
            try:
                located = await self.find(peer)
            except BbnodeError as error:
                logger.info("not found", extra={"peer": str(peer), "reason": str(error)})
                continue
            if located.addresses and self._discovery is not None and not located.connected:
                self._counts["resolved"] += 1
                self._discovery.found(peer, located.addresses)

    # -- policy ------------------------------------------------------------------------------

    def _admits(self, peer: PeerId) -> bool:
        if self._authorizer is None:
            return True
        return self._authorizer.connection(peer, Direction.OUTBOUND).allowed

    def _may_dial(self, peer: PeerId) -> bool:
        return self._budget.take(HintSource.TOLD, peer, trio.current_time())

    # -- looking at it -----------------------------------------------------------------------

    def counters(self) -> dict[str, int]:
        """Return the counters by dotted name; nothing if the DHT is off."""
        if self.routing is None:
            return {}
        own = {name: self._counts[name] for name in ("misled", "resolved", "failed")}
        return {f"routing.{name}": n for name, n in {**self.routing.counters(), **own}.items()}

    def as_json(self) -> Mapping[str, Any]:
        """Return the state of the DHT; nothing if it is off."""
        return {} if self.routing is None else self.routing.as_json()
