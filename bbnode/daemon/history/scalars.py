"""The numbers among the outputs of a round: its metrics.

Rule: an output that is one number is a metric under its name, and each entry of a Metadata that is
a number or a boolean is one as `<output>.<entry>`. Entries may come from peers: their number, and
the length of their names, are bounded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

import numpy as np

from bbnode.ir.texts import cut_text, printable
from bbnode.ir.values import Metadata, Value

# Bounds of one round.
MAX_METRICS: Final = 128
MAX_METRIC_NAME_BYTES: Final = 128


def scalars_of(output: str, value: Value) -> Iterator[tuple[str, float]]:
    """Yield the metrics in one output, at most MAX_METRICS."""
    name = metric_name(output)
    if isinstance(value, Metadata):
        yield from ((metric_name(f"{name}.{key}"), n) for key, n in numbers_of(value).items())
        return
    number = _number(value)
    if number is not None:
        yield name, number


def metric_order(name: str) -> tuple[bool, bool, str]:
    """Return the sort key of a metric: outputs before entries of Metadata, losses first.

    Outputs of a round come in the order of their computation, which nobody chose.
    """
    return "." in name, not name.endswith("loss"), name


def numbers_of(metadata: Mapping[str, object], most: int = MAX_METRICS) -> dict[str, float]:
    """Return the first entries that are numbers, under printable names."""
    numbers: dict[str, float] = {}
    for key, item in metadata.items():
        number = _number(item)
        if number is not None:
            numbers[metric_name(key)] = number
            if len(numbers) == most:
                break
    return numbers


def metric_name(text: str) -> str:
    """Return a name of bounded length without control characters."""
    return cut_text(printable(text), MAX_METRIC_NAME_BYTES)


def _number(value: object) -> float | None:
    if isinstance(value, np.ndarray | np.generic):
        array = np.asarray(value)
        if array.size != 1 or array.dtype.kind not in "biufV":
            return None
        return float(array.reshape(-1)[0])
    if isinstance(value, bool | int | float):
        try:
            return float(value)
        except OverflowError:
            return None
    return None
