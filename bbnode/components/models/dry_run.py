"""The dry run of a model: what a round asks of it, on two and on three examples.

Rule: the model computes by the methods that a round calls, and nothing is computed in a second way.
A fault is one line that says what does not work and what to do; what may be meant is a warning.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, NoReturn, TypeAlias

import numpy as np
import numpy.typing as npt
from onnx import ModelProto, NodeProto, helper, numpy_helper

from bbnode.components.autodiff.ends import check_values
from bbnode.components.contracts import Backend, DataSource, Model, NoConfig, OpContext
from bbnode.components.errors import (
    BackendError,
    BackendUnavailable,
    ComponentError,
    NotExportable,
    UnsupportedByModel,
)
from bbnode.ir.errors import AuthorError
from bbnode.ir.peer import PeerId
from bbnode.ir.values import Composite, Metadata, Value

Array: TypeAlias = npt.NDArray[Any]
Batch: TypeAlias = tuple[Value, Value]  # features and labels

SIZES: Final = (2, 3)
# Ways in which `Model.example_batch` draws features: what no model of these takes, none will.
DRAWS: Final = 4
# Of an output that is computed in two ways, relative to the greatest number in it.
TOLERANCE: Final = 1e-3
# Parameters up to which a node makes a dry run before it is ready: a step takes a second or less.
MOST_PARAMETERS: Final = 1 << 25
# Seconds from which on a node leaves the rest out; `bbnode check` has no such bound.
NODE_BUDGET_S: Final = 10.0
_SHOWN_NAMES: Final = 6
# Methods that compute a loss, and those that make steps or the gradients for these.
_USE_LOSS: Final = frozenset(
    {"train", "train_adjusted", "compute_loss", "evaluate", "gradient", "gradient_with_input"}
)
_TRAIN: Final = ("train", "train_adjusted", "gradient", "gradient_with_input", "pull_back")


class DryRunFailed(ComponentError, AuthorError):
    """A model does not do, on a few examples, what a round asks of it.

    Attributes:
        of_values: it may be the examples' fault: other ones might do.
    """

    def __init__(self, message: str, *, of_values: bool = False) -> None:
        self.of_values = of_values
        super().__init__(message)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """A call of a dry run: what it was, on how many examples, and what came of it, in words."""

    step: str
    rows: int
    result: str


@dataclass(slots=True, kw_only=True)
class DryRun:
    """The report of a dry run that found no fault.

    Attributes:
        skipped: what can't be run here, and why.
        postponed: what a dry run without bounds would have run.
    """

    ran: list[Ran] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    postponed: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """A model and the numbers of its dry run, for checks that look at these alone.

    Attributes:
        model: as it was before the first step.
        features, labels: three examples; `made_up` ones where nobody gave any.
        outputs: that `forward` gave for them.
        loss: of them.
    """

    model: Model
    features: Value
    labels: Value
    made_up: bool
    outputs: tuple[Value, ...]
    loss: float


def outputs_fit(seen: Seen) -> Iterator[str]:
    """Check that the first output is what the loss takes, by its numbers. Raises LossDoesNotFit."""
    config = seen.model.config
    loss, several = getattr(config, "loss", ""), getattr(config, "losses", ())
    if loss and not several:
        check_values(loss, np.asarray(seen.outputs[0]), getattr(config, "class_axis", -1))
    yield from ()


# Further checks: each raises a typed AuthorError for a fault, and yields a line for a warning.
Check: TypeAlias = Callable[[Seen], Iterator[str]]
CHECKS: tuple[Check, ...] = (outputs_fit,)


class FewExamples(DataSource):
    """The examples of a dry run in the place of a node's data: the first `shown` of them."""

    TYPE_NAME: ClassVar[str] = "bbnode.FewExamples"

    def __init__(self, batch: Batch) -> None:
        super().__init__(NoConfig())
        self._batch = batch
        self._shown = len(np.atleast_1d(np.asarray(_parts(batch[0])[0])))

    def show(self, rows: int) -> Batch:
        """Hand out so many examples from now on; return them."""
        self._shown = rows
        return self._first(rows)

    @property
    def num_samples(self) -> int:
        """The number of examples in this source."""
        return self._shown

    def next_batch(self, ctx: OpContext) -> Batch:
        """Return all examples."""
        return self._first(self._shown)

    def reset(self, ctx: OpContext) -> None:
        """Do nothing: each batch is the first."""

    def on_data_loaded(self, ctx: OpContext) -> None:
        """Do nothing: they are in memory."""

    def epoch_batches(self, batch_size: int) -> Sequence[Batch]:
        """Return the batches of an epoch, in the order of the examples."""
        whole = self._first(self._shown)
        starts = range(0, self._shown, batch_size)
        return [
            (_rows(whole[0], at, at + batch_size), _rows(whole[1], at, at + batch_size))
            for at in starts
        ]

    def _first(self, rows: int) -> Batch:
        return _rows(self._batch[0], 0, rows), _rows(self._batch[1], 0, rows)


