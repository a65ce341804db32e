"""`PrivateModel`: a model whose training tells little of any one example that it is trained on.

Rule: what is trained is a function of noisy sums alone, so that whatever is sent of the parameters
has their privacy; an op that gives out gradients without noise is refused. Steps are charged before
the first of them is made, and never given back.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final

import msgpack
import numpy as np
import numpy.typing as npt
from onnx import ModelProto

from bbnode.components.contracts import CarriedOver, Component, DataSource, OpContext, Weights
from bbnode.components.contracts import restoring as reading
from bbnode.components.errors import TrainingFailed
from bbnode.components.libraries import DP_ACCOUNTING, OptionalLibrary
from bbnode.components.models.onnx_model import OnnxModel, OnnxModelConfig
from bbnode.components.models.stepping import Buffers, Stepper
from bbnode.components.models.weights import named
from bbnode.components.privacy.accounting import (
    ACCOUNTANTS,
    Charges,
    PrivacyLedger,
    charges_from,
    epsilon_of,
    require_library,
    rows_of,
)
from bbnode.components.privacy.errors import BudgetSpent, NotPrivate
from bbnode.components.privacy.gradients import clipped_sums
from bbnode.components.registry import register_component
from bbnode.components.secure_aggregation import noise as discrete
from bbnode.components.secure_aggregation.masking import add_mask
from bbnode.components.settings import path_setting
from bbnode.ir.values import Metadata, Value

logger = logging.getLogger(__name__)

LEAST_NOISE: Final = 1e-6  # so that sums of steps fit into 64 bits
# What rounding may make longer is less than this makes shorter.
_WITHIN: Final = 1 - 2.0**-21
_LEAST_NORM, _MOST_NORM = 1e-12, 1e12
# Examples that are gathered at a time, and numbers of their gradients; sums are the same for any.
_ROWS_AT_ONCE, _NUMBERS_AT_ONCE = 256, 1 << 20
_HELD_BYTES: Final = 1 << 28  # examples that are gathered once, rather than in each step
_MOST_STEPS: Final = 2.0**62  # of a sum

# Settings that mean nothing here, or break the privacy: name, the value that leaves it out, why.
_REFUSED: Final[tuple[tuple[str, Any, str], ...]] = (
    ("accumulate", 1, "each step has noise of its own; raise `batch` instead"),
    ("clip_norm", 0, "`clip` bounds each example's gradient"),
    ("clip_value", 0, "`clip` bounds each example's gradient"),
    ("precision", "float32", "lengths in float16 bound nothing"),
    ("class_weights", (), "an example alone weighs the same in its own mean, whatever its class"),
    ("losses", (), "the sum of several losses has no bound of its own; take one"),
    ("max_train_s", 0, "how long steps take hangs on the examples; set max_steps"),
)


@dataclass(frozen=True, kw_only=True)
class PrivateModelConfig(OnnxModelConfig):
    """Settings of `PrivateModel`: those of `OnnxModel`, and what its privacy is.

    Attributes:
        clip: the largest L2 norm of an example's gradient; longer ones are scaled down to it.
        noise: the noise multiplier: the deviation of a sum's noise over `clip`.
        epsilon: the budget; training that would spend more does not begin. In a node's own
            configuration it is the owner's, whatever the program says.
        delta: of the budget, above 0 and below 1; below 1 over the number of examples is usual.
        accountant: "rdp" or "pld", which is closer and slower.
        ledger: a file that has what was charged before a step is made; else snapshots have it.
    """

    clip: float = 1.0
    noise: float = 1.0
    epsilon: float = 8.0
    delta: float = 1e-5
    accountant: str = "rdp"
    ledger: str = path_setting("")


@dataclass(frozen=True)
class _ByNumber:
    """The examples of a node: how many, and inputs and labels of those with some numbers."""

    count: int
    take: Callable[[npt.NDArray[np.intp]], tuple[list[npt.NDArray[Any]], npt.NDArray[Any]]]


@register_component
class PrivateModel(OnnxModel):
    """An `OnnxModel` that trains by DP-SGD (Abadi et al., 2016, arXiv:1607.00133, algorithm 1).

    In each step every example takes part with the chance q = batch / number of examples, whatever
    the others do (Poisson sampling), so that a batch may be empty. The gradient of each is scaled
    down to `clip`; to their sum comes discrete Gaussian noise of deviation `noise` times `clip`;
    the optimizer steps by it over q times the number of examples.
    """

    TYPE_NAME: ClassVar[str] = "bbnode.PrivateModel"
    libraries: ClassVar[tuple[OptionalLibrary, ...]] = (DP_ACCOUNTING,)
    Config: ClassVar[type] = PrivateModelConfig
    config: PrivateModelConfig
    # Training would be charged.
    _rehearsed: ClassVar[frozenset[str]] = frozenset({"compute_loss"})

    def __init__(self, config: PrivateModelConfig) -> None:
        """Read the model. Raises as `OnnxModel`; InvalidComponentConfig if it can't be private."""
        super().__init__(config)
        c = self.config
        self.require(
            _LEAST_NORM <= c.clip <= _MOST_NORM,
            f"clip {c.clip} is not between {_LEAST_NORM:g} and {_MOST_NORM:g}",
        )
        self.require(
            LEAST_NOISE <= c.noise < math.inf, f"noise {c.noise} is no number from {LEAST_NOISE:g}"
        )
        self.require(0 < c.epsilon < math.inf, f"epsilon {c.epsilon} is not a positive number")
        self.require(0 < c.delta < 1, f"delta {c.delta} is not between 0 and 1")
        self.require(c.accountant in ACCOUNTANTS, f"accountant {c.accountant!r} is not known")
        for name, unset, why in _REFUSED:
            self.require(
                getattr(c, name) == unset, f"{name}={getattr(c, name)!r}: {why}; leave it out"
            )
        self.require(
            not self._graphs.statistics,
            "running statistics of BatchNormalization are of examples, and have no noise; take "
            'a model without it, or mode="as_written" where it is written for inference',
        )
        self._ledger = PrivacyLedger(c.ledger)
        self._sum_graphs: dict[frozenset[int], ModelProto] = {}

    def bind(self, dependencies: Mapping[str, Component]) -> None:
        """Receive what it depends on. Raises as `OnnxModel`, and AccountantUnavailable."""
        require_library()  # a node without it does not start, rather than fail its rounds
        super().bind(dependencies)

    @property
    def charges(self) -> Charges:
        """All that was charged so far."""
        return self._ledger.charges

    def gradient(self, ctx: OpContext, input: Value, target: Value) -> tuple[Value, Value]:
        """Refuse: NotPrivate."""
        raise self._unnoised("gradient")

    def gradient_with_input(
        self, ctx: OpContext, input: Value, target: Value
    ) -> tuple[Value, Value, Value]:
        """Refuse: NotPrivate."""
        raise self._unnoised("gradient_with_input")

    def pull_back(
        self, ctx: OpContext, input: Value, grad: Value, *, to_input: int
    ) -> tuple[Value, Value]:
        """Refuse: NotPrivate."""
        raise self._unnoised("pull_back")

    def backward(self, ctx: OpContext, grad: Value) -> None:
        """Refuse: NotPrivate."""
        raise self._unnoised("backward")

    def _unnoised(self, op: str) -> NotPrivate:
        return NotPrivate(
            f"{self.TYPE_NAME}: {op} would give out gradients of examples without noise; let the "
            "program train by Train, or bind bbnode.OnnxModel where nothing is to be private"
        )

    def _needed_to_train(self) -> tuple[ModelProto, ...]:
        return (self._sums_of(frozenset()), self._graphs.step)

    def _buffers(self) -> Buffers | None:
        return None

    def _train(
        self,
        ctx: OpContext,
        epochs: int,
        batch: int,
        adjustment: Sequence[Value],
        frozen: frozenset[int] = frozenset(),
    ) -> tuple[Metadata, Value]:
        """Train as `OnnxModel.train` says; an epoch is as many steps as it has batches there.

        The metadata has `num_samples` and `steps`, and in the place of the loss `epsilon` at
        `delta`, spent by all training so far, and `sampling`, q.

        Raises:
            BudgetSpent, LedgerUnavailable: before any step; nothing changes.
        """
        if epochs < 1 or batch < 1:
            raise TrainingFailed(
                f"{self.TYPE_NAME}: {epochs} epoch(s) with batches of {batch}; both 1 or more"
            )
        source: DataSource = self.dependency("data_source")
        examples, c = self._examples(source), self.config
        count = examples.count
        rate = min(1.0, batch / count)
        wanted = epochs * -(-count // batch)
        steps = min(wanted, c.max_steps or wanted)
        if count * discrete.FINE_DEVIATION / c.noise > _MOST_STEPS:
            raise TrainingFailed(
                f"{self.TYPE_NAME}: sums of {count} gradients with noise {c.noise:g} do not fit "
                "into 64 bits; raise noise"
            )
        epsilon = self._charge(rate, steps)
        stepper = self._stepper(adjustment, frozen)
        before = stepper.progress
        for _ in range(steps):
            sums = self._sum(stepper, examples, self._drawn(ctx, rate, count), frozen)
            sums += discrete.drawn_finely(sums.size, ctx.random_bytes(discrete.KEY_BYTES))
            mean = (sums * (self._unit / (rate * count))).astype(np.float32)
            stepper.step(self._apart(mean, frozen))
        self._take_finite(stepper)
        told = {
            "num_samples": count, "steps": steps, "epsilon": epsilon, "delta": float(c.delta),
            "sampling": rate,
        }  # fmt: skip
        if steps < wanted:
            told["work"] = steps / wanted
        logger.info("private training", extra=told)
        rates = math.fsum(self._rate(before, step) for step in range(steps))
        return Metadata(told), np.array([steps, rates, steps / wanted], np.float32)

    def _charge(self, rate: float, steps: int) -> float:
        """Charge steps, all or none; return the epsilon that is then spent."""
        c, noise = self.config, float(self.config.noise)
        after = epsilon_of(self._ledger.charged(rate, noise, steps), c.delta, c.accountant)
        if not after <= c.epsilon:
            raise BudgetSpent(
                f"{self.TYPE_NAME}: {steps} further step(s) would make epsilon {after:.4g} at "
                f"delta {c.delta:g}, beyond the budget of {c.epsilon:g}; what was trained is final"
            )
        self._ledger.charge(rate, noise, steps)
        return after

    @property
    def _unit(self) -> float:
        """The length of a step of a sum."""
        return float(self.config.clip) * float(self.config.noise) / discrete.FINE_DEVIATION

    def _drawn(self, ctx: OpContext, rate: float, count: int) -> npt.NDArray[np.intp]:
        """Return the numbers of the examples of a batch, each drawn by itself."""
        if rate >= 1:
            return np.arange(count)
        words = np.zeros(count, np.uint64)
        add_mask(words, ctx.random_bytes(discrete.KEY_BYTES))
        return np.flatnonzero(words < np.uint64(math.floor(rate * 2.0**64)))

    def _sum(
        self,
        stepper: Stepper,
        examples: _ByNumber,
        chosen: npt.NDArray[np.intp],
        frozen: frozenset[int],
    ) -> npt.NDArray[np.int64]:
        """Return the sum of the clipped gradients of the chosen examples, in steps."""
        model = self._sums_of(frozen)
        sizes = [math.prod(each) for at, each in enumerate(self._shapes) if at not in frozen]
        total, bad = np.zeros(sum(sizes), np.int64), 0
        together = max(1, min(_ROWS_AT_ONCE, _NUMBERS_AT_ONCE // max(1, total.size)))
        for at in range(0, len(chosen), together):
            numbers = chosen[at : at + together]
            wrong, *sums = self._sums(model, stepper, *examples.take(numbers))
            if wrong.any():
                bad += int(wrong.sum())
                if wrong.all():
                    continue
                _, *sums = self._sums(model, stepper, *examples.take(numbers[~wrong[:, 0]]))
            total += np.concatenate(sums)
        if bad:
            logger.warning(
                "gradients that are not finite count as 0",
                extra={"examples": bad, "of": len(chosen)},
            )
        return total

    def _sums(
        self, model: ModelProto, stepper: Stepper, inputs: Sequence[Value], labels: npt.NDArray[Any]
    ) -> list[npt.NDArray[Any]]:
        """Return what the graph of sums says of some examples; masks are new for each."""
        count, draws = len(labels), []
        if self._graphs.draws:
            begin = stepper.progress.draws
            draws = [np.arange(begin, begin + count, dtype=np.int64)]
            stepper.progress = replace(stepper.progress, draws=begin + count)
        norm, unit = (
            np.asarray(x, np.float64) for x in (self.config.clip * _WITHIN, 1 / self._unit)
        )
        feeds = [*stepper.values, *inputs, labels, *draws, norm, unit]
        return [np.asarray(each) for each in self._run(model, feeds)]

    def _examples(self, source: DataSource) -> _ByNumber:
        """Return the examples of a source, in memory where they are few."""
        rows = source.epoch_batches(1)
        each = rows if isinstance(rows, Sequence) else tuple(rows)
        found = _ByNumber(
            len(each), lambda numbers: self._gathered([each[int(n)] for n in numbers])
        )
        inputs, labels = found.take(np.zeros(1, np.intp))
        if sum(value.nbytes for value in (*inputs, labels)) * found.count > _HELD_BYTES:
            return found
        (whole,) = source.epoch_batches(found.count)
        inputs, labels = self._gathered([whole], found.count)
        return _ByNumber(found.count, lambda at: ([each[at] for each in inputs], labels[at]))

    def _gathered(
        self, found: Sequence[tuple[Value, Value]], count: int = 0
    ) -> tuple[list[npt.NDArray[Any]], npt.NDArray[Any]]:
        """Return inputs and labels of batches as tensors of `count` rows, or one for each batch."""
        count = count or len(found)
        parts = [self._inputs(features) for features, _ in found]
        inputs = [np.concatenate([part[at] for part in parts]) for at in range(len(parts[0]))]
        given = np.concatenate([np.asarray(target) for _, target in found])
        labels = np.asarray(self._target(given, inputs))
        for value in (*inputs, labels):
            if np.shape(value)[:1] != (count,):
                raise TrainingFailed(
                    f"{self.TYPE_NAME}: {count} example(s) make a tensor of the shape "
                    f"{list(np.shape(value))}; the first axis of inputs and labels has to be that "
                    "of the examples, so that one can be told from another"
                )
        return inputs, labels

    def _sums_of(self, frozen: frozenset[int]) -> ModelProto:
        """Return the graph of sums, written once."""
        made = self._sum_graphs.get(frozen)
        if made is None:
            # With labels to ignore a row's share of the mean is not 1 / N.
            at_once = self.config.ignore_index is None and not self._graphs.draws
            made = clipped_sums(self._graphs, frozen, at_once=at_once)
            self._sum_graphs[frozen] = made
        return made

    @property
    def _shapes(self) -> list[tuple[int, ...]]:
        return [*self._trained.values()]

    def _apart(self, mean: npt.NDArray[np.float32], frozen: frozenset[int]) -> list[Value]:
        """Return a gradient one tensor a parameter, of frozen ones zeros."""
        layout = {n: d for at, (n, d) in enumerate(self._trained.items()) if at not in frozen}
        views = named(mean, layout)
        return [
            views[name] if name in views else np.zeros(dims, np.float32)
            for name, dims in self._trained.items()
        ]

    def freeze(self) -> Callable[[], bytes]:
        """Capture the model's state, and what was charged."""
        rows, model = rows_of(self._ledger.charges), super().freeze()
        return lambda: bytes(msgpack.packb({"charges": rows, "model": model()}))

    def restore(self, data: bytes) -> None:
        """Load a saved state; ComponentError when it does not fit this model."""
        if not data:
            return
        charges, model = self._opened(data)
        super().restore(model)
        self._ledger.take_over(charges)

    def carry_over(self, data: bytes) -> CarriedOver:
        """Take parameters as `OnnxModel` does, and what was charged whichever agree."""
        if not data:
            return CarriedOver()
        charges, model = self._opened(data)
        self._ledger.take_over(charges)
        return super().carry_over(model)

    @classmethod
    def saved_weights(cls, data: bytes) -> Mapping[str, Weights]:
        """Return the parameters in a saved state by name; raises as `OnnxModel`."""
        return super().saved_weights(cls._opened(data)[1])

    @classmethod
    def _opened(cls, data: bytes) -> tuple[Charges, bytes]:
        """Return what a saved state has: charges, and the state of the model."""
        with reading(cls.TYPE_NAME):
            saved: Any = msgpack.unpackb(data)
            model = saved["model"]
            if not isinstance(model, bytes):
                raise TypeError("it has no model")
            return charges_from(saved["charges"]), model
