"""Topics: messages for whoever follows a topic, which peers pass on to each other.

Rule: who has published a message is known by its signature, whoever passed it on. It is judged like
an envelope of that peer, and counts against it; what no honest peer passes on counts against the
one that did.
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
    """Return the name under which peers of a network, or of none, know a topic."""
    return f"/bbnode/{OPEN if network is None else network}/{topic}"


class TopicFault(enum.StrEnum):
    """A fault of a peer; the value is what users see."""

    # A message that is none, or of several topics.
    MALFORMED = "malformed"
    # A signature that is not the publisher's, or none.
    FORGED = "forged"
    # A message that was published, and passed on, long ago.
    REPLAYED = "replayed"
    # Larger than MAX_TOPIC_BYTES.
    OVERSIZED = "oversized"
    # Published by somebody who is no member, or is not allowed here.
    NOT_ALLOWED = "not_allowed"
    # More messages, topics or control messages than a peer may send.
    FLOOD = "flood"


class TopicRefused(PeerError):
    """A message is refused: `blamed` did what `fault` says."""

    def __init__(self, fault: TopicFault, blamed: PeerId, message: str) -> None:
        super().__init__(message)
        self.fault = fault
        self.blamed = blamed


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicSetup:
    """The node's part, which a transport needs to carry topics for it.

    Args:
        network: the private network, whose topics are its own; None for an open node.
        credentials: returns this node's credentials, which its messages show in a private network.
        on_fault: called with what a peer did wrong.
    """

    network: PeerId | None = None
    credentials: Callable[[], bytes] = bytes
    on_fault: Callable[[PeerId, TopicFault], None] = lambda _peer, _fault: None


class Topics(ABC):
    """The topics of one node. Calls are for the trio thread and do not block."""

    @abstractmethod
    def follow(self, topic: str, receive: Receive) -> None:
        """Have `receive` called for each message on a topic but this node's own, once each."""

    @abstractmethod
    def leave(self, topic: str) -> None:
        """Hear no more of a topic."""

    @abstractmethod
    def publish(self, topic: str, data: bytes) -> None:
        """Publish up to MAX_TOPIC_BYTES; raises EnvelopeTooLargeError, and QueueFullError."""

    @abstractmethod
    def followers(self, topic: str) -> frozenset[PeerId]:
        """Return the connected peers that follow a topic, and hear what is published there."""
