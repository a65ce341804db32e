"""Discovery of peers: bootstrap list, registries, the peers' own announcements, the local network.

Rule: one task decides which peers are dialled, by the plans of `dial_plan`, and passes only changes
to the transport; dials that others requested are not touched. It learns of everything through the
node's steps, except for goodbyes, which the transport reports. An address is a hint: the handshake
has to prove the peer, and the policy has to admit it.
"""

from __future__ import annotations

import enum
import logging
import math
from collections import Counter, OrderedDict
from collections.abc import Sequence
from typing import Any, TypeVar

import trio
from multiaddr import Multiaddr

from bbnode.daemon.config import DiscoverySection, NetworkSection
from bbnode.daemon.network.dial_plan import (
    DIAL_RATES,
    BootstrapDialPlan,
    DialBudget,
    HintSource,
    LearnedDialPlan,
    TurnedAway,
)
from bbnode.engine import Node, steps
from bbnode.ir.address import parse_address, peer_of_address
from bbnode.ir.caps import MAX_BOOK_PEERS, MAX_HINTS
from bbnode.ir.errors import BbnodeError
from bbnode.ir.peer import PeerId
from bbnode.transport.base import (
    Authorizer,
    ConnectionClosed,
    ConnectionOpened,
    Direction,
    Transport,
    TransportEvent,
    turned_away,
)
from bbnode.transport.hints import dialable

logger = logging.getLogger(__name__)


# A peer that closes the connection later than this had admitted us.
ADMITTED_S = 5.0

T = TypeVar("T")


def remedy(refusal: str) -> str:
    """Return the remedy for a peer that does not admit this node."""
    if "not_a_member" in refusal:
        return "ask its owner for a new ticket, and give it to `bbnode join`"
    return "ask its owner (`bbnode peers --why` there says which rule it is)"


def _remember(known: OrderedDict[PeerId, T], peer: PeerId, value: T) -> None:
    """Store a value of a peer; the newest MAX_BOOK_PEERS are kept."""
    known.pop(peer, None)
    known[peer] = value
    if len(known) > MAX_BOOK_PEERS:
        known.popitem(last=False)


class Origin(enum.Enum):
    """The way in which a peer was found, or found us."""

    BOOTSTRAP = "bootstrap"  # or a ticket: `bbnode join` writes its peers to the list
    REGISTRY = (
        "registry"  # the program named it, by a registry or another writer of the address book
    )
    INTRODUCED = "introduced"  # a bootstrap peer introduced it
    ROUTED = "routed"  # other peers were asked for it, and named it
    MDNS = "mdns"
    INBOUND = "inbound"  # it dialled us
    ASKED = "asked"  # a user had it dialled, as by `bbnode peers connect`


