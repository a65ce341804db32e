"""A trainable model from a forward ONNX graph.

Rule: the parameters are one flat float32 vector that is replaced, never changed; everything
that computes with it is an ONNX graph that the bound backend runs.
"""

from __future__ import annotations

import copy
import itertools
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import onnx
from google.protobuf.message import DecodeError as ProtobufDecodeError
from onnx import ModelProto, TensorProto, ValueInfoProto, numpy_helper

from bbnode.components.autodiff import InvalidForwardModel, TrainingGraphs, training_graphs
from bbnode.components.autodiff.forward import read_forward
from bbnode.components.autodiff.losses import LossSettings, find_loss
from bbnode.components.autodiff.modes import RunningVariance, TrainingMode
from bbnode.components.autodiff.optimizers import OptimizerSettings
from bbnode.components.autodiff.own_weights import with_own_weights
from bbnode.components.autodiff.parameters import ParameterChoice
from bbnode.components.autodiff.training import OutputLoss, Precision, TrainingOptions
from bbnode.components.backends.graphs import scaled_sum_model
from bbnode.components.contracts import (
    Backend,
    CarriedOver,
    Component,
    ComponentError,
    DataSource,
    ListedParameter,
    Model,
    ModelShapes,
    OpContext,
    OutputKind,
    ParameterList,
    PreparedGraph,
    Weights,
    WritingGraph,
    offload,
    restoring,
)
from bbnode.components.errors import (
    DataDoesNotFit,
    NotExportable,
    ParameterMismatch,
    TrainingFailed,
    WeightsNotFinite,
)
from bbnode.components.models.dry_run import (
    MOST_PARAMETERS,
    NODE_BUDGET_S,
    SIZES,
    DryRun,
    FewExamples,
    draw_features,
    dry_run,
    tried,
)
from bbnode.components.models.fit import check_fit
from bbnode.components.models.labels import Labels, apart
from bbnode.components.models.lora import Lora, with_adapters, with_trained
from bbnode.components.models.schedule import Schedule
from bbnode.components.models.stepping import Accumulated, Buffers, Progress, Stepper, each_label
from bbnode.components.models.weights import (
    Layout,
    SavedState,
    agreeing,
    named,
    pack_state,
    unpack_state,
)
from bbnode.components.registry import checked_config, register_component
from bbnode.components.settings import content_setting, host_setting, later_setting
from bbnode.ir import intake
from bbnode.ir.intake import ModelNotTaken, ModelSource
from bbnode.ir.values import Composite, Metadata, Value
from bbnode.ir.weightless import StoredTensor, without_values

logger = logging.getLogger(__name__)

Vector = npt.NDArray[np.float32]
ModelContent: TypeAlias = bytes | str | Path

_LOOKED_AT = 64  # first examples, of which a dry run takes those whose labels count
_SCHEDULE_FIELDS = ("warmup_steps", "decay_steps", "decay_factor", "final_rate")

# Ops that compute nothing of no rows, and so do not stumble over them.
_OF_ROWS = frozenset(
    {
        "Add", "Cast", "Div", "Elu", "Erf", "Exp", "Gelu", "Gemm", "HardSigmoid", "HardSwish",
        "Identity", "LeakyRelu", "LogSoftmax", "MatMul", "Mul", "Neg", "Pow", "Relu", "Selu",
        "Sigmoid", "Softmax", "Softplus", "Sqrt", "Sub", "Tanh",
    }
)  # fmt: skip

# Ops behind which an input's ids are the same ones.
_HAND_ON_IDS = frozenset({"Cast", "Identity", "Reshape", "Flatten", "Squeeze", "Unsqueeze",
                          "Transpose"})  # fmt: skip

_NOTHING_TO_SWITCH = (
    'mode="train" found no BatchNormalization and no Dropout in the model, so that it trains as '
    "written; exporters fold or leave them out of a model in evaluation mode: export it with "
    "bbnode.torch.export, or with training=TrainingMode.PRESERVE, or leave mode out"
)

# Of the first output by loss; that of "cosine" has a direction and no size.
_OUTPUT_KINDS: Mapping[str, OutputKind] = {
    "softmax_cross_entropy": "logits",
    "nll": "log_probabilities",
    "kl": "log_probabilities",
    "bce_with_logits": "logit",
    "mse": "value",
    "mae": "value",
    "huber": "value",
}

# Fields of a TensorProto with its values, if they are not in `raw_data`.
_TYPED_DATA = ("float_data", "double_data", "int32_data", "int64_data", "uint64_data")


def read_model(source: ModelSource) -> bytes:
    """Return what an artifact holds of a model: a file with the tensors beside it, as bytes.

    For authors: files are those of the machine that the program is written on.

    Raises ModelNotTaken.
    """
    return intake.read_model(source).SerializeToString(deterministic=True)


@dataclass(frozen=True, kw_only=True)
class OnnxModelConfig:
    """Settings of `OnnxModel`.

    Attributes:
        model: bytes of the forward ModelProto, float32 initializers as parameters; or the path of
            a file on this machine, from which weights are read straight into the flat vector, as
            from files of tensors beneath its folder. An artifact holds bytes alone.
        outputs: names of the outputs that `forward` gives, in this order: the loss and the metrics
            are of the first; all in the order of the graph by default.
        loss: of the first output: "softmax_cross_entropy" and "nll" (int64 class labels),
            "bce_with_logits" and "kl" (probabilities), "mse", "mae", "huber", "cosine".
        learning_rate: the first one, that `schedule` scales.
        trainable: names and patterns ("head.*", "!*.bias") of the initializers to train, in their
            order; by default what is used as a weight, and not masks, tables or constants. It also
            decides where a tensor may be either, and names weights in Constant nodes.
        lora: adapters that are trained in place of the weights: `targets` (names or patterns of
            layers), `rank`, `alpha`, `seed`, `merge`; what `trainable` names is trained with them.
        optimizer: "sgd", "adam", "adamw", "yogi", "adagrad", "rmsprop" or "lion".
        momentum: of sgd and rmsprop: the share of the last move that is made again.
        nesterov: of sgd with a momentum: look ahead by it.
        weight_decay: None is 0.01 for adamw and 0 for the others.
        betas: of adam, adamw, yogi and lion; None is (0.9, 0.999), for lion (0.9, 0.99).
        bias_correction: of adam, adamw and yogi: divide the means by 1 - beta^step.
        initial_square: of adam, adamw, yogi and adagrad: the square that each parameter begins
            with; None is 1e-6 for yogi, else 0.
        smoothing: of rmsprop: the share of the old mean square.
        centered: of rmsprop: by the variance instead of the mean square.
        eps: beside the root in a denominator; None is 1e-8, for adagrad 1e-10, for yogi
            1e-3.
        clip_value: the greatest size of one number of a gradient; 0 does not clip.
        clip_norm: the greatest norm of a whole gradient, after `clip_value`; 0 does not clip.
        keep_optimizer_state: do not begin anew when parameters are loaded, as each round of a
            federation does.
        schedule: "constant", "step", "exponential", "linear", "cosine", "warmup_linear" or
            "warmup_cosine"; by the number of steps made in all rounds.
        warmup_steps: of "warmup_…": steps over which the rate rises.
        decay_steps: "step" and "exponential": steps for one `decay_factor`; "linear" and "cosine":
            steps until `final_rate`, the warm-up among them.
        decay_factor: of "step" and "exponential".
        final_rate: of "linear" and "cosine".
        accumulate: batches whose mean gradient makes one step of `train`.
        max_steps: that one call of `train` makes on this node, however many epochs are asked for;
            what was trained until then counts. 0 is no bound.
        max_train_s: likewise in seconds: the training ends with the batch that it is at, so that
            its result depends on how fast the node is. 0 is no bound.
        precision: "mixed" computes products in float16, with a scaled loss.
        mode: "train" puts BatchNormalization and Dropout into training mode while training;
            "as_written" leaves them as they are.
        running_statistics: of BatchNormalization in training mode: "federated" has them as the
            tail of the parameter vector, where gradients are 0; "local" keeps them on this node.
        running_variance: "sample" makes the running variance of the unbiased one of a batch, as
            torch does, "population" of the biased one, as ONNX says; "auto" looks who exported.
        seed: of Dropout's masks.
        label_smoothing: of "softmax_cross_entropy": the share of the target for all classes alike.
        class_weights: of losses of classes: one for each class; empty weighs all alike.
        pos_weight: of "bce_with_logits": of the positive labels, one for all or one for each.
        ignore_index: of losses of classes: a label that counts for nothing.
        class_axis: of losses of classes: the axis of the output with one number for each.
        huber_delta: of "huber": where it turns from quadratic to linear.
        losses: [output, loss, weight] of several outputs; what is trained on is their weighted
            sum. The first is `loss`, of the first output. None: `loss` alone.
        labels_apart: each of `losses` has labels of its own, in their order: a composite of
            tensors, or one whose last axis has them. By default all have the same.
        check: make a dry run on this node's first examples before it is ready.
    """

    model: bytes | str | Path = content_setting(read_model)
    loss: str = "softmax_cross_entropy"
    learning_rate: float = 0.1
    trainable: tuple[str, ...] = ()
    lora: Lora | None = None
    optimizer: str = "sgd"
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float | None = None
    betas: tuple[float, float] | None = None
    bias_correction: bool = True
    initial_square: float | None = None
    smoothing: float = 0.99
    centered: bool = False
    eps: float | None = None
    clip_value: float = 0.0
    clip_norm: float = 0.0
    keep_optimizer_state: bool = False
    schedule: str = "constant"
    warmup_steps: int = 0
    decay_steps: int = 0
    decay_factor: float = 0.1
    final_rate: float = 0.0
    accumulate: int = 1
    max_steps: int = 0
    max_train_s: float = 0.0
    precision: Precision = "float32"
    mode: TrainingMode = "as_written"
    running_statistics: Literal["federated", "local"] = "federated"
    running_variance: RunningVariance = "auto"
    seed: int = 0
    label_smoothing: float = 0.0
    class_weights: tuple[float, ...] = ()
    pos_weight: tuple[float, ...] = ()
    ignore_index: int | None = None
    class_axis: int = -1
    huber_delta: float = 1.0
    outputs: tuple[str, ...] = later_setting(())
    losses: tuple[tuple[str, str, float], ...] = later_setting(())
    labels_apart: bool = later_setting(False)
    check: bool = host_setting(True)


