"""Twins of a node: restored from a snapshot of any moment, and fed what the node was fed then.

Rule: `Tape(node)` notes every call at the node's boundary and takes a snapshot before and after
each poll; `check` restores each of them into a fresh node, plays the rest of the tape to it, and
compares all that it says with what the node said.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from bbnode.engine import Node, steps
from bbnode.engine.record.recording import plain_step
from bbnode.engine.suspensions import WaitReason
from bbnode.ir.errors import BbnodeError

ENTRY_POINTS = (
    *("invoke", "deliver_event", "deliver_inbound", "run_bootstrap", "publish_event"),
    *("fire_lifecycle", "peer_connected", "peer_disconnected", "send_failed", "set_addresses"),
    *("block_peer", "unblock_peer", "allow_only", "complete", "fail", "set_tracing", "close"),
    *("add_addresses", "drop_address", "forget_peer"),
)


@dataclass
class Played:
    """One call; of a poll what it gave, and the snapshots around it."""

    method: str
    arguments: tuple[Any, ...]
    more: dict[str, Any]
    said: list[Any] = field(default_factory=list)
    due: int | None = None
    before: bytes = b""
    after: bytes = b""


class Tape:
    """Everything that a node was asked for, while the node works as ever."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.played: list[Played] = []
        self.handed_out: set[int] = set()
        for name in ENTRY_POINTS:
            setattr(node, name, self._noting(name, getattr(node, name)))
        self._poll = node.poll
        node.poll = self._polling  # type: ignore[method-assign]

    def _noting(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(*arguments: Any, **more: Any) -> Any:
            self.played.append(Played(name, arguments, more))
            return method(*arguments, **more)

        return call

    def _polling(self, now_ns: int) -> list[steps.Step]:
        played = Played("poll", (now_ns,), {}, before=self.node.snapshot())
        made = self._poll(now_ns)
        played.said = [plain_step(step) for step in made]
        played.due = self.node.next_deadline()
        played.after = self.node.snapshot()
        self.played.append(played)
        return made


def check(
    tape: Tape, make: Callable[[], Node], *, every: int = 1, first: int = 0, shift_ns: int = 0
) -> int:
    """Compare a twin from each `every`th snapshot, from `first` on; gives how many there were.

    `shift_ns`: how far the twin's host's clock is off.
    """
    twins = 0
    now_ns: int | None = None
    for index, played in enumerate(tape.played):
        if played.method != "poll":
            continue
        if index % every == first % every:
            if now_ns is not None:
                _check(tape, index, played.before, make(), now_ns, shift_ns)
                twins += 1
            _check(tape, index + 1, played.after, make(), played.arguments[0], shift_ns)
            twins += 1
        now_ns = played.arguments[0] if now_ns is None else max(now_ns, played.arguments[0])
    return twins


def _check(tape: Tape, start: int, snapshot: bytes, twin: Node, now_ns: int, shift_ns: int) -> None:
    twin.restore(snapshot, now_ns + shift_ns, same_life=True)
    assert twin.snapshot() == snapshot, "what was restored is not what was saved"
    earlier = set(_tasks(p.said for p in tape.played[:start]))
    for number, played in enumerate(tape.played[start:]):
        if played.method == "poll":
            made = twin.poll(played.arguments[0] + shift_ns)
            said = [plain_step(step) for step in made]
            again = [s for s in said if _token(s) in earlier]
            assert said[: len(again)] == again, "handed out again, but not at first"
            assert said[len(again) :] == played.said, f"differs {number} calls after the restore"
            due = twin.next_deadline()
            assert (due if due is None else due - shift_ns) == played.due
            earlier = set()
            continue
        if played.method in ("complete", "fail"):
            _run(twin, played.arguments[0])
        with contextlib.suppress(BbnodeError):  # as with the node itself
            getattr(twin, played.method)(*played.arguments, **played.more)
    assert twin.counters() == tape.node.counters()


def _run(twin: Node, token: int) -> None:
    """What a worker thread does to a component; its result stands on the tape."""
    parked = twin._rt.suspensions.get(token)
    if parked is not None and parked.why is WaitReason.TASK:
        with contextlib.suppress(Exception):
            parked.op.hand_out(parked).fn()


def _token(step: list[Any]) -> int | None:
    return dict(step[1:])["token"] if step[0] == "RunTask" else None


def _tasks(said: Iterable[list[Any]]) -> list[int]:
    return [token for made in said for s in made if (token := _token(s)) is not None]
