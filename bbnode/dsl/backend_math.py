"""Arithmetic, linear algebra, comparisons and reductions of `BackendSlot`.

Rule: a method is a typed name for one op of ONNX's schemas; a test holds that the two agree,
argument by argument. Shapes broadcast as numpy's do: axes are matched from the right, and one
of size 1 stretches.
"""

from __future__ import annotations

from bbnode.dsl.backend.catalogue import BackendCore, Ints
from bbnode.dsl.core.graph import Graph
from bbnode.dsl.output import After, Output


class MathOps(BackendCore):
    """Numbers in, numbers out, element by element or along axes."""

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