# Of products and sums of one call: up to there it takes less than a millisecond, where handing it
# to another thread and back takes a tenth of one.
_QUICK_PRODUCTS = 1 << 22
_QUICK_SUMS = 1 << 18
# Parameters from which on steps write into buffers; binding these costs a small graph too much.
_LARGE_PARAMS = 1 << 23


def _quick_batch(model: Any, batch: Value, *_: Value) -> bool:
    """Return True if a model of these parameters is quick on a batch.

    Each parameter is multiplied at most once for each row and place of a batch; an axis of the
    features or channels is not among these, and no shorter than the shortest one.
    """
    parts = batch if isinstance(batch, (Composite, tuple, list)) else (batch,)
    places = 0
    for part in parts:  # of a peer's message: whatever it is, forward refuses it later
        shape = _shape(part)
        has_features = len(shape) > 1 and getattr(part, "dtype", np.dtype(bool)).kind not in "iub"
        features = max(min(shape[1:]), 1) if has_features else 1
        places = max(places, math.prod(shape) // features)
    return bool(model.size * max(places, 1) <= _QUICK_PRODUCTS)


def _quick_vector(model: Any, *_: Value) -> bool:
    """Return True if a model's vector is added to and checked quickly."""
    return bool(model.size <= _QUICK_SUMS)


def _quick_backward(model: Any, *_: Value) -> bool:
    """Return True if the last forward was quick; its batch is what backward computes with."""
    kept = model.last_input
    return kept is None or _quick_batch(model, kept)


@register_component
class OnnxModel(Model):
    """Forward, loss, gradients and training of one ONNX graph.

    The flat vector is the concatenation of the trained initializers, each in row-major order,
    in the order in which the graph declares them; then come running statistics that training moves,
    unless they are local. A batch of a graph with several inputs is a Composite of tensors in the
    order of the graph, and likewise the outputs; the loss is of the first output.
    """

    TYPE_NAME: ClassVar[str] = "bbnode.OnnxModel"
    Config: ClassVar[type] = OnnxModelConfig
    depends: ClassVar[Mapping[str, str]] = {"backend": "compute", "data_source": "data"}
    needed_for: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "data_source": ("train", "train_adjusted")
    }
    config: OnnxModelConfig
    _loss_checked = False  # see `_check_loss`

    def __init__(self, config: OnnxModelConfig) -> None:
        """Read the model.

        Raises:
            InvalidComponentConfig: a setting is of another type, or out of its range.
            AutodiffError: the model, its loss or its optimizer cannot be trained; says which node
                or setting, and why. An op that gradients do not pass is told by `bind`, where the
                program trains, or by the first method that needs them; inference does without.
        """
        config = checked_config(type(self), config)
        super().__init__(config)
        with _opened(config) as (model, apart):
            # Whose initializers then are all weights, under the names that `export` gives them.
            model = with_own_weights(model, config.trainable, apart)
            graphs = _derive(config, model, apart)
            initial, moved = _Arrays(graphs.initial, apart), _Arrays(graphs.statistics, {})
            self._graphs = graphs = graphs.without_values()
            for tensor in model.graph.initializer:  # which then hold those that are not trained
                if tensor.name in apart and tensor.name not in initial:
                    tensor.CopyFrom(apart[tensor.name].whole())
            # From here on the weights are in the flat vector, and nowhere else.
            self._begin(initial, moved)
        emptied = without_values(model, self._trained)
        self.config = replace(config, model=emptied.SerializeToString(deterministic=True))
        names = [name for _, name, _ in config.losses] or [config.loss]
        self._all_labels = [
            Labels(self.TYPE_NAME, find_loss(name), loss_settings(config), dims)
            for name, dims in zip(names, graphs.loss_dims, strict=True)
        ]
        self._labels = self._all_labels[0]
        self._axes = [_dims(info) for info in graphs.writer.f.inputs]
        self._takes_empty = all(node.op_type in _OF_ROWS for node in graphs.writer.modes.evaluated)
        self._warn()

    def _warn(self) -> None:
        """Log where what is trained may be something else than the author meant."""
        for line in self._warnings(self.config, self._graphs):
            logger.warning("%s: %s", self.TYPE_NAME, line)

    @staticmethod
    def _warnings(config: OnnxModelConfig, graphs: TrainingGraphs) -> tuple[str, ...]:
        found = graphs.choice.warned()
        if config.mode == "train" and not (graphs.statistics or graphs.draws):
            found = (*found, _NOTHING_TO_SWITCH)
        return found

    def check_trains(self) -> None:
        """Differentiate the model, and see that its loss is of what its output is.

        Raises:
            UnsupportedGradient, GradientRuleError: an op that gradients do not pass.
            InvalidForwardModel: a tensor may be a weight as well as a constant.
            LossDoesNotFit: as of a Softmax before a loss that applies one itself.
        """
        self._check_loss()
        self._graphs.derive()

    def _check_loss(self) -> None:
        """Check once that the loss is of what the output is. Raises LossDoesNotFit."""
        if not self._loss_checked:
            remark = self._graphs.check_loss()
            self._loss_checked = True
            if remark:
                logger.warning("%s: %s", self.TYPE_NAME, remark)

    def bind(self, dependencies: Mapping[str, Component]) -> None:
        """Receive what it depends on, and differentiate where the program trains.

        Raises what `check_trains` raises.
        """
        super().bind(dependencies)
        if self.has_dependency("data_source"):
            self.check_trains()

    def _begin(self, initial: Mapping[str, Weights], moved: Mapping[str, Weights]) -> None:
        """Check the settings, and begin with these parameters and running statistics."""
        config, rate = self.config, self.config.learning_rate
        self.require(0 < rate < math.inf, f"learning_rate {rate} is not a positive number")
        self.require(config.max_steps >= 0, f"max_steps is {config.max_steps}; 0 or more")
        seconds = config.max_train_s
        self.require(0 <= seconds < math.inf, f"max_train_s is {seconds}; 0 or more seconds")
        self._check_losses()
        self.require(config.accumulate >= 1, f"accumulate is {config.accumulate}; 1 or more")
        self._schedule = Schedule(
            name=config.schedule,
            rate=rate,
            **{name: getattr(config, name) for name in _SCHEDULE_FIELDS},
        )
        self._schedule.check()
        statistics = _shapes(moved)
        federated = config.running_statistics == "federated"
        self._trained = _shapes(initial)
        self._layout = {**self._trained, **statistics} if federated else self._trained
        self._local_layout = {} if federated else statistics
        tail = [*moved.values()]
        self._params = _filled(self._layout, (initial, moved if federated else {}))
        self._local = self._join([] if federated else tail)
        self._state: tuple[Vector, ...] = ()  # of the optimizer; empty is all zeros
        self._progress = Progress()
        self._last_input: Value | None = None
        self._kept_grads: Vector | None = None
        self._prepared: dict[str, PreparedGraph] = {}

    def _check_losses(self) -> None:
        config = self.config
        self.require(
            not config.labels_apart or len(config.losses) > 1,
            "labels_apart is of several losses; say them, or leave it out",
        )
        names = [output for output, _, _ in config.losses]
        self.require(len({*names}) == len(names), f"losses name an output twice: {names}")
        for _, _, weight in config.losses:
            self.require(0 < weight < math.inf, f"a loss has the weight {weight}; a number above 0")
        if config.losses:
            first = config.outputs[0] if config.outputs else names[0]
            self.require(
                (names[0], config.losses[0][1]) == (first, config.loss),
                f"the first of losses has to be {config.loss!r} of the first output, {first!r}",
            )

    @offload(reads_only=True)
    def bootstrap(self, ctx: OpContext) -> None:
        """Let the backend prepare what a round needs, when the host prepares its components.

        Where the program trains, the data have to be there, and to fit.

        Raises:
            DataUnavailable: the data source can't load them.
            DataDoesNotFit: the model can't be trained on them.
            ComponentError: the backend cannot run one of the graphs.
        """
        graphs = self._graphs
        logger.info("parameters", extra={"size": self.size, "trained": graphs.choice.told()})
        if self.has_dependency("data_source"):
            self._check_data()
        needed = [graphs.forward, graphs.loss]
        if self.has_dependency("data_source"):
            needed += self._needed_to_train()
        for model in needed:
            self._prepare(model)
        self._rehearse(ctx)

    def _rehearse(self, ctx: OpContext) -> None:
        """Make a dry run, on the first examples of the data where it trains on some.

        Raises DryRunFailed, and what a check of examples raises.
        """
        if not self.config.check:
            return
        if self.size > MOST_PARAMETERS:
            logger.info(
                "no dry run at start: the model is large; `bbnode check` makes one",
                extra={"parameters": self.size, "most": MOST_PARAMETERS},
            )
            return
        trains = self.has_dependency("data_source")
        batch = self._first_examples() if trains else None
        made_up = batch is None

        def run(examples: tuple[Value, Value]) -> DryRun:
            few = FewExamples(examples)
            # Of its own parameters and counters, with the same graphs, prepared once.
            other = copy.copy(self)
            other.bind({**self._dependencies, **({"data_source": few} if trains else {})})
            return dry_run(
                other,
                ctx,
                few,
                methods=self._rehearsed if trains else frozenset(),
                made_up=made_up,
                whole=False,
                budget_s=NODE_BUDGET_S,
            )

        report = run(batch) if batch is not None else tried(self, run)
        if report is None:
            return
        for line in report.warnings:
            logger.warning("%s: %s", self.TYPE_NAME, line)
        for line in (*report.skipped, *report.postponed):
            logger.info("%s: %s", self.TYPE_NAME, line)

    # Methods that a dry run at start calls, of a model that trains.
    _rehearsed: ClassVar[frozenset[str]] = frozenset({"compute_loss", "train"})

    def _first_examples(self) -> tuple[Value, Value] | None:
        """Return as many examples of the data as a dry run takes, whose labels count; or None."""
        source: DataSource = self.dependency("data_source")
        found = source.first(_LOOKED_AT)
        if found is None:
            return None
        features, labels = found
        rows = np.flatnonzero(self._counted(labels))
        if not rows.size:
            return None
        rows = np.resize(rows, SIZES[-1])
        several = isinstance(features, Composite)
        parts = [np.asarray(part)[rows] for part in (features if several else [features])]
        return Composite(parts) if several else parts[0], np.asarray(labels)[rows]

    def _counted(self, labels: Value) -> npt.NDArray[np.bool_]:
        """Return for each example True if a loss counts a label of it."""
        if self.config.labels_apart:
            return np.ones(len(np.asarray(labels)), bool)
        return self._labels.counted(labels)

    def _needed_to_train(self) -> tuple[ModelProto, ...]:
        """Return the graphs that `train` runs."""
        graphs = self._graphs
        one = self.config.accumulate == 1
        return (graphs.train_step,) if one else (graphs.gradients, graphs.step)

    @property
    def _params(self) -> Vector:
        """The flat vector; its views are made once, as each forward needs them."""
        return self._flat

    @_params.setter
    def _params(self, vector: Vector) -> None:
        self._flat = vector
        self._views: list[Value] | None = None

    @property
    def size(self) -> int:
        """The length P of the parameter vector."""
        return int(self._params.size)

    @property
    def layout(self) -> Layout:
        """The parts of the vector in their order: name to shape."""
        return self._layout

    @property
    def trained(self) -> tuple[str, ...]:
        """The names of `layout` that steps move; the others are running statistics."""
        return tuple(self._trained)

    def output_names(self) -> tuple[str, ...]:
        """Return the names of what `forward` gives, in that order."""
        return self._graphs.output_names

    def parts(self, vector: Value) -> Mapping[str, Weights]:
        """Return what a vector [P] has for each parameter that steps move, by name."""
        found = named(np.asarray(vector), self._layout)
        return {name: found[name] for name in self._trained}

    def example_batch(self, rows: int, *, draw: int = 0) -> tuple[Value, Value] | None:
        """Return made-up examples of the graph's inputs, and labels that fit its output."""
        infos = self._graphs.writer.f.inputs
        inputs = [
            draw_features(
                info.type.tensor_type.elem_type,
                port_sizes(info),
                rows,
                draw,
                self._greatest(info.name),
            )
            for info in infos
        ]
        feeds = [*self._split(self._params), *self._kept(), *inputs]
        try:
            output = np.asarray(self._run(self._graphs.forward, feeds)[0])
        except ComponentError:  # which forward says in its own words
            output = np.zeros((rows, *(1 for _ in self._graphs.output_dims[1:])))
        labels: Value = self._labels.drawn(output, draw)
        if self.config.labels_apart:
            parts = [
                each.drawn(
                    np.zeros((rows, *(d if isinstance(d, int) else 1 for d in dims[1:]))), draw
                )
                for each, dims in zip(self._all_labels, self._graphs.loss_dims, strict=True)
            ]
            flat = [np.reshape(part, (rows, -1)) for part in parts]
            alike = all(part.shape == (rows, 1) for part in flat)
            # One tensor, as data have them, where each example has one label of each.
            labels = np.concatenate(flat, axis=1) if alike else Composite(parts)
        return inputs[0] if len(inputs) == 1 else Composite(inputs), labels

    def _greatest(self, name: str) -> int:
        """Return the greatest id that all tables take in which an input's values are looked up."""
        rows = {each.name: each.dims[0] for each in self._graphs.initial if each.dims}
        graph = self._graphs.forward.graph
        rows.update((each.name, each.dims[0]) for each in graph.initializer if each.dims)
        same, least = {name}, []
        for node in graph.node:
            if node.op_type in _HAND_ON_IDS and node.input[0] in same:
                same.add(node.output[0])
            axis = next((each.i for each in node.attribute if each.name == "axis"), 0)
            if node.op_type == "Gather" and node.input[1] in same and axis == 0:
                least += [rows[node.input[0]]] if node.input[0] in rows else []
        return max(0, min(least) - 1) if least else 1

    @property
    def last_input(self) -> Value | None:
        """The batch of the last forward, which `backward` computes with."""
        return self._last_input

    @property
    def progress(self) -> Progress:
        """The counters of training."""
        return self._progress

    def params(self, ctx: OpContext) -> Value:
        """Return the parameters, [P] float32, read-only: training replaces the vector."""
        return self._params

    @offload(unless=_quick_vector)
    def load_parameters(self, ctx: OpContext, params: Value) -> None:
        """Replace the parameters by `params` [P] float32; the optimizer's state begins anew.

        With `keep_optimizer_state` it stays.

        Raises:
            ParameterMismatch: wrong size or dtype, a value that is NaN or infinite, or a running
                variance below 0.
        """
        self._params = self._checked(params, "parameters")
        self._last_input = self._kept_grads = None
        if not self.config.keep_optimizer_state:
            self._state = ()
            self._progress = replace(self._progress, age=0)

    @offload(unless=_quick_batch)
    def forward(self, ctx: OpContext, input: Value) -> Value:
        """Return the outputs for a batch, which is kept for `backward`."""
        inputs = self._inputs(input, may_be_empty=self._takes_empty)
        outputs = self._run(
            self._graphs.forward, [*self._split(self._params), *self._kept(), *inputs]
        )
        self._last_input = input
        return outputs[0] if len(outputs) == 1 else Composite(outputs)

    @offload(reads_only=True, unless=_quick_batch)
    def compute_loss(self, ctx: OpContext, input: Value, target: Value) -> Value:
        """Return the mean loss over a batch, float32 scalar."""
        inputs = self._inputs(input)
        feeds = [*self._split(self._params), *self._kept(), *inputs]
        feeds += each_label(self._target(target, inputs))
        (loss,) = self._run(self._graphs.loss, feeds)
        return np.asarray(loss)

    @offload(reads_only=True, unless=_quick_batch)
    def evaluate(self, ctx: OpContext, input: Value, target: Value) -> Value:
        """Return `compute_loss`: its older name."""
        return self.compute_loss(ctx, input, target)

    @offload(unless=_quick_batch)
    def gradient(self, ctx: OpContext, input: Value, target: Value) -> tuple[Value, Value]:
        """Return the gradient of the mean loss by the parameters, [P] float32, and that loss, [].

        It is of the model in training mode, where it has one: then running statistics move, and
        the next masks are others. The parameters stay.

        Raises:
            ParameterMismatch: the gradient holds NaN or infinity.
            LossDoesNotFit: as `check_trains`.
        """
        self._check_loss()
        inputs = self._inputs(input)
        labels = self._target(target, inputs)
        stepper = self._stepper()
        loss, grads = stepper.gradients(inputs, labels)
        # The statistics are not among what gradients are of.
        rest = [np.zeros(np.shape(value), np.float32) for value in self._tail(stepper.statistics)]
        joined = self._join([*grads, *rest])
        if not np.isfinite(joined).all():
            raise ParameterMismatch(f"{self.TYPE_NAME}: the gradient would hold NaN or infinity")
        if self._graphs.statistics or self._graphs.draws or self._graphs.scales_loss:
            self._take(stepper, self._joined(stepper))
        return joined, np.asarray(loss)

    @property
    def is_plain(self) -> bool:
        """True if gradients are of the model as it is evaluated, in float32."""
        graphs = self._graphs
        return not (graphs.statistics or graphs.draws or graphs.scales_loss)

    @offload(reads_only=True, unless=_quick_batch)
    def gradient_with_input(
        self, ctx: OpContext, input: Value, target: Value
    ) -> tuple[Value, Value, Value]:
        """Return the gradients of the mean loss, [P] and shaped like the input, and that loss, [].

        Raises:
            ComponentError: the input is not one float32 tensor of the declared shape, or the model
                trains in a form of its own (running statistics, masks, float16).
            ParameterMismatch: the input, the loss or a gradient holds NaN or infinity.
            LossDoesNotFit: as `check_trains`.
        """
        self._check_loss()
        inputs = self._pullable(input, to_input=True)
        labels = self._target(target, inputs)
        feeds = [*self._split(self._params), *inputs, *each_label(labels)]
        *grads, by_input, loss = self._run(self._graphs.joint_gradients, feeds)
        joined = self._join(grads)
        self._all_finite("the gradient would hold", joined, by_input, loss)
        return joined, by_input, np.asarray(loss)

    @offload(reads_only=True, unless=_quick_batch)
    def pull_back(
        self, ctx: OpContext, input: Value, grad: Value, *, to_input: int
    ) -> tuple[Value, Value]:
        """Return the gradients of sum(`grad` · first output), [P] and shaped like the input.

        Raises:
            ComponentError: as `gradient_with_input`; or `grad` is not shaped like the output.
            ParameterMismatch: the input, `grad` or a gradient holds NaN or infinity.
        """
        inputs = self._pullable(input, to_input=bool(to_input))
        given = np.asarray(grad)
        self._check_dims("the gradient", given, self._graphs.output_dims)
        self._all_finite("the gradient holds", given)
        if _shape(given)[:1] != _shape(inputs[0])[:1]:
            raise ComponentError(
                f"{self.TYPE_NAME}: the gradient is of {list(given.shape)[:1]} rows and the batch "
                f"of {list(_shape(inputs[0]))[:1]}; give the one that belongs to this batch"
            )
        graphs = self._graphs
        graph = graphs.pulled_input if to_input else graphs.pulled_parameters
        *grads, output = self._run(graph, [*self._split(self._params), *inputs, given])
        if _shape(output) != given.shape:
            raise ComponentError(
                f"{self.TYPE_NAME}: the gradient is {list(given.shape)}, and the output "
                f"{list(_shape(output))}"
            )
        by_input = grads.pop() if to_input else np.zeros(0, np.float32)
        joined = self._join(grads)
        self._all_finite("the gradient would hold", joined, by_input)
        return joined, by_input

    def _pullable(self, batch: Value, *, to_input: bool) -> list[Value]:
        """Return the inputs of a batch that gradients are pulled to; ComponentError as above."""
        if not self.is_plain:
            raise ComponentError(
                f"{self.TYPE_NAME}: the model trains in a form of its own (BatchNormalization, "
                'Dropout or precision="mixed"), and gradients that are pulled back are of the one '
                "that is evaluated; leave these out"
            )
        inputs = self._inputs(batch)
        infos = self._graphs.writer.f.inputs
        is_float = infos[0].type.tensor_type.elem_type == TensorProto.FLOAT
        if to_input and (len(infos) > 1 or not is_float):
            raise ComponentError(
                f"{self.TYPE_NAME}: a gradient by the input is of one float32 tensor, and the "
                f"model takes {', '.join(info.name for info in infos)}"
            )
        for info, value in zip(infos, inputs, strict=True):
            if info.type.tensor_type.elem_type == TensorProto.FLOAT:
                dims = tuple(
                    each.dim_value if each.HasField("dim_value") else None
                    for each in info.type.tensor_type.shape.dim
                )
                self._check_dims(f"input {info.name!r}", np.asarray(value), dims)
                self._all_finite(f"input {info.name!r} holds", np.asarray(value))
        return inputs

    def _check_dims(self, what: str, value: Weights, dims: Sequence[int | str | None]) -> None:
        """Refuse what ONNX might stretch: ComponentError."""
        same = len(dims) == value.ndim and all(
            not isinstance(dim, int) or dim == size
            for dim, size in zip(dims, value.shape, strict=True)
        )
        if not same or value.dtype != np.float32:
            wanted = ["?" if not isinstance(dim, int) else dim for dim in dims]
            raise ComponentError(
                f"{self.TYPE_NAME}: {what} is {value.dtype}{list(value.shape)}, not float32{wanted}"
            )

    def _all_finite(self, what: str, *values: Value) -> None:
        if not all(np.isfinite(np.asarray(value)).all() for value in values):
            raise ParameterMismatch(f"{self.TYPE_NAME}: {what} NaN or infinity")

    def set_learning_rate(self, ctx: OpContext, rate: Value) -> None:
        """Take `rate`, float32 [], for all steps from now on, instead of the schedule's.

        Raises:
            ComponentError: it is not one positive number of float32's range.
        """
        value = np.asarray(rate)
        with np.errstate(over="ignore"):  # beyond float32 it is infinity, and refused
            good = value.size == 1 and value.dtype.kind == "f"
            good = good and 0 < float(value.astype(np.float32).item()) < math.inf
        if not good:
            raise ComponentError(
                f"{self.TYPE_NAME}: a learning rate is one positive float32, not {value!r:.80}"
            )
        self._progress = replace(self._progress, rate=float(value.item()))

    @offload(unless=_quick_backward)
    def backward(self, ctx: OpContext, grad: Value) -> None:
        """Pull `grad`, shaped like the last forward's output, back to the parameters; keep it.

        It is the gradient of the first output, and of the model as it is evaluated.

        Raises:
            ComponentError: there was no forward since the parameters were loaded.
        """
        if self._last_input is None:
            raise ComponentError(
                f"{self.TYPE_NAME}: backward before any forward; call forward first"
            )
        inputs = self._inputs(self._last_input)
        feeds = [*self._split(self._params), *self._kept(), *inputs, grad]
        grads = self._run(self._graphs.pullback, feeds)
        rest = self._split(self._params)[len(self._trained) :]
        self._kept_grads = self._join([*grads, *map(np.zeros_like, rest)])

    @offload(unless=_quick_vector)
    def step(self, ctx: OpContext, grads: Value | None) -> None:
        """Make a step with `grads` [P], or with the gradients that `backward` kept (used up).

        Running statistics stay as they are, whatever `grads` has for them.

        Raises:
            ComponentError: neither is there.
            ParameterMismatch: `grads` does not fit, or the result or the optimizer's state is not
                finite.
        """
        chosen = self._kept_grads if grads is None else self._checked(grads, "gradients")
        if chosen is None:
            raise ComponentError(f"{self.TYPE_NAME}: step without gradients; call backward first")
        stepper = self._stepper()
        stepper.step(self._split(chosen)[: len(self._trained)])
        params = self._finite(self._joined(stepper), "step")
        if not all(np.isfinite(part).all() for part in stepper.state):
            # A square beyond float32 would stop all later steps of its parameter.
            raise ParameterMismatch(
                f"{self.TYPE_NAME}: the optimizer's state after this step would hold NaN or "
                "infinity; it stays as it is; set clip_norm or clip_value"
            )
        self._take(stepper, params)
        self._kept_grads = None

    @offload(unless=_quick_vector)
    def apply_delta(self, ctx: OpContext, delta: Value) -> None:
        """Add `delta` [P] to the parameters.

        Raises:
            ParameterMismatch: it does not fit, or the sum is not finite.
        """
        one = np.asarray(1.0, np.float32)
        feeds = [self._params, self._checked(delta, "delta"), one]
        (total,) = self._run(scaled_sum_model(), feeds)
        self._check_variances(total, "parameters after this delta")
        self._params = self._finite(_frozen(total), "delta")

    @offload
    def train(self, ctx: OpContext, *, epochs: int, batch: int) -> Metadata:
        """Train over the bound DataSource: `epochs` passes in batches of `batch`.

        Returns `num_samples` (examples of one pass), `loss` (mean over the last epoch, weighted
        by batch sizes), `steps`, with mixed precision `rescaled`, the number of times that
        gradients were beyond float16 and the scale of the loss was cut, and where `max_steps` or
        `max_train_s` ended the training `work`, the part of the epochs that was done.

        Raises:
            TrainingFailed: epochs or batch below 1, or the loss stopped being finite (the
                parameters are then what they were before).
        """
        return self._train(ctx, epochs, batch, ())[0]

    @offload
    def train_adjusted(
        self,
        ctx: OpContext,
        anchor: Value | None,
        correction: Value | None,
        *,
        epochs: int,
        batch: int,
        proximal: float,
        frozen: str = "",
    ) -> tuple[Metadata, Value]:
        """Train with `proximal` (w - `anchor`) + `correction` added to each gradient.

        Both are vectors [P]; without an anchor it is the present parameters. Parameters that
        `frozen` names, one a line, stay as they are, and so does their state. Returns the metadata
        of `train`, and float32 [3]: the steps made, the sum of their learning rates, the part of
        the epochs that was done.

        Raises:
            ParameterMismatch: a vector does not fit, or holds NaN or infinity.
            TrainingFailed: as `train`; or `proximal` is below 0 or not finite; or `frozen` names
                all parameters, or none that there is, or some beside `clip_norm`.
        """
        if not 0 <= proximal < math.inf:
            raise TrainingFailed(
                f"{self.TYPE_NAME}: proximal is {proximal}; it weighs a distance: 0 or more"
            )
        to = self._params if anchor is None else self._checked(anchor, "anchor")
        pull = np.zeros(self.size, np.float32)
        if correction is not None:
            pull = self._checked(correction, "correction")
        if proximal:
            (pull,) = self._run(scaled_sum_model(), [pull, to, np.asarray(-proximal, np.float32)])
        pulls = self._split(pull)[: len(self._trained)]
        adjustment = [*pulls, np.asarray(proximal, np.float32)]
        return self._train(ctx, epochs, batch, adjustment, self._places(frozen.splitlines()))

    def _places(self, names: Sequence[str]) -> frozenset[int]:
        """Return the numbers of parameters that no step is to move; TrainingFailed as above."""
        places = {name: at for at, name in enumerate(self._trained)}
        unknown = [name for name in names if name not in self._layout]
        if unknown or (names and self.config.clip_norm) or places.keys() <= {*names}:
            why = f"there is no parameter {unknown[0]!r:.80}" if unknown else "nothing is left"
            if not unknown and self.config.clip_norm:
                why = "clip_norm is of the gradients of all parameters; use clip_value"
            raise TrainingFailed(f"{self.TYPE_NAME}: frozen names {len(names)} parameter(s): {why}")
        return frozenset(places[name] for name in names if name in places)

    def _train(
        self,
        ctx: OpContext,
        epochs: int,
        batch: int,
        adjustment: Sequence[Value],
        frozen: frozenset[int] = frozenset(),
    ) -> tuple[Metadata, Value]:
        if epochs < 1 or batch < 1:
            raise TrainingFailed(
                f"{self.TYPE_NAME}: {epochs} epoch(s) with batches of {batch}; both 1 or more"
            )
        source: DataSource = self.dependency("data_source")
        stepper = self._stepper(adjustment, frozen)
        before = stepper.progress
        loss, seen = math.nan, 0
        most = before.steps + self.config.max_steps if self.config.max_steps else math.inf
        until = time.monotonic() + (self.config.max_train_s or math.inf)

        def ended() -> bool:
            return stepper.progress.steps >= most or time.monotonic() >= until

        for epoch in range(epochs):
            if epoch and ended():
                break
            loss, rows = self._epoch(stepper, source, batch, ended)
            seen += rows
            if not math.isfinite(loss):
                raise TrainingFailed(
                    f"{self.TYPE_NAME}: the loss is {loss} in epoch {epoch + 1}; lower "
                    f"learning_rate ({self.config.learning_rate})"
                )
        self._take_finite(stepper)
        steps = stepper.progress.steps - before.steps
        work = seen / (epochs * source.num_samples)
        told = {"num_samples": source.num_samples, "loss": loss, "steps": steps}
        if self._graphs.scales_loss:
            told["rescaled"] = stepper.progress.rescaled - before.rescaled
        if work < 1:
            told["work"] = work
        rates = math.fsum(self._rate(before, step) for step in range(steps))
        return Metadata(told), _frozen(np.array([steps, rates, work], np.float32))

    def _take_finite(self, stepper: Stepper) -> None:
        """Make what training ended with the model's own; TrainingFailed where it is not finite."""
        moved = (*stepper.values, *self._tail(stepper.statistics), *stepper.state)
        if not all(np.isfinite(part).all() for part in moved):
            raise TrainingFailed(
                f"{self.TYPE_NAME}: parameters or the optimizer's state left the finite numbers; "
                f"lower learning_rate ({self.config.learning_rate}), or set clip_norm"
            )
        self._take(stepper, self._joined(stepper))

    def _rate(self, before: Progress, step: int) -> float:
        """Return the learning rate of a step that was made after `before`."""
        return self._schedule.at(before.steps + step) if before.rate is None else before.rate

    def _epoch(
        self, stepper: Stepper, source: DataSource, batch: int, ended: Callable[[], bool]
    ) -> tuple[float, int]:
        """Go through one epoch, or its first batches; return mean loss and number of examples."""
        losses: list[float] = []
        seen = 0
        sums = Accumulated(self._run)
        for features, target in source.epoch_batches(batch):
            if seen and ended():
                break
            inputs = self._inputs(features)
            labels = self._target(target, inputs)
            rows = len(np.atleast_1d(inputs[0]))
            seen += rows
            if self.config.accumulate == 1:
                losses.append(stepper.train(inputs, labels) * rows)
                continue
            loss, grads = stepper.gradients(inputs, labels)
            losses.append(float(loss) * rows)
            sums.add(grads, rows)
            if sums.batches == self.config.accumulate:
                stepper.step(sums.mean())
        if sums.batches:
            stepper.step(sums.mean())
        return math.fsum(losses) / seen, seen

    def serialize(self) -> bytes:
        """Return the parameters, the state of training, and what forward and backward keep."""
        return self.freeze()()

    def freeze(self) -> Callable[[], bytes]:
        """Capture references: parameters, state and gradients are replaced, never changed."""
        params, local, state = self._params, self._local, self._state
        saved = SavedState(
            params=params,
            layout=self._layout,
            last_input=self._last_input,
            grads=self._kept_grads,
            local=local,
            local_layout=self._local_layout,
            optimizer=self.config.optimizer if state else "",
            kinds=self._graphs.state_kinds if state else (),
            state=state,
            progress=asdict(self._progress),
        )
        return lambda: pack_state(saved)

    def restore(self, data: bytes) -> None:
        """Load a saved state; ComponentError when it does not fit this model."""
        if not data:
            return
        with self.restoring():
            saved = unpack_state(data)
        if saved.layout is not None and list(saved.layout.items()) != list(self._layout.items()):
            raise ParameterMismatch(
                f"{self.TYPE_NAME}: the saved parameters are others, or in another order: "
                f"{_listed(named(saved.params, saved.layout))}"
            )
        self._load(saved)

    def carry_over(self, data: bytes) -> CarriedOver:
        """Take parameters that agree by name and shape; the others keep their initial values.

        A state of an earlier release has no names: it is taken if it has as many parameters. The
        optimizer's state is taken where all parameters agree, and the optimizer is the same.

        Raises:
            ComponentError: no parameter agrees, or a value is NaN or infinite.
        """
        if not data:
            return CarriedOver()
        with self.restoring():
            saved = unpack_state(data)
        layout = saved.layout
        if layout is None or list(layout.items()) == list(self._layout.items()):
            left = self._load(saved)
            return CarriedOver(taken=tuple(self._layout), left=left)
        given = {**named(saved.params, layout), **named(saved.local, saved.local_layout)}
        own = {**named(self._params, self._layout), **named(self._local, self._local_layout)}
        told = agreeing(
            given,
            own,
            why_absent="it is new here, and has its initial values",
            why_unknown="there is no such parameter any more",
            known=[t.name for t in _parsed(self.config.model).graph.initializer],
            why_known="it is not trained any more, and has the values of the program "
            "(`bbnode compile --init-from` puts trained ones there)",
        )
        if not told.taken:
            raise ParameterMismatch(
                f"{self.TYPE_NAME}: no parameter of the saved state agrees in name and shape; "
                f"it has {_listed(given)}, and this model {_listed(own)}"
            )
        taken = frozenset(told.taken)
        chosen = {name: given[name] if name in taken else own[name] for name in own}
        params = self._join([chosen[name] for name in self._layout])
        local = self._join([chosen[name] for name in self._local_layout])
        self._params = self._checked(params, "saved parameters")
        self._local = self._checked_local(local)
        return told

    def vector_size(self) -> int | None:
        """Return the length of the parameter vector."""
        return self.size

    @classmethod
    def shapes_of(cls, config: OnnxModelConfig) -> ModelShapes | None:
        """Return the length of the parameter vector, and the shape of the output if it is one.

        Raises AutodiffError for a model that can't be trained.
        """
        with _opened(config) as (model, apart):
            graphs = _derive(config, with_own_weights(model, config.trainable, apart), apart)
        federated = config.running_statistics == "federated"
        tensors = (*graphs.initial, *(graphs.statistics if federated else ()))
        size = sum(math.prod(tensor.dims) for tensor in tensors)
        dims = [dim if isinstance(dim, int) else None for dim in graphs.output_dims]
        if not dims or len(model.graph.output) != 1:
            return ModelShapes(size)
        return ModelShapes(size, (None, *dims[1:]))

    def output_kind(self) -> OutputKind:
        """Return what the first output is, by the loss that it was trained with."""
        last = len(self._graphs.output_dims) - 1
        if self.config.class_axis not in (-1, last):
            return ""
        return _OUTPUT_KINDS.get(self.config.loss, "")

    def export(self) -> ModelProto:
        """Return the author's model with the present parameters in place of the initial ones.

        Running statistics are among them, and adapters: in the weights, or beside these (`Lora`).
        """
        model, values = self._filled()
        if self.config.lora is not None:
            return with_trained(model, self.config.lora, values)
        if values:
            raise NotExportable(
                f"{self.TYPE_NAME}: {_listed(values)} are no initializers of the author's model"
            )
        return model

    def twin(self) -> OnnxModel:
        """Return another instance; its initial parameters are the present ones of this one."""
        model, _ = self._filled()
        content = model.SerializeToString(deterministic=True)
        # By name: other values might be taken for something else than the initial ones were.
        named = self.config.trainable if self.config.lora is not None else (*self._trained,)
        return type(self)(replace(self.config, model=content, trainable=named))

    def _filled(self) -> tuple[ModelProto, dict[str, Vector]]:
        """Return the author's model with the present values, and those that it has no place for."""
        model = _parsed(self.config.model)
        values = named(self._params, self._layout) | named(self._local, self._local_layout)
        for tensor in model.graph.initializer:
            value = values.pop(tensor.name, None)
            if value is not None:
                _set(tensor, value)
        return model, values

    @classmethod
    def saved_weights(cls, data: bytes) -> Mapping[str, Weights]:
        """Return the parameters in a saved state by name.

        Raises:
            ComponentError: the bytes are no such state.
            NotExportable: a release that kept no names saved it.
        """
        with restoring(cls.TYPE_NAME):
            saved = unpack_state(data)
        if saved.layout is None:
            raise NotExportable(
                f"{cls.TYPE_NAME}: an earlier release of bbnode saved this state without the names "
                "of parameters; run the node once with this one"
            )
        return {**named(saved.params, saved.layout), **named(saved.local, saved.local_layout)}

    @classmethod
    def parameters_told(cls, config: OnnxModelConfig) -> str:
        """Return one line that says which tensors are trained, and which are not and why.

        Raises AutodiffError for a model that can't be trained.
        """
        return _choice(config, _parsed(config.model)).told()

    @classmethod
    def parameters_listed(cls, config: OnnxModelConfig) -> ParameterList:
        """Return each float tensor of the model with what becomes of it and why.

        Raises AutodiffError for a model that can't be trained.
        """
        with _opened(config) as (model, apart):
            model = with_own_weights(model, config.trainable, apart)
            graphs = _derive(config, model, apart)
        choice = graphs.choice
        tensors = {each.name: each for each in (*graphs.initial, *model.graph.initializer)}
        rows = tuple(
            ListedParameter(
                name=name,
                shape=tuple(tensor.dims),
                trained=name in choice.trained,
                why=choice.why.get(name, "") or choice.left.get(name, ""),
            )
            for name, tensor in tensors.items()
            if name in choice.trained or name in choice.left
        )
        return ParameterList(rows, cls._warnings(config, graphs))

    @classmethod
    def initialized(
        cls, config: OnnxModelConfig, weights: Mapping[str, Weights]
    ) -> tuple[OnnxModelConfig, CarriedOver]:
        """Return the settings with weights in the place of initializers that agree.

        These are the float initializers that could be trained, also those that are not, and
        running statistics.

        Raises:
            AutodiffError: the model of the settings can't be used.
            ParameterMismatch: nothing agrees; WeightsNotFinite: a value is NaN or infinite.
        """
        model = with_own_weights(_parsed(config.model), config.trainable)
        before = _choice(config, model)
        default = read_forward(model).choice
        names = {*default.trained, *default.undecided}
        for node in model.graph.node:
            if node.op_type == "BatchNormalization":
                names.update(node.input[3:5])
        tensors = {t.name: t for t in model.graph.initializer if t.name in names}
        wanted = {name: numpy_helper.to_array(tensor) for name, tensor in tensors.items()}
        told = agreeing(
            weights,
            wanted,
            why_absent="nothing of that name is given, and it keeps its initial values",
            why_unknown="the program has no such weight",
        )
        if not told.taken:
            raise ParameterMismatch(
                f"{cls.TYPE_NAME}: no weight agrees in name, shape and dtype; given are "
                f"{_listed(weights)}, and the model has {_listed(wanted)}"
            )
        for name in told.taken:
            if not np.isfinite(weights[name]).all():
                raise WeightsNotFinite(f"{cls.TYPE_NAME}: {name!r} holds NaN or infinity")
            _set(tensors[name], weights[name])
        made = replace(config, model=model.SerializeToString(deterministic=True))
        if config.lora is None and _choice(made, model).trained != before.trained:
            # Of other values the choice would be another.
            made = replace(made, trainable=before.trained)
        return made, told

    def _load(self, saved: SavedState) -> dict[str, str]:
        """Take a state of these parameters; return what of it does not fit, and why."""
        checked = self._checked(saved.params, "saved parameters")
        kept = None if saved.grads is None else self._checked(saved.grads, "saved gradients")
        local, left = self._local, {}
        if saved.local_layout and list(saved.local_layout.items()) == list(
            self._local_layout.items()
        ):
            local = self._checked_local(saved.local)
        state: tuple[Vector, ...] = ()
        size = sum(map(math.prod, self._trained.values()))
        same = (saved.optimizer, saved.kinds) == (self.config.optimizer, self._graphs.state_kinds)
        if same and all(vector.shape == (size,) for vector in saved.state):
            state = tuple(self._checked_state(vector) for vector in saved.state)
        elif saved.state:
            left["the optimizer's state"] = (
                f"it is of {saved.optimizer!r}, and this model has {self.config.optimizer!r}"
            )
        with self.restoring():
            progress = Progress.from_saved(saved.progress)
        self._params, self._kept_grads, self._local = checked, kept, local
        self._state = state
        self._progress = progress if state or not saved.state else replace(progress, age=0)
        self._last_input = saved.last_input
        return left

    def _check_data(self) -> None:
        source: DataSource = self.dependency("data_source")
        schema = source.schema()
        if schema is not None:
            slot = self.depends["data_source"]
            where = f"{source.TYPE_NAME} of slot {slot!r} does not fit {self.TYPE_NAME}"
            loss, settings = find_loss(self.config.loss), loss_settings(self.config)
            try:
                check_fit(
                    schema,
                    self._graphs,
                    loss,
                    settings,
                    where=where,
                    labels_apart=len(self._all_labels) if self.config.labels_apart else 0,
                )
            except DataDoesNotFit:
                source.forget()  # others may stand there the next time
                raise

    def _prepare(self, model: ModelProto) -> PreparedGraph:
        name = model.graph.name
        prepared = self._prepared.get(name)
        if prepared is None:
            backend: Backend = self.dependency("backend")
            prepared = self._prepared[name] = backend.prepare(model)
        return prepared

    def _run(self, model: ModelProto, inputs: Sequence[Value]) -> list[Value]:
        return self._prepare(model).run(inputs)

    def _run_into(
        self, model: ModelProto, inputs: Sequence[Value], places: Mapping[int, Vector]
    ) -> list[Value]:
        prepared = self._prepare(model)
        if isinstance(prepared, WritingGraph):
            return prepared.run_into(inputs, places)
        results = prepared.run(inputs)
        for at, place in places.items():
            place[...] = np.asarray(results[at])
            results[at] = place
        return results

    def _inputs(self, batch: Value, *, may_be_empty: bool = False) -> list[Value]:
        """Return the tensors of a batch in the order of the graph's inputs.

        Raises:
            ComponentError: there are more or fewer, or one has no rows.
        """
        names = self._graphs.input_names
        several = isinstance(batch, (Composite, tuple, list))
        parts = list(batch) if several else [batch]
        if len(parts) != len(names):
            raise ComponentError(
                f"{self.TYPE_NAME}: a batch of {len(parts)} tensor(s), and the model has "
                f"{len(names)} input(s): {', '.join(names)}; give a composite of them in this order"
            )
        if not may_be_empty:
            for name, part in zip(names, parts, strict=True):
                if 0 in _shape(part):
                    raise ComponentError(
                        f"{self.TYPE_NAME}: input {name!r} has the shape {list(_shape(part))}: "
                        "an empty batch has no loss and no gradient, and not every op ends on it; "
                        "leave it out"
                    )
        return parts

    def _target(self, target: Value, inputs: Sequence[Value]) -> Value:
        """Return labels as the loss takes them; ComponentError where they do not fit."""
        sizes = {
            dim: size
            for dims, value in zip(self._axes, inputs, strict=True)
            for dim, size in zip(dims, _shape(value), strict=False)
            if dim
        }
        if not self.config.labels_apart:
            return self._labels.checked(target, sizes)
        parts = apart(target, self._all_labels, self.TYPE_NAME)
        return Composite(
            [each.checked(part, sizes) for each, part in zip(self._all_labels, parts, strict=True)]
        )

    def _kept(self) -> list[Value]:
        """Return the local statistics, one tensor each."""
        return [*named(self._local, self._local_layout).values()]

    def _stepper(
        self, adjustment: Sequence[Value] = (), frozen: frozenset[int] = frozenset()
    ) -> Stepper:
        """Return what training begins with."""
        values = self._split(self._params)
        count = len(self._trained)
        size = sum(map(math.prod, self._trained.values()))
        state = self._state or initial_state(size, self._graphs.state_initial)
        return Stepper(
            self._graphs,
            self._run,
            self._schedule,
            values=values[:count],
            statistics=[*values[count:], *self._kept()],
            state=[part for vector in state for part in named(vector, self._trained).values()],
            progress=self._progress,
            adjustment=adjustment,
            frozen=frozen,
            buffers=None if frozen else self._buffers(),
        )

    def _buffers(self) -> Buffers | None:
        """Return what steps write into, where parameters are large and the backend can do it."""
        step = self._graphs.train_step if self.config.accumulate == 1 else self._graphs.step
        if self.size < _LARGE_PARAMS or not isinstance(self._prepare(step), WritingGraph):
            return None
        return Buffers(self._run_into, self._trained, self.size, len(self._graphs.state_kinds))

    def _tail(self, statistics: list[Value]) -> list[Value]:
        """Return those statistics that the flat vector holds."""
        return [] if self._local_layout else statistics

    def _joined(self, stepper: Stepper) -> Vector:
        tail = self._tail(stepper.statistics)
        if not stepper.written:
            return self._join([*stepper.values, *tail])
        vector = stepper.written[0]
        if tail:
            vector[-sum(map(np.size, tail)) :] = self._join(tail)
        return _frozen(vector)

    def _take(self, stepper: Stepper, params: Vector) -> None:
        """Make what training ended with the model's own; `params` are the joined ones."""
        count = len(self._trained)
        self._params = params
        if self._local_layout:
            self._local = self._join(stepper.statistics)
        self._state = tuple(map(_frozen, stepper.written[1:])) or tuple(
            self._join(stepper.state[at : at + count]) for at in range(0, len(stepper.state), count)
        )
        self._progress = stepper.progress

    def _split(self, flat: Vector) -> list[Value]:
        """Return views of a flat vector in the shapes of the parameters."""
        if flat is not self._params:
            return [*named(flat, self._layout).values()]
        if self._views is None:
            self._views = [*named(flat, self._layout).values()]
        return self._views

    def _join(self, parts: Sequence[Value]) -> Vector:
        if not parts:
            return _frozen(np.zeros(0, np.float32))
        return _frozen(np.concatenate([np.reshape(part, -1) for part in parts]))

    def _checked_local(self, vector: Vector) -> Vector:
        self._check_variances(vector, "saved statistics", self._local_layout)
        return self._checked_state(vector)

    def _checked_state(self, vector: Vector) -> Vector:
        if not np.isfinite(vector).all():
            raise ParameterMismatch(f"{self.TYPE_NAME}: the saved state holds NaN or infinity")
        return np.require(vector, requirements=("C", "A"))

    def _check_variances(
        self, vector: Vector, what: str, layout: Mapping[str, tuple[int, ...]] | None = None
    ) -> None:
        """Raise ParameterMismatch where a running variance is below 0: its root is NaN."""
        if not self._graphs.variances:
            return
        for name, values in named(vector, self._layout if layout is None else layout).items():
            if name in self._graphs.variances and (values < 0).any():
                raise ParameterMismatch(
                    f"{self.TYPE_NAME}: {what}: the running variance {name!r} is below 0"
                )

    def _checked(self, vector: Value, what: str) -> Vector:
        """Return a vector that fits and is read-only; copied only where it is writeable."""
        if not isinstance(vector, np.ndarray) or vector.dtype != np.float32:
            kind = vector.dtype if isinstance(vector, np.ndarray) else type(vector).__name__
            raise ParameterMismatch(f"{self.TYPE_NAME}: {what} are {kind}; send a float32 vector")
        if vector.shape != (self.size,):
            raise ParameterMismatch(
                f"{self.TYPE_NAME}: {what} have the shape {list(vector.shape)}, this model has "
                f"{self.size} parameters; let all peers run the same artifact"
            )
        if not np.isfinite(vector).all():
            raise ParameterMismatch(f"{self.TYPE_NAME}: {what} hold NaN or infinity")
        if what.endswith("parameters"):
            self._check_variances(vector, what)
        # Views into received bytes are read-only, but may lie at any address.
        if vector.flags.writeable:
            return _frozen(vector.copy())
        return np.require(vector, requirements=("C", "A"))

    def _finite(self, params: Vector, what: str) -> Vector:
        """Return new parameters; refuse ones that are not finite, so that the old ones stay."""
        if not np.isfinite(params).all():
            raise ParameterMismatch(
                f"{self.TYPE_NAME}: the parameters after this {what} would hold NaN or infinity; "
                "they stay as they are"
            )
        return params


