"""The states of a link, and who a link answers to.

Rule: every move of a link is a row of LINK_MOVES; an event that has no row in a state leaves
the state as it is.

Taking leave: a side that will send nothing more ends each of its lanes with BYE; the other
side answers with BYE_ACK when it has read up to there, and ends its own lanes likewise. When
everything is acknowledged both ways the connection is cut: one that is closed with data unread
takes that data with it, and the acknowledgements among it.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Protocol

from bbnode.transport.links.framing import Lane, Resume

if TYPE_CHECKING:
    from bbnode.transport.base import Hello, Violation
    from bbnode.transport.links.link import Link
    from bbnode.transport.links.receiver import Inflow


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


@dataclass(slots=True)
class Progress:
    """Whether something that should move still does. Only time in which it should counts."""

    seen: int = -1
    since: float = 0.0

    def stalled(self, *, due: bool, value: int, now: float, limit_s: float) -> bool:
        """True when `value` has not changed for `limit_s` seconds in which it was due to."""
        if not due or value != self.seen:
            self.seen, self.since = value, now
            return False
        return now - self.since >= limit_s


class LinkOwner(Protocol):
    """Who decides about peers; the link asks it and tells it. None of these blocks."""

    def admit_hello(self, link: Link, hello: Hello) -> str:
        """Why a peer with this hello is not welcome; empty when it is."""
        ...

    def link_up(self, link: Link) -> None:
        """The peer's hello has come and is in `link.hello`."""
        ...

    def link_closed(self, link: Link, reason: str) -> None:
        """The connection is gone."""
        ...

    def hello_refused(self, link: Link, reason: str) -> None:
        """The peer said no acceptable hello; the link closes."""
        ...

    def violation(self, link: Link, reason: str, kind: Violation) -> None:
        """The peer broke the protocol after its hello; the link closes."""
        ...

    def inflow(self, link: Link) -> Inflow | None:
        """The record that this link feeds, if it is the one to feed it."""
        ...

    def announce(self, link: Link) -> None:
        """What told the peer from where to send is lost: tell it again."""
        ...

    def resumed(self, link: Link, resume: Resume) -> None:
        """The peer says from where to send; raises FrameError."""
        ...

    def sends(self, link: Link) -> bool:
        """Whether the messages to this peer are this link's to write."""
        ...

    def stalled(self, link: Link, reason: str) -> None:
        """The peer takes nothing any more; the link closes."""
        ...
