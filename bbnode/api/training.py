"""Rounds that a Python program asked for, and their result.

Rule: they are the node's own rounds, executed, stored and tracked like those of `[[invoke]]`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bbnode.ir.errors import BbnodeError


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainResult:
    """The rounds that `train` ran.

    Attributes:
        target: the class that ran them.
        rounds: each as `rounds()` returns it, oldest first.
        best: `metric`, `value` and `round` of the best one; None without `best`, or if no round had
            a number for it.
        stopped: the reason why they ended before all were run; "" if they did not.
    """

    target: str
    rounds: tuple[Mapping[str, Any], ...]
    best: Mapping[str, Any] | None = None
    stopped: str = ""
    history: Mapping[str, tuple[float | None, ...]] = field(init=False)
    """Each metric over the rounds; None where a round had none."""

    def __post_init__(self) -> None:
        names = dict.fromkeys(name for row in self.rounds for name in row["metrics"])
        history = {name: tuple(row["metrics"].get(name) for row in self.rounds) for name in names}
        object.__setattr__(self, "history", history)

    @property
    def failures(self) -> tuple[str, ...]:
        """The failures of all rounds, each with the number of its round."""
        return tuple(
            f"round {row['round']}: {text}" for row in self.rounds for text in row["failures"]
        )


class RoundsFailed(BbnodeError):
    """No round ended well: `result` has the rounds and their failures."""

    def __init__(self, message: str, result: TrainResult) -> None:
        """Keep the `result` of the rounds."""
        super().__init__(message)
        self.result = result


def result_of(
    started: Mapping[str, Any], answer: Mapping[str, Any], rounds: Sequence[Mapping[str, Any]]
) -> TrainResult:
    """Return the result of rounds that are complete; `answer` is that of `GET /v1/rounds`.

    Raises RoundsFailed.
    """
    target = started["target"]
    progress: Mapping[str, Any] = next(
        (each for each in answer["invoke"] if each["target"] == target), {}
    )
    best = progress.get("best") or {}
    result = TrainResult(
        target=target,
        rounds=tuple(rounds),
        best={name: best[name] for name in ("metric", "value", "round")}
        if best.get("round")
        else None,
        stopped=progress.get("stopped") or "",
    )
    if result.rounds and not any(row["ok"] for row in result.rounds):
        first = result.failures[0] if result.failures else result.stopped
        raise RoundsFailed(f"all {len(result.rounds)} rounds failed: {first}", result)
    return result