@dataclass(slots=True, kw_only=True)
class RehearsalContext:
    """The fields of an `OpContext` that a method may ask for, where there is no node."""

    now_ns: int = 0
    self_peer: PeerId = field(default_factory=lambda: PeerId.from_seed(0))
    source_peer: PeerId | None = None
    source_classes: Sequence[str] = ()
    source_seen_at: None = None
    peer_class: str | None = None
    plays_peer_class: bool = False
    include_self: bool = False
    execution: int = 0
    op: str = ""
    declared_shape: None = None
    slot: str = ""
    addresses: Sequence[Any] = ()
    correlation: None = None
    reason: str = ""

    def random_bytes(self, count: int) -> bytes:
        """Return bytes that nobody else can foresee."""
        return os.urandom(count)


def dry_run(
    model: Model,
    ctx: Any,
    source: FewExamples,
    *,
    methods: AbstractSet[str],
    made_up: bool,
    whole: bool = True,
    config: Any = None,
    budget_s: float = math.inf,
) -> DryRun:
    """Call the methods of a model as a round does; return what came of them.

    Args:
        model: bound to a backend, and to `source` where it trains; it is changed.
        ctx: that its methods get: an OpContext, or a RehearsalContext.
        source: of three examples.
        methods: those of the model that the program calls, by name; the loss and steps of training
            are run where some of them need these.
        made_up: the examples are nobody's.
        whole: also compute gradients by themselves, and what the model exports.
        config: the settings that the model was made of, to read back what it exports; None does
            not.
        budget_s: seconds after which the rest is left out.

    Raises:
        DryRunFailed: a method fails, or what comes of it can't be right.
        AuthorError: one of `CHECKS` found a fault.
    """
    run = _Rehearsal(model, ctx, source, made_up=made_up, until=time.monotonic() + budget_s)
    run.forward()
    if methods & _USE_LOSS and run.has_time("loss"):
        run.loss()
    trains = next((name for name in _TRAIN if name in methods), "")
    if trains and run.has_time("training"):
        run.training(trains, whole=whole)
    if whole and run.has_time("export"):
        run.export(config)
    return run.report


