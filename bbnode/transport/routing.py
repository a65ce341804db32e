"""Routing: finding peers, and who provides a content, by asking other peers (a DHT).

Rule: whatever a peer says of others is a hint, and only the handshake proves who answers where.
What is said wrongly is a `RoutingFault` of the peer that said it; no fault of one peer ends a
search, or anything else.
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

# The DHT that whoever speaks libp2p shares; a private network has its own.
OPEN_PREFIX: Final = "/ipfs"
KAD: Final = "/kad/1.0.0"


def dht_protocol(network: PeerId | None) -> str:
    """Return the protocol of a private network's DHT, or of the open one (None)."""
    return (OPEN_PREFIX if network is None else f"/bbnode/{network}") + KAD


class NotFound(EnvironmentFault):
    """Nobody who was asked knows the peer, or a provider of the content."""


class NobodyToAsk(NotFound):
    """No connected peer answers questions about others."""


class RoutingRefused(PeerError):
    """A peer's message about others is refused; `fault` says why."""

    def __init__(self, fault: RoutingFault, message: str) -> None:
        super().__init__(message)
        self.fault = fault


class RoutingFault(enum.StrEnum):
    """A fault of a peer; the value is what users see."""

    # Bytes that are no such message, or an answer to another question.
    MALFORMED = "malformed"
    # A record that somebody else has signed than whom it names, or that was changed.
    FORGED = "forged"
    # Addresses that name another peer, or a provider that is not the sender.
    CONTRADICTION = "contradiction"
    # More peers, messages or provider records than it may send.
    FLOOD = "flood"
    # Another peer answers at an address that it gave.
    MISLED = "misled"


@dataclass(frozen=True, slots=True, kw_only=True)
class Located:
    """Where a peer is said to be.

    `signed` is True where the peer itself has signed the addresses; `told_by` are the peers that
    gave them, by address.
    """

    peer: PeerId
    addresses: tuple[Multiaddr, ...]
    signed: bool
    told_by: Mapping[Multiaddr, PeerId]


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingSetup:
    """The node's part, which a transport needs to route for it.

    Args:
        network: the private network, whose DHT is its own; None for the open one.
        serves: answers others, and has records of others; else it only asks.
        admits: returns False for peers that are neither asked, answered, nor told of.
        may_dial: takes the cost of dialling one more peer that others told of; False: too many.
        on_fault: called with what a peer did wrong.
    """

    network: PeerId | None
    serves: bool
    admits: Callable[[PeerId], bool]
    may_dial: Callable[[PeerId], bool]
    on_fault: Callable[[PeerId, RoutingFault], None]


class Routing(ABC):
    """Asks other peers where peers are, and who provides what; and answers them."""

    @abstractmethod
    async def run(self) -> None:
        """Keep in touch with others, and tell them what is provided, until cancelled."""

    @abstractmethod
    async def find_peer(self, peer: PeerId) -> Located:
        """Return where others say that a peer is; raises NotFound."""

    @abstractmethod
    async def find_providers(self, key: bytes) -> list[Located]:
        """Return who provides a key (a SHA-256, 32 bytes), the nearest first; raises NotFound."""

    @abstractmethod
    def provide(self, keys: Sequence[bytes]) -> None:
        """Say from now on that this node provides these keys, and no others."""

    @abstractmethod
    def counters(self) -> dict[str, int]:
        """Return counters and gauges by name; all names are always there."""

    @abstractmethod
    def as_json(self) -> dict[str, Any]:
        """Return how it stands, for people."""
