"""The fit of data to a model that is to be trained on them.

Rule: only what can be known before the first batch is compared: shapes as far as the graph fixes
them, types, and the classes that labels name. A fault is one line: what the program wants, what the
data have, and what to do.
"""

from __future__ import annotations

from typing import NamedTuple

from onnx import ModelProto, helper

from bbnode.components.autodiff import TrainingGraphs
from bbnode.components.autodiff.builder import Dims, InferredType
from bbnode.components.autodiff.losses import Loss, LossSettings, class_axis
from bbnode.components.data.schema import DataSchema, TensorSchema
from bbnode.components.errors import DataDoesNotFit
from bbnode.components.models.labels import class_remedy, negative_remedy


class Wanted(NamedTuple):
    """A tensor that a graph takes: dtype, and sizes without the batch axis (None: any)."""

    dtype: str
    sizes: tuple[int | None, ...] | None

    def __str__(self) -> str:
        if self.sizes is None:
            return self.dtype
        return f"{self.dtype}[{', '.join('?' if n is None else str(n) for n in self.sizes)}]"

    def takes_shape(self, shape: tuple[int, ...]) -> bool:
        """Return True if examples of this shape fit."""
        if self.sizes is None:
            return True
        pairs = zip(self.sizes, shape, strict=False)
        return len(self.sizes) == len(shape) and all(n in (None, size) for n, size in pairs)


def wanted_features(graphs: TrainingGraphs) -> dict[str, Wanted]:
    """Return what each of the model's inputs takes."""
    return {name: _port(graphs.train_step, name) for name in graphs.input_names}


def wanted_labels(graphs: TrainingGraphs) -> Wanted:
    """Return what the loss takes as labels."""
    return _port(graphs.train_step, graphs.labels_name)


def check_fit(
    schema: DataSchema,
    graphs: TrainingGraphs,
    loss: Loss,
    settings: LossSettings,
    *,
    where: str,
    labels_apart: int = 0,
) -> None:
    """Raise DataDoesNotFit unless the model can be trained on data of this schema.

    `where` names model and data in the message; `labels_apart` is the number of losses that have
    labels of their own on the last axis, 0 where all have the same.
    """
    _check_features(schema, wanted_features(graphs), where)
    _check_tokens(schema, graphs, where)
    if labels_apart:
        if schema.labels.shape[-1:] != (labels_apart,):
            raise DataDoesNotFit(
                f"{where}: the program has {labels_apart} losses with labels of their own, and the "
                f"data have labels {schema.labels}; give them [N, …, {labels_apart}]"
            )
        return
    check_labels(schema, wanted_labels(graphs), graphs.output_dims, loss, settings, where=where)


def check_labels(
    schema: DataSchema,
    labels: Wanted,
    output_dims: Dims,
    loss: Loss,
    settings: LossSettings,
    *,
    where: str,
) -> None:
    """Raise DataDoesNotFit unless the data's labels are what the loss takes; as `check_fit`."""
    if loss.class_labels:
        axis = class_axis(InferredType(0, output_dims), settings)
        _check_classes(schema, labels, output_dims, axis, settings.ignore_index, where)
    else:
        _check_values(schema, labels, loss, where)


def _check_features(schema: DataSchema, wanted: dict[str, Wanted], where: str) -> None:
    given = schema.inputs or (("", schema.features),)
    if len(given) != len(wanted):
        have = ", ".join(f"{name} {values}".strip() for name, values in given)
        takes = ", ".join(f"{name} {port}" for name, port in wanted.items())
        raise DataDoesNotFit(
            f"{where}: the program takes {len(wanted)} inputs ({takes}), the data have "
            f"{len(given)} ({have}); name one array for each, in this order, with `inputs`"
        )
    for (port, want), (array, have_one) in zip(wanted.items(), given, strict=True):
        what = f"{want} as input {port!r}" if schema.inputs else str(want)
        columns = f" as {array!r}" if schema.inputs else ""
        if schema.names:
            columns = f" ({len(schema.names)} columns: {_few(schema.names)})"
        if not want.takes_shape(have_one.shape):
            raise DataDoesNotFit(
                f"{where}: the program takes examples of {what}, the data have {have_one}{columns};"
                " give it data of that shape, or compile the program for these"
            )
        if want.dtype != have_one.dtype:
            told = columns if schema.inputs else ""
            raise DataDoesNotFit(
                f"{where}: the program takes examples of {what}, the data have {have_one}{told}; "
                f"store them as {want.dtype}, or compile the program for {have_one.dtype}"
            )


