"""Installation: a node made from the chosen targets of a compiled model.

Rule: all faults are found here, before anything runs, and are reported together: all missing
component types, all ops that can't run. Components are made once per slot, dependencies first.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from typing import Any

from multiaddr import Multiaddr
from onnx import ModelProto

from bbnode.components.contracts import CONTRACTS, Backend, Component, HostSecrets
from bbnode.components.data.base import MemoryDataSource
from bbnode.components.registry import (
    ConfigTypeMismatch,
    UnknownComponentType,
    build_config,
    component_class,
)
from bbnode.engine.cells import ComponentCell
from bbnode.engine.errors import (
    ComponentConstructionFailed,
    DependencyCycle,
    InvalidArtifact,
    MissingComponents,
    MissingCustomOps,
    MissingDependency,
    RoleMismatch,
    UnknownSlot,
    UnreachableOps,
    UnsupportedOps,
    WrongSignature,
    did_you_mean,
)
from bbnode.engine.limits import Limits
from bbnode.engine.node import Node
from bbnode.engine.ops.graphs import GraphRunner
from bbnode.engine.peers.neighbours import Neighbours
from bbnode.engine.planning.program import ProgramPlan, SlotPlan, plan_program
from bbnode.engine.record.recording import Sink, head_of
from bbnode.engine.runtime import Runtime
from bbnode.engine.signatures import hook_misfits, misfits
from bbnode.ir import keys
from bbnode.ir.errors import BbnodeError
from bbnode.ir.graph import is_onnx_domain
from bbnode.ir.interrupts import let_stop
from bbnode.ir.peer import PeerId

_DEFAULT_LIMITS = Limits()


def install(
    model: ModelProto | ProgramPlan,
    targets: Sequence[str] = (),
    *,
    peer_id: PeerId,
    addresses: Sequence[Multiaddr] = (),
    config: Mapping[str, Mapping[str, Any]] | None = None,
    limits: Limits | None = None,
    seed: int = 0,
    incarnation: int = 1,
    trace: bool = False,
    snapshots: bool = True,
    record: Sink | None = None,
    own_artifact: bool = False,
    secrets: HostSecrets | None = None,
) -> Node:
    """Return a node that plays `targets` of a compiled model.

    Args:
        model: what the compiler returned; or a `ProgramPlan`, which nodes may share.
        targets: target names (`<class>#<hash>`) or classes; not looked at for a `ProgramPlan`.
        config: settings per slot, over those that the artifact stores.
        seed: of the program's draws (RngU64).
        incarnation: grows with every start of this peer, so that ids differ between starts.
        snapshots: save a component's state before each offloaded call that may change it, so
            that `Node.snapshot` works at any time. Without it such a component is busy.
        record: gets the record of the node's life, frame by frame (see `engine.record`);
            `bbnode replay` runs it again.
        own_artifact: the model was made by this machine's user, so that its settings may name files
            and the like (see `bbnode.components.settings`); False for any other artifact.
        secrets: what offloaded methods sign with and draw from (`OpContext.sign`); None where
            nobody may: in a replay.
        trace: report every execution, op and fill (`Node.set_tracing` changes it later).

    Raises:
        NotCompiled, BrokenSeal, UnknownTarget, InvalidArtifact: of the artifact.
        SlotBindingConflict, MissingComponents, RoleMismatch, UnknownSlot, ConfigTypeMismatch,
        LocalSettingRefused, MissingDependency, DependencyCycle, ComponentConstructionFailed: of
        components.
        UnreachableOps, MissingCustomOps, UnsupportedOps, WrongSignature: of what it would run.
    """
    program = model if isinstance(model, ProgramPlan) else plan_program(model, targets)
    classes = _classes(program)
    cells = _make_components(program, classes, config or {}, own_artifact=own_artifact)
    by_slot = {cell.slot: cell for cell in cells}
    for slot, schema in program.schemas.items():
        component = by_slot[slot].component if slot in by_slot else None
        if isinstance(component, MemoryDataSource):  # nothing is loaded for it
            component.adopt(schema)
    unsupported = [*program.unsupported, *_unsupported(program, by_slot)]
    if program.unreachable:
        raise UnreachableOps(program.unreachable)
    if program.missing_ops:
        raise MissingCustomOps(program.missing_ops, unsupported)
    if unsupported:
        raise UnsupportedOps(unsupported)
    wrong = [
        *misfits((use, by_slot[use.slot]) for use in program.methods),
        *hook_misfits(cells),
    ]
    if wrong:
        raise WrongSignature(list(dict.fromkeys(wrong)))
    graphs = []
    for spec in program.graphs:
        backend = by_slot[spec.slot].component
        try:
            graphs.append(GraphRunner(spec, backend))
        except BbnodeError as error:
            raise UnsupportedOps([f"{spec.told(spec.place.of(error))}: {error}"]) from error
    rt = Runtime(
        program,
        neighbours=Neighbours(peer_id, addresses, program.classes),
        cells=cells,
        graphs=graphs,
        limits=limits or _DEFAULT_LIMITS,
        seed=seed,
        incarnation=incarnation,
        keeps_states=snapshots,
        secrets=secrets,
    )
    rt.executor.set_tracing(trace)
    node = Node(rt)
    if record is not None:
        head = head_of(
            program=program.digest,
            model=model if isinstance(model, ModelProto) else None,
            targets=[target.name for target in program.targets],
            peer=peer_id,
            addresses=[bytes(address.to_bytes()) for address in addresses],
            config={slot: dict(settings) for slot, settings in (config or {}).items()},
            limits=dataclasses.asdict(rt.limits),
            seed=seed,
            incarnation=incarnation,
            trace=trace,
            snapshots=snapshots,
        )
        node.record(record, head)
    return node


def _classes(program: ProgramPlan) -> dict[str, type[Component]]:
    """Return the component class of every slot; raises one error for all missing ones."""
    found: dict[str, type[Component]] = {}
    missing: list[tuple[str, str, str]] = []
    for slot in program.slots:
        try:
            found[slot.name] = component_class(slot.binding.type_name)
        except UnknownComponentType as error:
            missing.append((slot.name, slot.binding.type_name, str(error)))
    if missing:
        raise MissingComponents(missing)
    for slot in program.slots:
        contract = CONTRACTS.get(slot.binding.role)
        if contract is None:
            raise InvalidArtifact(
                slot.targets[0], f"slot {slot.name!r} has the unknown role {slot.binding.role!r}"
            )
        if not issubclass(found[slot.name], contract):
            raise RoleMismatch(
                f"slot {slot.name!r} needs a {slot.binding.role}, which "
                f"{slot.binding.type_name} is not"
            )
    return found


def _make_components(
    program: ProgramPlan,
    classes: Mapping[str, type[Component]],
    config: Mapping[str, Mapping[str, Any]],
    *,
    own_artifact: bool,
) -> list[ComponentCell]:
    plans = {slot.name: slot for slot in program.slots}
    for name in config:
        if name not in plans:
            near = did_you_mean(name, plans, f"slots here: {', '.join(plans) or 'none'}")
            raise UnknownSlot(
                f"the config has settings for slot {name!r}, which no installed target uses{near}"
            )
    made: dict[str, Component] = {}
    order = _dependency_order(program, classes)
    needs = _needs(program, classes, order)
    asked_for = {slot for depends in needs.values() for slot in depends.values()}
    depended_on = {slot for cls in classes.values() for slot in cls.depends.values()}
    idle = (depended_on & classes.keys()) - asked_for - {use.slot for use in program.methods}
    for name in order:
        cls = classes[name]
        plan = plans[name]
        given = config.get(name, {})
        try:
            settings = build_config(cls, name, plan.config, given, own_artifact=own_artifact)
        except ConfigTypeMismatch:
            if name not in idle or given:
                raise
            made[name] = _Idle(cls)  # nobody asks it for anything, nor has said what it should be
            continue
        suppliers = {role: made[slot] for role, slot in needs[name].items()}
        made[name] = _construct(plan, cls, settings, suppliers)
    cells = {s.name: ComponentCell(s.name, s.binding, made[s.name]) for s in program.slots}
    for name in idle:
        cells[name].is_needed = False
    _connect(cells)
    return list(cells.values())


class _Idle(Component):
    """Stands where no op of the node uses the component, which lacks settings to be made."""

    def __init__(self, cls: type[Component]) -> None:
        super().__init__(None)
        self.TYPE_NAME = cls.TYPE_NAME  # type: ignore[misc]

    def restore(self, data: bytes) -> None:
        """Leave a state alone that nobody uses."""


def _needs(
    program: ProgramPlan, classes: Mapping[str, type[Component]], order: Sequence[str]
) -> dict[str, dict[str, str]]:
    """Return what the component of each slot depends on here: role to slot.

    A dependency that a class needs only for some methods is left out if no op calls one of them.
    Any method may be called on a component that others depend on.
    """
    called = {(use.slot, use.method) for use in program.methods}
    needed: dict[str, dict[str, str]] = {}
    supplies: set[str] = set()
    for name in reversed(order):  # whoever depends on it comes before
        cls = classes[name]
        needed[name] = {
            role: slot
            for role, slot in cls.depends.items()
            if slot in classes and (name in supplies or _is_called(cls, role, name, called))
        }
        supplies.update(needed[name].values())
    return needed


def _is_called(
    cls: type[Component], role: str, slot: str, called: Collection[tuple[str, str]]
) -> bool:
    """Return True if ops call what needs a dependency."""
    methods = cls.needed_for.get(role)
    return methods is None or any((slot, method) in called for method in methods)


def _connect(cells: Mapping[str, ComponentCell]) -> None:
    """Set the cells that a thread of each cell may use; backends are not locked."""
    used_by: dict[str, list[ComponentCell]] = {name: [] for name in cells}
    for name, cell in cells.items():
        found: dict[str, None] = {}
        stack = [slot for slot in cell.component.depends.values() if slot in cells]
        while stack:
            slot = stack.pop()
            if slot != name and slot not in found:
                found[slot] = None
                stack.extend(s for s in cells[slot].component.depends.values() if s in cells)
        uses = [slot for slot in found if not isinstance(cells[slot].component, Backend)]
        cell.uses = tuple(cells[slot] for slot in sorted(uses))
        for slot in uses:
            used_by[slot].append(cell)
    for name, users in used_by.items():
        cells[name].used_by = tuple(users)


def _construct(
    plan: SlotPlan, cls: type[Component], settings: Any, suppliers: Mapping[str, Component]
) -> Component:
    try:
        component = cls(settings)
        component.bind(suppliers)
    except BbnodeError:
        raise
    except BaseException as error:
        let_stop(error)
        raise ComponentConstructionFailed(
            f"slot {plan.name!r}: {cls.TYPE_NAME} can't be made: {type(error).__name__}: {error}; "
            "check its settings, or report it to its author"
        ) from error
    return component


def _dependency_order(program: ProgramPlan, classes: Mapping[str, type[Component]]) -> list[str]:
    """Return the slots, every component after those that it depends on."""
    called = {(use.slot, use.method) for use in program.methods}
    supplies = {slot for cls in classes.values() for slot in cls.depends.values()}
    for name, cls in classes.items():
        for role, slot in cls.depends.items():
            if slot not in classes and (name in supplies or _is_called(cls, role, name, called)):
                raise MissingDependency(
                    f"slot {name!r}: {cls.TYPE_NAME} depends on slot {slot!r} ({role}), which "
                    "nothing is bound to; bind it when compiling"
                )
    slots = {
        name: [slot for slot in cls.depends.values() if slot in classes]
        for name, cls in classes.items()
    }
    try:
        return list(TopologicalSorter(slots).static_order())
    except CycleError as error:
        ring = " -> ".join(reversed(error.args[1]))
        raise DependencyCycle(f"components depend on each other in a ring: {ring}") from error


def _unsupported(program: ProgramPlan, cells: Mapping[str, ComponentCell]) -> list[str]:
    """Return methods that components lack, and `ai.onnx` ops that backends do not have."""
    found = []
    for use in program.methods:
        cell = cells[use.slot]
        if not callable(getattr(cell.component, use.method, None)):
            found.append(
                f"{use.where}: slot {use.slot!r}: {cell.binding.type_name} has no {use.method}()"
            )
    for spec in program.graphs:
        backend = cells[spec.slot].component
        if not isinstance(backend, Backend):
            found.append(f"{spec.where}: slot {spec.slot!r} holds no backend")
            continue
        for node in spec.graph.all_nodes():
            domain = "" if is_onnx_domain(node.domain) else node.domain
            version = spec.opsets.get(domain, 0)
            if domain not in ("", keys.ONNX_ML_DOMAIN, keys.RUNTIME_DOMAIN):
                where = spec.told(spec.place.at(node.name))
                found.append(f"{where}: {domain}::{node.op_type} inside of a graph")
            elif not backend.supports(node.op_type, version, domain):
                where = spec.told(spec.place.at(node.name))
                found.append(
                    f"{where}: {domain or keys.ONNX_DOMAIN}::{node.op_type} "
                    f"(opset {version}) on {backend.TYPE_NAME}"
                )
    return list(dict.fromkeys(found))
