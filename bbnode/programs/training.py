"""Arguments and steps that all training programs share: the model, its data, its metrics.

Rule: a model that can't be trained here is refused while the program is recorded, before
any peer runs it.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

from onnx import ModelProto, TensorProto

from bbnode.components import (
    ArrayDataSource,
    DataSource,
    HeldModel,
    OnnxModel,
    OnnxModelConfig,
    OrtBackend,
    concrete,
    mlp_forward,
)
from bbnode.components.registry import component_class
from bbnode.dsl import (
    BackendSlot,
    ConcreteSpec,
    DataSourceSlot,
    Graph,
    ModelSlot,
    Output,
    types,
)
from bbnode.ir.errors import BbnodeError
from bbnode.ir.intake import ModelNotTaken, read_model
from bbnode.programs.arguments import ReadyProgram

# What a program is trained from: an ONNX file, its bytes, a model, or the layer sizes of an MLP.
Forward: TypeAlias = str | os.PathLike[str] | bytes | ModelProto | Sequence[int]
Source: TypeAlias = str | type[DataSource]

# Of each loss: the metric beside it.
METRICS: Mapping[str, str] = {"softmax_cross_entropy": "accuracy", "mse": "mae"}

# The types that inputs of a model may have, by ONNX's numbers.
_INPUT_TYPES: Mapping[int, types.TypeNode] = {
    TensorProto.FLOAT: types.TENSOR_FLOAT,
    TensorProto.INT64: types.TENSOR_INT64,
}

TRAIN_SLOT = "data"  # as `OnnxModel.depends` has it
TEST_SLOT = "test"  # a file of held-out examples
HELD_OUT_SLOT = "held_out"  # the part "test" of the file that a peer trains on the part "train" of


@dataclass(kw_only=True, eq=False)
class TrainingProgram(ReadyProgram):
    """Base of training programs: the model, its data, and the settings of the training.

    The slot "data" has the examples that a peer trains on. Where peers that train evaluate too,
    their slot "held_out" has the part of the same data set that they do not train on. Settings
    of the slots (`path` and so on) are each node's own.
    """

    model: Forward | None = None  # see `Forward`; relative paths start at the working directory
    epochs: int = 1  # this and the next three: of the training on each peer
    batch: int = 32
    learning_rate: float = 0.1
    loss: str = "softmax_cross_entropy"  # or "mse"
    data: Source = ArrayDataSource  # a DataSource, or its TYPE_NAME
    seed: int = 0  # of the weights of an MLP

    @cached_property
    def forward(self) -> ModelProto:
        """The model with its weights. Raises BadArgument for one that can't be trained."""
        given = self.model
        if given is None:
            raise self.bad(
                "model is missing; give the path of an ONNX file, its bytes, a ModelProto, or the "
                "layer sizes of an MLP such as [64, 64, 10]"
            )
        if isinstance(given, ModelProto):
            found = given
        elif isinstance(given, bytes | str | os.PathLike):
            found = self._read(given)
        else:
            found = self._mlp(given)
        self._check_inputs(found)
        return found

    @cached_property
    def size(self) -> int:
        """The number of parameters that are trained, P."""
        try:
            return OnnxModel(self._config).size
        except BbnodeError as error:
            raise self.bad(f"model can't be trained: {error}") from error

    @property
    def holds_out(self) -> bool:
        """Return True where peers that train hold examples out, to evaluate on."""
        return False

    @property
    def metrics(self) -> tuple[str, str]:
        """The names of what an evaluation gives."""
        return "loss", METRICS[self.loss]

    def bindings(self) -> Mapping[str, Any]:
        """Return the classes of the slots that every training program has."""
        data = {} if self.holds_out else {TRAIN_SLOT: self.source}
        return {**data, "compute": OrtBackend}

    @cached_property
    def source(self) -> type[DataSource]:
        """The class of the data sources. Raises BadArgument for none."""
        return source_class(self, self.data)

    def check(self) -> None:
        """Check the arguments. Raises BadArgument."""
        self.require_counts(epochs=1, batch=1, seed=0)
        self.require_numbers("learning_rate")
        self.require_one_of("loss", METRICS)
        _ = self.source, self.forward, self.size

    def trained_model(self, slot: str) -> ModelSlot:
        """Return a slot for the model where it is trained."""
        return ModelSlot(slot, concrete=concrete(OnnxModel, self._config))

    def held_model(self, slot: str) -> ModelSlot:
        """Return a slot for the model where it is not trained; it needs no data."""
        return ModelSlot(slot, concrete=concrete(HeldModel, self._config))

    def train_part(self, g: Graph, after: Output) -> Output:
        """Keep the part "test" of a peer's own data out of the training; a Trigger."""
        part = self._part("train")
        return DataSourceSlot(TRAIN_SLOT, concrete=part).on_data_loaded(g, after=after)

    def held_out(self) -> DataSourceSlot:
        """Return a slot with the part of a peer's own data that `train_part` keeps out."""
        return DataSourceSlot(HELD_OUT_SLOT, concrete=self._part("test"))

    def test_data(self) -> DataSourceSlot:
        """Return the slot "test", whose examples nobody trains on."""
        if self.loss == "mse" and "label_dtype" in self._source_settings:
            return DataSourceSlot(TEST_SLOT, concrete=self._told())
        return DataSourceSlot(TEST_SLOT)

    def evaluation(
        self, g: Graph, model: ModelSlot, data: DataSourceSlot, after: Output
    ) -> tuple[Output, ...]:
        """Evaluate the model on all examples of a data source.

        Returns their number, the loss and the metric beside it, each float32 [].
        """
        compute = BackendSlot("compute")
        examples, labels = data.next_batch(g, after=after)
        examples = g.expect(examples, _INPUT_TYPES[_elem_type(self.forward)])
        is_class = self.loss == "softmax_cross_entropy"
        labels = g.expect(labels, types.TENSOR_INT64 if is_class else types.TENSOR_FLOAT)
        made = model.forward(g, examples)
        loss = model.compute_loss(g, examples, labels)
        if is_class:
            # Classes are on the last axis.
            right = compute.equal(g, compute.arg_max(g, made, axis=-1, keepdims=False), labels)
            measured = compute.cast(g, right, to=types.TENSOR_FLOAT)
        else:
            flat = g.constant([-1])
            off = compute.sub(g, compute.reshape(g, made, flat), compute.reshape(g, labels, flat))
            measured = compute.abs(g, off)
        number = compute.gather(g, compute.shape(g, labels), g.constant(0), axis=0)
        number = compute.cast(g, number, to=types.TENSOR_FLOAT)
        return number, loss, compute.reduce_mean(g, measured, keepdims=False)

    @property
    def _config(self) -> OnnxModelConfig:
        content = self.forward.SerializeToString(deterministic=True)
        return OnnxModelConfig(model=content, loss=self.loss, learning_rate=self.learning_rate)

    def _part(self, split: str) -> ConcreteSpec:
        if "split" not in self._source_settings:
            raise self.bad(
                f"data={self.source.TYPE_NAME!r} has no setting `split`, so that a peer can't hold "
                "examples out; evaluate on the server, or take another data source"
            )
        return self._told(split=split)

    def _told(self, **settings: str) -> ConcreteSpec:
        """Return the data source with what the program knows; a node may say otherwise."""
        if self.loss == "mse" and "label_dtype" in self._source_settings:
            settings["label_dtype"] = "float32"
        return concrete(self.source, **settings)

    @property
    def _source_settings(self) -> frozenset[str]:
        return frozenset(field.name for field in dataclasses.fields(self.source.Config))

    def _read(self, source: str | os.PathLike[str] | bytes) -> ModelProto:
        try:
            return read_model(source)
        except ModelNotTaken as error:
            raise self.bad(f"model: {error}") from error

    def _mlp(self, sizes: Sequence[int]) -> ModelProto:
        good = isinstance(sizes, list | tuple) and all(type(size) is int for size in sizes)
        self.require("model", good, "an ONNX model, or layer sizes such as [64, 64, 10]")
        try:
            return mlp_forward(sizes, seed=self.seed)
        except BbnodeError as error:
            raise self.bad(f"model: {error}") from error

    def _check_inputs(self, model: ModelProto) -> None:
        """Refuse a model that batches of examples don't fit."""
        held = {tensor.name for tensor in model.graph.initializer}
        inputs = [info for info in model.graph.input if info.name not in held]
        if len(inputs) != 1:
            names = ", ".join(info.name for info in inputs) or "none"
            raise self.bad(
                f"model has {len(inputs)} inputs ({names}), and a batch of examples is one "
                "tensor; join the inputs into one, or make the others initializers"
            )
        (info,) = inputs
        if info.type.tensor_type.elem_type not in _INPUT_TYPES:
            kind = TensorProto.DataType.Name(info.type.tensor_type.elem_type)
            raise self.bad(
                f"model: its input {info.name!r} is {kind}; make it float32, or int64 for tokens"
            )
        dims = info.type.tensor_type.shape.dim
        if not dims or dims[0].HasField("dim_value"):
            fixed = f"fixed to {dims[0].dim_value}" if dims else "missing"
            raise self.bad(
                f"model: the first axis of its input {info.name!r} is {fixed}; batches differ in "
                "size, so export the model with a dynamic batch axis (dynamic_axes of "
                f'torch.onnx.export: {{"{info.name}": {{0: "batch"}}}})'
            )


def _elem_type(model: ModelProto) -> int:
    held = {tensor.name for tensor in model.graph.initializer}
    (info,) = [info for info in model.graph.input if info.name not in held]
    return int(info.type.tensor_type.elem_type)


def source_class(program: ReadyProgram, data: Source) -> type[DataSource]:
    """Return the class that the argument `data` of a program names. Raises BadArgument for none."""
    found: object = data
    if isinstance(found, str):
        try:
            found = component_class(found)
        except BbnodeError as error:
            raise program.bad(f"data={data!r:.80}: {error}") from error
    is_source = isinstance(found, type) and issubclass(found, DataSource)
    program.require("data", is_source, 'a DataSource, such as "bbnode.ArrayDataSource"')
    assert isinstance(found, type)
    return found
