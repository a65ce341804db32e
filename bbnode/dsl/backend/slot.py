"""`BackendSlot`: a slot for a backend, which runs ops of `ai.onnx`.

Rule: a method is a typed name for one op of ONNX's schemas; a test compares the two, argument by
argument. Shapes broadcast as in numpy: axes are matched from the right, and an axis of size 1
stretches. Where ONNX takes integers as a tensor (a shape, axes, bounds) a Python list is accepted
too, and recorded as a constant of the slot. Images are [N, C, H, W], and any number of spatial
axes works alike. For an op with several outputs these methods return the first; `op` with
`outputs=n` returns more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from onnx import helper

from bbnode.dsl.backend.catalogue import Ints
from bbnode.dsl.backend.control import ControlOps
from bbnode.dsl.core.attributes import tensor_type
from bbnode.dsl.core.graph import After, Graph, Output, need_tensor_type
from bbnode.dsl.errors import BadArgument
from bbnode.ir import types
from bbnode.ir.types import TypeNode

AutoPad = Literal["NOTSET", "SAME_UPPER", "SAME_LOWER", "VALID"]
Reduction = Literal["none", "add", "mul", "max", "min"]


class BackendSlot(ControlOps):
    """Runs `ai.onnx` ops: `compute.mat_mul(g, a, b)`, `compute.softmax(g, x, axis=1)`.

    Every op of the catalogue is a method, named in snake case (with `_` appended to Python's
    keywords: `if_`, `and_`). The ops that every backend must run have typed, documented methods.
    The others take attributes by keyword and None for omitted optional inputs; `outputs=n` sets
    the number of outputs where the schema leaves it open: for variadic outputs, and for optional
    ones, which are not recorded otherwise. `op` records any op by ONNX's own name, with everything
    that its schema has.

    ```python
    compute = BackendSlot("compute")
    hidden = compute.relu(g, compute.gemm(g, x, w, b))
    scores = compute.softmax(g, hidden, axis=1)
    best = compute.arg_max(g, scores, axis=1, keepdims=0)  # one without a method of its own
    ```
    """

    # --- arithmetic ------------------------------------------------------------------------

    def add(self, g: Graph, a: Output, b: Output, *, after: After = None) -> Output:
        """a + b, broadcast. Any number type, the same on both sides. ONNX `Add`-14."""
        return self._one(g, "Add", a, b, after=after)

    def sub(self, g: Graph, a: Output, b: Output, *, after: After = None) -> Output:
        """a - b, broadcast. Any number type, the same on both sides. ONNX `Sub`-14."""
        return self._one(g, "Sub", a, b, after=after)

    def mul(self, g: Graph, a: Output, b: Output, *, after: After = None) -> Output:
        """a · b element by element, broadcast. Any number type, the same on both. ONNX `Mul`-14."""
        return self._one(g, "Mul", a, b, after=after)

    def div(self, g: Graph, a: Output, b: Output, *, after: After = None) -> Output:
        """a / b, broadcast; whole numbers are cut towards zero. Any number type. ONNX `Div`-14."""
        return self._one(g, "Div", a, b, after=after)

    def neg(self, g: Graph, x: Output, *, after: After = None) -> Output:
        """-x, of x's shape. Signed number types. ONNX `Neg`-13."""
        return self._one(g, "Neg", x, after=after)

    def abs(self, g: Graph, x: Output, *, after: After = None) -> Output:
        """|x|, of x's shape. Any number type. ONNX `Abs`-13."""
        return self._one(g, "Abs", x, after=after)

    def sqrt(self, g: Graph, x: Output, *, after: After = None) -> Output:
        """Square root, of x's shape; NaN below 0. Float types. ONNX `Sqrt`-13."""
        return self._one(g, "Sqrt", x, after=after)

    def exp(self, g: Graph, x: Output, *, after: After = None) -> Output:
        """e to the x, of x's shape. Float types. ONNX `Exp`-13."""
        return self._one(g, "Exp", x, after=after)

    def log(self, g: Graph, x: Output, *, after: After = None) -> Output:
        """Natural logarithm, of x's shape; NaN below 0. Float types. ONNX `Log`-13."""
        return self._one(g, "Log", x, after=after)

    def pow(self, g: Graph, x: Output, y: Output, *, after: After = None) -> Output:
        """x to the y, broadcast; the result has x's dtype. Number types. ONNX `Pow`-15."""
        return self._one(g, "Pow", x, y, after=after)

    # --- linear algebra --------------------------------------------------------------------

    def mat_mul(self, g: Graph, a: Output, b: Output, *, after: After = None) -> Output:
        """Matrix product, as numpy's `matmul`: [..., M, K] and [..., K, N] to [..., M, N].

        Two vectors [K] give their dot product, []. Float and 32/64-bit integer types, the same
        on both sides. ONNX `MatMul`-13.
        """
        return self._one(g, "MatMul", a, b, after=after)

    matmul = mat_mul  # numpy's spelling

    def gemm(
        self, g: Graph, a: Output, b: Output, c: Output | None = None, *,
        alpha: float = 1.0, beta: float = 1.0,
        transA: bool = False, transB: bool = False,  # noqa: N803  # ONNX's own names
        after: After = None,
    ) -> Output:  # fmt: skip
        """alpha · a·b + beta · c: [M, K] and [K, N] to [M, N]; `c` broadcasts to it.

        `transA`, `transB`: a is [K, M], b is [N, K] (as PyTorch keeps the weights of a linear
        layer). Float and 32/64-bit integer types. ONNX `Gemm`-13.
        """
        return self._one(
            g, "Gemm", a, b, c, after=after, alpha=alpha, beta=beta, transA=transA, transB=transB
        )

    def dot(self, g: Graph, a: Output, b: Output, *, after: After = None) -> Output:
        """Dot products along the last axis: [..., K] and [..., K] to [...]; [K], [K] to [].

        ONNX has no such op: recorded as `Mul`-14 and `ReduceSum`-13 over axis -1. Float and
        32/64-bit integer types, the same on both sides.
        """
        graph = self._graph(g)
        axis = self._ints(graph, "axes", [-1])
        product = self._one(graph, "Mul", a, b, after=after)
        return self._one(graph, "ReduceSum", product, axis, after=after, keepdims=False)

    # --- comparison ------------------------------------------------------------------------

    def equal(self, g: Graph, a: Output, b: Output, *, after: After = None) -> Output:
        """a == b, broadcast; bool. Any type, the same on both sides. ONNX `Equal`-19."""
        return self._one(g, "Equal", a, b, after=after)

    def greater(self, g: Graph, a: Output, b: Output, *, after: After = None) -> Output:
        """a > b, broadcast; bool. Any number type, the same on both sides. ONNX `Greater`-13."""
        return self._one(g, "Greater", a, b, after=after)

    def less(self, g: Graph, a: Output, b: Output, *, after: After = None) -> Output:
        """a < b, broadcast; bool. Any number type, the same on both sides. ONNX `Less`-13."""
        return self._one(g, "Less", a, b, after=after)

    def where(
        self, g: Graph, condition: Output, x: Output, y: Output, *, after: After = None
    ) -> Output:
        """x where the bool `condition` holds and y elsewhere, all broadcast. ONNX `Where`-16.

        Both are computed; `if_` computes only one side.
        """
        return self._one(g, "Where", condition, x, y, after=after)

    # --- reductions ------------------------------------------------------------------------

    def reduce_sum(
        self, g: Graph, x: Output, axes: Ints | None = None, *, keepdims: bool = True,
        noop_with_empty_axes: bool = False, after: After = None,
    ) -> Output:  # fmt: skip
        """Sums over `axes` (all of them when left out). ONNX `ReduceSum`-13.

        The reduced axes stay with size 1, or go with `keepdims=False`. `axes`: int64 [N], or a
        list of whole numbers; none at all reduces everything, or nothing with
        `noop_with_empty_axes`. Number types.
        """
        return self._reduce(g, "ReduceSum", x, axes, keepdims, noop_with_empty_axes, after)

    def reduce_mean(
        self, g: Graph, x: Output, axes: Ints | None = None, *, keepdims: bool = True,
        noop_with_empty_axes: bool = False, after: After = None,
    ) -> Output:  # fmt: skip
        """Means over `axes`; arguments as for `reduce_sum`. ONNX `ReduceMean`-18."""
        return self._reduce(g, "ReduceMean", x, axes, keepdims, noop_with_empty_axes, after)

    def reduce_max(
        self, g: Graph, x: Output, axes: Ints | None = None, *, keepdims: bool = True,
        noop_with_empty_axes: bool = False, after: After = None,
    ) -> Output:  # fmt: skip
        """Maxima over `axes`; arguments as for `reduce_sum`. ONNX `ReduceMax`-20."""
        return self._reduce(g, "ReduceMax", x, axes, keepdims, noop_with_empty_axes, after)

    def reduce_min(
        self, g: Graph, x: Output, axes: Ints | None = None, *, keepdims: bool = True,
        noop_with_empty_axes: bool = False, after: After = None,
    ) -> Output:  # fmt: skip
        """Minima over `axes`; arguments as for `reduce_sum`. ONNX `ReduceMin`-20."""
        return self._reduce(g, "ReduceMin", x, axes, keepdims, noop_with_empty_axes, after)

    def _reduce(
        self, g: Graph, op_type: str, x: Output, axes: Ints | None, keepdims: bool, noop: bool,
        after: After,
    ) -> Output:  # fmt: skip
        along = None if axes is None else self._ints(g, "axes", axes)
        return self._one(
            g, op_type, x, along, after=after, keepdims=keepdims, noop_with_empty_axes=noop
        )

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
        which returns the running mean and variance as well. ONNX `BatchNormalization`-15.
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
        and variance are computed (1 is float32). `op` with `outputs=3` returns these two as
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
        left out). ONNX `Conv`-22.
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
        indices, which `op` with `outputs=2` returns as well. Also 8-bit integers. ONNX
        `MaxPool`-22.
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

        `count_include_pad`: padding counts as zeros. ONNX `AveragePool`-22.
        """
        return self._one(
            g, "AveragePool", x, after=after, kernel_shape=kernel_shape, auto_pad=auto_pad,
            ceil_mode=ceil_mode, count_include_pad=count_include_pad, dilations=dilations,
            pads=pads, strides=strides,
        )  # fmt: skip

    def global_average_pool(self, g: Graph, x: Output, *, after: After = None) -> Output:
        """Mean of each channel: [N, C, H, W] to [N, C, 1, 1]. ONNX `GlobalAveragePool`-22."""
        return self._one(g, "GlobalAveragePool", x, after=after)

    # --- shape -----------------------------------------------------------------------------

    def reshape(
        self, g: Graph, x: Output, shape: Ints, *, allowzero: bool = False, after: After = None
    ) -> Output:
        """x's elements in another shape. ONNX `Reshape`-25.

        `shape`: int64 [N], or a list; one -1 in it is worked out, and a 0 keeps x's size of
        that axis (or means 0 with `allowzero`).
        """
        return self._one(
            g, "Reshape", x, self._ints(g, "shape", shape), after=after, allowzero=allowzero
        )

    def transpose(
        self, g: Graph, x: Output, *, perm: Sequence[int] | None = None, after: After = None
    ) -> Output:
        """x with its axes in the order `perm`; reversed when left out. ONNX `Transpose`-25."""
        return self._one(g, "Transpose", x, after=after, perm=perm)

    def concat(self, g: Graph, *inputs: Output, axis: int, after: After = None) -> Output:
        """The inputs one behind the other along `axis`; one dtype. ONNX `Concat`-13."""
        return self._one(g, "Concat", *inputs, after=after, axis=axis)

    def split(
        self, g: Graph, x: Output, split: Ints | None = None, *, axis: int = 0,
        num_outputs: int | None = None, outputs: int | None = None, after: After = None,
    ) -> tuple[Output, ...]:  # fmt: skip
        """x cut along `axis`, always as a tuple. ONNX `Split`-18.

        Either `num_outputs` equal parts (the last one smaller where it does not go up), or
        parts of the sizes `split`: a list, or an int64 value [N] with `outputs=N`.

        Raises:
            BadArgument: none or both are given, or the number of outputs is not known.
        """
        graph = self._graph(g)
        if (split is None) == (num_outputs is None):
            raise BadArgument("split takes either num_outputs=… or the sizes of the parts")
        sizes = None if split is None else self._ints(graph, "split", split)
        if outputs is None and isinstance(split, list | tuple):
            outputs = len(split)
        attributes = {} if axis == 0 else {"axis": axis}
        if num_outputs is not None:
            attributes["num_outputs"] = num_outputs
        return self._record(graph, "Split", (x, sizes), attributes, after, outputs)

    def slice(
        self, g: Graph, x: Output, starts: Ints, ends: Ints, axes: Ints | None = None,
        steps: Ints | None = None, *, after: After = None,
    ) -> Output:  # fmt: skip
        """`x[start:end:step]` on each of `axes`, as numpy's. ONNX `Slice`-13.

        All four are int64 [N] or lists of one number per axis; `axes` are the first N when left
        out. An end beyond the edge is the edge.
        """
        graph = self._graph(g)
        bounds = [self._ints(graph, "starts", starts), self._ints(graph, "ends", ends)]
        more = [
            None if value is None else self._ints(graph, name, value)
            for name, value in (("axes", axes), ("steps", steps))
        ]
        return self._one(graph, "Slice", x, *bounds, *more, after=after)

    def squeeze(
        self, g: Graph, x: Output, axes: Ints | None = None, *, after: After = None
    ) -> Output:
        """x without `axes`, which have size 1; all such axes when left out. ONNX `Squeeze`-25."""
        along = None if axes is None else self._ints(g, "axes", axes)
        return self._one(g, "Squeeze", x, along, after=after)

    def unsqueeze(self, g: Graph, x: Output, axes: Ints, *, after: After = None) -> Output:
        """x with an axis of size 1 at each of `axes` of the result. ONNX `Unsqueeze`-25."""
        return self._one(g, "Unsqueeze", x, self._ints(g, "axes", axes), after=after)

    def identity(self, g: Graph, x: Output, *, after: After = None) -> Output:
        """x itself. ONNX `Identity`-25."""
        return self._one(g, "Identity", x, after=after)

    def cast(
        self, g: Graph, x: Output, *, to: TypeNode | int, saturate: bool = True,
        after: After = None,
    ) -> Output:  # fmt: skip
        """x in another element type, of x's shape. ONNX `Cast`-25.

        `to`: a tensor type such as `types.TENSOR_INT64`, or an onnx.TensorProto data type.
        `saturate` is about 8-bit floats: beyond their range is their edge.
        """
        graph = self._graph(g)
        attributes: dict[str, Any] = {"to": to}
        if not saturate:
            attributes["saturate"] = 0
        kind = tensor_type(to)
        kinds = None if kind is None else [kind]
        return self._record(graph, "Cast", (x,), attributes, after, kinds=kinds)[0]

    # --- creation --------------------------------------------------------------------------

    def constant(self, g: Graph, value: Any, *, after: After = None) -> Output:
        """A tensor that rides in the backend's graph: an array, a number, or a list of them.

        Python floats become float32, ints int64. `g.constant` is for every other carrier, and
        for tensors that no backend reads. ONNX `Constant`-25.
        """
        return self._one(g, "Constant", after=after, value=value)

    def zeros(
        self, g: Graph, shape: Ints, *, dtype: TypeNode = types.TENSOR_FLOAT, after: After = None
    ) -> Output:
        """Zeros of a shape: int64 [N], or a list. `dtype`: a tensor type.

        ONNX has no such op: recorded as `ConstantOfShape`-25.
        """
        return self._filled(g, 0, shape, dtype, after)

    def ones(
        self, g: Graph, shape: Ints, *, dtype: TypeNode = types.TENSOR_FLOAT, after: After = None
    ) -> Output:
        """Ones of a shape: int64 [N], or a list. `dtype`: a tensor type.

        ONNX has no such op: recorded as `ConstantOfShape`-25.
        """
        return self._filled(g, 1, shape, dtype, after)

    def _filled(self, g: Graph, number: int, shape: Ints, dtype: TypeNode, after: After) -> Output:
        graph = self._graph(g)
        kind = need_tensor_type("dtype", dtype)
        wanted = self._ints(graph, "shape", shape)
        value = np.full(1, number, helper.tensor_dtype_to_np_dtype(kind.elem_type))
        return self._record(
            graph, "ConstantOfShape", (wanted,), {"value": value}, after, kinds=[kind]
        )[0]

    # --- indexing --------------------------------------------------------------------------

    def gather(
        self, g: Graph, x: Output, indices: Output, *, axis: int = 0, after: After = None
    ) -> Output:
        """Slices of x along `axis`, as numpy's `take`; indices int32 or int64. ONNX `Gather`-13.

        The result has the shape of `indices` where x had `axis`.
        """
        return self._one(g, "Gather", x, indices, after=after, axis=axis)

    def scatter(
        self, g: Graph, x: Output, indices: Output, updates: Output, *, axis: int = 0,
        reduction: Reduction = "none", after: After = None,
    ) -> Output:  # fmt: skip
        """x with `updates` written at `indices` along `axis`; of x's shape.

        `indices` (int32 or int64) and `updates` have one shape, with x's rank. `reduction`
        combines what is there with what comes instead of replacing it. ONNX's `Scatter` is
        deprecated: recorded as `ScatterElements`-18.
        """
        return self._one(
            g, "ScatterElements", x, indices, updates, after=after, axis=axis, reduction=reduction
        )
