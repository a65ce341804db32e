"""From `package.module:Class` to a compiled model.

Rule: the class is instantiated with the caller's keyword arguments, recorded, and compiled
with the bindings that it suggests itself.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import onnx

from bbnode.compiler import Compiler
from bbnode.dsl import Module
from bbnode.ir.class_names import ClassNotLoaded, load_class
from bbnode.ir.errors import DeploymentError


class ModuleNotUsable(DeploymentError):
    """`package.module:Class` does not name a Module that can be built here."""


class ModuleArgsRefused(DeploymentError):
    """The class does not take these keyword arguments."""


def load_module(spec: str, args: Mapping[str, Any]) -> Module:
    """Import and instantiate the Module class that `spec` names.

    The current directory is searched as well, as `python -m` would.
    Raises ModuleNotUsable or ModuleArgsRefused.
    """
    module_name, _, class_name = spec.partition(":")
    if not module_name or not class_name:
        raise ModuleNotUsable(f"{spec!r} does not name a class as package.module:Class")
    if module_name.endswith(".py"):
        module = module_name.removesuffix(".py").replace("/", ".")
        raise ModuleNotUsable(
            f"{spec!r} names a file; name its module, '{module}:{class_name}', and start bbnode "
            "in the directory that holds it"
        )
    try:
        cls = load_class(module_name, class_name, Module)
    except ClassNotLoaded as error:
        raise ModuleNotUsable(f"{spec!r}: {error}") from error
    try:
        inspect.signature(cls).bind(**args)
    except TypeError as error:
        raise ModuleArgsRefused(
            f"{spec!r} can't be made with {dict(args)}: {error}; it takes {inspect.signature(cls)}"
        ) from error
    return cls(**args)


def compile_module(spec: str, args: Mapping[str, Any]) -> onnx.ModelProto:
    """Build and compile the Module that `spec` names; typed errors of DSL and compiler pass."""
    return compile_program(load_module(spec, args))


def compile_program(program: Module) -> onnx.ModelProto:
    """Compile a Module with the component classes that its `bindings()` name."""
    return compiler_for(program).compile(program.build())


def compiler_for(program: Module) -> Compiler:
    """Return a Compiler with the component classes that a Module's `bindings()` name."""
    return Compiler().bind_all(program.bindings())
