"""Shapes, creation and indexing of tensors, of `BackendSlot`.

Rule: a method is a typed name for one op of ONNX's schemas; a test holds that the two agree,
argument by argument. Where ONNX wants whole numbers as a tensor (a shape, axes, bounds) a
Python list does as well; it is recorded as a constant of the slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from onnx import helper

from bbnode.dsl.backend.catalogue import BackendCore, Ints
from bbnode.dsl.core.attributes import tensor_type
from bbnode.dsl.core.graph import Graph
from bbnode.dsl.errors import BadArgument
from bbnode.dsl.output import After, Output
from bbnode.ir import types
from bbnode.ir.types import TypeNode

Reduction = Literal["none", "add", "mul", "max", "min"]


class TensorOps(BackendCore):
    """Tensors of other shapes, out of nothing, and parts of them. Any dtype unless said."""

    # --- shape -----------------------------------------------------------------------------

    def reshape(
        self, g: Graph, x: Output, shape: Ints, *, allowzero: bool = False, after: After = None
    ) -> Output:
        """x's elements in another shape. ONNX `Reshape`-21.

        `shape`: int64 [N], or a list; one -1 in it is worked out, and a 0 keeps x's size of
        that axis (or means 0 with `allowzero`).
        """
        return self._one(
            g, "Reshape", x, self._ints(g, "shape", shape), after=after, allowzero=allowzero
        )

    def transpose(
        self, g: Graph, x: Output, *, perm: Sequence[int] | None = None, after: After = None
    ) -> Output:
        """x with its axes in the order `perm`; reversed when left out. ONNX `Transpose`-21."""
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
            raise graph.error(
                BadArgument, "split takes either num_outputs=… or the sizes of the parts"
            )
        sizes = None if split is None else self._ints(graph, "split", split)
        if outputs is None and isinstance(split, list | tuple):
            outputs = len(split)
        given = {} if axis == 0 else {"axis": axis}
        if num_outputs is not None:
            given["num_outputs"] = num_outputs
        return self._record(graph, "Split", (x, sizes), given, after, outputs)

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
        """x without `axes`, which have size 1; all such axes when left out. ONNX `Squeeze`-21."""
        along = None if axes is None else self._ints(g, "axes", axes)
        return self._one(g, "Squeeze", x, along, after=after)

    def unsqueeze(self, g: Graph, x: Output, axes: Ints, *, after: After = None) -> Output:
        """x with an axis of size 1 at each of `axes` of the result. ONNX `Unsqueeze`-21."""
        return self._one(g, "Unsqueeze", x, self._ints(g, "axes", axes), after=after)

    def identity(self, g: Graph, x: Output, *, after: After = None) -> Output:
        """x itself. ONNX `Identity`-21."""
        return self._one(g, "Identity", x, after=after)

    def cast(
        self, g: Graph, x: Output, *, to: TypeNode | int, saturate: bool = True,
        after: After = None,
    ) -> Output:  # fmt: skip
        """x in another element type, of x's shape. ONNX `Cast`-21.

        `to`: a tensor type such as `types.TENSOR_INT64`, or an onnx.TensorProto data type.
        `saturate` is about 8-bit floats: beyond their range is their edge.
        """
        graph = self._graph(g)
        told: dict[str, Any] = {"to": to}
        if not saturate:
            told["saturate"] = 0
        kind = tensor_type(to)
        kinds = None if kind is None else [kind]
        return self._record(graph, "Cast", (x,), told, after, kinds=kinds)[0]

    # --- creation --------------------------------------------------------------------------

    def constant(self, g: Graph, value: Any, *, after: After = None) -> Output:
        """A tensor that rides in the backend's graph: an array, a number, or a list of them.

        Python floats become float32, ints int64. `g.constant` is for every other carrier, and
        for tensors that no backend reads. ONNX `Constant`-21.
        """
        return self._one(g, "Constant", after=after, value=value)

    def zeros(
        self, g: Graph, shape: Ints, *, dtype: TypeNode = types.TENSOR_FLOAT, after: After = None
    ) -> Output:
        """Zeros of a shape: int64 [N], or a list. `dtype`: a tensor type.

        ONNX has no such op: recorded as `ConstantOfShape`-21.
        """
        return self._filled(g, 0, shape, dtype, after)

    def ones(
        self, g: Graph, shape: Ints, *, dtype: TypeNode = types.TENSOR_FLOAT, after: After = None
    ) -> Output:
        """Ones of a shape: int64 [N], or a list. `dtype`: a tensor type.

        ONNX has no such op: recorded as `ConstantOfShape`-21.
        """
        return self._filled(g, 1, shape, dtype, after)

    def _filled(self, g: Graph, number: int, shape: Ints, dtype: TypeNode, after: After) -> Output:
        graph = self._graph(g)
        kind = tensor_type(dtype)
        if kind is None:
            raise graph.error(
                BadArgument,
                f"dtype={dtype!r:.60} is no tensor type; use one of bbnode.dsl.types, e.g. "
                "types.TENSOR_FLOAT",
            )
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
