"""A run of a testbed: start the nodes, follow the rounds, stop the nodes, report the outcome.

Rule: it does what a user would do by hand: start daemons, query them over their control sockets,
stop them. Every wait has a deadline, and its message names the missing nodes. No daemon is left
running, however the run ends.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import trio
from rich.console import Console

from bbnode.daemon import paths
from bbnode.daemon.control.async_client import AsyncControlClient
from bbnode.daemon.control.client import ControlClient
from bbnode.daemon.control.errors import ControlError, ControlTimeout, NotRunning
from bbnode.daemon.control.json_lines import parse_object
from bbnode.daemon.testbed.nodes import (
    FAILED,
    ChildNode,
    has_earlier,
    held_folder,
    holder_of,
    settle,
    write_nodes,
)
from bbnode.daemon.testbed.plan import LocalPlan, totals
from bbnode.daemon.testbed.report import round_row
from bbnode.daemon.testbed.view import READY, RoundsView, value_text
from bbnode.engine.errors import did_you_mean
from bbnode.ir.errors import DeploymentError, EnvironmentFault

# From start to an answering control socket: imports of five processes on two cores.
START_TIMEOUT_S = 30.0
# The time from there until all nodes are connected.
JOIN_TIMEOUT_S = 20.0
# The addition to that time for each node: most of a second of a core for its imports.
START_PER_NODE_S = 1.5
# A killed node that invokes may be started again by hand within this time.
GONE_TIMEOUT_S = 60.0
# A daemon stops within node.stop_grace_s (5 s), if need be by its own last resort; the rest is for
# a machine with more daemons than cores.
STOP_TIMEOUT_S = 30.0
# Nodes that invoke stop first, so that their last round does not lose its peers one by one.
FIRST_STOP_TIMEOUT_S = 5.0
ASK_TIMEOUT_S = 2.0
ASK_TO_STOP_S = 1.0
ASK_EVERY_S = 0.1
CATCH_UP_EVERY_S = 1.0
# The period of checks of all nodes' states; longer with many nodes.
LOOK_EVERY_S = 0.5
LOOK_PER_NODE_S = 0.02
# Nodes that are up and not connected for this long are reported.
SAY_MISSING_S = 3.0
# Checks in a row that find a running node not ready, before a run gives up on it.
NOT_READY_LOOKS = 3
# The wait after the last round for outputs that come back as messages of their own.
LINGER_S = 5.0
# The shortest time between two printed values of an output outside rounds.
VALUE_EVERY_S = 1.0
# Processes that start at the same time: more would only push each other out of memory.
STARTING_PER_CORE = 8
# The resident size of a node with a small model.
NODE_BYTES = 110 * 1024 * 1024
MAX_LOG_BYTES_AT_ONCE = 65_536

_ROUND_EVENTS = (
    *("round_started", "round_finished", "rounds_complete", "request.response", "app_event"),
    *("peer_up", "peer_down"),
)
# Reasons of a node that is not ready which do not pass by themselves.
_LASTING = ("components", "listening")
_GONE = (NotRunning, ControlTimeout, ControlError)


class RunFailed(EnvironmentFault):
    """The testbed could not finish its work; the message says why."""


class UnknownNode(DeploymentError):
    """No node of the testbed has this name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """The options of a run, beside its plan."""

    out: Path
    # The port of the first node that others dial; 0: a free one.
    port: int = 0
    # The nodes resume from the state of an earlier run.
    keep: bool = False
    # Run until a signal, also when all rounds are done.
    runs_on: bool = False
    # Nodes whose log lines are shown.
    logs: tuple[str, ...] = ()
    # The time for which the rounds wait for all peers; then enough of them are enough. None: until
    # the testbed gives up.
    wait_s: float | None = None
    # The longest mean time of a round; None: no limit.
    round_limit_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOutcome:
    """The end of a run; `failure` is "" if all work was done.

    `folder` is that of the report: the output folder, or one inside it if an earlier run came back
    because this one never got far enough to replace it.
    """

    folder: Path
    rows: Sequence[Mapping[str, Any]]
    nodes: Sequence[ChildNode]
    values: Mapping[str, Mapping[str, Any]]
    ended: Mapping[str, Mapping[str, Any]]
    seconds: float
    failure: str
    interrupted: bool