@register_component
class HeldModel(OnnxModel):
    """An `OnnxModel` that is never trained here, and so needs no data source beside it."""

    TYPE_NAME: ClassVar[str] = "bbnode.HeldModel"
    depends: ClassVar[Mapping[str, str]] = {"backend": "compute"}
    needed_for: ClassVar[Mapping[str, tuple[str, ...]]] = {}

    def _train(
        self,
        ctx: OpContext,
        epochs: int,
        batch: int,
        adjustment: Sequence[Value],
        frozen: frozenset[int] = frozenset(),
    ) -> tuple[Metadata, Value]:
        """Refuse: ComponentError."""
        raise ComponentError(f"{self.TYPE_NAME} has no data to train on; bind bbnode.OnnxModel")

    def _check_data(self) -> None:
        """Check nothing: there are no data."""

    def _warn(self) -> None:
        """Log nothing: what is trained is another model's to say."""


@contextmanager
def _taken() -> Iterator[None]:
    try:
        yield
    except ModelNotTaken as error:
        raise InvalidForwardModel(what=error.what, remedy=error.remedy) from error


def _parsed(content: ModelContent) -> ModelProto:
    if not isinstance(content, bytes):
        with _taken():
            return intake.read_model(content)
    try:
        return onnx.load_model_from_string(content)
    except ProtobufDecodeError as error:
        raise InvalidForwardModel(
            what=f"its {len(content)} bytes are no ModelProto",
            remedy="give `model` the bytes of model.SerializeToString()",
        ) from error


