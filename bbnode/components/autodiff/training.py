"""From a forward model to the graphs that train it, all of them plain ONNX.

Rule: a forward model is first brought into one form: one flat graph at one opset, parameters
found, nothing hidden in functions, in inputs that shadow initializers, or in files beside the
model. Parameters are inputs of every graph, never state; so one cached session serves all
parameters and all rounds. A loss is a scalar, the mean over its elements; it needs no gradient rule
because its ops have one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import onnx
from onnx import (
    ModelProto,
    NodeProto,
    TensorProto,
    ValueInfoProto,
    helper,
    inliner,
    version_converter,
)

from bbnode.components.autodiff.builder import (
    INT64,
    TRAINABLE,
    GraphBuilder,
    InferredType,
    captured_names,
    inferred_types,
    prune,
)
from bbnode.components.autodiff.errors import InvalidForwardModel, UnknownLoss
from bbnode.components.autodiff.reverse import pull_back
from bbnode.components.autodiff.table import lookup
from bbnode.ir.bounds import FileReference, OutOfBounds, check_bounds
from bbnode.ir.graph import is_onnx_domain
from bbnode.ir.keys import FRAMEWORK_IR_VERSION, ONNX_OPSET_VERSION, PRODUCER_NAME
from bbnode.ir.onnx_file import subgraph_of
from bbnode.ir.versions import means_the_same


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardGraph:
    """A forward model taken apart.

    Attributes:
        name: of the graph.
        opset: version of `ai.onnx`.
        other_opsets: imports of further domains, as (domain, version).
        nodes: in topological order.
        inputs: what a caller feeds, parameters not among them.
        parameters: the tensors that are trained, in the order of the flat vector.
        constants: all other initializers.
        output: the value that the loss is computed from.
    """

    name: str
    opset: int
    other_opsets: tuple[tuple[str, int], ...]
    nodes: tuple[NodeProto, ...]
    inputs: tuple[ValueInfoProto, ...]
    parameters: tuple[TensorProto, ...]
    constants: tuple[TensorProto, ...]
    output: ValueInfoProto


def read_forward(forward: ModelProto, wrt: Sequence[str] | None = None) -> ForwardGraph:
    """Check, flatten and upgrade `forward`, and split its initializers.

    Args:
        forward: an ONNX model, any opset that ONNX's version converter knows.
        wrt: names of the initializers to train; by default every float one that is not only
            used as a setting (the exponent of a Pow, the shape of a Reshape).

    Raises:
        InvalidForwardModel: it is not a valid model, or has nothing to train.
    """
    try:
        # Before ONNX's checker, which looks whether files that a model names are there.
        check_bounds(forward)
    except FileReference as error:
        raise InvalidForwardModel(
            what=str(error), remedy="load it with onnx.load(path), which reads such files in"
        ) from error
    except OutOfBounds as error:
        raise InvalidForwardModel(what=str(error), remedy="give a smaller model") from error
    model = _upgrade(forward)
    graph = model.graph
    held = {tensor.name for tensor in graph.initializer}
    names = _parameter_names(model) if wrt is None else tuple(wrt)
    _check_parameters(model, names)
    if not graph.output:
        raise InvalidForwardModel(what="it has no output", remedy="give the graph an output")
    chosen = set(names)
    return ForwardGraph(
        name=graph.name or "model",
        opset=_onnx_opset(model),
        other_opsets=tuple(
            (entry.domain, int(entry.version))
            for entry in model.opset_import
            if entry.domain not in ("", "ai.onnx")
        ),
        nodes=tuple(graph.node),
        inputs=tuple(info for info in graph.input if info.name not in held),
        parameters=tuple(tensor for tensor in graph.initializer if tensor.name in chosen),
        constants=tuple(tensor for tensor in graph.initializer if tensor.name not in chosen),
        output=graph.output[0],
    )


def _upgrade(forward: ModelProto) -> ModelProto:
    try:
        onnx.checker.check_model(forward)
        _check_opset(forward)
        model = inliner.inline_local_functions(forward) if forward.functions else forward
        if _onnx_opset(model) < ONNX_OPSET_VERSION or not _means_the_same(model):
            model = version_converter.convert_version(model, ONNX_OPSET_VERSION)
        elif _onnx_opset(model) > ONNX_OPSET_VERSION:
            # Backends follow ONNX late: what needs nothing of a newer opset is not said to.
            model = _relabelled(model)
    except (onnx.checker.ValidationError, RuntimeError, ValueError) as error:
        # RuntimeError is what ONNX's C++ converter and inliner raise for whatever they refuse.
        summary = str(error).strip().splitlines()
        raise InvalidForwardModel(
            what=f"ONNX refuses it: {summary[0] if summary else type(error).__name__}",
            remedy="run onnx.checker.check_model on it and fix what that reports",
        ) from error
    return model


def _check_opset(model: ModelProto) -> None:
    newest = onnx.defs.onnx_opset_version()
    if _onnx_opset(model) > newest:
        raise InvalidForwardModel(
            what=f"its opset {_onnx_opset(model)} is newer than {newest}, the last one that the "
            f"installed onnx {onnx.__version__} knows",
            remedy=f"export it with opset {ONNX_OPSET_VERSION}, or install a newer onnx",
        )


def _means_the_same(model: ModelProto) -> bool:
    """Return True if every op means at the opset of programs what it means at the model's."""
    version = _onnx_opset(model)
    if version == ONNX_OPSET_VERSION:
        return True
    return all(
        means_the_same(node, version, ONNX_OPSET_VERSION)
        for node in subgraph_of(model.graph).all_nodes()
        if is_onnx_domain(node.domain)
    )


