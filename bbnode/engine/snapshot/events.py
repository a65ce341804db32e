"""Events of the ingress as plain data, for snapshots and for records.

Rule: one row per event class, by a stable name; charges are taken again when it is loaded.
"""

from __future__ import annotations

from typing import Any

from bbnode.engine import ingress as ev
from bbnode.engine.snapshot.codec import (
    ADDRESS,
    CHARGE,
    PEER,
    PLAIN,
    UNFIT,
    VALUE,
    RowForm,
    SnapshotReader,
    SnapshotWriter,
    Via,
    many,
    mapping,
    optional,
)
from bbnode.ir.envelope import CorrelationKind, WireCorrelation

_INPUTS = mapping(PLAIN, VALUE)

BOOTSTRAP_START: RowForm[ev.BootstrapStart] = RowForm(
    ev.BootstrapStart, name=PLAIN, execution=PLAIN, inputs=_INPUTS, charge=CHARGE
)

_CORRELATION = Via(
    lambda it, _: [int(it.kind), it.wire_req_id],
    lambda plain, _: WireCorrelation(kind=CorrelationKind(plain[0]), wire_req_id=plain[1]),
)

_INVOCATION = {
    "execution": PLAIN,
    "target": PLAIN,
    "event": PLAIN,
    "inputs": _INPUTS,
    "charge": CHARGE,
}

_ROWS: dict[str, tuple[type, RowForm[Any]]] = {
    name: (cls, RowForm(cls, **fields))
    for name, cls, fields in (
        (
            "inbound",
            ev.InboundBytes,
            {"peer": PEER, "data": PLAIN, "observed": optional(ADDRESS), "charge": CHARGE},
        ),
        (
            "message",
            ev.TopicMessage,
            {"peer": PEER, "topic": PLAIN, "data": PLAIN, "charge": CHARGE},
        ),
        (
            "refused",
            ev.InboundRefused,
            {
                "peer": PEER,
                "size": PLAIN,
                "kind": PLAIN,
                "detail": PLAIN,
                "correlation": _CORRELATION,
            },
        ),
        ("invocation", ev.Invocation, _INVOCATION),
        ("timed_invocation", ev.TimedInvocation, _INVOCATION | {"budget_ns": PLAIN}),
        (
            "connected",
            ev.PeerConnected,
            {
                "peer": PEER,
                "classes": many(PLAIN),
                "addresses": many(ADDRESS),
                "not_taken": many(PLAIN),
            },
        ),
        (
            "unfit",
            ev.PeerUnfit,
            {"peer": PEER, "unfit": UNFIT},
        ),
        ("disconnected", ev.PeerDisconnected, {"peer": PEER, "reason": PLAIN, "ours": PLAIN}),
        (
            "send_failed",
            ev.SendFailed,
            {"peer": PEER, "reason": PLAIN, "blames_peer": PLAIN, "tag": PLAIN},
        ),
        ("request_lost", ev.RequestLost, {"peer": PEER, "tag": PLAIN}),
        ("held", ev.PeerHeld, {"peer": PEER, "classes": many(PLAIN), "reason": PLAIN}),
        ("lifecycle", ev.Lifecycle, {"phase": PLAIN}),
        ("published", ev.Published, {"kind": PLAIN}),
        (
            "bootstrap",
            ev.BootstrapAsked,
            {"starts": many(BOOTSTRAP_START), "waiting": many(PLAIN)},
        ),
    )
}
_NAMES = {cls: name for name, (cls, _) in _ROWS.items()}


def save_event(event: ev.Event, writer: SnapshotWriter) -> list[Any]:
    """Return an event as [name, fields…]."""
    name = _NAMES[type(event)]
    return [name, *_ROWS[name][1].save(event, writer)]


def load_event(plain: list[Any], reader: SnapshotReader) -> ev.Event:
    """Load what `save_event` returned; KeyError and the like when it is malformed."""
    event: ev.Event = _ROWS[plain[0]][1].load(plain[1:], reader)
    return event


def save_completed(completed: ev.Completed, writer: SnapshotWriter) -> list[Any]:
    """Return a completion as plain data."""
    return [completed.token, *writer.result(completed.result, completed.error)]


def load_completed(plain: list[Any], reader: SnapshotReader) -> ev.Completed:
    """Load what `save_completed` returned."""
    result, error = reader.result(plain[1:])
    return ev.Completed(token=plain[0], result=result, error=error)


class IngressTable:
    """The events and completions that wait in a node's ingress.

    They are read once, when the table is made: other threads keep running, and a task that returns
    meanwhile must not be both completed here and under way at its component.
    """

    def __init__(self, ingress: ev.Ingress) -> None:
        self._ingress = ingress
        self._events, self._completions = ingress.waiting()
        self.done = frozenset(completed.token for completed in self._completions)

    def state(self, writer: SnapshotWriter) -> Any:
        """Return what a snapshot saves: events, completions and counts."""
        return [
            [save_event(event, writer) for event in self._events],
            [save_completed(completed, writer) for completed in self._completions],
            sorted(self._ingress.counters().items()),
        ]

    def load(self, plain: Any, reader: SnapshotReader) -> None:
        """Load what `state` returned."""
        events, completions, counts = plain
        self._ingress.refill(
            [load_event(row, reader) for row in events],
            [load_completed(row, reader) for row in completions],
        )
        self._ingress.add_counts(dict(counts))
