"""The compiler: a recorded model in, one compiled model with a target per class of peer out.

Rule: `Compiler().bind_<role>(slot, Concrete)….compile(model)` is the whole way through; the
typed errors stand in `bbnode.compiler.errors`.
"""

from __future__ import annotations

from bbnode.compiler.driver.compiler import Compiler
from bbnode.compiler.driver.pipeline import CANONICAL_PASS_NAMES, all_pass_names, pass_class
from bbnode.compiler.driver.targets import split_targets, target_names
from bbnode.compiler.driver.telemetry import CompileReport, PassReport
from bbnode.compiler.errors import CompileError, ValidationError
from bbnode.compiler.unit import CompilationUnit, CompileOptions, Counters, Pass

__all__ = [
    "CANONICAL_PASS_NAMES",
    "CompileError",
    "CompileReport",
    "Compiler",
    "CompilationUnit",
    "CompileOptions",
    "Counters",
    "Pass",
    "PassReport",
    "ValidationError",
    "all_pass_names",
    "pass_class",
    "split_targets",
    "target_names",
]