def _relabelled(model: ModelProto) -> ModelProto:
    made = ModelProto()
    made.CopyFrom(model)
    for entry in made.opset_import:
        if is_onnx_domain(entry.domain):
            entry.version = ONNX_OPSET_VERSION
    return made


def _onnx_opset(model: ModelProto) -> int:
    for entry in model.opset_import:
        if entry.domain in ("", "ai.onnx"):
            return int(entry.version)
    raise InvalidForwardModel(
        what="it does not import the ai.onnx opset",
        remedy=f"add helper.make_opsetid('', {ONNX_OPSET_VERSION}) to its opset_import",
    )


def _parameter_names(model: ModelProto) -> tuple[str, ...]:
    """Return float initializers with at least one use that a gradient can pass."""
    used: set[str] = set()
    for node in model.graph.node:
        entry = lookup(node.domain, node.op_type)
        settings = entry.constant_inputs if entry is not None else frozenset[int]()
        used.update(name for index, name in enumerate(node.input) if index not in settings)
    return tuple(
        tensor.name
        for tensor in model.graph.initializer
        if tensor.name in used and tensor.data_type in TRAINABLE
    )


def _check_parameters(model: ModelProto, names: Sequence[str]) -> None:
    tensors = {tensor.name: tensor for tensor in model.graph.initializer}
    if not names:
        raise InvalidForwardModel(
            what="it has no float initializer to train",
            remedy="store the weights as float32 initializers of the graph",
        )
    for name in names:
        if name not in tensors:
            raise InvalidForwardModel(
                what=f"there is no initializer {name!r} to train",
                remedy=f"choose among {', '.join(sorted(tensors)) or '(none)'}",
            )
        if tensors[name].data_type not in TRAINABLE:
            kind = TensorProto.DataType.Name(tensors[name].data_type)
            raise InvalidForwardModel(
                what=f"parameter {name!r} is {kind}",
                remedy="train float32 or float64 initializers; leave others out of `wrt`",
            )
    kinds = {tensors[name].data_type for name in names}
    if len(kinds) > 1:
        raise InvalidForwardModel(
            what="its parameters mix float32 and float64", remedy="convert them to one of the two"
        )


# --- losses ----------------------------------------------------------------------

# (builder, prediction, labels, type of the prediction) -> name of the scalar loss
Emitter: TypeAlias = Callable[[GraphBuilder, str, str, InferredType], str]


@dataclass(frozen=True, slots=True)
class Loss:
    """A named loss: how it is emitted, and what its labels are."""

    name: str
    emit: Emitter
    class_labels: bool  # int64 class numbers without the last axis; else like the prediction

    def label_type(self, prediction: InferredType) -> InferredType:
        """Return the element type and dimensions of the labels input."""
        if not self.class_labels:
            return prediction
        dims = None if prediction.dims is None else prediction.dims[:-1]
        return InferredType(INT64, dims)


def _softmax_cross_entropy(b: GraphBuilder, y: str, labels: str, kind: InferredType) -> str:
    """Emit the mean of -log softmax(y)[label]; classes are the last axis. LogSoftmax is stable."""
    if not kind.dims:
        raise InvalidForwardModel(
            what="its output is a scalar, softmax_cross_entropy wants (batch, classes)",
            remedy="give the model an output with one logit per class",
        )
    # Counted from the front: onnx's reference evaluator mistakes -1 in GatherElements.
    axis = len(kind.dims) - 1
    log_p = b.op("LogSoftmax", y, axis=axis)
    column = b.op("Unsqueeze", labels, b.ints([axis]))
    picked = b.op("GatherElements", log_p, column, axis=axis)
    return b.op("Neg", b.op("ReduceMean", picked, keepdims=0))


