"""The program of a testbed: a Module that is compiled now, or an artifact.

Rule: everything that the nodes need to run it (classes, their exchanges, the modules of its
components) is read from the compiled program, never asked for.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bbnode.components.contracts import ProtocolComponent, inbound_ops
from bbnode.components.registry import ENTRY_POINT_GROUP, UnknownComponentType, component_class
from bbnode.components.settings import local_settings, stored_settings
from bbnode.daemon import paths
from bbnode.daemon.artifacts.artifact import Artifact, as_graph, load_artifact, parse_artifact
from bbnode.daemon.artifacts.inspect import mains_of, wire_edges
from bbnode.engine.planning.program import SlotPlan, plan_program
from bbnode.ir import keys, plugins
from bbnode.ir.errors import DeploymentError
from bbnode.ir.graph import Function
from bbnode.ir.types import TRIGGER, TypeNode
from bbnode.ops.custom import custom_ops_of

ARTIFACT_SUFFIX = ".onnx"
# The role whose components may send by themselves; the program does not say to whom.
_PROTOCOL = "Protocol"
# Hooks of components that send; one that never sends has no use for them.
_HOOKS_OF_SENDERS = ("on_timer", "on_answer", "on_no_answer")


class ArtifactTakesNoArguments(DeploymentError):
    """Arguments were given for a program that is compiled already."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayedClass:
    """A class of peer of a program."""

    name: str
    inputs: Mapping[str, TypeNode | None]
    outputs: tuple[str, ...]
    slots: Mapping[str, SlotPlan]
    parts: tuple[
        tuple[str, ...], ...
    ] = ()  # its inputs in parts, each of which starts an execution

    @property
    def starts_with_triggers(self) -> bool:
        """True if an execution of it needs only triggers, and at least one."""
        return bool(self.inputs) and all(kind == TRIGGER for kind in self.inputs.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnableProgram:
    """A compiled program, with everything that its nodes need."""

    artifact: Artifact
    # The bytes of the artifact, or its file.
    source: bytes | Path
    # The author's home class first, the others in the artifact's order.
    classes: Mapping[str, PlayedClass]
    # Pairs of classes that exchange messages; also of one class with itself.
    talks: frozenset[frozenset[str]]
    # Modules that nodes import for components of the program, and the folders to find them in.
    modules: tuple[str, ...] = ()
    python_path: tuple[str, ...] = ()
    # Settings of slots that name files or the like of this machine: the program was compiled here,
    # so they are the user's own.
    own_settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def is_artifact(self) -> bool:
        """True for a program that was compiled earlier."""
        return isinstance(self.source, Path)

    @property
    def home(self) -> str:
        """The first class."""
        return next(iter(self.classes))

    def save(self, path: Path) -> None:
        """Write the artifact to a file. Raises StorageError."""
        if isinstance(self.source, bytes):
            paths.write_atomically(path, self.source, mode=0o644)
            return
        try:
            if not (path.exists() and path.samefile(self.source)):
                shutil.copyfile(self.source, path)
        except OSError as error:
            raise paths.StorageError(f"{path}: cannot be written: {error.strerror}") from error


def find_program(spec: str, args: Mapping[str, Any]) -> RunnableProgram:
    """Return the program that `spec` names: an artifact, or a Module class to compile.

    Raises the errors of reading an artifact, of importing, recording and compiling a Module, and
    ArtifactTakesNoArguments.
    """
    if spec.endswith(ARTIFACT_SUFFIX):
        if args:
            raise ArtifactTakesNoArguments(
                f"{spec} is compiled already: arguments ({', '.join(args)}) go with a class, as "
                "in program.py:Class"
            )
        path = Path(spec).expanduser()
        return describe_program(load_artifact(path), path)
    from bbnode.daemon.artifacts.artifact import serialize
    from bbnode.daemon.artifacts.build import compile_program, load_module

    module = load_module(spec, args)
    data = serialize(compile_program(module))
    return describe_program(
        parse_artifact(data, spec), data, home=module.home, author=type(module).__module__
    )


def describe_program(
    artifact: Artifact, source: bytes | Path, *, home: str = "", author: str = ""
) -> RunnableProgram:
    """Return a compiled program with everything that its nodes need.

    `author` is the Python module of a program that was compiled here, "" for an artifact.
    """
    program = as_graph(artifact.model)
    mains: dict[str, Function] = {main.metadata[keys.HOME_KEY]: main for main in mains_of(program)}
    by_name = {name: _played(program, name, main) for name, main in mains.items()}
    if home not in by_name:
        # A class with inputs starts executions.
        home = next(
            (name for name, played in by_name.items() if played.inputs), next(iter(by_name))
        )
    classes = {home: by_name.pop(home), **by_name}
    # The program's module may bring ops of its own beside components.
    brought = (author,) if author and custom_ops_of(program) else ()
    modules = tuple(dict.fromkeys((*_modules_of(classes), *brought)))
    return RunnableProgram(
        artifact=artifact,
        source=source,
        classes=classes,
        talks=frozenset(_talks(list(mains.values()), classes)),
        modules=modules,
        python_path=tuple(dict.fromkeys(_folders_of(modules))),
        own_settings=_own_settings(classes) if author else {},
    )


def _played(program: Any, name: str, main: Function) -> PlayedClass:
    plan = plan_program(program, [main.name])
    return PlayedClass(
        name=name,
        inputs={each: main.kind_of(each) for each in main.inputs},
        outputs=tuple(main.outputs),
        slots={slot.name: slot for slot in plan.slots},
        parts=plan.targets[0].parts,
    )


def _talks(mains: list[Function], classes: Mapping[str, PlayedClass]) -> Iterator[frozenset[str]]:
    for edge in wire_edges(mains):
        if edge.source is not None:
            yield frozenset((edge.source.metadata[keys.HOME_KEY], edge.to.metadata[keys.HOME_KEY]))
    for name, played in classes.items():
        if any(_sends_by_itself(slot) for slot in played.slots.values()):
            yield from (frozenset((name, other)) for other in classes)


def _sends_by_itself(slot: SlotPlan) -> bool:
    if slot.binding.role != _PROTOCOL:
        return False
    cls = _class_of(slot)
    if cls is None or inbound_ops(cls):
        return True
    return any(
        getattr(cls, name) is not getattr(ProtocolComponent, name) for name in _HOOKS_OF_SENDERS
    )


def _modules_of(classes: Mapping[str, PlayedClass]) -> Iterator[str]:
    """Yield the modules of components that no installed package announces."""
    announced = plugins.names(ENTRY_POINT_GROUP)
    for played in classes.values():
        for slot in played.slots.values():
            if slot.binding.type_name not in announced:
                # The class of an artifact's component may be missing: `install` reports it on the
                # node.
                cls = _class_of(slot)
                if cls is not None:
                    yield cls.__module__


def _folders_of(modules: tuple[str, ...]) -> Iterator[str]:
    """Yield the folders of modules that only this process's working directory made importable."""
    for name in modules:
        top = sys.modules.get(name.partition(".")[0])
        file = next(iter(getattr(top, "__path__", ())), None) or getattr(top, "__file__", None)
        if file is not None and "site-packages" not in Path(file).parts:
            yield os.fspath(Path(file).parent.absolute())


def _own_settings(classes: Mapping[str, PlayedClass]) -> dict[str, dict[str, Any]]:
    own: dict[str, dict[str, Any]] = {}
    for played in classes.values():
        for name, slot in played.slots.items():
            cls = _class_of(slot)
            if cls is None:
                continue
            stored = stored_settings(slot.config)
            mine = {key: stored[key] for key in local_settings(cls.Config) if stored.get(key)}
            if mine:
                own[name] = mine
    return own


def _class_of(slot: SlotPlan) -> Any:
    try:
        return component_class(slot.binding.type_name)
    except UnknownComponentType:
        return None
