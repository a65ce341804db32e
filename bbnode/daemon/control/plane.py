"""The control plane of one daemon, assembled from its parts.

Rule: the daemon creates one, passes it every step of its node, and runs it in its nursery; no other
part of the daemon knows HTTP.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import trio

from bbnode.daemon import paths
from bbnode.daemon.access.control import AccessControl
from bbnode.daemon.config.reload import Changes
from bbnode.daemon.config.sources import ResolvedConfig
from bbnode.daemon.control import token as tokens
from bbnode.daemon.control.feed import Feed, followed
from bbnode.daemon.control.host import Host
from bbnode.daemon.control.http import application
from bbnode.daemon.control.listen import is_loopback, parse_metrics, parse_tcp
from bbnode.daemon.control.routes import ENDPOINTS
from bbnode.daemon.control.server import ControlLimits, ControlServer
from bbnode.daemon.control.trace import TRACE_STEPS, TraceLog
from bbnode.daemon.network.dial_back import Ask
from bbnode.daemon.network.ping import Ping
from bbnode.engine import Node, steps
from bbnode.transport.base import Transport
from bbnode.transport.driver import Driver

logger = logging.getLogger(__name__)

# Seconds for subscribers to read the last lines before they are cut off.
DRAIN_S = 0.5


class ControlPlane:
    """The control plane: feeds of events and log lines, traces, the application and its server."""

    def __init__(
        self,
        resolved: ResolvedConfig,
        *,
        artifact_sha256: str,
        artifact_targets: tuple[str, ...],
        node: Node,
        backend: Transport,
        driver: Driver,
        ping: Ping,
        dial_back: Ask,
        save: Callable[[], Awaitable[int]],
        stop: Callable[[], None],
        reload: Callable[[], Changes],
        access: AccessControl,
        logger_name: str = "",
        limits: ControlLimits | None = None,
    ) -> None:
        """Create the control plane, which listens once `run`; arguments are as in `Host`.

        Raises `TcpRefused`, `TokenFileUnsafe` or `StorageError` if the configuration asks for TCP
        or metrics.
        """
        self.host = Host(
            resolved=resolved,
            artifact_sha256=artifact_sha256,
            artifact_targets=artifact_targets,
            node=node,
            backend=backend,
            driver=driver,
            events=Feed("event"),
            logs=Feed("log"),
            trace=TraceLog(node.set_tracing),
            save=save,
            stop=stop,
            reload=reload,
            ping=ping,
            dial_back=dial_back,
            access=access,
            logger_name=logger_name,
        )
        asked = resolved.config.control
        tcp = None if asked.tcp is None else parse_tcp(asked.tcp)
        metrics = None if asked.metrics is None else parse_metrics(asked.metrics)
        token = None
        if tcp is not None or (metrics is not None and not is_loopback(metrics[0])):
            own = tokens.token_file(resolved.state_dir)
            configured = asked.token_file
            token = tokens.load_or_create_token(
                own if configured is None else resolved.absolute(configured, "control.token_file")
            )
        limits = ControlLimits() if limits is None else limits
        counts: Counter[str] = Counter()
        self.server = ControlServer(
            paths.control_socket(resolved.state_dir),
            app=application(ENDPOINTS, self.host, request_s=limits.request_s, counts=counts),
            counts=counts,
            group=asked.group,
            tcp=tcp,
            metrics=metrics,
            token=token,
            hosts=asked.hosts,
            limits=limits,
        )
        self.host.counters.append(self.server.counters)

    def publish(self, event: Mapping[str, Any]) -> None:
        """Pass an event to its subscribers; never waits."""
        self.host.events.publish(event)

    def observe(self, step: steps.Step, event: Mapping[str, Any] | None) -> None:
        """Handle a step of the node, and its event, if any."""
        self.host.outcomes.observe(step)
        self.host.trace.observe(step)
        if event is not None and not isinstance(step, TRACE_STEPS):
            self.publish(event)

    async def run(self, *, task_status: trio.TaskStatus[Path] = trio.TASK_STATUS_IGNORED) -> None:
        """Listen until cancelled. Raises as `ControlServer.run`."""
        self.host.started_s = trio.current_time()
        with followed(self.host.logs, self.host.logger_name):
            async with trio.open_nursery() as nursery:
                path = await nursery.start(self.server.run)
                if self.server.tcp_port is not None:
                    logger.info("control on TCP", extra={"port": self.server.tcp_port})
                if self.server.metrics_port is not None:
                    logger.info("metrics on TCP", extra={"port": self.server.metrics_port})
                task_status.started(path)

    async def finish(self) -> None:
        """End all streams cleanly, once there are no more events; then cancel `run`."""
        self.host.events.close()
        self.host.logs.close()
        with trio.move_on_after(DRAIN_S):
            await self.host.events.drained()
            await self.host.logs.drained()
