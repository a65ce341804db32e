"""Plans of programs, which install makes from an artifact before there is a node.

Rule: a plan is a pure function of (artifact, targets) and immutable; nodes that run the
same artifact may share one. Nothing in it is looked up by name while running: values, slots
and graphs are integers, sites are the bytes that arrive on the wire.

Bindings are in the model's metadata, settings of components in the functions that use a slot.
Targets that are installed together share slots by name, and have to agree on them.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field

from onnx import ModelProto

from bbnode.components.data.shared_schema import SchemaRefused, SharedSchema
from bbnode.components.registry import UnknownComponentType, component_class
from bbnode.engine.bootstrap.targets import BootstrapPlan
from bbnode.engine.errors import (
    BrokenSeal,
    InvalidArtifact,
    MissingInput,
    MissingOp,
    NotCompiled,
    SlotBindingConflict,
    UnknownTarget,
)
from bbnode.engine.frame import EntryPlan
from bbnode.engine.joins import JoinPlan
from bbnode.engine.latches import LatchPlan
from bbnode.engine.ops.build import MethodUse
from bbnode.engine.ops.graphs import GraphSpec
from bbnode.engine.planning.planner import EventSourcePlan, Planner
from bbnode.engine.planning.sites import RecvSite, ResponseSite, answer_types
from bbnode.engine.stores import StorePlan
from bbnode.ir import keys
from bbnode.ir.bounds import OutOfBounds, check_bounds
from bbnode.ir.crossing import Crossing, ModelSize, crossings_of, model_sizes
from bbnode.ir.decoding import shown
from bbnode.ir.flatten import (
    ENGINE_DOMAIN,
    OP_START,
    FlatFunction,
    MalformedFlow,
    check_acyclic,
    check_values,
    flatten,
)
from bbnode.ir.graph import Function, FunctionKey, Program, call_key, is_onnx_domain
from bbnode.ir.onnx_file import model_of, program_of
from bbnode.ir.seal import is_intact
from bbnode.ir.shapes import Dim
from bbnode.ir.slices import (
    INVOKE,
    Alone,
    Slice,
    cut_slices,
    input_parts,
    inputs_alone,
    is_entry,
    part_name,
)
from bbnode.ir.slots import Binding
from bbnode.ir.types import TypeNode


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotPlan:
    """One slot of the node: its binding, its stored config, and who uses it."""

    name: str
    binding: Binding
    config: bytes
    targets: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetPlan:
    """One installed partition."""

    name: str
    peer_class: str
    inputs: Mapping[str, TypeNode | None]
    shapes: Mapping[str, tuple[Dim, ...]]
    invoke: EntryPlan
    events: Mapping[str, EntryPlan]  # of each input, and of each part of several, by `part_name`
    parts: tuple[tuple[str, ...], ...]
    alone: Mapping[str, Alone]  # inputs whose events leave something undone

    def check_event(self, name: str) -> None:
        """Raise MissingInput if an event of an input starts nothing, for want of others."""
        alone = self.alone.get(name)
        if alone is not None and not alone.acts:
            others = ", ".join(alone.needs)
            raise MissingInput(
                f"{self.name}: {shown(name)} starts nothing without {others}, which its ops need "
                "with it; give them together, with invoke"
            )

    def part_of(self, given: Set[str]) -> str | None:
        """Return the entry that takes exactly these inputs; None for `invoke`, which takes all.

        Raises MissingInput.
        """
        if given == self.inputs.keys():
            return None
        begun = [part for part in self.parts if any(name in given for name in part)]
        if len(begun) == 1 and all(name in given for name in begun[0]):
            return part_name(begun[0])
        needed = begun[0] if len(begun) == 1 else self.inputs
        missing = ", ".join(name for name in needed if name not in given)
        others = "; ".join(map(", ".join, self.parts))
        way = f", or those of one part ({others})" if len(self.parts) > 1 else ""
        raise MissingInput(
            f"{self.name}: no value for {missing}; give all inputs{way}, or deliver one alone as "
            "an event"
        )


@dataclass(slots=True, kw_only=True)
class ProgramPlan:
    """Everything that the installed targets need."""

    targets: tuple[TargetPlan, ...]
    slots: tuple[SlotPlan, ...]
    graphs: tuple[GraphSpec, ...]
    sites: Mapping[bytes, RecvSite | ResponseSite]
    sources: tuple[EventSourcePlan, ...]
    joins: tuple[JoinPlan, ...]
    latches: tuple[LatchPlan, ...]
    stores: StorePlan
    bootstraps: tuple[BootstrapPlan, ...]
    methods: tuple[MethodUse, ...]
    unsupported: tuple[str, ...]
    missing_ops: tuple[MissingOp, ...]
    unreachable: tuple[str, ...]
    digest: bytes
    name: str = ""  # of the program: its root Module's
    crossings: tuple[Crossing, ...] = ()
    model_sizes: Mapping[str, ModelSize] = field(default_factory=dict)  # by slot, at its compile
    schemas: Mapping[str, SharedSchema] = field(default_factory=dict)  # as the author says, by slot
    by_name: dict[str, TargetPlan] = field(init=False)
    classes: tuple[str, ...] = field(init=False)  # which its nodes play, in order of the targets

    def __post_init__(self) -> None:
        self.by_name = {target.name: target for target in self.targets}
        self.classes = tuple(dict.fromkeys(target.peer_class for target in self.targets))
        for target in self.targets:
            self.by_name.setdefault(target.peer_class, target)

    def find(self, target: str) -> TargetPlan:
        """Return a target by its name or class; UnknownTarget otherwise."""
        found = self.by_name.get(target)
        if found is None:
            raise UnknownTarget(target, [plan.name for plan in self.targets])
        return found


def plan_program(model: ModelProto | Program, targets: Sequence[str]) -> ProgramPlan:
    """Plan the `targets` (names, or classes) of a compiled model.

    A model whose seal does not fit is refused. One that nobody sealed is taken: what a test or a
    tool puts together is its maker's own; the daemon, which gets artifacts from others, loads
    sealed ones alone. The seal of a `Program` was checked when it was read, or never.

    Raises NotCompiled, BrokenSeal, UnknownTarget, SlotBindingConflict, InvalidArtifact.
    """
    try:
        if isinstance(model, Program):
            program = model
        else:
            check_bounds(model)  # whole: nobody may have looked at it before
            program = program_of(model)
    except OutOfBounds as error:
        raise InvalidArtifact("the model", str(error)) from error
    version = program.metadata.get(keys.COMPILED_KEY)
    if version != keys.COMPILED_CURRENT_VERSION:
        raise NotCompiled(
            "the model is not compiled; run `bbnode compile` on the program first"
            if version is None
            else f"the model was compiled for {shown(version)}, this bbnode runs "
            f"{shown(keys.COMPILED_CURRENT_VERSION)}; compile the program again"
        )
    is_sealed = keys.SEAL_KEY in program.metadata
    if is_sealed and not isinstance(model, Program) and not is_intact(model):
        raise BrokenSeal(
            "the model was changed after it was compiled: its seal does not fit; compile it "
            "again, or seal what you changed (bbnode.ir.seal.seal)"
        )
    all_mains = {f.name: f for f in program.functions if is_main(f)}
    mains = resolve_targets(all_mains, targets)
    library: dict[FunctionKey, Function] = {}
    graphs: dict[FunctionKey, Function] = {}
    for function in program.functions:
        if function.domain == keys.BACKEND_SUBGRAPH_DOMAIN:
            graphs[function.key] = function
        elif not is_main(function):
            library[function.key] = function
    slots = _find_bindings(program.metadata, mains, library)
    for slot in slots:
        # A protocol's ops are known once the module of its component is imported. `install` reports
        # all components that are not installed.
        with contextlib.suppress(UnknownComponentType):
            component_class(slot.binding.type_name)
    planner = Planner(
        graphs, [slot.name for slot in slots], _opsets(program), answer_types(program.functions)
    )
    classes = [class_of(main) for main in all_mains.values()]
    try:
        plans = [_plan_target(main, library, planner) for main in mains]
        bootstraps = _plan_bootstraps(library, mains, classes, planner)
    except MalformedFlow as error:
        raise InvalidArtifact(error.where, error.what) from error
    return ProgramPlan(
        targets=tuple(plans),
        slots=tuple(slots),
        graphs=tuple(planner.graphs),
        sites=planner.sites,
        stores=planner.store_plan(),
        sources=tuple(planner.sources),
        joins=planner.joins,
        latches=tuple(planner.latches),
        methods=tuple(planner.linker.methods),
        bootstraps=tuple(bootstraps),
        unsupported=tuple(planner.unsupported),
        missing_ops=tuple(planner.missing_ops),
        unreachable=tuple(planner.unreachable),
        digest=_digest(model, program, mains),
        name=program.name,
        crossings=crossings_of(mains, all_mains.values()),
        model_sizes=model_sizes(program.metadata),
        schemas=declared_by_slot(program.metadata),
    )


def declared_by_slot(metadata: Mapping[str, str]) -> dict[str, SharedSchema]:
    """Return what a program says of its data, by slot. Raises InvalidArtifact."""
    found = {}
    for key, text in metadata.items():
        if key.startswith(keys.SCHEMA_PREFIX):
            slot = key.removeprefix(keys.SCHEMA_PREFIX)
            try:
                found[slot] = SharedSchema.declared(json.loads(text))
            except (SchemaRefused, ValueError, RecursionError) as error:
                raise InvalidArtifact("the model", f"slot {shown(slot)}: {error}") from error
    return found


def _digest(model: ModelProto | Program, program: Program, mains: Iterable[Function]) -> bytes:
    """Return the digest of artifact and targets, for checks of snapshots and records.

    The seal of a model is its digest, which was verified when the model was read.
    """
    sealed = program.metadata.get(keys.SEAL_KEY)
    if sealed:
        whole = sealed.encode()
    else:
        file = model_of(model) if isinstance(model, Program) else model
        whole = file.SerializeToString(deterministic=True)
    names = "".join(f"\0{main.name}" for main in mains)
    return hashlib.sha256(whole + names.encode()).digest()


def class_of(function: Function) -> str:
    """Return the class that plays a partition main, or is the home of a bootstrap."""
    return function.metadata.get(keys.HOME_KEY) or function.name.split("#")[0]


def is_main(function: Function) -> bool:
    """Return True for the function of a whole partition."""
    return function.metadata.get(keys.TARGET_KEY) == "true"


def resolve_targets(mains: Mapping[str, Function], targets: Sequence[str]) -> list[Function]:
    """Return the mains of `targets`: by exact name, else as `<class>#<hash>`; each once."""
    chosen: dict[str, Function] = {}
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


def _opsets(program: Program) -> dict[str, int]:
    """Return the versions of opsets that the program imports, upstream ONNX as ""."""
    found: dict[str, int] = {}
    for entry in program.opset_imports:
        found.setdefault("" if is_onnx_domain(entry.domain) else entry.domain, entry.version)
    return found


def _cut(flat: FlatFunction, planner: Planner) -> list[Slice]:
    """Return the slices of a flat function, once it is known to be sound."""
    makers = check_values(flat)
    check_acyclic(flat, makers)
    slices, unreachable = cut_slices(flat, makers)
    planner.unreachable += [f"{flat.name}: {flat.ops[p].name}" for p in unreachable]
    planner.report_unsupported(flat)
    return slices


def _plan_target(
    main: Function, library: Mapping[FunctionKey, Function], planner: Planner
) -> TargetPlan:
    if not main.name:
        raise InvalidArtifact("a target", "has no name")
    flat = flatten(main, library)
    pieces = _cut(flat, planner)
    makers = check_values(flat)
    planner.find_latches(flat, pieces)
    built = [(piece, planner.build(flat, piece)) for piece in pieces]
    invoke = next(plan for piece, plan in built if piece.name == INVOKE)
    events = {}
    for piece, plan in built:
        planner.find_left_out(flat, makers, piece, plan)
        if piece.source is not None:
            planner.add_source(flat, piece, plan)
        elif piece.name != INVOKE:
            events[piece.name] = plan
    if len(flat.inputs) == 1:
        events[flat.inputs[0]] = invoke
    return TargetPlan(
        name=main.name,
        peer_class=class_of(main),
        inputs={name: flat.types.get(name) for name in flat.inputs},
        shapes={name: flat.shapes[name] for name in flat.inputs if name in flat.shapes},
        invoke=invoke,
        events=events,
        parts=tuple(input_parts(flat)),
        alone=inputs_alone(flat, check_values(flat)),
    )


# --- bindings --------------------------------------------------------------------------


def _find_bindings(
    metadata: Mapping[str, str],
    mains: Sequence[Function],
    library: Mapping[FunctionKey, Function],
) -> list[SlotPlan]:
    """Return the slots of all targets, in name order.

    Raises InvalidArtifact for a malformed entry and SlotBindingConflict.
    """
    found: dict[str, list[tuple[str, Binding, bytes]]] = {}
    for main in mains:
        prefix = keys.binding_key(main.name, "")
        configs = _stored_configs(main, library)
        for key in sorted(metadata):
            if not key.startswith(prefix):
                continue
            slot = key.removeprefix(prefix)
            fields = metadata[key].split("|")
            if len(fields) != 3 or not slot or not all(fields):
                raise InvalidArtifact(
                    main.name, f"malformed binding {shown(key)}: {shown(metadata[key])}"
                )
            binding = Binding.decode(main.name, slot, metadata[key])
            found.setdefault(slot, []).append((main.name, binding, configs.get(slot, b"")))
    return [_agree(slot, found[slot]) for slot in sorted(found)]


def _agree(slot: str, given: list[tuple[str, Binding, bytes]]) -> SlotPlan:
    _, first, config = given[0]
    same = all(
        (binding.role, binding.type_name, stored) == (first.role, first.type_name, config)
        for _, binding, stored in given
    )
    if not same:
        raise SlotBindingConflict(
            slot,
            [
                (target, f"{b.role} {b.type_name}, config of {len(stored)} bytes")
                for target, b, stored in given
            ],
        )
    return SlotPlan(
        name=slot, binding=first, config=config, targets=tuple(target for target, _, _ in given)
    )


def _stored_configs(main: Function, library: Mapping[FunctionKey, Function]) -> dict[str, bytes]:
    """Return the settings of concrete slots, of the main and of all that it calls."""
    # Bootstraps too, as they may use slots of their own; one name is one slot in all of the model.
    bootstraps = [f for f in library.values() if keys.MODULE_PHASE_KEY in f.metadata]
    configs: dict[str, bytes] = {}
    for function in (main, *_called([*bootstraps, main], library), *bootstraps):
        for name, attribute in function.defaults.items():
            if isinstance(attribute.value, bytes):
                configs.setdefault(name, attribute.value)
    return configs


def _called(callers: Sequence[Function], library: Mapping[FunctionKey, Function]) -> list[Function]:
    """Return the functions that are called, through all calls, each once."""
    found: dict[FunctionKey, Function] = {}
    stack = list(callers)
    while stack:
        for node in stack.pop().nodes:
            key = call_key(node)
            if key in library and key not in found:
                found[key] = library[key]
                stack.append(library[key])
    return list(found.values())


# --- bootstraps ------------------------------------------------------------------------


def _plan_bootstraps(
    library: Mapping[FunctionKey, Function],
    mains: Sequence[Function],
    classes: Sequence[str],
    planner: Planner,
) -> list[BootstrapPlan]:
    """Return the bootstraps of a node that plays `mains`, in the order of these.

    A bootstrap belongs to a node if all slots that it uses, through all of its calls, are bound
    there. One without slots belongs to the nodes of its home class, or to all nodes if `classes`,
    those of all targets, lack that class. It is one execution, which a host starts.
    """
    homes = [class_of(main) for main in mains]
    found: list[tuple[int, BootstrapPlan]] = []
    for function in library.values():
        if not _is_bootstrap(function):
            continue
        flat = flatten(function, library)
        slots = [
            op.node.metadata[keys.SLOT_KEY] for op in flat.ops if keys.SLOT_KEY in op.node.metadata
        ]
        home = function.metadata.get(keys.HOME_KEY) or keys.SELF_CLASS
        elsewhere = not slots and home in classes and home not in homes
        if elsewhere or not all(slot in planner.linker.slots for slot in slots):
            continue
        rank = homes.index(home) if home in homes else len(homes)
        found.append((rank, _plan_bootstrap(function, flat, frozenset(slots), library, planner)))
    return [plan for _, plan in sorted(found, key=lambda entry: entry[0])]


def _is_bootstrap(function: Function) -> bool:
    return function.metadata.get(keys.MODULE_PHASE_KEY) == keys.BOOTSTRAP_PHASE


def _plan_bootstrap(
    function: Function,
    flat: FlatFunction,
    slots: frozenset[str],
    library: Mapping[FunctionKey, Function],
    planner: Planner,
) -> BootstrapPlan:
    for op in flat.ops:
        if op.is_a(keys.SYSCALL_DOMAIN, "Pulse"):  # fires with the start of the bootstrap
            op.domain, op.op_type = ENGINE_DOMAIN, OP_START
        elif is_entry(op):
            planner.unsupported.append(
                f"{flat.name}: {op.name}: {op.op_type} in a bootstrap, where it never fires"
            )
    body = next(piece for piece in _cut(flat, planner) if piece.name == INVOKE)
    called = filter(_is_bootstrap, _called([function], library))
    return BootstrapPlan(
        name=function.name.removesuffix(keys.BOOTSTRAP_SUFFIX),
        inputs={name: flat.types.get(name) for name in flat.inputs},
        shapes={name: flat.shapes[name] for name in flat.inputs if name in flat.shapes},
        plan=planner.build(flat, body),
        touches=frozenset(planner.linker.slot_index(slot, flat.name) for slot in slots),
        includes=frozenset(each.name.removesuffix(keys.BOOTSTRAP_SUFFIX) for each in called),
    )
