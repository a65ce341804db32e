"""Gradient rules of Conv and of the pools that slide a window.

Rule: data are laid out as ONNX has them, (batch, channels, spatial axes …), with any number of
spatial axes. A convolution's gradients are convolutions again (Dumoulin and Visin, 2016,
arXiv:1603.07285, section 4); where sizes are known, the kernel's is written as matrix products of
the gradient and shifted inputs (Chellapilla et al., 2006, hal-00112631), in the form that ran
fastest in ONNX Runtime for such sizes. What depends on sizes is computed while the graph is
written, so that no gradient graph computes geometry, unless a spatial axis is open: then more is
made than is needed, and cut to the size that the graph meets. Output sizes and automatic padding
are those of ONNX's operator pages (Conv, AveragePool).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
from onnx import helper

from bbnode.components.autodiff.builder import OtherNodes
from bbnode.components.autodiff.rules.moving import scatter_back
from bbnode.components.autodiff.table import VjpContext, vjp

Grads = Sequence[str | None]

# Below so many windows per example, the kernel is read more often than data: one product over the
# whole batch then beats one per example (512 channels at 2 x 2: 4.7 times as fast).
_FEW_WINDOWS = 32
# The same holds of the forward convolution below so many (512 channels at 2 x 2: 3.4 times as
# fast, at 4 x 4 the same), whose product has no copies of the results to sum.
_FEWEST_WINDOWS = 8
# From so many windows per example on, a product per position of the kernel beats one of all that is
# copied side by side (128 channels at 8 x 8: 1.4 times as fast; 256 at 4 x 4: 0.9 times).
_MANY_WINDOWS = 32
_MOST_POSITIONS = 64  # of a kernel written out; each is a few nodes
_THIN, _WIDE = 4, 16  # channels; fewer fill no vector of a product, or only one


@dataclass(frozen=True, slots=True, kw_only=True)
class Windows:
    """The sliding windows of a Conv or a pool, one entry per spatial axis.

    Attributes:
        sizes: of the input; None where they are not known.
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
        """The padding as ONNX writes it: all beginnings, then all ends."""
        return [*self.before, *self.after]

    @property
    def is_open(self) -> bool:
        """True if sizes that are not known tell how many positions no window covers."""
        return self.sizes is None and any(stride != 1 for stride in self.strides)

    def slack(self) -> list[int]:
        """Return the padded positions behind the last window, per axis; less than the stride."""
        if self.sizes is None or all(stride == 1 for stride in self.strides):
            return [0] * len(self.kernel)
        return [
            (size + self.before[i] + self.after[i] - self._extent(i)) % self.strides[i]
            for i, size in enumerate(self.sizes)
        ]

    def rounded_up(self) -> Windows:
        """Return the windows of ceil_mode: the last one may reach beyond the padding.

        One that would begin behind the input is left out, as on AveragePool's operator page.
        """
        after = list(self.after)
        for i, size in enumerate(self.sizes or ()):
            room = size + self.before[i] + self.after[i] - self._extent(i)
            steps = -(-room // self.strides[i])
            if steps * self.strides[i] >= size + self.before[i]:
                steps -= 1
            after[i] = max(after[i] + steps * self.strides[i] - room, 0)
        return replace(self, after=tuple(after))

    def outputs(self) -> tuple[int, ...] | None:
        """Return the number of windows per axis, or None where sizes are not known."""
        if self.sizes is None:
            return None
        return tuple(
            (size + self.before[i] + self.after[i] - self._extent(i)) // self.strides[i] + 1
            for i, size in enumerate(self.sizes)
        )

    def counts(self, padding: Windows | None = None) -> npt.NDArray[np.int64]:
        """Return the number of positions of each window, one axis per spatial axis.

        Counted are those of the input, and those of the padding that `padding` has.
        """
        total = np.ones((), np.int64)
        for i, size in enumerate(self.sizes or ()):
            room = size + self.before[i] + self.after[i] - self._extent(i)
            starts = np.arange(room // self.strides[i] + 1) * self.strides[i] - self.before[i]
            steps = np.arange(self.kernel[i]) * self.dilations[i]
            at = starts[:, None] + steps
            first, last = 0, size
            if padding is not None:
                first, last = -padding.before[i], size + padding.after[i]
            inside = ((at >= first) & (at < last)).sum(axis=1)
            total = np.multiply.outer(total, inside)
        return total

    def _extent(self, axis: int) -> int:
        return self.dilations[axis] * (self.kernel[axis] - 1) + 1


def read_windows(ctx: VjpContext, kernel: Sequence[int], *, need_sizes: bool = False) -> Windows:
    """Return the windows of a node over its input 0.

    Raises GradientRuleError for an unknown size that is needed.
    """
    count = len(kernel)
    ones = [1] * count
    strides = tuple(ctx.attribute("strides", ones))
    dilations = tuple(ctx.attribute("dilations", ones))
    auto = ctx.attribute("auto_pad", "NOTSET")
    same = auto in ("SAME_UPPER", "SAME_LOWER")
    known = _sizes_known(ctx)
    if need_sizes and not known:
        spatial_sizes(ctx, ctx.inputs[0])  # which says what is missing
    sizes = spatial_sizes(ctx, ctx.inputs[0]) if known else None
    if same:
        before, after = [], []
        for i, (k, stride, dilation) in enumerate(zip(kernel, strides, dilations, strict=True)):
            extent = dilation * (k - 1) + 1
            if stride != 1 and sizes is None:
                raise ctx.error(
                    f"auto_pad={auto} with a stride pads by the size, which is open",
                    "give the graph's input fixed sizes behind batch and channels, or pad by "
                    "numbers (pads)",
                )
            size = 1 if sizes is None else sizes[i]  # by a stride of 1 it pads any size alike
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


def _sizes_known(ctx: VjpContext) -> bool:
    dims = ctx.type_of(ctx.inputs[0]).dims
    return dims is not None and all(isinstance(dim, int) for dim in dims[2:])


def spatial_sizes(ctx: VjpContext, value: str) -> tuple[int, ...]:
    """Return the sizes of a value behind batch and channels."""
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
    """Return the number of channels of a value, its second axis."""
    dims = ctx.type_of(value).dims
    if dims is None or len(dims) < 2 or not isinstance(dims[1], int):
        raise ctx.error(
            f"the number of channels of {value!r} is unknown ({dims})",
            "give the graph's input a fixed second size",
        )
    return dims[1]


@vjp("Conv")
def _conv(ctx: VjpContext) -> Grads:
    x, weight = ctx.inputs[:2]
    b = ctx.b
    dims = ctx.type_of(weight).dims
    if dims is None or not all(isinstance(dim, int) for dim in dims):
        raise ctx.error(f"the shape of the kernel {weight!r} is unknown ({dims})")
    shape = [int(dim) for dim in dims if isinstance(dim, int)]
    windows = read_windows(ctx, shape[2:])
    groups = int(ctx.attribute("group", 1))
    grads: list[str | None] = [None, None, None]
    if ctx.wants(0):
        grads[0] = _input_gradient(ctx, weight, windows, groups)
    if ctx.wants(1):
        grads[1] = _kernel_gradient(ctx, x, windows, groups, shape)
    if ctx.wants(2):
        grads[2] = b.op("ReduceSum", ctx.g, b.ints([0, *range(2, len(shape))]), keepdims=0)
    return grads


def _input_gradient(ctx: VjpContext, weight: str, windows: Windows, groups: int) -> str:
    counts = windows.outputs()
    if groups != 1 or counts is None or math.prod(counts) >= _FEW_WINDOWS:
        return spread(ctx, ctx.g, weight, windows, groups)
    b = ctx.b
    swap = [1, 0, *range(2, len(windows.kernel) + 2)]
    grad = b.op("Unsqueeze", b.op("Transpose", ctx.g, perm=swap), b.ints([0]))
    found = spread(ctx, grad, b.op("Unsqueeze", weight, b.ints([2])), _of_batch(windows), 1)
    return b.op("Transpose", b.op("Squeeze", found, b.ints([0])), perm=swap)


def _of_batch(windows: Windows) -> Windows:
    """Return the windows over one example, that has the batch as its first spatial axis.

    No window reaches over that axis.
    """
    return Windows(
        sizes=None if windows.sizes is None else (1, *windows.sizes),
        kernel=(1, *windows.kernel),
        strides=(1, *windows.strides),
        dilations=(1, *windows.dilations),
        before=(0, *windows.before),
        after=(0, *windows.after),
    )


def _reads_turned(windows: Windows) -> bool:
    """Return True if windows are so few that the forward node reads the turned input."""
    counts = windows.outputs()
    return counts is not None and 1 < math.prod(counts) < _FEWEST_WINDOWS


def _turned_input(ctx: VjpContext, windows: Windows) -> str:
    """Return the input with batch and channels exchanged, which the forward node then reads too.

    It is one product over the whole batch.
    """
    b, inputs = ctx.b, ctx.inputs
    swap = [1, 0, *range(2, len(windows.kernel) + 2)]

    def make() -> OtherNodes:
        inner = b.nested()
        turned = inner.op("Transpose", inputs[0], perm=swap)
        flat = _of_batch(windows)
        found = inner.op(
            "Conv",
            inner.op("Unsqueeze", turned, inner.ints([0])),
            inner.op("Unsqueeze", inputs[1], inner.ints([2])),
            *inputs[2:],
            strides=list(flat.strides),
            dilations=list(flat.dilations),
            pads=flat.pads,
            kernel_shape=list(flat.kernel),
        )
        rows = inner.op("Squeeze", found, inner.ints([0]))
        last = helper.make_node("Transpose", [rows], [ctx.y], name=ctx.y, perm=swap)
        b.initializers += inner.initializers
        return OtherNodes((*inner.nodes, last), (turned,))

    (turned,) = ctx.instead(OtherNodes, make).names()
    return turned


def spread(ctx: VjpContext, grad: str, weight: str, windows: Windows, groups: int) -> str:
    """Return, for every position, the weighted gradients of the windows that it is in."""
    b, pads, behind = ctx.b, windows.pads, windows.slack()
    if windows.is_open:
        # As many positions as any size may have behind the last window, and then those there are.
        pads = [*windows.before, *[0] * len(windows.after)]
        behind = [stride - 1 for stride in windows.strides]
    made = b.op(
        "ConvTranspose",
        grad,
        weight,
        strides=list(windows.strides),
        dilations=list(windows.dilations),
        pads=pads,
        # Positions behind the last window are in none; they get zeros.
        output_padding=behind,
        group=groups,
        kernel_shape=list(windows.kernel),
    )
    return _cut_like(ctx, made, ctx.inputs[0], len(windows.kernel)) if windows.is_open else made


def _cut_like(ctx: VjpContext, value: str, like: str, count: int) -> str:
    """Return the beginning of a value along `count` spatial axes, in the sizes of another."""
    b, axes = ctx.b, range(2, count + 2)
    return b.op("Slice", value, b.ints([0] * count), b.op("Shape", like, start=2), b.ints(axes))


def _kernel_gradient(
    ctx: VjpContext, x: str, windows: Windows, groups: int, shape: Sequence[int]
) -> str:
    """Return the gradient of the kernel, whose `shape` is (outputs, inputs of a group, …)."""
    found = windows.outputs()
    if found is not None and groups == shape[0] and shape[1] == 1:
        many = math.prod(found) >= _MANY_WINDOWS
        if many and math.prod(windows.kernel) <= _MOST_POSITIONS:
            return _depthwise_kernel_gradient(ctx, x, windows, found, shape)
    thin = shape[1] < _THIN and any(stride != 1 for stride in windows.strides)
    if groups != 1 or thin or found is None or math.prod(windows.kernel) > _MOST_POSITIONS:
        return _kernel_gradient_by_convolution(ctx, x, windows, groups, shape[1])
    if 1 < shape[1] < _WIDE and not _reads_turned(windows):
        return _thin_kernel_gradient(ctx, x, windows, found, shape)
    b, rank = ctx.b, len(shape)
    # Channels last: what a position of the kernel sees are whole rows then, and a product's right
    # factor as it is.
    axes = range(2, rank)
    if _reads_turned(windows):
        data = b.op("Transpose", _turned_input(ctx, windows), perm=[*axes, 1, 0])
    else:
        data = b.op("Transpose", x, perm=[*axes, 0, 1])
    data = _padded(ctx, data, windows, 0, rank - 2)
    grad = b.op("Flatten", b.op("Transpose", ctx.g, perm=[1, *axes, 0]), axis=1)
    shifted = [
        _seen(ctx, data, windows, found, at, range(rank - 2))
        for at in itertools.product(*map(range, windows.kernel))
    ]
    outer, inner, positions = shape[0], shape[1], len(shifted)
    if positions == 1:
        turned = b.op("MatMul", grad, b.op("Flatten", *shifted, axis=rank - 1))
    elif math.prod(found) < _MANY_WINDOWS:
        stacked = b.op("Concat", *shifted, axis=0)
        product = b.op("MatMul", grad, b.op("Reshape", stacked, b.ints([positions, -1, inner])))
        turned = b.op("Transpose", product, perm=[1, 2, 0])
    else:
        parts = [b.op("MatMul", grad, b.op("Flatten", part, axis=rank - 1)) for part in shifted]
        joined = b.op("Concat", *parts, axis=1)
        apart = b.op("Reshape", joined, b.ints([outer, positions, inner]))
        turned = b.op("Transpose", apart, perm=[0, 2, 1])
    return b.op("Reshape", turned, b.ints(shape))


def _thin_kernel_gradient(
    ctx: VjpContext, x: str, windows: Windows, found: Sequence[int], shape: Sequence[int]
) -> str:
    """Return the kernel's gradient for few channels: all positions but the first axis's at once.

    So that a product has a factor as wide as possible. What such positions see is cut out once, and
    positions along the first spatial axis, which lies outside of the batch, are whole rows of it.
    """
    b, rank = ctx.b, len(shape)
    swap = [1, 2, 0, *range(3, rank)]
    data = _padded(ctx, b.op("Transpose", x, perm=swap), windows, 1, 1)
    data = _padded(ctx, data, windows, 3, rank - 3, first=1)
    grad = b.op("Flatten", b.op("Transpose", ctx.g, perm=swap), axis=1)
    height, inner = windows.kernel[0], shape[1]
    rest = list(itertools.product(*map(range, windows.kernel[1:])))
    parts = [_seen(ctx, data, windows, found, at, range(3, rank), first=1) for at in rest]
    joined = b.op("Concat", *parts, axis=1)
    rows = (windows.sizes or ())[0] + windows.before[0] + windows.after[0]
    apart = b.op("Reshape", joined, b.ints([inner * len(rest), rows, -1]))
    products = [
        b.op("Gemm", grad, b.op("Flatten", _seen(ctx, apart, windows, found, (at,), [1]), axis=1),
             transB=1)
        for at in range(height)
    ]  # fmt: skip
    all_products = b.op("Concat", *products, axis=1)
    apart = b.op("Reshape", all_products, b.ints([shape[0], height, inner, len(rest)]))
    return b.op("Reshape", b.op("Transpose", apart, perm=[0, 2, 1, 3]), b.ints(shape))


def _depthwise_kernel_gradient(
    ctx: VjpContext, x: str, windows: Windows, found: Sequence[int], shape: Sequence[int]
) -> str:
    """Return the kernel's gradient where each channel has a kernel and an output of its own.

    As for few channels, but that the factors of different channels are products of their own. (96
    channels at 32 x 32, a stride of 2: 5.6 times as fast as a convolution by groups.)
    """
    b, rank, (outer, *_) = ctx.b, len(shape), shape
    swap = [1, 2, 0, *range(3, rank)]
    data = _padded(ctx, b.op("Transpose", x, perm=swap), windows, 1, 1)
    data = _padded(ctx, data, windows, 3, rank - 3, first=1)
    grad = b.op("Reshape", b.op("Transpose", ctx.g, perm=swap), b.ints([outer, -1, 1]))
    rest = list(itertools.product(*map(range, windows.kernel[1:])))
    parts = [_seen(ctx, data, windows, found, at, range(3, rank), first=1) for at in rest]
    joined = b.op("Concat", *parts, axis=1) if len(parts) > 1 else parts[0]
    rows = (windows.sizes or ())[0] + windows.before[0] + windows.after[0]
    apart = b.op("Reshape", joined, b.ints([outer, len(rest), rows, -1]))
    flat = b.ints([outer, len(rest), -1])
    products = [
        b.op("MatMul", b.op("Reshape", _seen(ctx, apart, windows, found, (at,), [2]), flat), grad)
        for at in range(windows.kernel[0])
    ]
    turned = b.op("Transpose", b.op("Concat", *products, axis=2), perm=[0, 2, 1])
    return b.op("Reshape", turned, b.ints(shape))


def _padded(
    ctx: VjpContext, x: str, windows: Windows, axis: int, count: int, first: int = 0
) -> str:
    """Return x with the padding of `count` spatial axes, `first` and on, which `axis` begins."""
    before, after = (side[first : first + count] for side in (windows.before, windows.after))
    if not any((*before, *after)):
        return x
    # Of all axes: ONNX Runtime's transpose optimizer reorders pads as if they were.
    rest = len(windows.kernel) + 2 - axis - count
    sides = ([*[0] * axis, *side, *[0] * rest] for side in (before, after))
    return ctx.b.op("Pad", x, ctx.b.ints([*next(sides), *next(sides)]))


def _seen(
    ctx: VjpContext,
    x: str,
    windows: Windows,
    found: Sequence[int],
    at: Sequence[int],
    axes: Sequence[int],
    first: int = 0,
) -> str:
    """Return what all windows have at a position of the kernel, whose spatial axes are `axes`."""
    b = ctx.b
    spatial = range(first, first + len(axes))
    if all(windows.kernel[i] == 1 == windows.strides[i] for i in spatial):
        return x
    starts = [place * windows.dilations[i] for place, i in zip(at, spatial, strict=True)]
    ends = [
        start + (found[i] - 1) * windows.strides[i] + 1
        for start, i in zip(starts, spatial, strict=True)
    ]
    steps = [windows.strides[i] for i in spatial]
    return b.op("Slice", x, b.ints(starts), b.ints(ends), b.ints(axes), b.ints(steps))


def _kernel_gradient_by_convolution(
    ctx: VjpContext, x: str, windows: Windows, groups: int, inner: int
) -> str:
    """Return a convolution of input and gradient, in which batch and channels change places.

    `inner` is the number of input channels of a group. The kernel then slides by what was the
    dilation, and its own entries are as far apart as the windows were.
    """
    b = ctx.b
    rank = len(windows.kernel) + 2
    swap = [1, 0, *range(2, rank)]
    if groups == 1:
        data = b.op("Transpose", x, perm=swap)
    else:
        # (N, G * C, …) to (C, G * N, …): the examples of a group are its input channels.
        batch, space = b.op("Shape", x, start=0, end=1), b.op("Shape", x, start=2)
        apart = b.op("Concat", batch, b.ints([groups, inner]), space, axis=0)
        data = b.op("Reshape", x, apart, allowzero=1)
        data = b.op("Transpose", data, perm=[2, 1, 0, *range(3, rank + 1)])
        rows = b.op("Mul", batch, b.ints([groups]))
        data = b.op("Reshape", data, b.op("Concat", b.ints([inner]), rows, space, axis=0),
                    allowzero=1)  # fmt: skip
    found = b.op(
        "Conv",
        data,
        b.op("Transpose", ctx.g, perm=swap),
        strides=list(windows.dilations),
        dilations=list(windows.strides),
        pads=windows.pads,
        group=groups,
    )
    if windows.is_open or any(windows.slack()):
        # The positions behind the last window make room for entries that no kernel has.
        axes = range(2, rank)
        found = b.op("Slice", found, b.ints([0] * len(axes)), b.ints(windows.kernel), b.ints(axes))
    return b.op("Transpose", found, perm=swap)


@vjp("MaxPool")
def _max_pool(ctx: VjpContext) -> Grads:
    """Return each window's gradient at its maximum, the first one of several."""
    if len(ctx.grads) > 1 and ctx.grads[1] is not None:
        raise ctx.error("its indices have no gradient", "use its first output alone")
    settings = {
        attribute.name: helper.get_attribute_value(attribute)
        for attribute in ctx.node.attribute
        if attribute.name != "storage_order"  # of the indices; here they are row-major
    }
    settings = {k: v.decode() if isinstance(v, bytes) else v for k, v in settings.items()}
    if len(ctx.node.output) > 1:
        indices = ctx.b.emit("MaxPool", [ctx.inputs[0]], 2, **settings)[1]
    else:

        def make() -> OtherNodes:
            # One pool gives both, so the forward node gives the indices too.
            names = [ctx.y, ctx.b.fresh("indices")]
            pool = helper.make_node("MaxPool", [ctx.inputs[0]], names, ctx.y, **settings)
            return OtherNodes((pool,), (names[1],))

        (indices,) = ctx.instead(OtherNodes, make).names()
    return [scatter_back(ctx, indices, ctx.g, ctx.inputs[0])]


@vjp("AveragePool")
def _average_pool(ctx: VjpContext) -> Grads:
    """Return, for each position, an even share of the gradients of the windows that it is in."""
    x = ctx.inputs[0]
    kernel: list[int] = list(ctx.attribute("kernel_shape", []))
    rounds_up = bool(ctx.attribute("ceil_mode", 0))
    padded = read_windows(ctx, kernel, need_sizes=rounds_up)
    windows = padded.rounded_up() if rounds_up else padded
    dtype = helper.tensor_dtype_to_np_dtype(ctx.elem_type(x))
    includes = bool(ctx.attribute("count_include_pad", 0))
    if windows.sizes is not None:
        found = windows.counts(padded if includes else None).astype(dtype)
        counts = ctx.b.constant(found, "counts")
    elif includes or not any(windows.pads):
        counts = ctx.scalar(float(math.prod(kernel)), x)
    else:
        counts = _open_counts(ctx, windows, dtype)
    share = ctx.b.op("Div", ctx.g, counts)
    planes = channels(ctx, x)
    ones = ctx.b.constant(np.ones((planes, 1, *kernel), dtype), "ones")
    return [spread(ctx, share, ones, windows, planes)]


def _open_counts(ctx: VjpContext, windows: Windows, dtype: np.dtype[Any]) -> str:
    """Return how many positions of the input each window has, where sizes are open."""
    b = ctx.b
    kernel = b.constant(np.ones((1, 1, *windows.kernel), dtype), "ones")
    space = b.op("Concat", b.ints([1, 1]), b.op("Shape", ctx.inputs[0], start=2), axis=0)
    return b.op(
        "Conv",
        b.op("Expand", b.scalar(1.0, ctx.elem_type(ctx.inputs[0])), space),
        kernel,
        strides=list(windows.strides),
        dilations=list(windows.dilations),
        pads=windows.pads,
        kernel_shape=list(windows.kernel),
    )
