"""Routing: the search for peers, and for providers of content, through other peers (a DHT).

Rule: a peer's statements about others are hints; only the handshake proves the peer at an address.
A wrong statement is a `RoutingFault` of the peer that made it; no fault of one peer ends a search
or anything else.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from multiaddr import Multiaddr

from bbnode.ir.errors import EnvironmentFault, PeerError
from bbnode.ir.peer import PeerId

# The public DHT that all libp2p hosts share; a private network has its own.
OPEN_PREFIX: Final = "/ipfs"
KAD: Final = "/kad/1.0.0"


def dht_protocol(network: PeerId | None) -> str:
    """Return the protocol of a private network's DHT, or of the open one (None)."""
    return (OPEN_PREFIX if network is None else f"/bbnode/{network}") + KAD


class NotFound(EnvironmentFault):
    """No queried peer knows the wanted peer, or a provider of the content."""


class NobodyToAsk(NotFound):
    """No connected peer answers questions about others."""


class RoutingRefused(PeerError):
    """A peer's message about others is refused because of `fault`."""

    def __init__(self, fault: RoutingFault, message: str) -> None:
        super().__init__(message)
        self.fault = fault


class RoutingFault(enum.StrEnum):
    """A fault of a peer; the value is shown to users."""

    # Bytes that are no valid message, or an answer to another question.
    MALFORMED = "malformed"
    # A record that was not signed by the peer it names, or that was changed.
    FORGED = "forged"
    # Addresses that name another peer, or a provider that is not the sender.
    CONTRADICTION = "contradiction"
    # More peers, messages or provider records than it may send.
    FLOOD = "flood"
    # It gave an address where another peer answers.
    MISLED = "misled"


@dataclass(frozen=True, slots=True, kw_only=True)
class Located:
    """The addresses of a peer, according to others.

    `signed` is True if the peer itself has signed the addresses; `told_by` maps an address to the
    peer that gave it.
    """

    peer: PeerId
    addresses: tuple[Multiaddr, ...]
    signed: bool
    told_by: Mapping[Multiaddr, PeerId]


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingSetup:
    """The parameters of a node's routing, for its transport.

    Args:
        network: the private network, which has its own DHT; None for the open one.
        serves: True to answer others and keep their records; False to query only.
        admits: returns False for peers that must not be queried, answered or mentioned.
        may_dial: charges the dial of one more peer learnt from others; False if too many.
        on_fault: called with a peer and its fault.
    """

    network: PeerId | None
    serves: bool
    admits: Callable[[PeerId], bool]
    may_dial: Callable[[PeerId], bool]
    on_fault: Callable[[PeerId, RoutingFault], None]


class Routing(ABC):
    """Queries other peers for addresses and providers, and answers their queries."""

    @abstractmethod
    async def run(self) -> None:
        """Maintain the routing table and announce the provided keys, until cancelled."""

    @abstractmethod
    async def find_peer(self, peer: PeerId) -> Located:
        """Return the addresses of a peer according to others; raises NotFound."""

    @abstractmethod
    async def find_providers(self, key: bytes) -> list[Located]:
        """Return the providers of a key (a SHA-256, 32 bytes), nearest first; raises NotFound."""

    @abstractmethod
    def provide(self, keys: Sequence[bytes]) -> None:
        """Announce from now on that this node provides these keys, and no others."""

    @abstractmethod
    def counters(self) -> dict[str, int]:
        """Return counters and gauges by name; the set of names is fixed."""

    @abstractmethod
    def as_json(self) -> dict[str, Any]:
        """Return the state of the routing, for display."""
