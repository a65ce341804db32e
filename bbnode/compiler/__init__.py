"""The compiler: a recorded model in, one compiled model with a target per class of peer out.

`Compiler().bind_<role>(slot, Concrete)….compile(model)` is the whole way through; the typed
errors stand in `bbnode.compiler.errors`. The author of a pass derives from `Pass`; the rest of
what a pass works with (`CompilationUnit`, and the graph: `Program`, `Function`, `OpNode`, …) is
importable from here as well.
"""

from __future__ import annotations

from bbnode.compiler import errors
from bbnode.compiler.driver.compiler import Compiler
from bbnode.compiler.driver.pipeline import CANONICAL_PASS_NAMES, all_pass_names, pass_class
from bbnode.compiler.driver.targets import split_targets, target_names
from bbnode.compiler.driver.telemetry import CompileReport, PassReport
from bbnode.compiler.errors import CompileError, ValidationError
from bbnode.compiler.unit import CompilationUnit, CompileOptions, Counters, Pass
from bbnode.ir import keys, types
from bbnode.ir.graph import (
    Attribute,
    Function,
    OpNode,
    Program,
    Subgraph,
    Tensor,
    Value,
    ValueType,
    is_role,
    is_wire,
)

__all__ = [
    "CANONICAL_PASS_NAMES",
    "Attribute",
    "CompilationUnit",
    "CompileError",
    "CompileOptions",
    "CompileReport",
    "Compiler",
    "Counters",
    "Function",
    "OpNode",
    "Pass",
    "PassReport",
    "Program",
    "Subgraph",
    "Tensor",
    "ValidationError",
    "Value",
    "ValueType",
    "all_pass_names",
    "errors",
    "is_role",
    "is_wire",
    "keys",
    "pass_class",
    "split_targets",
    "target_names",
    "types",
]
