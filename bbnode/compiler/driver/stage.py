"""User stages: passes of the caller's own, once per partition, after the canonical ones.

Rule: a stage sees one partition as a ModelProto of its own (`functions[0]` is the main, then
what it calls) and changes it in place. What it may not do: rename or drop the main, break an
invariant of the seams, or change a shared function differently for two partitions.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from onnx import FunctionProto, ModelProto

from bbnode.compiler.analysis.functions import called_from, is_bootstrap
from bbnode.compiler.driver import seams
from bbnode.compiler.errors import PassInvariantBroken, StageFailed
from bbnode.compiler.unit import CompilationUnit
from bbnode.ir.bounds import OutOfBounds
from bbnode.ir.graph import Function, FunctionKey, Program
from bbnode.ir.onnx_file import model_of, program_of


class CompilerStage(Protocol):
    """A pass of the caller's own. `name` is stable; `without_stage(name)` removes it."""

    @property
    def name(self) -> str:
        """The name in reports and errors."""

    def run(self, model: ModelProto) -> None:
        """Change one partition's model in place; raise to end the compile."""


def partition_model(unit: CompilationUnit, home: str) -> ModelProto:
    """One partition as a model of its own: main, what it calls, bootstraps, opset imports."""
    main = unit.partitions[home]
    functions = unit.program.functions
    bootstraps = [function for function in functions if is_bootstrap(function)]
    wanted = {*bootstraps, *called_from(unit.program, [main, *bootstraps])}
    model = model_of(unit.program, [main, *(f for f in functions if f in wanted)])
    model.graph.name = main.name
    return model


def run_stage(unit: CompilationUnit, stage: CompilerStage) -> None:
    """Run one stage on every partition and take its changes over.

    Raises StageFailed when the stage raises, or changes what partitions share in two ways;
    PassInvariantBroken, naming the stage, when it leaves a malformed program.
    """
    merge = _Merge(unit, stage.name)
    for home, main in list(unit.partitions.items()):
        model = partition_model(unit, home)
        before = _contents(model.functions[1:])
        try:
            stage.run(model)
        # A stage is the caller's code: whatever it raises becomes one typed error that names it.
        except Exception as error:
            raise StageFailed(
                stage=stage.name, target=main.name, detail=f"{type(error).__name__}: {error}"
            ) from error
        if not model.functions or model.functions[0].name != main.name:
            raise PassInvariantBroken(
                pass_name=stage.name, detail=f"the main of target {main.name!r} has to stay first"
            )
        try:
            program = program_of(model)
        except OutOfBounds as error:
            raise PassInvariantBroken(
                pass_name=stage.name, detail=f"it left what no program needs: {error}"
            ) from error
        seams.check(CompilationUnit(program=program), stage.name)
        changed = {
            key: content
            for key, content in _contents(model.functions[1:]).items()
            if before.get(key) != content
        }
        merge.take(home, program, changed)
    merge.apply()


class _Merge:
    """Changes of a stage on all partitions, brought back into one unit."""

    def __init__(self, unit: CompilationUnit, stage: str) -> None:
        self._unit = unit
        self._stage = stage
        self._functions: dict[FunctionKey, Function] = {}
        self._contents: dict[FunctionKey, bytes] = {}
        self._metadata: dict[str, str] = {}

    def take(self, home: str, program: Program, changed: dict[FunctionKey, bytes]) -> None:
        """Take one partition; `changed` is what the stage left of the functions it changed."""
        main = program.functions[0]
        self._unit.partitions[home] = main
        for function in program.functions[1:]:
            key = function.key
            if key in changed:
                if self._contents.setdefault(key, changed[key]) != changed[key]:
                    raise self._conflict(main, f"function {function.name!r}")
                self._functions[key] = function
        before = self._unit.program.metadata
        for name, text in program.metadata.items():
            if before.get(name) != text and self._metadata.setdefault(name, text) != text:
                raise self._conflict(main, f"model metadata {name!r}")

    def apply(self) -> None:
        """Put what changed into the unit's program."""
        program = self._unit.program
        fresh = self._functions
        program.functions = [fresh.pop(f.key, f) for f in program.functions]
        program.functions.extend(fresh.values())
        program.metadata.update(self._metadata)

    def _conflict(self, main: Function, what: str) -> StageFailed:
        return StageFailed(
            stage=self._stage,
            target=main.name,
            detail=f"it changed {what}, which partitions share, in two ways",
        )


def _contents(functions: Iterable[FunctionProto]) -> dict[FunctionKey, bytes]:
    return {
        (f.domain, f.name, f.overload): f.SerializeToString(deterministic=True) for f in functions
    }
