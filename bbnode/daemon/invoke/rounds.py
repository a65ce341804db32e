"""Unattended rounds, as configured by `[[invoke]]`.

Rule: one task per entry. A round is one execution of its target; the next one starts when the last
has ended and its start condition holds, so that a node without peers waits instead of failing round
after round. The results of a round are kept, newest last, for the control plane, and passed to
`bbnode.daemon.history`.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import trio

from bbnode.daemon.config import InputValue, InvokeSection, TextInput
from bbnode.daemon.history.scalars import MAX_METRICS, metric_name, metric_order, scalars_of
from bbnode.daemon.invoke.best import BestSoFar
from bbnode.daemon.invoke.numbers import numbers
from bbnode.daemon.observing.events import summarize
from bbnode.engine import Node, steps
from bbnode.ir import types
from bbnode.ir.caps import MAX_KEPT_OUTPUTS
from bbnode.ir.errors import BbnodeError, DeploymentError
from bbnode.ir.texts import listed, short_peer
from bbnode.ir.types import TypeNode
from bbnode.ir.values import TRIGGER, Value

logger = logging.getLogger(__name__)

# Rounds kept for later requests: a day of one-minute rounds.
KEPT_ROUNDS = 1440
# The wait after a failed round, for a restarting peer to come back.
RETRY_PAUSE_S = 1.0
# The period of checks of the peers, even if none has connected: no event reports that the cooldown
# of a failed peer is over.
RECHECK_S = 1.0
# The pause after such a check with this many peers or more.
MANY_PEERS, PAUSE_S = 100, 0.05
# The pause after the last awaited peer has connected: about a round trip to the other side of the
# world.
SETTLE_S = 0.15
# The time that a round may take beyond the deadlines of its requests, and its start beyond its due
# time: checkpoints, aggregation, a busy machine.
ROUND_SLACK_S = 60.0
# Failed rounds in a row, and periods without a successful one, before the rounds count as stalled.
FAILED_ROUNDS = 3
FAILED_PERIODS = 3


# Peers whose numbers and traffic a round keeps.
MAX_PEERS_OF_A_ROUND = 1024


_SHOWN_OF_A_ROUND = (
    *("target", "execution", "ok", "started_at", "seconds", "bytes", "bytes_in", "bytes_out"),
    *("responded", "missing", "lost", "missing_why", "refused", "failures", "outputs", "skipped"),
    *("metrics", "peers", "artifact", "settings", "best"),
)


# Peers whose reasons one line lists; there may be a thousand.
SHOWN_NOT_READY = 4

# Bytes of the tensors that went through the node's codecs in a round, and of their codes.
CODED_METRICS = ("codec.raw_bytes", "codec.code_bytes")

# The reason of a missing peer without a known one.
LATE = "no answer by the deadline"


# Takes a checkpoint, and calls its argument when that is on disk, or can't be written.
Save: TypeAlias = Callable[[Callable[[], None]], Awaitable[object]]


class TooFewPeers(DeploymentError):
    """The start condition did not hold in time, and the configuration says to fail."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Bytes that a node has received and sent, and the same by connected peer: (in, out)."""

    bytes_in: int = 0
    bytes_out: int = 0
    peers: Mapping[str, tuple[int, int]] = field(default_factory=dict)


