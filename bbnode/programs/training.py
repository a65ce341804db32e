"""Arguments and steps that all training programs share: the model, its data, its metrics.

Rule: a model that can't be trained here is refused while the program is recorded, before
any peer runs it.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache, cached_property
from typing import Any, ClassVar, TypeAlias

from onnx import ModelProto, TensorProto
from pydantic import TypeAdapter, ValidationError

from bbnode.components import (
    ArrayDataSource,
    Component,
    DataSource,
    HeldModel,
    OnnxModel,
    OnnxModelConfig,
    OrtBackend,
    concrete,
    mlp_forward,
)
from bbnode.components.autodiff.losses import LOSSES, LossSettings, find_loss
from bbnode.components.registry import component_class
from bbnode.dsl import (
    BackendSlot,
    BadArgument,
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
from bbnode.programs.local import PASSED, LocalTraining
from bbnode.programs.metrics import Metric, metric

logger = logging.getLogger(__name__)

# What a program is trained from: an ONNX file, its bytes, a model, or the layer sizes of an MLP.
Forward: TypeAlias = str | os.PathLike[str] | bytes | ModelProto | Sequence[int]
Source: TypeAlias = str | type[DataSource]

# Of a loss by what the output is to it: the metrics of that, the first one where a program names
# none. Those of logits say nothing of numbers, nor do errors of numbers of logits.
METRICS: Mapping[str, tuple[str, ...]] = {
    "bce_with_logits": ("binary_accuracy", "auc"),
    "kl": (),
    "mse": ("mae", "mse", "r2"),
    "mae": ("mae", "mse", "r2"),
    "huber": ("mae", "mse", "r2"),
    "cosine": ("mae", "mse", "r2"),
}
PERPLEXITY = "perplexity"  # of the loss itself
NOT_OF_ALL = frozenset({"auc", "r2"})  # metrics that some examples do not have
OF_CLASSES = "accuracy, top2 and the like, f1_macro, f1_micro, auc (two classes), perplexity"

# The types that inputs of a model may have, by ONNX's numbers.
_INPUT_TYPES: Mapping[int, types.TypeNode] = {
    TensorProto.FLOAT: types.TENSOR_FLOAT,
    TensorProto.INT64: types.TENSOR_INT64,
}

TRAIN_SLOT = "data"  # as `OnnxModel.depends` has it
TEST_SLOT = "test"  # a file of held-out examples
HELD_OUT_SLOT = "held_out"  # the part "test" of the file that a peer trains on the part "train" of


class TrainingProgram(ReadyProgram):
    """Base of training programs: the model, its data, and how a peer trains on these.

    Each setting of `LocalTraining` is an argument too, by its name: `epochs`, `optimizer`,
    `momentum`, `schedule`, `clip_norm`, `trainable`, `lora` and so on.

    The slot "data" has the examples that a peer trains on. Where peers that train evaluate too,
    their slot "held_out" has the part of the same data set that they do not train on. Settings
    of the slots (`path` and so on) are each node's own.
    """

    PARTS: ClassVar[tuple[str, ...]] = ("train",)

    model: Forward | None = None  # see `Forward`; relative paths start at the working directory
    data: Source = ArrayDataSource  # a DataSource, or its TYPE_NAME
    metrics: tuple[str, ...] = ()  # see `bbnode.programs.metric`; empty: the loss's own
    train: LocalTraining = LocalTraining()

    @cached_property
    def forward(self) -> ModelProto:
        """The model with its weights. Raises BadArgument for one that can't be trained."""
        return self.taken(self.model)

    def taken(self, given: Forward | None) -> ModelProto:
        """Return a model that an argument says. Raises as `forward`."""
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
    def chosen(self) -> tuple[str, ...]:
        """The names of the outputs that `forward` gives: () of a model that has one alone.

        Raises BadArgument for `outputs` that the model has not.
        """
        names = [info.name for info in self.forward.graph.output]
        given: Any = getattr(self, "outputs", ())
        asked = (given,) if isinstance(given, str) else tuple(given)
        named = (*asked, *(each[0] for each in self._losses))
        unknown = next((name for name in named if name and name not in names), None)
        listed = ", ".join(map(repr, names))
        if unknown is not None:
            raise self.bad(f"outputs, loss: the model has no output {unknown!r}; it has {listed}")
        if len(asked) > 1:
            raise self.bad(
                f"outputs={asked!r}: loss and metrics are of one output; name that alone, and give "
                'several a loss with loss={"…": …, "…": (…, 0.3)}'
            )
        several = self._losses if isinstance(self.loss, Mapping) else ()
        if asked and several and asked[0] != several[0][0]:
            raise self.bad(
                f"outputs={asked!r}, and the first that has a loss is {several[0][0]!r}; metrics "
                "are of that one: leave outputs out, or name its loss first"
            )
        if not asked and several:
            asked = (several[0][0],)
        if not asked and len(names) > 1:
            asked = (names[0],)
            logger.warning(
                "%s: the model has the outputs %s; loss and metrics take the first one; to take "
                "another, or to have no such line, set outputs=(%r,)",
                self.name, listed, names[0],
            )  # fmt: skip
        return asked if len(names) > 1 else ()

    @property
    def main_loss(self) -> str:
        """The name of the loss of the output that metrics take."""
        return self._losses[0][1]

    @property
    def _losses(self) -> tuple[tuple[str, str, float], ...]:
        """Output, loss and weight of each; "" is the output that metrics take."""
        if not isinstance(self.loss, Mapping):
            return (("", self.loss, 1.0),)
        return tuple(
            (name, value, 1.0) if isinstance(value, str) else (name, value[0], float(value[1]))
            for name, value in self.loss.items()
        )

    def _check_loss(self) -> None:
        """Raise BadArgument for a loss that there is not, or a weight that is none."""
        if not isinstance(self.loss, Mapping):
            self.require_one_of("loss", LOSSES)
            return
        given: Mapping[Any, Any] = self.loss
        for name, value in given.items():
            pair = (value, 1.0) if isinstance(value, str) else value
            good = isinstance(pair, tuple | list) and len(pair) == 2 and pair[0] in LOSSES
            good = good and isinstance(pair[1], int | float) and 0 < pair[1] < math.inf
            if not (isinstance(name, str) and good):
                raise self.bad(
                    f"loss[{name!r}]={value!r:.60} has to be one of {', '.join(LOSSES)}, or such "
                    "a name and a weight above 0"
                )
        self.require("loss", bool(self.loss), "the loss of one output or more")

    @cached_property
    def size(self) -> int:
        """The length of the model's vector, P: its trained parameters, then running statistics."""
        return sum(map(math.prod, self.layout.values()))

    @property
    def trained_size(self) -> int:
        """The numbers of the vector that steps move: all but running statistics."""
        layout, trained = self._parts
        return sum(math.prod(layout[name]) for name in trained)

    @property
    def layout(self) -> Mapping[str, tuple[int, ...]]:
        """The parts of the model's vector in their order: name to shape."""
        return self._parts[0]

    @cached_property
    def _parts(self) -> tuple[Mapping[str, tuple[int, ...]], tuple[str, ...]]:
        """The parts of the model's vector, and the names of those that steps move."""
        try:
            made = OnnxModel(self._config)
            made.check_trains()  # here, and not on each node that installs the program
            return made.layout, made.trained
        except BadArgument:
            raise
        except BbnodeError as error:
            raise self.bad(f"model can't be trained: {error}") from error

    @property
    def holds_out(self) -> bool:
        """Return True where peers that train hold examples out, to evaluate on."""
        return False

    @property
    def measured(self) -> tuple[str, ...]:
        """The names of what an evaluation gives."""
        of_values = METRICS.get(self.main_loss, ("accuracy",))
        return "loss", *(self.metrics or of_values[:1])

    @cached_property
    def measures(self) -> tuple[Metric, ...]:
        """The metrics that means are taken for. Raises BadArgument for one that does not fit."""
        known = METRICS.get(self.main_loss)
        made = []
        for name in self.measured[1:]:
            if name == PERPLEXITY and known is None:
                continue
            one = None
            if name != PERPLEXITY:
                one = metric(
                    name, classes=self._classes, ignore_index=self._loss_settings.ignore_index
                )
            fits = one is not None and ((known is None) == (one.labels == "classes"))
            if one is None or not fits or (known is not None and name not in known):
                fitting = OF_CLASSES if known is None else ", ".join(known) or "none"
                raise self.bad(
                    f"metrics: {name!r} says nothing of a model with loss={self.main_loss!r}; "
                    f"choose among: {fitting}"
                )
            made.append(one)
        return tuple(made)

    def bindings(self) -> Mapping[str, Any]:
        """Return the classes of the slots that every training program has."""
        data = {} if self.holds_out else {TRAIN_SLOT: self.source}
        return {**data, "compute": OrtBackend}

    @cached_property
    def source(self) -> type[DataSource]:
        """The class of the data sources. Raises BadArgument for none."""
        return component_of(self, "data", DataSource, "bbnode.ArrayDataSource")

    def check(self) -> None:
        """Check the arguments. Raises BadArgument."""
        self.require_counts(epochs=1, batch=1, seed=0)
        self.require_numbers("learning_rate")
        self._check_loss()
        listed: Any = self.metrics
        names = isinstance(listed, list | tuple) and all(isinstance(each, str) for each in listed)
        once = names and len({*listed}) == len(listed)
        self.require("metrics", once, 'names of metrics, each once, such as ("accuracy", "top5")')
        _ = self.source, self.forward, self.chosen, self.measures, self.size

    def trained_model(self, slot: str, **other: Any) -> ModelSlot:
        """Return a slot for the model where it is trained, with `other` settings of it."""
        return ModelSlot(slot, concrete=concrete(OnnxModel, replace(self._config, **other)))

    def held_model(self, slot: str) -> ModelSlot:
        """Return a slot for the model where it is not trained; it needs no data."""
        return ModelSlot(slot, concrete=concrete(HeldModel, self._config))

    def batches(self) -> DataSourceSlot:
        """Return the slot "data", which hands out `batch` examples at a time."""
        if "batch_size" not in self._source_settings:
            return DataSourceSlot(TRAIN_SLOT)
        return DataSourceSlot(TRAIN_SLOT, concrete=self._told(batch_size=self.batch))

    def train_part(self, g: Graph, after: Output) -> Output:
        """Keep the part "test" of a peer's own data out of the training; a Trigger."""
        part = self._part("train")
        return DataSourceSlot(TRAIN_SLOT, concrete=part).on_data_loaded(g, after=after)

    def train_data(self) -> DataSourceSlot:
        """Return the slot "data" as one that hands out all examples that a peer trains on."""
        if self.holds_out:
            return DataSourceSlot(TRAIN_SLOT, concrete=self._part("train"))
        return DataSourceSlot(TRAIN_SLOT)

    def held_out(self) -> DataSourceSlot:
        """Return a slot with the part of a peer's own data that `train_part` keeps out."""
        return DataSourceSlot(HELD_OUT_SLOT, concrete=self._part("test"))

    def test_data(self) -> DataSourceSlot:
        """Return the slot "test", whose examples nobody trains on."""
        # Of these examples alone; what clients measure is of the examples of all of them.
        needy = tuple(name for name in self.measured if name in NOT_OF_ALL)
        settings = {"metrics": needy} if needy and "metrics" in self._source_settings else {}
        floats = not self._integer_labels and "label_dtype" in self._source_settings
        if not settings and not floats:
            return DataSourceSlot(TEST_SLOT)
        return DataSourceSlot(TEST_SLOT, concrete=self._told(**settings))

    def evaluation(
        self, g: Graph, model: ModelSlot, data: DataSourceSlot, after: Output
    ) -> tuple[Output, ...]:
        """Evaluate the model on all examples of a data source.

        Returns their number and the loss, float32 [], and the means of each of `measures`.
        """
        compute = BackendSlot("compute")
        number, examples, labels = self.examples(g, data, after)
        made = self._classes_last(g, model.forward(g, examples))
        loss = model.compute_loss(g, examples, labels)
        own = self._measured_labels(g, labels)
        means = (each.means(g, compute, made, own) for each in self.measures)
        return number, loss, *means

    def found(self, g: Graph, loss: Output, means: Iterable[Output]) -> dict[str, Output]:
        """Return what is `measured`, by name, of means over all examples; each float32 []."""
        compute = BackendSlot("compute")
        values = {
            one.name: one.value(g, compute, each)
            for one, each in zip(self.measures, means, strict=True)
        }
        values["loss"] = loss
        if PERPLEXITY in self.measured:
            values[PERPLEXITY] = compute.exp(g, loss)
        return {name: values[name] for name in self.measured}

    def examples(
        self, g: Graph, data: DataSourceSlot, after: Output
    ) -> tuple[Output, Output, Output]:
        """Take the next batch: the number of examples, float32 [], these, and their labels."""
        compute = BackendSlot("compute")
        examples, labels = data.next_batch(g, after=after)
        examples = g.expect(examples, _INPUT_TYPES[_elem_type(self.forward)])
        kind = types.TENSOR_INT64 if self._integer_labels else types.TENSOR_FLOAT
        labels = g.expect(labels, kind)
        number = compute.gather(g, compute.shape(g, labels), g.constant(0), axis=0)
        return compute.cast(g, number, to=types.TENSOR_FLOAT), examples, labels

    def _measured_labels(self, g: Graph, labels: Output) -> Output:
        """Return the labels that metrics take: of the first loss, where each has its own."""
        if not getattr(self, "labels_apart", False):
            return labels
        compute = BackendSlot("compute")
        first = compute.gather(g, labels, g.constant(0), axis=-1)
        kind = types.TENSOR_INT64 if self._of_classes else types.TENSOR_FLOAT
        return compute.cast(g, first, to=kind)

    @property
    def _integer_labels(self) -> bool:
        return all(find_loss(loss).labels == "classes" for _, loss, _ in self._losses)

    @property
    def _loss_settings(self) -> LossSettings:
        names = [each.name for each in dataclasses.fields(LossSettings)]
        return LossSettings(**{name: getattr(self.train, name) for name in names})

    @property
    def _of_classes(self) -> bool:
        return find_loss(self.main_loss).labels == "classes"

    @property
    def _classes(self) -> int:
        """The size of the axis of classes of the model's first output; 0 where it does not say."""
        dims, axis = self._first_dims, -1
        if self._of_classes:
            axis = self._loss_settings.class_axis
        return int(dims[axis].dim_value) if -len(dims) <= axis < len(dims) else 0

    @property
    def _first_dims(self) -> Sequence[Any]:
        """The dimensions of the output that the metrics take."""
        outputs = self.forward.graph.output
        first = next((each for each in outputs if each.name in self.chosen[:1]), outputs[0])
        return list(first.type.tensor_type.shape.dim)

    def _classes_last(self, g: Graph, outputs: Output) -> Output:
        """Return outputs with their axis of classes behind the others, where metrics want it."""
        rank = len(self._first_dims)
        axis = self._loss_settings.class_axis % rank if self._of_classes and rank else rank - 1
        if axis == rank - 1 or not self.measures:
            return outputs
        perm = [*(each for each in range(rank) if each != axis), axis]
        return BackendSlot("compute").transpose(g, outputs, perm=perm)

    @property
    def _config(self) -> OnnxModelConfig:
        content = self.forward.SerializeToString(deterministic=True)
        given = {each.name: getattr(self.train, each.name) for each in PASSED}
        given |= {"outputs": self.chosen, "losses": self._losses if len(self._losses) > 1 else ()}
        given |= {"loss": self.main_loss, "learning_rate": self.learning_rate, "seed": self.seed}
        try:
            checked = _config_type().validate_python({**given, "model": content})
        except ValidationError as error:
            (fault, *_) = error.errors()
            where = ".".join(str(part) for part in fault["loc"])
            raise self.bad(f"{where}={fault['input']!r:.60}: {fault['msg']}") from error
        return checked

    def _part(self, split: str) -> ConcreteSpec:
        if "split" not in self._source_settings:
            raise self.bad(
                f"data={self.source.TYPE_NAME!r} has no setting `split`, so that a peer can't hold "
                "examples out; evaluate on the server, or take another data source"
            )
        return self._told(split=split)

    def _told(self, **settings: Any) -> ConcreteSpec:
        """Return the data source with what the program knows; a node may say otherwise."""
        if not self._integer_labels and "label_dtype" in self._source_settings:
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