class _Rehearsal:
    """One dry run; each step writes into `report` what it did."""

    def __init__(
        self, model: Model, ctx: Any, source: FewExamples, *, made_up: bool, until: float
    ) -> None:
        self.report = DryRun()
        self._model = model
        self._ctx = ctx
        self._source = source
        self._made_up = made_up
        self._until = until
        self._outputs: dict[int, tuple[Array, ...]] = {}

    def has_time(self, step: str) -> bool:
        """Return False, and say so, once the time is over."""
        if time.monotonic() < self._until:
            return True
        self.report.postponed.append(
            f"no dry run of the {step}: the steps before took its time; `bbnode check` makes it"
        )
        return False

    # -- the steps ------------------------------------------------------------------------------

    def forward(self) -> None:
        """Compute outputs of two and of three examples, and compare these."""
        for rows in SIZES:
            try:
                self._outputs[rows] = self._forward(rows)
            except ComponentError as error:
                self._refuse_forward(rows, error)
            shapes = ", ".join(_shape_text(each) for each in self._outputs[rows])
            self._ran("forward", rows, shapes)
        two, three = (self._outputs[rows] for rows in SIZES)
        for at, (one, other) in enumerate(zip(two, three, strict=True)):
            if at and one.shape == other.shape:
                continue  # beside the one that counts, a model may give what is of no example
            if one.shape == other.shape:
                self._fail(
                    f"output {self._name(at)} is {_shape_text(one)} for two examples and for three:"
                    " it has no axis of examples, so that no label belongs to it; give the model "
                    "an output [batch, …], or say which output counts with outputs="
                )
            if len(one) == 2 and len(other) == 3 and not _close(one, other[:2]):
                self.report.warnings.append(
                    f"output {self._name(at)} of an example depends on the other examples of its "
                    "batch (a Reshape that mixes them, or statistics of a batch); what a model "
                    "gives then depends on the size of batches"
                )

    def loss(self) -> None:
        """Compute the loss, which has to be a finite number."""
        number = math.nan
        for rows in SIZES:
            features, labels = self._source.show(rows)
            with self._named("the loss", rows):
                number = float(np.asarray(self._model.compute_loss(self._ctx, features, labels)))
            self._ran("loss", rows, f"{number:.6g}")
            if not math.isfinite(number):
                self._fail(
                    f"the loss of {rows} examples is {number} at the first step"
                    f"{self._not_finite(rows)}",
                    of_values=True,
                )
        features, labels = self._source.show(SIZES[-1])
        seen = Seen(
            model=self._model,
            features=features,
            labels=labels,
            made_up=self._made_up,
            outputs=self._outputs[SIZES[-1]],
            loss=number,
        )
        for check in CHECKS:
            self.report.warnings.extend(check(seen))

    def training(self, method: str, *, whole: bool) -> None:
        """Make a step with two examples and one with three; with `whole`, gradients around them."""
        before = self._parameters()
        still = self._without_gradient() if whole else None
        for rows in SIZES:
            try:
                with self._named("a step of training", rows):
                    self._ran(method, rows, self._step(method, rows))
            except BackendUnavailable as error:  # on a node that trains it has to be there
                self.report.skipped.append(f"{method}: {error}")
                break
        after = self._parameters()
        if still is not None:
            # Behind a factor of zeros, as of an adapter's, a gradient begins with the second step.
            still &= self._without_gradient() or set()
        if before.shape == after.shape and np.array_equal(before, after):
            self._fail(
                "two steps of training change no parameter"
                + (
                    ": every gradient is 0; look for a Relu that lets nothing through, or weights "
                    "that are all 0"
                    if still is None or still >= self._model.parts(after).keys()
                    else "; raise learning_rate"
                ),
                of_values=True,
            )
        if still:
            names = sorted(still)
            self.report.warnings.append(
                f"{_few(names)} got no gradient: the loss does not depend on "
                f"{'it' if len(names) == 1 else 'them'}, or only where Relu or Clip let nothing "
                "through; leave out of `trainable` what is not to be trained"
            )

    def export(self, config: Any) -> None:
        """Export the model as it is now, run that, and read it back."""
        rows = SIZES[-1]
        features, _ = self._source.show(rows)
        try:
            exported = self._model.export()
        except NotExportable as error:
            self.report.skipped.append(f"export: {error}")
            return
        except ComponentError as error:
            self._fail(f"it can't be exported: {error}")
        own = self._forward(rows)[0]
        if self._model.output_kind() == "probabilities":
            own = _softmax(own)
        backend: Backend = self._model.dependency("backend")
        with self._named("the exported model", rows):
            made = np.asarray(
                backend.prepare(exported).run(_parts(features))[self._place(exported)]
            )
        if not _close(own, made):
            self._fail(
                f"the exported model gives other numbers than the model: {_farthest(own, made)}; "
                "please report it with the model"
            )
        self._ran("export", rows, f"{_shape_text(made)}, as the model")
        if config is not None:
            self._read_back(config, exported, features, own)

    def _read_back(self, config: Any, exported: ModelProto, features: Value, own: Array) -> None:
        weights = {t.name: numpy_helper.to_array(t) for t in exported.graph.initializer}
        try:
            with self._named("a model with the exported weights", SIZES[-1]):
                made, _ = type(self._model).initialized(config, weights)
                again: Model = type(self._model)(made)
                again.bind({"backend": self._model.dependency("backend")})
                back = _arrays(again.forward(self._ctx, features))[0]
        except (UnsupportedByModel, NotExportable):  # a model that takes no weights by name
            return
        if not _close(own, back):
            self._fail(
                "a model that begins with the exported weights gives other numbers than the one "
                f"that exported them: {_farthest(own, back)}; please report it with the model"
            )
        self._ran("import", SIZES[-1], f"{_shape_text(back)}, as the model")

    # -- parts of steps -------------------------------------------------------------------------

    def _forward(self, rows: int) -> tuple[Array, ...]:
        features, _ = self._source.show(rows)
        return _arrays(self._model.forward(self._ctx, features))

    def _parameters(self) -> Array:
        return np.array(self._model.params(self._ctx))

    def _step(self, method: str, rows: int) -> str:
        """Make a step as a round does by this method; return what it says of it."""
        model, ctx = self._model, self._ctx
        features, labels = self._source.show(rows)
        told: Metadata
        match method:
            case "train":
                told = model.train(ctx, epochs=1, batch=rows)
            case "train_adjusted":
                told, _ = model.train_adjusted(
                    ctx, None, None, epochs=1, batch=rows, proximal=0.0, frozen=""
                )
            case _:
                if method == "gradient":
                    grads, _ = model.gradient(ctx, features, labels)
                elif method == "gradient_with_input":
                    grads, _, _ = model.gradient_with_input(ctx, features, labels)
                else:
                    ones = np.ones_like(self._outputs[rows][0])
                    grads, _ = model.pull_back(ctx, features, ones, to_input=0)
                model.step(ctx, grads)
                return f"norm {float(np.linalg.norm(np.asarray(grads))):.6g}"
        loss = told.get("loss")
        return f"loss {loss:.6g}" if isinstance(loss, float) else "done"

    def _without_gradient(self) -> set[str] | None:
        """Return the parameters whose gradient is 0 everywhere; None where there is no gradient."""
        found: set[str] | None = None
        for rows in SIZES:
            features, labels = self._source.show(rows)
            try:
                with self._named("the gradient", rows):
                    vector, _ = self._model.gradient(self._ctx, features, labels)
            except UnsupportedByModel:
                return None
            grads = np.asarray(vector)
            self._ran("gradient", rows, f"norm {float(np.linalg.norm(grads)):.6g}")
            still = {n for n, part in self._model.parts(grads).items() if not np.any(part)}
            found = still if found is None else found & still
        return found

    def _refuse_forward(self, rows: int, error: ComponentError) -> NoReturn:
        """Say whether it is the number of examples that a model does not take."""
        works = [other for other in (1, *SIZES) if other != rows and self._computes(other)]
        if not works:
            self._fail(f"it does not compute {rows} examples: {error}", of_values=True)
        some = works[0]
        culprit = self._culprit(rows, some)
        self._fail(
            f"it computes a batch of {some} and not of {rows}: {culprit} holds the "
            f"size of a batch of {some}, as of an example that it was traced with; export it with "
            "an open batch axis and an example of two or more (-1 in the place of a batch in a "
            "shape; first states made of the size of the input)"
        )

    def _computes(self, rows: int) -> bool:
        try:
            self._forward(rows)
        except ComponentError:
            return False
        return True

    def _culprit(self, rows: int, works: int) -> str:
        """Return the node of the exported model that does not take so many examples.

        That is the first that fails, or a Reshape before it that made one batch of another.
        """
        try:
            model = self._model.export()
            backend: Backend = self._model.dependency("backend")
        except ComponentError:
            return "an op"
        features, _ = self._source.show(rows)
        nodes = [node for node in model.graph.node if node.output and node.output[0]]
        low, high = 0, len(nodes) - 1  # all before it compute, as each depends on those before
        while low < high:
            middle = (low + high) // 2
            if _runs(backend, model, [n.output[0] for n in nodes[: middle + 1]], features):
                low = middle + 1
            else:
                high = middle
        node = _source_of_size(model, nodes[low], works)
        return f"node {node.name or node.output[0]!r} ({node.op_type})"

    def _not_finite(self, rows: int) -> str:
        """Return where the first numbers are that are not finite, and what to do."""
        if not all(_finite(part) for part in _parts(self._source.show(rows)[0])):
            return ", as the examples hold NaN or infinity; leave these out, or fill them"
        bad = self._tensors_not_finite()
        if bad:
            return (
                f", and the file holds NaN in {_few(bad)}, as after a training that broke off; "
                "give the model of before"
            )
        remedy = "look at logarithms, roots and divisions of the model, and at the size of weights"
        for at, output in enumerate(self._outputs[rows]):
            if not _finite(output):
                return f", as output {self._name(at)} holds NaN or infinity; {remedy}"
        return f"; {remedy}"

    def _tensors_not_finite(self) -> list[str]:
        """Return the tensors of the exported model that hold NaN."""
        try:
            graph = self._model.export().graph
        except ComponentError:
            return []
        found = [(tensor.name, tensor) for tensor in graph.initializer]
        found += [
            (node.output[0], attribute.t)
            for node in graph.node
            if node.op_type == "Constant"
            for attribute in node.attribute
            if attribute.HasField("t")
        ]
        arrays = ((name, numpy_helper.to_array(tensor)) for name, tensor in found)
        return [name for name, each in arrays if each.dtype.kind == "f" and np.isnan(each).any()]

    def _place(self, exported: ModelProto) -> int:
        """Return the place of the model's first output among those of what it exported."""
        names = [info.name for info in exported.graph.output]
        first = self._model.output_names()[:1]
        return names.index(first[0]) if first and first[0] in names else 0

    def _name(self, at: int) -> str:
        names = self._model.output_names()
        return repr(names[at]) if at < len(names) else str(at)

    def _ran(self, step: str, rows: int, result: str) -> None:
        self.report.ran.append(Ran(step=step, rows=rows, result=result))

    @contextmanager
    def _named(self, what: str, rows: int) -> Iterator[None]:
        """Turn a component's error into one that says in which step it came."""
        try:
            yield
        except (DryRunFailed, UnsupportedByModel, NotExportable, BackendUnavailable):
            raise
        except ComponentError as error:
            self._fail(f"{what} of {rows} examples fails: {error}", error, of_values=True)

    def _fail(
        self, what: str, cause: Exception | None = None, *, of_values: bool = False
    ) -> NoReturn:
        whose = "made-up examples" if self._made_up else "the data"
        raise DryRunFailed(
            f"{self._model.TYPE_NAME}, tried on {whose}: {what}", of_values=of_values
        ) from cause


