"""The ingress: the one thread-safe seam of a node.

Rule: events wait here for the next poll, bounded in number and in bytes; a push beyond a
bound is refused and counted. The byte budget also covers what lives in executions: a
charge is taken before anything is stored and given back when its last holder lets go.
Events are plain data.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import TypeAlias

from multiaddr import Multiaddr

from bbnode.engine.errors import BudgetExceeded, EntryError, IngressClosed, IngressFull
from bbnode.engine.limits import Limits
from bbnode.ir.crossing import Unfit
from bbnode.ir.envelope import WireCorrelation
from bbnode.ir.making import maker
from bbnode.ir.peer import PeerId
from bbnode.ir.values import Value


class Charge:
    """Bytes held; given back when the last of its holders releases it.

    Made by its budget, field by field: an `__init__` would take longer than what it does.
    """

    __slots__ = ("budget", "holders", "size")

    budget: ByteBudget
    holders: int
    size: int

    def hold(self) -> Charge:
        """Add a holder. Only the polling thread holds and releases."""
        self.holders += 1
        return self

    def release(self) -> None:
        """Remove a holder."""
        self.holders -= 1
        if not self.holders:
            self.budget.returned += self.size


class ByteBudget:
    """The budget of bytes in waiting events and in executions.

    Bytes taken and bytes returned are counted apart: any thread takes, under the lock, and the
    polling thread alone returns, so that it needs none.
    """

    __slots__ = (
        "_limit",
        "_lock",
        "_taken",
        "returned",
    )

    def __init__(self, limit: int | None, lock: threading.Lock | None = None) -> None:
        self._limit = limit
        self._taken = 0
        self.returned = 0
        self._lock = lock or threading.Lock()

    @property
    def used(self) -> int:
        """Bytes charged now."""
        return self._taken - self.returned

    @property
    def remaining(self) -> int | None:
        """Bytes left; None without a limit."""
        return None if self._limit is None else self._limit - self.used

    def charge(self, size: int) -> Charge | None:
        """Take `size` bytes; return None if they are not left."""
        with self._lock:
            return self.take_locked(size) if self.fits(size) else None

    def force(self, size: int) -> Charge:
        """Take `size` bytes that were granted in an earlier life, whatever the limit is now."""
        with self._lock:
            return self.take_locked(size)

    def fits(self, size: int) -> bool:
        """Return True if `size` bytes are left; for callers that hold the lock."""
        return self._limit is None or self._taken - self.returned + size <= self._limit

    def take_locked(self, size: int) -> Charge:
        """Take `size` bytes unchecked; for callers that hold the lock."""
        self._taken += size
        charge = Charge()
        charge.budget = self
        charge.holders = 1
        charge.size = size
        return charge


@dataclass(frozen=True, slots=True, kw_only=True)
class InboundBytes:
    """One envelope of an authenticated peer."""

    peer: PeerId
    data: bytes | memoryview
    observed: Multiaddr | None
    charge: Charge


make_inbound = maker(InboundBytes, "peer", "data", "observed", "charge")


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicMessage:
    """One message on a topic, of the authenticated peer that has published it."""

    peer: PeerId
    topic: str
    data: bytes
    charge: Charge


@dataclass(frozen=True, slots=True, kw_only=True)
class InboundRefused:
    """A record of an envelope that was dropped at the boundary; `correlation` is what it said."""

    peer: PeerId
    size: int
    kind: str
    detail: str
    correlation: WireCorrelation = field(default_factory=WireCorrelation)


@dataclass(frozen=True, slots=True, kw_only=True)
class Invocation:
    """An execution that the host asked for: all inputs of a target, or one event."""

    execution: int
    target: str
    event: str | None
    inputs: dict[str, Value]
    charge: Charge


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedInvocation(Invocation):
    """One that may take so long, from when it begins."""

    budget_ns: int


make_invocation = maker(Invocation, "execution", "target", "event", "inputs", "charge")


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerConnected:
    """The transport has a connection with a peer."""

    peer: PeerId
    classes: tuple[str, ...]
    addresses: tuple[Multiaddr, ...]
    not_taken: tuple[bytes, ...] = ()  # suffixes of sites of ours that its program has not


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerUnfit:
    """A peer that has just connected states sizes that do not fit."""

    peer: PeerId
    unfit: Unfit


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerDisconnected:
    """The transport lost a peer; `ours`: because this node was away, which the peer is not."""

    peer: PeerId
    reason: str
    ours: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SendFailed:
    """The transport could not send something to a peer; `blames_peer`: it is the peer's fault.

    `tag` is that of the SendEnvelope, where the host knows it.
    """

    peer: PeerId
    reason: str
    blames_peer: bool = True
    tag: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLost:
    """A peer was restarted and no longer has the request in the envelope `tag`."""

    peer: PeerId
    tag: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerHeld:
    """The host chooses a peer for none of these classes, for a reason; without one, it does again.

    It may come before the connection, so that nothing goes to the peer in between.
    """

    peer: PeerId
    classes: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Lifecycle:
    """The host announces a phase."""

    phase: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """The host publishes an event of the program on the bus."""

    kind: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BootstrapStart:
    """One bootstrap that is to run, with its inputs."""

    name: str
    execution: int
    inputs: dict[str, Value]
    charge: Charge


@dataclass(frozen=True, slots=True, kw_only=True)
class BootstrapAsked:
    """A batch of bootstraps; `waiting` are those that need inputs which nobody has given."""

    starts: tuple[BootstrapStart, ...]
    waiting: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Completed:
    """A parked op's result, or its error."""

    token: int
    result: Value
    error: BaseException | None


