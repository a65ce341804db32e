"""From a forward model to the graphs that train it, all of them plain ONNX.

Rule: parameters, optimizer state and running statistics are inputs of every graph that reads them,
never state; so one cached session serves all parameters and all rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, wraps
from typing import Concatenate, Literal, NamedTuple, ParamSpec, TypeAlias, TypeVar

import onnx
from onnx import ModelProto, NodeProto, TensorProto, ValueInfoProto, helper

from bbnode.components.autodiff.builder import (
    HALVES,
    INT64,
    TRAINABLE,
    GraphBuilder,
    InferredType,
    constant_nodes,
    every_name,
    prune,
)
from bbnode.components.autodiff.ends import check_loss, output_ends
from bbnode.components.autodiff.errors import InvalidForwardModel, TrainingSettingRefused
from bbnode.components.autodiff.folding import folded, shared
from bbnode.components.autodiff.forms import last_states, pads_by_size, pools_first, swaps
from bbnode.components.autodiff.forward import ForwardGraph, read_forward
from bbnode.components.autodiff.losses import LossSettings, class_axis, find_loss
from bbnode.components.autodiff.modes import RunningVariance, TrainingMode, part_modes
from bbnode.components.autodiff.nested import model_types
from bbnode.components.autodiff.optimizers import (
    OptimizerSettings,
    StepInputs,
    clipped,
    descended,
    find_optimizer,
    subtracts_alone,
)
from bbnode.components.autodiff.parameters import ParameterChoice
from bbnode.components.autodiff.precision import in_half_precision
from bbnode.components.autodiff.reverse import pull_back
from bbnode.ir.errors import BbnodeError
from bbnode.ir.intake import ONNX_FAILURES, first_line
from bbnode.ir.keys import FRAMEWORK_IR_VERSION, PRODUCER_NAME
from bbnode.ir.weightless import StoredTensor, described

BOOL = int(TensorProto.BOOL)

P = ParamSpec("P")
R = TypeVar("R")

Precision: TypeAlias = Literal["float32", "mixed"]


class OutputLoss(NamedTuple):
    """A loss of one output, and what it is multiplied with in the sum of all."""

    output: str
    loss: str
    weight: float


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
        outputs: names of the outputs that `forward` gives, in their order; () is all.
        losses: the loss is the sum of these, each of an output; () is `loss` of the first output.
        labels_apart: each of `losses` has labels of its own, in their order.
    """

    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    loss: LossSettings = field(default_factory=LossSettings)
    mode: TrainingMode = "as_written"
    running_variance: RunningVariance = "auto"
    seed: int = 0
    precision: Precision = "float32"
    outputs: tuple[str, ...] = ()
    losses: tuple[OutputLoss, ...] = ()
    labels_apart: bool = False


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
    - `joint_gradients`: parameters, statistics, inputs, labels -> loss, gradients, gradient of the
      first input
    - `pulled_parameters`: as `pullback`, and last out is the first output itself
    - `pulled_input`: the same, with the gradient of the first input before it
    - `adjusted_step` and `adjusted_train_step`: as the next two, and one more input like each
      parameter, then `proximal`, []: to a gradient comes this input, and `proximal` times the
      parameter, before it is clipped
    - `step`: parameters, gradients, learning rate, step, state -> parameters, state
    - `train_step`: parameters, statistics, inputs, labels, learning rate, step, draw, loss scale,
      state -> parameters, loss, state, statistics, finite

    Where losses have labels of their own, `labels` are these, behind each other.

    State is one tensor per parameter for each of `state_kinds`, kind by kind. `forward`, `loss`,
    `pullback` and the three after it are of the model as it is evaluated.

    Attributes:
        initial: the parameters' values in the forward model, in the order of all tuples here.
        choice: which float initializers are trained, and why.
        statistics: initial running statistics, which training moves.
        variances: names of those statistics that can't be negative.
        input_names: what a caller feeds the model.
        output_names: the loss is of the first.
        parameter_names: as in the forward model.
        gradient_names: outputs of `gradients` and `pullback`, inputs of `step`.
        updated_names: outputs of `step` and `train_step`.
        state_kinds: the kinds of tensors that the optimizer keeps for each parameter.
        state_initial: the number that each kind begins with.
        counts_steps: True if a step depends on its number (`step_name`, int64 []).
        draws: True if training draws masks, by the number of the draw (`draw_name`, int64 []).
        scales_loss: True if the loss is scaled (`loss_scale_name`, float32 []); `finite_name` then
            says whether the step was made, which it is not with gradients beyond float16.
        output_dims: of the first output: sizes, or None and symbols where they are open.
        loss_dims: of the output of each of `losses`, likewise.
    """

    initial: tuple[TensorProto, ...]
    choice: ParameterChoice
    statistics: tuple[TensorProto, ...]
    variances: frozenset[str]
    input_names: tuple[str, ...]
    output_names: tuple[str, ...]
    parameter_names: tuple[str, ...]
    gradient_names: tuple[str, ...]
    updated_names: tuple[str, ...]
    state_kinds: tuple[str, ...]
    state_initial: tuple[float, ...]
    counts_steps: bool
    draws: bool
    scales_loss: bool
    output_dims: tuple[int | str | None, ...]
    loss_dims: tuple[tuple[int | str | None, ...], ...]
    labels_name: str
    loss_name: str
    learning_rate_name: str
    output_gradient_name: str
    step_name: str
    draw_name: str
    loss_scale_name: str
    finite_name: str
    writer: _Writer = field(repr=False, compare=False)

    def derive(self) -> None:
        """Differentiate now instead of when a graph with gradients is first asked for.

        Raises:
            UnsupportedGradient, GradientRuleError, InvalidForwardModel.
        """
        _ = self.writer.sweep, self.writer.step_nodes

    def check_loss(self) -> str:
        """Check that the loss is of what the model's output is; return what else is to be said.

        Raises LossDoesNotFit.
        """
        return self.writer.check_loss()

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
    def joint_gradients(self) -> ModelProto:
        """The gradients of the loss, by parameters and input."""
        return self.writer.joint_gradients()

    @cached_property
    def pulled_parameters(self) -> ModelProto:
        """The pullback to the parameters, with the output that it is of."""
        return self.writer.pullback("pulled_parameters", with_output=True)

    @cached_property
    def pulled_input(self) -> ModelProto:
        """The pullback to parameters and input, with the output that it is of."""
        return self.writer.pullback("pulled_input", with_output=True, to_input=True)

    @cached_property
    def step(self) -> ModelProto:
        """One step of the optimizer."""
        return self.writer.step()

    @cached_property
    def train_step(self) -> ModelProto:
        """The gradients of a batch, and a step with them."""
        return self.writer.train_step()

    @cached_property
    def adjusted_step(self) -> ModelProto:
        """One step of the optimizer with gradients that are adjusted."""
        return self.writer.step(adjusted=True)

    @cached_property
    def adjusted_train_step(self) -> ModelProto:
        """The gradients of a batch, and a step with them once they are adjusted."""
        return self.writer.train_step(adjusted=True)


def gradient_graph(forward: ModelProto, loss: str, wrt: Sequence[str] | None = None) -> ModelProto:
    """Return the graph (parameters, inputs, labels) -> (loss, gradients): see `training_graphs`."""
    return training_graphs(forward, loss, wrt).gradients


def training_graphs(
    forward: ModelProto,
    loss: str,
    wrt: Sequence[str] | None = None,
    options: TrainingOptions | None = None,
    apart: Mapping[str, StoredTensor] | None = None,
    *,
    at_once: bool = True,
) -> TrainingGraphs:
    """Differentiate `forward`, and return all graphs that training needs.

    Args:
        forward: inputs -> outputs, weights as float32 (or float64) initializers.
        loss: the name of one of `LOSSES`.
        wrt: initializers to train, all float ones by default.
        options: of loss, optimizer and training mode.
        apart: initializers by name of which `forward` has no values (`weightless.parted`).
        at_once: False differentiates when a graph with gradients is first asked for, which then
            raises UnsupportedGradient or GradientRuleError.

    Raises:
        InvalidForwardModel, UnknownLoss, UnsupportedGradient, GradientRuleError,
        TrainingSettingRefused.
    """
    with _faults_named(lambda: forward):
        writer = _Writer(read_forward(forward, wrt, apart), loss, options or TrainingOptions())
        graphs = writer.graphs()
    if at_once:
        graphs.derive()
    return graphs


@contextmanager
def _faults_named(model: Callable[[], ModelProto]) -> Iterator[None]:
    """Turn what rules and readers raise for a model that contradicts itself into a typed error.

    `model` gives the model to look at then. Nothing is looked at before: ONNX's full check infers
    all types once more.
    """
    try:
        yield
    except BbnodeError:
        raise
    except Exception as error:  # the boundary: a program must not get a KeyError out of us
        what = f"it can't be differentiated ({type(error).__name__}: {first_line(error)})"
        try:
            onnx.checker.check_model(model(), full_check=True)
            remedy = "ONNX itself takes it: please report it with the model"
        except ONNX_FAILURES as refusal:
            remedy = f"ONNX refuses it as well ({first_line(refusal)}): export it again"
        raise InvalidForwardModel(what=what, remedy=remedy) from error


def _named(write: Callable[Concatenate[_Writer, P], R]) -> Callable[Concatenate[_Writer, P], R]:
    """Decorate what writes a part of the graphs when it is asked for: see `_faults_named`."""

    @wraps(write)
    def named(self: _Writer, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with _faults_named(self.read_model):
            return write(self, *args, **kwargs)

    return named


class _Writer:
    """Holds both forms of a model, its loss and the sweeps while the models are cut from them."""

    def __init__(self, forward: ForwardGraph, loss: str, options: TrainingOptions) -> None:
        forward = self.f = _with_outputs(forward, options.outputs, options.losses)
        self.options = options
        self.params = [tensor.name for tensor in forward.parameters]
        self.float_type = int(forward.parameters[0].data_type)
        self.kind = find_loss(loss)
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
        self.proximal = b.public("proximal")
        self.pulls = [b.public(f"pull/{name}") for name in self.params]
        self.grads = [b.public(f"grad/{name}") for name in self.params]
        self.updated = [b.public(f"updated/{name}") for name in self.params]
        self.kinds = self.optimizer.kinds(options.optimizer)
        self.state = [[b.public(f"{kind}/{name}") for name in self.params] for kind in self.kinds]
        self.moved = [
            [b.public(f"updated/{kind}/{name}") for name in self.params] for kind in self.kinds
        ]

        output = forward.outputs[0].name
        losses = self.losses = options.losses or (OutputLoss(output, loss, 1.0),)
        wanted = [*dict.fromkeys([output, *(each.output for each in losses)])]
        self.infos = {info.name: info for info in forward.outputs}
        self.step_builder = GraphBuilder(b.taken, prefix="step/")
        self.adjusted_builder = GraphBuilder(b.taken, prefix="adjusted/")
        self.constants: list[TensorProto] = list(forward.constants)
        self.extra_constants: list[TensorProto] = []
        given = [*self._like_parameters(self.params), *forward.inputs]
        for info in self.f.outputs:
            self.infos[info.name] = info
        types = model_types(self._model("types", forward.nodes, given, wanted))
        forward = self._fold(types)
        self.output_type = types[output]
        self.infos[self.loss] = _info(self.loss, InferredType(self.output_type.elem_type, ()))
        self.label_infos: list[ValueInfoProto] = []
        self.loss_dims = tuple(tuple(types[each.output].dims or ()) for each in losses)
        total = self._emit_losses(losses, types)
        self.loss_nodes = [*b.take(), _identity(total, self.loss)]
        forward = self.f = replace(self.f, outputs=_first(self.f.outputs, options.outputs))

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

        outputs = [*dict.fromkeys([*(info.name for info in forward.outputs), *wanted])]
        outputs += self.modes.updated.values()
        trained = pads_by_size(b, swaps(self.modes.trained, types), types)
        trained = pools_first(b, trained, outputs)
        trained = last_states(b, trained, types, outputs)
        if self.mixed:
            trained = in_half_precision(trained, types, b)
        self.trained = [*trained, *self.loss_nodes]
        self.seed = self.scale if self.mixed else b.fresh("seed")

    def _emit_losses(self, losses: Sequence[OutputLoss], types: Mapping[str, InferredType]) -> str:
        """Emit the sum of losses, each times its weight; return its name."""
        b, settings, total = self.b, self.options.loss, ""
        for at, each in enumerate(losses):
            kind, prediction = find_loss(each.loss), types[each.output]
            self._check_output(each.output, prediction)
            kind.check(settings)
            own = kind.label_type(prediction, settings)
            if at == 0:
                self.label_infos.append(_info(self.labels, own))
            elif self.options.labels_apart:
                self.label_infos.append(_info(b.public(f"labels/{each.output}"), own))
            elif self.kind.labels != kind.labels or not _alike(own, self.label_infos[0]):
                raise TrainingSettingRefused(
                    f"the losses of {losses[0].output!r} and {each.output!r}",
                    "they take labels of different kinds or shapes, and there are the same for all",
                    "set labels_apart=True, with labels for each loss in the data",
                )
            value = kind.emit(b, each.output, self.label_infos[-1].name, prediction, settings)
            if each.weight != 1.0:
                value = b.op("Mul", value, b.scalar(each.weight, prediction.elem_type))
            total = b.op("Add", total, value) if total else value
        return total

    def _fold(self, types: Mapping[str, InferredType]) -> ForwardGraph:
        """Compute what is known of the forward graph before it runs; return what is left of it."""
        outputs = [info.name for info in self.f.outputs]
        nodes, tensors = folded(self.f.nodes, self.constants, outputs, types)
        self.b.known.update((tensor.name, tensor) for tensor in tensors)
        self.constants = tensors
        self.f = replace(self.f, nodes=tuple(nodes), constants=tuple(tensors))
        return self.f

    def _name_outputs(self, lists: Iterable[Sequence[str]]) -> None:
        for names in lists:
            for info in self._like_parameters(names):
                self.infos[info.name] = info

    def _check_output(self, output: str, kind: InferredType) -> None:
        if kind.elem_type not in TRAINABLE:
            raise InvalidForwardModel(
                what=f"its output {output!r} is not a float32 or float64 tensor",
                remedy="train towards a float output; leave an ArgMax behind it out",
            )
        if kind.dims is None:
            raise InvalidForwardModel(
                what=f"the rank of its output {output!r} is unknown",
                remedy="give the graph's inputs and outputs shapes; dimensions may be symbols",
            )

    def check_loss(self) -> str:
        """As `TrainingGraphs.check_loss`, of each of the losses."""
        free = [*self.params, *(info.name for info in self.f.inputs)]
        free += [tensor.name for tensor in self.modes.statistics]
        said = []
        for each, dims in zip(self.losses, self.loss_dims, strict=True):
            classes: object = None
            if find_loss(each.loss).class_labels:
                kind = InferredType(self.output_type.elem_type, dims)
                classes = dims[class_axis(kind, self.options.loss)]
            ends = output_ends(self.f.nodes, each.output, self.constants, free)
            known = classes if isinstance(classes, int) else None
            said.append(check_loss(each.loss, ends, each.output, known))
        return "; ".join(filter(None, said))

    def read_model(self) -> ModelProto:
        """Return the model that is differentiated, its parameters as inputs."""
        outputs = [info.name for info in self.f.outputs]
        return self._model("types", self.f.nodes, self._inputs(), outputs)

    @cached_property
    @_named
    def sweep(self) -> list[NodeProto]:
        """The nodes from the loss back to the gradients, and what else training moves.

        Raises UnsupportedGradient, GradientRuleError; InvalidForwardModel where a tensor may be a
        weight as well as a constant.
        """
        self.f.choice.check_decided()
        b = self.b
        inputs = [
            *self._inputs(), *self.label_infos, *self._draw_input(), *self._scale_input()
        ]  # fmt: skip
        types = model_types(self._model("types", self.trained, inputs, [self.loss]))
        self.has_halves = any(kind.elem_type in HALVES for kind in types.values())
        found = pull_back(b, self.trained, types, {self.loss: self.seed}, self.params)
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

    @cached_property
    @_named
    def step_nodes(self) -> list[NodeProto]:
        """The nodes of a step."""
        return self._emit_step(self.step_builder)

    @cached_property
    def adjusted_nodes(self) -> list[NodeProto]:
        """The nodes of a step with gradients that are adjusted before."""
        b = self.adjusted_builder
        grads = [
            b.op("Add", b.op("Add", grad, pull), b.op("Mul", param, self.proximal))
            for grad, pull, param in zip(self.grads, self.pulls, self.params, strict=True)
        ]
        return self._emit_step(b, grads)

    def _emit_step(self, b: GraphBuilder, grads: Sequence[str] = ()) -> list[NodeProto]:
        """Return the nodes from gradients to updated parameters and state."""
        settings = self.options.optimizer
        inputs = StepInputs(b, self.rate, self.step_number, self.float_type)
        names: dict[str, str] = {}
        cut = clipped(inputs, settings, grads or self.grads)
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
            choice=self.f.choice,
            statistics=self.modes.statistics,
            variances=self.modes.variances,
            input_names=tuple(info.name for info in self.f.inputs),
            output_names=tuple(info.name for info in self.f.outputs),
            parameter_names=tuple(self.params),
            gradient_names=tuple(self.grads),
            updated_names=tuple(self.updated),
            state_kinds=self.kinds,
            state_initial=self.optimizer.initial(self.options.optimizer),
            counts_steps=self.optimizer.counts_steps(self.options.optimizer),
            draws=self.modes.draws,
            scales_loss=self.mixed,
            output_dims=tuple(self.output_type.dims or ()),
            loss_dims=self.loss_dims,
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

    @_named
    def forward(self) -> ModelProto:
        outputs = [info.name for info in self.f.outputs]
        return self._model("forward", self.modes.evaluated, self._inputs(), outputs)

    @_named
    def loss_model(self) -> ModelProto:
        nodes = [*self.modes.evaluated, *self.loss_nodes]
        inputs = [*self._inputs(), *self.label_infos]
        return self._model("loss", nodes, inputs, [self.loss])

    @_named
    def gradients(self) -> ModelProto:
        return self._model(
            "gradients",
            [*self._seed(), *self.trained, *self.sweep],
            [*self._inputs(), *self.label_infos, *self._draw_input(), *self._scale_input()],
            [self.loss, *self.grads, *self.new_statistics.values(), *self._finite_output()],
        )

    @_named
    def pullback(
        self, name: str = "pullback", *, with_output: bool = False, to_input: bool = False
    ) -> ModelProto:
        output = self.f.outputs[0].name
        inputs = [*self._inputs(), _info(self.output_grad, self.output_type)]
        seeds, nodes = {output: self.output_grad}, list(self.modes.evaluated)
        return self._pulled(name, nodes, inputs, seeds, [output] if with_output else [], to_input)

    @_named
    def joint_gradients(self) -> ModelProto:
        nodes = [*self._seed(), *self.modes.evaluated, *self.loss_nodes]
        inputs = [*self._inputs(), *self.label_infos]
        return self._pulled(
            "joint_gradients", nodes, inputs, {self.loss: self.seed}, [self.loss], to_input=True
        )

    def _pulled(
        self, name: str, nodes: list[NodeProto], inputs: Sequence[ValueInfoProto],
        seeds: Mapping[str, str], told: Sequence[str], to_input: bool,
    ) -> ModelProto:  # fmt: skip
        """Return nodes of the evaluated form and their sweep -> gradients, [input's,] `told`."""
        self.f.choice.check_decided()
        # A builder of its own: its names hang on no sweep.
        b = GraphBuilder(self.b.taken, "pulled/", opsets=self.b.opsets, known=self.b.known.values())
        types = model_types(self._model("types", nodes, inputs, [*seeds]))
        wrt, grads = [*self.params], [*self.grads]
        if to_input:
            first = self.f.inputs[0]
            by_input = f"grad/{first.name}"
            self.infos[by_input] = ValueInfoProto(name=by_input, type=first.type)
            wrt, grads = [*wrt, first.name], [*grads, by_input]
        found = pull_back(b, nodes, types, seeds, wrt)
        named = [_identity(found[n], g) for n, g in zip(wrt, grads, strict=True)]
        return self._model(name, [*nodes, *b.nodes, *named], inputs, [*grads, *told], b)

    @_named
    def step(self, *, adjusted: bool = False) -> ModelProto:
        gradients = self._like_parameters(self.grads)
        inputs = [
            *self._like_parameters(self.params), *gradients, *self._step_inputs(),
            *self._states(), *self._adjustment(adjusted),
        ]  # fmt: skip
        outputs = [*self.updated, *_chained(self.moved)]
        name = "adjusted_step" if adjusted else "step"
        return self._model(name, self._steps(adjusted), inputs, outputs)

    @_named
    def train_step(self, *, adjusted: bool = False) -> ModelProto:
        nodes = [*self.trained, *self.sweep]
        moved = _chained(self.moved)
        # A step needs no gradient under its public name, which is a copy.
        public = {*self.grads}
        named = {n.output[0]: n.input[0] for n in nodes if n.output[0] in public}
        if self._is_plain_descent() and not adjusted:
            # Gradients are linear in the seed: beginning with the rate, all of them come out
            # multiplied by it, without a pass over the weights.
            nodes = [node for node in nodes if node.output[0] not in public]
            nodes.insert(0, _identity(self.rate, self.seed))
            nodes = descended(
                nodes, self.f.parameters, [named[g] for g in self.grads], self.updated
            )
        else:
            step = self._steps(adjusted)
            step = self._held_back(step) if self.mixed else step
            nodes = [*self._seed(), *nodes, *_renamed(step, named)]
        return self._model(
            "adjusted_train_step" if adjusted else "train_step",
            nodes,
            [
                *self._inputs(), *self.label_infos, *self._step_inputs(),
                *self._draw_input(), *self._scale_input(), *self._states(),
                *self._adjustment(adjusted),
            ],
            [
                *self.updated, self.loss, *moved, *self.new_statistics.values(),
                *self._finite_output(),
            ],
        )  # fmt: skip

    def _steps(self, adjusted: bool) -> list[NodeProto]:
        return self.adjusted_nodes if adjusted else self.step_nodes

    def _adjustment(self, adjusted: bool) -> list[ValueInfoProto]:
        proximal = _info(self.proximal, InferredType(self.float_type, ()))
        return [*self._like_parameters(self.pulls), proximal] if adjusted else []

    def _seed(self) -> list[NodeProto]:
        """Return the node that makes the gradient of the loss itself, which is 1."""
        if self.mixed:
            return []
        one = helper.make_tensor(self.seed, self.output_type.elem_type, (), [1.0])
        return [helper.make_node("Constant", [], [self.seed], name=self.seed, value=one)]

    def _is_plain_descent(self) -> bool:
        """Return True if a step subtracts rate times gradient, and the rate may come first.

        Not in halves, in which the product of a small gradient and a rate is 0.
        """
        same = self.output_type.elem_type == self.float_type
        return same and not self.has_halves and subtracts_alone(self.options.optimizer)

    def _held_back(self, step: Sequence[NodeProto]) -> list[NodeProto]:
        """Return the nodes of a step that keeps the old values where gradients are not finite."""
        new = [*self.updated, *_chained(self.moved)]
        old = [*self.params, *_chained(self.state)]
        b = GraphBuilder(self.b.taken, prefix="held/")
        made = {name: b.fresh(name) for name in new}
        nodes = _renamed(step, made)
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
        counted = [self.step_number] if self.optimizer.counts_steps(self.options.optimizer) else []
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
        own += [*self.step_builder.initializers, *self.adjusted_builder.initializers]
        own += [*(builder.initializers if builder else ())]
        kept, tensors = prune(nodes, own, outputs, b.instead)
        if name != "types":
            kept, tensors = shared(*folded(kept, tensors, outputs), outputs)
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


def _with_outputs(
    forward: ForwardGraph, names: Sequence[str], losses: Sequence[OutputLoss]
) -> ForwardGraph:
    """Return the graph with the outputs that are named in front, then those that have a loss."""
    wanted = [*dict.fromkeys([*names, *(each.output for each in losses)])]
    known = {info.name: info for info in forward.outputs}
    unknown = [name for name in wanted if name not in known]
    if unknown:
        raise TrainingSettingRefused(
            f"output {unknown[0]!r}",
            f"the model has {', '.join(map(repr, known))}",
            "name one of these in outputs= and loss=",
        )
    if not wanted:
        return forward
    rest = [] if names else [info for info in forward.outputs if info.name not in wanted]
    return replace(forward, outputs=(*(known[name] for name in wanted), *rest))


def _first(outputs: Sequence[ValueInfoProto], names: Sequence[str]) -> tuple[ValueInfoProto, ...]:
    return tuple(outputs[: len(names)] if names else outputs)


def _alike(own: InferredType, labels: ValueInfoProto) -> bool:
    """Return True if labels of one loss may be those of another."""
    tensor = labels.type.tensor_type
    if own.elem_type != tensor.elem_type or own.dims is None or not tensor.HasField("shape"):
        return own.elem_type == tensor.elem_type
    sizes = [dim.dim_value if dim.HasField("dim_value") else None for dim in tensor.shape.dim]
    return len(sizes) == len(own.dims) and all(
        a == b or not isinstance(a, int) or b is None for a, b in zip(own.dims, sizes, strict=True)
    )


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
