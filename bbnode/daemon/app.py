"""The daemon: one node, its transport, its rounds and its control plane in one nursery.

Rule: every task is owned by `Daemon.run`; it starts in the order identity, artifact, node,
control socket, transport, rounds, and stops in the reverse order within STOP_BUDGET_S. A
second signal ends the process at once.
"""

from __future__ import annotations

import importlib
import logging
import os
import signal
import sys
from collections.abc import Mapping
from typing import Any

import trio
from multiaddr import Multiaddr

from bbnode import __version__
from bbnode.components.contracts import ComponentError
from bbnode.daemon import checkpoint, paths, sd_notify
from bbnode.daemon.artifact import Artifact, load_artifact, parse_artifact, serialize
from bbnode.daemon.config_sources import ResolvedConfig
from bbnode.daemon.control import ControlServer
from bbnode.daemon.events import step_to_event
from bbnode.daemon.rounds import Rounds
from bbnode.engine import All, Limits, Node, install, steps
from bbnode.ir.address import parse_address, peer_of_address
from bbnode.ir.errors import BbnodeError, DeploymentError
from bbnode.ir.peer import PeerId
from bbnode.transport.backend import Backend, Hello, TransportLimits
from bbnode.transport.driver import Driver, trio_clock_ns
from bbnode.transport.identity import load_or_create_identity

logger = logging.getLogger(__name__)

# The whole stop, as a supervisor sees it; systemd's own default is 90 s.
STOP_BUDGET_S = 5.0
# Of it, for peers to take what is queued for them.
TRANSPORT_GRACE_S = 2.0

# Shown to subscribers, not logged: several of them a round.
_QUIET_STEPS = (steps.AppEvent, steps.Telemetry, steps.ExecutionFinished)


class ComponentsModuleMissing(DeploymentError):
    """A module listed under node.components can't be imported."""


def run_daemon(resolved: ResolvedConfig) -> int:
    """Run a node until a signal; returns the exit code. Logging is configured already."""
    for name in resolved.config.node.components:
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise ComponentsModuleMissing(
                f"node.components names {name!r}, which can't be imported: {error}"
            ) from error
    with paths.lock_state_dir(resolved.state_dir):
        daemon = Daemon(resolved)
        trio.run(daemon.run)
        if daemon.tasks_running:
            # A component still computes in a worker thread and can't be interrupted. All
            # state is on disk: leave without waiting for it.
            logging.shutdown()
            sys.stdout.flush()
            os._exit(0)
    return 0