Event: TypeAlias = (
    InboundBytes
    | TopicMessage
    | InboundRefused
    | Invocation
    | PeerConnected
    | PeerUnfit
    | PeerDisconnected
    | SendFailed
    | RequestLost
    | PeerHeld
    | Lifecycle
    | Published
    | BootstrapAsked
)


class Executions:
    """Numbers of executions, each once; called from any thread."""

    __slots__ = (
        "_lock",
        "last",
    )

    def __init__(self, lock: threading.Lock) -> None:
        self._lock = lock
        self.last = 0

    def next(self) -> int:
        """Return the next number, from 1 on."""
        lock = self._lock
        lock.acquire()  # as in `Ingress.push_inbound`
        try:
            number = self.last = self.last + 1
        finally:
            lock.release()
        return number


class Ingress:
    """Events and completions that wait for a poll.

    Each poll asks whether there are `completions`; one that comes right then is for the next poll.
    """

    __slots__ = (
        "_closed",
        "_completed",
        "_counts",
        "_events",
        "_lock",
        "_most_events",
        "_wake",
        "budget",
        "completions",
        "deaf",
        "executions",
    )

    def __init__(self, limits: Limits) -> None:
        # One lock for everything that a push touches: three would cost more than the push itself.
        self._lock = threading.Lock()
        self.budget = ByteBudget(limits.ingress_bytes, self._lock)
        self.executions = Executions(self._lock)
        self._most_events = sys.maxsize if limits.ingress_events is None else limits.ingress_events
        # Only ever taken whole. An empty list or dict has a tenth of the bytes of a deque, a third
        # of those of a set.
        self._events: list[Event] = []
        self.completions: list[Completed] = []
        self._completed: dict[int, None] = {}  # tokens among them
        self._counts: Counter[str] = Counter()
        self._closed = False
        self.deaf = False  # completions come by `refill` alone
        self._wake: Callable[[], None] | None = None

    def set_wake(self, wake: Callable[[], None] | None) -> None:
        """`wake` is called, from any thread, when the first event comes to an empty ingress."""
        self._wake = wake

    @property
    def closed(self) -> bool:
        """True once the node was closed."""
        return self._closed

    def close(self) -> None:
        """Refuse everything from now on."""
        self._closed = True

    def pending(self) -> bool:
        """Return True if something waits."""
        return bool(self._events or self.completions)

    def push(self, event: Event, *, must: bool = False) -> bool:
        """Queue an event; False when it is refused.

        `must`: for events whose number is bounded elsewhere (connections), never refused for
        the count.
        """
        with self._lock:
            if self._refuses(must=must):
                return False
            first = not self._events and not self.completions
            self._events.append(event)
        if first and self._wake is not None:
            self._wake()
        return True

    def push_inbound(
        self, peer: PeerId, data: bytes | memoryview, observed: Multiaddr | None
    ) -> str:
        """Queue an envelope; returns why it is refused, or "".

        IngressFull is counted here, BudgetExceeded is not.
        """
        size, lock = len(data), self._lock
        lock.acquire()  # `with` takes twice as long, and every envelope is here
        try:
            events, budget = self._events, self.budget
            if not budget.fits(size):
                return "BudgetExceeded"
            if (self._closed or len(events) >= self._most_events) and self._refuses():
                return "IngressFull"
            first = not events and not self.completions
            events.append(make_inbound(peer, data, observed, budget.take_locked(size)))
        finally:
            lock.release()
        if first and self._wake is not None:
            self._wake()
        return ""

    def push_message(self, peer: PeerId, topic: str, data: bytes) -> bool:
        """Queue a message on a topic; returns False, and counts it, where it is refused."""
        with self._lock:
            if not self.budget.fits(len(data)):
                self._counts["ingress.dropped"] += 1
                return False
            if self._refuses():
                return False
            first = not self._events and not self.completions
            charge = self.budget.take_locked(len(data))
            self._events.append(TopicMessage(peer=peer, topic=topic, data=data, charge=charge))
        if first and self._wake is not None:
            self._wake()
        return True

    def push_invocation(
        self,
        target: str,
        event: str | None,
        inputs: dict[str, Value],
        size: int,
        budget_ns: int | None = None,
    ) -> int:
        """Queue an execution with inputs of `size` bytes; returns its number.

        It may take `budget_ns`; None: as its ops say.

        Raises IngressClosed, IngressFull, BudgetExceeded.
        """
        with self._lock:
            if not self.budget.fits(size):
                raise BudgetExceeded(
                    f"{target}: {size} bytes of input and {self.budget.remaining} are left "
                    "(limit ingress_bytes); wait until executions have finished"
                )
            if self._refuses():
                raise self.refusal(target)
            charge = self.budget.take_locked(size)
            execution = self.executions.last = self.executions.last + 1
            first = not self._events and not self.completions
            made = make_invocation(execution, target, event, inputs, charge)
            if budget_ns is not None:
                asked = {each.name: getattr(made, each.name) for each in fields(Invocation)}
                made = TimedInvocation(**asked, budget_ns=budget_ns)
            self._events.append(made)
        if first and self._wake is not None:
            self._wake()
        return execution

    def _refuses(self, *, must: bool = False) -> bool:
        """Return True, and count it, if nothing more is taken. Under the lock."""
        full = len(self._events) >= self._most_events
        if self._closed or (full and not must):
            self._counts["ingress.dropped"] += 1
            return True
        return False

    def refusal(self, what: str) -> EntryError:
        """Return the error of a push that was refused."""
        if self._closed:
            return IngressClosed(f"{what}: the node was closed")
        return IngressFull(f"{what}: too many events wait for a poll (limit ingress_events)")

    def push_completion(self, completed: Completed) -> None:
        """Queue a completion; a second one for the same token is dropped and counted."""
        with self._lock:
            if completed.token in self._completed or self._closed or self.deaf:
                self._counts["completion.dropped"] += 1
                return
            first = not self._events and not self.completions
            self._completed[completed.token] = None
            self.completions.append(completed)
        if first and self._wake is not None:
            self._wake()

    def take_events(self) -> list[Event]:
        """Remove and return all events that wait, oldest first."""
        lock = self._lock
        lock.acquire()  # as in `push_inbound`
        try:
            taken, self._events = self._events, []
        finally:
            lock.release()
        return taken

    def untake(self, events: Iterable[Event]) -> None:
        """Put back events that a poll had no time for, in order, before those that came since."""
        with self._lock:
            self._events = [*events, *self._events]

    def take_completions(self) -> list[Completed]:
        """Remove and return all completions that wait, oldest first."""
        with self._lock:
            taken, self.completions = self.completions, []
            self._completed.clear()
        return taken

    def count(self, name: str) -> None:
        """Count something that happened at the boundary, from any thread."""
        with self._lock:
            self._counts[name] += 1

    def counters(self) -> dict[str, int]:
        """Return the counts."""
        with self._lock:
            return dict(self._counts)

    def refill(self, events: Iterable[Event], completions: Iterable[Completed]) -> None:
        """Replace what waits: after a restore, and in a replay, where the log says what came."""
        with self._lock:
            self._events = list(events)
            self.completions = list(completions)
            self._completed = {completed.token: None for completed in self.completions}

    def completed(self) -> frozenset[int]:
        """Return the tokens of the completions that wait."""
        with self._lock:
            return frozenset(self._completed)

    def waiting(self) -> tuple[list[Event], list[Completed]]:
        """Return copies of what waits; it stays. `refill` is the inverse."""
        with self._lock:
            return list(self._events), list(self.completions)

    def add_counts(self, counts: Mapping[str, int]) -> None:
        """Add to the counts."""
        with self._lock:
            self._counts.update(counts)
