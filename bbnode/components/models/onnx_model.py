"""A trainable model from a forward ONNX graph.

Rule: the parameters are one flat float32 vector that is replaced, never changed; everything
that computes with it is an ONNX graph that the bound backend runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import onnx
from google.protobuf.message import DecodeError as ProtobufDecodeError
from onnx import ModelProto, numpy_helper

from bbnode.components.autodiff import InvalidForwardModel, TrainingGraphs, training_graphs
from bbnode.components.autodiff.training import find_loss
from bbnode.components.backends.graphs import scaled_sum_model
from bbnode.components.contracts import (
    Backend,
    ComponentError,
    DataSource,
    Model,
    OpContext,
    PreparedGraph,
    offload,
)
from bbnode.components.errors import ParameterMismatch, TrainingFailed
from bbnode.components.models.fit import check_fit, wanted_labels
from bbnode.components.registry import register_component
from bbnode.ir import codec, types
from bbnode.ir.values import Composite, Metadata, Value

Vector = npt.NDArray[np.float32]


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
        self._shapes = [tuple(tensor.dims) for tensor in self._graphs.initial]
        self._label_sizes = wanted_labels(self._graphs).sizes
        self._sizes = [math.prod(shape) for shape in self._shapes]
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
        params = self._params
        kept = [() if v is None else (v,) for v in (self._last_input, self._kept_grads)]
        return lambda: codec.encode_value(Composite((params, *(Composite(v) for v in kept))))

    def restore(self, data: bytes) -> None:
        """Load a saved state; ComponentError when it does not fit this model."""
        if not data:
            return
        with self.restoring():
            params, last_input, grads = codec.decode_value(types.COMPOSITE, data)
            checked = self._checked(params, "saved parameters")
            kept = self._checked(grads[0], "saved gradients") if grads else None
        self._params, self._kept_grads = checked, kept
        self._last_input = last_input[0] if last_input else None

    def _check_data(self) -> None:
        source: DataSource = self.dependency("data_source")
        schema = source.schema()
        if schema is not None:
            slot = self.depends["data_source"]
            where = f"{source.TYPE_NAME} of slot {slot!r} does not fit {self.TYPE_NAME}"
            is_class = find_loss(self.config.loss).class_labels
            check_fit(schema, self._graphs, class_labels=is_class, where=where)

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
        parts: list[Value] = []
        start = 0
        for size, shape in zip(self._sizes, self._shapes, strict=True):
            parts.append(flat[start : start + size].reshape(shape))
            start += size
        return parts

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
        values = array.astype(np.float32, copy=False)
        sizes = self._label_sizes
        if sizes and sizes[-1] == 1 and values.ndim == len(sizes):
            # Otherwise [N] and an output of [N, 1] would be spread over each other to [N, N].
            return values[..., np.newaxis]
        return values


def _derive(config: OnnxModelConfig) -> TrainingGraphs:
    try:
        forward = onnx.load_model_from_string(config.model)
    except ProtobufDecodeError as error:
        raise InvalidForwardModel(
            what=f"its {len(config.model)} bytes are no ModelProto",
            remedy="give `model` the bytes of model.SerializeToString()",
        ) from error
    graphs = training_graphs(forward, config.loss, config.trainable or None)
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