class Daemon:
    """Everything one `bbnode run` owns."""

    def __init__(self, resolved: ResolvedConfig) -> None:
        """Load identity and artifact and install the targets; nothing listens yet.

        Raises the typed errors of configuration, artifact, identity and install.
        """
        self._resolved = resolved
        config = resolved.config
        self._state_dir = resolved.state_dir
        self._identity = load_or_create_identity(paths.identity_file(self._state_dir))
        self._artifact = _find_artifact(resolved)
        self._node = self._install()
        self._saved = checkpoint.read(self._state_dir, self._artifact.sha256)
        if self._saved is not None:
            try:
                self._node.restore(self._saved.node)
                logger.info("restored", extra={"rounds_done": self._saved.rounds_done})
            except BbnodeError as error:
                logger.warning("snapshot refused, starting fresh", extra={"reason": str(error)})
                self._node, self._saved = self._install(), None
        self._backend = self._make_backend()
        self._driver = Driver(self._node, self._backend, observe=self._observe)
        self._control = ControlServer(paths.control_socket(self._state_dir))
        done = self._saved.rounds_done if self._saved is not None else {}
        self._rounds = [
            Rounds(
                entry,
                self._node,
                wake=self._driver.wake,
                bytes_moved=self._bytes_moved,
                publish=self._control.publish,
                done=done.get(entry.target, 0),
            )
            for entry in config.invoke
        ]
        self._stop = trio.Event()
        self._phase = "starting"
        self._started_s = 0.0

    @property
    def tasks_running(self) -> int:
        """Offloaded tasks that still run in worker threads."""
        return self._driver.tasks_running

    # -- building --------------------------------------------------------------------------

    def _install(self) -> Node:
        config = self._resolved.config
        return install(
            self._artifact.model,
            config.artifact.targets,
            peer_id=self._identity.peer_id,
            addresses=(),
            config=_slot_config(self._resolved),
            limits=Limits.from_caps(config.limits.effective()),
            seed=int.from_bytes(self._identity.peer_id.to_bytes()[-8:], "big"),
            incarnation=_next_incarnation(self._state_dir),
        )

    def _make_backend(self) -> Backend:
        # Not before the node is installed: an error of the configuration shows half a second
        # sooner without libp2p's import.
        from bbnode.transport.libp2p_backend import Libp2pBackend

        config = self._resolved.config
        hello = Hello(
            agent_version=f"bbnode/{__version__}",
            artifact_sha256=self._artifact.sha256,
            classes=self._node.classes,
            targets=self._node.targets,
        )
        caps = config.limits.effective()
        return Libp2pBackend(
            self._identity,
            listen=[Multiaddr(text) for text in config.network.listen],
            announce=[Multiaddr(text) for text in config.network.announce],
            hello=hello,
            limits=TransportLimits(
                max_envelope_bytes=caps["envelope_bytes"] or TransportLimits().max_envelope_bytes
            ),
        )

    # -- running ---------------------------------------------------------------------------

    async def run(self) -> None:
        """Serve until a signal or the control plane's `stop`."""
        self._started_s = trio.current_time()
        for name, command in (
            ("status", self._command_status),
            ("rounds", self._command_rounds),
            ("stop", self._command_stop),
        ):
            self._control.register(name, command)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch_signals)
            await nursery.start(self._control.run)
            async with trio.open_nursery() as work:
                await work.start(self._backend.run)
                self._node.set_addresses(self._backend.listen_addresses())
                await work.start(self._driver.run)
                # What waits for inputs or peers locks nothing; the rest runs before any body.
                self._node.run_bootstrap(All())
                self._driver.wake()
                self._dial_bootstrap()
                for rounds in self._rounds:
                    work.start_soon(rounds.run, self._save)
                self._say_ready()
                await self._stop.wait()
                await self._shut_down(work)
            nursery.cancel_scope.cancel()

    def _say_ready(self) -> None:
        self._phase = "ready"
        for address in self._backend.listen_addresses():
            logger.info("listening", extra={"address": str(address)})
        logger.info(
            "ready",
            extra={
                "peer_id": str(self._identity.peer_id),
                "targets": ",".join(self._node.targets),
                "artifact_sha256": self._artifact.sha256,
            },
        )
        self._control.publish({"type": "ready", "peer_id": str(self._identity.peer_id)})
        sd_notify.notify(sd_notify.READY, f"STATUS=running {', '.join(self._node.targets)}")

    def _dial_bootstrap(self) -> None:
        by_peer: dict[PeerId, list[Multiaddr]] = {}
        for text in self._resolved.config.network.bootstrap:
            address = parse_address(text)
            by_peer.setdefault(peer_of_address(address), []).append(address)
        for peer, addresses in by_peer.items():
            if peer != self._identity.peer_id:
                self._backend.keep_connected(peer, addresses)

    async def _shut_down(self, work: trio.Nursery) -> None:
        self._phase = "stopping"
        logger.info("stopping")
        self._control.publish({"type": "stopping"})
        sd_notify.notify(sd_notify.STOPPING)
        with trio.move_on_after(STOP_BUDGET_S - 1) as scope:
            self._driver.stop()
            await self._backend.stop(TRANSPORT_GRACE_S)
            await self._save()
        if scope.cancelled_caught:
            logger.warning("stop took too long, leaving")
        work.cancel_scope.cancel()

    async def _watch_signals(self) -> None:
        with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            async for signum in signals:
                if self._stop.is_set():
                    logger.warning("second signal: leaving at once")
                    logging.shutdown()
                    os._exit(128 + signum)
                logger.info("signal", extra={"signal": signal.Signals(signum).name})
                self._stop.set()

    async def _save(self) -> None:
        """Write a checkpoint; a node that is busy or a full disk costs only the checkpoint."""
        try:
            saved = checkpoint.Checkpoint(
                artifact_sha256=self._artifact.sha256,
                node=self._node.snapshot(),
                rounds_done={r.entry.target: r.done for r in self._rounds},
            )
            await trio.to_thread.run_sync(checkpoint.write, self._state_dir, saved)
        except (paths.StorageError, ComponentError) as error:
            logger.warning("no checkpoint", extra={"reason": str(error)})

    def _observe(self, step: steps.Step) -> None:
        event = step_to_event(step)
        if event is not None:
            self._control.publish(event)
            if not isinstance(step, _QUIET_STEPS):
                level = logging.WARNING if "failed" in event["type"] else logging.INFO
                logger.log(level, event["type"], extra=_log_fields(event))
        for rounds in self._rounds:
            rounds.observe(step)

    def _bytes_moved(self) -> int:
        counters = self._backend.counters()
        return counters["inbound.bytes"] + counters["outbound.bytes"]

    # -- control plane ---------------------------------------------------------------------

    async def _command_stop(self, _args: Mapping[str, Any]) -> Mapping[str, Any]:
        self._stop.set()
        return {"stopping": True}

    async def _command_rounds(self, _args: Mapping[str, Any]) -> Mapping[str, Any]:
        return {
            "rounds": [
                made.as_json() for r in self._rounds for made in r.history if made.ok is not None
            ],
            "invoke": [r.as_json() for r in self._rounds],
        }

    async def _command_status(self, _args: Mapping[str, Any]) -> Mapping[str, Any]:
        now_s = trio.current_time()
        return {
            "name": self._resolved.config.node.name,
            "peer_id": str(self._identity.peer_id),
            "version": __version__,
            "pid": os.getpid(),
            "phase": self._phase,
            "uptime_s": round(now_s - self._started_s, 3),
            "artifact_sha256": self._artifact.sha256,
            "targets": list(self._node.targets),
            "listen": [str(a) for a in self._backend.listen_addresses()],
            "peers": [
                {
                    "peer": str(p.peer),
                    "classes": list(p.hello.classes),
                    "direction": p.direction.value,
                    "address": str(p.address),
                    "agent": p.hello.agent_version,
                    "bytes_in": p.bytes_in,
                    "bytes_out": p.bytes_out,
                    "queued": p.queued_envelopes,
                    "rtt_ms": None if p.rtt_s is None else round(p.rtt_s * 1000, 3),
                    "connected_s": round(now_s - p.since_s, 3),
                }
                for p in self._backend.peers()
            ],
            "wanted": [
                {
                    "peer": str(w.peer),
                    "connected": w.connected,
                    "failed_dials": w.failed_dials,
                    "last_error": w.last_error,
                }
                for w in self._backend.wanted()
            ],
            "invoke": [r.as_json() for r in self._rounds],
            "executions": len(self._node.executions()),
            "waiting": [w.as_json(trio_clock_ns()) for w in self._node.waiting()],
            "tasks_running": self._driver.tasks_running,
            "counters": {
                **self._node.counters(),
                **self._driver.counters(),
                **{f"transport.{k}": v for k, v in self._backend.counters().items()},
                **self._control.counters(),
            },
        }


def _find_artifact(resolved: ResolvedConfig) -> Artifact:
    given = resolved.config.artifact
    if given.path is not None:
        return load_artifact(resolved.absolute(given.path), expected_sha256=given.sha256)
    from bbnode.daemon.build import compile_module

    module = str(given.module)  # ArtifactSection has exactly one of the two
    return parse_artifact(serialize(compile_module(module, given.args)), module)


def _slot_config(resolved: ResolvedConfig) -> dict[str, dict[str, Any]]:
    return {slot: dict(settings) for slot, settings in resolved.config.slots.items()}


def _next_incarnation(state_dir: Any) -> int:
    """A number that grows with every start, so that ids made before and after differ."""
    path = state_dir / "incarnation"
    try:
        last = int(path.read_text("ascii"))
    except (OSError, ValueError):
        last = 0
    paths.write_atomically(path, f"{last + 1}\n".encode("ascii"), mode=0o600)
    return last + 1


def _log_fields(event: Mapping[str, Any]) -> dict[str, Any]:
    # LogRecord has fields of its own by these names; a step may not overwrite them.
    return {
        f"step_{k}" if k in ("name", "args", "module") else k: v
        for k, v in event.items()
        if k != "type"
    }
