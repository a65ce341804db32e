"""Programs: what install makes of an artifact before any node is there.

Rule: a program is a pure function of (artifact, targets) and immutable; nodes that run the
same artifact may share one. Nothing in it is looked up by name while running: values, slots
and graphs are integers, sites are the bytes that arrive on the wire.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from onnx import FunctionProto, ModelProto

from bbnode.components.registry import UnknownComponentType, component_class
from bbnode.engine.bootstrap.planning import plan_bootstraps
from bbnode.engine.bootstrap.targets import BootstrapPlan
from bbnode.engine.errors import InvalidArtifact, NotCompiled, UnknownTarget
from bbnode.engine.frame import EntryPlan
from bbnode.engine.ops.graphs import GraphSpec
from bbnode.engine.planning.bindings import SlotPlan, find_bindings
from bbnode.engine.planning.flatten import FunctionKey, check_acyclic, check_values, flatten
from bbnode.engine.planning.planner import Planner
from bbnode.engine.planning.recv_plan import answer_types
from bbnode.engine.planning.sites import RecvSite, ResponseSite
from bbnode.engine.planning.slices import INVOKE, cut_slices
from bbnode.engine.stores import StorePlan
from bbnode.ir import keys, protos
from bbnode.ir.bounds import OutOfBounds, check_bounds
from bbnode.ir.types import TypeNode


@dataclass(frozen=True, slots=True, kw_only=True)
class EventSourcePlan:
    """An entry that fires by itself.

    `argument`: period of an Interval, kind of an EventSource, phase of a LifecyclePhase.
    """

    kind: str
    argument: int
    plan: EntryPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetPlan:
    """One installed partition."""

    name: str
    peer_class: str
    inputs: Mapping[str, TypeNode | None]
    invoke: EntryPlan
    events: Mapping[str, EntryPlan]


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodUse:
    """A contract method that an op calls."""

    slot: str
    method: str
    where: str


@dataclass(slots=True, kw_only=True)
class Program:
    """Everything that the installed targets need."""

    targets: tuple[TargetPlan, ...]
    slots: tuple[SlotPlan, ...]
    graphs: tuple[GraphSpec, ...]
    sites: Mapping[bytes, RecvSite | ResponseSite]
    sources: tuple[EventSourcePlan, ...]
    stores: StorePlan
    bootstraps: tuple[BootstrapPlan, ...]
    methods: tuple[MethodUse, ...]
    unsupported: tuple[str, ...]
    unreachable: tuple[str, ...]
    digest: bytes
    by_name: dict[str, TargetPlan] = field(init=False)

    def __post_init__(self) -> None:
        self.by_name = {target.name: target for target in self.targets}
        for target in self.targets:
            self.by_name.setdefault(target.peer_class, target)

    def find(self, target: str) -> TargetPlan:
        """A target by its name or class; UnknownTarget otherwise."""
        found = self.by_name.get(target)
        if found is None:
            raise UnknownTarget(target, [plan.name for plan in self.targets])
        return found


def plan_program(model: ModelProto, targets: Sequence[str]) -> Program:
    """Plan the `targets` (names, or classes) of a compiled model.

    Raises NotCompiled, UnknownTarget, SlotBindingConflict, InvalidArtifact.
    """
    try:
        check_bounds(model)
    except OutOfBounds as error:
        raise InvalidArtifact("the model", str(error)) from error
    version = protos.get_meta(model, keys.COMPILED_KEY)
    if version != keys.COMPILED_CURRENT_VERSION:
        raise NotCompiled(
            "the model is not compiled; run `bbnode compile` on the program first"
            if version is None
            else f"the model was compiled for {version!r}, this bbnode runs "
            f"{keys.COMPILED_CURRENT_VERSION!r}; compile the program again"
        )
    mains = resolve_targets(model, targets)
    library: dict[FunctionKey, FunctionProto] = {}
    graphs: dict[FunctionKey, FunctionProto] = {}
    for function in model.functions:
        if function.domain == keys.BACKEND_SUBGRAPH_DOMAIN:
            graphs[protos.function_key(function)] = function
        elif protos.get_meta(function, keys.TARGET_KEY) != "true":
            library[protos.function_key(function)] = function
    slots = find_bindings(model, mains, library)
    for slot in slots:
        # A protocol's ops are known once the module of its component is imported. What is not
        # installed here, `install` tells, all of it at once.
        with contextlib.suppress(UnknownComponentType):
            component_class(slot.binding.type_name)
    planner = Planner(
        graphs, [slot.name for slot in slots], _onnx_version(model), answer_types(model)
    )
    plans = [_plan_target(main, library, planner) for main in mains]
    classes = [
        protos.get_meta(function, keys.HOME_KEY) or function.name.split("#")[0]
        for function in model.functions
        if protos.get_meta(function, keys.TARGET_KEY) == "true"
    ]
    bootstraps = plan_bootstraps(library, mains, classes, planner)
    return Program(
        targets=tuple(plans),
        slots=tuple(slots),
        graphs=tuple(planner.graphs),
        sites=planner.sites,
        stores=planner.store_plan(),
        sources=tuple(
            EventSourcePlan(kind=kind, argument=argument, plan=plan)
            for kind, argument, plan in planner.sources
        ),
        methods=tuple(
            MethodUse(slot=slot, method=method, where=where)
            for slot, method, where in planner.methods
        ),
        bootstraps=tuple(bootstraps),
        unsupported=tuple(planner.unsupported),
        unreachable=tuple(planner.unreachable),
        digest=_digest(model, mains),
    )


def _digest(model: ModelProto, mains: Sequence[FunctionProto]) -> bytes:
    """What snapshots and records are checked against: the artifact, and the targets of it.

    A sealed model says its own digest; it was compared with it when the model was read.
    """
    sealed = protos.get_meta(model, keys.SEAL_KEY)
    whole = sealed.encode() if sealed else model.SerializeToString(deterministic=True)
    names = "".join(f"\0{main.name}" for main in mains)
    return hashlib.sha256(whole + names.encode()).digest()


def resolve_targets(model: ModelProto, targets: Sequence[str]) -> list[FunctionProto]:
    """The partition mains of `targets`: by exact name, else as `<class>#<hash>`; each once."""
    mains = {
        function.name: function
        for function in model.functions
        if protos.get_meta(function, keys.TARGET_KEY) == "true"
    }
    chosen: dict[str, FunctionProto] = {}
    for target in targets:
        names = [target] if target in mains else [n for n in mains if n.split("#")[0] == target]
        if not names:
            raise UnknownTarget(target, mains)
        if len(names) > 1:
            raise UnknownTarget(f"{target} (several)", names)
        chosen[names[0]] = mains[names[0]]
    if not chosen:
        raise UnknownTarget("(none was given)", mains)
    return list(chosen.values())


def _onnx_version(model: ModelProto) -> int:
    versions = [o.version for o in model.opset_import if protos.is_onnx_domain(o.domain)]
    return versions[0] if versions else keys.ONNX_OPSET_VERSION


def _plan_target(
    main: FunctionProto, library: Mapping[FunctionKey, FunctionProto], planner: Planner
) -> TargetPlan:
    if not main.name:
        raise InvalidArtifact("a target", "has no name")
    flat = flatten(main, library)
    makers = check_values(flat)
    check_acyclic(flat, makers)
    slices, unreachable = cut_slices(flat, makers)
    planner.unreachable += [f"{main.name}: {flat.ops[p].name}" for p in unreachable]
    planner.report_unsupported(flat)
    built = [(piece, planner.build(flat, piece)) for piece in slices]
    invoke = next(plan for piece, plan in built if piece.name == INVOKE)
    events = {}
    for piece, plan in built:
        if piece.source is not None:
            planner.add_source(flat, piece, plan)
        elif piece.name != INVOKE:
            events[piece.name] = plan
    if len(flat.inputs) == 1:
        events[flat.inputs[0]] = invoke
    return TargetPlan(
        name=main.name,
        peer_class=protos.get_meta(main, keys.HOME_KEY) or main.name.split("#")[0],
        inputs={name: flat.types.get(name) for name in flat.inputs},
        invoke=invoke,
        events=events,
    )