def run_testbed(
    plan: LocalPlan,
    options: RunOptions,
    *,
    console: Console,
    finish: Callable[[RunOutcome], None],
) -> int:
    """Run a testbed to its end; `finish` is called with its outcome once all nodes have stopped.

    Returns 0 if all work was done. Raises RunFailed, and the errors of folder, ports and settings.
    """
    testbed = LocalTestbed(plan, options, console)
    outcome = trio.run(testbed.run)
    finish(outcome)
    if outcome.failure:
        raise RunFailed(outcome.failure)
    return 0


class LocalTestbed:
    """One run."""

    def __init__(self, plan: LocalPlan, options: RunOptions, console: Console) -> None:
        """Prepare a run; nothing is written or started yet. Raises UnknownNode."""
        for name in options.logs:
            if name not in plan.nodes:
                near = did_you_mean(name, plan.nodes, f"nodes: {', '.join(plan.nodes)}")
                raise UnknownNode(f"--logs: there is no node {name!r}{near}")
        self._plan = plan
        self._options = options
        self._out = options.out.absolute()
        self._console = console
        self._nodes: list[ChildNode] = []
        # Names of nodes by PeerId.
        self._names: dict[str, str] = {}
        self._view: RoundsView
        self._scope = trio.CancelScope()
        self._rows: dict[tuple[str, int], dict[str, Any]] = {}
        self._executions: set[tuple[str, int]] = set()
        self._values: dict[str, dict[str, Any]] = {}
        self._counts: dict[str, Counter[str]] = {}
        self._value_shown_s: dict[tuple[str, str], float] = {}
        self._complete: set[str] = set()
        # Invokers whose events are read now, and those that were silent for too long.
        self._answering: set[str] = set()
        self._away: set[str] = set()
        # For each node that invokes: finished rounds, the best of them, why they stopped early.
        self._ended: dict[str, dict[str, Any]] = {}
        self._progress = trio.Event()
        self._up: set[str] = set()
        # Nodes that have been ready at some time.
        self._ready: set[str] = set()
        self._folder: Path
        self._not_ready_looks: dict[str, int] = {}
        self._absent: list[str] = []
        self._has_begun = False
        self._failure = ""
        self._interrupted = False
        self._stopping = False

    @property
    def _patience_s(self) -> float:
        """The time for all nodes together to start and to find each other."""
        return START_TIMEOUT_S + JOIN_TIMEOUT_S + START_PER_NODE_S * len(self._plan.nodes)

    @property
    def _invokers(self) -> list[ChildNode]:
        return [node for node in self._nodes if node.planned.invokes]

    async def run(self) -> RunOutcome:
        """Start, watch, stop; return the outcome."""
        began = time.monotonic()
        options = self._options
        failure = ""
        report_folder = self._out
        with held_folder(self._out, keep=options.keep) as folder:
            self._folder = folder
            self._nodes = write_nodes(
                self._plan,
                folder,
                port=options.port,
                wait_s=self._patience_s if options.wait_s is None else options.wait_s,
            )
            self._names = {node.peer: node.name for node in self._nodes}
            invocation = self._plan.invocation
            self._view = RoundsView(
                self._console,
                rounds=0 if invocation is None else invocation.times,
                names=self._names,
                invokers=[node.name for node in self._invokers],
            )
            self._console.print(f"nodes    {totals(self._plan.groups)}", soft_wrap=True)
            self._console.print(f"logs     {folder}/NAME/daemon.log", soft_wrap=True)
            self._warn_of_many()
            async with trio.open_nursery() as nursery:
                await nursery.start(self._watch_signals)
                try:
                    with self._view, self._scope:
                        await self._work()
                finally:
                    self._stopping = True
                    with trio.CancelScope(shield=True):
                        await self._stop_all()
                nursery.cancel_scope.cancel()
            failure = self._verdict()
            if has_earlier(folder):
                report_folder = self._out / FAILED
                failure = failure.replace(str(folder), str(report_folder))
                self._console.print(
                    f"the run before stays in {folder}; this one is in {report_folder}",
                    soft_wrap=True,
                )
        return RunOutcome(
            folder=report_folder,
            rows=[self._rows[key] for key in sorted(self._rows, key=lambda key: (key[1], key[0]))],
            nodes=self._nodes,
            values=self._values,
            ended=self._ended,
            seconds=time.monotonic() - began,
            failure=failure,
            interrupted=self._interrupted,
        )

    def _verdict(self) -> str:
        """Return why the work was not finished, or ""."""
        invocation = self._plan.invocation
        if self._failure or invocation is None:
            return self._failure
        bad = sum(not row["ok"] for row in self._rows.values())
        finished = len(self._rows) - bad
        if len(self._complete) < len(self._invokers):
            asked = invocation.times * len(self._invokers)
            if self._interrupted and not asked:
                return ""
            how = "interrupted" if self._interrupted else "stopped"
            return f"{how} after {finished} of {asked or 'any number of'} rounds"
        if bad:
            why = next(
                (f": {row['failures'][0]}" for row in self._rows.values() if row["failures"]), ""
            )
            return f"{bad} of {len(self._rows)} rounds failed; see report.json{why}"
        return ""

    def _warn_of_many(self) -> None:
        count, cores = len(self._nodes), os.cpu_count() or 1
        free = _free_bytes()
        if free is not None and count * NODE_BYTES > free:
            self._console.print(
                f"note: {count} nodes take about {count * NODE_BYTES / 1e9:.0f} GB of memory, and "
                f"{free / 1e9:.0f} GB are free",
                soft_wrap=True,
            )
        elif count > STARTING_PER_CORE * cores:
            self._console.print(
                f"note: {count} nodes on {cores} cores take a while to start", soft_wrap=True
            )

    # -- running ---------------------------------------------------------------------------

    async def _work(self) -> None:
        """Start all nodes and follow them to the end; every failure cancels the scope."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch_processes)
            nursery.start_soon(self._watch_states)
            for name in self._options.logs:
                nursery.start_soon(self._show_log, name)
            late = self._invokers if self._plan.is_staged else []
            await self._start([node for node in self._nodes if node not in late])
            if late:
                await self._until_linked(without=late)
                await self._start(late)
            for node in self._invokers:
                nursery.start_soon(self._follow, node)
            for node in self._nodes:
                if not node.planned.invokes and self._outputs(node):
                    nursery.start_soon(self._follow_values, node)
            nursery.start_soon(self._until_linked)
            await self._until_done()
            nursery.cancel_scope.cancel()

    async def _until_done(self) -> None:
        invocation = self._plan.invocation
        limit_s = self._options.round_limit_s
        if invocation is None:
            await trio.sleep_forever()
        with trio.CancelScope() as scope:
            if limit_s is not None and invocation is not None:
                deadline_s = self._patience_s + invocation.times * limit_s
                scope.deadline = trio.current_time() + deadline_s
            while len(self._complete) < len(self._invokers):
                await self._progress.wait()
        if scope.cancelled_caught:
            self._fail(f"not all rounds were made within {deadline_s:.0f} s")
        if self._options.runs_on:
            self._view.note("all rounds are made; Ctrl-C stops the nodes")
            await trio.sleep_forever()
        with trio.move_on_after(LINGER_S):
            while self._outstanding():
                await self._progress.wait()

    def _outstanding(self) -> set[str]:
        """Return outputs of the invoked target that some round lacks, though no round failed."""
        if self._plan.invocation is None or not all(row["ok"] for row in self._rows.values()):
            return set()
        seen = Counter(
            name
            for row in self._rows.values()
            for name in (*row["outputs"], *row.get("skipped", ()))
        )
        for node in self._invokers:
            seen.update(self._counts.get(node.name, {}))
        wanted = self._plan.program.classes[self._plan.invocation.target].outputs
        return {name for name in wanted if seen[name] < len(self._rows)}

    def _outputs(self, node: ChildNode) -> bool:
        classes = self._plan.program.classes
        return any(classes[name].outputs for name in node.planned.group.classes)

    def _changed(self) -> None:
        """Wake the tasks that wait for progress of the run."""
        self._progress.set()
        self._progress = trio.Event()

    def _fail(self, why: str) -> None:
        self._failure = self._failure or why
        self._scope.cancel()

    async def _start(self, nodes: Sequence[ChildNode]) -> None:
        most = STARTING_PER_CORE * (os.cpu_count() or 1)
        for node in nodes:
            while sum(1 for each in self._nodes if self._is_starting(each)) >= most:
                await self._progress.wait()
            node.start()
            pid = node.process.pid if node.process is not None else 0
            self._view.state(node.name, "starting")
            self._view.note(f"started {node.name:<9} pid {pid}")

    def _is_starting(self, node: ChildNode) -> bool:
        return node.process is not None and node.exit_code is None and node.name not in self._up

    # -- the nodes -------------------------------------------------------------------------

    async def _watch_processes(self) -> None:
        """Report a node that ended and how to start it again; give up if that is of no use."""
        while True:
            for node in self._nodes:
                code = node.exit_code
                if code is None or node.exit_reported:
                    continue
                node.exit_reported = True
                self._changed()
                how = _signal_name(-code) if code < 0 else f"exit code {code}"
                self._view.state(node.name, f"gone ({how})")
                if code > 0 and (node.planned.invokes or not self._has_begun):
                    self._fail(
                        f"{node.name} gave up ({how}): {node.last_words()}; its log is {node.log}"
                    )
                words = f": {node.last_words()}" if code > 0 else ""
                self._view.note(
                    f"{node.name} ended ({how}){words}; start it again with: {node.start_command}"
                )
            await trio.sleep(ASK_EVERY_S)

    async def _watch_states(self) -> None:
        period_s = max(LOOK_EVERY_S, LOOK_PER_NODE_S * len(self._nodes))
        while True:
            async with trio.open_nursery() as nursery:
                for node in self._nodes:
                    if node.process is not None:
                        nursery.start_soon(self._look, node)
            # Once all nodes are up there is little to see.
            await trio.sleep(period_s if len(self._up) < len(self._nodes) else 4 * period_s)

    async def _look(self, node: ChildNode) -> None:
        readiness = await trio.to_thread.run_sync(_readiness, node, abandon_on_cancel=True)
        if readiness is None:
            return  # it does not answer yet, or has ended, which is reported elsewhere
        if readiness["phase"] == "starting":
            self._view.state(node.name, "starting")
            return
        self._up.add(node.name)
        self._changed()
        if readiness["ready"]:
            self._not_ready_looks.pop(node.name, None)
            self._view.state(node.name, READY)
            self._ready.add(node.name)
            if self._plan.invocation is None and len(self._ready) == len(self._nodes):
                settle(self._folder)
            return
        reasons = "; ".join(str(reason["detail"]) for reason in readiness["reasons"])
        self._view.state(node.name, f"not ready: {reasons}")
        lasts = any(reason["what"] in _LASTING for reason in readiness["reasons"])
        if lasts and not any(row["ok"] for row in self._rows.values()):
            looks = self._not_ready_looks.get(node.name, 0) + 1
            self._not_ready_looks[node.name] = looks
            if looks >= NOT_READY_LOOKS:
                self._fail(f"{node.name} is not ready: {reasons}; its log is {node.log}")

    async def _until_linked(self, without: Sequence[ChildNode] = ()) -> None:
        """Wait until all nodes that exchange messages are connected; fail if they are not.

        Returns as well once a round has begun: what is missing then is up to the program.
        """
        left_out = {node.name for node in without}
        by_name = {node.name: node for node in self._nodes if node.name not in left_out}
        wanted = {
            name: {other for other in node.planned.linked if other in by_name}
            for name, node in by_name.items()
        }
        late_s = trio.current_time() + SAY_MISSING_S
        with trio.move_on_after(self._patience_s):
            while not self._has_begun:
                wanted = {name: others for name, others in wanted.items() if others}
                await self._strike_off(wanted, by_name)
                if not any(wanted.values()):
                    return
                absent = self._missing(wanted)
                if len(self._up) < len(by_name):
                    late_s = trio.current_time() + SAY_MISSING_S
                elif trio.current_time() > late_s and absent != self._absent:
                    self._view.note(f"waiting for {', '.join(absent)}")
                    self._absent = absent
                await trio.sleep(max(LOOK_EVERY_S, LOOK_PER_NODE_S * len(wanted)))
            return
        absent = self._missing(wanted)
        first = by_name[absent[0]]
        self._fail(
            f"not all nodes were connected within {self._patience_s:.0f} s; missing: "
            f"{', '.join(absent)}; {first.name} says: {first.last_words()} ({first.log})"
        )

    async def _strike_off(
        self, wanted: dict[str, set[str]], by_name: Mapping[str, ChildNode]
    ) -> None:
        """Remove the established links, by the nodes' reports."""

        async def ask(name: str) -> None:
            for peer in await trio.to_thread.run_sync(
                _connected, by_name[name], abandon_on_cancel=True
            ):
                other = self._names.get(peer, "")
                wanted.get(name, set()).discard(other)
                wanted.get(other, set()).discard(name)

        async with trio.open_nursery() as nursery:
            for name in list(wanted):
                nursery.start_soon(ask, name)

    def _missing(self, wanted: Mapping[str, set[str]]) -> list[str]:
        """Return the nodes that are not up; if all are, those that lack a connection."""
        lacking = {name for name, others in wanted.items() if others}
        down = lacking - self._up
        # One end of each link is enough: the end that lacks many.
        return sorted(
            down
            or {
                max((name, *others), key=lambda n: len(wanted.get(n, ())))
                for name, others in wanted.items()
                if others
            }
        )

    async def _show_log(self, name: str) -> None:
        """Print the lines of a node's log as they come."""
        node = next(node for node in self._nodes if node.name == name)
        at, rest = node.log.stat().st_size if node.log.exists() else 0, b""
        while True:
            try:
                with node.log.open("rb") as stream:
                    stream.seek(at)
                    data = stream.read(MAX_LOG_BYTES_AT_ONCE)
            except OSError:
                data = b""
            at += len(data)
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                self._view.print(f"{name}: {line.decode('utf-8', 'replace')}")
            if not data:
                await trio.sleep(ASK_EVERY_S)

    # -- the rounds ------------------------------------------------------------------------

    async def _follow(self, node: ChildNode) -> None:
        """Follow a node's rounds across its restarts.

        A node that is away fails the run, unless others make rounds meanwhile.
        """
        heard, patience_s, has_answered = trio.current_time(), self._patience_s, False
        while node.name not in self._complete or self._options.runs_on or self._outstanding():
            try:
                async with AsyncControlClient(paths.control_socket(node.state_dir)) as client:
                    await self._catch_up(node, client)
                    has_answered, patience_s = True, GONE_TIMEOUT_S
                    self._answering.add(node.name)
                    await self._stream(node, client)
            except _GONE:
                pass
            if node.name in self._answering:
                self._answering.remove(node.name)
                heard = trio.current_time()
            if trio.current_time() - heard > patience_s:
                silence = f"{node.name} did not answer for {patience_s:.0f} s"
                if not has_answered or not self._answering:
                    self._fail(f"{silence}: {node.last_words()}; its log is {node.log}")
                if node.name not in self._away:
                    self._view.note(f"{silence}; the others go on")
                    self._away.add(node.name)
            else:
                self._away.discard(node.name)
            await trio.sleep(ASK_EVERY_S)

    async def _stream(self, node: ChildNode, client: AsyncControlClient) -> None:
        """Handle events until the node ends or all rounds are done."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._catch_up_often, node, nursery.cancel_scope)
            async for line in await client.stream("/v1/events", {"type": list(_ROUND_EVENTS)}):
                self._take(node, line["event"])
            nursery.cancel_scope.cancel()

    async def _catch_up_often(self, node: ChildNode, stream: trio.CancelScope) -> None:
        """Ask for finished rounds on a second connection, in case an event is lost."""
        while node.name not in self._complete:
            await trio.sleep(CATCH_UP_EVERY_S)
            try:
                async with AsyncControlClient(paths.control_socket(node.state_dir)) as client:
                    await self._catch_up(node, client)
            except _GONE:
                stream.cancel()  # the stream of events ends as well, and is opened again
                return

    async def _catch_up(self, node: ChildNode, client: AsyncControlClient) -> None:
        answer = await client.get("/v1/rounds")
        for record in answer["rounds"]:
            # With `keep`, earlier rounds may be of another program.
            if record["artifact"] == self._plan.program.artifact.sha256:
                self._take(node, {"type": "round_finished", **record})
        if answer["invoke"]:
            (progress, *_) = answer["invoke"]
            self._ended[node.name] = {key: progress.get(key) for key in ("done", "best", "stopped")}
            if progress["complete"]:
                self._completed(node)

    def _take(self, node: ChildNode, event: Mapping[str, Any]) -> None:
        match event["type"]:
            case "round_started":
                self._has_begun = True
                self._executions.add((node.name, event["execution"]))
                self._view.round_started(event["round"], node.name)
            case "request.response":
                self._view.answered(event["peer"])
            case "round_finished":
                self._has_begun = True
                key = (node.name, event["round"])
                if key not in self._rows:
                    self._rows[key] = round_row(node.name, event)
                    if event["ok"]:
                        settle(self._folder)
                    self._view.round_finished(self._rows[key])
            case "rounds_complete":
                self._ended.setdefault(node.name, {})["stopped"] = event.get("stopped")
                self._completed(node)
            case "app_event" if (node.name, event["execution"]) not in self._executions:
                self._take_value(node, event)
            case "peer_up" | "peer_down" if node is self._invokers[0]:
                name = self._names.get(event["peer"], "a peer")
                self._view.note(
                    f"{name} {'connected' if event['type'] == 'peer_up' else 'disconnected'}"
                )

    def _completed(self, node: ChildNode) -> None:
        if node.name not in self._complete and not self._rows and self._options.keep:
            self._view.note(f"{node.name}: all rounds were made before; for more raise --times")
        stopped = self._ended.get(node.name, {}).get("stopped")
        if stopped and node.name not in self._complete:
            self._view.note(f"{node.name} stopped early: {stopped}")
        self._complete.add(node.name)
        self._changed()

    async def _follow_values(self, node: ChildNode) -> None:
        """Follow outputs of a node without rounds, across its restarts."""
        while True:
            try:
                async with AsyncControlClient(paths.control_socket(node.state_dir)) as client:
                    async for line in await client.stream("/v1/events", {"type": ["app_event"]}):
                        self._take_value(node, line["event"])
            except _GONE:
                pass
            await trio.sleep(ASK_EVERY_S)

    def _take_value(self, node: ChildNode, event: Mapping[str, Any]) -> None:
        output, value = event["topic"], event["value"]
        self._values.setdefault(node.name, {})[output] = value
        self._counts.setdefault(node.name, Counter())[output] += 1
        self._changed()
        count = self._view.value(node.name, output, value)
        now_s = trio.current_time()
        if self._view.is_live:
            return
        if now_s - self._value_shown_s.get((node.name, output), -VALUE_EVERY_S) >= VALUE_EVERY_S:
            self._value_shown_s[node.name, output] = now_s
            so_far = f"  ({count} so far)" if count > 1 else ""
            shown = value_text(value, self._names)
            self._view.print(f"{node.name} {output} = {shown}{so_far}")

    # -- the end ---------------------------------------------------------------------------

    async def _watch_signals(
        self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Stop cleanly at the first signal, kill all nodes at the second."""
        with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM, signal.SIGHUP) as signals:
            task_status.started()
            async for _ in signals:
                if not self._interrupted and not self._stopping:
                    self._interrupted = True
                    self._view.note("stopping the nodes; once more to kill them")
                    self._scope.cancel()
                    continue
                for node in self._nodes:
                    if node.process is not None and node.exit_code is None:
                        node.process.kill()

    async def _stop_all(self) -> None:
        """Ask every node to stop, also those started by hand; kill ours that do not."""
        first = self._invokers if self._interrupted else []
        await _stop(first, FIRST_STOP_TIMEOUT_S)
        await _stop([node for node in self._nodes if node not in first], STOP_TIMEOUT_S)
        for node in self._nodes:
            if node.process is not None and node.exit_code is None:
                if not self._interrupted:
                    self._console.print(f"{node.name} did not stop in time: killed")
                node.process.kill()
                node.process.wait()