def _check_tokens(schema: DataSchema, graphs: TrainingGraphs, where: str) -> None:
    """Compare the ids of tokens with the rows of each table that they are looked up in."""
    if schema.feature_range is None:
        return
    _, greatest = schema.feature_range
    rows = dict(zip(graphs.parameter_names, (each.dims for each in graphs.initial), strict=True))
    for node in graphs.forward.graph.node:
        looks_up = node.op_type == "Gather" and node.input[1] == graphs.input_names[0]
        axis = next((each.i for each in node.attribute if each.name == "axis"), 0)
        table = node.input[0] if looks_up and axis == 0 else ""
        if table in rows and rows[table][0] <= greatest:
            raise DataDoesNotFit(
                f"{where}: tokens have the ids 0 to {greatest}, and the table {table!r} of the "
                f"program has {rows[table][0]} rows; compile the program for {greatest + 1}, or "
                "take another tokenizer"
            )


def _check_classes(
    schema: DataSchema, wanted: Wanted, output: Dims, axis: int, ignored: int | None, where: str
) -> None:
    have, span = schema.labels, schema.label_range
    classes = output[axis] if isinstance(output[axis], int) else None
    column = f" in {schema.label_name!r}" if schema.label_name else ""
    if span is None or not wanted.takes_shape(have.shape):
        count = "" if classes is None else f" to {int(classes) - 1}"
        remedy = class_remedy((0, *have.shape), have.dtype, output, axis)
        raise DataDoesNotFit(
            f"{where}: the program takes labels of {wanted}, class numbers from 0{count}; the data "
            f"have {have}{column}; {remedy}"
        )
    if span == (ignored, ignored):
        raise DataDoesNotFit(
            f"{where}: all labels{column} are ignore_index ({ignored}), so that there is no loss; "
            "give it examples with a class"
        )
    if span[0] < 0 and span[0] != ignored:
        raise DataDoesNotFit(
            f"{where}: the data have the label {span[0]}{column}; classes are numbered from 0; "
            f"{negative_remedy(*span)}"
        )
    if classes is not None and span[1] >= int(classes) and span[1] != ignored:
        raise DataDoesNotFit(
            f"{where}: the program tells {classes} classes apart, 0 to {int(classes) - 1}, and the "
            f"data have labels from {span[0]} to {span[1]}{column}; number the classes from 0, or "
            f"compile the program for {span[1] + 1}"
        )


def _check_values(schema: DataSchema, wanted: Wanted, loss: Loss, where: str) -> None:
    have = schema.labels
    column = f" in {schema.label_name!r}" if schema.label_name else ""
    # One number for each example may leave out the axis of size 1.
    fits = wanted.takes_shape(have.shape) or wanted.takes_shape((*have.shape, 1))
    if not fits or not _is_number(have):
        outputs = (wanted.sizes or (None,))[-1]
        of_classes = outputs != 1 and wanted.takes_shape((*have.shape, outputs or 1))
        remedy = "give it labels of that shape, or compile the program for these"
        if of_classes and loss.labels == "probabilities":
            remedy = (
                "if each label is the number of a class, compile with loss='softmax_cross_entropy',"
                f" or the model for one output; of {loss.name} a label has a number per output"
            )
        elif of_classes:
            remedy = (
                "if each label is the number of a class, compile with loss='softmax_cross_entropy';"
                " if it is a quantity, the model for one output"
            )
        raise DataDoesNotFit(
            f"{where}: the program takes labels of {wanted}, as its output, and the data have "
            f"{have}{column}; {remedy}"
        )
    if loss.labels == "values" and len(schema.classes) > 1:
        raise DataDoesNotFit(
            f"{where}: the labels{column} are names ({_few(schema.classes)}), numbered from 0, and "
            f"{loss.name} would take these numbers for quantities; compile with "
            "loss='softmax_cross_entropy' and an output for each"
        )
    span = schema.label_range or schema.value_range
    if loss.labels == "probabilities" and span is not None and not 0 <= span[0] <= span[1] <= 1:
        remedy = "store a number from 0 to 1"
        if span == (-1, 1):
            remedy = "store 0 for -1"
        elif span[1] > 1 and span[0] >= 0:
            remedy = (
                "for classes by number compile with loss='softmax_cross_entropy' and an output for "
                "each; for a quantity with loss='mse'"
            )
        raise DataDoesNotFit(
            f"{where}: labels{column} are from {span[0]:g} to {span[1]:g}, and {loss.name} takes "
            f"probabilities, from 0 to 1; {remedy}"
        )


def _is_number(have: TensorSchema) -> bool:
    return have.dtype.startswith(("float", "int", "uint", "bool"))


def _port(model: ModelProto, name: str) -> Wanted:
    info = next(port for port in model.graph.input if port.name == name)
    tensor = info.type.tensor_type
    dtype = helper.tensor_dtype_to_np_dtype(tensor.elem_type).name
    if not tensor.HasField("shape"):
        return Wanted(dtype, None)
    dims = (dim.dim_value if dim.HasField("dim_value") else None for dim in tensor.shape.dim)
    return Wanted(dtype, tuple(dims)[1:])


def _few(names: tuple[str, ...]) -> str:
    most = 6
    return ", ".join(names[:most]) + (", …" if len(names) > most else "")
