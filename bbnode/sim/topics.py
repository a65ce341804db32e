"""Topics in a simulated network: each message passes from peer to peer along their connections.

Rule: as in GossipSub, who follows a topic passes its messages on, each once; who does not drops
them. On a link a message is told from an envelope by its first byte, which no envelope begins with.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import msgpack

from bbnode.engine.newest import Newest
from bbnode.ir.peer import PeerId

MARK: Final = b"\0"
# Messages that a node remembers, so that one which comes by two ways counts once.
_REMEMBERED: Final = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class SimMessage:
    """A message on its way; `publisher` and `number` name it."""

    publisher: PeerId
    number: int
    topic: str
    payload: bytes

    def encode(self) -> bytes:
        """Return its bytes on a link."""
        fields = (self.publisher.to_bytes(), self.number, self.topic, self.payload)
        return MARK + bytes(msgpack.packb(fields))


def decode(data: bytes) -> SimMessage:
    """Return the message in these bytes."""
    publisher, number, topic, payload = msgpack.unpackb(data[len(MARK) :])
    return SimMessage(
        publisher=PeerId.from_bytes(publisher), number=number, topic=topic, payload=payload
    )


class SimTopics:
    """Topics of one node, lost with a crash but for the number of messages that it published."""

    __slots__ = ("follows", "heard", "published")

    def __init__(self, published: int = 0) -> None:
        self.published = published
        self.follows: set[str] = set()
        self.heard: Newest[tuple[PeerId, int], None] = Newest(_REMEMBERED)