@contextmanager
def _opened(config: OnnxModelConfig) -> Iterator[tuple[ModelProto, dict[str, StoredTensor]]]:
    """Yield a model, and those of its tensors that are read while the context lasts."""
    if config.lora is not None:  # which changes the weights that it adapts
        yield _parsed(config.model), {}
        return
    with _taken(), intake.opened_model(config.model) as opened:
        yield opened


class _Arrays(Mapping[str, Weights]):
    """Tensors by name, each of which becomes an array when it is asked for, and is not kept."""

    def __init__(self, tensors: Sequence[TensorProto], apart: Mapping[str, StoredTensor]) -> None:
        self._tensors = {tensor.name: tensor for tensor in tensors}
        self._apart = apart

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of each, which takes no array."""
        return {name: tuple(tensor.dims) for name, tensor in self._tensors.items()}

    def fill(self, places: Mapping[str, Vector]) -> None:
        """Put each into its place."""
        for name, tensor in self._tensors.items():
            if name in self._apart:
                self._apart[name].read_into(places[name])
            else:
                places[name][...] = numpy_helper.to_array(tensor)

    def __getitem__(self, name: str) -> Weights:
        tensor = self._tensors[name]
        stored = self._apart.get(name)
        return numpy_helper.to_array(tensor) if stored is None else stored.array()

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def _shapes(tensors: Mapping[str, Weights]) -> dict[str, tuple[int, ...]]:
    if isinstance(tensors, _Arrays):
        return tensors.shapes()
    return {name: value.shape for name, value in tensors.items()}


def _filled(layout: Layout, given: Iterable[Mapping[str, Weights]]) -> Vector:
    """Return the flat vector of a layout; values are taken one after the other."""
    vector = np.empty(sum(map(math.prod, layout.values())), np.float32)
    views = named(vector, layout)
    for values in given:
        if isinstance(values, _Arrays):
            values.fill(views)
            continue
        for name, value in values.items():
            views[name][...] = value
    return _frozen(vector)


def _set(tensor: TensorProto, value: Weights) -> None:
    """Replace the values of a tensor, and nothing else of it."""
    for data in _TYPED_DATA:
        tensor.ClearField(data)
    tensor.raw_data = numpy_helper.from_array(np.ascontiguousarray(value)).raw_data


def _listed(weights: Mapping[str, Weights]) -> str:
    """Return names and shapes for a message, or the first of many."""
    told = [f"{name!r} {list(each.shape)}" for name, each in itertools.islice(weights.items(), 4)]
    more = len(weights) - len(told)
    return ", ".join([*told, f"{more} more"] if more else told) or "none"


def initial_state(size: int, numbers: Iterable[float]) -> tuple[Vector, ...]:
    """Return an optimizer's state before its first step, a vector of each number."""
    # Zeros take no memory until they are written.
    return tuple(
        np.full(size, number, np.float32) if number else np.zeros(size, np.float32)
        for number in numbers
    )


