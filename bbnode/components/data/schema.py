"""Shapes and types of the examples in a data source, without the examples."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TensorSchema:
    """The values of one example.

    Attributes:
        shape: without the axis of examples.
        dtype: numpy's name, "float32".
    """

    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(str(size) for size in self.shape)}]"


@dataclass(frozen=True, kw_only=True)
class DataSchema:
    """Shapes, types and number of the examples of a data source.

    Attributes:
        features, labels: of one example.
        inputs: where an example has several tensors, name and values of each, in their order;
            `features` are then the first of them.
        num_samples: examples in the source, at least 1.
        label_range: least and greatest of integer labels; None for others.
        value_range: least and greatest of labels of other numbers; None where it is not known.
        feature_range: the ids 0, 1, … that features may be, as least and greatest; None for others.
        names: of the columns that the features are made of, in their order, where there are any.
        label_name: of the column of the labels.
        classes: names of the classes 0, 1, …, where the labels were names.
    """

    features: TensorSchema
    labels: TensorSchema
    num_samples: int
    label_range: tuple[int, int] | None = None
    value_range: tuple[float, float] | None = None
    feature_range: tuple[int, int] | None = None
    names: tuple[str, ...] = ()
    label_name: str = ""
    classes: tuple[str, ...] = ()
    inputs: tuple[tuple[str, TensorSchema], ...] = ()

    def __str__(self) -> str:
        labels = str(self.labels)
        if self.label_range is not None:
            labels += f" from {self.label_range[0]} to {self.label_range[1]}"
        named = (f"{name} {values}" for name, values in self.inputs)
        features = ", ".join(named) or f"features {self.features}"
        return f"{self.num_samples} examples: {features}, labels {labels}"