@cache
def _config_type() -> TypeAdapter[OnnxModelConfig]:
    """Return what checks settings; making it takes as long as recording a program."""
    return TypeAdapter(OnnxModelConfig)


def _elem_type(model: ModelProto) -> int:
    held = {tensor.name for tensor in model.graph.initializer}
    (info,) = [info for info in model.graph.input if info.name not in held]
    return int(info.type.tensor_type.elem_type)


def component_of(
    program: ReadyProgram, argument: str, contract: type[Component], example: str
) -> type[Any]:
    """Return the class of a contract that an argument of a program names, itself or by TYPE_NAME.

    It may be `concrete(…)` of one, with settings. Raises BadArgument for none.
    """
    found: object = getattr(program, argument)
    if isinstance(found, ConcreteSpec):
        article = "an" if contract.ROLE[0] in "AEIOU" else "a"
        program.require(
            argument, found.role == contract.ROLE, f'{article} {contract.ROLE}, such as "{example}"'
        )
        return component_class(found.type_name)
    if isinstance(found, str):
        try:
            found = component_class(found)
        except BbnodeError as error:
            raise program.bad(f"{argument}={found!r:.80}: {error}") from error
    fits = isinstance(found, type) and issubclass(found, contract)
    article = "an" if contract.__name__[0] in "AEIOU" else "a"
    program.require(argument, fits, f'{article} {contract.__name__}, such as "{example}"')
    assert isinstance(found, type)
    return found
