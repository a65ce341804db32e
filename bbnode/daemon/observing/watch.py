"""The watch over a daemon, which finds parts that have made no progress for too long.

Rule: LIVENESS_CHECKS has one row for each thing that can stall; a check changes nothing and asks
nobody. An idle node is healthy, and so is one that waits for peers. The watch checks periodically
and logs, publishes and counts the beginning and the end of a stall. It also compares the wall clock
with the monotonic one.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import trio

from bbnode.daemon.invoke.rounds import Rounds
from bbnode.engine.suspensions import Waiting
from bbnode.transport.driver import trio_clock_ns

logger = logging.getLogger(__name__)

LOOK_EVERY_S: Final = 1.0
# The allowed delay of a poll. A poll takes milliseconds, and a busy machine may give us a turn a
# few seconds late.
POLL_SLACK_S: Final = 10.0
# Time beyond a deadline: its timer fires in the poll that is due then.
DEADLINE_SLACK_S: Final = 10.0
# An abandoned op still holds its component and its worker thread, and may yet end.
GIVEN_UP_SLACK_S: Final = 300.0
# A checkpoint may fail twice in a row, on a disk that is full for a minute.
SNAPSHOT_PERIODS: Final = 3
SNAPSHOT_SLACK_S: Final = 60.0
# A server that is restarted, or a network that is cut for a moment, comes back within this.
ALONE_S: Final = 120.0
# The two clocks drift by microseconds a second; setting one moves it by more than this.
CLOCK_STEP_S: Final = 2.0


class NodeView(Protocol):
    """The part of the engine that the watch reads."""

    def next_deadline(self) -> int | None:
        """Return the time of the next due poll."""
        ...

    def waiting(self) -> Sequence[Waiting]:
        """Return the waiting executions and ops, each with its deadline."""
        ...


@dataclass(slots=True, kw_only=True)
class WatchTargets:
    """The parts of a daemon that the watch reads. All times are trio's, in seconds."""

    node: NodeView
    rounds: Sequence[Rounds] = ()
    # The number of ops in worker threads.
    tasks_running: Callable[[], int] = lambda: 0
    # The time of the last checkpoint, or of the start; the period of checkpoints (0: never).
    saved_s: Callable[[], float] = lambda: 0.0
    save_every_s: Callable[[], float] = lambda: 0.0
    # The time since which no peer is connected; None if one is, or without bootstrap peers.
    alone_since_s: Callable[[], float | None] = lambda: None
    # The reason why this node's own membership does not hold now, or "".
    membership: Callable[[], str] = lambda: ""
    # The bootstrap peers that do not admit this node, with their reasons, or "".
    refused_by: Callable[[], str] = lambda: ""