class Discovery:
    """Finds peers for one node and has the transport dial them."""

    def __init__(
        self,
        node: Node,
        backend: Transport,
        network: NetworkSection,
        settings: DiscoverySection,
        *,
        network_id: str = "",
        authorizer: Authorizer | None = None,
    ) -> None:
        """Create the discovery of a node; nothing is dialled before `run`.

        On the local network it looks for peers of the same private network ("": none) that run the
        same program, in any version. Peers that `authorizer` denies are ignored.
        """
        self._node = node
        self._backend = backend
        self._settings = settings
        self._network_id = network_id
        self._authorizer = authorizer
        self._wake = trio.Event()
        self._up: set[PeerId] = set()
        # Peers that said goodbye, or that we disconnected, before their PeerDown.
        self._left: set[PeerId] = set()
        self._kept: dict[PeerId, tuple[Multiaddr, ...]] = {}
        self._learned = LearnedDialPlan()
        self._turned_away = TurnedAway()
        # The time since which each connected peer is connected.
        self._opened_s: dict[PeerId, float] = {}
        self._budget = DialBudget()
        # The origins of peers' connections; and the peers that have exchanged messages with the
        # program.
        self._seen: OrderedDict[PeerId, Multiaddr] = OrderedDict()
        self._exchanged: OrderedDict[PeerId, None] = OrderedDict()
        self._origins: OrderedDict[PeerId, Origin] = OrderedDict()
        self._counts: Counter[str] = Counter()
        self._nearby: set[PeerId] = set()
        # The time since which no peer is connected, while there are bootstrap peers.
        self._alone_since_s: float | None = None
        self._scope = trio.CancelScope()
        self._running = False
        self._bootstrap: dict[PeerId, tuple[Multiaddr, ...]] = {}
        self._plan = BootstrapDialPlan(())
        self.configure(network, settings)

    # -- what is learned --------------------------------------------------------------------

    def configure(self, network: NetworkSection, settings: DiscoverySection) -> None:
        """Set the bootstrap peers, and the number of them that is enough."""
        by_peer: dict[PeerId, list[Multiaddr]] = {}
        for text in network.bootstrap:
            address = parse_address(text)
            by_peer.setdefault(peer_of_address(address), []).append(address)
        by_peer.pop(self._node.peer_id, None)
        self._bootstrap = {peer: tuple(addresses) for peer, addresses in by_peer.items()}
        self._plan = BootstrapDialPlan(self._bootstrap, settings.min_peers)
        for peer in self._bootstrap:
            self.note(peer, Origin.BOOTSTRAP)
        self._wake.set()

    def note(self, peer: PeerId, origin: Origin) -> None:
        """Remember how a peer was found; the first origin stays."""
        self._origins.setdefault(peer, origin)
        if len(self._origins) > MAX_BOOK_PEERS:
            self._origins.popitem(last=False)

    def heard(self, event: TransportEvent) -> None:
        """Handle an event of the transport, before the node does."""
        match event:
            case ConnectionOpened(peer=peer, address=address):
                self._left.discard(peer)
                _remember(self._seen, peer, address)
                self._opened_s[peer] = trio.current_time()
            case ConnectionClosed(peer=peer, goodbye=goodbye, reason=reason):
                opened_s = self._opened_s.pop(peer, math.inf)
                if goodbye:
                    self._left.add(peer)
                if peer in self._bootstrap:
                    self._closed(peer, turned_away(reason), opened_s)

    def _closed(self, peer: PeerId, refusal: str, opened_s: float) -> None:
        """Pause dialling a bootstrap peer that does not admit this node, and report it once."""
        now_s = trio.current_time()
        if now_s - opened_s > ADMITTED_S:
            self._turned_away.forgive(peer)
        if not refusal:
            return
        self._wake.set()
        if self._turned_away.note(peer, refusal, now_s):
            self._counts["discovery.turned_away"] += 1
            logger.warning(
                "a bootstrap peer does not admit this node",
                extra={"peer": str(peer), "reason": refusal, "remedy": remedy(refusal)},
            )

    def forgive(self) -> None:
        """Dial all bootstrap peers again, after a change of this node's credentials or lists."""
        self._turned_away.forgive()
        self._wake.set()

    def refused_by(self) -> str:
        """Return the bootstrap peers that do not admit this node, why, and the remedy; else ""."""
        refused = {p: why for p, why in self._turned_away.reasons().items() if p not in self._up}
        if not refused:
            return ""
        peer, why = next(iter(refused.items()))
        more = f" (and {len(refused) - 1} more)" if len(refused) > 1 else ""
        return f"{peer}{more} does not admit this node: {why}; {remedy(why)}"

    def reach(self, step: steps.SendEnvelope) -> bool:
        """Dial the peer of a send, if its address is known; return True if it is being dialled."""
        if not self._running:
            return False
        self._missed(step.peer, step.addresses)
        self._turn(trio.current_time())
        return step.peer in self._kept

    def miss(self, peer: PeerId) -> None:
        """Dial a peer that an op waits for, if its address is known."""
        if peer not in self._up:
            self._missed(peer, self._node.peer_standing(peer).addresses)

    def is_bootstrap(self, peer: PeerId) -> bool:
        """Return True for a peer of the bootstrap list."""
        return peer in self._bootstrap

    def knows_well(self, peer: PeerId) -> bool:
        """Return True for a member of our private network, or a peer the program dealt with."""
        return bool(self._network_id) or peer in self._exchanged

    def introduced(self, peer: PeerId, addresses: Sequence[Multiaddr]) -> bool:
        """Dial a peer that a bootstrap peer introduced; as `found`."""
        return self._told_of(peer, addresses, Origin.INTRODUCED)

    def found(self, peer: PeerId, addresses: Sequence[Multiaddr]) -> bool:
        """Dial a peer that was searched for.

        Returns False if it is connected, dialled already, or not admitted, and beyond the rate.
        """
        return self._told_of(peer, addresses, Origin.ROUTED)

    def _told_of(self, peer: PeerId, addresses: Sequence[Multiaddr], origin: Origin) -> bool:
        if peer in self._up or peer in self._bootstrap or not self._admits(peer):
            return False
        now_s = trio.current_time()
        if peer not in self._learned and not self._budget.take(HintSource.TOLD, peer, now_s):
            self._counts["discovery.over_budget"] += 1
            return False
        self.note(peer, origin)
        if not self._learned.want(peer, addresses, now_s):
            return False
        self._counts["discovery.learned"] += 1
        self._wake.set()
        return True

    def observe(self, step: steps.Step) -> None:
        """Handle a step of the node. Called for every step: the frequent ones come first."""
        match step:
            case steps.SendEnvelope(peer=peer):
                if peer not in self._up:
                    self._missed(peer, step.addresses)
                elif peer not in self._exchanged:
                    _remember(self._exchanged, peer, None)
            case steps.PeerUp(peer=peer):
                self._up.add(peer)
                if peer not in self._origins:
                    self.note(peer, self._who_dialled(peer))
                self._wake.set()
            case steps.PeerDown(peer=peer):
                self._up.discard(peer)
                if peer in self._left:
                    self._left.discard(peer)
                    self._learned.drop(peer)
                else:
                    self._missed(peer, self._node.peer_standing(peer).addresses)
                self._wake.set()
            case steps.PeerResolveFailed():
                self._counts["discovery.unresolved"] += 1

    def _missed(self, peer: PeerId, addresses: Sequence[Multiaddr]) -> None:
        """Dial a wanted peer that is not connected, at its claimed addresses."""
        if not self._settings.learn or not addresses or peer in self._bootstrap:
            return
        if not self._admits(peer):
            return
        now_s, word = trio.current_time(), self._hint_source(peer)
        if word is HintSource.TOLD:
            addresses = addresses[:MAX_HINTS]
        else:
            addresses = dialable(addresses, seen=self._seen[peer], good=word is HintSource.OWN)
        if not addresses:
            self._counts["discovery.refused_hints"] += 1
            return
        if peer not in self._learned and not self._budget.take(word, peer, now_s):
            self._counts["discovery.over_budget"] += 1
            return
        known = peer in self._origins
        self.note(peer, Origin.REGISTRY)
        wait_s = self._node.peer_standing(peer).retry_in_ns / 1e9
        give_up_s = DIAL_RATES[word].give_up_s
        if self._learned.want(peer, addresses, now_s, wait_s=wait_s, give_up_s=give_up_s):
            self._counts["discovery.redialled" if known else "discovery.learned"] += 1
            self._wake.set()

    def _hint_source(self, peer: PeerId) -> HintSource:
        """Return the source of a peer's addresses; OWN only for a peer that was connected."""
        if peer not in self._seen:
            return HintSource.TOLD
        return HintSource.OWN if self.knows_well(peer) else HintSource.STRANGER

    def _who_dialled(self, peer: PeerId) -> Origin:
        """Return the origin of a newly seen peer, by the side that dialled."""
        info = self._backend.peer_info(peer)
        dialled = info is not None and info.direction is Direction.OUTBOUND
        return Origin.ASKED if dialled else Origin.INBOUND

    def _admits(self, peer: PeerId) -> bool:
        if self._node.peer_standing(peer).denied is not None:
            return False
        if self._authorizer is None:
            return True
        return self._authorizer.connection(peer, Direction.OUTBOUND).allowed

    # -- running -----------------------------------------------------------------------------

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Dial and redial until `stop`; the transport has to run already."""
        async with trio.open_nursery() as nursery:
            self._scope = nursery.cancel_scope
            if self._settings.mdns:
                nursery.start_soon(self._run_mdns)
            self._turn(trio.current_time())
            self._running = True
            task_status.started()
            while True:
                self._wake = trio.Event()
                with trio.move_on_at(self._turn(trio.current_time())):
                    await self._wake.wait()

    def stop(self) -> None:
        """Stop dialling and say goodbye on the local network; `run` returns."""
        self._running = False
        self._scope.cancel()

    def _turn(self, now_s: float) -> float:
        """Pass changes to the transport; return when to call again at the latest."""
        if self._up or not self._bootstrap:
            self._alone_since_s = None
        elif self._alone_since_s is None:
            self._alone_since_s = now_s
        wanted = {
            peer: self._bootstrap[peer]
            for peer in self._plan.advance(self._up, now_s)
            if peer in self._up or not self._turned_away.stays_away(peer, now_s)
        }
        for peer, addresses in self._learned.advance(self._up, now_s).items():
            wanted.setdefault(peer, addresses)
        for peer in self._kept.keys() - wanted.keys():
            del self._kept[peer]
            self._backend.forget(peer)
        changed = [peer for peer in wanted if self._kept.get(peer) != wanted[peer]]
        if changed:
            # Another part keeps it connected, so we must not drop it later.
            others = {each.peer for each in self._backend.wanted()} - self._kept.keys()
            for peer in changed:
                if peer not in others:
                    self._keep(peer, wanted[peer])
        return min(
            self._plan.next_s(), self._learned.next_s(now_s), self._turned_away.next_s(now_s)
        )

    def _keep(self, peer: PeerId, addresses: tuple[Multiaddr, ...]) -> None:
        self._kept[peer] = addresses
        try:
            self._backend.keep_connected(peer, addresses)
        except BbnodeError as error:
            # This transport does not dial such an address; other peers are not affected.
            self._counts["discovery.refused"] += 1
            logger.warning("not dialled", extra={"peer": str(peer), "reason": str(error)})

    async def _run_mdns(self) -> None:
        # zeroconf takes a tenth of a second to import, and few nodes use it.
        from bbnode.transport.mdns import Mdns, MdnsUnavailable, network_digest

        mdns = Mdns(
            self._node.peer_id,
            digest=network_digest(self._network_id, self._node.program_name),
            found=self._found_nearby,
            lost=self._lost_nearby,
            interfaces=self._settings.mdns_interfaces,
        )
        try:
            await mdns.run(self._backend.listen_addresses())
        except MdnsUnavailable as error:
            # The other ways still work.
            logger.warning("no mDNS", extra={"reason": str(error)})

    def _found_nearby(self, peer: PeerId, addresses: tuple[Multiaddr, ...]) -> None:
        logger.info("found nearby", extra={"peer": str(peer)})
        self._nearby.add(peer)
        self.note(peer, Origin.MDNS)
        if self._admits(peer):
            self._learned.want(peer, addresses, trio.current_time(), until_dropped=True)
            self._wake.set()

    def _lost_nearby(self, peer: PeerId) -> None:
        self._nearby.discard(peer)
        self._learned.drop(peer)
        self._wake.set()

    # -- looking at it -----------------------------------------------------------------------

    def counters(self) -> dict[str, int]:
        """Return the counters by dotted name; all names are always there."""
        names = (
            *("learned", "redialled", "unresolved", "refused", "refused_hints", "over_budget"),
            "turned_away",
        )
        return {
            **{f"discovery.{name}": self._counts[f"discovery.{name}"] for name in names},
            "discovery.dialling": len(self._learned),
            "discovery.nearby": len(self._nearby),
        }

    @property
    def alone_since_s(self) -> float | None:
        """Return since when no peer is connected (trio's time); None without bootstrap peers."""
        return self._alone_since_s

    def origin(self, peer: PeerId) -> Origin | None:
        """Return the way a peer was found; None if it is unknown."""
        return self._origins.get(peer)

    def as_json(self) -> dict[str, Any]:
        """Return the connected and the wanted peers, and the way each was found."""
        shown = sorted(self._up | self._kept.keys() | self._bootstrap.keys())
        return {
            "enough": self._plan.enough,
            "peers": [
                {
                    "peer": str(peer),
                    "found_by": None if (o := self._origins.get(peer)) is None else o.value,
                    "connected": peer in self._up,
                    "dialled": peer in self._kept,
                    "bootstrap": None if (s := self._plan.stand(peer)) is None else s.value,
                }
                for peer in shown
            ],
        }