async def _stop(nodes: Sequence[ChildNode], timeout_s: float) -> None:
    async with trio.open_nursery() as nursery:
        for node in nodes:
            nursery.start_soon(_ask_to_stop, node)
    with trio.move_on_after(timeout_s):
        for node in nodes:
            if node.process is not None:
                await trio.to_thread.run_sync(node.process.wait, abandon_on_cancel=True)


async def _ask_to_stop(node: ChildNode) -> None:
    """Stop a daemon over its socket, or by a signal if it does not answer there."""
    try:
        async with AsyncControlClient(
            paths.control_socket(node.state_dir), timeout_s=ASK_TO_STOP_S
        ) as client:
            await client.post("/v1/stop")
    except _GONE:
        if node.process is not None and node.exit_code is None:
            node.process.terminate()
        elif pid := holder_of(paths.lock_file(node.state_dir)):
            # Another process was started by hand, and is still starting.
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGTERM)


def _readiness(node: ChildNode) -> dict[str, Any] | None:
    """Return a node's readiness, or None if it does not answer."""
    try:
        with _client(node) as client:
            return parse_object(client.fetch("GET", "/readyz")[1])
    except _GONE:
        return None


def _connected(node: ChildNode) -> list[str]:
    """Return the connected peers of a node; none if it does not answer."""
    try:
        with _client(node) as client:
            return [peer["peer"] for peer in client.get("/v1/peers")["peers"]]
    except _GONE:
        return []


def _client(node: ChildNode) -> ControlClient:
    return ControlClient(paths.control_socket(node.state_dir), timeout_s=ASK_TIMEOUT_S)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _free_bytes() -> int | None:
    """Return the memory that is free for programs, if the system reports it."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        lines = Path("/proc/meminfo").read_text("ascii").splitlines()
        return next(
            int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable")
        )
    except (OSError, ValueError, StopIteration, IndexError):
        return None
