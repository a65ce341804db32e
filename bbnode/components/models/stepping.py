"""Steps of training outside of the model: parameters, state and counters while they move.

Rule: nothing of the model changes until it takes the result, so that a run that fails leaves it as
it was. Every number is computed by a graph; here they are only handed from one to the next.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from onnx import ModelProto

from bbnode.components.autodiff import TrainingGraphs
from bbnode.components.backends.graphs import quotient_model, scaled_sum_model
from bbnode.components.models.schedule import Schedule
from bbnode.components.models.weights import Layout, Vector, named
from bbnode.ir.values import Composite, Value

# torch.amp.GradScaler's numbers: the first scale, its growth after so many good steps, its cut.
_FIRST_SCALE = 65536.0
_GROWTH, _CUT, _GROWS_AFTER = 2.0, 0.5, 2000
_MOST_COUNTED = 1 << 62
_LEAST_SCALE, _GREATEST_SCALE = 2.0**-14, 2.0**24

Run = Callable[[ModelProto, Sequence[Value]], list[Value]]
RunInto = Callable[[ModelProto, Sequence[Value], Mapping[int, Vector]], list[Value]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """The counters of training.

    Attributes:
        steps: made in all; the schedule goes by it.
        age: steps since the optimizer's state was empty.
        draws: batches that were gone through in training mode; masks are drawn by it.
        rescaled: how often a gradient was beyond float16, and made again with a smaller scale.
        loss_scale: of mixed precision.
        good: steps since the scale was changed.
        rate: the learning rate that a program set; None goes by the schedule.
    """

    steps: int = 0
    age: int = 0
    draws: int = 0
    rescaled: int = 0
    loss_scale: float = _FIRST_SCALE
    good: int = 0
    rate: float | None = None

    @classmethod
    def from_saved(cls, saved: Mapping[str, float | None]) -> Progress:
        """Return saved counters; ValueError for numbers that are none."""
        known: dict[str, Any] = {f.name: saved[f.name] for f in fields(cls) if f.name in saved}
        for name, value in known.items():
            if name in ("rate", "loss_scale"):
                most = _GREATEST_SCALE if name == "loss_scale" else math.inf
                good = isinstance(value, float) and 0 < value <= most and value < math.inf
                good = good or (name == "rate" and value is None)
            else:
                good = type(value) is int and 0 <= value <= _MOST_COUNTED
            if not good:
                raise ValueError(f"{name} {value!r} is no such number")
        return cls(**known)

    def stepped(self) -> Progress:
        """Return the counters after a step."""
        grows = self.good + 1 >= _GROWS_AFTER
        scale = min(self.loss_scale * _GROWTH, _GREATEST_SCALE) if grows else self.loss_scale
        return replace(
            self,
            steps=self.steps + 1,
            age=self.age + 1,
            good=0 if grows else self.good + 1,
            loss_scale=scale,
        )

    def retried(self, loss: float) -> Progress | None:
        """Return the counters for another try with a smaller scale, after one beyond float16.

        None where that can't help: the scale is the least, or the loss itself is not finite.
        """
        if not math.isfinite(loss) or self.loss_scale <= _LEAST_SCALE:
            return None
        return replace(self, rescaled=self.rescaled + 1, good=0, loss_scale=self.loss_scale * _CUT)


def each_label(labels: Value) -> tuple[Value, ...]:
    """Return the labels of each loss that has its own, or those of all."""
    return tuple(labels) if isinstance(labels, Composite) else (labels,)


class Buffers:
    """Two sets of flat vectors, into which steps write their results in turn.

    So large parameters are neither allocated anew in each step nor concatenated after the last. A
    step never writes what it reads: the values that the model has, or the set written before.
    """

    def __init__(self, run_into: RunInto, trained: Layout, length: int, kinds: int) -> None:
        """Take the shapes of the parameters, the length of the model's vector, and kinds of state.

        The vector's first numbers are the parameters; what comes then is not written here.
        """
        self._run_into = run_into
        self._trained = trained
        size = sum(map(math.prod, trained.values()))
        self._lengths = [length, *([size] * kinds)]
        self._sets: list[list[Vector]] = []

    def run(
        self, model: ModelProto, inputs: Sequence[Value], state_at: int
    ) -> tuple[list[Value], list[Vector]]:
        """Return the outputs of a step, and the vectors in which its parameters and state are.

        The parameters are its first outputs, and the state begins at `state_at`.
        """
        if len(self._sets) < 2:
            self._sets.append([np.empty(length, np.float32) for length in self._lengths])
        else:
            self._sets.reverse()
        vectors = self._sets[-1]
        count = len(self._trained)
        places: dict[int, Vector] = {}
        for kind, vector in enumerate(vectors):
            start = state_at + (kind - 1) * count if kind else 0
            places.update(enumerate(named(vector, self._trained).values(), start))
        return self._run_into(model, inputs, places), vectors


class Stepper:
    """Moves parameters by batches; one object per run.

    Attributes:
        values: the parameters, one tensor each.
        statistics: the running ones, likewise.
        state: the optimizer's, kind by kind one tensor per parameter.
        progress: the counters.
        adjustment: inputs of the adjusted graphs, which are run where there are any: what is added
            to the gradient of each parameter, and a share of the parameters that is.
        frozen: the numbers of parameters that no step moves; not with buffers.
        written: the flat vectors that hold `values` (and have room behind them) and each kind of
            `state`; none where these are not in buffers.
    """

    def __init__(
        self,
        graphs: TrainingGraphs,
        run: Run,
        schedule: Schedule,
        *,
        values: list[Value],
        statistics: list[Value],
        state: list[Value],
        progress: Progress,
        adjustment: Sequence[Value] = (),
        frozen: frozenset[int] = frozenset(),
        buffers: Buffers | None = None,
    ) -> None:
        self._graphs = graphs
        self._run = run
        self._schedule = schedule
        self.values = values
        self.statistics = statistics
        self.state = state
        self.progress = progress
        self.adjustment = adjustment
        self.frozen = frozen
        self.written: list[Vector] = []
        self._buffers = buffers

    def train(self, inputs: Sequence[Value], labels: Value) -> float:
        """Make a step on a batch; return its loss, infinite where gradients stay beyond float16."""
        graphs, count = self._graphs, len(self.values)
        while True:
            feeds = [
                *self.values, *self.statistics, *inputs, *each_label(labels),
                *self._step_inputs(), *self._batch_inputs(), *self.state, *self.adjustment,
            ]  # fmt: skip
            step = graphs.adjusted_train_step if self.adjustment else graphs.train_step
            results = self._moved(step, feeds, count + 1)
            del feeds  # the old parameters go with it
            finite = bool(results.pop()) if graphs.scales_loss else True
            kept = count + 1 + len(self.state)
            self.values = results[:count]  # stay apart: flattening each step would copy all
            self.state = results[count + 1 : kept]
            self.statistics = results[kept:]
            loss = float(results[count])
            self._drawn()
            if finite:
                self.progress = self.progress.stepped()
                return loss
            retried = self.progress.retried(loss)
            if retried is None:
                return math.inf
            self.progress = retried

    def gradients(self, inputs: Sequence[Value], labels: Value) -> tuple[Value, list[Value]]:
        """Return loss and gradients of a batch in training mode; the statistics move.

        The loss is infinite where gradients stay beyond float16.
        """
        graphs, count = self._graphs, len(self.values)
        while True:
            known = [*self.values, *self.statistics, *inputs, *each_label(labels)]
            feeds = [*known, *self._batch_inputs()]
            loss, *rest = self._run(graphs.gradients, feeds)
            finite = bool(rest.pop()) if graphs.scales_loss else True
            self.statistics = rest[count:]
            self._drawn()
            if finite:
                return loss, rest[:count]
            retried = self.progress.retried(float(loss))
            if retried is None:
                return np.asarray(math.inf, np.float32), rest[:count]
            self.progress = retried

    def step(self, grads: Sequence[Value]) -> None:
        """Make a step of the optimizer with gradients that were computed elsewhere."""
        count = len(self.values)
        feeds = [*self.values, *grads, *self._step_inputs(), *self.state, *self.adjustment]
        graph = self._graphs.adjusted_step if self.adjustment else self._graphs.step
        results = self._moved(graph, feeds, count)
        self.values, self.state = results[:count], results[count:]
        self.progress = self.progress.stepped()

    def _moved(self, model: ModelProto, feeds: Sequence[Value], state_at: int) -> list[Value]:
        if self._buffers is not None:
            results, self.written = self._buffers.run(model, feeds, state_at)
            return results
        results = self._run(model, feeds)
        for at in self.frozen:
            results[at] = self.values[at]
            for kept in range(at, len(self.state), len(self.values)):
                results[state_at + kept] = self.state[kept]
        return results

    def _drawn(self) -> None:
        self.progress = replace(self.progress, draws=self.progress.draws + 1)

    def _step_inputs(self) -> list[Value]:
        set_rate = self.progress.rate
        rate = self._schedule.at(self.progress.steps) if set_rate is None else set_rate
        number = [np.asarray(self.progress.age + 1, np.int64)] if self._graphs.counts_steps else []
        return [np.asarray(rate, np.float32), *number]

    def _batch_inputs(self) -> list[Value]:
        inputs: list[Value] = []
        if self._graphs.draws:
            inputs.append(np.asarray(self.progress.draws, np.int64))
        if self._graphs.scales_loss:
            inputs.append(np.asarray(self.progress.loss_scale, np.float32))
        return inputs


class Accumulated:
    """The mean of gradients of several batches, weighted by their sizes."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._sums: list[Value] = []
        self._shapes: list[tuple[int, ...]] = []
        self._rows = 0
        self.batches = 0

    def add(self, grads: Sequence[Value], rows: int) -> None:
        """Add the gradients of a batch of `rows` examples."""
        if not self._sums:
            self._shapes = [np.shape(grad) for grad in grads]
            self._sums = [np.zeros(np.size(grad), np.float32) for grad in grads]
        weight = np.asarray(rows, np.float32)
        for at, grad in enumerate(grads):
            feeds = [self._sums[at], np.reshape(grad, -1), weight]
            (self._sums[at],) = self._run(scaled_sum_model(), feeds)
        self._rows += rows
        self.batches += 1

    def mean(self) -> list[Value]:
        """Return the mean, one tensor per parameter, and begin anew."""
        by = np.asarray(self._rows, np.float32)
        means = [self._run(quotient_model(), [total, by])[0] for total in self._sums]
        shaped: list[Value] = [
            np.reshape(mean, shape) for mean, shape in zip(means, self._shapes, strict=True)
        ]
        self._sums, self._rows, self.batches = [], 0, 0
        return shaped
