"""What waits in the ingress, as plain data: of a snapshot, and of a record of a node's life.

Rule: one row per event class, by a name that stays; charges are taken anew when it is loaded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from bbnode.engine import ingress as ev

if TYPE_CHECKING:
    from bbnode.engine.snapshot.codec import LoadedNames, SavedNames


def save_event(event: ev.Event, names: SavedNames) -> list[Any]:
    """An event as [name, fields…]."""
    name, save, _ = _FORMS[type(event)]
    return [name, *save(event, names)]


def load_event(plain: list[Any], names: LoadedNames) -> ev.Event:
    """What `save_event` gave; KeyError and the like when it is malformed."""
    return _BY_NAME[plain[0]](plain[1:], names)


def save_completed(completed: ev.Completed, names: SavedNames) -> list[Any]:
    """A completion."""
    return [completed.token, *names.result(completed.result, completed.error)]


def load_completed(plain: list[Any], names: LoadedNames) -> ev.Completed:
    """What `save_completed` gave."""
    result, error = names.result(plain[1:])
    return ev.Completed(token=plain[0], result=result, error=error)


def _save_inbound(e: ev.InboundBytes, names: SavedNames) -> list[Any]:
    observed = None if e.observed is None else names.address(e.observed)
    return [names.peer(e.peer), e.data, observed, names.charge(e.charge)]


def _load_inbound(row: list[Any], names: LoadedNames) -> ev.Event:
    peer, data, observed, charge = row
    return ev.InboundBytes(
        peer=names.peer(peer),
        data=data,
        observed=None if observed is None else names.address(observed),
        charge=names.charge(charge),
    )


def _save_invocation(e: ev.Invocation, names: SavedNames) -> list[Any]:
    inputs = [[name, names.value(value)] for name, value in e.inputs.items()]
    return [e.execution, e.target, e.event, inputs, names.charge(e.charge)]


def _load_invocation(row: list[Any], names: LoadedNames) -> ev.Event:
    execution, target, event, inputs, charge = row
    return ev.Invocation(
        execution=execution,
        target=target,
        event=event,
        inputs={name: names.value(value) for name, value in inputs},
        charge=names.charge(charge),
    )


def _save_connected(e: ev.PeerConnected, names: SavedNames) -> list[Any]:
    return [names.peer(e.peer), list(e.classes), [names.address(a) for a in e.addresses]]


def _load_connected(row: list[Any], names: LoadedNames) -> ev.Event:
    peer, classes, addresses = row
    return ev.PeerConnected(
        peer=names.peer(peer),
        classes=tuple(classes),
        addresses=tuple(names.address(raw) for raw in addresses),
    )


def _save_asked(e: ev.BootstrapAsked, names: SavedNames) -> list[Any]:
    return [[save_start(start, names) for start in e.starts], list(e.waiting)]


def _load_asked(row: list[Any], names: LoadedNames) -> ev.Event:
    starts, waiting = row
    return ev.BootstrapAsked(
        starts=tuple(load_start(start, names) for start in starts), waiting=tuple(waiting)
    )


def save_start(start: ev.BootstrapStart, names: SavedNames) -> list[Any]:
    """One bootstrap that was asked for."""
    inputs = [[name, names.value(value)] for name, value in start.inputs.items()]
    return [start.name, start.execution, inputs, names.charge(start.charge)]


def load_start(plain: list[Any], names: LoadedNames) -> ev.BootstrapStart:
    """What `save_start` gave."""
    name, execution, inputs, charge = plain
    return ev.BootstrapStart(
        name=name,
        execution=execution,
        inputs={key: names.value(value) for key, value in inputs},
        charge=names.charge(charge),
    )


_Save = Callable[[Any, "SavedNames"], list[Any]]
_Load = Callable[[list[Any], "LoadedNames"], ev.Event]

_FORMS: dict[type, tuple[str, _Save, _Load]] = {
    ev.InboundBytes: ("inbound", _save_inbound, _load_inbound),
    ev.InboundRefused: (
        "refused",
        lambda e, names: [names.peer(e.peer), e.size, e.kind, e.detail],
        lambda row, names: ev.InboundRefused(
            peer=names.peer(row[0]), size=row[1], kind=row[2], detail=row[3]
        ),
    ),
    ev.Invocation: ("invocation", _save_invocation, _load_invocation),
    ev.PeerConnected: ("connected", _save_connected, _load_connected),
    ev.PeerDisconnected: (
        "disconnected",
        lambda e, names: [names.peer(e.peer), e.reason],
        lambda row, names: ev.PeerDisconnected(peer=names.peer(row[0]), reason=row[1]),
    ),
    ev.SendFailed: (
        "send_failed",
        lambda e, names: [names.peer(e.peer), e.reason, e.blames_peer, e.tag],
        lambda row, names: ev.SendFailed(
            peer=names.peer(row[0]), reason=row[1], blames_peer=row[2], tag=row[3]
        ),
    ),
    ev.Lifecycle: (
        "lifecycle",
        lambda e, _: [e.phase],
        lambda row, _: ev.Lifecycle(phase=row[0]),
    ),
    ev.Published: (
        "published",
        lambda e, _: [e.kind],
        lambda row, _: ev.Published(kind=row[0]),
    ),
    ev.BootstrapAsked: ("bootstrap", _save_asked, _load_asked),
}
_BY_NAME: dict[str, _Load] = {name: load for name, _, load in _FORMS.values()}


class IngressTable:
    """What waits in a node's ingress.

    It is looked at once, when the table is made: other threads go on, and a task that returns
    meanwhile must not be here as returned and at its component as under way.
    """

    def __init__(self, ingress: ev.Ingress) -> None:
        self._ingress = ingress
        self._events, self._completions = ingress.waiting()
        self.done = frozenset(completed.token for completed in self._completions)

    def state(self, names: SavedNames) -> Any:
        """Events, completions and counts."""
        return [
            [save_event(event, names) for event in self._events],
            [save_completed(completed, names) for completed in self._completions],
            sorted(self._ingress.counters().items()),
        ]

    def load(self, plain: Any, names: LoadedNames) -> None:
        """Take up what `state` gave."""
        events, completions, counts = plain
        self._ingress.refill(
            [load_event(row, names) for row in events],
            [load_completed(row, names) for row in completions],
        )
        self._ingress.add_counts(dict(counts))