Look = Callable[[WatchTargets, float], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class LivenessCheck:
    """A part that should make progress: `look` returns why it does not, or "".

    A stall that `blocks` makes the node not ready.
    """

    what: str
    blocks: bool
    look: Look


@dataclass(frozen=True, slots=True, kw_only=True)
class Stalled:
    """A part that has stalled."""

    what: str
    detail: str
    for_s: float
    blocks: bool

    def as_json(self) -> dict[str, Any]:
        """Return it for `/readyz` and events."""
        return {"what": self.what, "detail": self.detail, "for_s": round(self.for_s, 1)}


def _poll(watched: WatchTargets, now_s: float) -> str:
    due_ns = watched.node.next_deadline()
    late_s = 0.0 if due_ns is None else now_s - due_ns / 1e9
    if late_s <= POLL_SLACK_S:
        return ""
    return f"the engine should have been polled {late_s:.0f} s ago"


def _requests(watched: WatchTargets, now_s: float) -> str:
    for each in watched.node.waiting():
        late_s = now_s - each.until_ns / 1e9
        given_up = each.why.endswith("(given up)")
        if late_s > (GIVEN_UP_SLACK_S if given_up else DEADLINE_SLACK_S):
            return (
                f"{each.what} of execution {each.execution} waits for {each.why} "
                f"{late_s:.0f} s beyond its deadline"
            )
    return ""


def _rounds(watched: WatchTargets, now_s: float) -> str:
    if not watched.rounds:
        return ""
    in_time = {w.execution for w in watched.node.waiting() if w.until_ns / 1e9 >= now_s}
    busy = watched.tasks_running() > 0
    for rounds in watched.rounds:
        working = busy or rounds.running in in_time
        if reason := rounds.stalled(now_s, working=working):
            return f"{rounds.entry.target}: {reason}"
    return ""


def _snapshots(watched: WatchTargets, now_s: float) -> str:
    every_s = watched.save_every_s()
    age_s = now_s - watched.saved_s()
    if not every_s or age_s <= SNAPSHOT_PERIODS * every_s + SNAPSHOT_SLACK_S:
        return ""
    return f"no checkpoint for {age_s:.0f} s; one is due every {every_s:g} s, the log says why"


def _bootstrap(watched: WatchTargets, now_s: float) -> str:
    since_s = watched.alone_since_s()
    if since_s is None or now_s - since_s <= ALONE_S:
        return ""
    return f"no peer is connected for {now_s - since_s:.0f} s, and none of network.bootstrap"


def _membership(watched: WatchTargets, _now_s: float) -> str:
    reason = watched.membership()
    return reason and f"this node's own membership does not hold: {reason}"


def _refused(watched: WatchTargets, _now_s: float) -> str:
    return watched.refused_by()


LIVENESS_CHECKS: Final[tuple[LivenessCheck, ...]] = (
    LivenessCheck(what="poll", blocks=True, look=_poll),
    LivenessCheck(what="requests", blocks=True, look=_requests),
    LivenessCheck(what="rounds", blocks=True, look=_rounds),
    LivenessCheck(what="bootstrap", blocks=True, look=_bootstrap),
    LivenessCheck(what="membership", blocks=True, look=_membership),
    LivenessCheck(what="admission", blocks=True, look=_refused),
    # The node continues, but a crash would lose ever more.
    LivenessCheck(what="snapshots", blocks=False, look=_snapshots),
)


@dataclass(slots=True, kw_only=True)
class Watch:
    """The watch over one daemon."""

    watched: WatchTargets
    # Called with each new stall, and with each that has ended.
    publish: Callable[[Mapping[str, Any]], None] = lambda _: None
    unix_s: Callable[[], float] = time.time
    _since_s: dict[str, float] = field(default_factory=dict)
    _clock_s: float | None = None
    clock_steps: int = 0

    def look(self) -> list[Stalled]:
        """Return the current stalls, in the order of LIVENESS_CHECKS."""
        now_s = trio.current_time()
        checked = ((thing, thing.look(self.watched, now_s)) for thing in LIVENESS_CHECKS)
        return [
            Stalled(
                what=thing.what,
                detail=detail,
                for_s=now_s - self._since_s.get(thing.what, now_s),
                blocks=thing.blocks,
            )
            for thing, detail in checked
            if detail
        ]

    def polls(self) -> bool:
        """Return True if the engine is polled in time; for a supervisor's watchdog."""
        return not _poll(self.watched, trio_clock_ns() / 1e9)

    def counters(self) -> dict[str, int]:
        """Return the counters by dotted name; all names are always there."""
        return {"clock.steps": self.clock_steps}

    async def run(self) -> None:
        """Check periodically, for ever."""
        while True:
            self._tell(self.look())
            self._compare_clocks()
            await trio.sleep(LOOK_EVERY_S)

    def _tell(self, stalled: Iterable[Stalled]) -> None:
        now_s = trio.current_time()
        by_part = {each.what: each for each in stalled}
        for what, each in by_part.items():
            if what not in self._since_s:
                self._since_s[what] = now_s
                logger.warning("stalled", extra={"what": what, "detail": each.detail})
                self.publish({"type": "stalled", "what": what, "detail": each.detail})
        for what in self._since_s.keys() - by_part.keys():
            lasted_s = round(now_s - self._since_s.pop(what), 1)
            logger.info("goes on", extra={"what": what, "after_s": lasted_s})
            self.publish({"type": "goes_on", "what": what, "after_s": lasted_s})

    def _compare_clocks(self) -> None:
        """Report a step of the wall clock, since memberships expire by it."""
        ahead_s = self.unix_s() - trio.current_time()
        if self._clock_s is not None and abs(by_s := ahead_s - self._clock_s) > CLOCK_STEP_S:
            self.clock_steps += 1
            # A machine that slept looks the same.
            logger.warning("the wall clock was set", extra={"by_s": round(by_s, 1)})
            self.publish({"type": "clock_set", "by_s": round(by_s, 1)})
        self._clock_s = ahead_s
