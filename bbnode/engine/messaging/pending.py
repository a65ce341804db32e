"""Requests of components that wait for an answer.

Rule: a call ends once: by its answer, by its deadline, or when it could not be sent. An answer
counts only when it comes from the peer that was asked, and for the op that was asked; what comes
late, twice or from somebody else is told apart and dropped.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bbnode.engine.requests import Verdict
from bbnode.engine.scheduler import Scheduler, Timer, TimerKind
from bbnode.ir.caps import MAX_ENDED_REMEMBERED
from bbnode.ir.peer import PeerId

if TYPE_CHECKING:
    from bbnode.engine.snapshot.codec import LoadedNames, SavedNames


@dataclass(slots=True, kw_only=True)
class OpenCall:
    """One request: of the component `cell_at`, to the op at `suffix` of `peer`.

    `tag` is the component's own; `envelope` is the tag of what it went out in, once it has.
    """

    wire_req_id: int
    cell_at: int
    tag: str
    peer: PeerId
    suffix: bytes
    opened_ns: int
    timer: Timer
    envelope: int | None = None


class OpenCalls:
    """The calls of one node."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._open: dict[int, OpenCall] = {}
        self._of_cell: Counter[int] = Counter()
        self._ended: dict[int, None] = {}
        self._of_envelope: dict[int, OpenCall] = {}

    def __len__(self) -> int:
        return len(self._open)

    def count(self, cell_at: int) -> int:
        """Calls that a component has open."""
        return self._of_cell[cell_at]

    def all(self) -> list[OpenCall]:
        """Open calls, oldest first."""
        return list(self._open.values())

    def open(
        self,
        wire_req_id: int,
        *,
        cell_at: int,
        tag: str,
        peer: PeerId,
        suffix: bytes,
        now_ns: int,
        until_ns: int,
    ) -> None:
        """Take up a call."""
        timer = self._scheduler.set(until_ns, TimerKind.CALL_DEADLINE, wire_req_id)
        self._add(
            OpenCall(
                wire_req_id=wire_req_id,
                cell_at=cell_at,
                tag=tag,
                peer=peer,
                suffix=suffix,
                opened_ns=now_ns,
                timer=timer,
            )
        )

    def answer(self, wire_req_id: int, peer: PeerId, suffix: bytes) -> OpenCall | Verdict:
        """The call that an answer ends, or why it ends none."""
        call = self._open.get(wire_req_id)
        if call is None:
            return Verdict.LATE if wire_req_id in self._ended else Verdict.UNKNOWN
        if call.peer != peer or call.suffix != suffix:
            return Verdict.STRANGER
        self._scheduler.cancel(call.timer)
        self._end(call)
        return call

    def sent(self, wire_req_id: int, envelope: int) -> None:
        """A call, if it is open, has gone out in an envelope."""
        call = self._open.get(wire_req_id)
        if call is not None:
            call.envelope = envelope
            self._of_envelope[envelope] = call

    def send_failed(self, envelope: int, peer: PeerId) -> OpenCall | None:
        """The call that ends because its envelope did not come to a peer, or None."""
        call = self._of_envelope.get(envelope)
        if call is None or call.peer != peer:
            return None
        self._scheduler.cancel(call.timer)
        self._end(call)
        return call

    def too_late(self, wire_req_id: int) -> OpenCall | None:
        """A call whose time is over; None when it ended before."""
        call = self._open.get(wire_req_id)
        if call is not None:
            self._end(call)
        return call

    def _add(self, call: OpenCall) -> None:
        self._open[call.wire_req_id] = call
        self._of_cell[call.cell_at] += 1
        if call.envelope is not None:
            self._of_envelope[call.envelope] = call

    def _end(self, call: OpenCall) -> None:
        del self._open[call.wire_req_id]
        self._of_cell[call.cell_at] -= 1
        if call.envelope is not None:
            del self._of_envelope[call.envelope]
        self._ended[call.wire_req_id] = None
        if len(self._ended) > MAX_ENDED_REMEMBERED:
            del self._ended[next(iter(self._ended))]

    def state(self, names: SavedNames) -> Any:
        """For a snapshot: open calls and the ids of ended ones, oldest first."""
        rows = [
            [c.wire_req_id, c.cell_at, c.tag, names.peer(c.peer), c.suffix, c.opened_ns,
             names.timer(c.timer), c.envelope]
            for c in self._open.values()
        ]  # fmt: skip
        return [rows, list(self._ended)]

    def load(self, plain: Any, names: LoadedNames) -> None:
        """Take up what `state` gave, after the scheduler."""
        rows, ended = plain
        self._ended = dict.fromkeys(ended)
        for wire_req_id, cell_at, tag, peer, suffix, opened_ns, order, envelope in rows:
            timer = names.timer(order)
            if timer is None:
                raise ValueError(f"the call {tag!r} of a component has no deadline")
            self._add(
                OpenCall(
                    wire_req_id=wire_req_id,
                    cell_at=cell_at,
                    tag=tag,
                    peer=names.peer(peer),
                    suffix=suffix,
                    opened_ns=opened_ns,
                    timer=timer,
                    envelope=envelope,
                )
            )