def tried(model: Model, run: Callable[[Batch], DryRun]) -> DryRun | None:
    """Make a dry run on made-up examples; None where the model can't say any.

    A fault that may be theirs counts once all ways to draw them have it. Raises as `dry_run`.
    """
    first: DryRunFailed | None = None
    for draw in range(DRAWS):
        batch = model.example_batch(SIZES[-1], draw=draw)
        if batch is None:
            return None
        try:
            return run(batch)
        except DryRunFailed as error:
            first = first or error
            if not error.of_values:
                raise
    assert first is not None
    raise first


def draw_features(
    elem_type: int, dims: Sequence[int | str | None], rows: int, draw: int, greatest: int = 1
) -> Array:
    """Return made-up features [rows, …] of an ONNX type; open axes get 8 values.

    Draw 0 is a normal distribution, 1 a uniform one from 0 to 1, 2 ones, 3 zeros. Integers are from
    0 to `greatest`.
    """
    shape = (rows, *(dim if isinstance(dim, int) and dim > 0 else 8 for dim in dims[1:]))
    dtype = helper.tensor_dtype_to_np_dtype(elem_type)
    rng = np.random.default_rng(draw)
    if draw >= 2:
        return np.full(shape, 3 - draw).astype(dtype)
    if dtype.kind == "b":
        return rng.integers(0, 2, shape).astype(bool)
    if dtype.kind in "iu":
        return rng.integers(0, greatest + 1, shape).astype(dtype)
    made = rng.normal(size=shape) if draw == 0 else rng.uniform(size=shape)
    return np.asarray(made).astype(dtype)


