"""The states of a link, and who a link answers to.

Rule: every move of a link is a row of LINK_MOVES; an event that has no row in a state leaves
the state as it is.

Taking leave: a side that will send nothing more ends each of its lanes with BYE; the other
side answers with BYE_ACK when it has read up to there, and ends its own lanes likewise. When
everything is acknowledged both ways the connection is cut, so that no envelope is lost: a
connection that is closed with data unread takes that data with it.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Protocol

from bbnode.transport.framing import Lane
from bbnode.transport.outbound import Outbound

if TYPE_CHECKING:
    from bbnode.transport.link import Link


class LinkState(enum.Enum):
    """Where a link is in its life."""

    OPENING = "opening"
    UP = "up"
    RETIRING = "retiring"
    CLOSED = "closed"


class LinkEvent(enum.Enum):
    """What moves a link from one state to the next."""

    HELLO = "hello"
    RETIRE = "retire"
    DOOM = "doom"


LINK_MOVES: Final[dict[tuple[LinkState, LinkEvent], LinkState]] = {
    (LinkState.OPENING, LinkEvent.HELLO): LinkState.UP,
    # Nothing was exchanged yet that could be lost.
    (LinkState.OPENING, LinkEvent.RETIRE): LinkState.CLOSED,
    (LinkState.OPENING, LinkEvent.DOOM): LinkState.CLOSED,
    (LinkState.UP, LinkEvent.RETIRE): LinkState.RETIRING,
    (LinkState.UP, LinkEvent.DOOM): LinkState.CLOSED,
    (LinkState.RETIRING, LinkEvent.DOOM): LinkState.CLOSED,
}


@dataclass(slots=True)
class Farewell:
    """How far the two sides are with taking leave."""

    # Lanes that the peer has ended, and those of them we owe it a BYE_ACK for.
    bye_in: set[Lane] = field(default_factory=set)
    acks_due: list[Lane] = field(default_factory=list)
    # Lanes that we have ended, and those the peer has read to their end.
    bye_out: set[Lane] = field(default_factory=set)
    acked: set[Lane] = field(default_factory=set)

    @property
    def complete(self) -> bool:
        """Whether nothing is under way in either direction any more."""
        return self.bye_in == self.acked == set(Lane) and not self.acks_due


@dataclass(slots=True)
class Pulse:
    """The pings of a link: one under way at most, and one answer owed at most."""

    due: bool = False
    number: int = 0
    sent_at: float | None = None
    pong_due: int | None = None
    rtt_s: float | None = None

    def start(self, now: float) -> int:
        """A ping goes out: its number."""
        self.due = False
        self.number += 1
        self.sent_at = now
        return self.number

    def answered(self, number: int, now: float) -> None:
        """A pong has come; any but that of the last ping is of no interest."""
        if number == self.number and self.sent_at is not None:
            self.rtt_s = now - self.sent_at
            self.sent_at = None


class LinkOwner(Protocol):
    """Who decides about peers; the link asks it and tells it. None of these blocks long."""

    def link_up(self, link: Link) -> None:
        """The peer's hello has come and is in `link.hello`."""
        ...

    def link_closed(self, link: Link, reason: str) -> None:
        """The connection is gone."""
        ...

    def hello_refused(self, link: Link, reason: str) -> None:
        """The peer said no acceptable hello; the link closes."""
        ...

    def violation(self, link: Link, reason: str) -> None:
        """The peer broke the protocol after its hello; the link closes."""
        ...

    async def deliver(self, link: Link, data: bytes) -> bool:
        """Pass an envelope on; False when the driver does not keep up."""
        ...

    def take(self, link: Link, lane: Lane) -> Outbound | None:
        """The next envelope that this link should write, if any."""
        ...

    def written(self, link: Link, item: Outbound) -> None:
        """An envelope that was taken is with the operating system."""
        ...

    def give_back(self, link: Link, item: Outbound) -> None:
        """An envelope that was taken was not written."""
        ...
