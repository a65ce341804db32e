"""Predictions of an exported model for files, by the description in the model.

Rule: the model is a file that may come from anybody: it is bounded and checked before it runs, and
names no other file. The description of the training names the outputs; an output without one is
returned as numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import onnx
from google.protobuf.message import DecodeError

from bbnode.components.backends.ort import OrtBackend
from bbnode.components.contracts import OutputKind
from bbnode.components.data.data_file import read_whole
from bbnode.components.data.description import DataDescription
from bbnode.components.errors import DataUnavailable
from bbnode.daemon.predicting.inputs import (
    Examples,
    ExamplesRefused,
    Given,
    read_examples,
    read_plain,
)
from bbnode.daemon.predicting.meaning import Meaning
from bbnode.ir import keys
from bbnode.ir.bounds import OutOfBounds, check_bounds
from bbnode.ir.caps import MAX_ARTIFACT_BYTES
from bbnode.ir.errors import DeploymentError
from bbnode.ir.values import Composite

Numbers: TypeAlias = npt.NDArray[np.float64]
# Values by name, and probabilities by class.
_Row: TypeAlias = tuple[dict[str, str | float], dict[str, float]]

_BATCH = 64  # examples of one run
_BATCH_BYTES = 1 << 26  # bytes of these examples; a single larger one is run alone
_OF_CLASSES: tuple[OutputKind, ...] = ("logits", "log_probabilities", "probabilities")


class ModelUnusable(DeploymentError):
    """A file is no model that can predict."""


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """The prediction for one example.

    Attributes:
        example: its row, its line or its file.
        values: by what they are: "class" and "probability", or the name of a column.
        probabilities: of all classes, by name; empty where there are none.
    """

    example: str | int
    values: dict[str, str | float]
    probabilities: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class Predictions:
    """Predictions of a model.

    Attributes:
        noun: of the examples: "row", "line" or "file".
        columns: names of the values of each.
        rows: the predictions.
        notes: lines for the user.
    """

    noun: str
    columns: tuple[str, ...]
    rows: list[Prediction]
    notes: tuple[str, ...]


def predict(model: Path, given: Given) -> Predictions:
    """Return what a model predicts for a file, a folder, or text.

    Raises:
        ModelUnusable: the model is none, or its inputs are not those that it was trained on.
        ExamplesRefused, DescriptionRefused, DataUnavailable: what was given does not fit it.
        BackendError: ONNX Runtime can't run it.
    """
    loaded = _load(model)
    meaning = Meaning.of_model(loaded)
    inputs = _inputs(loaded)
    notes: list[str] = []
    data = None if meaning is None else meaning.data
    if data is None:
        if meaning is not None:
            notes.append(f"the model does not say what it takes: {meaning.why}")
        if len(inputs) != 1:
            raise ModelUnusable(
                f"{model} has {len(inputs)} inputs and does not say what they are; run it with "
                "ONNX Runtime"
            )
        examples = read_plain(given, _dtype(inputs[0]))
    else:
        examples = read_examples(data, given)
    tensors = len(data.inputs) if data is not None and data.inputs else 1
    if tensors != len(inputs):
        raise ModelUnusable(
            f"{model} has {len(inputs)} inputs, and was trained on examples of {tensors} tensor(s)"
        )
    kind, output = _output(loaded, meaning)
    outputs = np.concatenate([*_run(loaded, inputs, output, examples)]).astype(np.float64)
    classes = () if data is None else data.classes
    if kind in _OF_CLASSES and classes and len(classes) != outputs.shape[-1]:
        # Names of classes that were found in data without one of them belong to other numbers.
        notes.append(
            f"the model tells {outputs.shape[-1]} classes apart, and its data name {len(classes)}; "
            "classes are shown by number"
        )
        data = replace(data, classes=()) if data is not None else None
    columns, rows = _named(outputs, kind, loaded.graph.output[output].name, data)
    if not kind:
        notes.append("the model does not say what its output is: its numbers are as it gives them")
    predictions = [
        Prediction(example=name, values=values, probabilities=probabilities)
        for name, (values, probabilities) in zip(examples.names, rows, strict=True)
    ]
    return Predictions(
        noun=examples.noun, columns=columns, rows=predictions, notes=(*examples.notes, *notes)
    )


def _load(path: Path) -> onnx.ModelProto:
    if not path.exists():
        raise DataUnavailable(f"{path}: there is no such file; `bbnode export` writes a model")
    content = read_whole(path, "the model", MAX_ARTIFACT_BYTES)
    try:
        model = onnx.load_model_from_string(content)
        check_bounds(model)
        if any(entry.key == keys.COMPILED_KEY for entry in model.metadata_props):
            raise ModelUnusable(
                f"{path} is a compiled program; `bbnode export` writes the model of a node"
            )
        onnx.checker.check_model(model)
    except (DecodeError, RecursionError, ValueError, OutOfBounds,
            onnx.checker.ValidationError) as error:  # fmt: skip
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise ModelUnusable(f"{path} is no ONNX model that can be run: {lines[0]}") from error
    return model


def _inputs(model: onnx.ModelProto) -> list[onnx.ValueInfoProto]:
    weights = {tensor.name for tensor in model.graph.initializer}
    return [each for each in model.graph.input if each.name not in weights]


def _dtype(value: onnx.ValueInfoProto) -> np.dtype[Any]:
    return onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)


def _output(model: onnx.ModelProto, meaning: Meaning | None) -> tuple[OutputKind, int]:
    """Return the kind of the output that is shown, and its index."""
    if meaning is not None and meaning.kind:
        for place, output in enumerate(model.graph.output):
            if output.name == meaning.output:
                return meaning.kind, place
    return "", 0


def _run(
    model: onnx.ModelProto, inputs: Sequence[onnx.ValueInfoProto], output: int, examples: Examples
) -> Iterator[npt.NDArray[Any]]:
    """Yield the output of one batch of examples after another."""
    values = examples.values
    an_example = max(1, math.prod(values.shape[1:]) * values.dtype.itemsize)
    size = min(_batch_size(inputs), max(1, _BATCH_BYTES // an_example))
    count = len(values)
    backend = OrtBackend(OrtBackend.Config())
    prepared = backend.prepare(model)
    for start in range(0, count, size):
        batch = values[np.arange(start, min(start + size, count))]
        parts = list(batch) if isinstance(batch, Composite) else [batch]
        predicted = np.asarray(prepared.run(parts)[output])
        rows = min(size, count - start)
        if predicted.ndim == 0 or len(predicted) != rows:
            raise ModelUnusable(
                f"the model gives an output of shape {list(predicted.shape)} for {rows} examples, "
                "and not one for each; run it with ONNX Runtime"
            )
        yield predicted


def _batch_size(inputs: Sequence[onnx.ValueInfoProto]) -> int:
    fixed = {
        each.type.tensor_type.shape.dim[0].dim_value
        for each in inputs
        if len(each.type.tensor_type.shape.dim)
    } - {0}
    if fixed - {1}:
        raise ExamplesRefused(
            f"the model takes batches of {max(fixed)} examples and no others; put a name in the "
            "place of that number in its input"
        )
    return 1 if fixed else _BATCH


def _named(
    outputs: Numbers, kind: OutputKind, name: str, data: DataDescription | None
) -> tuple[tuple[str, ...], list[_Row]]:
    """Return the columns of the predictions, and for each example values and probabilities."""
    label = "" if data is None else data.label
    classes = () if data is None else data.classes
    flat = outputs.reshape(len(outputs), -1)
    if kind in _OF_CLASSES:
        if outputs.ndim != 2:
            raise ModelUnusable(
                f"the model gives {list(outputs.shape[1:])} numbers for an example, and not one "
                "for each class; run it with ONNX Runtime"
            )
        return ("class", "probability"), _of_classes(_probabilities(flat, kind), classes)
    if kind == "logit" and flat.shape[1] == 1 and len(classes) in (0, 2):
        yes = _sigmoid(flat)
        return ("class", "probability"), _of_classes(np.hstack([1 - yes, yes]), classes)
    if kind == "logit":
        flat = _sigmoid(flat)
    base = label or name
    names = [base] if flat.shape[1] == 1 else [f"{base}[{at}]" for at in range(flat.shape[1])]
    if kind == "logit":
        names = [f"probability of {each}" for each in names]
    rows: list[_Row] = []
    for row in flat:
        values: dict[str, str | float] = dict(zip(names, map(float, row), strict=True))
        rows.append((values, {}))
    return tuple(names), rows


def _of_classes(probabilities: Numbers, classes: Sequence[str]) -> list[_Row]:
    names = [*classes] or [str(at) for at in range(probabilities.shape[1])]
    named = []
    for row in probabilities:
        best = int(row.argmax())
        values: dict[str, str | float] = {"class": names[best], "probability": float(row[best])}
        named.append((values, dict(zip(names, map(float, row), strict=True))))
    return named


def _probabilities(outputs: Numbers, kind: OutputKind) -> Numbers:
    if kind == "probabilities":
        return outputs
    if kind == "log_probabilities":
        return np.exp(outputs)
    powers = np.exp(outputs - outputs.max(axis=1, keepdims=True))
    return np.asarray(powers / powers.sum(axis=1, keepdims=True))


def _sigmoid(outputs: Numbers) -> Numbers:
    with np.errstate(over="ignore"):
        return np.asarray(1 / (1 + np.exp(-outputs)))


def is_finite(prediction: Prediction) -> bool:
    """Return True unless a number of a prediction is NaN or infinite."""
    return all(
        not isinstance(value, float) or math.isfinite(value) for value in prediction.values.values()
    )
