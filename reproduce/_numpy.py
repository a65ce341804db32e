"""The trainings of experiments once more in plain numpy, with draws of their own.

Rule: nothing here knows what a node draws (cohorts, orders of examples), so that a number of nodes
is one draw of the same distribution as those of numpy: `experiment.beside` says how far it may be
from them. Start weights and clients' examples are the nodes' own.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
from onnx import ModelProto
from onnx.numpy_helper import to_array

from bbnode.components import ArrayDataSource

Vector: TypeAlias = npt.NDArray[Any]  # float64
Rng: TypeAlias = np.random.Generator

NUMPY_SEED: Final = 77  # beside the experiment's own


def rows_of(settings: Mapping[str, Any]) -> tuple[Vector, npt.NDArray[Any]]:
    """Return all examples of a data slot: features [N, F] float64 and labels [N]."""
    source = ArrayDataSource(ArrayDataSource.Config(**settings))
    ((x, y),) = source.epoch_batches(1 << 20)
    return np.asarray(x, np.float64), np.asarray(y)


@dataclass(frozen=True)
class Perceptron:
    """An MLP with rectifiers, and cross-entropy; weights are one vector, layer by layer."""

    sizes: Sequence[int]

    def layers(self, w: Vector) -> list[tuple[Vector, Vector]]:
        """Return views of weight [in, out] and bias [out] of each layer."""
        found, at = [], 0
        for rows, columns in itertools.pairwise(self.sizes):
            middle, end = at + rows * columns, at + rows * columns + columns
            found.append((w[at:middle].reshape(rows, columns), w[middle:end]))
            at = end
        return found

    def scores(self, w: Vector, x: Vector) -> Vector:
        """Return the logits, [N, C]."""
        *hidden, (last, bias) = self.layers(w)
        for weight, shift in hidden:
            x = np.maximum(x @ weight + shift, 0)
        return np.asarray(x @ last + bias)

    def accuracy(self, w: Vector, x: Vector, y: npt.NDArray[Any]) -> float:
        """Return the part of examples that are classified right."""
        return float((self.scores(w, x).argmax(axis=1) == y).mean())

    def loss(self, w: Vector, x: Vector, y: npt.NDArray[Any]) -> float:
        """Return the mean cross-entropy."""
        scores = self.scores(w, x)
        scores -= scores.max(axis=1, keepdims=True)
        right = scores[np.arange(len(y)), y]
        return float((np.log(np.exp(scores).sum(axis=1)) - right).mean())

    def gradient(self, w: Vector, x: Vector, y: npt.NDArray[Any]) -> Vector:
        """Return the gradient of the mean cross-entropy, [P]."""
        layers, inputs = self.layers(w), [x]
        for weight, bias in layers[:-1]:
            inputs.append(np.maximum(inputs[-1] @ weight + bias, 0))
        scores = inputs[-1] @ layers[-1][0] + layers[-1][1]
        wrong = np.exp(scores - scores.max(axis=1, keepdims=True))
        wrong /= wrong.sum(axis=1, keepdims=True)
        wrong[np.arange(len(y)), y] -= 1
        wrong /= len(y)
        made = np.empty_like(w)
        for (weight, bias), (of, _), values in zip(
            reversed(self.layers(made)), reversed(layers), reversed(inputs), strict=True
        ):
            np.matmul(values.T, wrong, out=weight)
            wrong.sum(axis=0, out=bias)
            wrong = (wrong @ of.T) * (values > 0)
        return made

    def trained(
        self, w: Vector, rows: tuple[Vector, npt.NDArray[Any]], rng: Rng, *, epochs: int,
        batch: int, rate: float, most: int = 0, part: Any = 1.0, proximal: float = 0.0,
        anchor: Vector | None = None, correction: Any = 0.0,
    ) -> Vector:  # fmt: skip
        """Return the weights after epochs, or `most` steps, of batches in an order that is drawn.

        A step goes by `part` (g + `proximal` (w - `anchor`) + `correction`).
        """
        (x, y), w, made = rows, w.copy(), 0
        for _ in range(epochs):
            order = rng.permutation(len(y))
            for at in range(0, len(y), batch):
                if most and made >= most:
                    return w
                some = order[at : at + batch]
                step = self.gradient(w, x[some], y[some]) + correction
                if proximal:
                    step += proximal * (w - anchor)
                w -= rate * part * step
                made += 1
        return w


def mean(vectors: Sequence[Vector], weights: Sequence[float] | None = None) -> Vector:
    """Return the mean, by weights where they are given."""
    return np.asarray(np.average(np.stack(vectors), axis=0, weights=weights))


def start_of(forward: ModelProto) -> Vector:
    """Return the weights that a model begins with, float64."""
    tensors = [np.ravel(to_array(each)) for each in forward.graph.initializer]
    return np.concatenate(tensors).astype(np.float64)
