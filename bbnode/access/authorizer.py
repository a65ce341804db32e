"""The policy as the transport asks it: with this machine's clocks.

Rule: this is all that stands between the two. It has the methods of `bbnode.transport.base.
Authorizer`, and names what it needs of a hello and a direction itself: the layers stay apart.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from bbnode.access.decision import Decision
from bbnode.access.policy import Policy
from bbnode.ir.peer import PeerId

_INBOUND = "inbound"


class HelloLike(Protocol):
    """What is read of a hello."""

    @property
    def credentials(self) -> bytes:
        """The membership that the peer shows."""
        ...

    @property
    def classes(self) -> tuple[str, ...]:
        """The classes that it plays."""
        ...


class DirectionLike(Protocol):
    """Says `inbound` or `outbound`."""

    @property
    def value(self) -> str:
        """Which of them."""
        ...


class PolicyAuthorizer:
    """Asks a `Policy` with the time of now."""

    def __init__(
        self,
        policy: Policy,
        *,
        monotonic_ns: Callable[[], int] = time.monotonic_ns,
        unix_s: Callable[[], float] = time.time,
    ) -> None:
        """The clocks: one for rates, one for the dates of statements."""
        self._policy = policy
        self._monotonic_ns = monotonic_ns
        self._unix_s = unix_s

    def connection(self, peer: PeerId, direction: DirectionLike) -> Decision:  # noqa: ARG002
        """A connection on which nothing was said yet."""
        return self._policy.decide_peer(peer, now_ns=self._monotonic_ns())

    def hello(
        self,
        peer: PeerId,
        direction: DirectionLike,  # noqa: ARG002
        hello: HelloLike,
    ) -> Decision:
        """The peer's first message."""
        return self._policy.decide_connection(
            peer,
            credentials=hello.credentials,
            classes=hello.classes,
            now_ns=self._monotonic_ns(),
            unix_s=self._unix_s(),
        )

    def envelope(self, peer: PeerId, direction: DirectionLike, size: int) -> Decision:
        """One envelope of `size` bytes, from the peer or to it."""
        if direction.value != _INBOUND:
            return self._policy.decide_outbound(peer, unix_s=self._unix_s())
        return self._policy.decide_envelope(
            peer, size, now_ns=self._monotonic_ns(), unix_s=self._unix_s()
        )

    def is_known(self, peer: PeerId) -> bool:
        """Whether a peer is a member, or has been of use."""
        return self._policy.is_known(peer, now_ns=self._monotonic_ns())
