"""Activations, normalization, convolution and pooling of `BackendSlot`.

Rule: a method is a typed name for one op of ONNX's schemas; a test holds that the two agree,
argument by argument. Float types throughout; images are [N, C, H, W], and any number of
spatial axes works alike. Of an op with further outputs these methods give the first; `op`
with `outputs=n` gives more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from bbnode.dsl.backend.catalogue import BackendCore
from bbnode.dsl.core.graph import Graph
from bbnode.dsl.output import After, Output

AutoPad = Literal["NOTSET", "SAME_UPPER", "SAME_LOWER", "VALID"]


class NeuralOps(BackendCore):
    """What layers of networks are made of."""

    # --- activations -----------------------------------------------------------------------

    def relu(self, g: Graph, x: Output, *, after: After = None) -> Output:
        """max(x, 0), of x's shape. ONNX `Relu`-14."""
        return self._one(g, "Relu", x, after=after)

    def sigmoid(self, g: Graph, x: Output, *, after: After = None) -> Output:
        """1 / (1 + e^-x), of x's shape. ONNX `Sigmoid`-13."""
        return self._one(g, "Sigmoid", x, after=after)

    def tanh(self, g: Graph, x: Output, *, after: After = None) -> Output:
        """Hyperbolic tangent, of x's shape. ONNX `Tanh`-13."""
        return self._one(g, "Tanh", x, after=after)

    def softmax(self, g: Graph, x: Output, *, axis: int = -1, after: After = None) -> Output:
        """e^x divided by its sum along `axis`, of x's shape. ONNX `Softmax`-13."""
        return self._one(g, "Softmax", x, after=after, axis=axis)

    def leaky_relu(
        self, g: Graph, x: Output, *, alpha: float = 0.01, after: After = None
    ) -> Output:
        """x where it is positive and alpha · x elsewhere, of x's shape. ONNX `LeakyRelu`-16."""
        return self._one(g, "LeakyRelu", x, after=after, alpha=alpha)

    def gelu(
        self, g: Graph, x: Output, *, approximate: Literal["none", "tanh"] = "none",
        after: After = None,
    ) -> Output:  # fmt: skip
        """x times the normal distribution's share below x, of x's shape. ONNX `Gelu`-20.

        `approximate="tanh"` takes the usual approximation by tanh instead of erf.
        """
        return self._one(g, "Gelu", x, after=after, approximate=approximate)

    # --- normalization ---------------------------------------------------------------------

    def batch_normalization(
        self, g: Graph, x: Output, scale: Output, bias: Output, mean: Output, variance: Output, *,
        epsilon: float = 1e-5, momentum: float = 0.9, after: After = None,
    ) -> Output:  # fmt: skip
        """(x - mean) / sqrt(variance + epsilon) · scale + bias, per channel of x: [N, C, ...].

        `scale`, `bias`, `mean`, `variance`: [C]. This is the form for inference, where `momentum`
        means nothing; training is `op(g, "BatchNormalization", …, training_mode=1, outputs=3)`,
        which gives the running mean and variance as well. ONNX `BatchNormalization`-15.
        """
        return self._one(
            g, "BatchNormalization", x, scale, bias, mean, variance,
            after=after, epsilon=epsilon, momentum=momentum,
        )  # fmt: skip

    def layer_normalization(
        self, g: Graph, x: Output, scale: Output, bias: Output | None = None, *,
        axis: int = -1, epsilon: float = 1e-5, stash_type: int = 1, after: After = None,
    ) -> Output:  # fmt: skip
        """x normalized over its axes from `axis` on, times scale plus bias; of x's shape.

        `scale`, `bias`: of the shape of those axes. `stash_type`: element type in which mean
        and variance are computed (1 is float32). `op` with `outputs=3` gives these two as
        well. ONNX `LayerNormalization`-17.
        """
        return self._one(
            g, "LayerNormalization", x, scale, bias,
            after=after, axis=axis, epsilon=epsilon, stash_type=stash_type,
        )  # fmt: skip

    # --- convolution and pooling -----------------------------------------------------------

    def conv(
        self, g: Graph, x: Output, weights: Output, bias: Output | None = None, *,
        auto_pad: AutoPad = "NOTSET", dilations: Sequence[int] | None = None, group: int = 1,
        kernel_shape: Sequence[int] | None = None, pads: Sequence[int] | None = None,
        strides: Sequence[int] | None = None, after: After = None,
    ) -> Output:  # fmt: skip
        """Convolution: [N, C, H, W] with weights [M, C / group, kH, kW], bias [M], to [N, M, …].

        One number per spatial axis in `kernel_shape` (taken from the weights when left out),
        `strides` and `dilations` (1 when left out); `pads` has all begins, then all ends (0 when
        left out). ONNX `Conv`-11.
        """
        return self._one(
            g, "Conv", x, weights, bias, after=after, auto_pad=auto_pad, dilations=dilations,
            group=group, kernel_shape=kernel_shape, pads=pads, strides=strides,
        )  # fmt: skip

    def max_pool(
        self, g: Graph, x: Output, *, kernel_shape: Sequence[int], auto_pad: AutoPad = "NOTSET",
        ceil_mode: bool = False, dilations: Sequence[int] | None = None,
        pads: Sequence[int] | None = None, storage_order: int = 0,
        strides: Sequence[int] | None = None, after: After = None,
    ) -> Output:  # fmt: skip
        """Largest value of each window: [N, C, H, W] to [N, C, …]; arguments as for `conv`.

        `ceil_mode`: windows that reach over the edge count. `storage_order` is that of the
        indices, which `op` with `outputs=2` gives as well. Also 8-bit integers. ONNX
        `MaxPool`-12.
        """
        return self._one(
            g, "MaxPool", x, after=after, kernel_shape=kernel_shape, auto_pad=auto_pad,
            ceil_mode=ceil_mode, dilations=dilations, pads=pads, storage_order=storage_order,
            strides=strides,
        )  # fmt: skip

    def average_pool(
        self, g: Graph, x: Output, *, kernel_shape: Sequence[int], auto_pad: AutoPad = "NOTSET",
        ceil_mode: bool = False, count_include_pad: bool = False,
        dilations: Sequence[int] | None = None, pads: Sequence[int] | None = None,
        strides: Sequence[int] | None = None, after: After = None,
    ) -> Output:  # fmt: skip
        """Mean of each window: [N, C, H, W] to [N, C, …]; arguments as for `max_pool`.

        `count_include_pad`: padding counts as zeros. ONNX `AveragePool`-19.
        """
        return self._one(
            g, "AveragePool", x, after=after, kernel_shape=kernel_shape, auto_pad=auto_pad,
            ceil_mode=ceil_mode, count_include_pad=count_include_pad, dilations=dilations,
            pads=pads, strides=strides,
        )  # fmt: skip

    def global_average_pool(self, g: Graph, x: Output, *, after: After = None) -> Output:
        """Mean of each channel: [N, C, H, W] to [N, C, 1, 1]. ONNX `GlobalAveragePool`-1."""
        return self._one(g, "GlobalAveragePool", x, after=after)
