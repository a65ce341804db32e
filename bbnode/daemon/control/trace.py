"""The steps of recent executions, kept while tracing is on.

Rule: bounded; the oldest are dropped. One execution is identified by its number, and over the
network by the peer and the wire request id of the message that started it: the id that one node
sent is the origin of the execution on another.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

from bbnode.daemon.observing.events import step_to_event
from bbnode.engine import steps
from bbnode.ir.caps import KEPT_STEPS

# Steps that are kept only here: ops are not events.
TRACE_STEPS = (
    steps.ExecutionStarted,
    steps.OpCompleted,
    steps.FillSent,
    steps.ExecutionEnded,
)
# Also kept here, so that a trace shows the outcome.
ALSO_TRACED = (
    *(steps.OpFailed, steps.OpNotRun, steps.AppEvent, steps.OutputSkipped),
    *(steps.ExecutionFinished, steps.PeerResolveFailed),
)


class TraceLog:
    """The recent steps of executions."""

    def __init__(
        self,
        set_tracing: Callable[[bool], None],
        *,
        kept: int = KEPT_STEPS,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Create a log; `set_tracing` switches the node's per-op steps."""
        self._set_tracing = set_tracing
        self._clock = clock
        self._kept: deque[dict[str, Any]] = deque(maxlen=kept)
        self.on = False

    def switch(self, *, on: bool) -> None:
        """Turn tracing of ops on or off; kept steps stay."""
        self._set_tracing(on)
        self.on = on

    def observe(self, step: steps.Step) -> None:
        """Keep a step of the node, if it belongs to an execution."""
        if isinstance(step, TRACE_STEPS) or (self.on and isinstance(step, ALSO_TRACED)):
            event = step_to_event(step)
            if event is not None:
                self._kept.append({"time_s": round(self._clock(), 6), **event})

    def of_execution(self, execution: int) -> list[dict[str, Any]]:
        """Return the steps of one execution, oldest first."""
        return [event for event in self._kept if event.get("execution") == execution]

    def started_by(self, source_peer: str, wire_req_id: int) -> list[int]:
        """Return the executions here that a message of another peer started."""
        return [
            event["execution"]
            for event in self._kept
            if event["type"] == "execution_started"
            and event["source_peer"] == source_peer
            and event["wire_req_id"] == wire_req_id
        ]

    def executions(self) -> list[int]:
        """Return the executions of which steps are kept, oldest first."""
        executions = {event["execution"]: None for event in self._kept if "execution" in event}
        return list(executions)
