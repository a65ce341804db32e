"""From a forward model to the graphs that train it, all of them plain ONNX.

Rule: parameters are inputs of every graph, never state; so one cached session serves all
parameters and all rounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from onnx import ModelProto, NodeProto, TensorProto, ValueInfoProto, helper

from bbnode.components.autodiff.builder import (
    TRAINABLE,
    GraphBuilder,
    InferredType,
    constant_nodes,
    every_name,
    prune,
)
from bbnode.components.autodiff.errors import InvalidForwardModel
from bbnode.components.autodiff.forward import ForwardGraph, read_forward
from bbnode.components.autodiff.losses import find_loss
from bbnode.components.autodiff.nested import model_types
from bbnode.components.autodiff.reverse import pull_back
from bbnode.ir.keys import FRAMEWORK_IR_VERSION, PRODUCER_NAME


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
        taken |= every_name(forward.nodes)
        self.b = GraphBuilder(
            taken,
            opsets=(("", forward.opset), *forward.other_opsets),
            known=(*forward.constants, *constant_nodes(forward.nodes)),
        )
        self.labels = self.b.public("labels")
        self.rate = self.b.public("learning_rate")
        self.output_grad = self.b.public("output_gradient")

        output = forward.output.name
        self.outputs = {output: forward.output}
        prediction = model_types(self._model("types", forward.nodes, self._inputs(), [output]))
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
        types = model_types(whole)

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
        kept, tensors = prune(nodes, constants, outputs, self.b.instead)
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