def loss_settings(config: OnnxModelConfig) -> LossSettings:
    """Return what a model's settings say of its loss."""
    return LossSettings(**{each.name: getattr(config, each.name) for each in fields(LossSettings)})


def optimizer_settings(config: OnnxModelConfig) -> OptimizerSettings:
    """Return what a model's settings say of its optimizer."""
    names = [each.name for each in fields(OptimizerSettings) if each.name != "name"]
    return OptimizerSettings(
        name=config.optimizer, **{name: getattr(config, name) for name in names}
    )


def _choice(config: OnnxModelConfig, model: ModelProto) -> ParameterChoice:
    """Return what is trained of the model of these settings."""
    model = with_own_weights(model, config.trainable)
    model, wrt = _with_adapters(config, model)
    return read_forward(model, wrt or None).choice


def _with_adapters(
    config: OnnxModelConfig, model: ModelProto
) -> tuple[ModelProto, tuple[str, ...]]:
    """Return the model as it is trained, and the patterns of what is trained of it."""
    if config.lora is None:
        return model, config.trainable
    model, adapters = with_adapters(model, config.lora)
    return model, (*adapters, *config.trainable)


def _derive(
    config: OnnxModelConfig, model: ModelProto, apart: Mapping[str, StoredTensor]
) -> TrainingGraphs:
    options = TrainingOptions(
        optimizer=optimizer_settings(config),
        loss=loss_settings(config),
        mode=config.mode,
        running_variance=config.running_variance,
        seed=config.seed,
        precision=config.precision,
        outputs=config.outputs,
        losses=tuple(OutputLoss(*each) for each in config.losses),
        labels_apart=config.labels_apart,
    )
    model, wrt = _with_adapters(config, model)
    graphs = training_graphs(model, config.loss, wrt or None, options, apart, at_once=False)
    if any(t.data_type != TensorProto.FLOAT for t in (*graphs.initial, *graphs.statistics)):
        raise InvalidForwardModel(
            what="its parameters are float64", remedy="convert them to float32"
        )
    return graphs


def _dims(info: ValueInfoProto) -> list[str]:
    """Return the symbols of an input's axes, "" for one that has a size or no name."""
    return [dim.dim_param for dim in info.type.tensor_type.shape.dim]


def port_sizes(info: ValueInfoProto) -> list[int | str | None]:
    """Return the sizes of an input's axes, or their names where they are open."""
    dims = info.type.tensor_type.shape.dim
    return [dim.dim_value if dim.HasField("dim_value") else dim.dim_param or None for dim in dims]


def _shape(value: Value) -> tuple[int, ...]:
    """Return the shape of a tensor; () of anything else."""
    shape = getattr(value, "shape", ())
    return shape if isinstance(shape, tuple) else ()


def _frozen(vector: Vector) -> Vector:
    vector.flags.writeable = False
    return vector
