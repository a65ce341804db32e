"""The best round of a target so far, and when to stop looking for a better one.

Rule: a round counts if it ended well and its metric is a finite number. It is the best if its
metric is better than the best one by more than `min_delta`. With a `patience`, the rounds end when
so many that ended well, one after the other, were not; one that failed says nothing, one without
the metric, or with NaN, is not better. With an `until` they end when
a round has reached it. A node that starts again takes all of it from its history.
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
    """The best round of one target, and how many have not been better since."""

    metric: str
    mode: str
    min_delta: float = 0.0
    patience: int = 0
    value: float | None = None
    round: int = 0
    worse: int = field(default=0)
    until: float | None = None
    reached: float | None = None  # what a round had that was as good as `until`

    @classmethod
    def of(cls, entry: InvokeSection) -> BestSoFar | None:
        """Return what a configuration asks for; None where it asks for nothing."""
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
        """Count the rounds of before, up to number `done`: (number, outcome, metric) of each."""
        for number, ok, value in series:
            if number <= done:
                self.take(number, value, ok=ok)

    @property
    def exhausted(self) -> bool:
        """True when there was none better for `patience` rounds."""
        return bool(self.patience) and self.worse >= self.patience

    def as_json(self) -> dict[str, Any]:
        """Return it as status and rounds show it; `value` is None before there is one."""
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