@dataclass(slots=True)
class Round:
    """One round of one target; `number` counts from 1, across restarts of the node.

    `started_at` is in seconds of the Unix epoch, by this machine's clock. `metrics` are the scalar
    outputs, and entries of Metadata as `<output>.<entry>`. `peers` has for each peer that answered
    the numbers that came with its answer, and for each connected peer its traffic. `settings` is
    the digest of the node's own settings. `best`: it was the best round so far.
    """

    number: int
    target: str
    execution: int
    artifact: str = ""
    settings: str = ""
    started_s: float = 0.0
    started_at: float = 0.0
    at_start: Traffic = field(default_factory=Traffic)
    outputs: dict[str, Any] = field(default_factory=dict)
    # Outputs that have no value this time, and why.
    skipped: dict[str, str] = field(default_factory=dict)
    # Peers that have answered all their requests of the round, and all others.
    responded: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    # Missing peers that had answered an earlier request.
    lost: list[str] = field(default_factory=list)
    # The reason of each missing peer.
    missing_why: dict[str, str] = field(default_factory=dict)
    # Peers whose answers were not counted, and why.
    refused: dict[str, str] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    finished: trio.Event = field(default_factory=trio.Event)
    ok: bool | None = None
    seconds: float = 0.0
    bytes_in: int = 0
    bytes_out: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    peers: dict[str, dict[str, float]] = field(default_factory=dict)
    best: bool = False
    # True if there were more peers than `peers` holds.
    tells_of_some: bool = False

    @property
    def bytes(self) -> int:
        """Bytes of both directions."""
        return self.bytes_in + self.bytes_out

    def as_json(self) -> dict[str, Any]:
        """Return the round for events, the control plane and the history."""
        shown = {name: getattr(self, name) for name in _SHOWN_OF_A_ROUND}
        metrics = {name: self.metrics[name] for name in sorted(self.metrics, key=metric_order)}
        seconds = round(self.seconds, 6)
        return {"round": self.number, **shown, "metrics": metrics, "seconds": seconds}

    def take_output(self, name: str, value: Value) -> None:
        """Add an output and its metrics; bounded, since some of them come from peers."""
        if name not in self.outputs and len(self.outputs) >= MAX_KEPT_OUTPUTS:
            return
        self.outputs[name] = summarize(value)
        for metric, number in scalars_of(name, value):
            if metric in self.metrics or len(self.metrics) < MAX_METRICS:
                self.metrics[metric] = number

    def take_coded(self, raw_bytes: int, code_bytes: int) -> None:
        """Add the bytes that a codec encoded or decoded to the metrics."""
        for name, count in zip(CODED_METRICS, (raw_bytes, code_bytes), strict=True):
            self.metrics[name] = self.metrics.get(name, 0) + count

    def take_traffic(self, now: Traffic) -> None:
        """Add the traffic since the start; a peer that connected again begins at 0."""
        self.bytes_in = now.bytes_in - self.at_start.bytes_in
        self.bytes_out = now.bytes_out - self.at_start.bytes_out
        for peer, (came, went) in now.peers.items():
            before_in, before_out = self.at_start.peers.get(peer, (0, 0))
            if came < before_in or went < before_out:
                before_in = before_out = 0
            if came > before_in or went > before_out:
                self.say(peer, {"bytes_in": came - before_in, "bytes_out": went - before_out})

    def take_answers(self, responded: Iterable[str], missing: Mapping[str, str]) -> None:
        """Add the peers that answered a request, and the others with the reason.

        A round has any number of requests. A peer is in one of the two lists: one that answered one
        request, and another one not, is missing.
        """
        self.lost += [p for p in missing if p in self.responded]
        self.missing = list(dict.fromkeys([*self.missing, *missing]))
        self.missing_why |= missing
        absent = set(self.missing)
        answered = dict.fromkeys([*self.responded, *responded])
        self.responded = [peer for peer in answered if peer not in absent]

    def say(self, peer: str, what: Mapping[str, float]) -> None:
        """Add numbers of a peer in this round."""
        if peer in self.peers or len(self.peers) < MAX_PEERS_OF_A_ROUND:
            self.peers.setdefault(peer, {}).update(what)
        elif not self.tells_of_some:
            self.tells_of_some = True
            logger.info(
                "the round says of the first peers alone what they sent",
                extra={"target": self.target, "round": self.number, "peers": len(self.peers)},
            )

    def as_summary(self) -> dict[str, Any]:
        """Return its outcome: the missing peers, each with the reason, and the failures."""
        return {
            "round": self.number,
            "ok": self.ok,
            "missing": self.missing_why,
            "failures": self.failures,
        }


