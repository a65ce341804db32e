"""Topics in a simulated network: messages are forwarded from peer to peer along connections.

Rule: as in GossipSub, followers of a topic forward each of its messages once; others drop them. A
message is distinguished from an envelope by its first byte, with which no envelope begins.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import msgpack

from bbnode.engine.newest import Newest
from bbnode.ir.peer import PeerId

MARK: Final = b"\0"
# Messages that a node remembers, so that one that arrives on two paths counts once.
_REMEMBERED: Final = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class SimMessage:
    """A message in flight; `publisher` and `number` identify it."""

    publisher: PeerId
    number: int
    topic: str
    payload: bytes

    def encode(self) -> bytes:
        """Encode it for a link."""
        fields = (self.publisher.to_bytes(), self.number, self.topic, self.payload)
        return MARK + bytes(msgpack.packb(fields))


def decode(data: bytes) -> SimMessage:
    """Return the message in these bytes."""
    publisher, number, topic, payload = msgpack.unpackb(data[len(MARK) :])
    return SimMessage(
        publisher=PeerId.from_bytes(publisher), number=number, topic=topic, payload=payload
    )


class SimTopics:
    """The topics of one node; a crash loses all but the number of messages that it published."""

    __slots__ = ("follows", "heard", "published")

    def __init__(self, published: int = 0) -> None:
        self.published = published
        self.follows: set[str] = set()
        self.heard: Newest[tuple[PeerId, int], None] = Newest(_REMEMBERED)
