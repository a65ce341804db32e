"""A trainable model from a forward ONNX graph.

Rule: the parameters are one flat float32 vector that is replaced, never changed; everything
that computes with it is an ONNX graph that the bound backend runs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import onnx
from google.protobuf.message import DecodeError as ProtobufDecodeError
from onnx import ModelProto, TensorProto, numpy_helper

from bbnode.components.autodiff import InvalidForwardModel, TrainingGraphs, training_graphs
from bbnode.components.autodiff.forward import read_forward
from bbnode.components.autodiff.losses import find_loss
from bbnode.components.backends.graphs import scaled_sum_model
from bbnode.components.contracts import (
    Backend,
    CarriedOver,
    ComponentError,
    DataSource,
    Model,
    OpContext,
    PreparedGraph,
    Weights,
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
from bbnode.components.models.fit import check_fit
from bbnode.components.models.weights import (
    SavedState,
    agreeing,
    named,
    pack_state,
    unpack_state,
)
from bbnode.components.registry import register_component
from bbnode.ir.values import Metadata, Value

Vector = npt.NDArray[np.float32]

# Fields of a TensorProto with its values, if they are not in `raw_data`.
_TYPED_DATA = ("float_data", "double_data", "int32_data", "int64_data", "uint64_data")


@dataclass(frozen=True, kw_only=True)
class OnnxModelConfig:
    """Settings of `OnnxModel`.

    Attributes:
        model: bytes of the forward ModelProto: one input, float32 initializers as parameters.
        loss: "softmax_cross_entropy" (int64 class labels) or "mse".
        learning_rate: of SGD.
        trainable: names of the initializers to train; empty means every float one.
    """

    model: bytes
    loss: str = "softmax_cross_entropy"
    learning_rate: float = 0.1
    trainable: tuple[str, ...] = ()


@register_component
class OnnxModel(Model):
    """Forward, loss, gradients and SGD of one ONNX graph.

    The flat vector is the concatenation of the trained initializers, each in row-major order,
    in the order in which the graph declares them.
    """

    TYPE_NAME: ClassVar[str] = "bbnode.OnnxModel"
    Config: ClassVar[type] = OnnxModelConfig
    depends: ClassVar[Mapping[str, str]] = {"backend": "compute", "data_source": "data"}
    needed_for: ClassVar[Mapping[str, tuple[str, ...]]] = {"data_source": ("train",)}
    config: OnnxModelConfig

    def __init__(self, config: OnnxModelConfig) -> None:
        """Derive the training graphs.

        Raises:
            InvalidComponentConfig: the learning rate is not a positive number.
            AutodiffError: the model or its loss cannot be trained; says which node and why.
        """
        super().__init__(config)
        rate = config.learning_rate
        self.require(0 < rate < math.inf, f"learning_rate {rate} is not a positive number")
        self._graphs = _derive(config)
        self._layout = {tensor.name: tuple(tensor.dims) for tensor in self._graphs.initial}
        initial = [numpy_helper.to_array(t).reshape(-1) for t in self._graphs.initial]
        self._params = _frozen(np.concatenate(initial))
        self._rate = np.asarray(rate, np.float32)
        self._last_input: Value | None = None
        self._kept_grads: Vector | None = None
        self._prepared: dict[str, PreparedGraph] = {}

    @offload(reads_only=True)
    def bootstrap(self, ctx: OpContext) -> None:
        """Let the backend prepare what a round needs, when the host prepares its components.

        Where the program trains, the data have to be there, and to fit.

        Raises:
            DataUnavailable: the data source can't load them.
            DataDoesNotFit: the model can't be trained on them.
            ComponentError: the backend cannot run one of the graphs.
        """
        if self.has_dependency("data_source"):
            self._check_data()
        for model in (self._graphs.forward, self._graphs.loss, self._graphs.train_step):
            self._prepare(model)

    @property
    def size(self) -> int:
        """The length P of the parameter vector."""
        return int(self._params.size)

    def params(self, ctx: OpContext) -> Value:
        """Return the parameters, [P] float32, read-only: training replaces the vector."""
        return self._params

    def load_parameters(self, ctx: OpContext, params: Value) -> None:
        """Replace the parameters by `params` [P] float32.

        Raises:
            ParameterMismatch: wrong size or dtype, or a value that is NaN or infinite.
        """
        self._params = self._checked(params, "parameters")
        self._last_input = self._kept_grads = None

    def forward(self, ctx: OpContext, input: Value) -> Value:
        """Return the outputs for a batch, which is kept for `backward`."""
        (output,) = self._run(self._graphs.forward, [*self._split(self._params), input])
        self._last_input = input
        return output

    def compute_loss(self, ctx: OpContext, input: Value, target: Value) -> Value:
        """Return the mean loss over a batch, float32 scalar."""
        feeds = [*self._split(self._params), input, self._labels(target)]
        (loss,) = self._run(self._graphs.loss, feeds)
        return np.asarray(loss)

    @offload(reads_only=True)
    def gradient(self, ctx: OpContext, input: Value, target: Value) -> tuple[Value, Value]:
        """Return the gradient of the mean loss by the parameters, [P] float32, and that loss, [].

        Raises:
            ParameterMismatch: the gradient holds NaN or infinity.
        """
        feeds = [*self._split(self._params), input, self._labels(target)]
        loss, *grads = self._run(self._graphs.gradients, feeds)
        joined = self._join(grads)
        if not np.isfinite(joined).all():
            raise ParameterMismatch(f"{self.TYPE_NAME}: the gradient would hold NaN or infinity")
        return joined, np.asarray(loss)

    def set_learning_rate(self, ctx: OpContext, rate: Value) -> None:
        """Take `rate`, float32 [], for all steps from now on.

        Raises:
            ComponentError: it is not one positive number.
        """
        value = np.asarray(rate)
        if value.size != 1 or value.dtype.kind != "f" or not 0 < float(value.item()) < math.inf:
            raise ComponentError(
                f"{self.TYPE_NAME}: a learning rate is one positive number, not {value!r:.80}"
            )
        self._rate = np.asarray(value.item(), np.float32)

    def backward(self, ctx: OpContext, grad: Value) -> None:
        """Pull `grad`, shaped like the last forward's output, back to the parameters; keep it.

        Raises:
            ComponentError: there was no forward since the parameters were loaded.
        """
        if self._last_input is None:
            raise ComponentError(
                f"{self.TYPE_NAME}: backward before any forward; call forward first"
            )
        feeds = [*self._split(self._params), self._last_input, grad]
        self._kept_grads = self._join(self._run(self._graphs.pullback, feeds))

    def step(self, ctx: OpContext, grads: Value | None) -> None:
        """Make an SGD step with `grads` [P], or with the gradients that `backward` kept (used up).

        Raises:
            ComponentError: neither is there.
            ParameterMismatch: `grads` does not fit, or the result is not finite.
        """
        chosen = self._kept_grads if grads is None else self._checked(grads, "gradients")
        if chosen is None:
            raise ComponentError(f"{self.TYPE_NAME}: step without gradients; call backward first")
        feeds = [*self._split(self._params), *self._split(chosen), self._rate]
        self._params = self._finite(self._join(self._run(self._graphs.sgd_step, feeds)), "step")
        self._kept_grads = None

    def apply_delta(self, ctx: OpContext, delta: Value) -> None:
        """Add `delta` [P] to the parameters.

        Raises:
            ParameterMismatch: it does not fit, or the sum is not finite.
        """
        one = np.asarray(1.0, np.float32)
        feeds = [self._params, self._checked(delta, "delta"), one]
        (total,) = self._run(scaled_sum_model(), feeds)
        self._params = self._finite(_frozen(total), "delta")

    @offload
    def train(self, ctx: OpContext, *, epochs: int, batch: int) -> Metadata:
        """Run SGD over the bound DataSource: `epochs` passes in batches of `batch`.

        Returns `num_samples` (examples of one pass), `loss` (mean over the last epoch, weighted
        by batch sizes), `steps`.

        Raises:
            TrainingFailed: epochs or batch below 1, or the loss stopped being finite (the
                parameters are then what they were before).
        """
        if epochs < 1 or batch < 1:
            raise TrainingFailed(
                f"{self.TYPE_NAME}: {epochs} epoch(s) with batches of {batch}; both 1 or more"
            )
        source: DataSource = self.dependency("data_source")
        values = self._split(self._params)
        count = len(values)
        steps = 0
        loss = math.nan
        for epoch in range(epochs):
            losses: list[float] = []
            for features, labels in source.epoch_batches(batch):
                feeds = [*values, features, self._labels(labels), self._rate]
                results = self._run(self._graphs.train_step, feeds)
                values = results[:count]  # stay apart: flattening each step would copy all
                losses.append(float(results[count]) * len(features))
                steps += 1
            loss = math.fsum(losses) / source.num_samples
            if not math.isfinite(loss):
                raise TrainingFailed(
                    f"{self.TYPE_NAME}: the loss is {loss} in epoch {epoch + 1}; lower "
                    f"learning_rate ({self.config.learning_rate})"
                )
        trained = self._join(values)
        if not np.isfinite(trained).all():
            raise TrainingFailed(
                f"{self.TYPE_NAME}: parameters left the finite numbers; lower learning_rate "
                f"({self.config.learning_rate})"
            )
        self._params = trained
        return Metadata(num_samples=source.num_samples, loss=loss, steps=steps)

    def serialize(self) -> bytes:
        """Return the parameters, and what forward and backward keep."""
        return self.freeze()()

    def freeze(self) -> Callable[[], bytes]:
        """Capture references: parameters and gradients are replaced, never changed."""
        params, last_input, grads = self._params, self._last_input, self._kept_grads
        return lambda: pack_state(params, last_input, grads, self._layout)

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

        A state of an earlier release has no names: it is taken if it has as many parameters.

        Raises:
            ComponentError: no parameter agrees, or a value is NaN or infinite.
        """
        if not data:
            return CarriedOver()
        with self.restoring():
            saved = unpack_state(data)
        layout = saved.layout
        if layout is None or list(layout.items()) == list(self._layout.items()):
            self._load(saved)
            return CarriedOver(taken=tuple(self._layout))
        given, own = named(saved.params, layout), named(self._params, self._layout)
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
        joined = self._join([given[n] if n in taken else own[n] for n in own])
        self._params = self._checked(joined, "saved parameters")
        return told

    def export(self) -> ModelProto:
        """Return the author's model with the present parameters in place of the initial ones."""
        model = _parsed(self.config.model)
        values = named(self._params, self._layout)
        for tensor in model.graph.initializer:
            value = values.pop(tensor.name, None)
            if value is not None:
                _set(tensor, value)
        if values:
            raise NotExportable(
                f"{self.TYPE_NAME}: {_listed(values)} are no initializers of the author's model"
            )
        return model

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
        return named(saved.params, saved.layout)

    @classmethod
    def initialized(
        cls, config: OnnxModelConfig, weights: Mapping[str, Weights]
    ) -> tuple[OnnxModelConfig, CarriedOver]:
        """Return the settings with weights in the place of initializers that agree.

        These are the float initializers that could be trained, also those that are not.

        Raises:
            AutodiffError: the model of the settings can't be used.
            ParameterMismatch: nothing agrees; WeightsNotFinite: a value is NaN or infinite.
        """
        model = _parsed(config.model)
        names = {tensor.name for tensor in read_forward(model).parameters}
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
        content = model.SerializeToString(deterministic=True)
        return replace(config, model=content), told

    def _load(self, saved: SavedState) -> None:
        checked = self._checked(saved.params, "saved parameters")
        kept = None if saved.grads is None else self._checked(saved.grads, "saved gradients")
        self._params, self._kept_grads = checked, kept
        self._last_input = saved.last_input

    def _check_data(self) -> None:
        source: DataSource = self.dependency("data_source")
        schema = source.schema()
        if schema is not None:
            slot = self.depends["data_source"]
            where = f"{source.TYPE_NAME} of slot {slot!r} does not fit {self.TYPE_NAME}"
            is_class = find_loss(self.config.loss).class_labels
            try:
                check_fit(schema, self._graphs, class_labels=is_class, where=where)
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

    def _split(self, flat: Vector) -> list[Value]:
        """Return views of a flat vector in the shapes of the parameters."""
        return [*named(flat, self._layout).values()]

    def _join(self, parts: Sequence[Value]) -> Vector:
        return _frozen(np.concatenate([np.reshape(part, -1) for part in parts]))

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

    def _labels(self, target: Value) -> Value:
        array = np.asarray(target)
        if self.config.loss == "softmax_cross_entropy":
            if array.dtype.kind not in "iu":
                raise ComponentError(
                    f"{self.TYPE_NAME}: labels are {array.dtype}; classes are integers from 0"
                )
            if array.size and int(array.min()) < 0:
                # ONNX would silently count a negative class from the end.
                raise ComponentError(
                    f"{self.TYPE_NAME}: label {int(array.min())}; classes are integers from 0"
                )
            return array.astype(np.int64, copy=False)
        return self._targets(array)

    def _targets(self, array: npt.NDArray[np.generic]) -> Value:
        """Return numbers as the output has them; [N] becomes [N, 1] where the output is that."""
        if array.dtype.kind not in "fiub":
            raise ComponentError(f"{self.TYPE_NAME}: labels are {array.dtype}; mse takes numbers")
        dims = self._graphs.output_dims
        if array.ndim == len(dims) - 1 and dims[-1] == 1:
            array = array[..., np.newaxis]
        # ONNX would broadcast [N] against [N, 1] to [N, N].
        fits = array.ndim == len(dims) and all(
            not isinstance(want, int) or have == want
            for have, want in zip(array.shape, dims, strict=True)
        )
        if not fits:
            wanted = ", ".join(str(dim) if isinstance(dim, int) else "N" for dim in dims)
            raise ComponentError(
                f"{self.TYPE_NAME}: labels have the shape {list(array.shape)}, the model's output "
                f"is [{wanted}]; mse compares the two number by number"
            )
        return array.astype(np.float32, copy=False)


