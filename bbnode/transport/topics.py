"""Topics: publish-subscribe messages that peers forward to each other.

Rule: a message's signature proves its publisher, whichever peer forwarded it. The message is judged
like an envelope of the publisher, and counts against it; a message that no honest peer would
forward counts against the forwarder.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeAlias

from bbnode.ir.errors import PeerError
from bbnode.ir.peer import PeerId

OPEN: Final = "open"

# Called with the publisher of a message and its bytes; it does not block.
Receive: TypeAlias = Callable[[PeerId, bytes], object]


def name_on_wire(network: PeerId | None, topic: str) -> str:
    """Return a topic's name on the wire, for a private network or None."""
    return f"/bbnode/{OPEN if network is None else network}/{topic}"


class TopicFault(enum.StrEnum):
    """A fault of a peer; the value is shown to users."""

    # An invalid message, or one of several topics.
    MALFORMED = "malformed"
    # A missing signature, or one that is not the publisher's.
    FORGED = "forged"
    # A message that was published and forwarded long ago.
    REPLAYED = "replayed"
    # Larger than MAX_TOPIC_BYTES.
    OVERSIZED = "oversized"
    # A publisher that is no member, or is not allowed here.
    NOT_ALLOWED = "not_allowed"
    # More messages, topics or control messages than a peer may send.
    FLOOD = "flood"


class TopicRefused(PeerError):
    """A message is refused because of `fault`, which `blamed` committed."""

    def __init__(self, fault: TopicFault, blamed: PeerId, message: str) -> None:
        super().__init__(message)
        self.fault = fault
        self.blamed = blamed


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicSetup:
    """The parameters of a node's topics, for its transport.

    Args:
        network: the private network, which has its own topics; None for an open node.
        credentials: returns this node's credentials, for its messages in a private network.
        on_fault: called with a peer and its fault.
    """

    network: PeerId | None = None
    credentials: Callable[[], bytes] = bytes
    on_fault: Callable[[PeerId, TopicFault], None] = lambda _peer, _fault: None


class Topics(ABC):
    """The topics of one node. Calls are for the trio thread and do not block."""

    @abstractmethod
    def follow(self, topic: str, receive: Receive) -> None:
        """Call `receive` once for each message on a topic, except for this node's own."""

    @abstractmethod
    def leave(self, topic: str) -> None:
        """Stop following a topic."""

    @abstractmethod
    def publish(self, topic: str, data: bytes) -> None:
        """Publish up to MAX_TOPIC_BYTES; raises EnvelopeTooLargeError or QueueFullError."""

    @abstractmethod
    def followers(self, topic: str) -> frozenset[PeerId]:
        """Return the connected peers that follow a topic."""
