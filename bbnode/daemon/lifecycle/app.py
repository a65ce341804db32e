"""The daemon: one node, its transport, its rounds and its control plane in one nursery.

Rule: every task is owned by `Daemon.run`; it starts in the order identity, artifact, node, control
socket, transport, rounds, and stops in the reverse order within `node.stop_grace_s`.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import trio

from bbnode.components.contracts import Model
from bbnode.daemon import paths
from bbnode.daemon.access.protocol import AccessProtocol
from bbnode.daemon.artifacts.artifact import Artifact
from bbnode.daemon.config import InvokeSection, TrackerSection
from bbnode.daemon.config.reload import Changes, compare
from bbnode.daemon.config.sources import ResolvedConfig
from bbnode.daemon.control import answers
from bbnode.daemon.control.host import Host, RoundsRefused
from bbnode.daemon.control.plane import ControlPlane
from bbnode.daemon.control.trace import TRACE_STEPS
from bbnode.daemon.history.history import RoundHistory, settings_digest
from bbnode.daemon.invoke.best import BestSoFar
from bbnode.daemon.invoke.reach import Reach
from bbnode.daemon.invoke.rounds import Rounds, Traffic
from bbnode.daemon.lifecycle import assembly, sd_notify
from bbnode.daemon.lifecycle.preparing import Preparing
from bbnode.daemon.lifecycle.process import OwnProcess, SharedProcess
from bbnode.daemon.network import dial_back, ping
from bbnode.daemon.network.agreeing import Agreeing
from bbnode.daemon.network.conduct import ConductWatch
from bbnode.daemon.network.discovery import Discovery
from bbnode.daemon.network.introductions import Introductions
from bbnode.daemon.network.passing import PassingPeers
from bbnode.daemon.network.reachability import Reachability
from bbnode.daemon.network.restarts import Restarts
from bbnode.daemon.network.routing import PeerFinder
from bbnode.daemon.network.versions import VersionWatch
from bbnode.daemon.observing.events import step_to_event
from bbnode.daemon.observing.watch import Stalled, Watch, WatchTargets
from bbnode.daemon.predicting.meaning import meaning_of
from bbnode.daemon.state import checkpoint
from bbnode.daemon.state.record_file import RecordFile
from bbnode.daemon.state.resend import Resend
from bbnode.daemon.upgrade.offers import UpgradedNode, Upgrades
from bbnode.engine import Adopted, All, Node, steps
from bbnode.engine.planning.data_slots import data_slots_of, declared_schemas
from bbnode.engine.readiness import reasons_text
from bbnode.ir.crossing import encode_crossings
from bbnode.ir.errors import BbnodeError
from bbnode.ir.onnx_file import program_of
from bbnode.ir.peer import PeerId
from bbnode.transport.base import TransportEvent, Unsent
from bbnode.transport.driver import Driver, StepObserver
from bbnode.transport.identity import load_or_create_identity
from bbnode.transport.topics import TopicSetup

logger = logging.getLogger(__name__)

# Fractions of the time for a stop: for the queues to drain, and for the final steps.
TRANSPORT_GRACE_SHARE = 0.4
LEAVE_SHARE = 0.2

# Published to subscribers but not logged: there are several of them per round.
_QUIET_STEPS = (
    *(steps.AppEvent, steps.OutputSkipped, steps.Telemetry, steps.ExecutionFinished),
    *TRACE_STEPS,
)


# A task beside the daemon, from when its control plane is up until it has stopped.
Companion = Callable[[Host], Awaitable[None]]


def run_daemon(
    resolved: ResolvedConfig,
    *,
    companion: Companion | None = None,
    record: Path | None = None,
    stop_at_eof: bool = False,
    again: Sequence[str] | None = None,
) -> int:
    """Run a node until a signal and return the exit code. Logging is configured already.

    `record` is a new file for all input; then the node can't restart by itself. With `stop_at_eof`
    the end of standard input is a signal too. `again` are the arguments of the command that
    restarts the node after an upgrade; by default those of this one.
    """
    assembly.import_components(resolved)
    process = OwnProcess(stop_at_eof=stop_at_eof)
    with (
        paths.lock_state_dir(resolved.state_dir),
        nullcontext() if record is None else RecordFile(record) as sink,
    ):
        daemon = Daemon(
            resolved, companion=companion, record=sink, process=process, restarts=sink is None
        )
        trio.run(daemon.run)
    if daemon.starts_anew:
        process.starts_anew(sys.argv[1:] if again is None else again)
    process.ends(at_once=bool(daemon.tasks_running) or companion is None)
    return 0


class Daemon:
    """One node that runs: `bbnode run` in a process of its own, `bbnode.open` in another's."""

    def __init__(
        self,
        resolved: ResolvedConfig,
        *,
        companion: Companion | None = None,
        record: RecordFile | None = None,
        process: SharedProcess | None = None,
        artifact: Artifact | None = None,
        restarts: bool = False,
    ) -> None:
        """Load identity and artifact and install the targets; nothing listens yet.

        The caller holds the lock of the state directory. `process` is by default another program's,
        which is not changed; `artifact` replaces the one that the configuration names. With
        `restarts`, the caller starts the node again if `starts_anew` is True at the end.

        Raises the typed errors of configuration, access, artifact, identity and install.
        """
        self._resolved = resolved
        self._companion = companion
        self._record = record
        self._process = SharedProcess() if process is None else process
        config = resolved.config
        self._state_dir = resolved.state_dir
        checkpoint.remove_orphans(self._state_dir)
        self._identity = load_or_create_identity(paths.identity_file(self._state_dir))
        access = assembly.make_access(resolved, self._identity)
        self._network = access.network  # that it installs for
        self._artifact = assembly.find_artifact(resolved) if artifact is None else artifact
        self._node, saved = checkpoint.restore_or_install(
            self._state_dir, self._artifact.sha256, self._install
        )
        self._backend = assembly.make_transport(
            resolved, self._artifact, self._identity, self._node, access
        )
        topics = None
        if assembly.carries_topics(self._backend, config):
            topics = self._backend.topics(
                TopicSetup(
                    network=access.network,
                    credentials=lambda: access.credentials,
                    on_fault=lambda peer, fault: self._conduct.misused_topic(peer, fault),
                )
            )
        self._access = AccessProtocol(
            access, self._backend, self._state_dir, self._identity, topics=topics
        )
        self._discovery = Discovery(
            self._node,
            self._backend,
            config.network,
            config.discovery,
            network_id=str(access.network or ""),
            authorizer=access.authorizer,
        )
        access.on_change = self._lists_changed
        self._introductions = (
            Introductions(
                self._backend, self._discovery, crossings=encode_crossings(self._node.crossings)
            )
            if config.discovery.introductions
            else None
        )
        self._driver = Driver(
            self._node,
            self._backend,
            observe=self._observe,
            heard=self._heard,
            reach=self._discovery.reach,
            keep=lambda step: self._resend.keep(step),
            doubt=lambda event: self._restarts.doubt(event),
            topics=topics,
        )
        self._resend = Resend(
            saved.unsent if saved else (),
            # A resumed node does not know yet that its connections are gone.
            expected=self._node.everyone_connected(),
            send=self._driver.send,
            failed=self._not_sent,
        )
        self._restarts = Restarts(
            self._node,
            self._backend,
            kept=self._resend.tags,
            take_received=self._driver.take_rest,
        )
        self._stop = trio.Event()
        self._reach: Reach | None = None
        self._rounds: list[Rounds] = []
        # For each target, including those that the configuration does not invoke.
        self._done_before = saved.rounds_done if saved else {}
        # Called with each step of the node, after the daemon's own parts.
        self.observers: list[StepObserver] = []
        self._checkpointer = checkpoint.Checkpointer(
            self._state_dir,
            self._artifact.sha256,
            self._node,
            self._rounds,
            self._done_before,
            schemas=lambda: self._agreeing.for_checkpoint(),
        )
        self._control = ControlPlane(
            resolved,
            artifact_sha256=self._artifact.sha256,
            artifact_targets=self._artifact.targets,
            node=self._node,
            backend=self._backend,
            driver=self._driver,
            ping=ping.register(self._backend),
            dial_back=dial_back.register(self._backend),
            save=self._checkpointer.save_now,
            stop=self.stop,
            reload=self._reload,
            access=access,
            logger_name=self._process.logger_name,
        )
        self._preparing = Preparing(
            self._node,
            wake=self._driver.wake,
            publish=self._control.publish,
            ready=self._say_ready,
            notify=self._process.notify,
        )
        slots = data_slots_of(self._artifact.model)
        self._agreeing = Agreeing(
            self._node,
            self._backend,
            slots,
            declared_schemas(self._node.schemas, slots),
            state_dir=self._state_dir,
            prepare=self._preparing.prepare,
            is_trusted=self._discovery.is_bootstrap,
            publish=self._control.publish,
            artifact_sha256=self._artifact.sha256,
            goes_on=saved is not None
            and (saved.upgrade is None or _keeps_models(self._node, saved.upgrade.adopted)),
        )
        self._control.host.data = self._agreeing.as_json
        self._control.host.reference = self._agreeing.reference_of
        self._history = RoundHistory(
            self._state_dir,
            config,
            artifact_sha256=self._artifact.sha256,
            peer_id=str(self._identity.peer_id),
        )
        self._rounds += [self._make_rounds(entry, saved) for entry in config.invoke]
        self._passing = PassingPeers(self._node, access.policy)
        self._conduct = ConductWatch(access, self._control.publish, config.network.bootstrap)
        self._finder = PeerFinder(
            self._backend,
            config.routing,
            network=access.network,
            authorizer=access.authorizer,
            on_fault=self._conduct.misrouted,
            program=bytes.fromhex(self._artifact.sha256),
        )
        self._reachability = Reachability(
            self._backend, self._control.host.dial_back, self._control.publish
        )
        self._control.host.reachability = self._reachability.as_json
        self._control.host.counters.append(self._reachability.counters)
        self._control.host.find_peer = self._finder.find
        self._control.host.routing = self._finder.as_json
        self._control.host.counters.append(self._finder.counters)
        self._versions = VersionWatch(self._node, self._artifact.sha256, self._control.publish)
        self.starts_anew = False
        self._upgrades = Upgrades(
            UpgradedNode(
                peer=self._identity.peer_id,
                artifact=self._artifact,
                network=access.network,
                backend=self._backend,
                resolved=lambda: self._resolved,
                is_bootstrap=self._discovery.is_bootstrap,
                is_quiet=self._is_quiet,
                publish=self._control.publish,
                restart=self._start_anew if restarts else None,
            )
        )
        self._control.host.offers = self._upgrades.as_json
        self._control.host.fetch_upgrade = self._upgrades.fetch
        self._control.host.restart = self._upgrades.restart
        self._control.host.rounds = self._rounds
        self._control.host.upgrade = saved.upgrade if saved else None
        self._control.host.history = self._history
        self._control.host.initial = partial(
            assembly.initial_component, self._resolved, self._artifact
        )
        self._control.host.meaning = partial(
            meaning_of,
            self._artifact.model,
            config.artifact.targets,
            component=self._node.component,
            reference=self._agreeing.reference_of,
        )
        self._control.host.counters.append(self._history.counters)
        self._control.host.later = self._later
        self._control.host.start_rounds = self._start_rounds
        self._control.host.counters.append(self._discovery.counters)
        if self._introductions is not None:
            self._control.host.counters.append(self._introductions.counters)
        self._control.host.discovery = self._discovery.as_json
        self._checkpointer.on_saved = self._control.host.note_saved
        self._watch = Watch(
            watched=WatchTargets(
                node=self._node,
                rounds=self._rounds,
                tasks_running=lambda: self._driver.tasks_running,
                saved_s=lambda: self._checkpointer.saved_s,
                save_every_s=lambda: self._checkpointer.every_s,
                alone_since_s=lambda: self._discovery.alone_since_s,
                membership=access.own_standing,
                refused_by=self._discovery.refused_by,
            ),
            publish=self._control.publish,
        )
        self._control.host.stalled = self._stalled
        self._control.host.counters.append(self._watch.counters)

    @property
    def tasks_running(self) -> int:
        """Offloaded tasks that still run in worker threads."""
        return self._driver.tasks_running

    @property
    def host(self) -> Host:
        """The node, as its control plane sees it."""
        return self._control.host

    # -- building --------------------------------------------------------------------------

    def _install(self) -> Node:
        if self._record is not None:
            self._record.restart()  # the last node refused its snapshot
        return assembly.install_node(
            self._resolved,
            self._artifact,
            self._identity,
            incarnation=assembly.next_incarnation(self._state_dir),
            network=self._network,
            record=self._record,
        )

    # -- running ---------------------------------------------------------------------------

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until `stop`, a signal or the control plane's `stop`; started when it is ready."""
        try:
            await self._serve(task_status)
        finally:
            # Needed if it failed before a clean stop.
            self._history.close()

    async def _serve(self, task_status: trio.TaskStatus[None]) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(
                self._process.handle_signals, self.stop, self._reload_on_signal, self._stop_begins
            )
            await nursery.start(self._control.run)
            if self._companion is not None:
                nursery.start_soon(self._companion, self._control.host)
            async with trio.open_nursery() as work:
                await work.start(self._driver.run)
                # Before any peer can reach us, so that the first round does not wait for data.
                await self._preparing.first(self._stop.is_set)
                await work.start(self._backend.run)
                self._node.set_addresses(self._backend.listen_addresses())
                work.start_soon(self._access.run)
                # Bootstraps that wait for inputs or peers lock nothing; others run first.
                self._node.run_bootstrap(All(components=False))
                self._driver.wake()
                await work.start(self._discovery.run)
                if self._introductions is not None:
                    work.start_soon(self._introductions.run)
                work.start_soon(self._finder.run, self._discovery)
                if self._resolved.config.routing.reachability:
                    work.start_soon(self._reachability.run)
                work.start_soon(self._resend.run)
                work.start_soon(self._restarts.run)
                work.start_soon(self._upgrades.run)
                work.start_soon(self._agreeing.run)
                for peer in self._resend.peers:
                    self._discovery.miss(peer)
                await work.start(self._checkpointer.run)
                self._checkpointer.set_period(self._resolved.config.node.snapshot_every_s)
                self._work = work
                for rounds in self._rounds:
                    work.start_soon(rounds.run, self._checkpointer.save_beside)
                self._say_started()
                work.start_soon(self._preparing.run)
                work.start_soon(self._watch.run)
                work.start_soon(self._passing.run)
                nursery.start_soon(self._process.report, self._status_line, self._polls)
                task_status.started()
                await self._stop.wait()
                await self._shut_down(work)
            await self._control.finish()
            nursery.cancel_scope.cancel()

    def _say_started(self) -> None:
        self._control.host.phase = "ready"
        for address in self._backend.listen_addresses():
            logger.info("listening", extra={"address": str(address)})
        if self._preparing.tell():
            self._say_ready()
        # For a supervisor the node is up even if components are missing: it keeps running and
        # retries.
        self._process.notify(sd_notify.READY, f"STATUS={self._status_line()}")
        self._process.started()

    def _say_ready(self) -> None:
        logger.info(
            "ready",
            extra={
                "peer_id": str(self._identity.peer_id),
                "targets": ",".join(self._node.targets),
                "artifact_sha256": self._artifact.sha256,
            },
        )
        self._control.publish({"type": "ready", "peer_id": str(self._identity.peer_id)})
        self._process.notify(f"STATUS={self._status_line()}")

    def _stalled(self) -> Sequence[Stalled]:
        """Return what has stalled; a node that starts or stops is not checked."""
        return self._watch.look() if self._control.host.phase == "ready" else ()

    def _polls(self) -> bool:
        return self._control.host.phase != "ready" or self._watch.polls()

    def _heard(self, event: TransportEvent) -> None:
        self._discovery.heard(event)
        if self._introductions is not None:
            self._introductions.heard(event)
        self._agreeing.heard(event)
        self._conduct.heard(event)
        self._versions.heard(event)
        self._upgrades.heard(event)
        self._resend.heard(event)
        self._restarts.heard(event)

    def _not_sent(self, peer: PeerId, tag: int, reason: str) -> None:
        self._node.send_failed(peer, reason, tag=tag, blames_peer=False)

    def _lists_changed(self) -> None:
        """Decide about all peers again; those that did not admit this node may do so now."""
        self._backend.reauthorize()
        self._discovery.forgive()

    def _is_quiet(self) -> bool:
        """Return True if nothing is running that a restart would end."""
        return not self._node.executions() and not self._driver.tasks_running

    def _start_anew(self) -> None:
        self.starts_anew = True
        self.stop()

    def _stop_begins(self) -> None:
        self._process.stop_begins(self._resolved.config.node.stop_grace_s)

    def stop(self) -> None:
        """Ask it to stop cleanly within `node.stop_grace_s`; `run` returns then."""
        self._stop_begins()
        self._stop.set()
        self._preparing.changed()

    async def _shut_down(self, work: trio.Nursery) -> None:
        self._control.host.phase = "stopping"
        logger.info("stopping")
        self._control.publish({"type": "stopping"})
        if self.starts_anew:
            self._process.reloading()  # for a supervisor it is the same process
        else:
            self._process.notify(sd_notify.STOPPING)
        grace_s = self._resolved.config.node.stop_grace_s
        unsent: Sequence[Unsent] = ()
        with trio.move_on_after(grace_s * (1 - LEAVE_SHARE)) as scope:
            self._driver.stop()
            self._discovery.stop()
            if self._introductions is not None:
                self._introductions.stop()
            await self._driver.stopped()
            self._driver.take_rest()
            # First, since the rest depends on others.
            unsent = self._unsent()
            await self._save_last(unsent)
            await self._backend.stop(grace_s * TRANSPORT_GRACE_SHARE)
            left = self._unsent()
            if self._driver.take_rest() or len(left) != len(unsent):
                await self._save_last(left)
            unsent = left
            # Last, since everything written is complete without them.
            raised = await trio.to_thread.run_sync(
                self._node.stop_components, abandon_on_cancel=True
            )
            for slot, error in raised.items():
                logger.warning("component failed at the stop", extra={"slot": slot, "why": error})
            await trio.to_thread.run_sync(self._history.close, abandon_on_cancel=True)
        if scope.cancelled_caught:
            logger.warning("stop took too long, leaving")
        _say_what_is_kept(unsent)
        work.cancel_scope.cancel()

    def _unsent(self) -> Sequence[Unsent]:
        return [*self._resend.unsent(), *self._backend.unsent()]

    async def _save_last(self, unsent: Sequence[Unsent]) -> None:
        if await self._checkpointer.save_last(unsent):
            self._process.saved()

    def _reload_on_signal(self) -> None:
        # No client waits for the result; it is in the log.
        with contextlib.suppress(BbnodeError):
            self._reload()

    def _reload(self) -> Changes:
        """Read the configuration again and apply the keys that can change.

        Raises the errors of configuration and access; then nothing has changed.
        """
        self._process.reloading()
        try:
            new = self._resolved.again()
            changes = compare(self._resolved, new)
            # The files of access control may have changed too.
            self._control.host.access.reload(new.config.access)
            self._preparing.again()
            self._apply(new, changes)
        except BbnodeError as error:
            logged = {"reason": str(error), "by": "reload"}
            logger.warning("reload refused, nothing changed", extra=logged)
            raise
        finally:
            self._process.notify(sd_notify.READY, f"STATUS={self._status_line()}")
        return changes

    def _apply(self, new: ResolvedConfig, changes: Changes) -> None:
        node = new.config.node
        if changes.touch("node.log_"):
            self._process.configure_logs(node.log_level, node.log_format)
        self._checkpointer.set_period(node.snapshot_every_s)
        self._resolved = self._control.host.resolved = new
        if changes.touch("network.bootstrap") or changes.touch("discovery.min_peers"):
            self._discovery.configure(new.config.network, new.config.discovery)
            self._conduct.know(new.config.network.bootstrap)
        if changes.touch("upgrade.auto"):
            self._upgrades.look_again()
        logger.info("reloaded", extra={"changed": ",".join(changes.applied) or "nothing"})
        if changes.needs_restart:
            logged = {"keys": ",".join(changes.needs_restart), "by": "reload"}
            logger.warning("needs a restart", extra=logged)
        self._control.publish(
            {
                "type": "reloaded",
                "changed": list(changes.applied),
                "needs_restart": list(changes.needs_restart),
            }
        )

    def _status_line(self) -> str:
        done = "".join(
            f"; {r.entry.target}: {r.done} of {r.entry.times or 'any number of'} rounds"
            for r in self._rounds
        )
        phase = self._control.host.shown_phase
        if phase == "not ready":
            phase = f"not ready: {reasons_text(self._node.not_ready())}"
        return f"{phase}, {', '.join(self._node.targets)}, {len(self._backend.peers())} peers{done}"

    def _observe(self, step: steps.Step) -> None:
        if isinstance(step, steps.SendEnvelope):
            # The most frequent step, which concerns no other part.
            self._discovery.observe(step)
        else:
            self._tell_all(step)
        for observer in self.observers:
            observer(step)

    def _tell_all(self, step: steps.Step) -> None:
        event = None if self._preparing.is_own(step) else step_to_event(step)
        self._control.observe(step, event)
        if event is not None and not isinstance(step, _QUIET_STEPS):
            level = logging.WARNING if "failed" in event["type"] else logging.INFO
            logger.log(level, event["type"], extra=_log_fields(event))
        if isinstance(step, steps.Telemetry) and step.name == "peer.not_ready":
            attributes = step.attributes
            logged = {"peer": str(attributes["peer"]), "reason": attributes["reason"]}
            logger.warning("peer is not ready", extra=logged)
        self._discovery.observe(step)
        self._finder.observe(step)
        self._conduct.observe(step)
        if isinstance(step, steps.PeerUp):
            self._access.peer_up(step.peer)
        self._preparing.observe(step)
        self._agreeing.observe(step)
        if isinstance(step, steps.BootstrapComplete) and self._control.host.phase == "ready":
            self._preparing.tell()
        for rounds in self._rounds:
            rounds.observe(step)

    def _later(self, target: str, entry: str | None) -> frozenset[str]:
        """Return the outputs that come after an execution; the program is analysed on first use."""
        if self._reach is None:
            self._reach = Reach(program_of(self._artifact.model))
        return self._reach.later(target, entry)

    def _make_rounds(self, entry: InvokeSection, saved: checkpoint.Checkpoint | None) -> Rounds:
        done = saved.rounds_done.get(entry.target, 0) if saved else 0
        settings = settings_digest(self._resolved.config, entry)
        self._history.begin(entry, done)
        if saved is not None and saved.upgrade is not None and entry.times and done >= entry.times:
            logger.warning(
                "all rounds were made with another version of the program: raise times for more",
                extra={"target": entry.target, "done": done, "times": entry.times},
            )
        best = BestSoFar.of(entry)
        if best is not None:
            best.replay(self._history.series(entry.target, best.metric), done)
            kept = checkpoint.best_round(self._state_dir, self._artifact.sha256)
            if (
                kept is not None
                and (kept.target, kept.output) == (entry.target, best.metric)
                and (kept.settings or settings) == settings
            ):
                # The node was killed before the round was in the history.
                best.take(kept.round, kept.value)
        running = saved.rounds_running.get(entry.target) if saved else None
        return self._rounds_of(entry, done=done, best=best, settings=settings, running=running)

    def _start_rounds(
        self, entry: InvokeSection, trackers: Sequence[TrackerSection] | None
    ) -> answers.RoundsStarted:
        """Start `entry.times` rounds. Raises RoundsRefused, and the errors of trackers."""
        if self._control.host.phase != "ready":
            raise RoundsRefused(f"the node is {self._control.host.phase}; start rounds once it is")
        before = next((r for r in self._rounds if r.entry.target == entry.target), None)
        if before is not None and not before.complete:
            raise RoundsRefused(
                f"{entry.target} makes rounds already ({before.done} done): wait until they are "
                "complete, or stop them"
            )
        done = self._done_before.get(entry.target, 0) if before is None else before.done
        times = done + entry.times if entry.times else 0
        entry = entry.model_copy(update={"times": times})
        settings = settings_digest(self._resolved.config, entry)
        run = self._history.begin(entry, done, anew=True, trackers=trackers)
        rounds = self._rounds_of(entry, done=done, best=BestSoFar.of(entry), settings=settings)
        if before is not None:
            self._rounds.remove(before)
        self._rounds.append(rounds)
        self._work.start_soon(rounds.run, self._checkpointer.save_beside)
        return {"target": entry.target, "run": run, "done_before": done}

    def _rounds_of(
        self,
        entry: InvokeSection,
        *,
        done: int,
        best: BestSoFar | None,
        settings: str,
        running: int | None = None,
    ) -> Rounds:
        return Rounds(
            entry,
            self._node,
            wake=self._driver.wake,
            traffic=self._traffic,
            publish=self._control.publish,
            done=done,
            running=running,
            best=best,
            save_best=partial(self._save_best, settings),
            keep=self._history.add,
            artifact=self._artifact.sha256,
            settings=settings,
        )

    async def _save_best(
        self, settings: str, target: str, number: int, metric: str, value: float
    ) -> None:
        best = checkpoint.BestRound(
            target=target, round=number, output=metric, value=value, settings=settings
        )
        await self._checkpointer.save_best(best)

    def _traffic(self) -> Traffic:
        counters = self._backend.counters()
        return Traffic(
            bytes_in=counters["inbound.bytes"],
            bytes_out=counters["outbound.bytes"],
            peers={str(peer): moved for peer, moved in self._backend.moved().items()},
        )


def _say_what_is_kept(unsent: Sequence[Unsent]) -> None:
    if unsent:
        logger.warning(
            "not acknowledged, kept for the next start",
            extra={
                "envelopes": len(unsent),
                "peers": len({each.peer for each in unsent}),
                "bytes": sum(each.size for each in unsent),
            },
        )


def _log_fields(event: Mapping[str, Any]) -> dict[str, Any]:
    # LogRecord has fields of its own by these names; a step may not overwrite them.
    return {
        f"step_{k}" if k in ("name", "args", "module") else k: v
        for k, v in event.items()
        if k != "type"
    }


def _keeps_models(node: Node, adopted: Adopted) -> bool:
    """Return True if a node continues with complete models of another version of its program."""
    return any(
        node.binding(slot).role == Model.ROLE
        and (slot not in adopted.parts or not adopted.parts[slot].left)
        for slot in adopted.taken
    )
