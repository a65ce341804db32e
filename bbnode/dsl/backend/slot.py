"""`BackendSlot`: a slot for a backend, which runs ops of `ai.onnx`.

Rule: here is only what a backend slot is made of. What every backend has to run has a named
method; everything else of ONNX's catalogue is there by its name all the same.
"""

from __future__ import annotations

from bbnode.dsl.backend.catalogue import catalogue, method_name
from bbnode.dsl.backend.control import ControlOps
from bbnode.dsl.backend_math import MathOps
from bbnode.dsl.backend_neural import NeuralOps
from bbnode.dsl.backend_tensor import TensorOps

__all__ = ["BackendSlot", "catalogue", "method_name"]


class BackendSlot(MathOps, NeuralOps, TensorOps, ControlOps):
    """Runs `ai.onnx` ops: `compute.mat_mul(g, a, b)`, `compute.softmax(g, x, axis=1)`.

    Every op of the catalogue is a method by its name in snake case (Python's own words take a
    `_` behind: `if_`, `and_`). The ops that every backend has to run have typed, documented
    methods; of the others, attributes go by keyword, optional inputs are None where they are
    left out, and `outputs=n` asks for n outputs where the schema leaves their number open:
    variadic ones, and optional ones, of which none is recorded otherwise. `op` records any of
    them by ONNX's own name, with everything that its schema has.

    ```python
    compute = BackendSlot("compute")
    hidden = compute.relu(g, compute.gemm(g, x, w, b))
    scores = compute.softmax(g, hidden, axis=1)
    best = compute.arg_max(g, scores, axis=1, keepdims=0)  # one without a method of its own
    ```
    """
