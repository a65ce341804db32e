"""From `package.module:Class`, or `file.py:Class`, to a compiled model.

Rule: the class is instantiated with the caller's keyword arguments, recorded, and compiled
with the bindings that it suggests itself.
"""

from __future__ import annotations

import inspect
import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnx

from bbnode.compiler import Compiler
from bbnode.components.data.shared_schema import SchemaRefused, SharedSchema
from bbnode.dsl import Module
from bbnode.engine.errors import did_you_mean
from bbnode.ir import keys
from bbnode.ir.authors_code import authors_code
from bbnode.ir.class_names import ClassNotLoaded, load_class, load_from_file
from bbnode.ir.errors import DeploymentError

PROJECT_FILE = "pyproject.toml"
SCHEMA_TABLE = "tool.bbnode.schema"
# Arguments that a message lists if a class has many.
_SHOWN_ARGUMENTS = 12


class ModuleNotUsable(DeploymentError):
    """`package.module:Class` does not name a Module that can be built here."""


class ModuleArgsRefused(DeploymentError):
    """The class does not take these keyword arguments."""


def load_module(spec: str, args: Mapping[str, Any]) -> Module:
    """Import and instantiate the Module class that `spec` names.

    `spec` is `package.module:Class`, whose module may also be in the current directory (as
    `python -m` would find it), or `folder/file.py:Class`; the class of a file with exactly one
    Module may be left out. Raises ModuleNotUsable or ModuleArgsRefused.
    """
    place, _, class_name = spec.rpartition(":") if spec[-3:] != ".py" else (spec, "", "")
    is_file = place.endswith(".py")
    if not place or not (class_name or is_file):
        raise ModuleNotUsable(
            f"{spec!r} does not name a class, as package.module:Class or folder/file.py:Class do"
        )
    try:
        if is_file:
            cls = load_from_file(Path(place), class_name, Module)
        else:
            cls = load_class(place, class_name, Module)
    except ClassNotLoaded as error:
        raise ModuleNotUsable(f"{spec!r}: {error}") from error
    fault = argument_fault(cls, args)
    if fault:
        raise ModuleArgsRefused(f"{spec!r}: {fault}")
    with authors_code(f"{spec!r} can't be made"):
        return cls(**args)


def argument_fault(cls: type, args: Mapping[str, Any]) -> str:
    """Return why a class can't be called with these keyword arguments; "" if it can."""
    parameters = list(inspect.signature(cls).parameters.values())
    kinds = {each.kind for each in parameters}
    named = {
        each.name: each
        for each in parameters
        if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
    }
    unknown = next((name for name in args if name not in named), None)
    if unknown is not None and inspect.Parameter.VAR_KEYWORD not in kinds:
        near = did_you_mean(unknown, named)
        has = f"; it has: {', '.join(list(named)[:_SHOWN_ARGUMENTS])}" if not near else ""
        more = ", …" if has and len(named) > _SHOWN_ARGUMENTS else ""
        return f"there is no argument {unknown!r}{near}{has}{more}"
    missing = [n for n, each in named.items() if each.default is each.empty and n not in args]
    return f"it needs {', '.join(missing)}" if missing else ""


def compile_module(spec: str, args: Mapping[str, Any]) -> onnx.ModelProto:
    """Build and compile the Module that `spec` names; typed errors of DSL and compiler pass."""
    return compile_program(load_module(spec, args))


def compile_program(program: Module) -> onnx.ModelProto:
    """Compile a Module with the component classes that its `bindings()` name."""
    return compiler_for(program).compile(record(program))


def compiler_for(program: Module) -> Compiler:
    """Return a Compiler with the component classes that a Module's `bindings()` name."""
    with authors_code(f"the bindings() of {type(program).__name__}"):
        bindings = program.bindings()
    return Compiler().bind_all(bindings)


def record(program: Module) -> onnx.ModelProto:
    """Return the model that a Module records, with the schemas of its project's pyproject.toml.

    Raises AuthorsCodeFailed for errors of the author's code, and SchemaRefused.
    """
    with authors_code(f"the Module {type(program).__name__}"):
        recorded = program.build()
    present = {entry.key for entry in recorded.metadata_props}
    for slot, schema in project_schemas(program).items():
        if keys.SCHEMA_PREFIX + slot not in present:  # the schemas of the class take precedence
            text = json.dumps(schema, sort_keys=True, separators=(",", ":"))
            recorded.metadata_props.add(key=keys.SCHEMA_PREFIX + slot, value=text)
    check_schemas(recorded)
    return recorded


def check_schemas(recorded: onnx.ModelProto) -> None:
    """Raise SchemaRefused unless all schemas of a recorded program are valid."""
    for entry in recorded.metadata_props:
        if entry.key.startswith(keys.SCHEMA_PREFIX):
            slot = entry.key.removeprefix(keys.SCHEMA_PREFIX)
            try:
                SharedSchema.declared(json.loads(entry.value))
            except SchemaRefused as error:
                raise SchemaRefused(f"schema of slot {slot!r}: {error}") from error


def project_schemas(program: Module) -> dict[str, Any]:
    """Return the tables `[tool.bbnode.schema.SLOT]` of a program's project.

    Its pyproject.toml is the one above the file of the class; for a program that comes with bbnode,
    that of the current directory. Raises SchemaRefused.
    """
    file = project_file(type(program))
    if file is None:
        return {}
    try:
        table: Any = tomllib.loads(file.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise SchemaRefused(f"{file}: {error}") from error
    for name in SCHEMA_TABLE.split("."):
        table = table.get(name, {}) if isinstance(table, dict) else {}
    if not isinstance(table, dict) or not all(isinstance(e, dict) for e in table.values()):
        raise SchemaRefused(
            f"{file}: [{SCHEMA_TABLE}] has to have a table for each slot: [{SCHEMA_TABLE}.data]"
        )
    return dict(table)


def project_file(cls: type[Module]) -> Path | None:
    """Return the pyproject.toml of a program's project; None where it has none."""
    own = Path.cwd() / PROJECT_FILE
    if cls.__module__.partition(".")[0] != __package__.partition(".")[0]:
        try:
            place = Path(inspect.getfile(cls)).resolve()
        except (OSError, TypeError):  # a class typed into an interpreter has no file
            place = own
        for folder in place.parents:
            if (folder / PROJECT_FILE).is_file():
                return folder / PROJECT_FILE
        return None
    return own if own.is_file() else None
