"""Values on their way into and out of a program, as Python has them.

Rule: tensors are numpy arrays, read-only on their way out, since the node may still use them; texts
are `str` objects in an array; everything else is a class of `bbnode.components.values`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from bbnode.daemon.invoke.exact import ValueOmitted, decoded
from bbnode.ir.errors import BbnodeError, EnvironmentFault
from bbnode.ir.texts import failure_text
from bbnode.ir.values import Value


@dataclass(frozen=True, slots=True, kw_only=True)
class InvokeResult:
    """An execution: its outputs by name, and how it ended.

    Attributes:
        execution: its number.
        ok: None while it runs, or while outputs that come by messages are missing.
        outputs: the first value of each output; tensors are read-only arrays.
        more: further values of an output, each with the peer that it came from: of a send to
            several peers there is one from each.
        skipped: outputs that have no value this time, and why.
        failures: lines that say which op failed, where and why.
        refused: peers that did not answer, or whose answer was not counted, and why.
        missing: outputs that may still come.
        left_out: what was beyond the bound of what is kept, or, of a daemon, of an answer.
    """

    execution: int
    ok: bool | None
    outputs: Mapping[str, Any] = field(default_factory=dict)
    more: Mapping[str, tuple[tuple[str, Any], ...]] = field(default_factory=dict)
    skipped: Mapping[str, str] = field(default_factory=dict)
    failures: tuple[str, ...] = ()
    refused: Mapping[str, str] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    left_out: int = 0

    def __getitem__(self, name: str) -> Any:
        """Return an output. Raises KeyError, which says why there is none where that is known."""
        if name in self.outputs:
            return self.outputs[name]
        why = self.skipped.get(name)
        known = ", ".join(self.outputs) or "none"
        raise KeyError(f"no output {name!r}: {why}" if why else f"no output {name!r}; has: {known}")


class ExecutionFailed(BbnodeError):
    """An op of the execution failed: `result` has the failures, and outputs that came anyway."""

    def __init__(self, message: str, result: InvokeResult) -> None:
        """Keep the `result` of the execution."""
        super().__init__(message)
        self.result = result


class InvokeTimeout(EnvironmentFault):
    """An execution did not end in time, and continues: `result` has its outputs so far."""

    def __init__(self, message: str, result: InvokeResult) -> None:
        """Keep the `result` so far."""
        super().__init__(message)
        self.result = result


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputValue:
    """A value that a program passed to the application, as an output or with `AppEmit`."""

    name: str
    value: Any
    target: str
    execution: int


def shown_value(value: Value) -> Any:
    """Return a value of the engine for a caller: a tensor as a read-only array, the rest as is."""
    if isinstance(value, np.ndarray | np.generic):
        array = np.asarray(value).view()
        array.flags.writeable = False
        return array
    return value


def outcome_of(answer: Mapping[str, Any]) -> InvokeResult:
    """Return the outcome in a daemon's answer; values of `more` stay as the daemon shows them.

    A value that was too large for the answer is counted in `left_out`.
    """
    outputs, left_out = {}, int(answer["left_out"])
    for name, value in answer["values"].items():
        try:
            outputs[name] = shown_value(decoded(value))
        except ValueOmitted:
            left_out += 1
    return InvokeResult(
        execution=answer["execution"],
        ok=answer["ok"],
        outputs=outputs,
        more={
            name: tuple((each["peer"], each["value"]) for each in values)
            for name, values in answer["more"].items()
        },
        skipped=dict(answer["skipped"]),
        failures=tuple(failure_text(failure) for failure in answer["failures"]),
        refused=dict(answer["refused"]),
        missing=tuple(answer["missing"]),
        left_out=left_out,
    )


def checked_outcome(outcome: InvokeResult, target: str, timeout_s: float) -> InvokeResult:
    """Return an outcome that is good, or that the caller did not wait for.

    Raises ExecutionFailed or InvokeTimeout.
    """
    if outcome.ok is False:
        why = "; ".join(outcome.failures) or "no reason was told"
        raise ExecutionFailed(f"execution {outcome.execution} of {target} failed: {why}", outcome)
    if outcome.ok is None and timeout_s > 0:
        missing = f"; {', '.join(outcome.missing)} may still come" if outcome.missing else ""
        raise InvokeTimeout(
            f"execution {outcome.execution} of {target} is not over after {timeout_s:g} s"
            f"{missing}; it goes on: wait longer (timeout_s), status() shows what it waits for",
            outcome,
        )
    return outcome
