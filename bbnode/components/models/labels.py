"""The labels of a batch, as the graphs of a loss take them.

Rule: whatever a graph would take without a word and count wrongly is refused here: a class that
there is not, a shape that ONNX would stretch, fewer labels than examples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from bbnode.components.autodiff.builder import InferredType
from bbnode.components.autodiff.losses import Loss, LossSettings, class_axis
from bbnode.components.errors import ComponentError
from bbnode.ir.values import Composite, Value

Dims = tuple[int | str | None, ...]  # of the output: sizes, or symbols where they are open
Sizes = Mapping[str, int]  # of the symbols among dimensions, as a batch has them


def class_remedy(shape: tuple[int, ...], dtype: str, output: Dims, axis: int) -> str:
    """Return what makes labels that are no class numbers into these.

    Args:
        shape: of the labels, the batch first.
        dtype: numpy's name.
        output: dimensions of the model's output, the batch first.
        axis: of these, that of the classes.
    """
    wanted, classes = output[:axis] + output[axis + 1 :], output[axis]

    def fits(sizes: Dims) -> bool:
        return len(sizes) == len(shape) and all(
            not isinstance(want, int) or want == have
            for want, have in zip(sizes[1:], shape[1:], strict=True)
        )

    if fits(wanted):
        if dtype.startswith("float"):
            return (
                "if they are whole numbers of classes, set label_dtype = 'int64' of the data "
                "source; if they are quantities, compile with loss='mse'"
            )
        return "store the number of the class"
    if isinstance(classes, int) and classes > 1 and fits((*wanted, classes)):
        return (
            f"store the number of the class in place of {classes} numbers of which one is 1 "
            "(argmax); where several may be 1, compile with loss='bce_with_logits'"
        )
    if fits((*wanted, 1)):
        return "leave out the last axis, which has the size 1"
    for other in range(1, len(output)):
        if other != axis and fits(output[:other] + output[other + 1 :]):
            return f"classes are axis {axis} of the output; where they are {other}, set class_axis"
    return "store the number of the class, or compile with loss='mse'"


def negative_remedy(low: int, high: int) -> str:
    """Return what makes labels of which the least is below 0 into class numbers."""
    if low == -100:  # what torch ignores by default
        return "set ignore_index=-100 if it marks what has no class"
    if (low, high) in ((-1, 1), (-1, -1)):
        return "store 0 for -1, or set ignore_index=-1 if it marks what has no class"
    return f"number the classes from 0, or set ignore_index={low} if it marks what has no class"


def apart(target: Value, labels: Sequence[Labels], type_name: str) -> list[Value]:
    """Return the labels of each of several losses: parts of a composite, or of the last axis.

    Classes on an axis that they share with numbers are integers again. Raises ComponentError.
    """
    count = len(labels)
    if isinstance(target, Composite | tuple | list):
        parts = [np.asarray(part) for part in target]
    else:
        array = np.asarray(target)
        split = array.ndim > 1 and array.shape[-1] == count
        parts = [array[..., at] for at in range(count)] if split else []
    if len(parts) != count:
        has = f"{len(parts)} tensors" if parts else f"the shape {list(np.shape(target))}"
        raise ComponentError(
            f"{type_name}: {count} losses have labels of their own (labels_apart), and the labels "
            f"have {has}; give [N, …, {count}], or a composite"
        )
    return [each.of_own_type(part) for each, part in zip(labels, parts, strict=True)]


class Labels:
    """Checks and converts labels for one loss of one model."""

    def __init__(
        self, type_name: str, loss: Loss, settings: LossSettings, output_dims: Dims
    ) -> None:
        self._type_name = type_name
        self._loss = loss
        self._settings = settings
        self._output = output_dims
        self._axis = (
            class_axis(InferredType(0, output_dims), settings) if loss.class_labels else None
        )

    def checked(self, target: Value, sizes: Sizes) -> Value:
        """Return labels as the loss takes them: int64 classes, or float32 like the output.

        Raises:
            ComponentError: the dtype, a value, or the shape is none of this loss's labels.
        """
        array = np.asarray(target)
        if self._axis is not None:
            return self._classes(array, self._axis, sizes)
        return self._values(array, sizes)

    def of_own_type(self, array: npt.NDArray[np.generic]) -> Value:
        """Return classes that stand among floats as integers; other labels as they are."""
        if self._axis is None or array.dtype.kind != "f":
            return array
        whole = np.asarray(array, np.float64)
        return array if (whole % 1 != 0).any() else whole.astype(np.int64)

    def counted(self, target: Value) -> npt.NDArray[np.bool_]:
        """Return for each example True if the loss counts a label of it."""
        array = np.asarray(target)
        counts = np.ones(array.shape, bool)
        if self._axis is not None and array.dtype.kind in "iu":
            counts = np.asarray(counts & (array != self._settings.ignore_index))
            weights = np.asarray(self._settings.class_weights)
            if weights.size:
                counts &= weights[np.clip(array, 0, weights.size - 1)] != 0
        whole = counts.reshape(len(array), -1) if array.ndim else counts.reshape(1, 1)
        return np.asarray(whole.any(axis=1))

    def drawn(self, output: npt.NDArray[Any], seed: int) -> Value:
        """Return made-up labels for an output: of classes that count and are not masked."""
        rng, shape = np.random.default_rng(seed), output.shape
        if self._axis is None:
            return rng.uniform(size=shape).astype(np.float32)
        axis = self._axis
        size = shape[axis] if axis < len(shape) else 1
        known = np.arange(size)
        rest = tuple(at for at in range(len(shape)) if at != axis)
        possible = np.isfinite(output).all(axis=rest) if axis < len(shape) else known == 0
        counted = known[self.counted(known) & possible] if size else known
        picked = rng.choice(counted if counted.size else known, shape[:axis] + shape[axis + 1 :])
        return np.asarray(picked, np.int64)

    def _classes(self, array: npt.NDArray[np.generic], axis: int, sizes: Sizes) -> Value:
        if array.dtype.kind not in "iu":
            remedy = class_remedy(array.shape, array.dtype.name, self._output, axis)
            raise self._refused(f"labels are {array.dtype}; classes are integers from 0; {remedy}")
        self._check_shape(array, self._output[:axis] + self._output[axis + 1 :], sizes, "classes")
        if not array.size:
            return array.astype(np.int64, copy=False)
        ignored = self._settings.ignore_index
        counted = array if ignored is None else array[array != ignored]
        if not counted.size:
            raise self._refused(
                f"all {array.size} labels of a batch are ignore_index ({ignored}), so that it has "
                "no loss; leave such batches out"
            )
        low, high, classes = int(counted.min()), int(counted.max()), self._output[axis]
        if low < 0:
            # ONNX would silently count a negative class from the end.
            remedy = negative_remedy(low, high)
            raise self._refused(f"label {low}; classes are integers from 0; {remedy}")
        if isinstance(classes, int) and high >= classes:
            raise self._refused(
                f"label {high}; the model tells {classes} classes apart, 0 to {classes - 1}"
            )
        weights = self._settings.class_weights
        if weights and not np.asarray(weights)[counted].any():
            raise self._refused(
                "all labels of a batch are classes of the weight 0, so that it has no loss; leave "
                "such batches out, or give the classes a weight"
            )
        return array.astype(np.int64, copy=False)

    def _values(self, array: npt.NDArray[np.generic], sizes: Sizes) -> Value:
        """Return numbers as the output has them; [N] becomes [N, 1] where the output is that."""
        if array.dtype.kind not in "fiub":
            raise self._refused(f"labels are {array.dtype}; {self._loss.name} takes numbers")
        dims = self._output
        if array.ndim == len(dims) - 1 and dims[-1] == 1:
            array = array[..., np.newaxis]
        # ONNX would broadcast [N] against [N, 1] to [N, N].
        self._check_shape(array, dims, sizes, "numbers")
        if self._loss.labels == "probabilities" and array.size:
            low, high = float(array.min()), float(array.max())
            if not 0 <= low <= high <= 1:  # NaN is no probability either
                raise self._refused(
                    f"labels from {low:g} to {high:g}; {self._loss.name} takes probabilities, "
                    "from 0 to 1"
                )
        return array.astype(np.float32, copy=False)

    def _check_shape(
        self,
        array: npt.NDArray[np.generic],
        dims: tuple[int | str | None, ...],
        sizes: Sizes,
        what: str,
    ) -> None:
        known = [sizes.get(dim) if isinstance(dim, str) else dim for dim in dims]
        fits = array.ndim == len(known) and all(
            want is None or have == want for have, want in zip(array.shape, known, strict=True)
        )
        if not fits:
            told = ", ".join("N" if dim is None else str(dim) for dim in known)
            raise self._refused(
                f"labels have the shape {list(array.shape)}, and the model's output takes {what} "
                f"of [{told}]; {self._loss.name} compares the two one by one"
            )

    def _refused(self, why: str) -> ComponentError:
        return ComponentError(f"{self._type_name}: {why}")