class Rounds:
    """The rounds of one `[[invoke]]` entry."""

    def __init__(
        self,
        entry: InvokeSection,
        node: Node,
        *,
        wake: Callable[[], None],
        traffic: Callable[[], Traffic],
        publish: Callable[[dict[str, Any]], None],
        done: int = 0,
        running: int | None = None,
        best: BestSoFar | None = None,
        save_best: Callable[[str, int, str, float], Awaitable[object]] | None = None,
        keep: Callable[[dict[str, Any]], None] = lambda _: None,
        artifact: str = "",
        settings: str = "",
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """Create the rounds of one entry.

        `done` rounds were run before a restart and count towards `times`. `running` is the
        execution that was running then, if the node has resumed it. `best` tracks `entry.best`,
        with the earlier rounds counted. `save_best(target, round, metric, value)` is awaited after
        each round that is the best so far; `keep` gets each round that has ended.
        """
        self._entry = entry
        self._node = node
        self._wake = wake
        self._traffic = traffic
        self._publish = publish
        self._keep = keep
        self._save_best = save_best
        self._artifact = artifact
        self._settings = settings
        self._wall_clock = wall_clock
        self.best = best
        self._said_missing = False
        # The reason why the rounds ended before `times`; "" while they did not.
        self.stopped = ""
        # A failure that every further round would repeat.
        self._final = ""
        self._peers_changed = trio.Event()
        self._current: Round | None = None
        self.done = done
        self.history: deque[Round] = deque(maxlen=KEPT_ROUNDS)
        if running is not None:
            self._watch(running)
        self.waiting_for: str = ""
        # trio's times: when the wait for peers began, when the next round may start, and when a
        # round last succeeded or had to wait.
        self.waiting_since_s: float | None = None
        self._due_s: float | None = None
        self._good_s: float | None = None
        self._failed_in_a_row = 0
        self.complete = False
        self._stop_asked = trio.Event()
        # trio's time at the end of the last round or, before the first, at the start of the rounds.
        self._quiet_since_s: float | None = None

    @property
    def entry(self) -> InvokeSection:
        """The configuration entry of these rounds."""
        return self._entry

    def as_json(self) -> dict[str, Any]:
        """Return the progress of these rounds."""
        return {
            "target": self._entry.target,
            "done": self.done,
            "of": self._entry.times or None,
            "complete": self.complete,
            "stopped": self.stopped,
            "best": None if self.best is None else self.best.as_json(),
            "waiting_for": self.waiting_for,
            "waiting_s": None
            if self.waiting_since_s is None
            else round(trio.current_time() - self.waiting_since_s, 3),
            "running": None if self._current is None else self._current.number,
            "last": next(
                (r.as_summary() for r in reversed(self.history) if r.ok is not None), None
            ),
        }

    @property
    def running(self) -> int | None:
        """The execution of the current round."""
        return None if self._current is None else self._current.execution

    def stalled(self, now_s: float, *, working: bool) -> str:
        """Return why rounds make no progress, or "".

        `working`: something in the current round is within its own deadline.
        """
        if self.complete or self._good_s is None or self.waiting_since_s is not None:
            return ""
        late_s = now_s - self._good_s - FAILED_PERIODS * self._entry.every_s
        if self._failed_in_a_row >= FAILED_ROUNDS and late_s > ROUND_SLACK_S:
            last = next((r for r in reversed(self.history) if r.ok is False), None)
            why = "" if last is None else "; ".join(last.failures)
            return (
                f"the last {self._failed_in_a_row} rounds failed, none ended well for "
                f"{now_s - self._good_s:.0f} s: {why or 'no reason was told'}"
            )
        current = self._current
        if current is not None:
            ran_s = now_s - current.started_s
            if working or ran_s <= ROUND_SLACK_S:
                return ""
            return f"round {current.number} runs for {ran_s:.0f} s, and waits for nothing"
        if self._due_s is not None and now_s - self._due_s > ROUND_SLACK_S:
            return f"the next round should have started {now_s - self._due_s:.0f} s ago"
        return ""

    def finished(self) -> list[dict[str, Any]]:
        """Return the finished rounds that are kept, oldest first."""
        return [each.as_json() for each in self.history if each.ok is not None]

    @property
    def period_s(self) -> float:
        """Seconds from start to start; 0: a round begins when the one before has ended."""
        return self._entry.every_s

    @property
    def age_s(self) -> float | None:
        """Seconds since the end of a round or, before the first, since the start.

        None when all are done, or none is due yet.
        """
        if self.complete or self._quiet_since_s is None:
            return None
        return trio.current_time() - self._quiet_since_s

    async def run(self, save: Save) -> None:
        """Run the rounds; `save` is awaited after each, before the next one begins.

        A round is published when its checkpoint is written, so that none is published twice,
        whenever the node is killed; the next one may have begun by then.
        """
        self._good_s = self._due_s = self._quiet_since_s = trio.current_time()
        published = trio.Event()
        published.set()
        while self._wants_more():
            finished = self._resumed()
            if finished is None:
                await self._until_start_condition()
                if self._stop_asked.is_set():
                    continue
                finished = self._start()
            started = finished.started_s
            self._due_s = None
            await finished.finished.wait()
            self._quiet_since_s = trio.current_time()
            self.done += 1
            self._due_s = max(trio.current_time(), started + self._entry.every_s)
            if finished.ok:
                self._good_s, self._failed_in_a_row = trio.current_time(), 0
            else:
                self._failed_in_a_row += 1
            self._judge(finished)
            published = trio.Event()
            await save(partial(self._tell, finished, published))
            await self._keep_best(finished)
            pause_s = 0.0 if finished.ok else RETRY_PAUSE_S
            due_s = max(trio.current_time() + pause_s, started + self._entry.every_s)
            if due_s > trio.current_time():
                with trio.move_on_at(due_s):
                    await self._stop_asked.wait()
        await published.wait()
        self.complete = True
        complete = {"type": "rounds_complete", "target": self._entry.target, "done": self.done}
        self._publish({**complete, "stopped": self.stopped})

    def _wants_more(self) -> bool:
        if self._entry.times and self.done >= self._entry.times:
            return False
        best = self.best
        if self._stop_asked.is_set():
            self.stopped = "asked to stop"
        elif self._final:
            self.stopped = self._final
        elif best is not None and best.reached is not None:
            self.stopped = f"{best.metric} {best.reached:.6g} reached until={best.until:g}: {best}"
        elif best is not None and best.exhausted:
            self.stopped = f"nothing better in {best.patience} rounds: {best}"
        else:
            return True
        logger.info("rounds stopped early", extra={"reason": self.stopped, "done": self.done})
        return False

    def _tell(self, finished: Round, published: trio.Event) -> None:
        """Publish the outcome of a round, and pass the round to the history."""
        shown = finished.as_json()
        self._keep(shown)
        self._publish({"type": "round_finished", **shown})
        fields = {
            "round": finished.number,
            "ok": finished.ok,
            "seconds": round(finished.seconds, 3),
            "responded": len(finished.responded),
            "asked": len(finished.responded) + len(finished.missing),
            "lost": len(finished.lost),
            "missing": finished.missing_why,
            "refused": finished.refused,
        }
        if finished.ok:
            logger.info("round finished", extra=fields)
        else:
            logger.warning(
                "round failed", extra={**fields, "failures": "; ".join(finished.failures)}
            )
        published.set()

    def _judge(self, current: Round) -> None:
        """Mark a round that is the best so far."""
        best = self.best
        if best is None:
            return
        value = current.metrics.get(metric_name(best.metric))
        if current.ok and value is None and not self._said_missing:
            self._said_missing = True
            have = ", ".join(current.metrics) or "none"
            logged = {"best": best.metric, "metrics": have}
            logger.warning("the target has no such metric, so no round is the best", extra=logged)
        current.best = best.take(current.number, value, ok=bool(current.ok))

    async def _keep_best(self, current: Round) -> None:
        """Store the weights of a round that is the best so far."""
        best = self.best
        value = None if best is None else current.metrics.get(metric_name(best.metric))
        if best is not None and current.best and value is not None and self._save_best is not None:
            try:
                await self._save_best(self._entry.target, current.number, best.metric, value)
            except BbnodeError as error:
                logger.warning("the best round is not kept", extra={"reason": str(error)})

    def _start(self) -> Round:
        declared = self._node.inputs(self._entry.target)
        inputs = {
            name: to_value(name, value, declared.get(name))
            for name, value in self._entry.inputs.items()
        }
        deadline_ns = round(self._entry.deadline_s * 1e9) or None
        execution = self._node.invoke(self._entry.target, inputs, deadline_ns=deadline_ns)
        started = self._watch(execution)
        started.started_s = trio.current_time()
        started.at_start = self._traffic()
        self._publish({"type": "round_started", "round": started.number, "execution": execution})
        self._wake()
        return started

    def _watch(self, execution: int) -> Round:
        """Make an execution of the node the current round."""
        self._current = Round(
            number=self.done + 1,
            target=self._entry.target,
            execution=execution,
            artifact=self._artifact,
            settings=self._settings,
            started_at=self._wall_clock(),
        )
        self.history.append(self._current)
        return self._current

    def _resumed(self) -> Round | None:
        """Return the round from before a restart, if its execution runs or has ended since."""
        if not self.history or self.history[-1].number != self.done + 1:
            return None
        last = self.history[-1]
        if last.ok is None and last.execution not in {e.execution for e in self._node.executions()}:
            self.history.pop()
            self._current = None
            return None
        last.started_s = trio.current_time()
        last.at_start = self._traffic()
        return last

    def observe(self, step: steps.Step) -> None:
        """Collect the steps of the current round; called for every step of the node."""
        if isinstance(step, steps.PeerUp | steps.PeerDown) or (
            isinstance(step, steps.Telemetry) and step.name in ("peer.ready", "peer.not_ready")
        ):
            self.peers_changed()
            return
        current = self._current
        if current is None:
            return
        match step:
            case steps.AppEvent() if step.execution == current.execution:
                current.take_output(step.topic, step.value)
            case steps.OutputSkipped() if step.execution == current.execution:
                if len(current.skipped) < MAX_KEPT_OUTPUTS:
                    current.skipped[step.name] = step.reason
            case steps.OpFailed() if step.execution == current.execution:
                if len(current.failures) < MAX_KEPT_OUTPUTS:
                    current.failures.append(str(step))
                if step.is_final:
                    self._final = step.detail
            case steps.Telemetry() if step.attributes.get("execution") != current.execution:
                return
            case steps.Telemetry(name="request.closed", attributes=attributes):
                missing = {
                    str(p): attributes["reasons"].get(str(p), LATE) for p in attributes["missing"]
                }
                current.take_answers(list(map(str, attributes["responded"])), missing)
                for peer in attributes["responded"]:
                    current.say(str(peer), attributes.get("numbers", {}).get(peer, {}))
            case steps.Telemetry(name="codec.encoded" | "codec.decoded", attributes=attributes):
                current.take_coded(attributes["raw_bytes"], attributes["code_bytes"])
            case steps.Telemetry(name="contribution.refused", attributes=attributes):
                current.refused[str(attributes["peer"])] = attributes["reason"]
            case steps.ExecutionFinished() if step.execution == current.execution:
                current.ok = step.ok
                current.seconds = trio.current_time() - current.started_s
                current.take_traffic(self._traffic())
                self._current = None
                current.finished.set()

    def stop(self) -> None:
        """End the rounds after the current one."""
        self._stop_asked.set()
        self.peers_changed()

    def peers_changed(self) -> None:
        """Check the start condition again."""
        self._peers_changed.set()

    async def _until_start_condition(self) -> None:
        wait = self._entry.wait_for
        if wait is None:
            return
        # All peers are worth a wait once, at the start; later, enough of them are enough, or every
        # round of a network that lost one peer would take timeout_s longer.
        is_first = self.done == 0 or not self.history
        wanted = {wait.peer_class: wait.enough_peers}
        if is_first:
            wanted = {wait.peer_class: wait.peers, **wait.also}
        with trio.move_on_after(wait.timeout_s):
            await self._until_settled(wanted)
        have = len(self._node.connected_peers(wait.peer_class))
        if self._stop_asked.is_set():
            return
        if have < wait.enough_peers and wait.on_timeout == "fail":
            raise TooFewPeers(
                f"{have} of {wait.enough_peers} peers of class {wait.peer_class!r} "
                f"{_connected(self._not_ready(wait.peer_class))}; waited {wait.timeout_s:g} s: "
                "start them, or raise wait_for.timeout_s"
            )
        if have < wait.enough_peers:
            await self._until_settled({wait.peer_class: wait.enough_peers})
        self.waiting_for = ""
        if self.waiting_since_s is not None and self._good_s is not None:
            # A wait for peers is not a stall.
            self._due_s = trio.current_time()
            self._good_s += self._due_s - self.waiting_since_s
        self.waiting_since_s = None

    async def _until_settled(self, wanted: Mapping[str, int]) -> None:
        """Wait for the wanted number of peers of each class, and until their first reports have
        arrived.
        """
        while True:
            for peer_class, peers in wanted.items():
                await self._until_connected(peers, peer_class)
            if self.waiting_since_s is None or self._stop_asked.is_set():
                return
            # A newly connected peer may report next that it is not ready.
            await trio.sleep(SETTLE_S)
            if all(len(self._node.connected_peers(c)) >= n for c, n in wanted.items()):
                return

    def _not_ready(self, peer_class: str) -> dict[str, str]:
        """Return the connected peers of a class that report not to be ready for it, and why."""
        return {
            str(peer): each.reason
            for peer, each in self._node.peers_not_ready().items()
            if peer_class in each.classes
        }

    async def _until_connected(self, want: int, peer_class: str) -> None:
        while (have := len(self._node.connected_peers(peer_class))) < want:
            if self._stop_asked.is_set():
                return
            unready = self._not_ready(peer_class)
            text = f"{want} peers of class {peer_class!r}, {have} {_connected(unready)}"
            if text != self.waiting_for:
                self.waiting_for = text
                if self.waiting_since_s is None:
                    self.waiting_since_s = trio.current_time()
                reasons = {"not_ready": "; ".join(unready.values())} if unready else {}
                logger.info("waiting for peers", extra={"want": want, "have": have, **reasons})
                state = {"class": peer_class, "want": want, "have": have, "not_ready": unready}
                self._publish({"type": "waiting_for_peers", **state})
            self._peers_changed = trio.Event()
            with trio.move_on_after(RECHECK_S):
                await self._peers_changed.wait()
            if have > MANY_PEERS:
                # A check takes about a microsecond per peer, and a thousand may connect one by one.
                await trio.sleep(PAUSE_S)


def _connected(unready: Mapping[str, str]) -> str:
    """Return "connected", and the connected peers that can't work, to follow a number."""
    lines = [short_peer(f"{peer}: {why}") for peer, why in unready.items()]
    if not lines:
        return "connected"
    return f"connected and ready; not ready: {listed(lines, SHOWN_NOT_READY)}"


def to_value(name: str, value: InputValue, declared: TypeNode | None) -> Value:
    """Return a configured input as a run-time value, numbers as a tensor of the declared dtype.

    Raises DeploymentError if a number does not fit.
    """
    if value == "trigger":
        return TRIGGER
    if isinstance(value, TextInput):
        if declared is types.TENSOR_STRING:
            return np.array(value.text, object)
        return value.text.encode()
    try:
        return numbers(value, declared)
    except ValueError as error:
        raise DeploymentError(f"[[invoke]] input {name!r} is {value!r}: {error}") from error
