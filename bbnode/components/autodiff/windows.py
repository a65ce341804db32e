"""Sliding windows of Conv and the pools: where they stand, as numbers.

Rule: what depends on sizes is worked out here, while the graph is written, so that no gradient
graph computes geometry. Only the batch may be symbolic where a size matters.

Output size and automatic padding are those of ONNX's operator pages (Conv, AveragePool).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bbnode.components.autodiff.table import VjpContext


@dataclass(frozen=True, slots=True, kw_only=True)
class Windows:
    """One entry per spatial axis.

    Attributes:
        sizes: of the input; None where nothing here needs them.
        kernel, strides, dilations: of the windows.
        before, after: padding.
    """

    sizes: tuple[int, ...] | None
    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    before: tuple[int, ...]
    after: tuple[int, ...]

    @property
    def pads(self) -> list[int]:
        """As ONNX writes them: all beginnings, then all ends."""
        return [*self.before, *self.after]

    def slack(self) -> list[int]:
        """Padded positions behind the last window, per axis; less than the stride."""
        if all(stride == 1 for stride in self.strides):
            return [0] * len(self.kernel)
        return [
            (size + self.before[i] + self.after[i] - self._extent(i)) % self.strides[i]
            for i, size in enumerate(self.sizes or ())
        ]

    def counts(self) -> npt.NDArray[np.int64]:
        """How many positions of each window are no padding, one array axis per spatial axis."""
        total = np.ones((), np.int64)
        for i, size in enumerate(self.sizes or ()):
            room = size + self.before[i] + self.after[i] - self._extent(i)
            starts = np.arange(room // self.strides[i] + 1) * self.strides[i] - self.before[i]
            steps = np.arange(self.kernel[i]) * self.dilations[i]
            at = starts[:, None] + steps
            inside = ((at >= 0) & (at < size)).sum(axis=1)
            total = np.multiply.outer(total, inside)
        return total

    def _extent(self, axis: int) -> int:
        return self.dilations[axis] * (self.kernel[axis] - 1) + 1


def read_windows(ctx: VjpContext, kernel: Sequence[int], *, need_sizes: bool = False) -> Windows:
    """The windows of a node over its input 0; an error where a size is needed and not known."""
    count = len(kernel)
    ones = [1] * count
    strides = tuple(ctx.attribute("strides", ones))
    dilations = tuple(ctx.attribute("dilations", ones))
    auto = ctx.attribute("auto_pad", "NOTSET")
    same = auto in ("SAME_UPPER", "SAME_LOWER")
    sizes = None
    if need_sizes or same or any(stride != 1 for stride in strides):
        sizes = spatial_sizes(ctx, ctx.inputs[0])
    if same and sizes is not None:
        before, after = [], []
        for size, k, stride, dilation in zip(sizes, kernel, strides, dilations, strict=True):
            extent = dilation * (k - 1) + 1
            pad = max((-(-size // stride) - 1) * stride + extent - size, 0)
            first = pad // 2 if auto == "SAME_UPPER" else pad - pad // 2
            before.append(first)
            after.append(pad - first)
    else:
        pads = [0] * (2 * count) if auto == "VALID" else ctx.attribute("pads", [0] * (2 * count))
        before, after = list(pads[:count]), list(pads[count:])
    return Windows(
        sizes=sizes,
        kernel=tuple(kernel),
        strides=strides,
        dilations=dilations,
        before=tuple(before),
        after=tuple(after),
    )


def spatial_sizes(ctx: VjpContext, value: str) -> tuple[int, ...]:
    """The sizes of a value behind batch and channels."""
    dims = ctx.type_of(value).dims
    sizes = tuple(dim for dim in (dims or ())[2:] if isinstance(dim, int))
    if dims is None or len(sizes) != len(dims) - 2:
        raise ctx.error(
            f"the spatial sizes of {value!r} are unknown ({dims})",
            "give the graph's input fixed sizes behind batch and channels; the batch may be a "
            "symbol",
        )
    return sizes


def channels(ctx: VjpContext, value: str) -> int:
    """The channels of a value, its second axis."""
    dims = ctx.type_of(value).dims
    if dims is None or len(dims) < 2 or not isinstance(dims[1], int):
        raise ctx.error(
            f"the number of channels of {value!r} is unknown ({dims})",
            "give the graph's input a fixed second size",
        )
    return dims[1]
