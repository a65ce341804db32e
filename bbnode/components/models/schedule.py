"""The learning rate as a function of the number of steps made."""

from __future__ import annotations

import math
from dataclasses import dataclass

from bbnode.components.autodiff.errors import TrainingSettingRefused

SCHEDULES = (
    "constant",
    "step",
    "exponential",
    "linear",
    "cosine",
    "warmup_linear",
    "warmup_cosine",
)
_WARMUP = "warmup_"
_DECAY_FACTOR = 0.1
_FACTORS = ("step", "exponential")
_ENDING = ("linear", "cosine")


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """A learning rate over time; step n is the one before which n were made.

    Attributes:
        name: "constant"; "step": times `decay_factor` after every `decay_steps` steps;
            "exponential": the same, spread evenly over the steps; "linear" and "cosine": down to
            `final_rate` at step `decay_steps`, which then stays (cosine: Loshchilov and Hutter,
            2017, arXiv:1608.03983, eq. 5, without restarts); "warmup_linear" and "warmup_cosine":
            likewise after a rise over `warmup_steps` steps, which count among `decay_steps`.
        rate: the rate that the schedule scales.
    """

    name: str
    rate: float
    warmup_steps: int = 0
    decay_steps: int = 0
    decay_factor: float = _DECAY_FACTOR
    final_rate: float = 0.0

    def check(self) -> None:
        """Raise TrainingSettingRefused for numbers that make no such schedule."""
        if self.name not in SCHEDULES:
            raise TrainingSettingRefused(
                f"schedule={self.name!r}", "there is no such schedule",
                f"choose one of {', '.join(SCHEDULES)}",
            )  # fmt: skip
        warms = self.name.startswith(_WARMUP)
        if warms != (self.warmup_steps > 0):
            raise TrainingSettingRefused(
                f"warmup_steps={self.warmup_steps}", f"the schedule is {self.name!r}",
                'give a number of steps with "warmup_linear" and "warmup_cosine", and none else',
            )  # fmt: skip
        decays = self.name != "constant"
        if decays != (self.decay_steps > 0) or self.decay_steps < self.warmup_steps:
            raise TrainingSettingRefused(
                f"decay_steps={self.decay_steps}", f"the schedule is {self.name!r}",
                "give a number of steps, the warm-up among them, for all but a constant one",
            )  # fmt: skip
        if not 0 < self.decay_factor <= 1:
            raise TrainingSettingRefused(
                f"decay_factor={self.decay_factor}", "the rate is multiplied by it",
                "give a number above 0, at most 1",
            )  # fmt: skip
        if not 0 <= self.final_rate <= self.rate:
            raise TrainingSettingRefused(
                f"final_rate={self.final_rate}", f"the rate begins at {self.rate}",
                "give a number from 0 to that",
            )  # fmt: skip
        kind = self.name.removeprefix(_WARMUP)
        if self.decay_factor != _DECAY_FACTOR and kind not in _FACTORS:
            raise TrainingSettingRefused(
                f"decay_factor={self.decay_factor}", f"the schedule is {self.name!r}",
                'leave it out; "step" and "exponential" have one',
            )  # fmt: skip
        if self.final_rate and kind not in _ENDING:
            raise TrainingSettingRefused(
                f"final_rate={self.final_rate}", f"the schedule is {self.name!r}",
                'leave it out; "linear" and "cosine" have one',
            )  # fmt: skip

    def at(self, step: int) -> float:
        """Return the rate of a step, the first one being 0."""
        kind = self.name.removeprefix(_WARMUP)
        if step < self.warmup_steps:
            return self.rate * (step + 1) / self.warmup_steps
        if kind == "step":
            return float(self.rate * self.decay_factor ** (step // self.decay_steps))
        if kind == "exponential":
            return float(self.rate * self.decay_factor ** (step / self.decay_steps))
        if kind == "constant":
            return self.rate
        length = self.decay_steps - self.warmup_steps
        done = 1.0 if length == 0 else min((step - self.warmup_steps) / length, 1.0)
        left = (1 + math.cos(math.pi * done)) / 2 if kind == "cosine" else 1 - done
        return self.final_rate + (self.rate - self.final_rate) * left
