"""Reports of peers' misconduct to the policy, and of their good conduct.

Rule: the tables map steps and events to offences. A refusal by our own limits, lists or clock is
not an offence, nor is a late or duplicate message.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from multiaddr import Multiaddr

from bbnode import transport as seam
from bbnode.access.conduct import Offence
from bbnode.daemon.access.control import AccessControl
from bbnode.engine import steps
from bbnode.ir.address import peer_of_address
from bbnode.ir.peer import PeerId
from bbnode.transport.routing import RoutingFault
from bbnode.transport.topics import TopicFault

logger = logging.getLogger(__name__)

# Offences by the kind of a WireReceiveFailed; the other kinds are ours (no memory, no budget).
OFFENCE_OF_KIND: Final[Mapping[str, Offence]] = {
    "DecodeFailed": Offence.UNDECODABLE,
    "UnknownSite": Offence.UNKNOWN_SITE,
    "CorrelationMismatch": Offence.UNKNOWN_SITE,
    "TypeMismatch": Offence.TYPE_MISMATCH,
    "ShapeMismatch": Offence.TYPE_MISMATCH,
    "UnknownTypeHash": Offence.TYPE_MISMATCH,
    "SenderNotOfClass": Offence.NOT_ITS_CLASS,
    "TooManyExecutions": Offence.TOO_LARGE,
    "EnvelopeTooLarge": Offence.TOO_LARGE,
}
OFFENCE_OF_VIOLATION: Final[Mapping[seam.Violation, Offence]] = {
    seam.Violation.FRAME: Offence.PROTOCOL,
    seam.Violation.FLOOD: Offence.FLOOD,
    seam.Violation.SLOW: Offence.SLOW,
}
OFFENCE_OF_FAULT: Final[Mapping[RoutingFault, Offence]] = {
    RoutingFault.MALFORMED: Offence.UNDECODABLE,
    RoutingFault.FORGED: Offence.FORGED,
    # Other peers forward records without checking them.
    RoutingFault.CONTRADICTION: Offence.MISLED,
    RoutingFault.FLOOD: Offence.TOO_LARGE,
    RoutingFault.MISLED: Offence.MISLED,
}
OFFENCE_OF_RELAYING: Final[Mapping[seam.RelayFault, Offence]] = {
    seam.RelayFault.MALFORMED: Offence.UNDECODABLE,
    # A clock may be wrong, and it may be ours.
    seam.RelayFault.EXPIRED: Offence.MISLED,
    seam.RelayFault.ENDLESS: Offence.MISLED,
    seam.RelayFault.USELESS: Offence.MISLED,
    seam.RelayFault.ANOTHER_PEER: Offence.MISLED,
    # Ours may be over where theirs is not.
    seam.RelayFault.UNINVITED: Offence.MISLED,
    seam.RelayFault.ADDRESSES: Offence.MISLED,
    seam.RelayFault.SILENT: Offence.SLOW,
    seam.RelayFault.FLOOD: Offence.TOO_LARGE,
}
OFFENCE_ON_TOPIC: Final[Mapping[TopicFault, Offence]] = {
    TopicFault.MALFORMED: Offence.UNDECODABLE,
    TopicFault.FORGED: Offence.FORGED,
    TopicFault.REPLAYED: Offence.FORGED,
    TopicFault.OVERSIZED: Offence.TOO_LARGE,
    # A peer that forwards it may not have heard yet that its publisher was revoked.
    TopicFault.NOT_ALLOWED: Offence.NOT_ITS_CLASS,
    # The excess is dropped, whoever published it; a busy program is no attack.
    TopicFault.FLOOD: Offence.TOO_LARGE,
}


class ConductWatch:
    """Observes the steps and events of a node, and reports offences to its policy."""

    def __init__(
        self,
        access: AccessControl,
        publish: Callable[[Mapping[str, Any]], None],
        bootstrap: Iterable[str] = (),
    ) -> None:
        """Watch one node; the peers of the `bootstrap` addresses are known."""
        self._access = access
        self._publish = publish
        self.know(bootstrap)

    def know(self, bootstrap: Iterable[str]) -> None:
        """Make the peers of these configured addresses known to the policy."""
        for address in bootstrap:
            self._access.policy.conduct.make_known(peer_of_address(Multiaddr(address)))

    def heard(self, event: seam.TransportEvent) -> None:
        """Handle an event of the transport."""
        match event:
            case seam.ProtocolViolation(peer=peer, kind=kind):
                self._note(peer, OFFENCE_OF_VIOLATION[kind])
            case seam.RelayMisused(peer=peer, fault=fault):
                self._note(peer, OFFENCE_OF_RELAYING[fault])
            case seam.HelloRefused(peer=peer, reason=reason):
                # A refusal by the authorizer is not an offence.
                if not reason.startswith(seam.NOT_ALLOWED):
                    self._note(peer, Offence.HELLO)

    def observe(self, step: steps.Step) -> None:
        """Handle a step of the engine."""
        match step:
            case steps.WireReceiveFailed(peer=peer, kind=kind):
                offence = OFFENCE_OF_KIND.get(kind)
                if offence is not None:
                    self._note(peer, offence)
            case steps.Telemetry(name="receive.forged", attributes=attributes):
                self._note(attributes["peer"], Offence.FORGED)
            case steps.Telemetry(name="request.response", attributes=attributes):
                self._access.policy.conduct.make_known(attributes["peer"])

    def misrouted(self, peer: PeerId, fault: RoutingFault) -> None:
        """Handle a fault of a peer in routing, as the one that asked or that answered."""
        self._note(peer, OFFENCE_OF_FAULT[fault])

    def misused_topic(self, peer: PeerId, fault: TopicFault) -> None:
        """Handle a fault of a peer on a topic."""
        self._note(peer, OFFENCE_ON_TOPIC[fault])

    def _note(self, peer: PeerId, offence: Offence) -> None:
        if self._access.offence(peer, offence):
            (decision,) = (d for d in self._access.explain(peer) if d.rule == "conduct")
            logger.warning("peer cut off", extra={"peer": str(peer), "reason": decision.detail})
            self._publish({"type": "peer_cut_off", "peer": str(peer), "reason": decision.detail})
