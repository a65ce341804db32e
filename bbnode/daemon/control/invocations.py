"""Executions that a client of the control plane waits for.

Rule: what is collected lives as long as the request that waits; the number of those is bounded
by the control plane's connections, and what is kept of each by `MAX_KEPT_OUTPUTS`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import trio

from bbnode.daemon.observing.events import summarize
from bbnode.engine import steps
from bbnode.ir.caps import MAX_KEPT_OUTPUTS


@dataclass(slots=True)
class Invocation:
    """One execution that is waited for."""

    execution: int
    outputs: dict[str, Any] = field(default_factory=dict)
    failures: list[dict[str, str]] = field(default_factory=list)
    left_out: int = 0
    ok: bool | None = None
    finished: trio.Event = field(default_factory=trio.Event)

    def as_json(self) -> dict[str, Any]:
        """How it went; `ok` is null while it runs."""
        return {
            "execution": self.execution,
            "ok": self.ok,
            "outputs": self.outputs,
            "failures": self.failures,
            "left_out": self.left_out,
        }


class Invocations:
    """Those that are waited for now, by execution."""

    def __init__(self) -> None:
        self._running: dict[int, Invocation] = {}

    def expect(self, execution: int) -> Invocation:
        """Collect what this execution gives, until `forget`."""
        return self._running.setdefault(execution, Invocation(execution))

    def forget(self, execution: int) -> None:
        """Nobody waits for it any more."""
        self._running.pop(execution, None)

    def observe(self, step: steps.Step) -> None:
        """Called for every step of the node."""
        if not self._running:
            return
        match step:
            case steps.AppEvent():
                found = self._running.get(step.execution)
                if found is None:
                    return
                if step.topic in found.outputs or len(found.outputs) < MAX_KEPT_OUTPUTS:
                    found.outputs[step.topic] = summarize(step.value)
                else:
                    found.left_out += 1
            case steps.OpFailed():
                found = self._running.get(step.execution)
                if found is None:
                    return
                if len(found.failures) < MAX_KEPT_OUTPUTS:
                    found.failures.append({"op": step.op, "kind": step.kind, "detail": step.detail})
                else:
                    found.left_out += 1
            case steps.ExecutionFinished():
                found = self._running.get(step.execution)
                if found is not None:
                    found.ok = step.ok
                    found.finished.set()