@register_component
class HeldModel(OnnxModel):
    """An `OnnxModel` that is never trained here, and so needs no data source beside it."""

    TYPE_NAME: ClassVar[str] = "bbnode.HeldModel"
    depends: ClassVar[Mapping[str, str]] = {"backend": "compute"}
    needed_for: ClassVar[Mapping[str, tuple[str, ...]]] = {}

    def train(self, ctx: OpContext, *, epochs: int, batch: int) -> Metadata:
        """Refuse: ComponentError."""
        raise ComponentError(f"{self.TYPE_NAME} has no data to train on; bind bbnode.OnnxModel")

    def _check_data(self) -> None:
        """Check nothing: there are no data."""


def _parsed(content: bytes) -> ModelProto:
    try:
        return onnx.load_model_from_string(content)
    except ProtobufDecodeError as error:
        raise InvalidForwardModel(
            what=f"its {len(content)} bytes are no ModelProto",
            remedy="give `model` the bytes of model.SerializeToString()",
        ) from error


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


def _derive(config: OnnxModelConfig) -> TrainingGraphs:
    graphs = training_graphs(_parsed(config.model), config.loss, config.trainable or None)
    kinds = {tensor.data_type for tensor in graphs.initial}
    if kinds != {onnx.TensorProto.FLOAT}:
        raise InvalidForwardModel(
            what="its parameters are float64", remedy="convert them to float32"
        )
    if len(graphs.input_names) != 1:
        raise InvalidForwardModel(
            what=f"it has {len(graphs.input_names)} inputs ({', '.join(graphs.input_names)})",
            remedy="OnnxModel feeds exactly one; make the others initializers",
        )
    return graphs


def _frozen(vector: Vector) -> Vector:
    vector.flags.writeable = False
    return vector
