"""From a forward model to the graphs that train it, all of them plain ONNX.

Rule: parameters, optimizer state and running statistics are inputs of every graph that reads them,
never state; so one cached session serves all parameters and all rounds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal, TypeAlias

from onnx import ModelProto, NodeProto, TensorProto, ValueInfoProto, helper

from bbnode.components.autodiff.builder import (
    INT64,
    TRAINABLE,
    GraphBuilder,
    InferredType,
    constant_nodes,
    every_name,
    prune,
)
from bbnode.components.autodiff.errors import InvalidForwardModel, TrainingSettingRefused
from bbnode.components.autodiff.forward import ForwardGraph, read_forward
from bbnode.components.autodiff.losses import LossSettings, find_loss
from bbnode.components.autodiff.modes import RunningVariance, TrainingMode, part_modes
from bbnode.components.autodiff.nested import model_types
from bbnode.components.autodiff.optimizers import (
    OptimizerSettings,
    StepInputs,
    clipped,
    find_optimizer,
)
from bbnode.components.autodiff.precision import in_half_precision
from bbnode.components.autodiff.reverse import pull_back
from bbnode.ir.keys import FRAMEWORK_IR_VERSION, PRODUCER_NAME
from bbnode.ir.weightless import described

BOOL = int(TensorProto.BOOL)

Precision: TypeAlias = Literal["float32", "mixed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingOptions:
    """Settings of the graphs that train.

    Attributes:
        mode: "train" puts BatchNormalization and Dropout into training mode, in the graphs that
            train alone; "as_written" only those that the model has so.
        running_variance: of which variance of a batch the running one is made: of the
            "population" (ONNX), of the "sample" (n - 1; torch), or "auto": what the model's
            producer does.
        seed: of Dropout's masks.
        precision: "mixed" computes matrix products and convolutions, and their gradients, in
            float16, from float32 parameters and with a scaled loss.
    """

    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    loss: LossSettings = field(default_factory=LossSettings)
    mode: TrainingMode = "as_written"
    running_variance: RunningVariance = "auto"
    seed: int = 0
    precision: Precision = "float32"


@dataclass(frozen=True, kw_only=True)
class TrainingGraphs:
    """The graphs of one model, and the names of their inputs and outputs.

    Each graph is written when it is first asked for. In all of them what is fed and what comes
    out stand in this order; what a model does not have is left out:

    - `forward`: parameters, statistics, inputs -> outputs
    - `loss`: parameters, statistics, inputs, labels -> loss
    - `gradients`: parameters, statistics, inputs, labels, draw, loss scale -> loss, gradients,
      statistics, finite
    - `pullback`: parameters, statistics, inputs, gradient of the first output -> gradients
    - `step`: parameters, gradients, learning rate, step, state -> parameters, state
    - `train_step`: parameters, statistics, inputs, labels, learning rate, step, draw, loss scale,
      state -> parameters, loss, state, statistics, finite

    State is one tensor per parameter for each of `state_kinds`, kind by kind. `forward`, `loss` and
    `pullback` are of the model as it is evaluated.

    Attributes:
        initial: the parameters' values in the forward model, in the order of all tuples here.
        left: float initializers that are not trained, with the reason.
        statistics: initial running statistics, which training moves.
        variances: names of those statistics that can't be negative.
        input_names: what a caller feeds the model.
        output_names: the loss is of the first.
        parameter_names: as in the forward model.
        gradient_names: outputs of `gradients` and `pullback`, inputs of `step`.
        updated_names: outputs of `step` and `train_step`.
        state_kinds: the kinds of tensors that the optimizer keeps for each parameter.
        counts_steps: True if a step depends on its number (`step_name`, int64 []).
        draws: True if training draws masks, by the number of the draw (`draw_name`, int64 []).
        scales_loss: True if the loss is scaled (`loss_scale_name`, float32 []); `finite_name` then
            says whether the step was made, which it is not with gradients beyond float16.
        output_dims: of the first output: sizes, or None and symbols where they are open.
    """

    initial: tuple[TensorProto, ...]
    left: Mapping[str, str]
    statistics: tuple[TensorProto, ...]
    variances: frozenset[str]
    input_names: tuple[str, ...]
    output_names: tuple[str, ...]
    parameter_names: tuple[str, ...]
    gradient_names: tuple[str, ...]
    updated_names: tuple[str, ...]
    state_kinds: tuple[str, ...]
    counts_steps: bool
    draws: bool
    scales_loss: bool
    output_dims: tuple[int | str | None, ...]
    labels_name: str
    loss_name: str
    learning_rate_name: str
    output_gradient_name: str
    step_name: str
    draw_name: str
    loss_scale_name: str
    finite_name: str
    writer: _Writer = field(repr=False, compare=False)

    def without_values(self) -> TrainingGraphs:
        """Return the same graphs, with `initial` without its values: for who keeps these itself."""
        empty = tuple(map(described, self.initial))
        self.writer.f = replace(self.writer.f, parameters=empty)
        return replace(self, initial=empty)

    @property
    def output_name(self) -> str:
        """The name of the output that the loss is computed from."""
        return self.output_names[0]

    @cached_property
    def forward(self) -> ModelProto:
        """The outputs of the model."""
        return self.writer.forward()

    @cached_property
    def loss(self) -> ModelProto:
        """The loss of the first output."""
        return self.writer.loss_model()

    @cached_property
    def gradients(self) -> ModelProto:
        """The gradients of the loss."""
        return self.writer.gradients()

    @cached_property
    def pullback(self) -> ModelProto:
        """The gradients of what the first output is multiplied with."""
        return self.writer.pullback()

    @cached_property
    def step(self) -> ModelProto:
        """One step of the optimizer."""
        return self.writer.step()

    @cached_property
    def train_step(self) -> ModelProto:
        """The gradients of a batch, and a step with them."""
        return self.writer.train_step()


def gradient_graph(forward: ModelProto, loss: str, wrt: Sequence[str] | None = None) -> ModelProto:
    """Return the graph (parameters, inputs, labels) -> (loss, gradients): see `training_graphs`."""
    return training_graphs(forward, loss, wrt).gradients


def training_graphs(
    forward: ModelProto,
    loss: str,
    wrt: Sequence[str] | None = None,
    options: TrainingOptions | None = None,
    apart: Mapping[str, TensorProto] | None = None,
) -> TrainingGraphs:
    """Differentiate `forward`, and return all graphs that training needs.

    Args:
        forward: inputs -> outputs, weights as float32 (or float64) initializers.
        loss: the name of one of `LOSSES`.
        wrt: initializers to train, all float ones by default.
        options: of loss, optimizer and training mode.
        apart: initializers by name of which `forward` has no values (`weightless.parted`).

    Raises:
        InvalidForwardModel, UnknownLoss, UnsupportedGradient, GradientRuleError,
        TrainingSettingRefused.
    """
    return _Writer(read_forward(forward, wrt, apart), loss, options or TrainingOptions()).graphs()


class _Writer:
    """Holds both forms of a model, its loss and the sweeps while the models are cut from them."""

    def __init__(self, forward: ForwardGraph, loss: str, options: TrainingOptions) -> None:
        self.f = forward
        self.options = options
        self.params = [tensor.name for tensor in forward.parameters]
        self.float_type = int(forward.parameters[0].data_type)
        self.kind = find_loss(loss)
        self.kind.check(options.loss)
        self.optimizer = find_optimizer(options.optimizer)
        self.mixed = options.precision == "mixed"
        if self.mixed and self.float_type != TensorProto.FLOAT:
            raise TrainingSettingRefused(
                'precision="mixed"', "the parameters are float64", "convert them to float32"
            )

        taken = {tensor.name for tensor in (*forward.parameters, *forward.constants)}
        taken.update(info.name for info in forward.inputs)
        taken |= every_name(forward.nodes)
        self.b = b = GraphBuilder(
            taken,
            opsets=(("", forward.opset), *forward.other_opsets),
            known=(*forward.constants, *constant_nodes(forward.nodes)),
        )
        self.labels = b.public("labels")
        self.rate = b.public("learning_rate")
        self.output_grad = b.public("output_gradient")
        self.loss = b.public("loss")
        self.step_number = b.public("step")
        self.draw = b.public("draw")
        self.scale = b.public("loss_scale")
        self.finite = b.public("finite")
        self.grads = [b.public(f"grad/{name}") for name in self.params]
        self.updated = [b.public(f"updated/{name}") for name in self.params]
        self.kinds = self.optimizer.kinds(options.optimizer)
        self.state = [[b.public(f"{kind}/{name}") for name in self.params] for kind in self.kinds]
        self.moved = [
            [b.public(f"updated/{kind}/{name}") for name in self.params] for kind in self.kinds
        ]

        output = forward.outputs[0].name
        self.infos = {info.name: info for info in forward.outputs}
        self.step_builder = GraphBuilder(b.taken, prefix="step/")
        self.constants: list[TensorProto] = list(forward.constants)
        self.extra_constants: list[TensorProto] = []
        given = [*self._like_parameters(self.params), *forward.inputs]
        types = model_types(self._model("types", forward.nodes, given, [output]))
        self.output_type = types[output]
        self._check_output(output)
        self.label_type = self.kind.label_type(self.output_type, options.loss)
        self.infos[self.loss] = _info(self.loss, InferredType(self.output_type.elem_type, ()))
        emitted = self.kind.emit(b, output, self.labels, self.output_type, options.loss)
        self.loss_nodes = [*b.take(), _identity(emitted, self.loss)]

        self.modes = part_modes(
            forward,
            mode=options.mode,
            seed=options.seed,
            sample_variance=_of_samples(options.running_variance, forward.producer),
            draw=self.draw,
            types=types,
            taken=b.taken,
        )
        self.extra_constants += self.modes.constants
        statistics = {tensor.name: tensor for tensor in self.modes.statistics}
        self.constants = [tensor for tensor in forward.constants if tensor.name not in statistics]
        self.new_statistics = {name: b.public(f"updated/{name}") for name in statistics}
        self.infos[self.finite] = _info(self.finite, InferredType(BOOL, ()))
        self._name_outputs([self.grads, self.updated, *self.moved])
        for name, tensor in statistics.items():
            new = self.new_statistics[name]
            self.infos[new] = _parameter_info(new, tensor)

        trained = list(self.modes.trained)
        if self.mixed:
            trained = in_half_precision(trained, types, b)
        self.trained = [*trained, *self.loss_nodes]
        self.sweep = self._sweep()
        self.step_nodes = self._emit_step()

    def _name_outputs(self, lists: Iterable[Sequence[str]]) -> None:
        for names in lists:
            for info in self._like_parameters(names):
                self.infos[info.name] = info

    def _check_output(self, output: str) -> None:
        if self.output_type.elem_type not in TRAINABLE:
            raise InvalidForwardModel(
                what=f"its output {output!r} is not a float32 or float64 tensor",
                remedy="train towards a float output; leave an ArgMax behind it out",
            )
        if self.output_type.dims is None:
            raise InvalidForwardModel(
                what=f"the rank of its output {output!r} is unknown",
                remedy="give the graph's inputs and outputs shapes; dimensions may be symbols",
            )

    def _sweep(self) -> list[NodeProto]:
        """Return the nodes from the loss back to the gradients, and what else training moves."""
        b = self.b
        labels = _info(self.labels, self.label_type)
        inputs = [*self._inputs(), labels, *self._draw_input(), *self._scale_input()]
        types = model_types(self._model("types", self.trained, inputs, [self.loss]))
        seed = self.scale if self.mixed else b.scalar(1.0, self.output_type.elem_type)
        found = pull_back(b, self.trained, types, {self.loss: seed}, self.params)
        grads = [found[name] for name in self.params]
        if self.mixed:
            back = b.op("Div", b.scalar(1.0, self.float_type), self.scale)
            grads = [b.op("Mul", grad, back) for grad in grads]
        nodes = b.take()
        nodes += [_identity(grad, name) for grad, name in zip(grads, self.grads, strict=True)]
        if self.mixed:
            total = ""
            for grad in self.grads:
                square = b.op("ReduceSumSquare", grad, keepdims=0)
                total = b.op("Add", total, square) if total else square
            bad = b.op("Or", b.op("IsNaN", total), b.op("IsInf", total))
            nodes += [*b.take(), helper.make_node("Not", [bad], [self.finite], name=self.finite)]
        for name, new in self.new_statistics.items():
            moved = self.modes.updated[name]
            nodes.append(
                helper.make_node("Where", [self.finite, moved, name], [new], name=new)
                if self.mixed
                else _identity(moved, new)
            )
        return nodes

    def _emit_step(self) -> list[NodeProto]:
        """Return the nodes from gradients to updated parameters and state."""
        b, settings = self.step_builder, self.options.optimizer
        inputs = StepInputs(b, self.rate, self.step_number, self.float_type)
        names: dict[str, str] = {}
        cut = clipped(inputs, settings, self.grads)
        for at, (param, grad) in enumerate(zip(self.params, cut, strict=True)):
            state = {kind: each[at] for kind, each in zip(self.kinds, self.state, strict=True)}
            value, moved = self.optimizer.emit(inputs, settings, param, grad, state)
            names[value] = self.updated[at]
            for kind, each in zip(self.kinds, self.moved, strict=True):
                names[moved[kind]] = each[at]
        return _renamed(b.take(), names)

    def graphs(self) -> TrainingGraphs:
        return TrainingGraphs(
            initial=self.f.parameters,
            left=self.f.left,
            statistics=self.modes.statistics,
            variances=self.modes.variances,
            input_names=tuple(info.name for info in self.f.inputs),
            output_names=tuple(info.name for info in self.f.outputs),
            parameter_names=tuple(self.params),
            gradient_names=tuple(self.grads),
            updated_names=tuple(self.updated),
            state_kinds=self.kinds,
            counts_steps=self.optimizer.counts_steps,
            draws=self.modes.draws,
            scales_loss=self.mixed,
            output_dims=tuple(self.output_type.dims or ()),
            labels_name=self.labels,
            loss_name=self.loss,
            learning_rate_name=self.rate,
            output_gradient_name=self.output_grad,
            step_name=self.step_number,
            draw_name=self.draw,
            loss_scale_name=self.scale,
            finite_name=self.finite,
            writer=self,
        )

    # -- the models -----------------------------------------------------------------------------

    def forward(self) -> ModelProto:
        outputs = [info.name for info in self.f.outputs]
        return self._model("forward", self.modes.evaluated, self._inputs(), outputs)

    def loss_model(self) -> ModelProto:
        nodes = [*self.modes.evaluated, *self.loss_nodes]
        inputs = [*self._inputs(), _info(self.labels, self.label_type)]
        return self._model("loss", nodes, inputs, [self.loss])

    def gradients(self) -> ModelProto:
        labels = _info(self.labels, self.label_type)
        return self._model(
            "gradients",
            [*self.trained, *self.sweep],
            [*self._inputs(), labels, *self._draw_input(), *self._scale_input()],
            [self.loss, *self.grads, *self.new_statistics.values(), *self._finite_output()],
        )

    def pullback(self) -> ModelProto:
        # Of its own: it is of the form that is evaluated.
        b = GraphBuilder(self.b.taken, opsets=self.b.opsets, known=self.b.known.values())
        output = self.f.outputs[0].name
        nodes = list(self.modes.evaluated)
        types = model_types(self._model("types", nodes, self._inputs(), [output]))
        found = pull_back(b, nodes, types, {output: self.output_grad}, self.params)
        named = [_identity(found[n], g) for n, g in zip(self.params, self.grads, strict=True)]
        inputs = [*self._inputs(), _info(self.output_grad, self.output_type)]
        all_nodes = [*nodes, *b.nodes, *named]
        return self._model("pullback", all_nodes, inputs, self.grads, b)

    def step(self) -> ModelProto:
        gradients = self._like_parameters(self.grads)
        inputs = [*self._like_parameters(self.params), *gradients, *self._step_inputs()]
        outputs = [*self.updated, *_chained(self.moved)]
        return self._model("step", self.step_nodes, [*inputs, *self._states()], outputs)

    def train_step(self) -> ModelProto:
        nodes = [*self.trained, *self.sweep]
        moved = _chained(self.moved)
        step = self._held_back() if self.mixed else self.step_nodes
        # A step needs no gradient under its public name, which is a copy.
        public = {*self.grads}
        nodes += _renamed(step, {n.output[0]: n.input[0] for n in nodes if n.output[0] in public})
        return self._model(
            "train_step",
            nodes,
            [
                *self._inputs(), _info(self.labels, self.label_type), *self._step_inputs(),
                *self._draw_input(), *self._scale_input(), *self._states(),
            ],
            [
                *self.updated, self.loss, *moved, *self.new_statistics.values(),
                *self._finite_output(),
            ],
        )  # fmt: skip

    def _held_back(self) -> list[NodeProto]:
        """Return the nodes of a step that keeps the old values where gradients are not finite."""
        new = [*self.updated, *_chained(self.moved)]
        old = [*self.params, *_chained(self.state)]
        b = GraphBuilder(self.b.taken, prefix="held/")
        made = {name: b.fresh(name) for name in new}
        nodes = _renamed(self.step_nodes, made)
        for before, name in zip(old, new, strict=True):
            inputs = [self.finite, made[name], before]
            nodes.append(helper.make_node("Where", inputs, [name], name=name))
        return nodes

    def _inputs(self) -> list[ValueInfoProto]:
        statistics = [_parameter_info(t.name, t) for t in self.modes.statistics]
        return [*self._like_parameters(self.params), *statistics, *self.f.inputs]

    def _like_parameters(self, names: Sequence[str]) -> list[ValueInfoProto]:
        return [_parameter_info(n, t) for n, t in zip(names, self.f.parameters, strict=True)]

    def _states(self) -> list[ValueInfoProto]:
        return [info for names in self.state for info in self._like_parameters(names)]

    def _step_inputs(self) -> list[ValueInfoProto]:
        counted = [self.step_number] if self.optimizer.counts_steps else []
        rate = _info(self.rate, InferredType(self.float_type, ()))
        return [rate, *(_info(name, InferredType(INT64, ())) for name in counted)]

    def _draw_input(self) -> list[ValueInfoProto]:
        return [_info(self.draw, InferredType(INT64, ()))] if self.modes.draws else []

    def _scale_input(self) -> list[ValueInfoProto]:
        return [_info(self.scale, InferredType(self.float_type, ()))] if self.mixed else []

    def _finite_output(self) -> list[str]:
        return [self.finite] if self.mixed else []

    def _model(
        self,
        name: str,
        nodes: Sequence[NodeProto],
        inputs: Sequence[ValueInfoProto],
        outputs: Sequence[str],
        builder: GraphBuilder | None = None,
    ) -> ModelProto:
        b = builder or self.b
        own = [*self.constants, *self.extra_constants, *self.b.initializers]
        own += [*self.step_builder.initializers, *(builder.initializers if builder else ())]
        kept, tensors = prune(nodes, own, outputs, b.instead)
        return helper.make_model(
            helper.make_graph(
                kept,
                f"{self.f.name}.{name}",
                list(inputs),
                [self._output_info(output) for output in outputs],
                tensors,
            ),
            ir_version=FRAMEWORK_IR_VERSION,
            producer_name=PRODUCER_NAME,
            opset_imports=[
                helper.make_opsetid("", self.f.opset),
                *(helper.make_opsetid(*entry) for entry in self.f.other_opsets),
            ],
        )

    def _output_info(self, name: str) -> ValueInfoProto:
        return self.infos[name]


def _of_samples(variance: RunningVariance, producer: str) -> bool:
    """Return True if a running variance is made of the unbiased one: as torch does."""
    return variance == "sample" or (variance == "auto" and producer == "pytorch")


def _renamed(nodes: Iterable[NodeProto], names: Mapping[str, str]) -> list[NodeProto]:
    made = []
    for node in nodes:
        new = NodeProto()
        new.CopyFrom(node)
        new.input[:] = [names.get(name, name) for name in node.input]
        new.output[:] = [names.get(name, name) for name in node.output]
        made.append(new)
    return made


def _chained(parts: Iterable[Sequence[str]]) -> list[str]:
    return [name for names in parts for name in names]


def _identity(value: str, name: str) -> NodeProto:
    return helper.make_node("Identity", [value], [name], name=name)


def _info(name: str, kind: InferredType) -> ValueInfoProto:
    dims = None if kind.dims is None else list(kind.dims)
    return helper.make_tensor_value_info(name, kind.elem_type, dims)


def _parameter_info(name: str, tensor: TensorProto) -> ValueInfoProto:
    return helper.make_tensor_value_info(name, tensor.data_type, list(tensor.dims))