def _mse(b: GraphBuilder, y: str, labels: str, _: InferredType) -> str:
    """Emit the mean of the squared differences, over all elements."""
    difference = b.op("Sub", y, labels)
    return b.op("ReduceMean", b.op("Mul", difference, difference), keepdims=0)


LOSSES: dict[str, Loss] = {
    loss.name: loss
    for loss in (
        Loss("softmax_cross_entropy", _softmax_cross_entropy, class_labels=True),
        Loss("mse", _mse, class_labels=False),
    )
}


def find_loss(name: str) -> Loss:
    """Return the loss of that name.

    Raises:
        UnknownLoss: there is no such loss.
    """
    loss = LOSSES.get(name)
    if loss is None:
        raise UnknownLoss(loss=name, known=tuple(sorted(LOSSES)))
    return loss


# --- graphs ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingGraphs:
    """The graphs of one model, and the names of their inputs and outputs.

    Attributes:
        forward: parameters, inputs -> output.
        loss: parameters, inputs, labels -> loss.
        gradients: parameters, inputs, labels -> loss, one gradient per parameter.
        pullback: parameters, inputs, gradient of the output -> one gradient per parameter.
        sgd_step: parameters, gradients, learning rate -> updated parameters.
        train_step: parameters, inputs, labels, learning rate -> updated parameters, loss.
        initial: the parameters' values in the forward model, in the order of all tuples here.
        input_names: what a caller feeds the model.
        parameter_names: as in the forward model.
        gradient_names: outputs of `gradients` and `pullback`, inputs of `sgd_step`.
        updated_names: outputs of `sgd_step` and `train_step`.
        output_dims: of the output: sizes, or None and symbols where they are open.
        output_name, labels_name, loss_name, learning_rate_name, output_gradient_name: the rest.
    """

    forward: ModelProto
    loss: ModelProto
    gradients: ModelProto
    pullback: ModelProto
    sgd_step: ModelProto
    train_step: ModelProto
    initial: tuple[TensorProto, ...]
    input_names: tuple[str, ...]
    parameter_names: tuple[str, ...]
    gradient_names: tuple[str, ...]
    updated_names: tuple[str, ...]
    output_dims: tuple[int | str | None, ...]
    output_name: str
    labels_name: str
    loss_name: str
    learning_rate_name: str
    output_gradient_name: str


def gradient_graph(forward: ModelProto, loss: str, wrt: Sequence[str] | None = None) -> ModelProto:
    """Return the graph (parameters, inputs, labels) -> (loss, gradients): see `training_graphs`."""
    return training_graphs(forward, loss, wrt).gradients


def training_graphs(
    forward: ModelProto, loss: str, wrt: Sequence[str] | None = None
) -> TrainingGraphs:
    """Differentiate `forward` and write all graphs that training needs.

    Args:
        forward: inputs -> output, weights as float32 (or float64) initializers.
        loss: "softmax_cross_entropy" (int64 class labels, classes on the last axis) or "mse".
        wrt: initializers to train, all float ones by default.

    Raises:
        InvalidForwardModel, UnknownLoss, UnsupportedGradient, GradientRuleError.
    """
    return _Writer(read_forward(forward, wrt), loss).write()


