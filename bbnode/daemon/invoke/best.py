"""The best round of a target so far, and when to stop.

Rule: a round counts if it ended well and its metric is a finite number. It is the best if its
metric improves the best one by more than `min_delta`. With a `patience`, the rounds end after that
many successful rounds in a row without an improvement; a failed round does not count, one without
the metric, or with NaN, is no improvement. With an `until` they end when a round has reached it. A
node that starts again restores all of this from its history.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final

from bbnode.daemon.config import InvokeSection

# Metrics of which less is better, unless the configuration says otherwise.
_LESS_IS_BETTER: Final = re.compile(
    r"(^|[._\-/])(\w*loss|\w*error|err|mse|rmse|mae|nll|perplexity|ppl|distance)$", re.IGNORECASE
)


def mode_of(metric: str) -> str:
    """Return "min" for metrics such as losses and errors, "max" for all others."""
    return "min" if _LESS_IS_BETTER.search(metric) else "max"


@dataclass(slots=True, kw_only=True)
class BestSoFar:
    """The best round of one target, and the number of rounds without an improvement since."""

    metric: str
    mode: str
    min_delta: float = 0.0
    patience: int = 0
    value: float | None = None
    round: int = 0
    worse: int = field(default=0)
    until: float | None = None
    reached: float | None = None  # the value of a round that reached `until`

    @classmethod
    def of(cls, entry: InvokeSection) -> BestSoFar | None:
        """Return the tracking that a configuration asks for; None if it asks for none."""
        if entry.best is None:
            return None
        return cls(
            metric=entry.best,
            mode=entry.mode or mode_of(entry.best),
            min_delta=entry.min_delta,
            patience=entry.patience,
            until=entry.until,
        )

    def take(self, number: int, value: float | None, *, ok: bool = True) -> bool:
        """Count a round; return True if it is the best so far."""
        if not ok or number <= self.round:
            return False
        if value is not None and math.isfinite(value) and self._is_enough(value):
            self.reached = value
        if value is not None and math.isfinite(value) and self._is_better(value):
            self.value, self.round, self.worse = value, number, 0
            return True
        self.worse += 1
        return False

    def replay(self, series: Iterable[tuple[int, bool, float | None]], done: int) -> None:
        """Count the earlier rounds, up to number `done`: (number, outcome, metric) of each."""
        for number, ok, value in series:
            if number <= done:
                self.take(number, value, ok=ok)

    @property
    def exhausted(self) -> bool:
        """True after `patience` rounds without an improvement."""
        return bool(self.patience) and self.worse >= self.patience

    def as_json(self) -> dict[str, Any]:
        """Return it for status and rounds; `value` is None before the first good round."""
        return {
            "metric": self.metric,
            "mode": self.mode,
            "value": self.value,
            "round": self.round or None,
            "worse_since": self.worse,
            "patience": self.patience or None,
        }

    def __str__(self) -> str:
        if self.value is None:
            return f"no round had a number as {self.metric}"
        return f"best {self.metric} {self.value:.6g} in round {self.round}"

    def _is_enough(self, value: float) -> bool:
        if self.until is None:
            return False
        return value >= self.until if self.mode == "max" else value <= self.until

    def _is_better(self, value: float) -> bool:
        if self.value is None:
            return True
        gain = value - self.value if self.mode == "max" else self.value - value
        return gain > self.min_delta