def _source_of_size(model: ModelProto, failed: NodeProto, size: int) -> NodeProto:
    """Return the nearest node, from one that failed backwards, whose shape begins with a size."""
    constants = {t.name: t for t in model.graph.initializer}
    constants.update(
        (node.output[0], node.attribute[0].t)
        for node in model.graph.node
        if node.op_type == "Constant" and node.attribute and node.attribute[0].HasField("t")
    )
    makers = {output: node for node in model.graph.node for output in node.output}
    todo, seen = [failed], {id(failed)}
    for node in todo:
        if node.op_type in ("Reshape", "Expand") and node.input[1] in constants:
            shape = numpy_helper.to_array(constants[node.input[1]]).reshape(-1)
            if shape.size and int(shape[0]) == size:
                return node
        before = [makers[name] for name in node.input if name in makers]
        todo += [each for each in before if id(each) not in seen]
        seen.update(map(id, before))
    return failed


def _runs(backend: Backend, model: ModelProto, outputs: Sequence[str], features: Value) -> bool:
    """Return True if a backend computes these values of a model."""
    cut = ModelProto()
    cut.CopyFrom(model)
    del cut.graph.output[:]
    made = set(outputs)
    kept = [node for node in cut.graph.node if made.intersection(node.output)]
    del cut.graph.node[:]
    cut.graph.node.extend(kept)
    cut.graph.output.extend(helper.make_empty_tensor_value_info(name) for name in outputs[-1:])
    try:
        backend.prepare(cut).run(_parts(features))
    except BackendError:
        return False
    return True