class _Writer:
    """Holds one forward graph, its loss and both sweeps while the models are cut from them."""

    def __init__(self, forward: ForwardGraph, loss: str) -> None:
        self.f = forward
        self.params = [tensor.name for tensor in forward.parameters]
        self.float_type = int(forward.parameters[0].data_type)
        kind = find_loss(loss)

        taken = {tensor.name for tensor in (*forward.parameters, *forward.constants)}
        taken.update(info.name for info in forward.inputs)
        for node in forward.nodes:
            taken.update(node.output)
            taken |= captured_names(node)
        self.b = GraphBuilder(taken)
        self.labels = self.b.public("labels")
        self.rate = self.b.public("learning_rate")
        self.output_grad = self.b.public("output_gradient")

        output = forward.output.name
        self.outputs = {output: forward.output}
        prediction = inferred_types(self._model("types", forward.nodes, self._inputs(), [output]))
        self.output_type = prediction[output]
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
        self.label_type = kind.label_type(self.output_type)
        self.loss = self.b.public("loss")
        emitted = kind.emit(self.b, output, self.labels, self.output_type)
        self.b.nodes.append(_identity(emitted, self.loss))
        self.outputs[self.loss] = _info(self.loss, InferredType(self.output_type.elem_type, ()))
        self.forward_nodes = [*forward.nodes, *self.b.nodes]

    def write(self) -> TrainingGraphs:
        f, b = self.f, self.b
        output = f.output.name
        inputs = self._inputs()
        labels = _info(self.labels, self.label_type)
        whole = self._model("types", self.forward_nodes, [*inputs, labels], [output, self.loss])
        types = inferred_types(whole)

        seeds = {self.loss: b.scalar(1.0, self.output_type.elem_type)}
        by_loss = pull_back(b, self.forward_nodes, types, seeds, self.params)
        by_output = pull_back(b, f.nodes, types, {output: self.output_grad}, self.params)

        grads = [b.public(f"grad/{name}") for name in self.params]
        updated = [b.public(f"updated/{name}") for name in self.params]
        for names in (grads, updated):
            for name, tensor in zip(names, f.parameters, strict=True):
                self.outputs[name] = _parameter_info(name, tensor)
        loss_named = [_identity(by_loss[n], g) for n, g in zip(self.params, grads, strict=True)]
        out_named = [_identity(by_output[n], g) for n, g in zip(self.params, grads, strict=True)]
        step: list[NodeProto] = []
        for name, grad, new in zip(self.params, grads, updated, strict=True):
            scaled = b.fresh(f"scaled/{name}")
            step.append(helper.make_node("Mul", [grad, self.rate], [scaled], name=scaled))
            step.append(helper.make_node("Sub", [name, scaled], [new], name=new))

        rate = _info(self.rate, InferredType(self.float_type, ()))
        param_infos = [_parameter_info(t.name, t) for t in f.parameters]
        grad_infos = [_parameter_info(g, t) for g, t in zip(grads, f.parameters, strict=True)]
        cotangent = _info(self.output_grad, self.output_type)
        nodes = [*f.nodes, *b.nodes]  # b.nodes begins with the loss, then both sweeps
        return TrainingGraphs(
            forward=self._model("forward", f.nodes, inputs, [output]),
            loss=self._model("loss", nodes, [*inputs, labels], [self.loss]),
            gradients=self._model(
                "gradients", [*nodes, *loss_named], [*inputs, labels], [self.loss, *grads]
            ),
            pullback=self._model("pullback", [*nodes, *out_named], [*inputs, cotangent], grads),
            sgd_step=self._model("sgd_step", step, [*param_infos, *grad_infos, rate], updated),
            train_step=self._model(
                "train_step",
                [*nodes, *loss_named, *step],
                [*inputs, labels, rate],
                [*updated, self.loss],
            ),
            initial=f.parameters,
            input_names=tuple(info.name for info in f.inputs),
            parameter_names=tuple(self.params),
            gradient_names=tuple(grads),
            updated_names=tuple(updated),
            output_dims=tuple(self.output_type.dims or ()),
            output_name=output,
            labels_name=self.labels,
            loss_name=self.loss,
            learning_rate_name=self.rate,
            output_gradient_name=self.output_grad,
        )

    def _inputs(self) -> list[ValueInfoProto]:
        return [*(_parameter_info(t.name, t) for t in self.f.parameters), *self.f.inputs]

    def _model(
        self,
        name: str,
        nodes: Sequence[NodeProto],
        inputs: Sequence[ValueInfoProto],
        outputs: Sequence[str],
    ) -> ModelProto:
        constants = [*self.f.constants, *self.b.initializers]
        kept, tensors = prune(nodes, constants, outputs)
        return helper.make_model(
            helper.make_graph(
                kept,
                f"{self.f.name}.{name}",
                list(inputs),
                [self.outputs[output] for output in outputs],
                tensors,
            ),
            ir_version=FRAMEWORK_IR_VERSION,
            producer_name=PRODUCER_NAME,
            opset_imports=[
                helper.make_opsetid("", self.f.opset),
                *(helper.make_opsetid(*entry) for entry in self.f.other_opsets),
            ],
        )


def _identity(value: str, name: str) -> NodeProto:
    return helper.make_node("Identity", [value], [name], name=name)


def _info(name: str, kind: InferredType) -> ValueInfoProto:
    dims = None if kind.dims is None else list(kind.dims)
    return helper.make_tensor_value_info(name, kind.elem_type, dims)


def _parameter_info(name: str, tensor: TensorProto) -> ValueInfoProto:
    return helper.make_tensor_value_info(name, tensor.data_type, list(tensor.dims))
