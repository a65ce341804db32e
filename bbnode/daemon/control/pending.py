"""Executions that clients of the control plane wait for.

Rule: outputs are kept as long as the request that waits for them. The control plane's connections
bound the number of those requests, and `MAX_KEPT_OUTPUTS` the outputs of each.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

import trio

from bbnode.daemon.control.answers import ExecutionResult
from bbnode.daemon.observing.events import summarize
from bbnode.engine import steps
from bbnode.ir.caps import MAX_KEPT_OUTPUTS
from bbnode.ir.values import Value

_OBSERVED: Final = (
    *(steps.AppEvent, steps.OutputSkipped),
    *(steps.OpFailed, steps.ExecutionFinished),
)


@dataclass(slots=True)
class PendingExecution:
    """One execution that is waited for."""

    execution: int
    outputs: dict[str, Value] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    failures: list[dict[str, str]] = field(default_factory=list)
    left_out: int = 0
    ok: bool | None = None
    finished: trio.Event = field(default_factory=trio.Event)

    def as_json(self) -> ExecutionResult:
        """Return how it went so far."""
        return {
            "execution": self.execution,
            "ok": self.ok,
            "outputs": {name: summarize(value) for name, value in self.outputs.items()},
            "skipped": self.skipped,
            "failures": self.failures,
            "left_out": self.left_out,
        }


class PendingExecutions:
    """All executions that are waited for now."""

    def __init__(self) -> None:
        self._pending: dict[int, PendingExecution] = {}

    @contextmanager
    def collect(self, execution: int) -> Iterator[PendingExecution]:
        """Collect what an execution gives while the block runs."""
        try:
            yield self._pending.setdefault(execution, PendingExecution(execution))
        finally:
            self._pending.pop(execution, None)

    def observe(self, step: steps.Step) -> None:
        """Collect a step of the node if it is of an execution that is waited for."""
        if not isinstance(step, _OBSERVED):
            return
        found = self._pending.get(step.execution)
        if found is None:
            return
        match step:
            case steps.ExecutionFinished():
                found.ok = step.ok
                found.finished.set()
            case steps.AppEvent() if (
                step.topic in found.outputs or len(found.outputs) < MAX_KEPT_OUTPUTS
            ):
                found.outputs[step.topic] = step.value
            case steps.OutputSkipped() if len(found.skipped) < MAX_KEPT_OUTPUTS:
                found.skipped[step.name] = step.reason
            case steps.OpFailed() if len(found.failures) < MAX_KEPT_OUTPUTS:
                found.failures.append(step.as_json())
            case _:
                found.left_out += 1