def _rows(value: Value, start: int, end: int) -> Value:
    if isinstance(value, Composite | tuple | list):
        return Composite([np.asarray(part)[start:end] for part in value])
    return np.asarray(value)[start:end]


def _parts(value: Value) -> list[Value]:
    return list(value) if isinstance(value, Composite | tuple | list) else [value]


def _arrays(outputs: Value) -> tuple[Array, ...]:
    return tuple(np.asarray(each) for each in _parts(outputs))


def _finite(value: Value) -> bool:
    array = np.asarray(value)
    return array.dtype.kind not in "fc" or bool(np.isfinite(array).all())


def _close(one: Array, other: Array) -> bool:
    if one.shape != other.shape:
        return False
    if one.dtype.kind not in "fc":
        return bool((one == other).all())
    with np.errstate(invalid="ignore"):
        finite = one[np.isfinite(one)]
        size = max(1.0, float(np.abs(finite).max())) if finite.size else 1.0
        return np.allclose(one, other, rtol=TOLERANCE, atol=TOLERANCE * size, equal_nan=True)


def _farthest(one: Array, other: Array) -> str:
    if one.shape != other.shape:
        return f"{_shape_text(other)} in the place of {_shape_text(one)}"
    with np.errstate(invalid="ignore"):
        return f"by up to {float(np.nanmax(np.abs(np.subtract(one, other)))):.3g}"


def _softmax(logits: Array) -> Array:
    powers = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return np.asarray(powers / powers.sum(axis=-1, keepdims=True))


def _shape_text(array: Array) -> str:
    return f"{array.dtype}[{', '.join(map(str, array.shape))}]"


def _few(names: Sequence[str]) -> str:
    shown = ", ".join(map(repr, names[:_SHOWN_NAMES]))
    more = len(names) - _SHOWN_NAMES
    return f"{shown} and {more} more" if more > 0 else shown
