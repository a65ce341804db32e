"""Rounds that a Python program asked for, and what came of them.

Rule: they are the node's own rounds: made, kept and tracked as those of `[[invoke]]` are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bbnode.ir.errors import BbnodeError


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainResult:
    """The rounds that `train` made.

    Attributes:
        target: what made them, as a class.
        rounds: each as `rounds()` has it, oldest first.
        best: `metric`, `value` and `round` of the best one; None without `best`, or where no round
            had a number for it.
        stopped: why they ended before all were made; "" if they did not.
    """

    target: str
    rounds: tuple[Mapping[str, Any], ...]
    best: Mapping[str, Any] | None = None
    stopped: str = ""
    history: Mapping[str, tuple[float | None, ...]] = field(init=False)
    """Each metric over the rounds; None where a round had none."""

    def __post_init__(self) -> None:
        names = dict.fromkeys(name for made in self.rounds for name in made["metrics"])
        history = {name: tuple(made["metrics"].get(name) for made in self.rounds) for name in names}
        object.__setattr__(self, "history", history)

    @property
    def failures(self) -> tuple[str, ...]:
        """The failures of all rounds, each with the number of its round."""
        return tuple(
            f"round {made['round']}: {text}" for made in self.rounds for text in made["failures"]
        )


class RoundsFailed(BbnodeError):
    """No round ended well: `result` has them, with what failed."""

    def __init__(self, message: str, result: TrainResult) -> None:
        """`result` is how it went."""
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
    if result.rounds and not any(made["ok"] for made in result.rounds):
        first = result.failures[0] if result.failures else result.stopped
        raise RoundsFailed(f"all {len(result.rounds)} rounds failed: {first}", result)
    return result
