"""Actions that a component's method may ask for: sends, timers and addresses, as plain data."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

from multiaddr import Multiaddr
from multiaddr.exceptions import Error as MultiaddrError

from bbnode.components.contracts import ComponentError
from bbnode.ir import ids
from bbnode.ir.address import component_suffix
from bbnode.ir.peer import PeerId


@dataclass(frozen=True, slots=True, kw_only=True)
class SendMessage:
    """Send a message to a peer's component; with a tag, a request."""

    peer: PeerId
    suffix: bytes
    payload: bytes
    wire_req_id: int
    tag: str | None = None
    deadline_ns: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SetTimer:
    """Arm a timer of the component."""

    key: str
    after_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelTimer:
    """Disarm a timer of the component."""

    key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnAddresses:
    """Enter addresses of a peer."""

    peer: PeerId
    addresses: tuple[Multiaddr, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishOnTopic:
    """Publish a message on a topic."""

    topic: str
    payload: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Follow:
    """Have the component hear what is published on a topic, or hear it no more."""

    topic: str
    on: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishEvent:
    """Publish an event of the program on the bus."""

    kind: int


Action: TypeAlias = (
    SendMessage | SetTimer | CancelTimer | LearnAddresses | PublishOnTopic | Follow | PublishEvent
)


# Suffixes that the components of one process ask for: those of its programs' slots.
@lru_cache(1024)
def suffix_of(slot: str, op: str) -> bytes:
    """Return the address of an inbound op of a slot. Raises ComponentError for a wrong name."""
    try:
        return component_suffix(ids.component_ref(slot), op)
    except (MultiaddrError, ValueError) as error:
        raise ComponentError(f"{op!r} can't be the name of an inbound op: {error}") from error
