"""User stages: passes of the caller's own, once per partition, after the canonical ones.

Rule: a stage sees one partition as a ModelProto of its own (`functions[0]` is the main, then
what it calls) and changes it in place. What it may not do: rename or drop the main, break an
invariant of the seams, or change a shared function differently for two partitions.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from onnx import FunctionProto, ModelProto

from bbnode.compiler.errors import PassInvariantBroken, StageFailed
from bbnode.compiler.function_table import FunctionKey, called_from, is_bootstrap
from bbnode.compiler.seams import Seams
from bbnode.compiler.unit import CompilationUnit
from bbnode.ir import protos


class CompilerStage(Protocol):
    """A pass of the caller's own. `name` is stable; `without_stage(name)` removes it."""

    @property
    def name(self) -> str:
        """How reports and errors call the stage."""

    def run(self, model: ModelProto) -> None:
        """Change one partition's model in place; raise to end the compile."""


def partition_model(unit: CompilationUnit, home: str) -> ModelProto:
    """One partition as a model of its own: main, what it calls, bootstraps, opset imports."""
    main = unit.partitions[home]
    model = ModelProto(ir_version=unit.model.ir_version, producer_name=unit.model.producer_name)
    model.graph.name = main.name
    model.metadata_props.extend(unit.model.metadata_props)
    model.opset_import.extend(unit.model.opset_import)
    bootstraps = [function for function in unit.model.functions if is_bootstrap(function)]
    called = called_from(unit.model, [main, *bootstraps])
    # By key: a protobuf's wrapper, and so its id, lasts only as long as somebody holds it.
    wanted = {protos.function_key(f) for f in (*bootstraps, *called)}
    model.functions.append(main)
    model.functions.extend(f for f in unit.model.functions if protos.function_key(f) in wanted)
    return model


def run_stage(unit: CompilationUnit, stage: CompilerStage) -> None:
    """Run one stage on every partition and take its changes over.

    Raises StageFailed when the stage raises, or changes what partitions share in two ways;
    PassInvariantBroken, naming the stage, when it leaves a malformed program.
    """
    merge = _Merge(unit, stage.name)
    for home, main in list(unit.partitions.items()):
        model = partition_model(unit, home)
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
        Seams().check(CompilationUnit(model=model), stage.name)
        merge.take(home, model)
    merge.apply()


class _Merge:
    """What a stage changed on all partitions, brought back into one unit."""

    def __init__(self, unit: CompilationUnit, stage: str) -> None:
        self._unit = unit
        self._stage = stage
        self._before = _contents(unit.model.functions)
        self._functions: dict[FunctionKey, FunctionProto] = {}
        self._metadata: dict[str, str] = {}

    def take(self, home: str, model: ModelProto) -> None:
        main = model.functions[0]
        self._unit.partitions[home] = main
        for function in model.functions[1:]:
            key = protos.function_key(function)
            if self._before.get(key) == function.SerializeToString():
                continue
            known = self._functions.setdefault(key, function)
            if known is not function and known != function:
                raise self._conflict(main, f"function {function.name!r}")
        before = protos.all_meta(self._unit.model)
        for name, text in protos.all_meta(model).items():
            if before.get(name) != text and self._metadata.setdefault(name, text) != text:
                raise self._conflict(main, f"model metadata {name!r}")

    def apply(self) -> None:
        functions = self._unit.model.functions
        for index, function in enumerate(functions):
            changed = self._functions.pop(protos.function_key(function), None)
            if changed is not None:
                functions[index].CopyFrom(changed)
        functions.extend(self._functions.values())
        for name, text in self._metadata.items():
            protos.set_meta(self._unit.model, name, text)

    def _conflict(self, main: FunctionProto, what: str) -> StageFailed:
        return StageFailed(
            stage=self._stage,
            target=main.name,
            detail=f"it changed {what}, which partitions share, in two ways",
        )


def _contents(functions: Iterable[FunctionProto]) -> dict[FunctionKey, bytes]:
    return {protos.function_key(f): f.SerializeToString() for f in functions}
